"""What unmodified clients get from a server; run in their own environment: ``clients.py BASE_URL CHECK FOLDER``.

A check ends with an exception if anything is not as it should be, and leaves in FOLDER what somebody else has to
compare. It prints the client's version and what was tried.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

QUESTION = "What is a dog?"
MODEL = "pagebus"
TOKENS = 12
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
SHIPPED = Path(__file__).parents[2] / "actors" / "shipped_model"
NUM_REQUESTS = 24
"""Of a load; each is PROMPT_TOKENS long, and asks for exactly TOKENS."""
PROMPT_TOKENS = 32
RATE = 12
"""Requests per second of a load."""


class Review(BaseModel):
    """A review of a film, and no more: a small model would go on with properties of its own until its tokens end."""

    model_config = ConfigDict(extra="forbid")

    mood: Literal["good", "bad"]
    stars: int = Field(ge=1, le=5)


def told(url: str) -> str:
    """What the model answers to the question, greedily, as OpenAI's own client is told."""
    with OpenAI(base_url=url, api_key="none") as client:
        chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=TOKENS, temperature=0)
        return chat.choices[0].message.content or ""


def same(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise AssertionError(f"{what}: {got!r} instead of {expected!r}")


def langchain_openai(url: str, folder: Path) -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI

    @tool(args_schema=Review)
    def rate(mood: str, stars: int) -> str:
        """Rate a film."""
        return f"{stars} {mood}"

    asked: dict[str, Any] = {"base_url": url, "api_key": "none", "model": MODEL, "temperature": 0}
    chat, expected = ChatOpenAI(max_tokens=TOKENS, **asked), told(url)
    answer = chat.invoke(QUESTION)
    same("invoke", answer.content, expected)
    same("usage", answer.usage_metadata["output_tokens"], TOKENS)
    same("stream", "".join(chunk.content for chunk in chat.stream(QUESTION)), expected)
    whole = None
    for chunk in ChatOpenAI(max_tokens=TOKENS, stream_usage=True, **asked).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    same("usage of a stream", whole.usage_metadata["output_tokens"], TOKENS)
    same("ainvoke", asyncio.run(chat.ainvoke(QUESTION)).content, expected)
    same("batch", [each.content for each in chat.batch([QUESTION] * 3)], [expected] * 3)
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    same("logprobs", [len(each["top_logprobs"]) for each in logprobs], [2] * TOKENS)
    long = ChatOpenAI(max_tokens=100, **asked)
    for method in ("json_schema", "function_calling"):
        review = long.with_structured_output(Review, method=method).invoke("A film?")
        same(method, type(review), Review)
    calls = (
        long.bind_tools([rate], tool_choice="any", strict=True, parallel_tool_calls=False).invoke("Rate it.").tool_calls
    )
    same("tool", [(call["name"], type(call["args"]["stars"])) for call in calls], [("rate", int)])
    text = OpenAI(max_tokens=TOKENS, **asked)
    same("completion", text.invoke("A dog is"), "".join(text.stream("A dog is")))
    return (
        "chat: invoke, stream, async, batch, usage, logprobs; structured output (json_schema, function_calling); "
        "tools; completions"
    )


def litellm(url: str, folder: Path) -> str:
    import litellm

    asked: dict[str, Any] = {"model": f"hosted_vllm/{MODEL}", "api_base": url, "api_key": "none", "temperature": 0}
    expected = told(url)
    answer = litellm.completion(messages=MESSAGES, max_tokens=TOKENS, **asked)
    same("completion", answer.choices[0].message.content, expected)
    same("usage", answer.usage.completion_tokens, TOKENS)
    chunks = list(litellm.completion(messages=MESSAGES, max_tokens=TOKENS, stream=True, **asked))
    same("stream", "".join(chunk.choices[0].delta.content or "" for chunk in chunks), expected)
    later = litellm.acompletion(messages=MESSAGES, max_tokens=TOKENS, **asked)
    same("acompletion", asyncio.run(later).choices[0].message.content, expected)
    shaped = litellm.completion(messages=MESSAGES, max_tokens=100, response_format=Review, **asked)
    Review.model_validate_json(shaped.choices[0].message.content)
    function = {"name": "rate", "parameters": Review.model_json_schema()}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    plain = {**asked, "model": f"openai/{MODEL}"}  # hosted_vllm/ takes additionalProperties out of tools
    calls = litellm.completion(messages=MESSAGES, max_tokens=200, **tools, **plain).choices[0].message.tool_calls
    Review.model_validate_json(calls[0].function.arguments)
    try:
        litellm.completion(messages=MESSAGES, max_tokens=TOKENS, **{**asked, "temperature": 9})
    except litellm.BadRequestError as error:
        same("the field at fault is named", "temperature" in str(error), True)
    else:
        raise AssertionError("a temperature of 9 was served")
    return (
        "`hosted_vllm/`: chat, stream, async, usage, `response_format` of a model class, errors by status; "
        "`openai/`: tools"
    )


def instructor(url: str, folder: Path) -> str:
    import instructor

    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "temperature": 0}
    with OpenAI(base_url=url, api_key="none") as client:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
            made = instructor.from_openai(client, mode=mode)
            review = made.create(response_model=Review, max_retries=0, **asked)
            same(mode.name, isinstance(review, Review), True)
        parts = list(instructor.from_openai(client).create_partial(response_model=Review, max_retries=0, **asked))
        Review.model_validate(parts[-1].model_dump())
    return "modes TOOLS, TOOLS_STRICT, JSON_SCHEMA; partial objects from a stream"


