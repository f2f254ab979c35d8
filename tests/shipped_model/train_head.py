"""Trains an EAGLE-3 head for the model that Pagebus ships, which guesses its next tokens (docs/speculation.md).

    python -m tests.shipped_model.train_head --wordnet /usr/share/wordnet --out actors/shipped_model/eagle3

Takes ``--seconds`` on a CPU. The head learns what the model says next on the model's own training text. As the paper
has it (https://arxiv.org/abs/2503.01840), its guesses are unrolled: from the second on, its own features stand in for
the model's. It is written in the format of the ``speculators`` library, and has the model's embedding.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaForCausalLM

from tests.shipped_model.train import BOS, IGNORED, SPECIAL, documents
from tests.shipped_model.wordnet import load_entries

FOLDER = Path(__file__).parents[2] / "actors" / "shipped_model"
TAPS = (2, 4, 5)
HEADS, KV_HEADS, HEAD_DIM, WIDTH, BASE, EPS = 2, 1, 64, 192, 10000.0, 1e-5
ROW_TOKENS = 128


class Head(nn.Module):
    """Parameters have the names of the format."""

    def __init__(self, model: LlamaForCausalLM, known: torch.Tensor) -> None:
        super().__init__()
        hidden, vocab = model.config.hidden_size, model.config.vocab_size
        self.embedding = model.get_input_embeddings().weight.detach()
        self.known = known
        self.places = torch.full((vocab,), IGNORED).index_copy(0, known, torch.arange(len(known)))
        self.fc = nn.Linear(len(TAPS) * hidden, hidden, bias=False)
        layer = nn.ModuleDict({name: nn.RMSNorm(hidden, EPS) for name in ("input_layernorm", "hidden_norm")})
        layer["post_attention_layernorm"] = nn.RMSNorm(hidden, EPS)
        sizes = {"q_proj": HEADS, "k_proj": KV_HEADS, "v_proj": KV_HEADS}
        products = {name: nn.Linear(2 * hidden, size * HEAD_DIM, bias=False) for name, size in sizes.items()}
        products["o_proj"] = nn.Linear(HEADS * HEAD_DIM, hidden, bias=False)
        layer["self_attn"] = nn.ModuleDict(products)
        feed = {name: nn.Linear(hidden, WIDTH, bias=False) for name in ("gate_proj", "up_proj")}
        layer["mlp"] = nn.ModuleDict({**feed, "down_proj": nn.Linear(WIDTH, hidden, bias=False)})
        self.layers = nn.ModuleList([layer])
        self.norm = nn.RMSNorm(hidden, EPS)
        self.lm_head = nn.Linear(hidden, len(known), bias=False)

    def unrolled(self, hidden: torch.Tensor, ids: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """hidden [B, T, taps * H] and ids [B, T] -> features [B, T - depth - 1, H] of each guess: of the j-th, from 0
        on, at place t that of token t + j + 2, made from the model's hidden states up to t."""
        length = ids.shape[1] - depth - 1
        features, keys, values, found = self.fc(hidden[:, :length]), [], [], []
        layer: Any = self.layers[0]
        for step in range(depth):
            embedded = layer["input_layernorm"](F.embedding(ids[:, step + 1 : step + 1 + length], self.embedding))
            normed = layer["hidden_norm"](features)
            x, part = torch.cat((embedded, normed), dim=-1), layer["self_attn"]
            q, k, v = (
                part[f"{name}_proj"](x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for name in ("q", "k", "v")
            )
            places = torch.arange(length) + step
            keys.append(_turned(k, places))
            values.append(v)
            attended = _attend(_turned(q, places), keys, values)
            stream = normed + part["o_proj"](attended.transpose(1, 2).flatten(2))
            x, feed = layer["post_attention_layernorm"](stream), layer["mlp"]
            features = stream + feed["down_proj"](F.silu(feed["gate_proj"](x)) * feed["up_proj"](x))
            found.append(features)
        return found

    def save(self, out: Path, config: Any) -> None:
        """In bfloat16."""
        out.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in self.state_dict().items()}
        tensors["d2t"] = self.known - torch.arange(len(self.known))
        tensors["t2d"] = self.places >= 0
        save_file(tensors, out / "model.safetensors")
        layer = {
            "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
            "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM, "intermediate_size": WIDTH, "rms_norm_eps": EPS, "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
            "max_position_embeddings": config.max_position_embeddings,
        }  # fmt: skip
        told = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "draft_vocab_size": len(self.known), "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": list(TAPS), "transformer_layer_config": layer,
        }  # fmt: skip
        (out / "config.json").write_text(json.dumps(told, indent=2) + "\n")


