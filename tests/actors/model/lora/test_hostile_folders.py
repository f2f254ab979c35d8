"""Malformed, hostile and unfitting adapter folders: one clear error each, and nothing is run."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora import adapter
from pagebus.actors.model.lora.adapter import digest_of, open_adapter
from pagebus.actors.model.lora.errors import AdapterError
from tests.helpers.lora.adapters import make_adapter
from tests.helpers.model_factory import make_model

Change = Callable[[Path], object]
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{PREFIX}.lora_A.weight", f"{PREFIX}.lora_B.weight"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama2", seed=3)


@pytest.fixture(scope="module")
def good(base: Path) -> Path:
    return make_adapter(base / "good", base, seed=1, targets=("q_proj", "v_proj"))


@cache
def config_of(base: Path) -> ModelConfig:
    return ModelConfig.load(base)


def opened(folder: Path, base: Path) -> str:
    return digest_of(open_adapter(folder, config_of(base), 16))


def fields(**changed: Any) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | changed))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def apply(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file({name: each.contiguous() for name, each in found.items()}, folder / WEIGHTS)

    return apply


def header(change: Callable[[dict[str, Any]], object]) -> Change:
    """The header says something else; the numbers stay."""

    def apply(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        told = json.loads(raw[8 : 8 + length])
        change(told)
        text = json.dumps(told).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return apply


def raw(change: Callable[[bytes], bytes], name: str = WEIGHTS) -> Change:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def renamed(name: str) -> Change:
    return tensors(lambda found: found.update({name: found.pop(A)}))


def linked(name: str) -> Change:
    def change(folder: Path) -> None:
        outside = folder.parent / f"outside-{name}"
        shutil.move(folder / name, outside)
        (folder / name).symlink_to(outside)

    return change


def cases() -> Iterator[tuple[str, Change, str]]:
    set_to: Callable[[str, torch.Tensor], Change] = lambda name, value: tensors(lambda each: each.update({name: value}))  # noqa: E731
    for name, value in (
        ("use_dora", True), ("modules_to_save", ["lm_head"]), ("trainable_token_indices", [1]),
        ("fan_in_fan_out", True), ("layer_replication", [[0, 1]]), ("use_qalora", True),
        ("alora_invocation_tokens", [1]), ("megatron_config", {"a": 1}),
        ("arrow_config", {"a": 1}), ("use_bdlora", {"a": 1}), ("kasa_config", {"a": 1}), ("velora_config", {"a": 1}),
        ("from_the_future", True),
    ):  # fmt: skip
        yield f"config {name}", fields(**{name: value}), name
    for name, values in (
        ("peft_type", (None, "IA3", "LOHA", 3, ["LORA"])), ("bias", ("every", "", 1)),
        ("task_type", ("SEQ_CLS", "SEQ_2_SEQ_LM", 5)),
        ("init_lora_weights", ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "PiSSA")),
        ("r", (0, -1, 1.5, "4", None, True, 2**40)), ("lora_alpha", ("8", None, float("nan"), float("inf"), [], 1e300)),
        ("rank_pattern", ([1], "x", {"q_proj": 0}, {"q_proj": "4"}, {"(a+)+$": 4}, {".*.*.*.*": 4}, {"": 4})),
        ("alpha_pattern", ([1], {"q_proj": float("nan")}, {"[": 1.0}, {"a{9}": 1})), ("use_rslora", ("yes", 1)),
    ):  # fmt: skip
        for value in values:
            yield f"config {name} {value!r}", fields(**{name: value}), name
    yield "another rank in the file", fields(r=3), "shape"
    yield "a rank above the limit", fields(r=17), "rank 17, this server takes up to 16"
    for text in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"peft_type": "LORA"', b"nonsense"):
        yield f"config is {text[:9]!r}", raw(lambda _, text=text: text, CONFIG), CONFIG
    yield "config is huge", raw(lambda _: b" " * (5 << 20), CONFIG), "larger than"
    yield "config is a folder", lambda f: ((f / CONFIG).unlink(), (f / CONFIG).mkdir()), "no plain file"
    yield "no config", lambda f: (f / CONFIG).unlink(), "it has no adapter_config.json"
    yield "no weights", lambda f: (f / WEIGHTS).unlink(), "it has no adapter_model"
    for suffix in ("bin", "pt", "pth", "pkl", "ckpt"):
        to = f"adapter_model.{suffix}"
        yield f"weights are .{suffix}", lambda f, to=to: (f / WEIGHTS).rename(f / to), "pickled"
    for name in (CONFIG, WEIGHTS):
        yield f"{name} is linked to a file outside", linked(name), "no plain file"
    yield "weights link to nothing", lambda f: ((f / WEIGHTS).unlink(), (f / WEIGHTS).symlink_to("x")), "no plain"
    yield "weights link to themselves", lambda f: ((f / WEIGHTS).unlink(), (f / WEIGHTS).symlink_to(WEIGHTS)), ""
    for count in (0, 4, 8, 40, 200, -1, -64):
        yield f"weights end at {count}", raw(lambda each, count=count: each[:count]), "adapter_model"
    yield "weights go on", raw(lambda each: each + b"\0"), "header says"
    yield "weights are a pickle", raw(lambda each: b"\x80\x04\x95" + each), "adapter_model"
    yield "header of 2^63 bytes", raw(lambda each: struct.pack("<Q", 2**63) + each[8:]), "longer than the file"
    yield "header is a list", raw(lambda _: struct.pack("<Q", 2) + b"[]"), "adapter_model"
    yield "header is empty", raw(lambda _: struct.pack("<Q", 2) + b"{}"), "holds no matrices"
    yield "a name twice", raw(lambda _: struct.pack("<Q", 13) + b'{"a":1,"a":1}'), "twice"
    for value in ([-1, 64], [0], [0, 2**60], "x", [0.5, 64], None, [64, 0]):
        yield f"offsets {value}", header(lambda told, v=value: told[A].update(data_offsets=v)), "adapter_model"
    yield "tensors overlap", header(lambda t: t[A].update(data_offsets=t[A]["data_offsets"], shape=[1, 1])), "asks for"
    for value in ([], [4], [64, 4], [-4, -64], [2**40, 2**40], "4x64", [4.0, 64]):
        yield f"shape {value}", header(lambda told, v=value: told[A].update(shape=v)), ""
    for value in ("F64", "I8", "F8_E4M3", "BOOL", "", None, 3, "float32"):
        yield f"format {value}", header(lambda told, v=value: told[A].update(dtype=v)), "format"
    for number in (float("nan"), float("inf"), -float("inf")):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            bad = torch.full((4, 64), number, dtype=dtype)
            yield f"{number} in {dtype}", set_to(A, bad), "NaN or infinity"
    yield "A alone", tensors(lambda each: each.pop(B)), "lora_A alone"
    yield "B alone", tensors(lambda each: each.pop(A)), "lora_B alone"
    yield "inputs of another model", set_to(A, torch.zeros(4, 65)), "another model"
    yield "outputs of another model", set_to(B, torch.zeros(255, 4)), "another model"
    yield "three dimensions", set_to(A, torch.zeros(1, 4, 64)), "another model"
    for name, why in (
        (A.replace("layers.0", "layers.2"), "no such projection"),
        (A.replace("q_proj", "z_proj"), "no such projection"), (A.replace("q_proj", "kv_b_proj"), "made of latents"),
        (A.replace("lora_A", "lora_embedding_A"), "embeddings"), ("base_model.model.lm_head.lora_A.weight", "head"),
        (A.replace("lora_A.weight", "lora_magnitude_vector"), "DoRA"), (A.replace("weight", "bias"), "biases"),
        (A.replace("self_attn.q_proj", "mlp.experts.0.up_proj"), "experts"), ("", "no such projection"),
        ("../../etc/passwd", "no such projection"), (f"{PREFIX}.weight", "no such projection"),
    ):  # fmt: skip
        yield f"a tensor called {name}", renamed(name), why
    again = tensors(lambda each: each.update({A.replace("_A.weight", "_A.default.weight"): each[A].clone()}))
    yield "two matrices for one module", again, "two of them"


@pytest.mark.parametrize(("change", "says"), [pytest.param(c, s, id=name) for name, c, s in cases()])
def test_a_folder_is_refused(good: Path, base: Path, tmp_path: Path, change: Change, says: str) -> None:
    folder = shutil.copytree(good, tmp_path / "adapter")
    change(folder)
    with pytest.raises(AdapterError, match=r".+") as refused:
        opened(folder, base)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("path", ["/nowhere", "", "\0", "a" * 5000, "/dev/null", "good/../../x"])
def test_a_path_is_refused(base: Path, path: str) -> None:
    with pytest.raises(AdapterError, match="adapter"):
        opened(Path(path), base)


def test_the_digest_is_that_of_what_counts(
    good: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of folders and fields about training do not; scales and numbers do."""
    told = opened(good, base)
    assert open_adapter(good, config_of(base), 16).read()[1] == told
    monkeypatch.setattr(adapter, "PART_BYTES", 1)
    assert opened(good, base) == told, "part by part it is the same"
    changes = {"lora_dropout": 0.5, "base_model_name_or_path": "elsewhere", "inference_mode": True}
    for index, (change, same) in enumerate(
        [
            (fields(**changes), True), (fields(lora_alpha=9.0), False), (fields(use_rslora=True), False),
            (fields(alpha_pattern={"q_proj": 1.0}), False), (tensors(lambda each: each[A].add_(1e-3)), False),
            (header(lambda header: header.update(__metadata__={"format": "pt"})), True),
        ]
    ):  # fmt: skip
        folder = shutil.copytree(good, tmp_path / str(index))
        change(folder)
        assert (opened(folder, base) == told) is same, index


def test_the_order_of_patterns_counts(good: Path, base: Path, tmp_path: Path) -> None:
    """The first that matches says the scale, so two orders are two adapters."""
    patterns, found = {"q_proj": 1.0, "self_attn.q_proj": 2.0}, set[str]()
    for name, order in (("one", patterns), ("other", dict(reversed(patterns.items())))):
        folder = shutil.copytree(good, tmp_path / name)
        fields(alpha_pattern=order)(folder)
        found.add(opened(folder, base))
    assert len(found) == 2
