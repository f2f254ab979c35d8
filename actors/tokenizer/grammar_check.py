"""Trying out what clients want their outputs to be, in a process of its own: whatever does not come to an end there in
time, or takes too much memory, is refused.

The process is started when the first structured output is asked for, answers line by line (JSON), and is killed at a
deadline. Verdicts are kept, so that a schema costs its trial once.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from actors.child import die_with_parent
from actors.grammar import GrammarError, check_matcher, load_vocabulary, make_matcher, write_grammar
from actors.model_config import ModelConfig, resolve_model, resolve_tokenizer
from actors.settings import Settings
from bus.messages import StructuredOutput

START_TIMEOUT_S = 60.0
MAX_MEMORY_BYTES = 4 * 2**30
MAX_LINE_BYTES = 64 * 2**20
MAX_KEPT = 1024
READY = b"ready\n"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``grammar``: the form that executors take; empty if it was refused, for the reason ``problem``."""

    grammar: str = ""
    problem: str = ""


class GrammarChecker:
    """Gives verdicts for one model; one trial at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._timeout_s = settings.structured_output_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._trying = asyncio.Lock()
        self._kept: OrderedDict[StructuredOutput, Verdict] = OrderedDict()

    def known(self, wanted: StructuredOutput) -> Verdict | None:
        """The verdict, if there is one already."""
        verdict = self._kept.get(wanted)
        if verdict is not None:
            self._kept.move_to_end(wanted)
        return verdict

    async def check(self, wanted: StructuredOutput) -> Verdict:
        """The verdict on ``wanted``; tries it out if it is not known."""
        async with self._trying:
            verdict = self.known(wanted)
            if verdict is None:
                verdict = self._kept[wanted] = await self._try(wanted)
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        return verdict

    async def _try(self, wanted: StructuredOutput) -> Verdict:
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                process.stdin.write(orjson.dumps(asdict(wanted)) + b"\n")
                line = await process.stdout.readline()
            if line:
                return Verdict(**orjson.loads(line))
            problem = "cannot be used: it takes too much memory"
        except TimeoutError:
            problem = f"is too complex: it could not be made ready within {self._timeout_s:g} s"
        except ConnectionError:
            problem = "cannot be used: it takes too much memory"
        await self.close()
        return Verdict(problem=problem)

    async def _running(self) -> asyncio.subprocess.Process:
        """The process, once it is ready."""
        if self._process is None:
            folders = await asyncio.to_thread(_folders, self._settings)
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "actors.tokenizer.grammar_check", *folders,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
                preexec_fn=die_with_parent(),
            )  # fmt: skip
            assert process.stdout is not None
            async with asyncio.timeout(START_TIMEOUT_S):
                if await process.stdout.readline() != READY:
                    raise GrammarError("the process that tries grammars did not start")
        return self._process

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _folders(settings: Settings) -> tuple[str, str]:
    """Of the model and of its tokenizer."""
    return str(resolve_model(settings, weights=False)), str(resolve_tokenizer(settings))


def main(model: str, tokenizer: str) -> None:
    """Answer each line of standard input with one of standard output, until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    problem, vocabulary = "", None
    try:
        vocabulary = load_vocabulary(Path(tokenizer), ModelConfig.load(Path(model)))
    except GrammarError as error:
        problem = str(error)
    out = sys.stdout.buffer
    out.write(READY)
    out.flush()
    for line in sys.stdin.buffer:
        verdict = Verdict(problem=problem)
        if vocabulary is not None:
            try:
                grammar = write_grammar(StructuredOutput(**orjson.loads(line)), vocabulary)
                check_matcher(make_matcher(vocabulary, grammar))
                verdict = Verdict(grammar)
            except GrammarError as error:
                verdict = Verdict(problem=str(error))
        out.write(orjson.dumps(verdict) + b"\n")
        out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
