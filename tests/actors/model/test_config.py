"""Reading model folders: both dialects of config.json, defaults, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.model.config import (
    SHIPPED_MODEL,
    ModelConfig,
    ModelError,
    effective_max_model_len,
    parse_config,
    resolve_folder,
    resolve_model,
    resolve_tokenizer,
)
from pagebus.actors.model.spec import RopeSpec
from pagebus.actors.settings import Settings
from tests.helpers.model_factory import REFERENCE_CONFIGS, ReferenceConfig, make_reference

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(*, generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    return parse_config({**BASE, **fields}, generation or {})


def parse_without(*names: str, **fields: Any) -> ModelConfig:
    return parse_config({key: value for key, value in {**BASE, **fields}.items() if key not in names}, {})


def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
    """Of queries, keys and values; of what attention gives; of the feed-forward part."""
    layer = config.spec.layers[0]
    return layer.mixer.bias, layer.mixer.out_bias, layer.feed.bias


def test_both_dialects_say_the_same() -> None:
    """torch_dtype, rope_theta and rope_scaling of transformers 4 mean what dtype and rope_parameters of 5 mean."""
    old = parse(torch_dtype="bfloat16", rope_theta=500000.0, rope_scaling={"type": "llama3", **LLAMA3_ROPE})
    new_rope = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_ROPE}
    new = parse(dtype="bfloat16", rope_parameters=new_rope)

    assert old == new
    assert new.dtype == "bfloat16"
    [rope] = new.spec.rope
    assert (rope.base, rope.kind, rope.dims) == (500000.0, "llama3", 16)
    assert (rope.factor, rope.low, rope.high, rope.original) == (8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_plain_rope(rope: dict[str, Any]) -> None:
    """No scaling, however it is said, is None; the base defaults to 10000."""
    config = parse(**rope)

    assert config.spec.rope == (RopeSpec(16, 10000.0),)


def test_defaults_of_old_llama_files() -> None:
    """Files that leave heads, biases, dtype and ties out mean what transformers takes them to mean."""
    config = parse_without("num_key_value_heads")

    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.dtype == "float32"
    assert not config.tie_word_embeddings
    assert biases(config) == (False,) * 3
    assert config.layer_windows == (0, 0, 0)
    assert config.sliding_window is None


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", (True, True, True)),
        ("MistralForCausalLM", (False, False, False)),
        ("Qwen2ForCausalLM", (True, False, False)),
        ("Qwen3ForCausalLM", (True, True, False)),
    ],
)
def test_biases_by_architecture(architecture: str, expected: tuple[bool, ...]) -> None:
    """Only the architectures that know a bias field obey it; Qwen2 has its biases always."""
    config = parse(architectures=[architecture], attention_bias=True, mlp_bias=True)

    assert biases(config) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0, 0, 0)),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, (0, 0, 0)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (0, 0, 0)),
        ({"architectures": ["Qwen2ForCausalLM"], "max_window_layers": None}, (0, 0, 0)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True}, (0, 0, 0)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            (0, 0, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, 0, 8),
        ),
    ],
)
def test_sliding_windows(fields: dict[str, Any], expected: tuple[int, ...]) -> None:
    """Mistral: every layer; Qwen: only with use_sliding_window, by layer_types or from max_window_layers on."""
    config = parse(**fields)

    assert config.layer_windows == expected
    assert config.sliding_window == (max(expected) or None)


def test_generation_config_decides_ends_and_defaults() -> None:
    """Its end tokens replace config.json's; ids outside the vocabulary and non-numbers are left out."""
    generation = {
        "eos_token_id": [7, 9, 5000, 7],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "max_new_tokens": 99,
        "do_sample": True,
    }
    config = parse(generation=generation, eos_token_id=3)

    assert config.eos_token_ids == (7, 9)
    assert config.default_sampling == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert parse(eos_token_id=3).eos_token_ids == (3,)
    assert parse(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"9": {"content": "<|im_end|>"}}}, (3, 9)),
        ({"eos_token": {"content": "<|im_end|>"}}, (3, 8)),
        ({"eos_token": "</s>"}, (3,)),
        ({"eos_token": "far"}, (3,)),
        ({"eos_token": None}, (3,)),
        ([], (3,)),
    ],
)
def test_the_tokenizer_s_end_token_ends_too(config: object, ends: tuple[int, ...], tmp_path: Path) -> None:
    """As in vLLM: further training may have changed it there alone. Its number is in either file, as transformers 4 and
    5 write them."""
    added = [{"id": 5000, "content": "far"}, {"id": 8, "content": "<|im_end|>"}, {"id": 3, "content": "</s>"}]
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 3}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": {}}))
    assert ModelConfig.load(tmp_path).eos_token_ids == ends


