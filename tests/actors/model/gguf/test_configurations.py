"""From a GGUF file's keys to a configuration, and which file of a folder or repository is the model."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
from gguf import GGMLQuantizationType as Type

from pagebus.actors.model import config as config_module
from pagebus.actors.model.config import ModelConfig, ModelError, resolve_folder
from pagebus.actors.model.gguf.configuration import describe
from pagebus.actors.model.gguf.files import choose
from pagebus.actors.model.gguf.header import GgufFile, GgufTensor
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.settings import Settings
from tests.helpers.model_factory import make_golden
from tests.helpers.quantized.gguf_files import uniform, write_gguf, write_keys
from tests.helpers.quantized.gguf_tokenizers import CONTROL, NORMAL


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden(tmp_path_factory.mktemp("source") / "model", "llama", {"intermediate_size": 128})


def write(source: Path, file: Path, kind: Type = Type.Q8_0, **keys: Any) -> Path:
    return write_gguf(source, file, uniform(kind), {name.replace("__", "."): value for name, value in keys.items()})


def test_it_is_what_config_json_says(source: Path, tmp_path: Path) -> None:
    """But for rows of queries and keys, which lie in another order, and what is quantized."""
    ours, known = ModelConfig.load(write(source, tmp_path / "a.gguf")), ModelConfig.load(source)
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                 "head_dim", "max_position_embeddings", "layer_windows", "tie_word_embeddings"):  # fmt: skip
        assert getattr(ours, name) == getattr(known, name)
    assert [rope.layout for rope in ours.spec.rope] == ["pairs"]
    assert ours.quantization is not None
    assert (ours.quantization.method, ours.dtype) == ("gguf", "bfloat16")
    plain = ModelConfig.load(write(source, tmp_path / "b.gguf", Type.F32))
    assert (plain.quantization, plain.dtype) == (None, "float32")


def test_the_flag_may_repeat_it(source: Path, tmp_path: Path) -> None:
    """Another is refused; a file of 16 bits can be quantized while it is loaded."""
    file = write(source, tmp_path / "a.gguf")
    known = with_quantization(Settings(model=str(file), quantization="gguf"), ModelConfig.load(file))
    assert known.quantization is not None
    with pytest.raises(ModelError, match="--quantization int8: the checkpoint is quantized by gguf"):
        with_quantization(Settings(model=str(file), quantization="int8"), ModelConfig.load(file))
    plain = ModelConfig.load(write(source, tmp_path / "b.gguf", Type.BF16))
    quantized = with_quantization(Settings(quantization="int8"), plain).quantization
    assert quantized is not None
    assert quantized.online


def test_tokens_that_end_an_answer(source: Path, tmp_path: Path) -> None:
    """Those that have a part of their own, control tokens that are known to, and that of `--tokenizer`."""
    tokens = ["a", "<|im_end|>", "<|eot_id|>", "<|end|>", *(f"t{index}" for index in range(303))]
    kinds = [NORMAL, CONTROL, NORMAL, CONTROL, *[NORMAL] * 303]
    keys = {"tokens": tokens, "token_type": kinds, "eos_token_id": 9, "eot_token_id": 1, "eom_token_id": 306}
    file = write_gguf(
        source, tmp_path / "a.gguf", uniform(Type.F32), {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    )
    assert ModelConfig.load(file).eos_token_ids == (9, 1, 306, 3)
    added = {"added_tokens_decoder": {"4": {"content": "t0"}}}
    (own := tmp_path / "own").mkdir()
    (own / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t0", **added}))
    named = Settings(model=str(file), tokenizer=str(own))
    assert ModelConfig.of(named).eos_token_ids == (9, 1, 306, 3, 4)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "mamba", "general.architecture 'mamba' is not read .only llama, qwen2, "),
        ("llama.embedding_length", 2**30, r"llama.embedding_length is 1073741824, but tensor token_embd.weight has"),
        ("llama.block_count", 2**31 - 1, "llama.block_count is 2147483647, but the file has tensors of 2 layers"),
        ("llama.block_count", 0, "llama.block_count is 0, not a whole number of at least 1"),
        ("llama.attention.head_count", 4096, r"asks for 262144 columns, but tensor blk.0.attn_output.weight has"),
        ("llama.attention.head_count_kv", 3, "4 attention heads cannot share 3 key-value heads evenly"),
        ("llama.feed_forward_length", 2**30, r"is 1073741824, but tensor blk.0.ffn_down.weight has shape"),
        ("llama.attention.value_length", 32, "value_length is not attention.key_length, 64, which is not supported"),
        ("llama.rope.dimension_count", 32, "rope.dimension_count is 32, but heads have 64 dimensions"),
        ("llama.pooling_type", 3, "llama.pooling_type is not supported for this architecture"),
        ("llama.logit_scale", 0.1, "llama.logit_scale is not supported for this architecture"),
        ("llama.rope.scaling.type", "other", "rope.scaling.type is 'other', which is not supported"),
        ("llama.rope.scaling.type", "yarn", "rope.scaling.original_context_length is missing"),
        ("llama.rope.freq_base", 0.0, "rope.freq_base is 0.0, not a number above 0"),
        ("llama.context_length", 2**31, "context_length is 2147483648, not a whole number"),
        ("llama.feed_forward_length", [112, 128], "feed_forward_length differs from layer to layer"),
        ("llama.attention.layer_norm_rms_epsilon", True, "layer_norm_rms_epsilon is True, not a number above 0"),
    ],
)
def test_what_is_refused(
    key: str, value: object, message: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the key, and before anything is allocated."""
    file = config_module.read_file(write(source, tmp_path / "a.gguf"))
    changed = type(file)(file.path, {**file.metadata, key: value}, file.tensors)
    monkeypatch.setattr(config_module, "read_file", lambda path: changed)
    with pytest.raises(ModelError, match=message):
        ModelConfig.load(file.path)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", lambda name: f"{name}.other", r"tensor .*\.other is not one that its architecture has here"),
        ("llama", lambda name: "blk.0.ssm_in.weight", "tensor blk.0.ssm_in.weight is not one that its architecture"),
    ],
)
def test_unknown_tensors(
    kind: str, change: Callable[[str], str], message: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may change what is computed."""
    file = config_module.read_file(write(source, tmp_path / "a.gguf"))
    last = list(file.tensors.values())[-1]
    other = type(last)(change(last.name), last.type, last.shape, last.file, last.offset, last.num_bytes)
    changed = type(file)(file.path, file.metadata, {**file.tensors, other.name: other})
    monkeypatch.setattr(config_module, "read_file", lambda path: changed)
    with pytest.raises(ModelError, match=message):
        ModelConfig.load(file.path)


def with_tensor(source: Path, folder: Path, name: str, shape: tuple[int, ...], data: bytes = b"") -> Any:
    """A file, and one more tensor of float32 of this shape, whose ``data`` lies behind all others."""
    path = write(source, folder / "a.gguf")
    file = config_module.read_file(path)
    tensor = GgufTensor(name, "F32", shape, path, path.stat().st_size, 4 * prod(shape))
    path.write_bytes(path.read_bytes() + data)
    return GgufFile(path, file.metadata, {**file.tensors, name: tensor})


@pytest.mark.parametrize("number", [0.0, -1.0, math.nan, math.inf])
def test_tables_of_frequencies_are_finite_and_positive(number: float, source: Path, tmp_path: Path) -> None:
    """Angles are divided by them."""
    data = struct.pack("<32f", *[1.0] * 31, number)
    with pytest.raises(ModelError, match=rf"tensor rope_freqs.weight has {number}, not a number above 0"):
        describe(with_tensor(source, tmp_path, "rope_freqs.weight", (32,), data))


def test_experts_without_end(source: Path, tmp_path: Path) -> None:
    """They are not listed one by one."""
    file = with_tensor(source, tmp_path, "blk.0.ffn_up_exps.weight", (5000, 1, 1))
    with pytest.raises(ModelError, match=r"tensor blk.0.ffn_up_exps.weight has 5000 experts, more than 4096"):
        describe(file)


NAMES = ("m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "mmproj-F16.gguf", "README.md")


def test_the_type_behind_a_colon() -> None:
    """Image towers and later parts are no models; without a type there must be one only."""
    assert choose(NAMES, "q4_k_m", "x") == "m-Q4_K_M.gguf"
    assert choose(NAMES, "Q8_0", "x") == "m-Q8_0-00001-of-00002.gguf"
    assert choose(("BF16/m-00001-of-00003.gguf", "m-Q8_0.gguf"), "Q8_0", "x") == "m-Q8_0.gguf"
    assert choose(("a-Q4_K_M.gguf", "a-UD-Q4_K_M.gguf"), "Q4_K_M", "x") == "a-Q4_K_M.gguf"
    assert choose(("a-Q4_K_M.gguf", "a-UD-Q4_K_M.gguf"), "UD-Q4_K_M", "x") == "a-UD-Q4_K_M.gguf"
    assert choose(("a-UD-Q4_K_XL.gguf", "a.Q8_0.gguf"), "Q4_K_XL", "x") == "a-UD-Q4_K_XL.gguf"
    assert choose(("a-UD-Q4_K_XL.gguf", "a.Q8_0.gguf"), "Q8_0", "x") == "a.Q8_0.gguf"
    assert choose(NAMES[3:], "", "x") is None
    with pytest.raises(ModelError, match=r"x has several GGUF files \(m-Q4_K_M.gguf, m-Q8_0-.*: name one, as x:TYPE"):
        choose(NAMES, "", "x")
    with pytest.raises(ModelError, match="x has no single GGUF file of type Q2_K"):
        choose(NAMES, "Q2_K", "x")
    with pytest.raises(ModelError, match="no single GGUF file of type K_M"):
        choose(NAMES, "K_M", "x")


def test_folders(tmp_path: Path) -> None:
    """A file is itself; a folder with weights of its own is one; else its GGUF file counts."""
    first = write_keys(tmp_path / "m-Q4_0.gguf", "llama", {})
    assert resolve_folder(str(first), None, weights=True) == first
    assert resolve_folder(str(tmp_path), None, weights=True) == first
    second = write_keys(tmp_path / "m-Q8_0.gguf", "llama", {})
    assert resolve_folder(f"{tmp_path}:Q8_0", None, weights=True) == second
    with pytest.raises(ModelError, match="has several GGUF files"):
        resolve_folder(str(tmp_path), None, weights=True)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_folder(str(tmp_path), None, weights=True) == tmp_path
    (tmp_path / "none").mkdir()
    with pytest.raises(ModelError, match=r":Q8_0': the folder has no GGUF file"):
        resolve_folder(f"{tmp_path / 'none'}:Q8_0", None, weights=True)


@pytest.mark.parametrize("weights", [True, False])
def test_repositories(weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the file that is meant is fetched, with all its parts; every actor needs it for its header."""
    fetched: list[list[str]] = []

    def snapshot_download(
        name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        fetched.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, name, revision=None: list(NAMES))
    found = resolve_folder("who/what:Q8_0", None, weights=weights)
    assert found == tmp_path / "m-Q8_0-00001-of-00002.gguf"
    assert fetched == [["m-Q8_0-?????-of-00002.gguf"]]
    with pytest.raises(ModelError, match="who/what has several GGUF files"):
        resolve_folder("who/what", None, weights=weights)
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert resolve_folder("who/what", None, weights=weights) == tmp_path


def test_the_largest_gemmas_divide_scores_by_another_number(tmp_path: Path) -> None:
    """Which files do not say."""
    from pagebus.actors.model.gguf.architectures import ARCHITECTURES
    from pagebus.actors.model.gguf.header import GgufFile
    from pagebus.actors.model.gguf.metadata import Metadata

    for layers, expected in ((46, 144), (42, 128)):
        keys = {"block_count": layers, "attention.head_count": 32, "embedding_length": 4608,
                "attention.key_length": 128, "attention.sliding_window": 4096}  # fmt: skip
        said = {"general.architecture": "gemma2", **{f"gemma2.{key}": value for key, value in keys.items()}}
        fields = ARCHITECTURES["gemma2"].fields(Metadata(GgufFile(tmp_path, said, {})))
        assert fields["query_pre_attn_scalar"] == expected


def test_known_architectures_are_those_of_the_library() -> None:
    """By its names."""
    from pagebus.actors.model.gguf.architectures import ARCHITECTURES

    assert set(ARCHITECTURES) <= set(gguf.MODEL_ARCH_NAMES.values())
