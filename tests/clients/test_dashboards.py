"""What dashboards ask Prometheus for is there once a deployment has answered a request."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

import openai
import pytest

from tests.helpers.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "web" / "dashboards" / "pagebus.json").read_text())
NAME = re.compile(r"\b(?:(?:vllm|pagebus):|http_|process_)\w+")
SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? \S+$", re.M)


def documented() -> dict[str, set[str]]:
    """The labels of every metric in the table of docs/observability.md."""
    text = (ROOT / "docs" / "observability.md").read_text().split("<!-- metrics -->")[1].split("<!-- /metrics -->")[0]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): set(re.findall(r"`(\w+)`", row[2])) for row in rows}


def shown() -> set[str]:
    """Every metric that the shipped dashboard asks for."""
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return {name for target in targets for name in NAME.findall(target["expr"])}


def samples(url: str) -> dict[str, set[str]]:
    """The labels of every metric in the answer of /metrics."""
    with urllib.request.urlopen(url, timeout=LIMIT_S) as response:
        text = response.read().decode()
    return {name: set(re.findall(r'(\w+)="', labels)) for name, labels in SAMPLE.findall(text)}


def test_dashboards_find_what_they_ask_for(base_url: str, expects) -> None:
    """All metrics of the table, with their labels, and all of the shipped dashboard."""
    if not expects.is_whole:
        pytest.skip("needs a scheduler and an executor")
    with openai.OpenAI(base_url=base_url, api_key=expects.api_key, max_retries=0) as client:
        client.completions.create(model=expects.model, prompt=expects.prompt, max_tokens=4)
    wanted = documented()
    deadline_s = time.monotonic() + LIMIT_S
    while missing := (wanted.keys() | shown()) - (found := samples(base_url.removesuffix("/v1") + "/metrics")).keys():
        assert time.monotonic() < deadline_s, missing
        time.sleep(0.2)

    assert {name: labels - found[name] for name, labels in wanted.items() if not labels <= found[name]} == {}
    assert len(wanted) > 30


def test_panels_do_not_overlap() -> None:
    """Every panel has a number and a place of its own."""
    panels = DASHBOARD["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len(panels) == len({panel["id"] for panel in panels})
