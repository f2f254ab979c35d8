"""vLLM's command lines: what of them works here, and what is said of the rest."""

from __future__ import annotations

import argparse
from collections import Counter

import pytest

from actors.cli import build_parser, dashed, main
from actors.settings import Settings
from actors.settings.declaring import flag_of
from actors.settings.sources import field_types, load_settings
from actors.settings.vllm_flags import ANY, FLAGS, REFUSED, TAKEN, add_foreign, is_foreign


def settings_of(line: str) -> Settings:
    return load_settings(build_parser().parse_args(["serve", *line.split()]), {})


def test_no_flag_is_a_setting() -> None:
    """Nor in two rows; each row says something, and one that takes nothing is among the refused."""
    assert FLAGS.keys().isdisjoint(map(flag_of, field_types()))
    names = Counter(name for flag in TAKEN + REFUSED for name in flag.names.split())
    assert set(names.values()) == {1}
    assert all(flag.text for flag in FLAGS.values())
    assert all(flag.taken for flag in TAKEN)
    assert not any(flag.taken == ANY for flag in REFUSED)


def test_what_cannot_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    """Ends the command with one line, which names the flag and says what there is instead."""
    parser = argparse.ArgumentParser()
    add_foreign(parser)
    for flag in REFUSED:
        for name in flag.names.split():
            with pytest.raises(SystemExit) as ended:
                parser.parse_args([name] if flag.switch else [name, "other"])
            assert (ended.value.code, capsys.readouterr().err) == (2, f"pagebus: {name}: {flag.text}\n")
    with pytest.raises(SystemExit):
        main(["serve", "m", "-tp", "2"])
    assert "pagebus: -tp: a model has to fit one GPU" in capsys.readouterr().err


def test_what_is_so_anyway(capsys: pytest.CaptureFixture[str]) -> None:
    """Is taken, with a note where it was not the default that was asked for."""
    line = (
        "m --trust-remote-code -tp 1 --tensor-parallel-size=1 --cpu-offload-gb 0 --uvicorn-log-level info --task embed"
    )
    assert settings_of(line) == Settings(model="m")
    assert capsys.readouterr().err.splitlines() == [
        "pagebus: --trust-remote-code changes nothing: code of a model's repository is never run",
        "pagebus: --uvicorn-log-level changes nothing: --log-level says what is logged",
    ]


@pytest.mark.parametrize(
    ("argument", "meant"),
    [("--max_model_len", "--max-model-len"), ("--name=a_b", "--name=a_b"), ("a_b", "a_b"), ("-a_b", "-a_b")],
)
def test_underscores(argument: str, meant: str) -> None:
    """Options may be written with them; values stay as they are."""
    assert dashed(argument) == meant


def test_a_usual_line() -> None:
    """As vLLM's documentation has them."""
    line = (
        "--model org/m --dtype half --max-model-len 32k --served-model-name a b --enable-auto-tool-choice "
        "--tool-call-parser hermes --swap-space 8 --enforce-eager --generation-config vllm --api-key k1 k2 "
        "--gpu-memory-utilization 0.85 --kv-cache-dtype fp8 --no-enable-prefix-caching --max-num-seqs 64 --port 8080"
    )
    told = settings_of(line)
    assert (told.model, told.dtype, told.max_model_len, told.served_model_name) == (
        "org/m",
        "float16",
        32000,
        ("a", "b"),
    )
    assert (told.swap_space, told.api_key, told.enable_prefix_caching, told.port) == (8, ("k1", "k2"), False, 8080)
    assert settings_of("here --model there --max-model-len auto") == Settings(model="here")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--max-model-length 5", "--max-model-length: there is no such option (did you mean --max-model-len?)"),
        ("--xyzzy=5 m", "--xyzzy: there is no such option"),
    ],
)
def test_what_nobody_knows(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, with the option that was meant if that can be guessed."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", *line.split()])
    assert (ended.value.code, capsys.readouterr().err) == (2, f"pagebus: {told}; see pagebus serve --help\n")


def test_arguments_of_programs() -> None:
    """The same for `LLM`, where None and False ask for nothing."""
    assert is_foreign("trust_remote_code", True)
    assert is_foreign("quantization", None)
    assert is_foreign("enable_lora", False)
    assert is_foreign("tensor_parallel_size", 1)
    assert not is_foreign("dtype", "half")
    assert is_foreign("enable_chunked_prefill", True)
    assert is_foreign("enable_log_deltas", False)
    for name in ("enable_chunked_prefill", "async_scheduling"):
        with pytest.raises(TypeError, match=f"{name}: "):
            is_foreign(name, False)
    with pytest.raises(TypeError, match="tensor_parallel_size: a model has to fit one GPU"):
        is_foreign("tensor_parallel_size", 2)
