"""`LLM`: the shipped model, embedded."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from pagebus import LLM, BeamSearchParams, PoolingParams, RepetitionDetectionParams, RequestOutput, SamplingParams
from pagebus.actors.model.config import ModelError
from pagebus.actors.offline.own_settings import checked
from pagebus.actors.settings import SettingsError
from tests.helpers.waiting import LIMIT_S

GREEDY = SamplingParams(temperature=0, max_tokens=8)
TOLERANCE = 1e-5
QUESTION = [{"role": "user", "content": "What is water?"}]
ANSWER = "water (noun): binary compound that occurs at room temperature as a clear colorless odorless tasteless liquid."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", threads=1, max_num_seqs=8) as made:
        yield made


def texts(outputs: list[RequestOutput]) -> list[list[str]]:
    return [[each.text for each in output.outputs] for output in outputs]


def test_a_conversation(llm: LLM) -> None:
    """Rendered by the template; ``max_tokens`` None lets the model end by itself."""
    (output,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=None))
    assert output.prompt == "<|bos|><|user|>What is water?<|end|><|assistant|>"
    assert output.outputs[0].text == ANSWER
    assert (output.outputs[0].finish_reason, output.finished) == ("stop", True)
    assert texts(llm.chat([QUESTION, QUESTION], GREEDY)) == texts(llm.chat(QUESTION, GREEDY)) * 2


def test_prompts_of_all_kinds(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, token ids and both by name give the same, in the order of the prompts; the bar can be left out."""
    shown = io.StringIO()
    monkeypatch.setattr(llm._progress, "_out", shown)
    (whole,) = llm.generate("water is", GREEDY)
    ids = whole.prompt_token_ids
    assert ids
    assert shown.getvalue() == "1 prompt: 100%\n"
    outputs = llm.generate(["water is", ids, {"prompt": "water is"}, {"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
    assert shown.getvalue() == "1 prompt: 100%\n"
    assert texts(outputs) == texts([whole]) * 4
    assert [output.prompt for output in outputs] == ["water is", None, "water is", None]
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert [int(output.request_id) - int(outputs[0].request_id) for output in outputs] == [0, 1, 2, 3]
    assert texts(llm.generate(ids, GREEDY)) == texts([whole])
    assert texts(llm.generate(np.array(ids), GREEDY)) == texts(llm.generate([np.array(ids)], GREEDY)) == texts([whole])
    assert llm.generate([]) == []


def test_many_prompts_keep_their_order(llm: LLM) -> None:
    """More than there are calls at a time, each with parameters of its own."""
    lengths = [1 + place % 5 for place in range(40)]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = llm.generate(["word"] * 40, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths


def test_log_probabilities(llm: LLM) -> None:
    """Of each token, by id, with rank and text; the sum of the chosen ones."""
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("water is", params)
    (told,) = output.outputs
    assert told.logprobs is not None
    assert output.prompt_logprobs is not None
    own = [each[token_id] for token_id, each in zip(told.token_ids, told.logprobs, strict=True)]
    assert [each.rank for each in own] == [1] * 4
    assert "".join(str(each.decoded_token) for each in own) == told.text
    assert told.cumulative_logprob == sum(each.logprob for each in own)
    assert [len(each) for each in told.logprobs] == [2] * 4
    assert output.prompt_logprobs[0] is None
    assert output.prompt_token_ids[1] in (output.prompt_logprobs[1] or {})
    (plain,) = llm.generate("water is", GREEDY)
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob, plain.prompt_logprobs) == (None, None, None)


def test_choices_stops_and_constraints(llm: LLM) -> None:
    """``n``, seeds, stop strings and structured outputs do what they do over HTTP."""
    (output,) = llm.generate("water is", SamplingParams(n=3, seed=1, max_tokens=5))
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert texts([output]) == texts(llm.generate("water is", SamplingParams(n=3, seed=1, max_tokens=5)))
    (told,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=30, stop="that"))[0].outputs
    assert (told.text, told.stop_reason) == (ANSWER.partition("that")[0], "that")
    (told,) = llm.generate("word", SamplingParams(structured_outputs={"choice": ["yes", "no"]}))[0].outputs
    assert told.text in ("yes", "no")
    cut = SamplingParams(temperature=0, max_tokens=None, truncate_prompt_tokens=-1)
    assert texts(llm.generate("water is", cut)) == texts(llm.generate("water is", SamplingParams(temperature=0)))
    assert len(llm.generate([[5] * 2000], cut)[0].outputs[0].token_ids) == 1


def test_embeddings(llm: LLM) -> None:
    """As over HTTP, of prompts of all kinds; the first dimensions alone, the first tokens alone, and
    not scaled."""
    ids = [int(each) for each in llm.get_tokenizer()("water is").input_ids]
    text, by_ids, named = llm.embed(["water is", ids, {"prompt_token_ids": ids}], use_tqdm=False)
    told = llm._system.call(llm._client.post("/v1/embeddings", {"input": ids}))
    expected = np.array(told["data"][0]["embedding"])
    assert text.prompt_token_ids == ids
    assert text.outputs.hidden_size == len(expected)
    for output in (text, by_ids, named):
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=TOLERANCE)

    params = [PoolingParams(dimensions=4), PoolingParams(truncate_prompt_tokens=1)]
    cut, first = llm.embed([ids, ids], pooling_params=params)
    np.testing.assert_allclose(cut.outputs.embedding, expected[:4] / np.linalg.norm(expected[:4]), atol=TOLERANCE)
    assert first.prompt_token_ids == ids[:1]
    assert np.linalg.norm(first.outputs.embedding) == pytest.approx(1, abs=1e-6)
    (raw,) = llm.embed(ids, pooling_params=PoolingParams(use_activation=False))
    length = np.linalg.norm(raw.outputs.embedding)
    assert length > 2
    np.testing.assert_allclose(np.array(raw.outputs.embedding) / length, expected, atol=TOLERANCE)
    (whole,) = llm.embed([ids * 1000], pooling_params=PoolingParams(truncate_prompt_tokens=-1))
    assert len(whole.prompt_token_ids) == 1023
    assert llm.embed([]) == []


def test_scores(llm: LLM) -> None:
    """Are the cosines of embeddings; one text goes with each of several."""
    texts = ["water is", "a dog", "water is"]
    vectors = [np.array(each.outputs.embedding) for each in llm.embed(texts, use_tqdm=False)]
    told = llm.score("water is", texts, use_tqdm=False)
    assert [each.outputs.score for each in told] == pytest.approx(
        [float(vectors[0] @ each) for each in vectors], abs=1e-5
    )
    assert told[2].outputs.score == pytest.approx(1, abs=1e-5)
    assert [each.outputs.score for each in llm.score(texts[:2], texts[:2])] == pytest.approx([1, 1], abs=1e-5)
    with pytest.raises(ValueError, match="1 with N or N with N, got 2 and 3"):
        llm.score(texts[:2], texts)


def test_beam_search(llm: LLM) -> None:
    """The best beam is at least as likely as the greedy text; tokens and text are those of prompt and output."""
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    first, second = llm.beam_search(["water is", {"prompt": "a dog"}], params)
    (greedy,) = llm.generate("water is", SamplingParams(temperature=0, max_tokens=5, logprobs=0, ignore_eos=True))
    scores = [each.cum_logprob for each in first.sequences]
    assert len(second.sequences) == 3
    assert scores == sorted(scores, reverse=True)
    assert scores[0] >= (greedy.outputs[0].cumulative_logprob or 0) - 1e-3
    best = first.sequences[0]
    assert best.tokens[: len(greedy.prompt_token_ids)] == greedy.prompt_token_ids
    assert len(best.tokens) == len(greedy.prompt_token_ids) + 5
    assert best.text == llm.get_tokenizer().decode(best.tokens, skip_special_tokens=True)
    assert best.cum_logprob == pytest.approx(sum(next(iter(each.values())).logprob for each in best.logprobs))
    with pytest.raises(ValueError, match="--max-beam-width"):
        llm.beam_search("x", BeamSearchParams(beam_width=17, max_tokens=1))


def test_what_clients_of_vllm_ask_for(llm: LLM) -> None:
    """Tokens that are picked, outputs without text, the best of several, an end to repetition."""
    picked = SamplingParams(temperature=0, max_tokens=2, logprob_token_ids=[7, 9])
    everything = SamplingParams(temperature=0, max_tokens=2, logprobs=20)
    (told,), (likely,) = (llm.generate("water is", each)[0].outputs for each in (picked, everything))
    assert told.logprobs is not None
    assert likely.logprobs is not None
    for token_id, each, tops in zip(told.token_ids, told.logprobs, likely.logprobs, strict=True):
        assert set(each) == {token_id, 7, 9}
        assert each[token_id].logprob == pytest.approx(tops[token_id].logprob, abs=1e-4)
    (silent,) = llm.generate("water is", SamplingParams(temperature=0, max_tokens=2, detokenize=False))[0].outputs
    assert (silent.text, silent.token_ids) == ("", told.token_ids)
    (best,) = llm.generate("water is", SamplingParams(max_tokens=3, best_of=4, seed=1, logprobs=0))[0].outputs
    each = llm.generate("water is", SamplingParams(max_tokens=3, n=4, seed=1, logprobs=0))[0].outputs
    assert best.cumulative_logprob == max(output.cumulative_logprob or -99 for output in each)
    again = RepetitionDetectionParams(max_pattern_size=1, min_count=3)
    params = SamplingParams(max_tokens=9, allowed_token_ids=[7], repetition_detection=again)
    (ended,) = llm.generate("water is", params)[0].outputs
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([7] * 3, "repetition", "repetition_detected")


def test_embeddings_that_are_refused(llm: LLM) -> None:
    """By the field, or the server's reason."""
    with pytest.raises(ValueError, match="dimensions"):
        llm.embed("word", pooling_params=PoolingParams(dimensions=10**6))
    with pytest.raises(ValueError, match="1024"):
        llm.embed("x " * 2000)
    with pytest.raises(ValueError, match="2 prompts need one pooling_params, or one each; got 1"):
        llm.embed(["a", "b"], pooling_params=[PoolingParams()])


def test_refusals_name_the_reason(llm: LLM) -> None:
    """One bad prompt refuses all, and the next call works."""
    with pytest.raises(ValueError, match="maximum context length is 1024") as refused:
        llm.generate(["word", "x " * 2000], GREEDY)
    assert refused.value.__notes__ == ["in prompt 1 (from 0) of 2"]
    with pytest.raises(ValueError, match="outside the vocabulary"):
        llm.generate([[10**6]], GREEDY)
    with pytest.raises(ValueError, match="prompt_token_ids"):
        llm.generate({}, GREEDY)
    for name in ("text", "multi_modal_data", "prompt_embeds", "cache_salt"):
        with pytest.raises(ValueError, match=f"^{name}: not supported"):
            llm.generate({"prompt": "word", name: "x"}, GREEDY)
    for prompt in (["a", "b"], [1.5], None):
        with pytest.raises(ValueError, match="a prompt must be a text or a list of token ids"):
            llm.generate([prompt], GREEDY)
    with pytest.raises(TypeError, match="sampling_params: must be SamplingParams, got"):
        llm.generate("a", {"max_tokens": 1})
    with pytest.raises(ValueError, match="2 prompts need one sampling_params, or one each; got 1"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ValueError, match="stop"):
        llm.generate("word", SamplingParams(stop=["x"] * 100))
    assert len(llm.generate("word", GREEDY)) == 1


def test_outputs_end_with_the_context(llm: LLM) -> None:
    """As in vLLM, more tokens may be asked for than the context holds behind a prompt: one long prompt among many is
    no error."""
    params = SamplingParams(temperature=0, max_tokens=1020, min_tokens=100, ignore_eos=True)
    told = [each.outputs[0] for each in llm.generate(["the sea " * 400, [5] * 1000], params)]
    room = 1024 - len(llm.get_tokenizer()("the sea " * 400).input_ids)
    assert [(len(each.token_ids), each.finish_reason) for each in told] == [(room, "length"), (24, "length")]
    assert len(llm.generate([[5] * 1023])[0].outputs[0].token_ids) == 1
    (told,) = llm.chat([{"role": "user", "content": "water " * 900}], SamplingParams(max_tokens=10**6))[0].outputs
    assert told.finish_reason in ("length", "stop")
    cut = SamplingParams(max_tokens=10, truncate_prompt_tokens=-1, ignore_eos=True)
    assert len(llm.generate([[5] * 2000], cut)[0].outputs[0].token_ids) == 10


def test_numbers_of_numpy(llm: LLM) -> None:
    """Parameters from a sweep are sent as they are."""
    sweep = [
        SamplingParams(temperature=each, max_tokens=np.int64(3), seed=np.int32(1)) for each in np.linspace(0, 1, 3)
    ]
    plain = [SamplingParams(temperature=each, max_tokens=3, seed=1) for each in (0, 0.5, 1)]
    assert texts(llm.generate(["water is"] * 3, sweep)) == texts(llm.generate(["water is"] * 3, plain))


def test_the_models_own_defaults(llm: LLM) -> None:
    """May be changed before they are given, as in vLLM's examples."""
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.max_tokens) == (0.2, 0.9, 16)
    params.max_tokens = 2
    params.ignore_eos = True
    assert len(llm.generate("water is", params)[0].outputs[0].token_ids) == 2


