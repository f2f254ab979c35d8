"""Decode steps of short models with each form of attention, replayed by turns with the usual one.

    python -m tests.gpu.tuning.bench_forms FOLDER... [--rows 32] [--contexts 512 576 384-640 4096] [--whole] [--warm]

FOLDER has a ``config.json``. One graph serves all contexts; of ``384-640`` the rows' lengths are spread evenly. A line
has the step with the usual form in milliseconds, and what each other one saves, with its standard error.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from pagebus.actors.executor.tuning.changes import Measurable
from pagebus.actors.executor.tuning.compiler import StepCompiler, Wanted
from pagebus.actors.executor.tuning.decode_step import DecodeStep
from pagebus.actors.executor.tuning.short_model import shortened
from pagebus.actors.executor.tuning.step_timer import compared, replay_pairs
from pagebus.actors.executor.tuning.tables import scratch_tables
from pagebus.actors.model.config import ModelConfig
from pagebus.kernels.attention.forms.form import FORMS, DecodeHeads
from pagebus.kernels.common.target import first_target

CUDA = torch.device("cuda", 0)
PAIRS = 24
ROOM = 4 * 2**30
"""Bytes of a cache at most; rows share blocks where that is not enough."""


def lengths_of(context: str, rows: int) -> list[int]:
    """Of ``rows`` rows."""
    first, _, last = context.partition("-")
    spread = int(last or first) - int(first)
    return [int(first) + spread * row // max(1, rows - 1) for row in range(rows)]


def bench(folder: str, rows: list[int], contexts: list[str], *, whole: bool, warm: bool) -> None:
    target = first_target()
    assert target is not None
    config = ModelConfig.load(Path(folder))
    config = config if whole else shortened(config)
    bf16, lengths = torch.bfloat16, {(count, each): lengths_of(each, count) for count in rows for each in contexts}
    heads = DecodeHeads(config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim, 2)
    todo = Measurable([], None, heads)
    if warm:
        with StepCompiler(Wanted(config, bf16, bf16, "auto"), todo, target) as compiler:
            for count in rows:
                compiler.begin(count, [{heads: form} for form in FORMS])
            for _ in rows:
                compiler.wait()
        return
    about = torch.cuda.get_device_name(), folder, heads.name, f"{config.num_layers} layers"
    print(*about, "usual", *FORMS[1:], sep=" | ", flush=True)
    tokens = min(max(sum(each) for each in lengths.values()) + 16 * max(rows), ROOM // (2 * config.spec.kv_numbers()))
    step = DecodeStep(config, CUDA, max(rows), max(max(each) for each in lengths.values()), tokens)
    with scratch_tables(target, todo) as tables:
        for count in rows:
            graphs = []
            for form in FORMS:
                tables.put(count, {heads: form})
                graphs.append(step.capture(count, lengths[count, contexts[0]]))
            for context in contexts:
                step.send(count, lengths[count, context])
                found = [compared(*replay_pairs(graphs[0], graph, PAIRS)) for graph in graphs[1:]]
                saved = (f"{each.saved / each.before:+7.2%} ±{each.error / each.before:.2%}" for each in found)
                print(f"{count:>4} x {context:9} {found[0].before:7.3f} ms", *saved, sep=" | ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders with a config.json")
    parser.add_argument("--rows", nargs="+", type=int, default=[32])
    parser.add_argument("--contexts", nargs="+", default=["512", "576", "640", "384-640", "1024", "4096"])
    parser.add_argument("--whole", action="store_true", help="all layers, not those of a short model")
    parser.add_argument("--warm", action="store_true", help="compile only, in many processes")
    arguments = parser.parse_args()
    torch.cuda.set_device(CUDA)
    for model in arguments.models:
        bench(model, arguments.rows, arguments.contexts, whole=arguments.whole, warm=arguments.warm)


if __name__ == "__main__":
    main()
