"""Judges the rates of the library's tiles by what ``tests.gpu.cublas.bench_proposals`` timed, and prints others.

    python -m tests.kernels.cublas.fit_rates times.jsonl

Of the products whose rounds decide, for each number of tokens: the share of the library's own time that they take by
our choice, in the mean, for the worst and by the fastest proposal. The choice is made twice, by the rates that are
written down and, for each model, by those that all other models give. Then the rates of all.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

from pagebus.kernels.cublas import tiles
from pagebus.kernels.cublas.tiles import MEMORY_TB_PER_S, TILES, Tile, fastest, rounds, rounds_decide

MULTIPROCESSORS = 132
"""Of an H200."""
COMPUTES = 1.2
"""Times as long as memory needs takes a product whose rate counts."""
Line = dict[str, Any]


def proposals_of(line: Line) -> dict[int, float]:
    """Microseconds by the numbers of tiles, in the order of the proposals."""
    named = ([*name.split(":"), us] for name, us in line["us"].items() if name != "own")
    return {int(number): us for _, number, us in reversed(list(named))}


def rates_of(lines: list[Line]) -> dict[int, Tile]:
    """Tiles with the median rates of these products."""
    found = defaultdict(list)
    for line in lines:
        for number, us in proposals_of(line).items():
            read_us = 2e-6 * line["rows"] * line["inputs"] / MEMORY_TB_PER_S
            if number in TILES and us > COMPUTES * read_us:
                tile = TILES[number]
                count = rounds(tile, line["rows"], line["tokens"], 1, MULTIPROCESSORS) * MULTIPROCESSORS
                found[number].append(count * tile.rows * tile.tokens * line["inputs"] * 2 / us / 1e6)
    return {number: TILES[number]._replace(rate=round(statistics.median(each))) for number, each in found.items()}


def share_of(line: Line) -> float:
    """Of the library's own time, by our choice."""
    proposed = [int(name.split(":")[1]) for name in line["us"] if name != "own"]
    index = fastest(proposed, line["rows"], line["tokens"], 1, MULTIPROCESSORS)
    return 1.0 if index is None else float(line["us"][f"{index}:{proposed[index]}"] / line["us"]["own"])


def told(lines: list[Line], shares: list[float]) -> None:
    for tokens in sorted({line["tokens"] for line in lines}):
        mine = [share for line, share in zip(lines, shares, strict=True) if line["tokens"] == tokens]
        least = [min(proposals_of(line).values()) / line["us"]["own"] for line in lines if line["tokens"] == tokens]
        print(
            f"{tokens:>5} tokens, {len(mine)} products: {statistics.mean(mine):.3f}, worst {max(mine):.3f}, "
            f"by the fastest {statistics.mean(least):.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=Path)
    timed = map(json.loads, parser.parse_args().times.read_text().splitlines())
    lines = [line for line in timed if rounds_decide(line["rows"], line["tokens"], 1, MULTIPROCESSORS)]
    print("by the rates that are written down:")
    told(lines, [share_of(line) for line in lines])
    print("by those of all other models:")
    shares = []
    for line in lines:
        with mock.patch.dict(tiles.TILES, rates_of([each for each in lines if each["model"] != line["model"]])):
            shares.append(share_of(line))
    told(lines, shares)
    for number, tile in sorted(rates_of(lines).items()):
        print(f"{number}: {tile}")


if __name__ == "__main__":
    main()