def test_the_end_token_is_that_of_the_named_tokenizer(tmp_path: Path) -> None:
    """As in vLLM: with `--tokenizer` the one in the model's folder is not used at all. Without texts nothing is."""
    own = tmp_path / "own"
    for folder, token in ((tmp_path, 8), (own, 9)):
        folder.mkdir(exist_ok=True)
        added = {"added_tokens_decoder": {str(token): {"content": "end"}}}
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "end", **added}))
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 3}))
    model = Settings(model=str(tmp_path))
    named = replace(model, tokenizer=str(own))
    asked = (model, named, replace(named, skip_tokenizer_init=True))
    assert [ModelConfig.of(each).eos_token_ids for each in asked] == [(3, 8), (3, 9), (3, 8)]


def test_yarn_may_say_by_how_much_its_growth_is_multiplied() -> None:
    """DeepSeek-R1-0528-Qwen3-8B, in which that undoes the growth; a whole factor counts before it."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    undone = {**rope, "attn_factor": 0.8782488562869419}
    found = [
        parse(rope_scaling=each).spec.rope[0].attention_factor
        for each in (rope, undone, {**undone, "attention_factor": 1.5})
    ]

    assert found == pytest.approx([1 / 0.8782488562869419, 1.0, 1.5])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "'BloomForCausalLM' is not supported: it needs .*Qwen3ForCausalLM"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "it needs sparse attention"),
        ({"architectures": ["NeverHeardOf"]}, "'NeverHeardOf' is not supported .*Qwen3ForCausalLM"),
        ({"architectures": None}, "names no architecture"),
        ({"quantization_config": {"quant_method": "quip"}}, "quantization_config: quant_method 'quip' is not"),
        ({"rope_scaling": {"type": "spiral", "factor": 4.0}}, "rope type 'spiral' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "config.json has no factor"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope short_factor must list 8 numbers above 0"),
        ({"rope_scaling": {"type": "linear"}}, "config.json has no factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE, "low_freq_factor": 5.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ({"architectures": ["Qwen2ForCausalLM"], "max_window_layers": "all"}, "max_window_layers is 'all'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_attention_heads": 5, "hidden_size": 80}, "5 attention heads cannot share 2"),
        ({"num_attention_heads": 6}, "hidden_size 64 is not a multiple of 6 heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]}, "must list 3 layers"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["mamba"] * 3}, "layer type 'mamba'"),
    ],
)
def test_refuses_by_name(fields: dict[str, Any], message: str) -> None:
    """What would be computed wrongly is refused, naming the field."""
    with pytest.raises(ModelError, match=message):
        parse(**fields)


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_names_a_missing_field(name: str) -> None:
    """Shapes have no defaults."""
    with pytest.raises(ModelError, match=f"config.json has no {name}"):
        parse_without(name)


def test_qwen3_files_without_head_dim_mean_128() -> None:
    """As transformers reads them; a null means hidden_size / heads."""
    assert parse(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert parse(architectures=["Qwen3ForCausalLM"], head_dim=None).head_dim == 16


@pytest.mark.parametrize("config", REFERENCE_CONFIGS, ids=lambda config: config.name)
def test_reads_what_transformers_writes(config: ReferenceConfig, tmp_path: Path) -> None:
    """The folders that transformers saves are read as they were meant."""
    loaded = ModelConfig.load(make_reference(tmp_path, config))

    assert loaded.num_heads == config.overrides["num_attention_heads"]
    assert loaded.num_kv_heads == config.overrides["num_key_value_heads"]
    assert loaded.head_dim == config.overrides["head_dim"]
    assert loaded.tie_word_embeddings == config.overrides.get("tie_word_embeddings", False)
    assert [rope.kind for rope in loaded.spec.rope] == ["llama3" if config.arch == "llama3" else "default"]
    assert loaded.sliding_window == config.overrides.get("sliding_window", 24 if config.arch == "mistral" else None)
    assert loaded.dtype == "float32"
    assert loaded.eos_token_ids == ()


def test_max_model_len() -> None:
    """The positions of the model bound --max-model-len; linear scaling stretches them."""
    config, stretched = parse(), parse(rope_scaling={"type": "linear", "factor": 4.0})

    assert effective_max_model_len(Settings(), config) == 256
    assert effective_max_model_len(Settings(), stretched) == 1024
    assert effective_max_model_len(Settings(max_model_len=100), config) == 100
    with pytest.raises(ModelError, match="--max-model-len 257: the model has only 256 positions"):
        effective_max_model_len(Settings(max_model_len=257), config)


def test_resolves_folders(tmp_path: Path) -> None:
    """ "" is the shipped model; a folder is itself; the tokenizer's folder is its own or the model's."""
    own = tmp_path / "tokenizer"
    own.mkdir()

    assert resolve_model(Settings()) == SHIPPED_MODEL
    assert resolve_model(Settings(model=str(tmp_path))) == tmp_path
    assert resolve_tokenizer(Settings(model=str(tmp_path))) == tmp_path
    assert resolve_tokenizer(Settings(model=str(tmp_path), tokenizer=str(own))) == own
    assert ModelConfig.load(SHIPPED_MODEL).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "'/no/such/folder': there is no such folder"),
        ("./neither", "there is no such folder"),
        ("nobody/nothing", "'nobody/nothing': no such folder, not in the local cache, and"),
        ("not a name!", "neither a folder nor an id"),
        (__file__, "is a file"),
    ],
)
def test_names_a_model_that_cannot_be_found(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a hub, an id that is not cached is one clear error."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(ModelError, match=message):
        resolve_folder(name, None, weights=False)


@pytest.mark.parametrize(
    ("names", "fetched"),
    [
        (
            ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
             "consolidated.safetensors", "params.json", "tekken.json", "README.md"],
            ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
             "params.json", "tekken.json"],
        ),
        (
            ["config.json", "chat_template.jinja", "model.safetensors", "original/model.safetensors",
             "original/dtypes.json", "metal/model.bin", "2_Dense/model.safetensors"],
            ["config.json", "chat_template.jinja", "model.safetensors", "2_Dense/model.safetensors"],
        ),
    ],
    ids=["mistral", "gpt-oss"],
)  # fmt: skip
def test_weights_are_fetched_once(
    names: list[str], fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies in the authors' own formats, which double a download, are not."""
    import huggingface_hub

    asked: list[dict[str, list[str]]] = []

    def snapshot_download(name: str, revision: str | None, **patterns: list[str]) -> str:
        asked.append(patterns)
        return str(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    resolve_folder("org/name", None, weights=True)
    assert list(huggingface_hub.utils.filter_repo_objects(names, **asked[0])) == fetched


def test_names_a_broken_file(tmp_path: Path) -> None:
    """No config.json, no JSON, and JSON that is no object are each said."""
    contents = {None: "not a Hugging Face model folder", "{": "cannot be read", "[]": "no JSON object"}
    for content, message in contents.items():
        if content is not None:
            (tmp_path / "config.json").write_text(content)

        with pytest.raises(ModelError, match=message):
            ModelConfig.load(tmp_path)

    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert ModelConfig.load(tmp_path) == parse()


def test_imports_neither_torch_nor_transformers() -> None:
    """Actors that only need the configuration stay small and start at once."""
    script = (
        "import sys, pagebus.actors.model.config; "
        "print([name for name in ('torch', 'transformers', 'numpy', 'huggingface_hub') if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
