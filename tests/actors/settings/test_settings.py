"""Settings: bounds, sources and their precedence, and the way to child processes."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagebus.actors.settings import GROUPS, Settings, SettingsError
from pagebus.actors.settings.sources import (
    add_arguments,
    child_environment,
    field_types,
    load_settings,
    parse_int,
    to_args,
    to_env,
)


def load(line: str = "", **environ: str) -> Settings:
    """Settings of a command line and environment variables."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return load_settings(parser.parse_args(line.split()), environ)


def test_every_setting_is_described() -> None:
    """Each field has a help text, a group and a default that passes its own check."""
    for spec in dataclasses.fields(Settings):
        assert spec.metadata["help"], spec.name
        assert sum(spec.name in group.__annotations__ for group in GROUPS.values()) == 1, spec.name
        assert spec.default is not dataclasses.MISSING, spec.name


def test_numbers_have_bounds() -> None:
    """Every number has a lower and an upper bound, or a check of its own."""
    for spec in dataclasses.fields(Settings):
        if field_types()[spec.name][0] in (int, float):
            bounded = spec.metadata["low"] is not None and spec.metadata["high"] is not None
            assert bounded or spec.metadata["check"], spec.name


def test_command_line() -> None:
    """vLLM's spellings are understood."""
    settings = load("folder/m --max-model-len 32k --no-enable-prefix-caching --served-model-name a b --enforce-eager")
    assert settings.model == "folder/m"
    assert settings.max_model_len == 32_000
    assert settings.enable_prefix_caching is False
    assert settings.enforce_eager is True
    assert settings.served_model_name == ("a", "b")


def test_precedence(tmp_path: Path) -> None:
    """Command line, then environment, then file, then default."""
    file = tmp_path / "pagebus.toml"
    file.write_text('port = 1\nmax-num-seqs = 2\nmax_model_len = "4K"\nhost = "::"\nserved_model_name = ["x", "y"]\n')
    settings = load(f"--port 3 --config {file}", PAGEBUS_PORT="4", PAGEBUS_MAX_NUM_SEQS="5")
    assert (settings.port, settings.max_num_seqs, settings.max_model_len) == (3, 5, 4096)
    assert (settings.host, settings.served_model_name, settings.executors) == ("::", ("x", "y"), 1)
    assert load(PAGEBUS_CONFIG=str(file)).port == 1


def test_empty_variable_counts_as_not_given() -> None:
    """Compose files pass variables on even when they are not set."""
    assert load(PAGEBUS_PORT="", PAGEBUS_MODEL="").port == 8000


def test_test_variables_are_left_alone() -> None:
    """PAGEBUS_TEST_... are the tests' own."""
    assert load(PAGEBUS_TEST_REDIS="x") == Settings()


@pytest.mark.parametrize(
    ("line", "environ", "message"),
    [
        ("--port 70000", {}, "--port 70000: must be at most 65535"),
        ("--max-num-seqs 0", {}, "--max-num-seqs 0: must be at least 1"),
        ("--max-num-seqs many", {}, "--max-num-seqs: 'many' is not a whole number"),
        ("--gpu-memory-utilization 0", {}, "must be more than 0 and at most 1"),
        ("--gpu-memory-utilization nan", {}, "--gpu-memory-utilization: not a number"),
        ("--block-size 17", {}, "--block-size 17: must be a multiple of 16"),
        ("--dtype int4", {}, "--dtype 'int4': choose one of auto, float32"),
        ("--bus localhost:6379", {}, "--bus 'localhost:6379': needs a URL"),
        ("--name a:b", {}, "--name 'a:b'"),
        ("", {"PAGEBUS_PROT": "1"}, "PAGEBUS_PROT: there is no such setting .did you mean PAGEBUS_PORT"),
        ("", {"PAGEBUS_SPECULATIVE_CONFIG": "{}"}, "only the command line takes --speculative-config"),
        ("", {"PAGEBUS_ROPE_THETA": "5"}, "there is no such setting: change config.json"),
        ("", {"PAGEBUS_DATA_PARALLEL_SIZE": "2"}, "PAGEBUS_DATA_PARALLEL_SIZE: .*: its name here is executors"),
        ("", {"PAGEBUS_ENFORCE_EAGER": "maybe"}, "PAGEBUS_ENFORCE_EAGER: 'maybe' is not true or false"),
        ("--config /nowhere/x.toml", {}, "--config /nowhere/x.toml: No such file"),
        ("--config x.yaml", {}, "--config x.yaml: settings are read from TOML"),
    ],
)
def test_errors_name_the_flag(line: str, environ: dict[str, str], message: str) -> None:
    """A bad value is refused with a message that names where it came from."""
    with pytest.raises(SettingsError, match=message):
        load(line, **environ)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "prot: there is no such setting .did you mean port"),
        ("data-parallel-size = 2", "data-parallel-size: there is no such setting: its name here is executors"),
        ("port = true", "port: True is not a whole number"),
        ("enforce_eager = 1", "enforce_eager: 1 is not true or false"),
        ("model = 3", "model: 3 is not a string"),
        ("api_key = [1]", "is not a list of strings"),
        ("port =", "pagebus.toml"),
    ],
)
def test_errors_in_the_file(tmp_path: Path, text: str, message: str) -> None:
    """The file is checked like everything else."""
    file = tmp_path / "pagebus.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load(f"--config {file}")


