"""Traces: which requests arrive when, and how long they are.

A trace file is JSON Lines, one request per line, in any order::

    {"arrival_s": 0.25, "prompt_tokens": 150, "output_tokens": 80}

``arrival_s`` (seconds from the start), ``prompt_tokens`` and ``output_tokens`` (what the model generates) are required.
Optional: ``max_tokens`` (what the client asked for; without it the output is known to end at ``output_tokens``),
``priority`` (0), ``n`` (1), ``job`` (false), and what the prompt shares with others, as one of

* ``prefix``: ``[group, tokens]``: the first tokens of all prompts of a group are the same;
* ``blocks``: one number per full block of the prompt; an equal number means an equal block after equal blocks.

Lines that have a ``step`` or a ``pull`` are the log of ``pagebus record`` and no requests; its head line names the
``block_size``. They say what a scheduler decided once: a simulation of the requests decides anew.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_FIRST_NAMED_GROUP = 2**20
"""Groups may be numbers below this, or texts."""


class TraceError(ValueError):
    """A line that is no request."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """n requests as columns [n], sorted by arrival. ``prefix_groups`` -1: shares nothing. ``clients`` above 0 ignores
    the arrivals: that many clients each send their next request when the one before has ended."""

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    max_tokens: Ints
    prefix_groups: Ints
    prefix_tokens: Ints
    priorities: Ints
    choices: Ints
    jobs: Ints
    clients: int = 0
    block_size: int = 0
    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By request, where they are known; made for ``block_size``."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def shorten(self, most_prompt: int, most_output: int) -> None:
        """Cut prompts and outputs that have more tokens."""
        self.prompt_tokens = self.prompt_tokens.clip(max=most_prompt)
        self.output_tokens = self.output_tokens.clip(max=most_output)


def make_trace(prompt_tokens: Any, output_tokens: Any, arrival_s: Any = 0.0, **columns: Any) -> Trace:
    """A trace from lengths; other columns may be single values, and have their defaults. Requests keep their order."""
    prompts = np.atleast_1d(np.asarray(prompt_tokens, np.int64))
    clients, block_size = columns.pop("clients", 0), columns.pop("block_size", 0)
    blocks = columns.pop("blocks", {})
    columns = {"prefix_groups": -1, "prefix_tokens": 0, "priorities": 0, "choices": 1, "jobs": 0, **columns}
    columns = {"max_tokens": output_tokens, **columns, "output_tokens": output_tokens}
    full = {name: np.broadcast_to(np.asarray(each, np.int64), prompts.shape) for name, each in columns.items()}
    arrivals = np.broadcast_to(np.asarray(arrival_s, np.float64), prompts.shape)
    if len(prompts) and (prompts.min() < 1 or full["output_tokens"].min() < 1 or full["choices"].min() < 1):
        raise TraceError("prompt_tokens, output_tokens and n must be at least 1")
    return Trace(
        arrival_s=arrivals, prompt_tokens=prompts, **full, clients=clients, block_size=block_size, blocks=blocks
    )


def read_trace(path: str | Path) -> Trace:
    """The requests of a file, sorted by arrival.

    Raises:
        TraceError: a line is no request; the text names it.
        OSError: the file cannot be read.
    """
    block_size = 16
    rows: list[dict[str, Any]] = []
    for number, line in _lines(path):
        try:
            row = json.loads(line)
            if "step" in row or "pull" in row:
                continue
            if "pagebus_trace" in row:
                block_size = int(row.get("block_size", 16))
                continue
            rows.append(_checked(row))
        except KeyError as error:
            raise TraceError(f"{path}, line {number}: a request must have {error}") from error
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
    if not rows:
        raise TraceError(f"{path} holds no requests")
    rows.sort(key=lambda row: float(row["arrival_s"]))
    blocks = {index: row["blocks"] for index, row in enumerate(rows) if row["blocks"]}
    prefixes = [row["prefix"] for row in rows]
    named = dict.fromkeys(name for name, _ in prefixes if not isinstance(name, int))
    groups = {name: _FIRST_NAMED_GROUP + number for number, name in enumerate(named)}
    return make_trace(
        [row["prompt_tokens"] for row in rows],
        [row["output_tokens"] for row in rows],
        [row["arrival_s"] for row in rows],
        max_tokens=[row["max_tokens"] for row in rows],
        prefix_groups=[groups.get(name, name) for name, _ in prefixes],
        prefix_tokens=[tokens for _, tokens in prefixes],
        priorities=[row["priority"] for row in rows],
        choices=[row["n"] for row in rows],
        jobs=[row["job"] for row in rows],
        block_size=block_size,
        blocks=blocks,
    )


def write_trace(path: str | Path, trace: Trace) -> None:
    """Store a trace; :func:`read_trace` gives it back (but for ``clients``)."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps({"pagebus_trace": 1, "block_size": trace.block_size or 16}) + "\n")
        for row in _rows(trace):
            file.write(json.dumps(row) + "\n")


def _rows(trace: Trace) -> Iterable[dict[str, Any]]:
    for i in range(len(trace)):
        row: dict[str, Any] = {
            "arrival_s": round(float(trace.arrival_s[i]), 6),
            "prompt_tokens": int(trace.prompt_tokens[i]),
            "output_tokens": int(trace.output_tokens[i]),
        }
        if trace.max_tokens[i] != trace.output_tokens[i]:
            row["max_tokens"] = int(trace.max_tokens[i])
        if trace.prefix_groups[i] >= 0:
            row["prefix"] = [int(trace.prefix_groups[i]), int(trace.prefix_tokens[i])]
        if i in trace.blocks:
            row["blocks"] = list(trace.blocks[i])
        for name, column, default in (
            ("priority", trace.priorities, 0),
            ("n", trace.choices, 1),
            ("job", trace.jobs, 0),
        ):
            if column[i] != default:
                row[name] = int(column[i])
        yield row


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    """The row with all fields."""
    defaults = {"max_tokens": row["output_tokens"], "priority": 0, "n": 1, "job": False}
    given = {name: value for name, value in row.items() if value is not None}
    row = {"prefix": (-1, 0), "blocks": (), **defaults, **given}
    counts = {name: int(row[name]) for name in ("prompt_tokens", "output_tokens", "max_tokens", "n")}
    if not 0 <= float(row["arrival_s"]) < math.inf:
        raise ValueError("arrival_s must be at least 0")
    if min(counts.values()) < 1:
        raise ValueError("prompt_tokens, output_tokens, max_tokens and n must be at least 1")
    group, tokens = row["prefix"]
    if not (isinstance(group, str) or -1 <= int(group) < _FIRST_NAMED_GROUP):
        raise ValueError(f"the group of a prefix must be a text or a number below {_FIRST_NAMED_GROUP}")
    shares = {"prefix": (group, int(tokens)), "blocks": tuple(map(int, row["blocks"]))}
    return row | counts | shares | {"priority": int(row["priority"]), "job": bool(row["job"])}


def open_text(path: str | Path, mode: Literal["r", "w"] = "r") -> IO[str]:
    """A file to read or write, perhaps compressed (``.gz``). A byte order mark is not read."""
    encoding = "utf-8-sig" if mode == "r" else "utf-8"
    if Path(path).suffix == ".gz":
        return cast("IO[str]", gzip.open(path, f"{mode}t", encoding=encoding))
    return open(path, mode, encoding=encoding)


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line
