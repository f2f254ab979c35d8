"""What decode steps cost that verify drafts: ms per step and per token, when all drafts are right and when none is.

    python -m tests.gpu.speculation.bench_drafts llama8b [--drafts 4] [--batches 1 8 32 128 256]
        [--modes off idle none full] [--repeats 1] [--tokens 129] [--json FILE] [--draft-shape qwen06b | --mtp]

As in :mod:`tests.gpu.bench.bench_step`: random weights of the published shapes, prompts of 512 tokens, plans made
beforehand, two in flight; no bus, no scheduler. ``off`` is an engine without speculation. The others are one with the
lookup: ``idle`` finds no drafts, ``none`` and ``full`` as many as may be in each row of each step. The model says one
token only (:mod:`tests.gpu.speculation.drafted_plans`), in all modes. ``tokens`` says how many came of a row and step.

Before each measurement the same is run untimed, of fewer tokens, and all graphs are captured before the first: the line
with ``#`` says how long that took, and how many blocks are left beside them.

With ``--core`` the scheduler's core makes the plans, so it chooses how many drafts there are: by what becomes of them
and what they cost, and whether a step looks up any at all.

With ``--draft-shape`` a model of that shape drafts, with the vocabulary of the other. ``idle`` steps have no drafts,
and show what it costs to keep its cache; in ``none`` its drafts are wrong. With ``--mtp`` an MTP layer drafts: the
model must be deepseek-v2-lite, which is then a DeepSeek-V3 of these sizes with one such layer.

With ``--cpu`` a tiny model is measured, to see that all this works.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder
from pagebus.bus.messages import StepPlan
from tests.actors.executor.speculation.test_mtp import made
from tests.gpu.bench.bench_step import DEPTH, PROMPT_TOKENS, run_plans
from tests.gpu.speculation.drafted_plans import MODES, TOKEN, DraftedScheduler, prepare
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference

MTP = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
WARM_STEPS = 6
WARM_TOKENS = 65
"""Of each sequence of an untimed run before each measurement: what is launched there for the first time is compiled or
loaded."""


def prompts(driver: Driver, batch: int, num_tokens: int) -> list[list[int]]:
    """They end as they go on."""
    length = min(PROMPT_TOKENS, driver.info.max_model_len - num_tokens) - 8
    return [[2 + (number + place) % 200 for place in range(length)] + [TOKEN] * 8 for number in range(batch)]


def make_plans(driver: Driver, batch: int, drafts: int, mode: str, num_tokens: int) -> list[StepPlan]:
    """Every plan of ``batch`` greedy sequences of ``num_tokens`` tokens."""
    scheduler = DraftedScheduler(driver, drafts if mode in ("none", "full") else 0, right=mode == "full")
    for prompt in prompts(driver, batch, num_tokens):
        scheduler.add(prompt, num_tokens, temperature=0.0)
    plans = []
    while (plan := scheduler.plan()) is not None:
        plans.append(plan)
    return plans


def is_decode(plan: StepPlan, batch: int) -> bool:
    """Whether all sequences decode."""
    return len(plan.slots) == batch and int(plan.num_scheduled.max()) <= 17 and not plan.new_sequences


def measure(driver: Driver, batch: int, drafts: int, mode: str, num_tokens: int) -> dict[str, Any]:
    """Figures of one batch size and mode."""
    plans = make_plans(driver, batch, drafts, mode, num_tokens)
    prepare(driver, mode)
    first = next(number for number, plan in enumerate(plans) if is_decode(plan, batch)) + WARM_STEPS
    run_plans(driver, plans[:first])
    stats = driver.engine.stats
    busy_s, host_s, steps, began = stats.busy_s, stats.host_s, stats.steps, time.perf_counter()
    results = run_plans(driver, plans[first:-1])
    wall_s, count = time.perf_counter() - began, stats.steps - steps
    tokens = sum(len(result.token_ids) for result in results) / len(results) / batch
    step_ms = statistics.median((b.done_s - a.done_s) * 1e3 for a, b in itertools.pairwise(results))
    return {
        "mode": mode,
        "batch": batch,
        "step_ms": step_ms,
        "tokens": tokens,
        "token_ms": step_ms / tokens,
        "device_ms": (stats.busy_s - busy_s) / count * 1e3,
        "host_ms": (stats.host_s - host_s) / count * 1e3,
        "busy_share": (stats.busy_s - busy_s) / wall_s,
    }


def measure_core(driver: Driver, batch: int, mode: str, num_tokens: int) -> dict[str, Any]:
    """The same with the scheduler's core, from the step on behind which all sequences have a token."""
    core = CoreDriver(driver, enable_prefix_caching=False)
    prepare(driver, mode)
    for number, prompt in enumerate(prompts(driver, batch, num_tokens)):
        core.send(str(number), prompt, num_tokens)
    core.run(until=lambda: all(answer.tokens for answer in core.answers.values()))
    stats, known = driver.engine.stats, sum(len(answer.tokens) for answer in core.answers.values())
    busy_s, host_s, steps, began = stats.busy_s, stats.host_s, stats.steps, time.perf_counter()
    core.run()
    wall_s, count = time.perf_counter() - began, stats.steps - steps
    tokens = sum(len(answer.tokens) for answer in core.answers.values()) - known
    return {
        "mode": mode,
        "batch": batch,
        "step_ms": wall_s / count * 1e3,
        "tokens": tokens / count / batch,
        "token_ms": wall_s / tokens * batch * 1e3,
        "device_ms": (stats.busy_s - busy_s) / count * 1e3,
        "host_ms": (stats.host_s - host_s) / count * 1e3,
        "busy_share": (stats.busy_s - busy_s) / wall_s,
        "drafts": core.replica.step_results.acceptance.num_draft_tokens,
    }


