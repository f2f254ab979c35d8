"""What steps launch, beside what `explain` says of them: `python launched_kernels.py FOLDER SM SETTINGS`.

A process of its own, because Triton's driver is exchanged and its interpreter must be off. Prints a JSON array of
steps as of ``pagebus explain --json``, each with the names of the ``launched`` kernels.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pagebus.actors.executor.explain import AbsentEngine
from pagebus.actors.executor.graphs.graphs import empty_step, padded_pass
from pagebus.actors.executor.graphs.piecewise_graphs import run_pieces
from pagebus.actors.executor.loading.compilation import AbsentGpu, Recorder
from pagebus.actors.executor.loading.compile_command import parse_target
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings


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


def main() -> None:
    folder, name, given = sys.argv[1:]
    sys.modules.setdefault("torch._dynamo", SimpleNamespace(disable=lambda function, *_, **__: function))  # type: ignore[arg-type]
    target = parse_target(name, None)
    driver.set_active(AbsentGpu(target))
    engine = AbsentEngine(Settings(model=folder, **json.loads(given)), ModelConfig.load(Path(folder)), target)
    with torch.inference_mode(), Recorder(set(), lambda kernel: None):
        steps = [
            step.as_json() | {"launched": sorted(launched(engine, step.decodes, step.prompt_tokens))}
            for step in engine.steps()
        ]
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
