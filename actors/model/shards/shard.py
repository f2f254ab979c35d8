"""Which part of a model one rank of a group holds: ranges of heads, of widths, of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.spec import Gqa, Mla, ModelSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of ``rank``, one of ``world``, of the model that ``whole`` describes.

    What is divided is divided into ranges of almost equal length, in the order of ranks. All ranks compute the same
    residual stream: norms of the hidden size, routers and pooled heads are whole on each. Without ``divides_layers`` so
    are all layers. ``by_expert``: each rank has some experts of a mixture, whole, in place of a part of each.
    """

    rank: int
    world: int
    whole: ModelSpec
    divides_layers: bool = True
    by_expert: bool = False

    def of(self, count: int) -> range:
        """This rank's of ``count`` things."""
        return share(count, self.rank, self.world)

    @property
    def leads(self) -> bool:
        """Whether this rank adds what must be added once."""
        return self.rank == 0

    def kv_heads(self, mixer: Gqa) -> range:
        """This rank's heads of keys and values. Where there are fewer than ranks, several ranks hold the same one; all
        hold the latents of latent attention.

        Raises:
            ModelError: they cannot be divided.
        """
        if isinstance(mixer, Mla):
            return range(1)
        if mixer.kv_heads >= self.world:
            return self.of(mixer.kv_heads)
        holders = self._holders(mixer)
        return range(self.rank // holders, self.rank // holders + 1)

    def heads(self, mixer: Gqa) -> range:
        """This rank's heads of queries: those that read its keys, or its share of them. Raises ModelError."""
        group, keys = mixer.heads // mixer.kv_heads, self.kv_heads(mixer)
        if isinstance(mixer, Mla) and mixer.heads >= self.world:
            return self.of(mixer.heads)
        if mixer.kv_heads >= self.world:
            return range(keys.start * group, keys.stop * group)
        holders, first = self._holders(mixer), keys.start * group
        own = share(group, self.rank % holders, holders)
        return range(first + own.start, first + own.stop)

    def is_first_holder(self, mixer: Gqa) -> bool:
        """Whether no rank before it has the same heads of keys and values."""
        return mixer.kv_heads >= self.world or self.rank % self._holders(mixer) == 0

    def _holders(self, mixer: Gqa) -> int:
        """How many ranks hold the same head of keys, where there are fewer than ranks."""
        holders, rest = divmod(self.world, mixer.kv_heads)
        if rest or mixer.heads // mixer.kv_heads < holders:
            raise ModelError(
                f"--tensor-parallel-size {self.world}: a model with {mixer.heads} heads, {mixer.kv_heads} of them of "
                "keys and values, cannot be divided by so many ranks"
            )
        return holders


def share(count: int, rank: int, world: int) -> range:
    """Of ``count`` things those of ``rank``; shares differ by one thing at most."""
    return range(rank * count // world, (rank + 1) * count // world)
