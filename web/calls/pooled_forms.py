"""The forms of answers that are made of a prompt's pooled state: scores of texts, and classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Activation = Literal["sigmoid", "softmax", "none"]


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """``num_queries``: that many prompts, the call's first, are embedded and compared with the others, one with all or
    each with its own; None: each prompt is a pair of texts, whose only number becomes a score by ``activation``.

    ``documents`` are ranked, if there are any: the ``top_n`` best are told (0: all), with their text if ``with_texts``.
    """

    num_queries: int | None = None
    activation: Activation = "sigmoid"
    documents: tuple[str, ...] = ()
    top_n: int = 0
    with_texts: bool = True


@dataclass(frozen=True, slots=True)
class ClassForm:
    """A classifier's ``labels``, and what makes probabilities of its numbers."""

    labels: tuple[str, ...]
    activation: Activation


def activated(numbers: NDArray[np.float32], activation: Activation) -> list[float]:
    """A classifier's numbers [L] as probabilities, or as they are."""
    exact = numbers.astype(np.float64)
    if activation == "sigmoid":
        exact = 1 / (1 + np.exp(-exact.clip(-500, 500)))
    elif activation == "softmax":
        powers = np.exp(exact - exact.max())
        exact = powers / powers.sum()
    return [float(each) for each in exact]


def cosine(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """Of the angle between two vectors [H]; 0 where one has no length."""
    one, other = first.astype(np.float64), second.astype(np.float64)
    return float(one @ other / max(float(np.linalg.norm(one) * np.linalg.norm(other)), 1e-12))
