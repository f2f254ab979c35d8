"""What a grammar adds to a decode step: the engine alone, as in :mod:`tests.gpu.bench_step`, with 64 sequences.

    python -m tests.gpu.bench_grammars llama8b qwen06b [--batch 64] [--tokenizer tokenizer.json]

Each model's step with plain sampling, with top-p (which is sampled apart from the graph, as grammars are), and with all
sequences following one JSON schema: a long array of objects with strings, numbers, enums and patterns. Masks of some
states take long, so the mean counts beside the median. Without a tokenizer nearly all tokens are a blank and a number.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from actors.bench.shapes import SHAPES, write_model_folder
from actors.grammar import write_grammar
from bus.messages import StructuredOutput
from tests.engine_driver import Driver
from tests.gpu.bench_step import DEPTH, measure

SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 60},
            "code": {"type": "string", "pattern": "^[A-Z]{2,4}-[0-9]{3,9}$"},
            "amount": {"type": "number", "minimum": 0, "maximum": 100000},
            "state": {"enum": ["open", "closed", "in progress"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        },
        "required": ["name", "code", "amount", "state", "tags"],
        "additionalProperties": False,
    },
}


def variants() -> dict[str, dict[str, Any]]:
    """Parameters of the sequences, by name."""
    wanted = StructuredOutput(kind="json", text=json.dumps(SCHEMA), field="bench")
    return {"plain": {}, "top-p": {"top_p": 0.9}, "grammar": {"grammar": write_grammar(wanted)}}


def bench_model(name: str, batch: int, tokenizer: Path | None) -> dict[str, Any]:
    """All variants in one engine; each twice, the first time to warm up."""
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as parent:
        folder = write_model_folder(name, Path(parent))
        if tokenizer:
            shutil.copy(tokenizer, folder / "tokenizer.json")
        driver = Driver(
            folder, device="cuda", load_format="dummy", max_model_len=4096, max_num_seqs=batch, pipeline_depth=DEPTH
        )
        driver.synchronize()  # all graphs are there
        rows = {}
        for variant, params in variants().items():
            measure(driver, batch, **params)
            rows[variant] = row = measure(driver, batch, **params)
            row["step_mean_ms"] = row["device_ms"] / row["busy_share"]
            added = row["step_ms"] / rows["plain"]["step_ms"] - 1
            print(
                f"{name} batch {batch} {variant:>8}: step {row['step_ms']:.3f} ms "
                f"(mean {row['step_mean_ms']:.3f}, p99 {row['step_p99_ms']:.3f}), "
                f"device {row['device_ms']:.3f}, host {row['host_ms']:.3f}, {added:+.1%}",
                flush=True,
            )
        driver.close()
    return {"model": name, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokenizer", type=Path)
    arguments = parser.parse_args()
    print(json.dumps([bench_model(name, arguments.batch, arguments.tokenizer) for name in arguments.models]))


if __name__ == "__main__":
    main()
