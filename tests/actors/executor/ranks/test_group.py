"""How ranks find each other: leases, records, and what has to be alike."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.executor.device.comm import ONE_RANK
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.rank_actors import free_port
from pagebus.actors.executor.ranks.gloo import GlooComm, open_store
from pagebus.actors.executor.ranks.group import (
    GLOO,
    NCCL,
    PEERS,
    Record,
    carrier_of,
    check_alike,
    description,
    lost_rank,
    own_address,
    rank_name,
    ranks_there,
    replica_of,
)
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.contract import EntryId, LeaseInfo
from tests.helpers.model_factory import make_model
from tests.helpers.waiting import LIMIT_S

NEEDS = {"version": "1", "settings": "a", "model": "b"}


def lease(name: str, epoch: int = 1, **info: Any) -> LeaseInfo:
    return LeaseInfo("rank", name, epoch, {"needs": NEEDS, "host": "there"} | info)


def test_names() -> None:
    assert [rank_name("executor-0", rank) for rank in range(3)] == ["executor-0", "executor-0.1", "executor-0.2"]
    assert replica_of("executor-0.2", 2) == replica_of("executor-0", 2) == "executor-0"
    assert replica_of("executor-1.5", 0) == "executor-1.5"


def test_a_record_crosses_the_bus() -> None:
    record = Record(7, (8, 9), EntryId(3, 4), "file:/tmp/x")
    assert Record.of_state(record.as_state()) == record


def test_a_record_of_an_earlier_group_has_no_rank_of_a_larger_one() -> None:
    """It stays on the bus for minutes after a restart with more ranks."""
    record = Record(7, (8,), EntryId(3, 4), "file:/tmp/x")
    assert [record.has(rank, 8) for rank in (1, 2, 3)] == [True, False, False]
    assert not record.has(1, 9)


def test_rank_0_waits_for_all_ranks_of_its_replica() -> None:
    """In their order; those of others do not count, nor those that belong to a group that is gone, nor those that have
    not said yet what they would compute."""
    first, second = lease("executor-0.1"), lease("executor-0.2")
    assert ranks_there([second, lease("executor-1.1"), first], "executor-0", 3) == [first, second]
    assert ranks_there([first], "executor-0", 3) is None
    assert ranks_there([first, lease("executor-0.2", generation=4)], "executor-0", 3) is None
    assert ranks_there([first, lease("executor-0.2", needs={})], "executor-0", 3) is None


@pytest.mark.parametrize("what", NEEDS)
def test_a_rank_that_would_compute_something_else_is_named(what: str) -> None:
    check_alike(NEEDS, [lease("executor-0.1")])
    with pytest.raises(
        SettingsError, match=f"rank 2 on there has another {what} than rank 0: other, not {NEEDS[what]}"
    ):
        check_alike(NEEDS, [lease("executor-0.1"), lease("executor-0.2", needs=NEEDS | {what: "other"})])


def test_what_ranks_compute_with_is_compared(tmp_path: Path) -> None:
    """And not where they run: names, folders, threads."""
    config = ModelConfig.load(make_model(tmp_path / "one", "llama2", seed=1))
    other = ModelConfig.load(make_model(tmp_path / "two", "llama2", seed=1, num_hidden_layers=3))
    own = description(Settings(tensor_parallel_size=2), config)
    assert own == description(Settings(tensor_parallel_size=2, rank=1, actor_name="x", threads=3, model="/y"), config)
    assert own["settings"] != description(Settings(max_num_seqs=3), config)["settings"]
    adapting = description(Settings(tensor_parallel_size=2, enable_lora=True, lora_modules=("a=/x",)), config)
    assert own["settings"] != adapting["settings"]
    assert adapting == description(Settings(tensor_parallel_size=2, enable_lora=True), config)
    assert own["settings"] != description(Settings(kv_cache_dtype="fp8"), config)["settings"]
    apart = Settings(tensor_parallel_size=2, enable_expert_parallel=True)
    assert own["settings"] != description(apart, config)["settings"]
    assert own["model"] != description(Settings(), other)["model"]


def test_a_rank_is_lost_with_its_lease() -> None:
    """Another life is one at once; a lease that is missing in several looks, not in one."""
    epochs, missed = {"executor-0.1": 3}, {}
    assert lost_rank(epochs, [lease("executor-0.1", 3)], missed, 3) is None
    assert lost_rank(epochs, [lease("executor-0.1", 4)], missed, 3) == "executor-0.1"
    assert [lost_rank(epochs, [], missed, 3) for _ in range(2)] == [None, None]
    assert lost_rank(epochs, [lease("executor-0.1", 3)], missed, 3) is None
    assert [lost_rank(epochs, [], missed, 3) for _ in range(3)] == [None, None, "executor-0.1"]


@pytest.mark.parametrize("place", ["file", "tcp"])
def test_ranks_meet_at_a_file_or_at_a_port(place: str, tmp_path: Path) -> None:
    """And exchange bytes there: sums in the order of ranks, with the same bits on all."""
    where = f"file:{tmp_path / 'store'}" if place == "file" else f"tcp:127.0.0.1:{free_port('127.0.0.1')}"
    comms = [GlooComm(rank, 3, partial(open_store, where, rank, 3), "127.0.0.1", LIMIT_S) for rank in range(3)]
    values = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)

    texts = ["one", "", "zwei \0 und ü"]

    def exchange(comm: GlooComm) -> tuple[torch.Tensor, torch.Tensor, float]:
        comm.connect()
        widths = [3, 2, 3]
        own = values[comm.rank, :, : widths[comm.rank]]
        assert comm.tell_all(texts[comm.rank]) == texts
        return comm.all_reduce(values[comm.rank]), comm.gather_columns(own, widths), comm.least(5.0 - comm.rank)

    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(exchange, comms))
    total = ((values[0].float() + values[1].float()) + values[2].float()).bfloat16()
    beside = torch.cat([values[0, :, :3], values[1, :, :2], values[2, :, :3]], dim=1)
    for reduced, gathered, least in told:
        assert torch.equal(reduced, total)
        assert torch.equal(gathered, beside)
        assert least == 3.0


def test_nothing_is_exchanged_before_ranks_have_met() -> None:
    comm = GlooComm(1, 2, lambda: None, "127.0.0.1", 1.0)
    with pytest.raises(EngineError, match="rank 1 has not met the others yet"):
        comm.all_reduce(torch.zeros(1))


def test_one_rank_exchanges_nothing() -> None:
    x = torch.ones(2, 3)
    assert ONE_RANK.all_reduce(x) is x
    assert torch.equal(ONE_RANK.gather_columns(x, [3]), x)
    assert ONE_RANK.least(4.0) == 4.0
    assert ONE_RANK.tell_all("alone") == ["alone"]


@pytest.mark.parametrize("url", [None, "memory://", "unix:///run/redis.sock", "redis://127.0.0.1:6379/0"])
def test_the_address_of_ranks_beside_their_bus(url: str | None) -> None:
    assert own_address(url) == "127.0.0.1"


def test_what_ranks_exchange_over() -> None:
    """GPUs of one host write into each other's memory."""
    gpus = [f"gpu{rank}" for rank in range(16)]
    assert carrier_of(gpus, one_host=True, plain=False) == PEERS
    assert carrier_of(gpus[:2], one_host=True, plain=True) == NCCL
    assert carrier_of(gpus[:2], one_host=False, plain=False) == NCCL
    assert carrier_of([*gpus[:2], gpus[0]], one_host=True, plain=False) == GLOO
    assert carrier_of([*gpus[:2], ""], one_host=True, plain=False) == GLOO
