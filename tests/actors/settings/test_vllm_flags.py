"""vLLM's command lines: what of them works here, and what is said of the rest."""

from __future__ import annotations

import argparse
import re
from collections import Counter

import pytest

from pagebus.actors.commands.cli import build_parser, dashed, main
from pagebus.actors.offline.own_settings import checked
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.settings.combinations.speculation import speculation
from pagebus.actors.settings.declaring import flag_of
from pagebus.actors.settings.sources import field_types, load_settings
from pagebus.actors.settings.vllm_flags import (
    ALIASES,
    ANY,
    FLAGS,
    REFUSED,
    TAKEN,
    add_foreign,
    is_foreign,
    opposites,
    takes_object,
    undotted,
)
from tests.vllm_names import stored


def settings_of(line: str) -> Settings:
    return load_settings(build_parser("serve").parse_args(["serve", *undotted(line.split())]), {})


def test_every_flag_of_vllm_is_known() -> None:
    """As a setting, by another name, taken, or answered with what there is instead."""
    known = {flag_of(name) for name in field_types()} | FLAGS.keys() | ALIASES.keys() | {"--model", "--config"}
    assert len(stored()["flags"]) > 300
    assert set(stored()["flags"]) - known == set()


def test_no_flag_is_a_setting() -> None:
    """Nor in two rows; each row says something, and one that takes nothing is among the refused."""
    assert (FLAGS.keys() | ALIASES.keys()).isdisjoint(map(flag_of, field_types()))
    assert FLAGS.keys().isdisjoint(ALIASES)
    assert set(ALIASES.values()) <= field_types().keys()
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
            why = " ('other' is no JSON)" if takes_object(name) else ""
            assert (ended.value.code, capsys.readouterr().err) == (2, f"pagebus: {name}: {flag.text}{why}\n")
    with pytest.raises(SystemExit):
        main(["serve", "m", "-dcp", "2"])
    assert "pagebus: -dcp: ranks divide heads, widths, experts" in capsys.readouterr().err


def test_benchmarks_take_the_other_names() -> None:
    """Of all settings that they have, as ``serve`` does."""
    line = ["bench", "engine", "--model", "m", "-tp", "2", "-ep", "-q", "fp8"]
    told = build_parser("bench").parse_args(line)
    assert (told.tensor_parallel_size, told.enable_expert_parallel, told.quantization) == ("2", True, "fp8")


def test_other_names_of_settings() -> None:
    """What vLLM calls otherwise sets what it means."""
    line = "m --api-server-count 3 -dp 2 -tp 4 -pp 3 --max-num-queued-reqs 7 --shutdown-timeout 9"
    told = settings_of(f"{line} --renderer-num-workers 4")
    assert (told.ingresses, told.executors, told.max_num_queued_requests) == (3, 2, 7)
    assert (told.tensor_parallel_size, told.pipeline_parallel_size) == (4, 3)
    assert (told.drain_timeout_s, told.tokenizers) == (9, 4)
    assert [settings_of(f"m {flag}").enable_expert_parallel for flag in ("-ep", "--enable-expert-parallel", "")] == [
        True, True, False,
    ]  # fmt: skip


