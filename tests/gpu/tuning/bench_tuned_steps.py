"""Decode steps of a whole model with the tables of ``pagebus tune`` and without, replayed by turns.

    python -m tests.gpu.tuning.bench_tuned_steps FOLDER --launch-shapes-dir DIR [--rows 1 8 32 128] [--context 576]

FOLDER has a ``config.json``, or is one of SHAPES. The ratio is that of medians of one process on one GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from pagebus.actors.executor.tuning.step_timer import compared, replay_pairs
from pagebus.kernels.common.user_tables import read_user_tables
from tests.gpu.bench.decode_step import DecodeStep

PAIRS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="one of SHAPES, or a folder with a config.json")
    parser.add_argument("--launch-shapes-dir", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=576)
    arguments = parser.parse_args()
    most = max(arguments.rows)
    step = DecodeStep(arguments.model, most, arguments.context, most * (arguments.context + 16))
    print(torch.cuda.get_device_name(), arguments.model, f"context {arguments.context}", flush=True)
    for rows in arguments.rows:
        graphs = []
        for folder in (None, arguments.launch_shapes_dir):
            read_user_tables(folder)
            graphs.append(step.capture(rows, arguments.context))
        found = compared(*replay_pairs(graphs[0], graphs[1], PAIRS))
        print(
            f"{rows:>4} rows: {found.before:.3f} ms untuned, {found.after:.3f} tuned "
            f"({found.saved / found.before:+.2%} saved, standard error {found.error / found.before:.2%})", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