def test_api_keys_do_not_show() -> None:
    """Keys and passwords go to children by environment, and no error message repeats them."""
    settings = load("--api-key s3cret other --bus redis://user:pass@host:1/0 --port 1")
    assert to_args(settings) == ["--port=1"]
    assert to_env(settings) == {"PAGEBUS_API_KEY": "s3cret,other", "PAGEBUS_BUS": "redis://user:pass@host:1/0"}
    with pytest.raises(SettingsError) as caught:
        load("", PAGEBUS_API_KEY="s3 cret")
    assert "cret" not in str(caught.value)


def test_child_gets_exactly_these_settings() -> None:
    """What the parent's environment says is not applied a second time."""
    settings = load("--port 8000 --bus redis://h:1", PAGEBUS_PORT="9", PAGEBUS_SEED="4")
    environ = child_environment(settings, {"PAGEBUS_PORT": "9", "PAGEBUS_SEED": "4", "PATH": "x"})
    assert environ == {"PATH": "x"}
    assert load(" ".join(to_args(settings)), **environ) == settings


def test_dtype_aliases() -> None:
    """float and half are float32 and float16."""
    assert (Settings(dtype="half").dtype, Settings(dtype="float").dtype) == ("float16", "float32")


@pytest.mark.parametrize(
    ("text", "number"), [("12", 12), ("4k", 4000), ("4K", 4096), ("1.5M", 1572864), ("2g", 2 * 10**9)]
)
def test_parse_int(text: str, number: int) -> None:
    """Whole numbers with decimal (k) and binary (K) multipliers."""
    assert parse_int(text) == number


def values() -> st.SearchStrategy[dict[str, Any]]:
    """Some settings with valid values."""
    text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
    return st.fixed_dictionaries(
        {},
        optional={
            "model": text.filter(lambda t: not t.startswith("-")),
            "chat_template": text,
            "served_model_name": st.lists(text, min_size=1, max_size=3).map(tuple),
            "api_key": st.just(("a", "b")),
            "max_model_len": st.integers(1, 2**20),
            "lease_ttl_s": st.floats(0.2, 300),
            "enable_prefix_caching": st.booleans(),
            "enforce_eager": st.booleans(),
            "bus": st.sampled_from(["redis://:p@h", "unix:///x y/z.sock", "memory://"]),
        },
    )


@given(values())
def test_round_trip(given_values: dict[str, Any]) -> None:
    """A child started with to_args() and to_env() has the same settings, whatever they are."""
    settings = Settings(**given_values)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert load_settings(parser.parse_args(to_args(settings)), to_env(settings)) == settings


@pytest.mark.parametrize(
    ("changes", "cores", "expected"),
    [
        ({}, 64, (1, 1, 1)),
        ({"executors": 4}, 64, (4, 4, 4)),
        ({"executors": 4}, 16, (3, 3, 3)),
        ({"executors": 4}, 2, (1, 1, 1)),
        ({"executors": 4, "tensor_parallel_size": 2}, 16, (2, 2, 2)),
        ({"executors": 4, "ingresses": 2, "detokenizers": 1}, 64, (2, 4, 1)),
        ({"executors": 4, "uds": "/tmp/pagebus.sock"}, 64, (1, 4, 4)),
        ({"executors": 4, "api_key_file": "keys.toml"}, 64, (1, 4, 4)),
    ],
)
def test_executors_bring_actors_for_text(changes: dict[str, Any], cores: int, expected: tuple[int, int, int]) -> None:
    """Ingresses, tokenizers and detokenizers: one for each executor if cores suffice; numbers that are given hold."""
    settings = Settings(**changes).shared_out(cores)
    assert (settings.ingresses, settings.tokenizers, settings.detokenizers) == expected


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"roles": "prefill=1"}, "prefill=1,decode=3"),
        ({"roles": "prefill=0,decode=2"}, "prefill=1,decode=3"),
        ({"roles": "prefill=1,decode=1"}, "--executors is 3"),
        ({"roles": "prefill=1,decode=2", "kv_moves": "off"}, "--kv-moves off"),
        ({"roles": "auto", "kv_moves": "off"}, "--kv-moves off"),
        ({"roles": "Auto"}, "it is auto, or of the form"),
        ({"roles": "prefill=1,decode=2", "enable_prefix_caching": False}, "prefix caching"),
        ({"roles": "prefill=1,decode=2", "pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
    ],
)
def test_roles_that_no_executors_can_have_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        Settings(executors=3, **wrong)