def test_several_threads_may_call(llm: LLM) -> None:
    """Each gets its own outputs."""
    found: dict[str, list[list[str]]] = {}
    prompts = ["water", "fire", "stone"]
    threads = [
        threading.Thread(target=lambda prompt=prompt: found.update({prompt: texts(llm.generate(prompt, GREEDY))}))
        for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[prompt] for prompt in prompts] == [[each] for each in texts(llm.generate(prompts, GREEDY))]


def test_an_interrupt_ends_a_call_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the caller, what is under way is given up, and the model answers on."""
    with monkeypatch.context() as patched:
        patched.setattr(llm._progress, "show", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        try:
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["word"] * 30, [SamplingParams(max_tokens=1), *[SamplingParams(max_tokens=900)] * 29])
        finally:
            signal.signal(signal.SIGINT, before)
    assert len(llm.generate("word", GREEDY)) == 1


def test_a_model_that_is_not_there() -> None:
    """The reason comes as it is, and nothing is left running."""
    before = threading.active_count()
    with pytest.raises(ModelError, match="no such folder"):
        LLM("./nowhere", device="cpu")
    assert threading.active_count() == before


def test_settings_are_of_their_types() -> None:
    """Texts mean what they mean in the environment, None is what was not given, and the rest is refused by name."""
    given = {"max_model_len": "8192", "enforce_eager": "false", "gpu_memory_utilization": 1, "max_num_seqs": None}
    assert checked({**given, "seed": 3, "dtype": None}) == {
        "max_model_len": 8192, "enforce_eager": False, "gpu_memory_utilization": 1.0, "seed": 3
    }  # fmt: skip
    for wrong in ({"max_model_len": 8192.0}, {"seed": "a"}, {"enforce_eager": 1}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            checked(wrong)


def test_settings_that_make_no_sense() -> None:
    """What is no setting, and what only servers have."""
    with pytest.raises(TypeError, match=r"max_modellen: there is no such setting \(did you mean max_model_len\?\)"):
        LLM(max_modellen=3)
    with pytest.raises(TypeError, match="port is a setting of servers"):
        LLM(port=80)
    with pytest.raises(TypeError, match="enable_chunked_prefill: prompts are always read in chunks"):
        LLM(enable_chunked_prefill=False)
    with pytest.raises(SettingsError, match=r"--tensor-parallel-size 2: .*; start a server"):
        LLM(tensor_parallel_size=2)
    with pytest.raises(TypeError, match="weights stay on the GPU"):
        LLM(cpu_offload_gb=4, trust_remote_code=True)


PROGRAM = """
import atexit, sys, threading
import pagebus
print("pagebus.actors.offline" in sys.modules)
pagebus.SamplingParams()
print("torch" in sys.modules, "aiohttp" in sys.modules)
atexit.register(lambda: print("at exit", [each.name for each in threading.enumerate() if each.is_alive()]))
llm = pagebus.LLM(device="cpu", threads=1, max_num_seqs=8)
print(len(llm.generate("word", pagebus.SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].outputs))
"""


def test_a_whole_program() -> None:
    """Nothing is imported before it is used, and no torch for the parameters. A program that does not close its model
    ends all the same: the actors have drained, and no thread is left, before the interpreter goes."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["False", "False False", "1", "at exit []"]