def _turned(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    angles = torch.outer(places, BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attend(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Each place sees what the model's hidden states made up to there, and its own guesses since."""
    length, scale = q.shape[2], HEAD_DIM**-0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = [(q @ keys[0].transpose(2, 3)).mul(scale).masked_fill(hidden, -math.inf)]
    scores += [(q * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
    weights = torch.cat(scores, dim=-1).softmax(-1)
    out = weights[..., :length] @ values[0]
    for place, value in enumerate(values[1:]):
        out = out + weights[..., length + place : length + place + 1] * value
    return out


@torch.no_grad()
def told_by(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [B, T, taps * H] before the taps, and the tokens that the model would say next [B, T]."""
    out = model(input_ids=ids, output_hidden_states=True)
    return torch.cat([out.hidden_states[layer] for layer in TAPS], dim=-1), out.logits.argmax(-1)


def guesses(
    head: Head, model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor, depth: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of each guess where the model speaks, and what it says there."""
    hidden, said = told_by(model, ids)
    found = []
    for step, features in enumerate(head.unrolled(hidden, ids, depth)):
        guessed, length = step + 2, features.shape[1]
        asked = labels[:, guessed : guessed + length] != IGNORED
        logits = head.lm_head(head.norm(features[asked]))
        found.append((logits, said[:, guessed - 1 : guessed - 1 + length][asked]))
    return found


def accuracy(head: Head, model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor, depth: int) -> list[float]:
    """Share of guesses that are what the model says, by place, if those before were right."""
    with torch.no_grad():
        found = guesses(head, model, ids, labels, depth)
    return [float((head.known[logits.argmax(-1)] == wanted).float().mean()) for logits, wanted in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--words", type=int, default=12_000)
    parser.add_argument("--conversations", type=int, default=60_000)
    parser.add_argument("--known", type=int, default=1536, help="tokens that the head knows")
    parser.add_argument("--depth", type=int, default=2, help="guesses that are unrolled")
    parser.add_argument("--rows", type=int, default=16, help="of 128 tokens in a step")
    parser.add_argument("--seconds", type=float, default=840)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    model = LlamaForCausalLM.from_pretrained(str(FOLDER), dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    entries = load_entries(args.wordnet, args.words)
    text = documents(entries, tokenizer, args.conversations, args.seed)
    flat_ids, flat_labels = (torch.from_numpy(each).long() for each in text)
    counts = torch.bincount(flat_labels[flat_labels != IGNORED], minlength=model.config.vocab_size)
    known = counts.argsort(descending=True)[: args.known].sort().values
    share = counts[known].sum() / counts.sum()
    print(f"{len(flat_ids) / 1e6:.1f} M tokens; the head knows {share:.1%} of what is said", flush=True)
    starts = (flat_ids[:-ROW_TOKENS] == SPECIAL.index(BOS)).nonzero().squeeze(1).numpy()
    held, starts = starts[-64:], starts[:-64]

    def rows(chosen: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.from_numpy(chosen)[:, None] + torch.arange(ROW_TOKENS)
        return flat_ids[index], flat_labels[index]

    head = Head(model, known)
    print(f"{sum(parameter.numel() for parameter in head.parameters()) / 1e6:.2f} M parameters", flush=True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    began, step = time.monotonic(), 0
    while (spent := time.monotonic() - began) < args.seconds:
        rate = args.rate * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * spent / args.seconds))
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses = [
            F.cross_entropy(logits, head.places[wanted], ignore_index=IGNORED)
            for logits, wanted in guesses(head, model, *rows(rng.choice(starts, args.rows)), args.depth)
        ]
        loss = torch.stack([0.8**place * each for place, each in enumerate(losses)]).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0:
            right = " ".join(f"{share:.3f}" for share in accuracy(head, model, *rows(held), args.depth))
            print(f"{spent:5.0f} s  step {step}  loss {loss.item():.3f}  right, by place: {right}", flush=True)
    head.save(args.out, model.config)
    print(f"{(args.out / 'model.safetensors').stat().st_size} bytes after {step} steps of {args.rows} rows")


if __name__ == "__main__":
    main()