def llm(url: str, folder: Path) -> str:
    description = f"- model_id: here\n  model_name: {MODEL}\n  api_base: {url}\n  supports_schema: true\n"
    (folder / "extra-openai-models.yaml").write_text(description)

    def run(*arguments: str) -> str:
        command = [str(Path(sys.executable).with_name("llm")), "prompt", "-m", "here", *arguments]
        environment = {**os.environ, "LLM_USER_PATH": str(folder)}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=100).stdout

    ask = [QUESTION, "-o", "temperature", "0", "-o", "max_tokens"]
    expected = told(url)
    same("stream", run(*ask, str(TOKENS)).strip(), expected.strip())
    same("whole", run(*ask, str(TOKENS), "--no-stream").strip(), expected.strip())
    Review.model_validate_json(run(*ask, "100", "--schema", json.dumps(Review.model_json_schema())))
    return "its command with `extra-openai-models.yaml`: stream, whole, by schema"


def lm_eval(url: str, folder: Path) -> str:
    """The log likelihoods go to FOLDER/loglikelihoods.json, what was generated to FOLDER/generated.json."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    tasks = Path(__file__).parent / "lm_eval_task"
    os.chdir(tasks)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    asked: dict[str, Any] = {"task_manager": manager, "bootstrap_iters": 0, "log_samples": True}
    served = {"model": MODEL, "num_concurrent": 1, "max_retries": 1}
    arguments = {
        **served, "base_url": f"{url}/completions", "tokenizer": str(SHIPPED), "tokenizer_backend": "huggingface",
        "max_length": 512,
    }  # fmt: skip
    found = simple_evaluate(model="local-completions", model_args=arguments, tasks=["animals"], batch_size=2, **asked)
    rows = [
        {"context": context, "continuation": continuation, "loglikelihood": answer[0]}
        for sample in found["samples"]["animals"]
        for (context, continuation), answer in zip(sample["arguments"], sample["filtered_resps"], strict=True)
    ]
    same("questions", len(rows), 8)
    (folder / "loglikelihoods.json").write_text(json.dumps(rows))
    arguments = {**served, "base_url": f"{url}/chat/completions", "num_concurrent": 2}
    found = simple_evaluate(
        model="local-chat-completions", model_args=arguments, tasks=["words"], apply_chat_template=True, **asked
    )
    answers = [
        {"question": sample["doc"]["question"], "answer": sample["resps"][0][0]} for sample in found["samples"]["words"]
    ]
    same("questions", len(answers), 4)
    (folder / "generated.json").write_text(json.dumps(answers))
    return (
        "`local-completions`: a multiple-choice task of our own, log likelihoods by echo and logprobs; "
        "`local-chat-completions`: a `generate_until` task"
    )


def guidellm(url: str, folder: Path) -> str:
    """Synthetic prompts, made with the shipped tokenizer; a report is read for what became of each request."""
    report = folder / "report.json"
    profiles = {"chat/completions": f"kind=constant,rate={RATE}", "completions": "kind=concurrent,streams=4"}
    for path, profile in profiles.items():
        command = [
            str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={url.removesuffix('/v1')},model={MODEL},request_format=/v1/{path}",
            "--profile", profile, "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={TOKENS}",
            "--tokenizer", f"kind=huggingface_auto,model={SHIPPED}", "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=400)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        requests = benchmark["requests"]
        same(f"{path}: errors", [each["info"]["error"] for each in requests["errored"]], [])
        same(f"{path}: requests", len(requests["successful"]), NUM_REQUESTS)
        same(f"{path}: tokens", {each["output_tokens"] for each in requests["successful"]}, {TOKENS})
    return "chat at a constant rate and completions by concurrent streams: synthetic prompts, every token counted"


def vllm(url: str, folder: Path) -> str:
    """``vllm bench serve``, without the rest of vLLM's command, which needs its engine."""
    program = (
        "from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand as Bench\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = FlexibleArgumentParser()\nBench.add_cli_args(parser)\nBench.cmd(parser.parse_args())\n"
    )
    for backend, endpoint in (("openai", "completions"), ("openai-chat", "chat/completions")):
        command = [
            sys.executable, "-c", program, "--backend", backend, "--base-url", url.removesuffix("/v1"),
            "--endpoint", f"/v1/{endpoint}", "--model", MODEL, "--tokenizer", str(SHIPPED), "--dataset-name", "random",
            "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(TOKENS), "--ignore-eos",
            "--num-prompts", str(NUM_REQUESTS), "--request-rate", str(RATE), "--burstiness", "0.5",
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--disable-tqdm",
            "--save-result", "--save-detailed", "--result-filename", str(folder / "result.json"),
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=400, stdout=subprocess.DEVNULL)
        result = json.loads((folder / "result.json").read_text())
        same(f"{backend}: errors", {error for error in result["errors"] if error}, set())
        same(f"{backend}: completed", result["completed"], NUM_REQUESTS)
        same(f"{backend}: tokens", set(result["output_lens"]), {TOKENS})
        same(f"{backend}: percentiles", all(result[f"p99_{name}_ms"] > 0 for name in ("ttft", "tpot", "itl")), True)
    return (
        "`vllm bench serve`, backends `openai` and `openai-chat`: `--request-rate`, `--burstiness`, `--ignore-eos`, "
        "percentiles; every token counted"
    )


CHECKS: dict[str, tuple[str, Callable[[str, Path], str]]] = {
    "langchain": ("langchain-openai", langchain_openai),
    "litellm": ("litellm", litellm),
    "instructor": ("instructor", instructor),
    "llm": ("llm", llm),
    "lm_eval": ("lm-eval", lm_eval),
    "guidellm": ("guidellm", guidellm),
    "vllm": ("vllm", vllm),
}

if __name__ == "__main__":
    address, name, place = sys.argv[1:]
    package, check = CHECKS[name]
    tried = check(address, Path(place))
    print(f"{package} {version(package)} | {tried}")