FORKS = """
import os, sys
import pagebus
llm = pagebus.LLM(device="cpu", threads=1, max_num_seqs=8)
if (child := os.fork()) == 0:
    try:
        llm.generate("word")
    except RuntimeError as error:
        print(error, flush=True)
    llm.close()
    os._exit(0)
os.waitpid(child, 0)
print(len(llm.generate("word", use_tqdm=False)))
"""


def test_a_forked_process_is_told_that_it_has_no_model() -> None:
    """Its threads are in the other process, so a call would wait for ever; there all goes on."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "this LLM was made before the process forked, and runs in the other one: make one here", "1"
    ]  # fmt: skip


def test_after_the_end() -> None:
    """A call says that there is nothing to call any more."""
    llm = LLM(device="cpu", threads=1, max_num_seqs=8)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("word")


def test_after_an_end_of_its_own() -> None:
    """A call tells why the system has ended, however long ago."""
    llm = LLM(device="cpu", threads=1, max_num_seqs=8)
    run = llm._system._begun.result()
    run.loop.call_soon_threadsafe(run.stop)
    llm._system._thread.join()
    with pytest.raises(RuntimeError, match="the system has ended") as told:
        llm.generate("word")
    assert str(told.value.__cause__) == "the system was stopped"
    llm.close()
