"""The numbers of a file: of all formats, wherever they begin, and looked at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pagebus.actors.model.lora.errors import AdapterError
from pagebus.actors.model.lora.tensor_file import FileTensor, in_parts, read_header, read_numbers

FORMATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> list[FileTensor]:
    """In the order of the file."""
    save_file(tensors, path)
    return sorted(read_header(path).tensors().values(), key=lambda each: each.start)


def test_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    """Formats that follow each other begin anywhere, and what is left out lies between others."""
    path = tmp_path / "adapter_model.safetensors"
    tensors = {f"{index}": torch.randn(3, 2 * index + 1).to(each) for index, each in enumerate([*FORMATS.values()] * 3)}
    read = [each for each in saved(path, tensors) if each.name not in ("0", "4")]
    numbers = read_numbers(path, read)
    assert len(numbers.raw) == sum(tensors[each.name].nbytes for each in read)
    for each in read:
        values = torch.from_numpy(numbers.of(each)).view(FORMATS[each.format]).view(each.shape)
        assert torch.equal(values, tensors[each.name])


@pytest.mark.parametrize("dtype", FORMATS.values())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 7, 8, 39])
def test_what_is_not_finite_is_found(dtype: torch.dtype, value: float, place: int, tmp_path: Path) -> None:
    path, tensors = tmp_path / "adapter_model.safetensors", {name: torch.ones(40).to(dtype) for name in "abc"}
    tensors["b"][place] = value
    with pytest.raises(AdapterError, match="tensor b holds NaN or infinity"):
        read_numbers(path, saved(path, tensors))
    tensors["b"][place] = torch.finfo(dtype).max
    assert np.array_equal(read_numbers(path, saved(path, tensors)).raw[:4], tensors["a"].view(torch.uint8)[:4].numpy())


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    read = saved(path, {"a": torch.ones(40)})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AdapterError, match="has become shorter"):
        read_numbers(path, read)


@pytest.mark.parametrize("part_bytes", [1, 160, 320, 399, 400, 10_000])
def test_parts_are_all_tensors_in_their_order(part_bytes: int, tmp_path: Path) -> None:
    """Each has at most so many bytes, or one tensor; the next one would not have fitted."""
    tensors = saved(tmp_path / "adapter_model.safetensors", {name: torch.ones(40) for name in "abcdef"})
    parts = list(in_parts(tensors, part_bytes))
    assert [each for part in parts for each in part] == tensors
    assert {len(part) for part in parts[:-1]} <= {max(1, part_bytes // 160)}
    assert len(parts[-1]) <= max(1, part_bytes // 160)