def test_opposites_of_switches(capsys: pytest.CaptureFixture[str]) -> None:
    """What is refused may be switched off; what is so anyway cannot be, and says so."""
    parser = argparse.ArgumentParser()
    add_foreign(parser)
    for name in opposites():
        parser.parse_args([name])
        flag = FLAGS["--" + name.removeprefix("--no-")]
        told = f"pagebus: {name} changes nothing: {flag.text}\n" if flag.taken == ANY else ""
        assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("--structured-outputs-config.backend guidance", {}),
        ("--structured-outputs-config.backend=auto --structured-outputs-config.disable_fallback", {}),
        ("--structured-outputs-config.reasoning_parser qwen3", {"reasoning_parser": "qwen3"}),
        ("-cc.cudagraph_mode=NONE --compilation-config.mode 3", {"enforce_eager": True}),
        ("--compilation-config {}", {}),
        ("--pooler-config.pooling_type MEAN --pooler-config.normalize true", {"pooling_type": "mean"}),
        ("--attention-config.backend triton", {"attention_backend": "triton"}),
    ],
)
def test_fields_of_objects(line: str, meant: dict[str, object]) -> None:
    """May be written with dots, and are settings where there is one."""
    assert settings_of(f"m {line}") == Settings(model="m", **meant)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--structured-outputs-config.backend outlines", "--structured-outputs-config: backend: see "),
        ('--structured-outputs-config {"nothing":1}', "--structured-outputs-config: nothing: see "),
        ("--hf-overrides [1]", "--hf-overrides: change config.json"),
        ("--compilation-config.pass_config.fuse_norm_quant true", "--compilation-config: pass_config: see "),
    ],
)
def test_fields_of_objects_that_cannot_be_had(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Are refused one by one, and named."""
    with pytest.raises(SystemExit):
        settings_of(f"m {line}")
    assert capsys.readouterr().err.startswith(f"pagebus: {told}")


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


def test_lists_in_json() -> None:
    """vLLM takes no others for origins; what only looks like one is a value."""
    assert settings_of('--allowed-origins ["http://a","http://b"]').allowed_origins == ("http://a", "http://b")
    assert settings_of("--allowed-origins *").allowed_origins == ("*",)
    assert settings_of("--api-key [k").api_key == ("[k",)


@pytest.mark.parametrize(
    ("command", "line", "told"),
    [
        (
            "serve",
            "--max-model-length 5",
            "--max-model-length: there is no such option (did you mean --max-model-len?)",
        ),
        ("serve", "--xyzzy=5 m", "--xyzzy: there is no such option"),
        ("models", "--jsn", "--jsn: there is no such option (did you mean --json?)"),
        ("job status", "file --max-model-len 5", "--max-model-len: there is no such option"),
        ("dead-letters drop", "--al", "--al: there is no such option (did you mean --all?)"),
    ],
)
def test_what_nobody_knows(command: str, line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, with the option of this command that was meant if that can be guessed."""
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), *line.split()])
    assert (ended.value.code, capsys.readouterr().err) == (2, f"pagebus: {told}; see pagebus {command} --help\n")


def test_arguments_of_programs() -> None:
    """The same for `LLM`, where None and False ask for nothing."""
    assert is_foreign("trust_remote_code", True)
    assert is_foreign("quantization_config", None)
    assert is_foreign("fully_sharded_loras", False)
    assert not is_foreign("pipeline_parallel_size", 1)
    assert not is_foreign("dtype", "half")
    assert is_foreign("enable_chunked_prefill", True)
    assert is_foreign("enable_log_deltas", False)
    for name in ("enable_chunked_prefill", "async_scheduling"):
        with pytest.raises(TypeError, match=f"{name}: "):
            is_foreign(name, False)
    with pytest.raises(TypeError, match="decode_context_parallel_size: ranks divide heads"):
        is_foreign("decode_context_parallel_size", 2)
    assert checked({"pooler_config": {"pooling_type": "MEAN"}, "data_parallel_size": 2, "hf_overrides": None}) == {
        "pooling_type": "mean",
        "executors": 2,
    }
    with pytest.raises(TypeError, match=r"hf_overrides: x: change config\.json"):
        checked({"hf_overrides": {"x": 1}})
    with pytest.raises(TypeError, match="enable_chunked_prefill: prompts are always read in chunks"):
        is_foreign("enable_chunked_prefill", False)


