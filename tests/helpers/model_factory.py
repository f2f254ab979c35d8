"""Tiny random models in Hugging Face folders, and what transformers generates from them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pagebus.actors.model.config import ModelConfig

CLASSES = {
    "llama2": "Llama",
    "llama3": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Llama 3.1's rule with so short a first training that all three of its wavelength ranges occur in a test."""

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama2": {"rms_norm_eps": 1e-5},
    "llama3": {"rms_norm_eps": 1e-5, "rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": 24},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


@dataclass(frozen=True, eq=False)
class ReferenceConfig:
    """One model that the engine must reproduce exactly. ``arch`` is a key of ``CLASSES``."""

    name: str
    arch: str
    seed: int
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return int({**DEFAULTS, **self.overrides}["vocab_size"])


def _reference(arch: str, seed: int, heads: int, kv_heads: int, head_dim: int, **overrides: Any) -> ReferenceConfig:
    overrides |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    name = f"{arch}-{heads}q{kv_heads}kv-d{head_dim}"
    return ReferenceConfig(name, arch, seed, overrides)


# Llama wants hidden_size to be a multiple of the heads even where head_dim is given.
REFERENCE_CONFIGS: list[ReferenceConfig] = [
    _reference("llama2", 1, 4, 4, 64, hidden_size=64),
    _reference("llama2", 2, 3, 1, 80, hidden_size=96, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    _reference("llama2", 3, 5, 5, 64, hidden_size=80, num_hidden_layers=3),
    _reference("llama3", 4, 6, 2, 64, hidden_size=96),
    _reference("llama3", 5, 7, 1, 96, hidden_size=56, tie_word_embeddings=True),
    _reference("llama3", 6, 4, 2, 128, hidden_size=64, attention_bias=True),
    _reference("mistral", 7, 4, 2, 64),
    _reference("mistral", 8, 7, 1, 80, hidden_size=70, sliding_window=9),
    _reference("mistral", 9, 3, 3, 96, hidden_size=48, sliding_window=33, tie_word_embeddings=True),
    _reference("qwen2", 10, 4, 2, 64, tie_word_embeddings=True),
    _reference("qwen2", 11, 7, 1, 128, hidden_size=56),
    _reference("qwen2", 12, 6, 3, 80, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    _reference("qwen3", 13, 4, 2, 128, tie_word_embeddings=True),
    _reference("qwen3", 14, 5, 5, 64, attention_bias=True),
    _reference("qwen3", 15, 6, 2, 96, use_sliding_window=True, sliding_window=20, max_window_layers=1),
]


def make_model(
    folder: Path, arch: str, *, seed: int, std: float = 0.2, max_shard_size: str | int | None = None, **overrides: Any
) -> Path:
    """Save a random float32 model of family ``arch`` into ``folder`` and return it. ``overrides`` are config fields.

    With the default ``std`` the weights are wide enough that every layer changes the answer, and biases and norms are
    random too: a mistake in any of them shows. There is no tokenizer; prompts are token ids.
    """
    import transformers

    family = CLASSES[arch]
    config_fields = {**DEFAULTS, **FAMILY_DEFAULTS[arch], **overrides}
    config = getattr(transformers, f"{family}Config")(**config_fields, initializer_range=0.2)
    config.dtype = torch.float32
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            weight.normal_(mean, std, generator=generator)
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(str(folder), **shards)
    return folder


def make_reference(folder: Path, config: ReferenceConfig) -> Path:
    """Save one of ``REFERENCE_CONFIGS`` into ``folder`` and return it."""
    return make_model(folder, config.arch, seed=config.seed, **config.overrides)


def num_pages(folder: Path) -> int:
    """Of a block of tokens of this model: where only some layers have a window, blocks of the cache are pages."""
    return 1 + replace(ModelConfig.load(folder), grouped=True).cache_groups.windowed_pages


def load_reference(folder: Path) -> Any:
    """The folder's model in transformers, float32, ready for inference. Experts run one by one: a grouped product may
    want sizes that odd models lack."""
    folder = folder / "reference" if (folder / "reference").is_dir() else folder
    ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return _auto_class().from_pretrained(str(folder), dtype=torch.float32, **ways).eval()


def _auto_class() -> Any:
    """That of text models, with one that transformers has, but knows as a tower alone."""
    import transformers

    auto = transformers.AutoModelForCausalLM
    auto.register(transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True)
    return auto


def reference_generate(
    folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int, eos: int | list[int] | None = None
) -> list[list[int]]:
    """Greedy float32 continuations by transformers, of one prompt at a time; ends early only at ``eos``."""
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    return greedy_answers(load_reference(folder), prompts, max_tokens, ends)


def greedy_answers(
    reference: Any, prompts: Sequence[Sequence[int]], count: int, ends: Set[int] = frozenset(), margin: float = -1.0
) -> list[list[int]]:
    """Greedy continuations of up to ``count`` tokens, until one of ``ends``, or as far as the best logit is by more
    than ``margin`` before the second.

    All prompts together are guessed at first, in one batch; each guess is then read by a pass over its prompt alone,
    whose logits decide every token. A wrong guess costs one more pass.
    """
    answers = []
    for prompt, guess in zip(prompts, _guesses(reference, prompts, count), strict=True):
        answer: list[int] = []
        while len(answer) < count and not ends & set(answer[-1:]):
            known = len(prompt) + len(answer) - 1
            found = _following(reference, [*prompt, *answer], guess[: count - len(answer) - 1], known, margin)
            last = next((place for place, token in enumerate(found) if token in ends), len(found))
            answer += found[: last + 1]
            guess = []
            if not found:
                break
        answers.append(answer)
    return answers


def _following(reference: Any, ids: list[int], guess: list[int], first: int, margin: float) -> list[int]:
    """The tokens behind ``ids``, of which the last is at ``first``: as many as ``guess`` is right, and one more."""
    with torch.inference_mode():
        best = reference(torch.tensor([ids + guess])).logits[0, first:].topk(2)
    found: list[int] = []
    for (value, second), token in zip(best.values.tolist(), best.indices[:, 0].tolist(), strict=True):
        if value - second <= margin or found != guess[: len(found)]:
            break
        found.append(token)
    return found


def _guesses(reference: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What transformers generates in one batch. Nothing where angles go by the longest prompt of it."""
    rope = getattr(reference.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return [[] for _ in prompts]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 0
    with torch.inference_mode():
        out = reference.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
    return out[:, longest:].tolist()


def reference_logits(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(ids), V] of one whole sequence, by transformers in float32."""
    with torch.inference_mode():
        return load_reference(folder)(torch.tensor([list(ids)])).logits[0]


def make_golden(folder: Path, model_type: str, fields: Mapping[str, Any], *, seed: int = 1, std: float = 0.2) -> Path:
    """Save a random float32 model of transformers' ``model_type`` into ``folder`` and return it: ``DEFAULTS`` and these
    ``fields``; norms, biases and all else drawn anew."""
    import transformers

    if model_type == "internlm2":
        from tests.actors.executor.models.internlm2 import make_internlm2

        return make_internlm2(folder, fields, seed=seed, std=std)
    config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy({**DEFAULTS, **fields}))
    config.dtype = torch.float32
    model = _auto_class().from_config(config)
    redraw(model, seed, std)
    model.save_pretrained(str(folder))
    return folder


def redraw(model: Any, seed: int, std: float = 0.2) -> None:
    """Random parameters everywhere; norms keep their mean. Sinks and routers' biases are large: small ones hide."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            mean = float(weight.mean()) if "norm" in name else 0.0
            large = name.endswith(("self_attn.sinks", "router.bias"))
            weight.normal_(mean, 2.0 if large else std, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)
