"""The layout of slots: their number and size, and the place of their state in one flat device array, so that one kernel
writes every change."""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.bus.messages.steps import MOST_PREDICTED_TOKENS

ALIGN = 4
"""In words: 16 bytes, what Triton specialises pointers on."""
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, TOP_K, PROMPT_LEN = range(8)
"""Rows of the table of sampling columns; the first six hold float32 bits."""
NUM_COLUMNS = 8
PADDED_SAMPLES = 64
"""Rows that the padded samples of a step with drafts may have, unless there are more for so many sequences."""
VERIFIED_SIZES = (*range(8, 64, 8), *range(64, 128, 16), *range(128, 321, 32), 384, 480, 576, 640)
"""Numbers of tokens of steps that sample behind every token: decodes with drafts. Logits are computed for all of these,
which take memory: a third of a gigabyte for 640 tokens of a vocabulary of 128,000. More of them compute almost as long
as their launches take."""
MOST_DRAFTS = 16
"""Of a row. So many tokens may lie behind a sequence of the greatest length, where nobody reads them."""


def aligned(count: int) -> int:
    """``count`` words, rounded up."""
    return -(-count // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Tables of ``num_slots`` slots in int32 words, one behind the other: seeds [S, 2] (int64), columns [8, S],
    ``num_tables`` block tables [S, ``table_width``] and tokens [S, ``max_tokens``]. The properties are the words where
    they begin."""

    num_slots: int
    table_width: int
    max_tokens: int
    num_tables: int = 1

    @property
    def columns(self) -> int:
        return aligned(2 * self.num_slots)

    @property
    def block_tables(self) -> int:
        return self.columns + aligned(NUM_COLUMNS * self.num_slots)

    @property
    def tokens(self) -> int:
        return self.block_tables + self.num_tables * self.table_words

    @property
    def table_words(self) -> int:
        """From the beginning of a block table to that of the next."""
        return aligned(self.num_slots * self.table_width)

    @property
    def size(self) -> int:
        return self.tokens + self.num_slots * self.max_tokens


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Sizes that every plan must respect."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    vocab_size: int
    window: int = 0
    """How many tokens, the newest included, some layer may still read; 0: all."""
    windowed_pages: int = 0
    """Pages of a block for layers with windows, beside the one of layers without."""
    windowed_tokens: int = 0
    """How many tokens, the newest included, a layer of these pages may still read."""
    num_drafts: int = 0
    """The most drafts of a row; 0: nothing is speculated."""

    @property
    def most_tokens(self) -> int:
        """The most tokens of a step, or of what one is padded to."""
        return max(self.max_num_batched_tokens, self.max_num_seqs)

    @property
    def longest_run(self) -> int:
        """Tokens of a row with the most drafts."""
        return 1 + self.num_drafts

    @property
    def dummy_slot(self) -> int:
        """The slot that padding rows of a CUDA graph name; no plan may."""
        return self.max_num_seqs

    @property
    def most_samples(self) -> int:
        """The most tokens that a step can sample."""
        return max(self.max_num_seqs, min(self.longest_run * self.max_num_seqs, self.max_num_batched_tokens))

    @property
    def padded_samples(self) -> int:
        """The most rows to which a step with prompts is padded for the tokens that it samples, whose logits are all
        computed: twice as many as sequences, so that drafts fit beside a full batch."""
        room: int = max(PADDED_SAMPLES, min(2 * self.max_num_seqs, VERIFIED_SIZES[-1]))
        return max(self.max_num_seqs, min(self.most_samples, room))

    @property
    def verified_tokens(self) -> int:
        """The most tokens to which a step of decodes with drafts is padded."""
        return min(self.most_samples, VERIFIED_SIZES[-1]) if self.num_drafts else 0

    @property
    def table_width(self) -> int:
        """Most blocks one sequence can have."""
        return -(-self.max_model_len // self.block_size)

    @property
    def layout(self) -> SlotLayout:
        """Of all slots, the dummy slot too."""
        most = self.first_predicted + MOST_PREDICTED_TOKENS if self.num_drafts else self.max_model_len
        return SlotLayout(self.max_num_seqs + 1, self.table_width, most, 1 + self.windowed_pages)

    @property
    def first_predicted(self) -> int:
        """Where the text predicted for a sequence begins in the table of tokens, if drafts are verified."""
        return self.max_model_len + MOST_DRAFTS
