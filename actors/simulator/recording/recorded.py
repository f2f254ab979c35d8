"""Draws what ``pagebus record`` wrote: ``python -m pagebus.actors.simulator.recording.recorded run.jsonl.gz --plot
FOLDER``.

The step log holds every change of the block tables, so who owned which block at the end of each step is known exactly.
That a free block can still be found by the prefix cache is inferred: it was held before, or pulled.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagebus.actors.simulator.drawing.plots import CACHED, MAX_MAP_BLOCKS, MAX_SAMPLES, Run, draw
from pagebus.actors.simulator.recording.trace import open_text


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a recording."""
    with open_text(path) as file:
        yield from map(json.loads, file)


class Tables:
    """The block tables of one replica, as plans change them. Counts ``entered``, ``returned`` (of these, sequences that
    had been preempted) and ``hits`` (of the others, those that found tokens in the cache)."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int, list[int]]] = {}
        self.used: set[int] = set()
        self.entered = self.returned = self.hits = 0
        self._seen: set[int] = set()

    def apply(self, row: dict[str, Any]) -> None:
        """One step's changes."""
        for slot in row.get("freed", ()):
            self.slots.pop(slot, None)
        for slot, sequence_id, num_computed, blocks in row.get("entered", ()):
            self.slots[slot] = sequence_id, list(blocks)
            self.used.update(blocks)
            self.entered += 1
            self.returned += sequence_id in self._seen
            self.hits += num_computed > 0 and sequence_id not in self._seen
            self._seen.add(sequence_id)
        for slot, block in row.get("appended", ()):
            if slot in self.slots:
                self.slots[slot][1].append(block)
                self.used.add(block)

    def held(self) -> set[int]:
        """Blocks that have an owner."""
        return {block for _, blocks in self.slots.values() for block in blocks}


def read_run(path: Path, replica: str = "") -> tuple[Run, Tables]:
    """The run of one replica (the first one if it is not named), and its tables at the end.

    Raises:
        ValueError: there is no step of it.
    """
    num_blocks, steps, pulls = 0, [], []
    for row in read_rows(path):
        num_blocks = max(num_blocks, row.get("num_blocks", 0))
        if row.get("there"):
            pulls.append(row)
        if "step" in row and row["replica"] == (replica := replica or row["replica"]):
            steps.append(row)
    if not steps:
        raise ValueError(f"{path} holds no steps")
    steps.sort(key=lambda row: int(row["step"]))
    tables = Tables()
    for row in [] if num_blocks else steps:  # recorded before the executor had said how many it has
        tables.apply(row)
    run, tables = Run(replica, num_blocks or max(tables.used, default=-1) + 1), Tables()
    landed = deque(sorted((each for each in pulls if each["replica"] == replica), key=lambda each: each["ended_s"]))
    every = -(-len(steps) // MAX_SAMPLES)
    for number, row in enumerate(steps):
        while landed and landed[0]["ended_s"] <= row["done_s"]:
            tables.used.update(landed.popleft()["blocks"])
        tables.apply(row)
        if row["decodes"] + row["prefill_tokens"]:
            run.steps.append((row["decodes"], row["prefill_tokens"]))
        if number % every == 0:
            _sample(run, tables, row["done_s"] - steps[0]["planned_s"])
    return run, tables


def _sample(run: Run, tables: Tables, at_s: float) -> None:
    run.times.append(at_s)
    run.held.append(len(tables.held()))
    run.listed.append(len(tables.used))
    run.running.append(len(tables.slots))
    if 0 < run.num_blocks <= MAX_MAP_BLOCKS:
        owners = np.zeros(run.num_blocks, np.int32)
        owners[list(tables.used)] = CACHED
        for sequence_id, blocks in reversed(tables.slots.values()):
            owners[blocks] = sequence_id
        run.maps.append(owners)


def main(argv: Iterable[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m pagebus.actors.simulator.recording.recorded", description="Draw a recorded run."
    )
    parser.add_argument("recording", type=Path, help="what 'pagebus record' wrote, or that with gzip")
    parser.add_argument(
        "--plot", type=Path, required=True, metavar="FOLDER", help="draw pictures (SVG) into this folder"
    )
    parser.add_argument("--replica", default="", metavar="NAME", help="replica to draw (default: the first)")
    arguments = parser.parse_args(None if argv is None else list(argv))
    try:
        run, tables = read_run(arguments.recording, arguments.replica)
    except (OSError, ValueError) as error:
        print(f"recorded: {error}", file=sys.stderr)
        return 2
    draw(run, arguments.plot)
    chunked = sum(1 for decodes, prefill in run.steps if decodes and prefill)
    print(
        f"{run.name}: {len(run.steps)} steps ({chunked} with decodes and prefill), {tables.entered - tables.returned} "
        f"sequences, {tables.hits} of them with prefix hits; {tables.returned} returns after a preemption"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
