"""Which kernel a product gets: the tables that are shipped, their format, and the rule for shapes they lack."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.linear_choice import BUCKETS, FORMS, TABLES, bucket_of, choose, guess, load_table, merge_table
from kernels.linear_specialized import GROUPS, LOADING_REGISTERS, SpecializedConfig
from kernels.linear_tiles import TileConfig
from kernels.linear_vector import VectorConfig
from kernels.target import Target
from kernels.tune_linear import SPECIALIZED_ROWS

SHARED_BYTES = 227 * 1024
H200 = Target(90, 132)


def test_buckets() -> None:
    """A number of tokens belongs to the smallest bucket that holds it."""
    assert [bucket_of(tokens) for tokens in (1, 2, 3, 8, 9, 33, 65, 97, 256)] == [1, 2, 4, 8, 16, 64, 96, 128, 256]


def test_no_gpu() -> None:
    """On a CPU, for no tokens and for many, the library multiplies."""
    for tokens in (0, 1, 1000):
        assert choose("plain", torch.empty(tokens, 64), torch.empty(32, 64)) is None


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables(path: Path) -> None:
    """Every product has a choice for every bucket, and each can be launched."""
    table = load_table(path)
    assert table
    for (form, rows, inputs), choices in table.items():
        assert form in FORMS
        assert tuple(choices) == BUCKETS
        for bucket, config in choices.items():
            if isinstance(config, VectorConfig):
                assert bucket <= 2
            elif isinstance(config, SpecializedConfig):
                assert bucket > 64
                assert config.fits(inputs)
                assert config.splits == 1 or form == "partial"
                assert config.rows <= rows
            elif config is not None:
                assert config.fits(inputs)
                assert config.splits == 1 or form in ("partial", "residual")
                assert (config.rows + config.tokens) * config.depth * config.stages * 2 <= SHARED_BYTES
                assert config.rows <= rows


@pytest.mark.parametrize("rows", SPECIALIZED_ROWS)
def test_specialized_shapes(rows: int) -> None:
    """Pieces make up the rows; stages fit shared memory and K, registers a multiprocessor and what the warps share."""
    config = SpecializedConfig(rows, 2)
    assert sum(config.pieces) == rows
    assert len(config.pieces) <= 3
    assert config.fits(1024)
    assert not config.fits(1024 + 128)
    assert 3 < config.stages(8192) * (rows + 128) * 128 / 2**15 < 7.1
    assert config.stages(256) == 2
    threads = 128 * (GROUPS + 1)
    assert threads * config.launch_registers <= 65536
    assert GROUPS * config.registers + LOADING_REGISTERS <= (GROUPS + 1) * config.launch_registers
    assert config.registers >= rows // 2 + 48


def test_tables_are_merged(tmp_path: Path) -> None:
    """A product's choices are kept as they are and replace only its own."""
    path = tmp_path / "sm_00_1.json"
    first = {1: VectorConfig(8, 512, 4, 2), 16: TileConfig(64, 16, 128, 4, 4, 2, True), 256: None}
    second = {1: None, 16: None, 256: TileConfig(128, 128, 64, 4, 8)}
    assert load_table(path) == {}
    merge_table(path, "plain", 64, 32, {1: None})
    merge_table(path, "partial", 64, 32, second)
    merge_table(path, "plain", 64, 32, first)
    merge_table(path, "partial", 64, 32, {16: SpecializedConfig(224)})
    second[16] = SpecializedConfig(224)
    assert load_table(path) == {("plain", 64, 32): first, ("partial", 64, 32): second}


def test_guess() -> None:
    """Tiles that give every multiprocessor its share, or the library."""
    assert guess("plain", 6144, 4096, 8, H200) == TileConfig(48, 16, 128, 4, 4)
    assert guess("partial", 4096, 14336, 32, H200) == TileConfig(64, 32, 128, 4, 4, 2)
    assert guess("plain", 512, 4096, 8, H200) is None
    assert guess("plain", 6144, 4096, 64, H200) is None
    for rows in range(512, 20000, 488):
        for inputs in (896, 1000, 3584, 18944):
            config = guess("partial", rows, inputs, 1, H200)
            assert config is None or config.fits(inputs)
