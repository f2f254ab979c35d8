"""How fast texts become vectors, over HTTP: shapes of models that embed, with dummy weights.

    python -m tests.gpu.pooling.bench_embeddings bge-m3 qwen3-embedding [--tokens 128 512] [options of serve...]
        [--inputs 32] [--clients 16] [--requests 256] [--alone 100] [--phases FOLDER] [--base-url URL]

Starts ``pagebus serve`` for each shape, and sends token ids to ``/v1/embeddings``. First one input after another
(``alone``: milliseconds of a request with one), then ``--requests`` requests of ``--inputs`` inputs each, ``--clients``
of them at a time. Prints tokens and inputs a second, the milliseconds of a request, and the share of the time in which
the GPU worked on steps. With ``--phases`` it also says where the time went of one input alone, and what the GPU waited
for under many, by what scheduler and executor note of their steps (:mod:`pagebus.actors.telemetry.spans`). With
``--base-url`` any server that speaks OpenAI's protocol is measured, in place of ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from pagebus.actors.bench.driver.deployment import as_served, deployed
from pagebus.actors.bench.driver.graphs import told_by_lease, until_captured
from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder
from pagebus.actors.settings import Settings
from pagebus.actors.settings.sources import add_arguments, load_settings
from pagebus.actors.telemetry.progress import Progress
from tests.gpu.pooling.phases import Crowd, Sent, alone_phases, crowd_phases

XLM_R_LARGE = {
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 250002,
    "max_position_embeddings": 8194,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
EMBEDDERS: dict[str, tuple[dict[str, Any], str]] = {
    "bge-m3": (XLM_R_LARGE, "pooling_mode_cls_token"),
    "qwen3-embedding": (SHAPES["qwen06b"], "pooling_mode_lasttoken"),
}
"""Configuration, and which token's state the vector is."""
MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
ROUTE = "/v1/embeddings"
COUNTERS = {each: f"pagebus:executor_{each}_seconds_total" for each in ("busy", "wall")} | {
    "blocks to the host": "pagebus:swapped_out_blocks_total"
}
POLL_S = 0.02
RATES = ("prefill_tokens_per_s", "copy_bytes_per_s", "block_bytes", "num_host_blocks")
"""What decides whether blocks that make room are copied to the host."""
CPU = re.compile(r'^\S*process_cpu_seconds_total\{.*\bactor="([^"]+)".*\} (\S+)$', re.MULTILINE)


def write_embedder(name: str, parent: Path) -> Path:
    """A folder with the configuration, a tokenizer, and what sentence-transformers writes."""
    config, mode = EMBEDDERS[name]
    folder = write_model_folder("qwen06b", parent / name)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 1024, mode: True}))
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(MODULES)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