def measure_one(
    driver: Driver, batch: int, mode: str, arguments: argparse.Namespace, num_tokens: int
) -> dict[str, Any]:
    """As the arguments say, of so many tokens."""
    if arguments.core:
        return measure_core(driver, batch, mode, num_tokens)
    return measure(driver, batch, arguments.drafts, mode, num_tokens)


def rows_of(driver: Driver, modes: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All batches and modes of one engine; of repeated measurements the one whose step is the median."""
    rows = []
    for batch, mode in itertools.product(arguments.batches, modes):
        measure_one(driver, batch, mode, arguments, min(WARM_TOKENS, arguments.tokens))
        runs = [measure_one(driver, batch, mode, arguments, arguments.tokens) for _ in range(arguments.repeats)]
        rows.append(sorted(runs, key=lambda run: float(run["step_ms"]))[len(runs) // 2])
        print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['mode']:>6} {row['batch']:>6} {row['step_ms']:>9.3f} {row['tokens']:>8.2f} {row['token_ms']:>10.3f} "
        f"{row['device_ms']:>9.3f} {row['host_ms']:>9.3f} {row['busy_share']:>7.1%}",
        flush=True,
    )


def bench(folder: Path, arguments: argparse.Namespace, **settings: Any) -> list[dict[str, Any]]:
    """One engine without speculation, then one with it."""
    rows: list[dict[str, Any]] = []
    drafter = drafter_of(folder, arguments)
    for given, modes in (({"spec_method": "none"}, ["off"]), (drafter, [mode for mode in MODES if mode != "off"])):
        modes = [mode for mode in modes if mode in arguments.modes]
        if not modes:
            continue
        gc.collect()
        began = time.perf_counter()
        driver = Driver(folder, max_num_seqs=max(arguments.batches), pipeline_depth=DEPTH, **given, **settings)
        ready_s = time.perf_counter() - began
        if driver.info.device != "cpu" and torch.cuda.is_available():
            driver.synchronize()  # all graphs are there
        print(
            f"# ready in {ready_s:.1f} s, all graphs after {time.perf_counter() - began:.1f} s, "
            f"{driver.info.num_blocks} blocks of {driver.info.block_size} tokens"
        )
        rows += rows_of(driver, modes, arguments)
        driver.close()
        del driver
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()
    return rows


def drafter_of(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings of what drafts for the model in ``folder``."""
    if arguments.mtp:
        return {"spec_method": "mtp", "spec_tokens": arguments.drafts}
    if arguments.draft_shape is None:
        return {
            "spec_method": "ngram", "spec_tokens": arguments.drafts, "prompt_lookup_min": 2, "prompt_lookup_max": 5
        }  # fmt: skip
    draft = write_model_folder(arguments.draft_shape, folder.parent / "draft")
    change(draft, vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"])
    return {"spec_method": "draft_model", "spec_tokens": arguments.drafts, "spec_model": str(draft)}


def change(folder: Path, **fields: Any) -> Path:
    """``folder``, with other fields in its configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draft-shape", choices=sorted(SHAPES), help="a model of this shape drafts, not the lookup")
    parser.add_argument("--mtp", action="store_true", help="an MTP layer drafts")
    parser.add_argument("--core", action="store_true", help="plans are made by the scheduler's core")
    parser.add_argument("--cpu", action="store_true", help="a tiny model, to see that this works")
    arguments = parser.parse_args()
    columns = ("mode", "batch", "step ms", "tokens", "ms/token", "device ms", "host ms", "busy")
    print(" ".join(f"{name:>{width}}" for name, width in zip(columns, (6, 6, 9, 8, 10, 9, 9, 7), strict=True)))
    with tempfile.TemporaryDirectory() as parent:
        if arguments.cpu:
            folder = Path(parent)
            folder = made(folder, "deepseek") if arguments.mtp else make_reference(folder, REFERENCE_CONFIGS[0])
            rows = bench(folder, arguments, device="cpu", dtype="float32", max_model_len=256)
        else:
            folder = write_model_folder(arguments.model, Path(parent))
            if arguments.mtp:
                change(folder, **MTP)
            rows = bench(folder, arguments, device="cuda", load_format="dummy", max_model_len=8192)
    if arguments.json:
        arguments.json.write_text(json.dumps({"drafts": arguments.drafts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
