"""The tables that choose attention paths: every row is reachable, and gives what the engine had decided by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from pagebus.kernels.attention.choice import (
    LONG_PROMPTS,
    PATHS,
    AttentionChooser,
    AttentionPath,
    AttentionSetup,
    StepRows,
    long_prompts_of,
)
from pagebus.kernels.common.target import Target

H200, L40S = Target(90, 132), Target(89, 142)
BF16 = torch.bfloat16
LLAMA = AttentionSetup(H200, BF16, BF16, 32, 8, 128)
LATENTS = replace(LLAMA, kv_heads=1, head_dim=576, latent=True)
SETUPS = [
    replace(LLAMA, target=target, dtype=dtype, cache_dtype=dtype, windows=windows, backend=backend, deterministic=fixed)
    for target, dtype, windows, backend, fixed in itertools.product(
        (None, H200, L40S), (BF16, torch.float32), (frozenset({0}), frozenset({0, 64})), ("auto", "triton", "torch"),
        (False, True),
    )
]  # fmt: skip
SETUPS += [replace(LATENTS, target=target, deterministic=fixed) for target in (None, H200) for fixed in (False, True)]
SETUPS += [replace(setup, run=5) for setup in SETUPS]
ROWS = [
    StepRows(decodes, prompts, prompts and long_rows, whole and not prompts, prompts and whole and not long_rows)
    for decodes, (prompts, long_rows, whole) in itertools.product(
        (0, 1, 64, 65), itertools.product((False, True), repeat=3)
    )
    if decodes or prompts
]


def test_every_path_is_reachable() -> None:
    """Both tables have no row that nothing gets, and a row for every key."""
    chosen = {AttentionChooser(setup).choose(rows) for setup in SETUPS for rows in ROWS}
    assert chosen == set(PATHS) == set(AttentionPath)
    assert {long_prompts_of(setup) for setup in SETUPS} == {*LONG_PROMPTS, None}


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_possible_paths_are_those_that_are_chosen(setup: AttentionSetup) -> None:
    """What an engine logs at its start is what its steps may take. Rows go to a kernel for long prompts only where
    there is one."""
    chooser = AttentionChooser(setup)
    rows = [each for each in ROWS if chooser.long_prompts is not None or not each.long_rows]
    assert set(chooser.possible) == {chooser.choose(each) for each in rows}


@pytest.mark.parametrize(
    ("rows", "path"),
    [
        (StepRows(1, False), AttentionPath.FUSED_DECODE),
        (StepRows(64, False), AttentionPath.FUSED_DECODE),
        (StepRows(65, False), AttentionPath.DECODE),
        (StepRows(8, False, whole=False), AttentionPath.DECODE),
        (StepRows(0, True), AttentionPath.PREFILL),
        (StepRows(3, True), AttentionPath.DECODE_PREFILL),
        (StepRows(0, True, long_rows=True), AttentionPath.HOPPER_PREFILL),
        (StepRows(3, True, long_rows=True), AttentionPath.HOPPER_PREFILL),
    ],
)
def test_paths_of_a_llama_on_hopper(rows: StepRows, path: AttentionPath) -> None:
    chooser = AttentionChooser(LLAMA)
    assert chooser.choose(rows) is path
    assert chooser.why(rows)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, AttentionPath.HOPPER_PREFILL),
        ({"backend": "triton"}, AttentionPath.HOPPER_PREFILL),
        ({"backend": "torch"}, AttentionPath.CUDNN_PREFILL),
        ({"target": L40S}, AttentionPath.CUDNN_PREFILL),
        ({"target": L40S, "backend": "triton"}, None),
        ({"head_dim": 256}, AttentionPath.HOPPER_PREFILL),
        ({"head_dim": 64, "softcap": True}, AttentionPath.HOPPER_PREFILL),
        ({"head_dim": 96, "dtype": torch.float16}, AttentionPath.HOPPER_PREFILL),
        ({"head_dim": 32}, AttentionPath.CUDNN_PREFILL),
        ({"head_dim": 32, "softcap": True}, None),
        ({"head_dim": 512}, None),
        ({"cache_dtype": torch.int8}, AttentionPath.HOPPER_PREFILL),
        ({"windows": frozenset({4096})}, AttentionPath.HOPPER_PREFILL),
        ({"windows": frozenset({4096}), "target": L40S}, None),
        ({"windows": frozenset({0, -8192})}, None),
        ({"windows": frozenset({4096}), "backend": "torch"}, None),
        ({"sinks": True}, AttentionPath.HOPPER_PREFILL),
        ({"sinks": True, "backend": "torch"}, None),
        ({"sinks": True, "target": L40S}, None),
        ({"deterministic": True}, None),
        ({"target": None}, None),
    ],
)
def test_the_kernel_for_long_prompts(changes: dict[str, object], path: AttentionPath | None) -> None:
    assert long_prompts_of(replace(LLAMA, **changes)) is path  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"),
    [(64, 8, 128), (32, 4, 128), (64, 4, 128), (64, 8, 64), (32, 32, 96), (32, 8, 80), (16, 2, 256)],
)
def test_heads_that_are_fused(q_heads: int, kv_heads: int, head_dim: int) -> None:
    """Those of Llama-3.1-70B, Qwen3-30B and -235B, gpt-oss, Phi-3, StableLM and Qwen3.5 among others."""
    setup = replace(LLAMA, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)
    assert AttentionChooser(setup).choose(StepRows(1, False)) is AttentionPath.FUSED_DECODE


def test_heads_that_are_not_fused() -> None:
    """Very many query heads of a KV head do not fit, nor do heads of odd sizes."""
    for setup in (replace(LLAMA, q_heads=64, kv_heads=2), replace(LLAMA, head_dim=100)):
        chooser = AttentionChooser(setup)
        assert chooser.choose(StepRows(1, False)) is AttentionPath.DECODE
        assert "query heads" in chooser.why(StepRows(1, False))
    assert "more than 64" in AttentionChooser(LLAMA).why(StepRows(65, False))


def test_decodes_with_drafts_are_runs() -> None:
    """Where the decode kernel has room for all their heads, and knows the cache's format. The same engine's prompts are
    not, nor are those of an engine without drafts."""
    decodes = StepRows(8, True, whole=False, runs=True)
    wider: dict[str, object] = {"run": 5, "cache_dtype": torch.float8_e4m3fn}
    for changes in ({"run": 5}, {"run": 2}, {"run": 17, "q_heads": 8}, {"run": 8, "q_heads": 64}, wider):
        chooser = AttentionChooser(replace(LLAMA, **changes))  # type: ignore[arg-type]
        assert chooser.choose(decodes) is AttentionPath.RUNS
        assert chooser.choose(decodes._replace(runs=False)) is AttentionPath.DECODE_PREFILL
        assert chooser.kernels(AttentionPath.RUNS) == ["rotary_kv_write", "decode"]
    for changes in ({"run": 1}, {"run": 17}, {"run": 9, "head_dim": 256}, {"run": 5, "cache_dtype": torch.int8}):
        chooser = AttentionChooser(replace(LLAMA, **changes))  # type: ignore[arg-type]
        assert chooser.choose(decodes) is AttentionPath.DECODE_PREFILL


def test_latents_have_paths_of_their_own() -> None:
    """Long rows are expanded whatever the backend is; nothing is fused, and kernels have the names of those over
    latents."""
    for backend in ("auto", "triton", "torch"):
        chooser = AttentionChooser(replace(LATENTS, backend=backend))
        assert chooser.choose(StepRows(0, True, long_rows=True)) is AttentionPath.EXPANDED_PREFILL
        assert chooser.choose(StepRows(4, False)) is AttentionPath.DECODE
        assert chooser.kernels(AttentionPath.DECODE) == ["latent_write", "latent_decode"]
        assert "over latents" in chooser.why(StepRows(4, False))
    assert AttentionChooser(LLAMA).kernels(AttentionPath.DECODE) == ["rotary_kv_write", "decode"]
