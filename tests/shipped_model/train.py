"""Trains the model that Pagebus ships: a Llama of 5.5 million parameters that knows what common English words mean.

    python -m tests.shipped_model.train --wordnet /usr/share/wordnet --out actors/shipped_model

Takes about six minutes on one H200. Everything is drawn from ``--seed``; the text is that of Debian's ``wordnet-base``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tests.shipped_model.wordnet import SYSTEM_PROMPTS, Entry, load_entries, turn

BOS, USER, ASSISTANT, SYSTEM, END = "<|bos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
SPECIAL = (BOS, USER, ASSISTANT, SYSTEM, END)
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Only the roles system, user and assistant are known.') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim }}"
    "{% if not (loop.last and continue_final_message is defined and continue_final_message) %}"
    "{{ '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONTEXT_TOKENS = 1024
IGNORED = -100
"""Label of a token that is read but not learned (what the user says)."""


def train_tokenizer(entries: list[Entry], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over the definitions, examples and questions."""
    rng = random.Random(0)
    text = [entry.definition + " " + entry.example for entry in entries]
    text += [" ".join(turn(entries, rng)) for _ in range(20_000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def documents(entries: list[Entry], tokenizer: Tokenizer, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """``count`` conversations, shuffled and concatenated: token ids [T] int32 and labels [T] int32."""
    rng = random.Random(seed)
    pieces: list[tuple[str, bool]] = []
    for _ in range(count):
        pieces.append((BOS, False))
        if rng.random() < 0.1:
            pieces.append((rng.choice(entries).definition + END, True))
            continue
        if rng.random() < 0.1:
            pieces.append((f"{SYSTEM}{rng.choice(SYSTEM_PROMPTS)}{END}", False))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            asked, answer = turn(entries, rng)
            pieces.append((f"{USER}{asked}{END}{ASSISTANT}", False))
            pieces.append((f"{answer}{END}", True))
    encoded = tokenizer.encode_batch_fast([text for text, _ in pieces], add_special_tokens=False)
    ids = [np.asarray(encoding.ids, np.int32) for encoding in encoded]
    labels = [piece if learn else np.full_like(piece, IGNORED) for piece, (_, learn) in zip(ids, pieces, strict=True)]
    return np.concatenate(ids), np.concatenate(labels)


def batches(
    ids: np.ndarray, labels: np.ndarray, bos: int, tokens_per_batch: int, seed: int, device: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (input ids, labels) of shape [rows, length]; rows start at a conversation, lengths alternate."""
    rng = np.random.default_rng(seed)
    starts = np.flatnonzero(ids == bos)
    on_device = torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device)
    for turn_index in range(1_000_000_000):
        length = (256, 256, CONTEXT_TOKENS)[turn_index % 3]
        usable = starts[starts < len(ids) - length]
        chosen = torch.from_numpy(rng.choice(usable, tokens_per_batch // length)).to(device)
        index = chosen[:, None] + torch.arange(length, device=device)
        yield on_device[0][index].long(), on_device[1][index].long()


def new_model(vocab_size: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(END),
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def fit(
    model: LlamaForCausalLM, data: Iterator[tuple[torch.Tensor, torch.Tensor]], seconds: float, peak_rate: float
) -> None:
    """AdamW with a short warm-up and a cosine over the time budget."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    device = next(model.parameters()).device
    forward = torch.compile(model, dynamic=False) if device.type == "cuda" else model
    started, step = time.monotonic(), 0
    while (elapsed := time.monotonic() - started) < seconds:
        rate = peak_rate * min(1.0, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * min(1.0, elapsed / seconds)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        input_ids, labels = next(data)
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 200 == 0:
            print(f"{elapsed:6.0f} s  step {step}  loss {loss.item():.4f}  rate {rate:.2e}", flush=True)


@torch.inference_mode()
def share_known(model: LlamaForCausalLM, tokenizer: Tokenizer, entries: list[Entry], batch: int = 1000) -> float:
    """Share of words whose definition is, token for token, the greedy answer to "What is <word>?"."""
    device = next(model.parameters()).device
    known = 0
    for first in range(0, len(entries), batch):
        rows = entries[first : first + batch]
        prompts = [f"{BOS}{USER}What is {entry.word}?{END}{ASSISTANT}" for entry in rows]
        asked = [len(e.ids) for e in tokenizer.encode_batch(prompts, add_special_tokens=False)]
        full = tokenizer.encode_batch(
            [prompt + entry.definition + END for prompt, entry in zip(prompts, rows, strict=True)],
            add_special_tokens=False,
        )
        width = max(len(e.ids) for e in full)
        ids = torch.tensor([e.ids + [0] * (width - len(e.ids)) for e in full], device=device)
        guesses = model(input_ids=ids).logits[:, :-1].argmax(-1)
        position = torch.arange(1, width, device=device)
        ends = torch.tensor([len(e.ids) for e in full], device=device)
        begins = torch.tensor(asked, device=device)
        checked = (position >= begins[:, None]) & (position < ends[:, None])
        known += int(((guesses == ids[:, 1:]) | ~checked).all(1).sum())
    return known / len(entries)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes a Hugging Face folder: bfloat16 safetensors, tokenizer with chat template, generation defaults."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=SPECIAL.index(BOS), eos_token_id=SPECIAL.index(END), do_sample=True, temperature=0.2, top_p=0.9
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--words", type=int, default=12_000)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--conversations", type=int, default=400_000)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    entries = load_entries(args.wordnet, args.words)
    tokenizer = train_tokenizer(entries, args.vocab_size)
    ids, labels = documents(entries, tokenizer, args.conversations, args.seed)
    print(
        f"{len(entries)} words, {len(ids) / 1e6:.1f} M tokens, {tokenizer.get_vocab_size()} token vocabulary",
        flush=True,
    )
    model = new_model(tokenizer.get_vocab_size()).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    data = batches(ids, labels, SPECIAL.index(BOS), args.batch_tokens, args.seed, device)
    fit(model, data, args.seconds, peak_rate=3e-3)
    save(model.eval(), tokenizer, args.out)
    for count in (1000, 4000, len(entries)):
        print(f"known of the {count} most used words: {share_known(model, tokenizer, entries[:count]):.1%}", flush=True)


if __name__ == "__main__":
    main()
