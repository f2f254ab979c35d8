"""Decode steps whose products the library multiplies by the algorithm that fills its rounds, and by its own choice.

    python -m tests.gpu.cublas.bench_steps FOLDER... [--rows 128 192 256] [--context 576] [--ranks 1]

Both are replayed by turns in one process. FOLDER has a ``config.json``, or is one of SHAPES.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from pagebus.actors.executor.tuning.step_timer import compared, replay_pairs
from pagebus.kernels.cublas import product
from tests.gpu.bench.decode_step import DecodeStep

PAIRS = 30


@contextmanager
def librarys_own_choice() -> Iterator[None]:
    """In this block the library chooses all algorithms."""
    with mock.patch.object(product, "_may_choose", return_value=False):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="each one of SHAPES, or a folder with a config.json")
    parser.add_argument("--rows", nargs="+", type=int, default=[128, 192, 256])
    parser.add_argument("--context", type=int, default=576)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    most = max(arguments.rows)
    print(torch.cuda.get_device_name(), f"context {arguments.context}, {arguments.ranks} ranks", flush=True)
    for model in arguments.models:
        step = DecodeStep(model, most, arguments.context, most * (arguments.context + 16), world=arguments.ranks)
        for rows in arguments.rows:
            with librarys_own_choice():
                before = step.capture(rows, arguments.context)
            after = step.capture(rows, arguments.context)
            found = compared(*replay_pairs(before, after, PAIRS))
            print(
                f"{model} {rows:>4} rows: {found.before:.3f} ms by the library's choice, {found.after:.3f} by ours "
                f"({found.saved / found.before:+.2%} saved, standard error {found.error / found.before:.2%})",
                flush=True,
            )
            del before, after
        del step
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
