"""Sampling parameters: the part of a request that decides how its tokens are chosen."""

from __future__ import annotations

from itertools import chain
from typing import Literal

from msgspec import field

from pagebus.bus.messages.record import Record


class StructuredOutput(Record, frozen=True, kw_only=True):
    """The form that the whole output must have, as the client gave it in ``field`` (for error messages).

    ``text`` is a JSON schema, a regular expression, a JSON array of strings of which the output is one, a grammar
    (Lark or GBNF), a structural tag as JSON, or empty if any output will do. ``any_whitespace``: whether JSON may be
    laid out freely. ``reasoning``: the parser of the reasoning that may precede it, a name of
    :data:`pagebus.actors.model.reasoning.FORMATS`; empty: none. ``thinking_tokens``: the most tokens of reasoning;
    None: any number. ``prompt_thought`` is for prompts that the client wrote itself, which may end within reasoning:
    how many tokens of it the prompt ends with, -1 if none or not yet counted by the tokenizer. None: the chat template
    decides.
    """

    kind: Literal["json", "regex", "choice", "grammar", "structural_tag", "anything"]
    text: str
    field: str
    any_whitespace: bool = True
    reasoning: str = ""
    thinking_tokens: int | None = None
    prompt_thought: int | None = None


class RepetitionDetection(Record, frozen=True, kw_only=True):
    """Ends an output whose last tokens repeat a pattern of ``min_pattern_size`` to ``max_pattern_size`` tokens
    ``min_count`` times in a row. Sizes are at least 1, the count at least 2."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


class SamplingParams(Record, frozen=True, kw_only=True):
    """How the tokens of a request are chosen; names, defaults and ranges are vLLM's.

    ``max_tokens`` None means "the rest of the context". ``seed`` None lets the scheduler derive one from the request
    id. ``temperature`` below 1e-5 is greedy. ``top_k`` 0 or -1 is off.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """How many of the most likely tokens to report with each output token; 0: only the token itself; None: nothing.
    Log probabilities are the model's own, before penalties, bans and temperature."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from the second on."""
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """``bad_words`` as token ids, from the tokenizer: what the executor bans."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled; empty: all."""
    return_token_ids: bool = False
    """The client gets the token ids of prompt and output."""
    echo: bool = False
    """The client gets the prompt's text."""
    beam_width: int = 0
    """Number of beams, of which the ``n`` best are the choices; 0: no beam search. Beams are compared by the model's
    own log probabilities, so no parameter that changes them or samples may be combined with it."""
    length_penalty: float = 1.0
    """A beam's score is the sum of its log probabilities, divided by its length to this power."""
    early_stopping: bool | Literal["never"] = False
    """When a beam search ends before ``max_tokens``: see :mod:`pagebus.actors.scheduler.beam_search`."""
    structured_output: StructuredOutput | None = None
    """The form of the output, until the tokenizer has turned it into ``grammar``."""
    grammar: str = ""
    """The grammar that the executor enforces, in llguidance's own form; empty: none."""

    pooling: Literal["", "last", "mean", "cls"] = ""
    """Which final hidden states of the prompt the client gets, as one vector: the last token's, the mean of all, or the
    first token's; empty: none."""
    allowed_tokens: str = ""
    """``allowed_token_ids`` if there are many: base64 of one bit per token, the lowest id first. Empty: those of
    ``allowed_token_ids``, or all tokens."""

    return_text_lengths: bool = False
    """The ingress is told how many characters came with each token."""
    logprob_token_ids: tuple[int, ...] = ()
    """With ``logprobs``: the tokens reported beside each output token, in place of the most likely ones."""
    repetition_detection: RepetitionDetection | None = None
    """When to end an output that repeats itself; None: never."""
    detokenize: bool = True
    """False: the output has no text."""
    return_prompt_text: bool = False
    """The client gets the prompt's text, with special tokens."""

    in_one_step: bool = False
    """The prompt is computed in one step and never found in the cache, because each of its tokens attends to all."""
    num_speculative_tokens: int | None = None
    """The most drafts per step; 0: none; None: the server's number."""
    grammar_field: str = ""
    """Where the client said what ``grammar`` is, for error messages."""

    @property
    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """All token ids in the parameters, by the client's field: each must be in the vocabulary."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids,
            "logprob_token_ids": self.logprob_token_ids,
            "bad_words": tuple(chain.from_iterable(self.bad_words_token_ids)),
        }

    @property
    def reads_past(self) -> bool:
        """Whether the choice of a token depends on the ids of earlier ones, besides through the model."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.bad_words_token_ids)

    @property
    def returns_prompt(self) -> bool:
        """Whether the client gets something about the prompt."""
        return self.echo or self.return_token_ids or self.return_prompt_text or self.scores_prompt

    @property
    def scores_prompt(self) -> bool:
        """Whether the client gets something about the prompt that an executor computes."""
        return self.prompt_logprobs is not None or bool(self.pooling)

    @property
    def scores_all_of_prompt(self) -> bool:
        """Whether that needs every token of the prompt, so that none may be taken from the cache."""
        return self.prompt_logprobs is not None or self.pooling in ("mean", "cls") or self.in_one_step
