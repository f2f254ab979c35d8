"""What the host does for a decode step whose sequences follow a grammar: on any machine, without a model.

    python -m tests.actors.executor.sampling.bench_grammars [--batch 64] [--steps 150] [--repeats 5] [--tokenizer
    tokenizer.json]

64 sequences follow the schema of :mod:`tests.gpu.bench.bench_grammars` over a vocabulary of 151,936 tokens, from their
first token on, and sample evenly among the possible ones. Timed is what the device thread does between the tokens of
one step and the masks of the next. The same steps are repeated and each counts with its shortest time, so that other
programs on the machine disturb little; beside it stands the computing time of all threads.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from pagebus.actors.bench.driver.shapes import write_model_folder
from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.sampling.grammars import Grammars
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.grammars.grammar import load_vocabulary, write_grammar
from pagebus.bus.messages import StepPlan, StructuredOutput
from tests.gpu.bench.bench_grammars import SCHEMA
from tests.helpers.engine_driver import Grown, ints, new_sequence


def run(grammars: Grammars, grammar: str, batch: int, steps: int, vocab_size: int) -> list[tuple[float, float]]:
    """Seconds of each step, by the clock and of computing."""
    rng, rows = np.random.default_rng(0), np.arange(batch, dtype=np.int32)
    sequences = [Grown(slot, [0], steps, {"grammar": grammar}, slot=slot) for slot in range(batch)]
    plan = StepPlan(
        step=1, planned_s=0.0, num_decodes=0, new_sequences=tuple(map(new_sequence, sequences)),
        new_token_ids=ints([0] * batch),
    )  # fmt: skip
    grammars.prepare(plan)
    grammars.apply(plan)
    none = ints([])
    work = StepWork(
        num_decodes=batch, num_tokens=batch, max_query_len=1, max_context_len=1, slots=rows, starts=none,
        query_start=none, positions=none, indexes=none, hidden_index=none, context_lens=none, sample_slots=rows,
        sequence_ids=rows, length_ended=none, can_stop=none, end_ids=none, deltas={}, constrained=rows,
    )  # fmt: skip
    durations = []
    for _ in range(steps):
        began, computed = time.perf_counter(), time.process_time()
        masks = grammars.masks(work)
        durations.append((time.perf_counter() - began, time.process_time() - computed))
        allowed = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
        grammars.launched(work)
        grammars.landed(ints([int(rng.choice(np.flatnonzero(row))) for row in allowed]))
    return durations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokenizer", type=Path)
    arguments = parser.parse_args()
    grammar = write_grammar(StructuredOutput(kind="json", text=json.dumps(SCHEMA), field="bench"))
    with tempfile.TemporaryDirectory() as parent:
        folder = write_model_folder("qwen06b", Path(parent))
        if arguments.tokenizer:
            shutil.copy(arguments.tokenizer, folder / "tokenizer.json")
        config = ModelConfig.load(folder)
        vocabulary = load_vocabulary(folder, config)
    limits = BatchLimits(
        max_num_seqs=arguments.batch, max_model_len=4096, max_num_batched_tokens=4096, block_size=16, num_blocks=1,
        vocab_size=config.vocab_size,
    )  # fmt: skip
    repeats = []
    for _ in range(arguments.repeats):
        grammars = Grammars(limits, lambda: vocabulary, config.eos_token_ids, pinned=False)
        repeats.append(run(grammars, grammar, arguments.batch, arguments.steps, config.vocab_size))
        grammars.close()
    shortest_ms = 1e3 * np.array(repeats).min(0)[1:]  # the first step makes the grammar ready
    for what, each in zip(("by the clock", "computing"), shortest_ms.T, strict=True):
        print(
            f"{arguments.batch} sequences, {what}: {each.mean():.2f} ms a step, "
            f"median {np.median(each):.2f}, p90 {np.quantile(each, 0.9):.2f}"
        )


if __name__ == "__main__":
    main()
