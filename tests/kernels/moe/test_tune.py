"""Tuning experts: what is timed, what is kept, and when it ends; on a clock and with times of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import Tuned, read_user_tables, user_path
from pagebus.kernels.linear.dispatch import Source
from pagebus.kernels.linear.tuning.timing import Compiled
from pagebus.kernels.moe.choice import decide
from pagebus.kernels.moe.launch.shapes import Config, GroupConfig, Grouped, Shape, buckets
from pagebus.kernels.moe.launch.tables import load_user_table
from pagebus.kernels.moe.timing import ExpertsJob
from pagebus.kernels.moe.tune import BEST, TimedExperts, considered, order, tune_experts

H200, QWEN3, OTHERS = Target(90, 132, 4917), Shape(128, 8, 2048, 768), Shape(60, 4, 2048, 1408)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    read_user_tables(None)


class FakeTimer:
    """Tells the times of ``us``; what it does not know fails, as on a GPU that does not take it."""

    def __init__(self, us: Callable[[Config], float | None]) -> None:
        self.asked: list[tuple[Shape, int]] = []
        self._us = us

    def times(self, shape: Shape, bucket: int, configs: Iterable[Config]) -> dict[Config, float]:
        self.asked.append((shape, bucket))
        return {config: us for config in configs if (us := self._us(config)) is not None}


class FakeCompilers:
    """Compile nothing, and keep what was asked for."""

    def __init__(self) -> None:
        self.jobs: list[Compiled] = []

    def compile(self, jobs: Iterable[Compiled]) -> tuple[str, ...]:
        self.jobs += jobs
        return ()


def tuned(
    folder: Path, us: Callable[[Config], float | None], shape: Shape = QWEN3, clock: Iterator[float] | None = None
) -> tuple[list[TimedExperts], list[str], FakeCompilers]:
    lines: list[str] = []
    clock, compilers = clock or itertools.repeat(0.0), FakeCompilers()
    found = tune_experts(
        shape, H200, folder, 1.0, lines.append, compilers, clock=lambda: next(clock), timer=FakeTimer(us)  # type: ignore[arg-type]
    )  # fmt: skip
    return found, lines, compilers


def chosen(num_tokens: int, shape: Shape = QWEN3) -> tuple[Config, Source]:
    return decide(num_tokens, shape, torch.bfloat16, H200)[:2]


@pytest.mark.parametrize("shape", [QWEN3, OTHERS], ids=["measured", "not measured"])
def test_the_fastest_is_written_and_chosen(tmp_path: Path, shape: Shape) -> None:
    """By the next start, for this bucket and the numbers of tokens below it; what is measured again stays."""
    best = considered(shape, 32, H200)[-1]
    assert chosen(32, shape)[0] != best
    found, lines, compilers = tuned(tmp_path, lambda config: 50.0 if config == best else 100.0, shape)
    assert {each.bucket for each in found} == set(buckets(shape))
    (of_32,) = (each for each in found if each.bucket == 32)
    assert of_32[2:] == (100.0, 50.0, best, True)
    assert any("32 tokens" in line and "50% less" in line for line in lines)
    assert {job.config for job in compilers.jobs if isinstance(job, ExpertsJob)} >= {best}
    read_user_tables(None)
    assert chosen(32, shape)[0] != best
    read_user_tables(tmp_path)
    assert chosen(32, shape) == chosen(17, shape) == (best, Source.USER)
    again, _, _ = tuned(tmp_path, lambda config: 50.0 if config == best else 100.0, shape)
    assert not any(each.changed for each in again)


def test_what_was_measured_wins_until_something_is_clearly_faster(tmp_path: Path) -> None:
    """1% less changes nothing, and the table says so."""
    before = {bucket: chosen(bucket)[0] for bucket in buckets(QWEN3)}
    found, _, _ = tuned(tmp_path, lambda config: 100.0 if config in before.values() else 99.0)
    assert not any(each.changed for each in found)
    read_user_tables(tmp_path)
    assert {bucket: chosen(bucket) for bucket in before} == {
        bucket: (config, Source.USER) for bucket, config in before.items()
    }


def test_what_a_gpu_does_not_take_is_never_written(tmp_path: Path) -> None:
    """Though it is chosen now; without any time, nothing is written."""
    current = chosen(32)[0]
    found, _, _ = tuned(tmp_path, lambda config: None if config == current else 100.0)
    (of_32,) = (each for each in found if each.bucket == 32)
    assert of_32.config != current
    assert of_32[2:] == (100.0, 100.0, of_32.config, True)
    assert current not in load_user_table(H200, tmp_path)[QWEN3].values()
    found, lines, _ = tuned(tmp_path / "none", lambda _: None)
    assert not any(each.changed for each in found)
    assert not user_path(H200, tmp_path / "none", Tuned.EXPERTS).exists()
    assert "no time" in lines[0]


def test_time_ends(tmp_path: Path) -> None:
    """Nothing begins when it is over; what was measured is kept, and the rest chosen as before."""
    found, lines, _ = tuned(tmp_path, lambda _: 1.0, clock=iter([0.0, 0.0, 59.0, 61.0]))
    assert [each.bucket for each in found] == order(QWEN3)[:2]
    assert "is over" in lines[-1]
    assert set(load_user_table(H200, tmp_path)[QWEN3]) == set(order(QWEN3)[:2])
    assert chosen(8192)[1] is Source.MEASURED


def test_what_is_timed() -> None:
    """What is chosen now, the rule's, and the cost model's best few, of more than one way to multiply."""
    for bucket in buckets(OTHERS):
        configs = considered(OTHERS, bucket, H200)
        assert configs[0] == chosen(bucket, OTHERS)[0]
        assert len(set(configs)) == len(configs) <= BEST + 2
    assert len({(type(config), config[0]) for config in considered(OTHERS, 256, H200)}) > 1


def test_compilers_get_each_kernel_once() -> None:
    """The number of experts, and of programs, decides about none."""
    tiles = GroupConfig(64, 64, 3, 4, tma=True)
    one, more = ExpertsJob(QWEN3, Grouped(16, tiles, tiles)), QWEN3._replace(experts=64)
    assert one.kernel == ExpertsJob(more, Grouped(16, tiles, tiles)).kernel
    assert one.kernel != ExpertsJob(QWEN3, Grouped(32, tiles, tiles)).kernel
    persistent = [GroupConfig(64, 64, 3, 4, tma=True, programs=count) for count in (1, 2)]
    kernels = [ExpertsJob(QWEN3, Grouped(16, each, tiles)).kernel for each in persistent]
    assert kernels[0] == kernels[1] != one.kernel
