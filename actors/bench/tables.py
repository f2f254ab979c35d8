"""``pagebus bench tables``: Markdown from the JSON of other benchmarks, beside vLLM's figures and our goals.

``goals.json`` holds the tables: for every row which figure of which benchmark it shows, in which direction it is
better, and for each model what vLLM reached and what is aimed at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pagebus.actors.settings import SettingsError

GOALS = Path(__file__).with_name("goals.json")
NOTHING = "-"
TELLING_SETTINGS = ("--kv-cache-dtype=", "--deterministic")
"""Settings that make another measurement of the same point: a row is about those with exactly its own."""
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
"""Lines of a document between which the tables stand."""

Json = Mapping[str, Any]


def bench_tables(paths: Iterable[str], document: str | None = None) -> int:
    """Print all tables that the files have something for, or put them into ``document`` in place of those there."""
    found = [_read(Path(path)) for path in paths]
    goals = json.loads(GOALS.read_text(encoding="utf-8"))
    text = "\n\n".join(filter(None, (table(each, found) for each in goals["tables"])))
    if document is None:
        print(text)
    else:
        _put_into(Path(document), text)
    return 0


def _put_into(document: Path, text: str) -> None:
    """Replace what stands between the two marks.

    Raises:
        SettingsError: there are none.
    """
    try:
        before, rest = document.read_text(encoding="utf-8").split(f"{BEGIN}\n")
        _, after = rest.split(f"{END}\n")
    except (OSError, ValueError) as error:
        raise SettingsError(f"{document} has no place for tables between {BEGIN} and {END}: {error}") from error
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}\n{after}", encoding="utf-8")


def _read(path: Path) -> Json:
    """The results in a file.

    Raises:
        SettingsError: it holds none, or those of a workload that was made smaller.
    """
    try:
        results: Json = json.loads(path.read_text(encoding="utf-8"))
        sizes = results.get("spec", results)
        changed = sizes.get("scale", 1.0) != 1.0 or sizes.get("requests") is not None
        points = {point["name"]: point["figures"] for point in results["points"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"{path} holds no results of a benchmark: {type(error).__name__}: {error}") from error
    if changed:
        raise SettingsError(f"{path}: the workload's own sizes were changed: it cannot stand beside published figures")
    return {**results, "points": points}


def table(goals: Json, found: Sequence[Json]) -> str:
    """One table, empty if nothing was measured for it. What reaches its goal is bold."""
    models: list[str] = goals["models"]
    cells = [[_measured(row, model, found, goals["digits"]) for model in models] for row in goals["rows"]]
    if all(cell == NOTHING for row in cells for cell in row):
        return ""
    heads = [f"{model}: {column}" for model in models for column in ("vLLM 0.26", "goal", "Pagebus, median (spread)")]
    lines = [f"**{goals['title']}**", "", _line([goals["first"], *heads]), _line(["---"] * (1 + len(heads)))]
    for row, measured in zip(goals["rows"], cells, strict=True):
        line = [row["name"]]
        for model, cell in zip(models, measured, strict=True):
            line += [*(_number(value, goals["digits"]) for value in row[model]), cell]
        lines.append(_line(line))
    return "\n".join(lines)


def _measured(row: Json, model: str, found: Sequence[Json], digits: int) -> str:
    """The cell of our own figure, from the last of the files that has it."""
    for results in reversed(found):
        figure = results["points"].get(row["point"], {}).get(row["figure"])
        if figure is not None and _is_about(results, row, model):
            break
    else:
        return NOTHING
    factor = row.get("factor", 1.0)
    median = figure["median"] * factor
    low, high = (_number(figure.get(end, figure["median"]) * factor, digits) for end in ("low", "high"))
    text = f"{_number(median, digits)} ({low} to {high})"
    goal = row[model][1]
    reached = goal is not None and (median <= goal if row["better"] == "less" else median >= goal)
    return f"**{text}**" if reached else text


def _is_about(results: Json, row: Json, model: str) -> bool:
    """Whether these are results of the row's benchmark with its settings, and of the model."""
    if results["benchmark"] != row["benchmark"]:
        return False
    measured = str(results.get("model") or results.get("spec", {}).get("model"))
    telling = [each for each in results.get("settings", []) if each.startswith(TELLING_SETTINGS)]
    return Path(measured).name == model and telling == row.get("settings", [])


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}".replace(",", " ")


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
