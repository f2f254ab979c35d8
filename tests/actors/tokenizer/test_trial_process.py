"""Children that stand still, die or start slowly: no grammar is refused for it, and nobody gets another's verdict."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import pytest_asyncio
import uvloop

import pagebus.actors.shipped_model
from pagebus.actors.settings import Settings
from pagebus.actors.tokenizer import trial_process
from pagebus.actors.tokenizer.grammar_check import GrammarChecker, Verdict
from pagebus.actors.tokenizer.render_process import RenderProcess
from pagebus.bus.messages import StructuredOutput
from tests.actors.tokenizer.test_grammar_check import ENDLESS as TOO_COMPLEX

SETTINGS = Settings(model=str(Path(pagebus.actors.shipped_model.__file__).parent), structured_output_timeout_s=0.5)


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(kind="regex", text=text, field="it")


ENDLESS = StructuredOutput(kind="json", text=TOO_COMPLEX, field="it")
FIRST, SECOND, BAD = regex("[ab]{1,3}"), regex("[cd]{1,3}"), regex("(unclosed")


DYING = """
import os, signal, sys
print("ready", flush=True)
input()
if not os.fork():
    open(sys.argv[1]).read()
    os._exit(0)
os.kill(os.getpid(), signal.SIGPROF)
"""


@pytest_asyncio.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(SETTINGS)
    yield checker
    await checker.close()


def pid(checker: GrammarChecker) -> int:
    """Of the child that waits for the next question."""
    process = checker.process._process
    assert process is not None
    return process.pid


async def served(checker: GrammarChecker, wanted: StructuredOutput = SECOND) -> bool:
    """Whether a good grammar gets a verdict of its own."""
    verdict = await checker.check(wanted)
    return verdict.problem == "" and wanted.text.replace("\\", "") in verdict.grammar


async def test_standing_still_is_no_computing_time(checker: GrammarChecker) -> None:
    """A child that is stopped for longer than a trial may take goes on where it was, and its verdict counts."""
    assert await served(checker, FIRST)
    os.kill(pid(checker), signal.SIGSTOP)
    child = pid(checker)
    asked = asyncio.create_task(checker.check(SECOND))
    done, _ = await asyncio.wait({asked}, timeout=2 * SETTINGS.structured_output_timeout_s)
    assert not done
    os.kill(child, signal.SIGCONT)

    assert (await asked).problem == ""
    assert pid(checker) == child


async def test_who_stands_still_for_too_long_is_given_up(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is an error of ours, not a verdict: the same grammar is tried again when it is asked for again."""
    assert await served(checker, FIRST)
    child = pid(checker)
    os.kill(child, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(trial_process, "WALL_S", 0.01)
        with pytest.raises(TimeoutError):
            await checker.check(SECOND)

    assert not psutil.pid_exists(child)
    assert checker.known(SECOND) is None
    assert await served(checker)


async def test_being_out_of_time_is_not_kept(checker: GrammarChecker) -> None:
    """Whoever asks again gets another trial; what is wrong with a grammar is kept."""
    assert "within 0.5 s" in (await checker.check(ENDLESS)).problem
    assert checker.known(ENDLESS) is None

    assert await served(checker)
    assert "unclosed" in (await checker.check(BAD)).problem
    assert checker.known(BAD) is not None


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="asyncio has no thread that waits for a child any more")
async def test_how_a_child_has_ended_is_known_however_late_asyncio_looks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killing one that is dead already would hide it: asyncio then reports 255. The end of its output comes after its
    own end, from a process that it leaves behind, and asyncio looks only when somebody waits for it."""
    wait, waits = asyncio.subprocess.Process.wait, threading.Event()
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    class Late(ModuleType):
        """``os``, as asyncio's thread that waits for the child sees it."""

        def waitpid(self, pid: int, options: int) -> tuple[int, int]:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            gate.open("w").close()
            waits.wait()
            return os.waitpid(pid, options)

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    async def waited_for(process: asyncio.subprocess.Process) -> int:
        waits.set()
        return await wait(process)

    monkeypatch.setattr(asyncio.unix_events, "os", Late("os"))
    monkeypatch.setattr(asyncio.subprocess.Process, "wait", waited_for)

    rendering = [RenderProcess(lambda _: "rendered", refusals=ValueError)]
    assert rendering[0].render({}) == "rendered"

    async def command() -> list[str]:
        rendering.clear()  # as garbage is collected, at any time: only asyncio may be late to wait for a child
        return [sys.executable, "-c", DYING, str(gate)]

    with pytest.raises(trial_process.OutOfTime):
        await trial_process.TrialProcess(command).ask(b"a question")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_death_between_trials(run: Callable[[Any], None]) -> None:
    """Nobody notices, whatever the event loop makes of a pipe that nobody reads."""

    async def live() -> None:
        checker = GrammarChecker(SETTINGS)
        assert await served(checker, FIRST)
        process = checker.process._process
        assert process is not None
        process.send_signal(signal.SIGKILL)
        await process.wait()

        assert await served(checker)
        await checker.close()

    run(live())


async def test_a_death_within_a_trial(checker: GrammarChecker) -> None:
    """It may have had another cause than the grammar, which gets another child."""
    assert await served(checker, FIRST)
    child = pid(checker)
    os.kill(child, signal.SIGSTOP)
    asked = asyncio.create_task(checker.check(SECOND))
    await asyncio.sleep(0)
    os.kill(child, signal.SIGKILL)

    assert (await asked).problem == ""


async def test_a_grammar_that_children_die_of(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused when two have; but that is not kept."""

    async def dies() -> tuple[str, ...]:
        return ("sh", "-c", "echo ready; read line; exit 1")

    with monkeypatch.context() as patch:
        patch.setattr(checker.process, "_command", dies)
        verdict = await checker.check(SECOND)

    assert verdict == Verdict(problem="cannot be used: it takes too much memory")
    assert checker.known(SECOND) is None
    assert await served(checker)


async def test_a_slow_start(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not ready in time is ended, and what it says late is nobody's answer."""

    async def slow() -> tuple[str, ...]:
        return ("sh", "-c", "read line; echo ready; cat")

    with monkeypatch.context() as patch:
        patch.setattr(trial_process, "START_TIMEOUT_S", 0.01)
        patch.setattr(checker.process, "_command", slow)
        with pytest.raises(TimeoutError):
            await checker.check(FIRST)

    assert checker.process._process is None
    assert await served(checker, FIRST)
    assert await served(checker)


async def test_a_child_that_does_not_start(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours; the next one is tried."""

    async def fails() -> tuple[str, ...]:
        return ("sh", "-c", "echo no")

    with monkeypatch.context() as patch:
        patch.setattr(checker.process, "_command", fails)
        with pytest.raises(ChildProcessError):
            await checker.check(FIRST)

    assert await served(checker, FIRST)


async def test_a_question_that_is_given_up(checker: GrammarChecker) -> None:
    """Whoever asks next does not get its answer."""
    assert await served(checker, FIRST)
    child = pid(checker)
    os.kill(child, signal.SIGSTOP)
    asked = asyncio.create_task(checker.check(BAD))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait({asked})
    with pytest.raises(ProcessLookupError):
        os.kill(child, signal.SIGCONT)

    assert await served(checker)
