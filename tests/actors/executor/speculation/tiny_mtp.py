"""MTP layers with random weights behind tiny models, and the plainest thing that computes one: transformers runs none,
but its decoder layers are what such a layer holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.helpers.model_factory import load_reference

FILE = "model.safetensors"
NUM_LIKELY = 8
Tensors = dict[str, torch.Tensor]


def add_layer(folder: Path, *, copies: bool, own: bool = False, seed: int = 3) -> Path:
    """Store such a layer behind those of the model in ``folder``: its block is the model's last one, drawn anew. With
    ``copies`` of the model's embedding and head, or with its ``own``. A head that is not tied says one of few
    tokens."""
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / FILE)
    generator, count, hidden = torch.Generator().manual_seed(seed), raw["num_hidden_layers"], raw["hidden_size"]

    def drawn(like: torch.Tensor, name: str) -> torch.Tensor:
        mean = float(like.mean()) if "norm" in name else 0.0
        return mean + torch.randn(like.shape, generator=generator) * 0.2

    last, prefix = f"model.layers.{count - 1}.", f"model.layers.{count}."
    layer = {name.replace(last, prefix): drawn(each, name) for name, each in tensors.items() if name.startswith(last)}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{prefix}{name}.weight"] = 1 + torch.randn(hidden, generator=generator) / 5
    layer[f"{prefix}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
    embedding = tensors["model.embed_tokens.weight"]
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"][NUM_LIKELY:] = 0
    head = tensors.get("lm_head.weight", embedding)
    for name, whole in (("embed_tokens", embedding), ("shared_head.head", head)) if copies or own else ():
        layer[f"{prefix}{name}.weight"] = drawn(whole, "") if own else whole.clone()
    save_file({**tensors, **layer}, folder / FILE)
    (folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    return folder


class PlainMtp:
    """The model in ``folder`` with its layer, in transformers and torch."""

    def __init__(self, folder: Path) -> None:
        tensors, self.model = load_file(folder / FILE), load_reference(folder)
        inner, count = self.model.model, self.model.config.num_hidden_layers
        prefix, eps = f"model.layers.{count}.", self.model.config.rms_norm_eps
        self._own: Tensors = {
            name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)
        }
        self._eps = eps
        self._embedding = self._own.get("embed_tokens.weight", tensors["model.embed_tokens.weight"])
        head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        self._head = self._own.get("shared_head.head.weight", head)
        # The model's last layer, with the weights of this one: transformers knows how to rename and stack them.
        renamed = {name.replace(prefix, f"model.layers.{count - 1}."): e for name, e in tensors.items()
                   if name.startswith(prefix)}  # fmt: skip
        alone = folder / "with_the_layer"
        if not alone.is_dir():
            alone.mkdir()
            known = [name for name in tensors if not name.startswith(prefix)]
            save_file({name: renamed.get(name, tensors[name]) for name in known}, alone / FILE)
            (alone / "config.json").write_text((folder / "config.json").read_text())
        self._block = load_reference(alone).model.layers[-1]
        self._rotary = inner.rotary_emb

    @torch.inference_mode()
    def drafts(self, ids: Sequence[int], count: int) -> list[int]:
        """``count`` drafts behind the tokens ``ids`` [L]; all is computed anew for each."""
        hidden = self.model.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        tokens, found = list(ids), list[int]()
        for _ in range(count):
            embedded = F.embedding(torch.tensor(tokens[1:]), self._embedding)
            joined = torch.cat((self._norm("enorm", embedded), self._norm("hnorm", hidden)), dim=1)
            x = (joined @ self._own["eh_proj.weight"].T).unsqueeze(0)
            places = torch.arange(x.shape[1]).unsqueeze(0)
            mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
            out: Any = self._block(
                x, attention_mask=mask, position_ids=places, position_embeddings=self._rotary(x, places)
            )
            x = (out[0] if isinstance(out, tuple) else out).reshape(len(places[0]), -1)
            found.append(int((self._norm("shared_head.norm", x[-1:]) @ self._head.T).argmax()))
            hidden = torch.cat((hidden, x[-1:]))
            tokens.append(found[-1])
        return found

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * self._own[f"{name}.weight"]
