"""`LLM`: a model for programs, without a server of their own to start."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import secrets
import sys
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.pooling.pooler import Pooler
from pagebus.actors.offline.adapters import LoadedAdapters, LoRARequest
from pagebus.actors.offline.client import run_all
from pagebus.actors.offline.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    beams_of,
    read_classes,
    read_embedding,
    read_output,
    read_score,
    score_of,
)
from pagebus.actors.offline.own_settings import checked
from pagebus.actors.offline.params import BeamSearchParams, PoolingParams, SamplingParams
from pagebus.actors.offline.prompts import Found, Prompt, find, is_one
from pagebus.actors.offline.system import System
from pagebus.actors.runtime.gpus import visible_gpus
from pagebus.actors.runtime.one_machine import check_one_process
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry import logs
from pagebus.actors.telemetry.progress import Progress, ProgressStream

T = TypeVar("T")
P = TypeVar("P")
Message: TypeAlias = Mapping[str, Any]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Adapter: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None
DRAIN_S = 1.0
"""At the end nothing is under way but what was interrupted."""
SPECIAL_TOKENS = 8
"""At most so many begin and end a prompt. All others stand for at least a byte of its text."""
CALLS_PER_SEQUENCE = 2
"""Calls at a time for each sequence of a step: those that wait are tokenized already."""


class LLM:
    """A model, ready to generate once made. ``settings`` are those of `pagebus serve`, with underscores.

    A context manager; without ``with`` or :meth:`close` it ends with the program.

    Raises:
        TypeError: there is no such setting.
        Exception: why the model cannot be loaded.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        settings = checked(settings)
        api_key = secrets.token_urlsafe(32)  # the ingress listens on this machine: no other user may call it
        own: dict[str, Any] = {"port": 0, "api_key": (api_key,), "job_actors": 0, "bus": "memory://"}
        own |= {"trust_request_chat_template": True, "drain_timeout_s": DRAIN_S}
        self._settings = Settings(**{"model": model, "log_level": "warning", **settings, **own})
        check_one_process(self._settings, visible_gpus(os.environ), "start a server (`pagebus serve`)")
        terminal = sys.stderr.isatty()
        self._progress = Progress(sys.stderr, terminal=terminal)
        starting = self._progress if terminal else Progress(sys.stderr, terminal=False, tell=lambda *_: None)
        lines = ProgressStream(self._progress, terminal)
        logs.configure(self._settings.log_level, self._settings.log_format, stream=lines, whole_process=False)
        self._system = System(self._settings, starting)
        self._numbers = itertools.count()
        self._end = weakref.finalize(self, self._system.close)
        self._end.atexit = False  # which is the system's own concern
        self._client = self._system.client
        self._adapters = LoadedAdapters(self._client)
        self._max_model_len = int(self._system.call(self._client.get("/v1/models"))["data"][0]["max_model_len"])

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapter = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; the outputs are in the order of the prompts. ``use_tqdm``: show a progress bar.
        ``lora_request``: the adapter of all prompts, or of each (``enable_lora=True``).

        Raises:
            ValueError: a prompt or a parameter is refused; the text says why. Nothing is returned then.
        """
        given: list[Any] = [prompts] if is_one(prompts) else list(prompts)
        return self._run(
            [functools.partial(self._prompt, each) for each in given], sampling_params, lora_request, use_tqdm
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: Adapter = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, rendered by the model's chat template. ``lora_request``: as
        of :meth:`generate`.

        Raises:
            ValueError: as :meth:`generate`.
        """
        given: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        more = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
        }
        return self._run(
            [functools.partial(self._chat, each, more) for each in given], sampling_params, lora_request, use_tqdm
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt: the model's final hidden state, of the last token or (``pooling_type="mean"``)
        the mean over all.

        Raises:
            ValueError: as :meth:`generate`.
        """
        given: list[Any] = [prompts] if is_one(prompts) else list(prompts)
        each = _one_each(pooling_params, len(given), "pooling_params", PoolingParams)
        return self._run_all(
            [
                functools.partial(self._embed, prompt, one or PoolingParams())
                for prompt, one in zip(given, each, strict=True)
            ],
            use_tqdm,
        )

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The ``params.beam_width`` best continuations of each prompt, the best first.

        Raises:
            ValueError: as :meth:`generate`; or there are more beams than ``max_beam_width``.
        """
        given: list[Any] = [prompts] if is_one(prompts) else list(prompts)
        self.get_tokenizer()  # here: loading it would hold up the actors' loop
        found = self._run_all(
            [functools.partial(self._complete, functools.partial(self._prompt, each), params.to_request(), 0)
             for each in given],
            use_tqdm,
        )  # fmt: skip
        decode = functools.partial(self._decode, skip_special_tokens=params.skip_special_tokens)
        return [beams_of(each, with_end=params.include_stop_str_in_output, decode=decode) for each in found]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """How relevant the second text of each pair is to the first, where the model is a reranker; else how alike they
        are, by their embeddings. One text is paired with each of several.

        Raises:
            ValueError: as :meth:`generate`; or the numbers of texts do not go together.
        """
        first: list[Any] = [data_1] if is_one(data_1) else list(data_1)
        second: list[Any] = [data_2] if is_one(data_2) else list(data_2)
        if len(first) not in (1, len(second)) or not second:
            raise ValueError(f"texts must be paired 1 with 1, 1 with N or N with N, got {len(first)} and {len(second)}")
        if self._pooler is not None and self._pooler.classifies:
            return self._score_pairs(first * (len(second) // len(first)), second, pooling_params, use_tqdm)
        params = dataclasses.replace(pooling_params or PoolingParams(), use_activation=True)
        found = self.embed([*first, *second], pooling_params=params, use_tqdm=use_tqdm)
        ones, others = found[: len(first)], found[len(first) :]
        pairs = zip(ones * (len(others) // len(ones)), others, strict=True)
        return [score_of(number, one, other) for number, (one, other) in enumerate(pairs)]

    def _score_pairs(
        self, first: Sequence[Any], second: Sequence[Any], params: PoolingParams | None, use_tqdm: bool
    ) -> list[ScoringRequestOutput]:
        if not all(isinstance(each, str) for each in (*first, *second)):
            raise ValueError("a reranker reads pairs of texts, not of tokens")
        fields = {} if params is None else params.to_request()
        return self._run_all(
            [
                functools.partial(self._score, {"text_1": one, "text_2": other, **fields})
                for one, other in zip(first, second, strict=True)
            ],
            use_tqdm,
        )

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each of the model's labels, for each prompt.

        Raises:
            ValueError: as :meth:`generate`; or the model is no classifier.
        """
        given: list[Any] = [prompts] if is_one(prompts) else list(prompts)
        each = _one_each(pooling_params, len(given), "pooling_params", PoolingParams)
        return self._run_all(
            [
                functools.partial(self._classify, prompt, one or PoolingParams())
                for prompt, one in zip(given, each, strict=True)
            ],
            use_tqdm,
        )

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, from ``transformers``; None if it has none."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (its ``generation_config.json``), to be changed and given to :meth:`generate`."""
        is_asked = self._settings.generation_config == "auto"
        defaults: Mapping[str, Any] = self._config.default_sampling if is_asked else {}
        return SamplingParams(**defaults)

    def close(self) -> None:
        """End the system, and give its memory back. A second call does nothing."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from pagebus.actors.model.config import resolve_tokenizer
        from pagebus.actors.model.tokenizer import load_tokenizer

        return load_tokenizer(resolve_tokenizer(self._settings))

    @functools.cached_property
    def _config(self) -> ModelConfig:
        return ModelConfig.of(self._settings)

    @property
    def _pooler(self) -> Pooler | None:
        return self._config.pooler

    # -- one prompt ---------------------------------------------------------------------------------------------------
    async def _prompt(self, prompt: Prompt) -> Found:
        """A prompt in any of its forms."""
        return find(prompt)

    async def _chat(self, messages: Sequence[Message], more: Mapping[str, Any]) -> Found:
        """A conversation as the template renders it: its text and its tokens."""
        body = {"messages": list(messages), **{name: value for name, value in more.items() if value is not None}}
        ids = (await self._client.post("/tokenize", body))["tokens"]
        return (await self._client.post("/detokenize", {"tokens": ids}))["prompt"], ids

    async def _ids(self, prompt: str | list[int]) -> list[int]:
        """The tokens of what :meth:`_prompt` has found."""
        if not isinstance(prompt, str):
            return prompt
        return list((await self._client.post("/tokenize", {"prompt": prompt}))["tokens"])

    async def _embed(self, prompt: Prompt, params: PoolingParams, number: int) -> EmbeddingRequestOutput:
        given = (await self._prompt(prompt))[1]
        ids, keep = await self._ids(given), params.truncate_prompt_tokens
        if keep is not None:
            # One place is the token's that ends it, where there is one.
            ids = ids[: self._max_model_len - (self._pooler is None) if keep == -1 else keep]
        body: dict[str, Any] = {"input": ids, "encoding_format": "base64"}
        if keep is not None and self._pooler is not None and isinstance(given, str):
            body |= {"input": given, "truncate_prompt_tokens": keep}  # the tokenizer keeps its special tokens
        if params.dimensions is not None:
            body["dimensions"] = params.dimensions
        if params.use_activation is not None:
            body["use_activation"] = params.use_activation
        return read_embedding(number, ids, await self._client.post("/v1/embeddings", body))

    async def _score(self, body: Mapping[str, Any], number: int) -> ScoringRequestOutput:
        return read_score(number, await self._client.post("/v1/score", body))

    async def _classify(self, prompt: Prompt, params: PoolingParams, number: int) -> ClassificationRequestOutput:
        given = (await self._prompt(prompt))[1]
        body = {"input": given, **params.to_request()}
        return read_classes(number, await self._ids(given), await self._client.post("/classify", body))

    async def _generate(
        self,
        find: Callable[[], Awaitable[Found]],
        params: SamplingParams | None,
        adapter: LoRARequest | None,
        number: int,
    ) -> RequestOutput:
        fields = {} if params is None else params.to_request()
        fields |= {} if adapter is None else {"model": adapter.lora_name}
        num_top = 0 if params is None else params.num_top
        find = functools.partial(self._with_room, find, params or SamplingParams(), fields)
        return dataclasses.replace(await self._complete(find, fields, num_top, number), lora_request=adapter)

    async def _with_room(
        self, find: Callable[[], Awaitable[Found]], params: SamplingParams, fields: dict[str, Any]
    ) -> Found:
        """The prompt; and in ``fields`` no more tokens than the context holds behind it, as in vLLM. A text that is
        short enough whatever its tokens are is not tokenized for that."""
        text, prompt = await find()
        wanted = self._max_model_len if params.max_tokens is None else params.max_tokens
        if isinstance(prompt, str) and len(prompt.encode()) + SPECIAL_TOKENS + wanted <= self._max_model_len:
            return text, prompt
        prompt, keep = await self._ids(prompt), params.truncate_prompt_tokens
        length = len(prompt) if keep in (None, -1) else min(len(prompt), keep)
        if keep == -1 and params.max_tokens is not None:
            length = 1  # so much of the prompt is cut that they fit
        fields["max_tokens"] = min(wanted, max(1, self._max_model_len - length))
        if fields.get("min_tokens"):
            fields["min_tokens"] = min(fields["min_tokens"], fields["max_tokens"])
        return text, prompt

    async def _complete(
        self, find: Callable[[], Awaitable[Found]], fields: Mapping[str, Any], num_top: int | None, number: int
    ) -> RequestOutput:
        text, prompt = await find()
        body = {**fields, "prompt": prompt, "return_token_ids": True, "return_tokens_as_token_ids": True}
        answer = await self._client.post("/v1/completions", body)
        return read_output(number, text, num_top, answer, lambda token_id: self._decode([token_id]))

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    # -- many ---------------------------------------------------------------------------------------------------------
    def _run(
        self, finds: Sequence[Callable[[], Awaitable[Found]]], params: Params, adapter: Adapter, use_tqdm: bool
    ) -> list[RequestOutput]:
        each = _one_each(params, len(finds), "sampling_params", SamplingParams)
        adapters = _one_each(adapter, len(finds), "lora_request", LoRARequest)
        self._system.call(self._adapters.load(adapters))
        if any(one is not None and one.tells_logprobs for one in each):
            self.get_tokenizer()  # here: loading it would hold up the actors' loop
        return self._run_all(
            [functools.partial(self._generate, *row) for row in zip(finds, each, adapters, strict=True)], use_tqdm
        )

    def _run_all(self, calls: Sequence[Callable[[int], Awaitable[T]]], use_tqdm: bool) -> list[T]:
        """The results of calls; each call gets its number."""
        jobs = [functools.partial(call, next(self._numbers)) for call in calls]
        what = "1 prompt" if len(jobs) == 1 else f"{len(jobs)} prompts"

        def show(done: int) -> None:
            if use_tqdm:
                self._progress.show(what, done / len(jobs))

        try:
            at_a_time = CALLS_PER_SEQUENCE * self._settings.max_num_seqs
            return self._system.call(run_all(jobs, at_a_time, show))
        finally:
            self._progress.done()


def _one_each(params: P | Sequence[P | None] | None, count: int, name: str, kind: type[P]) -> Sequence[P | None]:
    """The parameters of each prompt."""
    each: Sequence[P | None] = list(params) if isinstance(params, Sequence) else [params] * count
    wrong = [one for one in each if one is not None and not isinstance(one, kind)]
    if wrong:
        raise TypeError(f"{name}: must be {kind.__name__}, got {wrong[0]!r}")
    if len(each) != count:
        raise ValueError(f"{count} prompts need one {name}, or one each; got {len(each)}")
    return each
