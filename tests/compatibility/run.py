"""Unmodified clients against ``pagebus serve``, each in a process of an environment that has nothing of ours.

    python -m tests.compatibility.run ENVIRONMENT [--write] [NAME ...]

prints a row per client (of those named), and with --write puts the rows into the table of ``docs/compatibility.md``, in
place of those of the same clients. The server computes in float32; what lm-eval was told is compared with what
transformers computes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.conftest import whole_system

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- clients -->", "<!-- end of clients -->"
NAMES = ("langchain", "litellm", "instructor", "llm", "lm_eval", "guidellm", "vllm", "node", "ai")
SCRIPTS = {"node": "client.mjs", "ai": "ai.mjs"}
TOLERANCE = 1e-3
NUM_GENERATED = 24
"""``max_gen_toks`` of lm_eval_task/words.yaml."""
TIMEOUT_S = 900
OPTIONS = ("--dtype", "float32", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def run(environment: Path, name: str, url: str, folder: Path) -> str:
    """The row of a client.

    Raises:
        subprocess.CalledProcessError: something was not as it should be.
    """
    if name in SCRIPTS:
        script = shutil.copy(HERE / SCRIPTS[name], environment / "node")
        command = ["node", script, url]
    else:
        command = [str(environment / "bin" / "python"), str(HERE / "clients.py"), url, name, str(folder)]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    alone = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, env=clean | alone, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    row = done.stdout.splitlines()[-1]
    if name == "lm_eval":
        told = Reference()
        worst = told.farthest(json.loads((folder / "loglikelihoods.json").read_text()))
        assert worst < TOLERANCE, f"a log likelihood is {worst} off"
        told.generates(json.loads((folder / "generated.json").read_text()))
        row += f"; the former at most {worst:.0e} from transformers', the latter the same text"
    return row


class Reference:
    """What transformers computes in float32 with the shipped model."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = ROOT / "actors" / "shipped_model"
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def farthest(self, rows: list[dict[str, str | float]]) -> float:
        """The largest difference between a log likelihood and the one that is right."""
        import torch

        differences = []
        for row in rows:
            context = self._tokenizer(row["context"], add_special_tokens=False)["input_ids"]
            text = f"{row['context']}{row['continuation']}"
            tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logprobs = self._model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            places = range(len(context), len(tokens))
            expected = sum(float(logprobs[place - 1, tokens[place]]) for place in places)
            differences.append(abs(expected - float(row["loglikelihood"])))
        return max(differences)

    def generates(self, rows: list[dict[str, str]]) -> None:
        """Each answer is what the model says to its question, greedily."""
        for row in rows:
            prompt = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": row["question"]}], add_generation_prompt=True, return_tensors="pt",
                return_dict=True,
            )  # fmt: skip
            output = self._model.generate(**prompt, do_sample=False, max_new_tokens=NUM_GENERATED)[0]
            expected = self._tokenizer.decode(output[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
            assert row["answer"] == expected, f"{row['answer']!r} instead of {expected!r}"


def write(rows: list[str]) -> None:
    """Put rows into the page's table, in place of those of the same clients."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    head, written = table.strip().splitlines()[:2], table.strip().splitlines()[2:]
    by_client = {row.split("|")[1].rsplit(maxsplit=1)[0]: row for row in [*written, *rows]}
    PAGE.write_text(before + "\n".join([BEGIN, *head, *by_client.values(), END]) + after)


def main() -> int:
    """Run all, print the table; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path, help="where `make compatibility` has installed the clients")
    parser.add_argument("names", nargs="*", default=NAMES, help="which clients (default: all)")
    parser.add_argument("--write", action="store_true", help="put the table into docs/compatibility.md")
    arguments = parser.parse_args()
    environment, rows, failed = arguments.environment.absolute(), [], []
    with whole_system(*OPTIONS) as target:
        for name in arguments.names:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    rows.append(f"| {run(environment, name, target.base_url, Path(folder))} |")
                    print(rows[-1], flush=True)
                except (AssertionError, subprocess.SubprocessError) as error:
                    failed.append(name)
                    print(f"{name} failed: {error}", file=sys.stderr, flush=True)
    if arguments.write and not failed:
        write(rows)
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
