"""The processes that the supervisor starts: their commands, environments and GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from pagebus.actors.runtime.supervisor import plan_children
from pagebus.actors.settings import KINDS, Settings, SettingsError


def test_plan_gives_each_executor_a_gpu() -> None:
    """Executor i sees the i-th GPU only; no other actor's environment is touched."""
    settings = Settings(model="m", executors=2, device="auto")
    plans = plan_children(settings, "redis://h", environ={"PATH": "x"}, gpus=["4", "7"], cores=8)
    gpus = {plan.name: plan.environ.get("CUDA_VISIBLE_DEVICES") for plan in plans}
    assert gpus == {
        "ingress-0": None,
        "jobs-0": None,
        "tokenizer-0": None,
        "scheduler-0": None,
        "executor-0": "4",
        "executor-1": "7",
        "detokenizer-0": None,
    }
    assert {plan.kind for plan in plans} == set(KINDS)


def test_plan_shares_the_cores_out() -> None:
    """On the CPU each executor computes with its share of the cores."""
    plans = plan_children(Settings(executors=3), "redis://h", environ={}, gpus=[], cores=8)
    executors = [plan for plan in plans if plan.kind == "executor"]
    assert all("--threads=2" in plan.command and plan.environ["OMP_NUM_THREADS"] == "2" for plan in executors)
    assert "CUDA_VISIBLE_DEVICES" not in executors[0].environ


def test_plan_of_ranks() -> None:
    """Each knows which it is; they share the cores, and an executor's end together."""
    settings = Settings(executors=2, tensor_parallel_size=2, device="cpu")
    plans = plan_children(settings, "redis://h", environ={}, gpus=["0"], cores=8)
    found = [(plan.kind, plan.name, plan.group) for plan in plans if plan.kind in ("executor", "rank")]
    assert found == [
        ("executor", "executor-0", "executor-0"),
        ("rank", "executor-0.1", "executor-0"),
        ("executor", "executor-1", "executor-1"),
        ("rank", "executor-1.1", "executor-1"),
    ]
    for each in plans:
        assert ("--rank=1" in each.command) == (each.kind == "rank")
        if each.kind in ("executor", "rank"):
            assert "--threads=2" in each.command
            assert "--tensor-parallel-size=2" in each.command


@pytest.mark.parametrize("divided", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize(
    ("gpus", "seen"), [(["4", "5", "6", "7"], ["4,5", "6,7"]), ([], ["0,1", "2,3"]), (["0", "0", "1", "1"], ["0", "1"])]
)
def test_ranks_see_all_gpus_of_their_executor(gpus: list[str], seen: list[str], divided: str) -> None:
    """Each uses that of its number; a GPU that is named twice has two ranks."""
    settings = Settings(executors=2, device="cuda", **{divided: 2})
    plans = plan_children(settings, "redis://h", environ={}, gpus=gpus, cores=8)
    found = [plan.environ["CUDA_VISIBLE_DEVICES"] for plan in plans if plan.kind in ("executor", "rank")]
    assert found == [seen[0], seen[0], seen[1], seen[1]]


def test_more_ranks_than_gpus() -> None:
    settings = Settings(executors=2, tensor_parallel_size=2)
    with pytest.raises(SettingsError, match="--executors 2 --tensor-parallel-size 2: only 3 GPUs"):
        plan_children(settings, "redis://h", environ={}, gpus=["0", "1", "2"], cores=1)
    settings = Settings(pipeline_parallel_size=2)
    with pytest.raises(SettingsError, match="--pipeline-parallel-size 2: only 1 GPUs"):
        plan_children(settings, "redis://h", environ={}, gpus=["0"], cores=1)


@pytest.mark.parametrize(
    ("changes", "early"), [({}, True), ({"gpu_lock_dir": "/locks"}, False), ({"device": "cpu"}, False)]
)
def test_plan_opens_a_gpu_early(changes: dict[str, Any], early: bool) -> None:
    """If it is known which: an executor that chooses one itself must not open another before, one on the CPU none."""
    plans = plan_children(Settings(**changes), "redis://h", environ={}, gpus=["0"], cores=1)
    for plan in plans:
        module = (
            ("pagebus.actors.commands.executor_process",)
            if early and plan.kind == "executor"
            else ("pagebus.actors.commands.cli", "actor", plan.kind)
        )
        assert plan.command[2 : 3 + len(module)] == ("-m", *module)


def test_plan_keeps_secrets_off_the_command_line() -> None:
    """API keys and bus passwords are in the environment only."""
    settings = Settings(api_key=("s3cret",))
    plans = plan_children(settings, "redis://:pa55@h", environ={"PAGEBUS_PORT": "1"}, gpus=[], cores=1)
    for each in plans:
        assert not [word for word in each.command if "s3cret" in word or "pa55" in word]
        assert each.environ["PAGEBUS_API_KEY"] == "s3cret"
        assert each.environ["PAGEBUS_BUS"] == "redis://:pa55@h"
        assert "PAGEBUS_PORT" not in each.environ


def test_more_executors_than_gpus() -> None:
    """Said at once, not by a crash later."""
    with pytest.raises(SettingsError, match="--executors 3: only 1 GPUs are visible"):
        plan_children(Settings(executors=3), "redis://h", environ={}, gpus=["0"], cores=1)
