"""What steps launch, beside what `explain` says of them: `python launched_kernels.py SM CASES`.

A process of its own, because Triton's driver is exchanged and its interpreter must be off. Cases are a JSON array of
pairs: a model's folder, and settings. Prints a JSON array for each on a line of its own: steps as of ``pagebus explain
--json``, with the names of the ``launched`` kernels.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pagebus.actors.executor.explain import AbsentEngine
from pagebus.actors.executor.graphs.graphs import empty_step, padded_pass
from pagebus.actors.executor.graphs.piecewise_graphs import run_pieces
from pagebus.actors.executor.loading.compilation import AbsentGpu, Recorder, leave_out_torch_compile
from pagebus.actors.executor.loading.compile_command import parse_target
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings
from pagebus.kernels.common.target import Target


def launched(engine: AbsentEngine, decodes: int, prompt_tokens: int) -> set[str]:
    """Names of the kernels that a step launches."""
    runner, names = engine.runner, set()
    run = JITFunction.run

    def noting(self: Any, *arguments: Any, **words: Any) -> Any:
        names.add(self.fn.__name__)
        return run(self, *arguments, **words)

    JITFunction.run = noting
    try:
        launch, work = engine.launch(decodes, prompt_tokens)
        if launch.whole is not None:
            runner.uploader.send(empty_step(), launch.whole)
            padded_pass(runner, launch.whole)
        elif launch.pieces is not None:
            run_pieces(runner.model, runner.tokens(launch.pieces.tokens))
            runner.run(work)  # attention as between pieces
        else:
            runner.run(work)
    finally:
        JITFunction.run = run
    return names


def steps_of(folder: str, changes: dict[str, Any], target: Target) -> list[dict[str, Any]]:
    """All steps of a model, as JSON."""
    engine = AbsentEngine(Settings(model=folder, **changes), ModelConfig.load(Path(folder)), target)
    return [
        step.as_json() | {"launched": sorted(launched(engine, step.decodes, step.prompt_tokens))}
        for step in engine.steps()
    ]


def main() -> None:
    name, cases = sys.argv[1:]
    leave_out_torch_compile()
    target = parse_target(name, None)
    driver.set_active(AbsentGpu(target))
    with torch.inference_mode(), Recorder(set(), lambda kernel: None):
        for folder, changes in json.loads(cases):
            print(json.dumps(steps_of(folder, changes, target)))


if __name__ == "__main__":
    main()