class Load:
    """Sends requests to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, vocab: int) -> None:
        self._session, self._url, self._model, self._vocab = session, url, model, vocab
        self._draws = np.random.default_rng(0)

    def body(self, inputs: int, tokens: int) -> bytes:
        ids = self._draws.integers(10, self._vocab, (inputs, tokens)).tolist()
        return orjson.dumps({"model": self._model, "input": ids, "encoding_format": "base64"})

    async def send(self, body: bytes) -> float:
        """Milliseconds of one request."""
        began_s = time.perf_counter()
        async with self._session.post(f"{self._url}{ROUTE}", data=body) as response:
            answer = await response.read()
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {answer[:300]!r}")
        return (time.perf_counter() - began_s) * 1e3

    async def send_alone(self, count: int, tokens: int) -> list[Sent]:
        """One input after another."""
        sent = []
        for body in [self.body(1, tokens) for _ in range(count)]:
            began_s = time.time()
            await self.send(body)
            sent.append((tokens, began_s, time.time()))
        return sent

    async def send_all(self, bodies: Sequence[bytes], clients: int) -> tuple[float, list[float]]:
        """Seconds of all requests, and milliseconds of each."""
        left, took = list(reversed(bodies)), []

        async def client() -> None:
            while left:
                took.append(await self.send(left.pop()))

        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        return time.perf_counter() - began_s, took

    async def counters(self) -> dict[str, float]:
        """How long the executor has worked, and lived, and the CPU seconds of each actor, and ours; of other servers
        only ours."""
        async with self._session.get(f"{self._url}/metrics") as response:
            text = await response.text()
        found = {each: re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE) for each, name in COUNTERS.items()}
        cpu = {f"CPU s of {actor}": float(seconds) for actor, seconds in CPU.findall(text)}
        told = {each: sum(map(float, values)) for each, values in found.items()}
        return told | cpu | {"CPU s of the clients": time.process_time()}

    async def fresh_counters(self) -> dict[str, float]:
        """As soon as the executor has told them anew, which it does once in a while."""
        old = now = await self.counters()
        while now["wall"] and now["wall"] == old["wall"]:
            await asyncio.sleep(POLL_S)
            now = await self.counters()
        return now


@asynccontextmanager
async def server(name: str, arguments: argparse.Namespace, settings: Settings) -> AsyncIterator[str]:
    """The URL of the server to be measured."""
    if arguments.base_url:
        yield arguments.base_url.rstrip("/")
        return
    with tempfile.TemporaryDirectory(prefix="pagebus-bench-") as parent:
        folder = write_embedder(name, Path(parent))
        told = settings.replace(model=str(folder), load_format="dummy", served_model_name=(name,))
        served = as_served(told, folder, span_dir=arguments.phases and f"{arguments.phases}/{name}")
        async with deployed(served, Path(parent, "serve.log")) as deployment:
            await until_captured(told_by_lease(deployment), Progress(sys.stderr, terminal=False))
            for lease in await deployment.bus.leases("executor"):
                rates = {each: float(lease.info.get(each, 0)) for each in RATES}
                print(f"{name}, measured at start: {rates}", flush=True)
            yield deployment.base_url


async def measure(name: str, arguments: argparse.Namespace, settings: Settings) -> None:
    vocab, sent, crowds = int(EMBEDDERS[name][0]["vocab_size"]), list[Sent](), list[Crowd]()
    timeout = aiohttp.ClientTimeout(total=600)
    async with server(name, arguments, settings) as url, aiohttp.ClientSession(
        timeout=timeout, headers={"Content-Type": "application/json"}, connector=aiohttp.TCPConnector(limit=0)
    ) as session:  # fmt: skip
        load = Load(session, url, name, vocab)
        for tokens in arguments.tokens:
            warm = [load.body(arguments.inputs, tokens) for _ in range(2 * arguments.clients)]
            await load.send_all([load.body(1, tokens) for _ in range(10)], 1)
            await load.send_all(warm, arguments.clients)
            sent += (single := await load.send_alone(arguments.alone, tokens))
            alone = [(ended_s - began_s) * 1e3 for _, began_s, ended_s in single]
            bodies = [load.body(arguments.inputs, tokens) for _ in range(arguments.requests)]
            before, began_s = await load.fresh_counters(), time.time()
            took_s, each = await load.send_all(bodies, arguments.clients)
            after = await load.fresh_counters()
            grown = {what: value - before.get(what, 0.0) for what, value in after.items()}
            crowds.append(Crowd(tokens, began_s, began_s + took_s, grown))
            inputs = arguments.inputs * arguments.requests
            busy = f", GPU busy {grown['busy'] / took_s:.0%}" if grown["busy"] else ""
            print(
                f"{name}, inputs of {tokens}: alone {milliseconds(alone)}; {arguments.clients} requests of "
                f"{arguments.inputs} at a time: {inputs * tokens / took_s:.0f} tokens/s, "
                f"{inputs / took_s:.0f} inputs/s, a request {milliseconds(each)}{busy}",
                flush=True,
            )
    if arguments.phases:
        folder = Path(arguments.phases, name)
        for line in (*alone_phases(sent, folder), *crowd_phases(crowds, folder)):
            print(f"{name}, {line}", flush=True)


def milliseconds(took: Sequence[float]) -> str:
    return f"{np.median(took):.2f} ms (p99 {np.quantile(took, 0.99):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=sorted(EMBEDDERS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--inputs", type=int, default=32, help="of a request")
    parser.add_argument("--clients", type=int, default=16, help="requests at a time")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--alone", type=int, default=100, help="requests of one input")
    parser.add_argument("--base-url", help="measure this server")
    parser.add_argument("--phases", metavar="FOLDER", help="also say where the time went; spans are written there")
    add_arguments(parser, model=False)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in arguments.shapes:
        asyncio.run(measure(name, arguments, load_settings(arguments)))


if __name__ == "__main__":
    main()
