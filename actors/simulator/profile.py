"""A device's profile: predicts the time of a step from a few measured numbers, read from a JSON file.

A step's time is the sum of

* ``base``: everything whose cost depends only on the number of tokens in the step (weights read, matrix products,
  norms, sampling, launch overhead), a piecewise linear table. Reading the weights bounds it below, arithmetic makes it
  rise: the larger of both, as measured;
* keys and values read: the context of all decode rows, at the attention kernel's read rate;
* prefill attention: pairs of a query and an attended token, at the rate of the prefill kernel;
* blocks copied on the device. Swapped blocks are copied beside the steps, at ``copy_bytes_per_s``.

A step of more than ``graph_tokens`` tokens is launched kernel by kernel, and takes at least ``eager_floor_ms``.

Prompts reach the scheduler in batches: the tokenizer takes all waiting prompts, at ``tokenizer_token_s`` per token.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parent / "profiles"


class ProfileError(ValueError):
    """A profile that does not exist or makes no sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One device with one model. ``base_ms[i]`` belongs to ``base_tokens[i]`` (rising, from 1).

    ``bus_s``: one way from scheduler to executor, or back. ``request_s``: from the client to the scheduler (HTTP,
    tokenizer), without ``tokenizer_token_s``. ``reply_s``: from the end of a step to the client.
    ``scheduler_input_s``, ``scheduler_plan_s``: what taking in one message and making one plan cost the scheduler.
    ``window``: tokens on which all layers look back; or, where only some layers have a window, ``windowed_tokens`` on
    which they do, with ``windowed_pages`` pages of a block (:mod:`pagebus.actors.model.cache_groups`; ``num_blocks``
    are pages then). 0: none.
    """

    description: str = ""
    num_blocks: int
    block_size: int = 16
    max_model_len: int
    kv_bytes_per_token: int
    weight_bytes: int = 0
    base_tokens: tuple[int, ...]
    base_ms: tuple[float, ...]
    kv_read_bytes_per_s: float
    attention_flops_per_pair: float
    attention_flops_per_s: float
    graph_tokens: int = 0
    eager_floor_ms: float = 0.0
    copy_bytes_per_s: float = 4e10
    bus_s: float = 0.0
    request_s: float = 0.0
    tokenizer_token_s: float = 0.0
    reply_s: float = 0.0
    scheduler_input_s: float = 0.0
    scheduler_plan_s: float = 0.0
    window: int = 0
    windowed_pages: int = 0
    windowed_tokens: int = 0

    def base_table_s(self, most_tokens: int) -> list[float]:
        """``base`` in seconds for 0 to ``most_tokens`` tokens; beyond the table its last slope goes on."""
        tokens, times = np.array(self.base_tokens, float), np.array(self.base_ms) / 1e3
        counts = np.arange(most_tokens + 1, dtype=float)
        table: NDArray[np.float64] = np.interp(counts, tokens, times)
        if len(tokens) > 1:
            slope = (times[-1] - times[-2]) / (tokens[-1] - tokens[-2])
            table += np.maximum(counts - tokens[-1], 0.0) * slope
        table[0] = 0.0
        return list(table.tolist())

    @property
    def kv_token_s(self) -> float:
        """Reading the keys and values of one context token."""
        return self.kv_bytes_per_token / self.kv_read_bytes_per_s

    @property
    def pair_s(self) -> float:
        """One pair of a prefill query and an attended token."""
        return self.attention_flops_per_pair / self.attention_flops_per_s

    @property
    def has_windows(self) -> bool:
        """Whether some layer does not read everything."""
        return bool(self.window or self.windowed_pages)

    def pairs(self, counts: NDArray[np.float64] | int, ends: NDArray[Any]) -> NDArray[np.float64]:
        """Tokens that the queries of rows see [n], as a mean over all layers: of ``counts`` tokens each, the last of
        which is the ``ends``-th of its sequence."""
        every = np.asarray(counts * (ends - (counts - 1) / 2), np.float64)
        if not self.has_windows:
            return every
        window, pages = self.window or self.windowed_tokens, self.windowed_pages
        seen = _seen(ends, window) - _seen(ends - counts, window)
        return (every + pages * seen) / (1 + pages) if pages else seen

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast a long step computes prompt tokens, without attention to others."""
        return self.base_tokens[-1] / self.base_ms[-1] * 1e3


def _seen(num_tokens: NDArray[Any], window: int) -> NDArray[np.float64]:
    """Tokens that the first ``num_tokens`` queries of sequences [n] see through a window."""
    inside = np.minimum(num_tokens, window)
    return np.asarray(inside * (inside + 1) / 2 + window * (num_tokens - inside), np.float64)


def names() -> list[str]:
    """Profiles that come with Pagebus."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_profile(name: str) -> Profile:
    """The profile of that name, or in that file.

    Raises:
        ProfileError: there is none, or it makes no sense.
    """
    path = FOLDER / f"{name}.json"
    if not path.exists():
        path = Path(name)
    try:
        return from_json(path.read_text())
    except OSError as error:
        raise ProfileError(f"no profile {name!r}: neither a file nor one of {', '.join(names())}") from error
    except (ValueError, TypeError) as error:
        raise ProfileError(f"profile {path}: {error}") from error


def from_json(text: str) -> Profile:
    """A profile from its JSON text.

    Raises:
        ValueError, TypeError: it is none.
    """
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    for key in ("base_tokens", "base_ms"):
        raw[key] = tuple(raw.get(key, ()))
    profile = Profile(**raw)
    tokens = profile.base_tokens
    if not tokens or len(tokens) != len(profile.base_ms) or list(tokens) != sorted(set(tokens)):
        raise ValueError("base_tokens must rise, and base_ms have as many values")
    rates = (profile.kv_read_bytes_per_s, profile.attention_flops_per_s, profile.copy_bytes_per_s)
    if min(*rates, *profile.base_ms, profile.num_blocks, profile.block_size, profile.max_model_len) <= 0:
        raise ValueError("rates, times and sizes must be above 0")
    windows: tuple[Any, ...] = profile.window, profile.windowed_pages, profile.windowed_tokens
    if not all(isinstance(each, int) and each >= 0 for each in windows):
        raise ValueError("window, windowed_pages and windowed_tokens must be whole numbers from 0 on")
    if bool(profile.windowed_pages) != bool(profile.windowed_tokens) or (profile.window and profile.windowed_pages):
        raise ValueError("there is either a window, or both windowed_pages and windowed_tokens")
    return profile


def to_json(profile: Profile) -> str:
    """The profile as text that :func:`load_profile` reads."""
    return json.dumps(dataclasses.asdict(profile), indent=2) + "\n"
