"""Families as data: what their ``config.json`` says, as the hub has it, without torch; and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.model import families
from pagebus.actors.model.config import ModelConfig, ModelError, effective_max_model_len, parse_config
from pagebus.actors.model.families.registry import ARCHITECTURES, BY_ARCHITECTURE
from pagebus.actors.settings import Settings

ROOT = Path(__file__).parents[3]
MOST_LINES = 100
BASE: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip


def parse(architecture: str, **fields: Any) -> ModelConfig:
    return parse_config({"architectures": [architecture], **BASE, **fields}, {})


def test_specs_need_no_torch() -> None:
    """Every actor may read them."""
    program = "import sys; import pagebus.actors.model.families.registry; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_family_is_short() -> None:
    """It has no code but what reads its fields."""
    lengths = {path.name: len(path.read_text().splitlines()) for path in Path(families.__file__).parent.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_every_architecture_is_in_the_docs() -> None:
    """docs/models.md has all of them, and no other."""
    table = (ROOT / "docs/models.md").read_text().split("## Text of models")[0]
    assert {word for word in table.split("`") if word.endswith(("ForCausalLM", "Generation"))} == set(ARCHITECTURES)


def test_gemma3_with_images_as_on_the_hub() -> None:
    """Its text object says what differs from transformers' defaults only."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106], "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    }  # fmt: skip
    config = parse_config(raw, {})
    spec = config.spec

    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (34, 8, 4, 256)
    assert (config.vocab_size, config.dtype, config.eos_token_ids) == (262208, "bfloat16", (1, 106))
    assert config.layer_windows[:7] == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert [(rope.base, rope.kind, rope.factor) for rope in spec.rope] == [(1e6, "linear", 8.0), (1e4, "default", 1.0)]
    assert [layer.mixer.rope for layer in spec.layers[:6]] == [1, 1, 1, 1, 1, 0]
    assert (spec.norm.offset, spec.head.tied, spec.layers[0].norms) == (1, True, "sandwich")
    assert spec.layers[0].mixer.scale == 256**-0.5
    assert effective_max_model_len(Settings(), config) == 131072


def test_gemma2_caps_and_alternates() -> None:
    """With transformers' own values where the file has none."""
    spec = parse("Gemma2ForCausalLM", query_pre_attn_scalar=144).spec

    assert [layer.mixer.window for layer in spec.layers] == [4096, 0, 4096, 0]
    assert spec.layers[0].mixer.softcap == 50.0
    assert spec.head.softcap == 30.0
    assert spec.layers[0].mixer.scale == 1 / 12
    assert spec.embed_scale == 8.0


def test_phi_may_turn_in_part_and_by_long_factors() -> None:
    """The older name of longrope, and the length of the first training beside it."""
    long = {"type": "su", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12}
    config = parse(
        "Phi3ForCausalLM", rope_scaling=long, original_max_position_embeddings=1024, partial_rotary_factor=0.75,
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
    )  # fmt: skip
    [rope] = config.spec.rope

    assert (rope.dims, rope.kind, rope.original, len(rope.long)) == (24, "longrope", 1024, 12)
    assert rope.attention_factor == pytest.approx(1.2**0.5)
    assert effective_max_model_len(Settings(), config) == 4096


def test_mistral3_is_mistral_or_ministral() -> None:
    """By the text model's type; an outer ``ForConditionalGeneration`` has either."""
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.1}
    raw = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {**BASE, "model_type": "mistral"}}
    ministral = {**BASE, "model_type": "ministral3", "rope_parameters": rope}

    assert parse_config(raw, {}).sliding_window == 4096
    scale = parse_config({**raw, "text_config": ministral}, {}).spec.layers[0].mixer.position_scale
    assert scale is not None
    assert (scale.beta, scale.original) == (0.1, 256)


def test_nulls_of_a_text_model_leave_a_field_to_the_outer_object() -> None:
    """As files do that transformers 4 has written anew."""
    text = {**BASE, "model_type": "mistral", "torch_dtype": None, "eos_token_id": None}
    raw = {"architectures": ["Mistral3ForConditionalGeneration"], "torch_dtype": "bfloat16", "eos_token_id": 2}
    config = parse_config({**raw, "text_config": text}, {})

    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (2,))


def test_positions_by_kind_of_rope() -> None:
    """Dynamic scaling is taken only if more positions are asked for; yarn's positions are those it stretches to."""
    dynamic = parse("LlamaForCausalLM", rope_scaling={"type": "dynamic", "factor": 2.0})
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}

    assert effective_max_model_len(Settings(), dynamic) == 4096
    assert effective_max_model_len(Settings(max_model_len=8192), dynamic) == 8192
    with pytest.raises(ModelError, match="only 8192 positions"):
        effective_max_model_len(Settings(max_model_len=8193), dynamic)
    assert effective_max_model_len(Settings(), parse("Qwen2ForCausalLM", rope_scaling=yarn)) == 16384


def test_command_r_may_have_more_positions_than_it_has_by_default() -> None:
    """Its config.json has 8192, and 131072 as model_max_length: so many may be asked for, as in vLLM."""
    config = parse("CohereForCausalLM", max_position_embeddings=8192, model_max_length=131072)

    assert effective_max_model_len(Settings(), config) == 8192
    assert effective_max_model_len(Settings(max_model_len=131072), config) == 131072
    with pytest.raises(ModelError, match="only 131072 positions"):
        effective_max_model_len(Settings(max_model_len=131073), config)
    absurd = parse("CohereForCausalLM", model_max_length=10**30)
    with pytest.raises(ModelError, match="only 4096 positions"):
        effective_max_model_len(Settings(max_model_len=8192), absurd)


@pytest.mark.parametrize(
    ("architecture", "needs"),
    [
        ("LongcatFlashForCausalLM", "two attentions in each layer"),
        ("KimiK25ForConditionalGeneration", "a text tower"),
        ("DeepseekV32ForCausalLM", "sparse attention"),
        ("Qwen3NextForCausalLM", "recurrent state"),
        ("Qwen3_5ForConditionalGeneration", "recurrent state"),
        ("Gemma4ForCausalLM", "two sizes of heads"),
        ("Qwen3VLForConditionalGeneration", "a text tower"),
        ("Qwen3VLMoeForConditionalGeneration", "a text tower"),
        ("T5ForConditionalGeneration", "an encoder beside the decoder"),
        ("OlmoeForCausalLM", "a mixture of experts of another kind"),
        ("ModernBertModel", "encoders"),
        ("DistilBertForSequenceClassification", "encoders"),
        ("GraniteMoeHybridForCausalLM", "recurrent state"),
    ],
)
def test_what_would_be_needed_is_said(architecture: str, needs: str) -> None:
    """Others are refused by name, with what they need."""
    assert architecture not in BY_ARCHITECTURE
    with pytest.raises(ModelError, match=f"{architecture}.* it needs .*{needs}"):
        parse(architecture)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.3}, "turns 9 of 32 dimensions"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "su", "short_factor": [1.0]}},
            "short_factor must list 16 numbers",
        ),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers must list 4 layers"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_what_cannot_be_computed_is_refused(architecture: str, fields: dict[str, Any], message: str) -> None:
    """By the field's name."""
    with pytest.raises(ModelError, match=message):
        parse(architecture, **fields)
