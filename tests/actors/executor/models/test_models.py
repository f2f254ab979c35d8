"""Every architecture against transformers: paged, in chunks, many sequences at once."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention import attention_shape
from pagebus.actors.executor.layers.attention_batch import LastTokens
from pagebus.actors.executor.layers.attention_pass import AttentionPass
from pagebus.actors.executor.layers.passes import AttentionPasses
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.memory.kv_cache import allocate_kv_cache
from pagebus.actors.executor.models import AttentionBatch, Model, build_model
from pagebus.actors.model.config import ModelConfig
from pagebus.kernels.attention.choice import AttentionChooser
from pagebus.kernels.batch.inputs import prepare_inputs_on_cpu, store_sampled_on_cpu
from pagebus.kernels.common.target import Target
from tests.helpers.model_factory import (
    REFERENCE_CONFIGS,
    ReferenceConfig,
    load_reference,
    make_model,
    make_reference,
    reference_generate,
)

BLOCK_SIZE = 16
NUM_BLOCKS = 40
CPU = torch.device("cpu")
LENGTHS = (75, 34, 16, 3)
CHUNKS = ((20, 16, 7, 3), (16, 17, 9, 0), (38, 0, 0, 0), (1, 1, 0, 0))
"""Tokens of each sequence in each pass: whole and broken blocks, a row that waits, and one-token rows."""


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    model = build_model(ModelConfig.load(folder), CPU, dtype, Ops.reference())
    load_weights(model, folder, "auto", 0, lambda _: None)
    return model


class PagedSequences:
    """Sequences that share a cache; row i of the block table belongs to sequence i. Blocks lie in random order."""

    def __init__(self, model: Model, count: int, *, only_last: bool = False) -> None:
        config = model.config
        self.only_last = only_last
        self.model = model
        self.cache = allocate_kv_cache(config, NUM_BLOCKS, BLOCK_SIZE, model.parameters.dtype, CPU)
        blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3))
        self.tables = blocks.view(count, -1).to(torch.int32)
        self.lens = [0] * count

    def forward(self, new: list[list[int]]) -> list[torch.Tensor]:
        """One pass over new[i] more tokens of each sequence i; logits [len(new[i]), V] of each, or ``only_last`` [1, V]
        of its last."""
        rows = sorted((i for i, ids in enumerate(new) if ids), key=lambda i: len(new[i]) > 1)  # decodes first
        places = [torch.arange(self.lens[i], self.lens[i] + len(new[i])) for i in rows]
        starts = torch.tensor([0] + [len(new[i]) for i in rows]).cumsum(0)
        for i in rows:
            self.lens[i] += len(new[i])
        where = [(self.tables[i].long(), p) for i, p in zip(rows, places, strict=True)]
        slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for table, p in where]
        of_rows = torch.tensor(rows, dtype=torch.int32)
        context_lens = torch.tensor([self.lens[i] for i in rows], dtype=torch.int32)
        batch = AttentionBatch(
            slots=of_rows,
            query_start=starts.to(torch.int32),
            context_lens=context_lens,
            slot_mapping=torch.cat(slots),
            block_tables=self.tables,
            num_decodes=sum(len(new[i]) == 1 for i in rows),
            last=LastTokens(starts[1:].int() - 1, of_rows, context_lens) if self.only_last else None,
        )
        ids = torch.tensor([token for i in rows for token in new[i]], dtype=torch.int32)
        hidden = self.model.forward(ids, torch.cat(places).to(torch.int32), self.cache, batch)
        logits = self.model.logits(hidden).split(1 if self.only_last else starts.diff().tolist())
        found = dict(zip(rows, logits, strict=True))
        return [found.get(i, logits[0][:0]) for i in range(len(new))]


def random_sequences(vocab_size: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]


def chunked_logits(
    model: Model, sequences: list[list[int]], unwritten: float = 0.0, *, only_last: bool = False
) -> list[torch.Tensor]:
    """Logits [len, V] of each sequence, computed in the passes of ``CHUNKS``; the cache starts ``unwritten``.
    ``only_last``: of the last token of each pass."""
    paged = PagedSequences(model, len(sequences), only_last=only_last)
    paged.cache.fill_(unwritten)
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for counts in CHUNKS:
        new = [ids[n : n + count] for ids, n, count in zip(sequences, paged.lens, counts, strict=True)]
        for part, logits in zip(parts, paged.forward(new), strict=True):
            part.append(logits)
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("config", REFERENCE_CONFIGS, ids=lambda config: config.name)
def test_equals_transformers(config: ReferenceConfig, tmp_path: Path) -> None:
    """Chunked prefill and decode of a mixed batch give the logits that transformers gives for whole sequences."""
    folder = make_reference(tmp_path, config)
    sequences = random_sequences(config.vocab_size)
    reference = load_reference(folder)

    for got, ids in zip(chunked_logits(load(folder), sequences), sequences, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", ["llama3", "qwen3", "mistral"])
def test_the_last_layer_may_go_on_with_the_last_tokens(arch: str, tmp_path: Path) -> None:
    """The newest token of each row gets the same logits when the last layer leaves the others out, and so do all that
    come later: their keys and values are there."""
    model, sequences = load(make_model(tmp_path, arch, seed=24)), random_sequences(307)
    all_logits = chunked_logits(model, sequences)

    for row, (logits, got) in enumerate(zip(all_logits, chunked_logits(model, sequences, only_last=True), strict=True)):
        ends = torch.tensor([counts[row] for counts in CHUNKS if counts[row]]).cumsum(0)
        torch.testing.assert_close(got, logits[ends - 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arch", ["llama3", "qwen3", "mistral"])
def test_attention_may_write_keys_and_values_itself(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of decodes alone leaves norms, rotation and the cache to attention, with the same logits."""
    model, sequences = load(make_model(tmp_path, arch, seed=24)), random_sequences(307)
    expected = chunked_logits(model, sequences)
    shape = attention_shape(model.config, torch.float32, torch.float32)
    chooser = AttentionChooser(replace(model.chooser.setup, target=Target(80, 108)))
    passes: list[AttentionPass] = []

    def begin(batch: AttentionBatch) -> AttentionPass:
        passes.append(AttentionPasses(Ops.reference(), shape, chooser).begin(batch))
        return passes[-1]

    monkeypatch.setattr(model, "_begin", begin)

    for got, wanted in zip(chunked_logits(model, sequences, float("nan")), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert [each.stores for each in passes] == [set(counts) <= {0, 1} for counts in CHUNKS]


def test_what_was_never_written_is_never_read(tmp_path: Path) -> None:
    """NaN in the unused places of the cache changes nothing."""
    folder = make_model(tmp_path, "mistral", seed=23)
    sequences = random_sequences(307)
    model = load(folder)

    for got, expected in zip(
        chunked_logits(model, sequences, float("nan")), chunked_logits(model, sequences), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"}])
def test_rope_types_equal_transformers(scaling: dict[str, object], tmp_path: Path) -> None:
    """Linear scaling and none, with a base of their own, rotate as transformers does."""
    rope = {**scaling, "rope_theta": 3000.0}
    folder = make_model(tmp_path, "llama2", seed=20, rope_parameters=rope)
    sequences = random_sequences(307)
    reference = load_reference(folder)

    for got, ids in zip(chunked_logits(load(folder), sequences), sequences, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", ["llama3", "qwen3"])
def test_bfloat16_stays_close(arch: str, tmp_path: Path) -> None:
    """In bfloat16 the logits differ from float32's by rounding only."""
    folder = make_model(tmp_path, arch, seed=21)
    sequences = random_sequences(307)

    narrow = torch.cat(chunked_logits(load(folder, torch.bfloat16), sequences))
    wide = torch.cat(chunked_logits(load(folder), sequences))

    assert narrow.dtype == torch.float32
    assert (narrow - wide).norm() / wide.norm() < 5e-2


def test_greedy_decode_equals_generate(tmp_path: Path) -> None:
    """Token by token through the paged cache, the greedy continuation is transformers'."""
    folder = make_model(tmp_path, "mistral", seed=22)
    prompt = random_sequences(307)[1]
    [expected] = reference_generate(folder, [prompt], 20)

    paged = PagedSequences(load(folder), 4)
    new, got = [prompt, [], [], []], []
    for _ in range(20):
        got.append(int(paged.forward(new)[0][-1].argmax()))
        new = [[got[-1]], [], [], []]

    assert expected == got


def test_reference_models_do_not_repeat_themselves(tmp_path: Path) -> None:
    """The random models' continuations vary, so that equal tokens mean something."""
    folder = make_reference(tmp_path, REFERENCE_CONFIGS[0])

    answers = reference_generate(folder, random_sequences(307), 16)

    assert all(len(set(answer)) >= 8 for answer in answers)
    assert len({tuple(answer) for answer in answers}) == len(answers)


def test_every_operation_has_a_kernel_and_a_reference() -> None:
    """The table of operations finds both sides; a CPU gets the references, and forms of its own of what numpy does."""
    kernels, references = Ops.triton(), Ops.reference()
    own = {"prepare_inputs": prepare_inputs_on_cpu, "store_sampled": store_sampled_on_cpu}

    assert Ops.for_device(CPU) == replace(references, **own)
    assert Ops.for_device(torch.device("cuda")) == kernels
    assert all(callable(getattr(kernels, name)) for name in Ops.__slots__ if name != "comm")


def test_there_are_three_models_of_each_family() -> None:
    """At least three reference configurations for each family, beside those of their own files (test_families.py)."""
    families = [config.arch for config in REFERENCE_CONFIGS]

    assert {family: families.count(family) for family in set(families)} == dict.fromkeys(set(families), 3)
    assert len({config.name for config in REFERENCE_CONFIGS}) == len(REFERENCE_CONFIGS)


@pytest.mark.parametrize(("arch", "kinds"), [("llama3", 1), ("qwen3", 2)])
def test_few_layers_are_one_of_each_kind(arch: str, kinds: int, tmp_path: Path) -> None:
    """The first of each window, and the last; afterwards all are there again."""
    windows = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1} if kinds == 2 else {}
    folder = make_model(tmp_path, arch, seed=1, num_hidden_layers=4, **windows)
    config = ModelConfig.load(folder)
    model = build_model(config, torch.device("meta"), torch.float32, Ops.reference(), max_model_len=32)
    everything = list(model.layers)

    with model.few_layers():
        found = [everything.index(layer) for layer in model.layers]

    assert sorted(found) == [*range(kinds), 3]
    assert model.layers == everything
