"""What a model makes of a prompt's hidden states, where it generates nothing: an embedding, or the scores of labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Pooling: TypeAlias = Literal["cls", "mean", "last"]
"""Which of a prompt's final hidden states count: the first token's, the mean of all, or the last token's."""
Activation: TypeAlias = Literal["sigmoid", "softmax", "none"]
"""What makes probabilities of a classifier's numbers."""


Between: TypeAlias = Literal["none", "tanh"]
"""What is done to the result of a product."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of the pooled state, and ``act`` of it. ``name``: the tensors are ``name.weight`` and ``name.bias``;
    ``file`` is the folder that holds them as ``linear``, for those that are not among the model's own."""

    name: str
    width: int
    bias: bool = True
    act: Between = "none"
    file: str = ""


@dataclass(frozen=True, slots=True)
class Pooler:
    """``head``: the products of the pooled state, in order. With ``labels`` it is a classifier, whose last product has
    a number for each. Without, it embeds, and ``normalize`` scales vectors to length 1.

    ``between``: two token ids. The only number is by how much the second is likelier than the first as the next token,
    as a difference of logits. ``joined``: a pair of texts is one text after the other, with nothing between.
    ``most_tokens``: longer prompts than the model was trained for (sentence-transformers' ``max_seq_length``).
    """

    pooling: Pooling = "last"
    normalize: bool = True
    head: tuple[Product, ...] = ()
    labels: tuple[str, ...] = ()
    activation: Activation = "sigmoid"
    between: tuple[int, int] | None = None
    joined: bool = True
    most_tokens: int | None = None

    @property
    def classifies(self) -> bool:
        return bool(self.labels)

    @property
    def has_head(self) -> bool:
        return bool(self.head) or self.between is not None

    def width(self, hidden_size: int) -> int:
        """How many numbers come out."""
        if self.between is not None:
            return 1
        return self.head[-1].width if self.head else hidden_size
