"""Executors as processes of their own, beside a :class:`System` in this one. Each has a GPU, and can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pagebus.actors.runtime.child import die_with_parent
from pagebus.actors.runtime.supervisor import ChildPlan, plan_children
from pagebus.actors.settings import Settings
from tests.helpers.waiting import LIMIT_S, eventually
from tests.system.network_hosts import Host

TAIL_CHARACTERS = 3000


class ExecutorProcesses:
    """``count`` executors of a deployment whose bus is at ``url``, named ``executor-0`` and so on; of ranks each is a
    process, as ``executor-0.1`` behind ``executor-0``. Their logs go to ``folder``. ``gpus``: one for each; none on a
    CPU. ``module``: another program, for the same arguments. ``hosts``: where each of them runs, if not simply here."""

    def __init__(
        self, settings: Settings, url: str, folder: Path, count: int, gpus: Sequence[str] = (), *, module: str = "",
        hosts: Sequence[Host] = (),
    ) -> None:  # fmt: skip
        wanted = settings.replace(executors=count, log_format="json")
        plans = plan_children(wanted, url, environ=os.environ, gpus=gpus, cores=os.cpu_count() or 1)
        self._plans = {plan.name: plan for plan in plans if plan.kind in ("executor", "rank")}
        self._folder, self._module = folder, module
        self._hosts = dict(zip(self._plans, hosts, strict=False))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._leaving: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Of all processes that there may be."""
        return list(self._plans)

    def ranks_of(self, name: str) -> list[str]:
        """Of all ranks of the executor to which a process belongs."""
        return [plan.name for plan in self._plans.values() if plan.group == self._plans[name].group]

    def start(self, name: str) -> None:
        """Start an executor, perhaps once more."""
        plan: ChildPlan = self._plans[name]
        self._leaving.discard(name)
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._command(plan), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(plan.environ),
                start_new_session=True, preexec_fn=die_with_parent(),
            )  # fmt: skip

    def send(self, name: str, number: signal.Signals) -> None:
        """A signal, after which it may end."""
        self._leaving.add(name)
        self._processes[name].send_signal(number)

    def check(self) -> None:
        """Raises if one has ended that was sent nothing."""
        for name, process in self._processes.items():
            assert name in self._leaving or process.poll() is None, f"{name} has ended: {self.tail(name)}"

    async def until_ended(self, name: str) -> int:
        """Its exit code."""

        async def has_ended() -> bool:
            return self._processes[name].poll() is not None

        await eventually(has_ended)
        return int(self._processes[name].returncode)

    def tail(self, name: str) -> str:
        """The end of its log."""
        return self._log(name).read_text(errors="replace")[-TAIL_CHARACTERS:]

    def destroy(self) -> None:
        """End all at once."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(LIMIT_S)

    def _command(self, plan: ChildPlan) -> Sequence[str]:
        command: Sequence[str] = plan.command
        if self._module:
            arguments = command[command.index("executor") + 1 :]
            command = sys.executable, "-P", "-m", self._module, *arguments
        return self._hosts[plan.name].command(*command) if plan.name in self._hosts else command

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"
