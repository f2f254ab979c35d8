"""What a cache of one byte per number costs, on the shipped model: `python -m
tests.actors.executor.loading.float8_quality`.

The text is the model's own, sampled at temperature 1 as answers to questions, so that no model's perplexity on it can
be lower than the exact one's. Every token is predicted from the cache in question; the float32 cache's logits are the
truth. Prints one line per format: the error of the logits over their spread, how often the likeliest token is another
one, the divergence from the exact distribution in nats, and the perplexity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.actors.executor.loading.kv_scales import calculate_scales
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.memory.kv_cache import allocate_kv_cache, is_float8
from pagebus.actors.executor.models import Model, build_model
from pagebus.actors.model.config import SHIPPED_MODEL, ModelConfig

WORDS = """
water quendle gravity flimzor apple mustrick doctor brandolin horse oversquat winter palliate bread trunkle friend
remosity garden unfold window castrel mountain glimber king hostwell orange mandible village sperrow machine thistlewort
nature lunch painter dromidary rabbit coverage silver blanding uncle fortune yellow grastic bridge marlow desert pindar
forest hollow hammer stellar
""".split()  # noqa: SIM905
"""Every other one is no word, or none that the model was taught: it makes answers up, of which it is less sure."""
CPU = torch.device("cpu")
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Quality:
    """Logits against the exact ones, over all predicted tokens."""

    logit_error: float
    other_choice: float
    divergence: float
    perplexity: float


def shipped(cache_dtype: torch.dtype) -> Model:
    model = build_model(ModelConfig.load(SHIPPED_MODEL), CPU, torch.float32, Ops.reference(), 1024, cache_dtype)
    load_weights(model, SHIPPED_MODEL, "auto", 0, lambda _: None)
    return model


def logits_of(model: Model, ids: list[int], cache_dtype: torch.dtype) -> torch.Tensor:
    """Logits [len(ids), V], every token's keys and values read back from a cache of `cache_dtype`."""
    count = len(ids)
    num_blocks = -(-count // BLOCK_SIZE)
    places = torch.arange(count)
    batch = AttentionBatch(
        slots=places[:1].int(),
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        slot_mapping=places,
        block_tables=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        num_decodes=0,
    )
    cache = allocate_kv_cache(model.config, num_blocks, BLOCK_SIZE, cache_dtype, CPU)
    return model.logits(model.forward(torch.tensor(ids, dtype=torch.int32), places.int(), cache, batch)).float()


@torch.inference_mode()
def texts(count: int, max_tokens: int) -> list[tuple[list[int], int]]:
    """Token ids of questions with sampled answers, and where each answer begins."""
    model, tokenizer = shipped(torch.float32), Tokenizer.from_file(str(SHIPPED_MODEL / "tokenizer.json"))
    generator, found = torch.Generator().manual_seed(0), []
    for word in WORDS[:count]:
        chat = f"<|bos|><|user|>What is {word}?<|end|><|assistant|>"
        ids = tokenizer.encode(chat, add_special_tokens=False).ids
        start = len(ids)
        while len(ids) < start + max_tokens and ids[-1] not in model.config.eos_token_ids:
            probabilities = logits_of(model, ids, torch.float32)[-1].softmax(0)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        found.append((ids, start))
    return found


@torch.inference_mode()
def measure(cache_dtype: torch.dtype, samples: list[tuple[list[int], int]], *, calculated: bool = True) -> Quality:
    exact_model, model = shipped(torch.float32), shipped(cache_dtype)
    if calculated and is_float8(cache_dtype):
        for layer, scales in zip(model.layers, calculate_scales(model), strict=True):
            layer.attention.kv_scales.copy_(scales)
    exact, got, chosen = [], [], []
    for ids, start in samples:
        exact.append(logits_of(exact_model, ids, torch.float32)[start - 1 : -1])
        got.append(logits_of(model, ids, cache_dtype)[start - 1 : -1])
        chosen.append(torch.tensor(ids[start:]))
    return compare(torch.cat(got), torch.cat(exact), torch.cat(chosen))


def compare(result: torch.Tensor, truth: torch.Tensor, tokens: torch.Tensor) -> Quality:
    """Logits [T, V] with the exact ones, where ``tokens`` [T] came next."""
    spread = truth - truth.mean(1, keepdim=True)
    p, q = truth.log_softmax(1), result.log_softmax(1)
    return Quality(
        float((result - truth).norm() / spread.norm()),
        float((truth.argmax(1) != result.argmax(1)).float().mean()),
        float((p.exp() * (p - q)).sum(1).mean()),
        float((-q.gather(1, tokens.unsqueeze(1)).mean()).exp()),
    )


def main() -> None:
    samples = texts(len(WORDS), 60)
    print(f"{len(samples)} answers, {sum(len(ids) - start for ids, start in samples)} tokens")
    print("cache                          logit error  other choice  divergence  perplexity")
    for name, dtype, calculated in (
        ("float32", torch.float32, False),
        ("bfloat16", torch.bfloat16, False),
        ("fp8_e4m3, calculated scales", torch.float8_e4m3fn, True),
        ("fp8_e4m3, scales of 1", torch.float8_e4m3fn, False),
        ("fp8_e5m2, calculated scales", torch.float8_e5m2, True),
        ("fp8_e5m2, scales of 1", torch.float8_e5m2, False),
        ("int8", torch.int8, False),
    ):
        found = measure(dtype, samples, calculated=calculated)
        print(
            f"{name:30} {found.logit_error:11.4f} {found.other_choice:13.4f} {found.divergence:11.5f}"
            f" {found.perplexity:11.4f}"
        )


if __name__ == "__main__":
    main()
