"""Unmodified clients against ``pagebus serve``, each in a process of an environment that has nothing of ours.

    python -m tests.compatibility.run ENVIRONMENT [--write] [NAME ...]

prints a row per client (of those named), and with --write puts the table into ``docs/compatibility.md``. The server
computes in float32; log likelihoods that lm-eval was told are compared with those of transformers.
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
NAMES = ("langchain", "litellm", "instructor", "llm", "lm_eval", "node")
TOLERANCE = 1e-3
TIMEOUT_S = 300
OPTIONS = ("--dtype", "float32", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def run(environment: Path, name: str, url: str, folder: Path) -> str:
    """The row of a client.

    Raises:
        subprocess.CalledProcessError: something was not as it should be.
    """
    if name == "node":
        script = shutil.copy(HERE / "client.mjs", environment / "node")
        command = ["node", script, url]
    else:
        command = [str(environment / "bin" / "python"), str(HERE / "clients.py"), url, name, str(folder)]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    alone = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, env=clean | alone, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    row = done.stdout.splitlines()[-1]
    if name == "lm_eval":
        worst = farthest(json.loads((folder / "loglikelihoods.json").read_text()))
        assert worst < TOLERANCE, f"a log likelihood is {worst} off"
        row += f", at most {worst:.0e} from transformers'"
    return row


def farthest(rows: list[dict[str, str | float]]) -> float:
    """The largest difference between a log likelihood and the one that transformers computes in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = ROOT / "actors" / "shipped_model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    differences = []
    for row in rows:
        context = tokenizer(row["context"], add_special_tokens=False)["input_ids"]
        tokens = tokenizer(f"{row['context']}{row['continuation']}", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        places = range(len(context), len(tokens))
        expected = sum(float(logprobs[place - 1, tokens[place]]) for place in places)
        differences.append(abs(expected - float(row["loglikelihood"])))
    return max(differences)


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
        before, _, rest = PAGE.read_text().partition(BEGIN)
        table = "\n".join([BEGIN, "| client | tried, and as it should be |", "| --- | --- |", *rows, END])
        PAGE.write_text(before + table + rest.partition(END)[2])
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