def test_speculation_as_vllm_says_it() -> None:
    """The object, dotted fields and flags of their own are the same; sizes of the lookup have vLLM's defaults."""
    given = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":3}'
    for line in (
        f"m --speculative-config {given}",
        f"m -sc {given}",
        "m --speculative-config.method ngram --spec-tokens 4 --prompt-lookup-max 3",
        "m --spec-method ngram --num-speculative-tokens 4 --prompt-lookup-max 3",
    ):
        told = settings_of(line)
        assert speculation(told) == ("ngram", 4, 3, 3)
    given = '{"method":"eagle3","model":"h","num_speculative_tokens":4}'
    for line in (f"m -sc {given}", "m --spec-method eagle3 --spec-model h --spec-tokens 4"):
        told = settings_of(line)
        assert (speculation(told)[:2], told.spec_model) == (("eagle3", 4), "h")
    given = '{"method":"draft_model","model":"small","num_speculative_tokens":4,"draft_tensor_parallel_size":2}'
    assert settings_of(f"m -tp 2 -sc {given}").draft_tensor_parallel_size == 2
    given = given.replace("2", "1")
    for line in (f"m -sc {given}", "m --spec-method draft_model --spec-model small --spec-tokens 4"):
        told = settings_of(line)
        assert (speculation(told)[:2], told.spec_model) == (("draft_model", 4), "small")
    for method in ("mtp", "deepseek_mtp", "glm4_moe_mtp"):
        assert speculation(settings_of(f'm -sc {{"method":"{method}"}}'))[:2] == ("mtp", 0)
    assert speculation(settings_of('m -sc {"method":"none"}'))[:2] == ("none", 0)
    assert speculation(settings_of("m --spec-method ngram")) == ("ngram", 4, 5, 5)
    assert speculation(settings_of("m --spec-method ngram --spec-tokens 2 --prompt-lookup-min 2")) == ("ngram", 2, 2, 2)


def test_speculation_by_default() -> None:
    """A lookup, whose depth and sizes may be said alone."""
    assert speculation(settings_of("m")) == ("ngram", 4, 5, 3)
    assert speculation(settings_of("m --spec-tokens 7 --prompt-lookup-max 6")) == ("ngram", 7, 6, 6)
    assert speculation(settings_of("m --enable-lora"))[:2] == ("ngram", 4)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ('{"method":"eagle3"}', "num_speculative_tokens (--spec-tokens) is missing"),
        ('{"method":"none","num_speculative_tokens":4}', "needs a method"),
        ('{"method":"medusa","num_speculative_tokens":4}', "choose one of none, ngram, eagle3, mtp, draft_model"),
        ('{"method":"ngram","num_speculative_tokens":0}', "must be at least 1"),
        ('{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":2,"prompt_lookup_min":3}',
         "prompt_lookup_min=3 cannot be larger than prompt_lookup_max=2"),
        ('{"method":"ngram","num_speculative_tokens":4,"model":"x"}', "--spec-method ngram needs no model"),
        ('{"model":"x"}', "a model that guesses (--spec-model) needs a method"),
        ('{"method":"eagle3","num_speculative_tokens":4,"prompt_lookup_max":2}', "are of ngram only"),
        ('{"method":"draft_model","model":"x"}', "--spec-method draft_model: num_speculative_tokens"),
        ('{"method":"draft_model","num_speculative_tokens":4}', "draft_model: model (--spec-model) is missing"),
        ('{"method":"draft_model","model":"x","num_speculative_tokens":4,"prompt_lookup_min":2}', "are of ngram only"),
        ('{"method":"mtp","prompt_lookup_max":2}', "--spec-method mtp: prompt_lookup_max"),
        ('{"method":"mtp","model":"x"}', "--spec-method mtp needs no model"),
    ],
)  # fmt: skip
def test_speculation_that_cannot_be(given: str, why: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(why)):
        settings_of(f"m --speculative-config {given}")


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model"])
def test_what_guesses_is_divided_as_the_model_is(method: str) -> None:
    """vLLM also has it whole on each rank."""
    model = ["--spec-model=x"] * (method != "mtp")
    asked = " ".join(["m -tp 4 --spec-tokens 2 --spec-method", method, *model])
    assert settings_of(f"{asked} --speculative-config.draft_tensor_parallel_size 4").draft_tensor_parallel_size == 4
    with pytest.raises(SettingsError, match=r"draft_tensor_parallel_size=1: .* as many ranks as the model is, 4"):
        settings_of(f"{asked} --speculative-config.draft_tensor_parallel_size 1")


@pytest.mark.parametrize(
    "field", ['"num_speculative_tokens":"4"', '"draft_sample_method":"x"', '"rejection_sample_method":"strict"']
)
def test_fields_of_speculation_that_are_refused(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of(f'm --speculative-config {{"method":"ngram",{field}}}')
    assert field.split('"')[1] in capsys.readouterr().err
