"""Checks structured-output requests in a separate process, and rejects those that take too much computing time or
memory.

The process starts with the first structured output, and answers line by line (JSON). Verdicts are cached, so that each
schema is checked once. A check that came to no end is not cached, because it may have had other causes.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from msgspec import structs

from pagebus.actors.model.config import ModelConfig, resolve_model, resolve_tokenizer
from pagebus.actors.model.grammars.grammar import (
    GrammarError,
    check_matcher,
    load_vocabulary,
    make_matcher,
    write_grammar,
)
from pagebus.actors.settings import Settings
from pagebus.actors.tokenizer.trial_process import READY, Died, OutOfTime, TrialProcess
from pagebus.bus.messages import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_MEMORY_BYTES = 4 * 2**30
MAX_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Verdict:
    """``grammar``: the form that executors take; empty if it was refused, for the reason ``problem``."""

    grammar: str = ""
    problem: str = ""


class GrammarChecker:
    """Gives verdicts for one model; one trial at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cpu_s = settings.structured_output_timeout_s
        self.process = TrialProcess(self._command)
        self._trying = asyncio.Lock()
        self._kept: OrderedDict[StructuredOutput, Verdict] = OrderedDict()

    def known(self, wanted: StructuredOutput) -> Verdict | None:
        """The verdict, if there is one already."""
        verdict = self._kept.get(wanted)
        if verdict is not None:
            self._kept.move_to_end(wanted)
        return verdict

    async def check(self, wanted: StructuredOutput) -> Verdict:
        """The verdict on ``wanted``; tries it out if it is not known.

        Raises:
            OSError, TimeoutError: it could not be tried.
        """
        async with self._trying:
            return self.known(wanted) or await self._try(wanted)

    async def at_fault(self, wanted: StructuredOutput, problem: str, tools: Sequence[Any]) -> tuple[str, str]:
        """The field at fault where ``wanted`` was refused for ``problem``, and what is wrong with it: the schema of one
        of the ``tools`` whose calls it may hold, if that is refused alone.

        Raises:
            OSError, TimeoutError: a schema could not be tried.
        """
        holds_calls = wanted.field == "tools" or wanted.kind == "structural_tag"
        if holds_calls and self.known(wanted) is not None:  # else it took too long, as each of them may
            for index, tool in enumerate(tools):
                field = f"tools[{index}].function.parameters"
                text = orjson.dumps({"type": "object", **tool["function"].get("parameters", {})}).decode()
                verdict = await self.check(StructuredOutput(kind="json", text=text, field=field))
                if verdict.problem:
                    return field, verdict.problem
        return wanted.field, problem

    async def _try(self, wanted: StructuredOutput) -> Verdict:
        try:
            verdict = Verdict(**orjson.loads(await self.process.ask(orjson.dumps(structs.asdict(wanted)))))
        except OutOfTime:
            return Verdict(problem=f"is too complex: it could not be made ready within {self._cpu_s:g} s")
        except Died:
            return Verdict(problem="cannot be used: it takes too much memory")
        self._kept[wanted] = verdict
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return verdict

    async def close(self) -> None:
        """End the process."""
        await self.process.close()

    async def _command(self) -> tuple[str, ...]:
        folders = await asyncio.to_thread(_folders, self._settings)
        return (sys.executable, "-m", "pagebus.actors.tokenizer.grammar_check", *folders, str(self._cpu_s))


def _folders(settings: Settings) -> tuple[str, str]:
    """Of the model and of its tokenizer."""
    return str(resolve_model(settings, weights=False)), str(resolve_tokenizer(settings))


def main(model: str, tokenizer: str, cpu_s: str) -> None:
    """Answer each line of standard input with one of standard output, until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    problem, vocabulary = "", None
    try:
        vocabulary = load_vocabulary(Path(tokenizer), ModelConfig.load(Path(model), tokenizer=Path(tokenizer)))
    except GrammarError as error:
        problem = str(error)
    out = sys.stdout.buffer
    out.write(READY)
    out.flush()
    for line in sys.stdin.buffer:
        verdict = Verdict(problem=problem)
        if vocabulary is not None:
            signal.setitimer(signal.ITIMER_PROF, float(cpu_s))
            verdict = _verdict(vocabulary, StructuredOutput(**orjson.loads(line)))
            signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(orjson.dumps(verdict) + b"\n")
        out.flush()


def _verdict(vocabulary: LLTokenizer, wanted: StructuredOutput) -> Verdict:
    try:
        grammar = write_grammar(wanted, vocabulary)
        check_matcher(make_matcher(vocabulary, grammar))
    except GrammarError as error:
        return Verdict(problem=str(error))
    return Verdict(grammar)


if __name__ == "__main__":
    main(*sys.argv[1:])
