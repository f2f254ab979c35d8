"""A file of results in the order of the lines that they answer, and what has become of bad lines.

Jobs are pushed in the order of their lines, so the ids of their entries tell it, and every result names its entry.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

ID = re.compile(rb'"id":"batch_req_([0-9]+)-([0-9]+)"')


def put_in_order(path: Path) -> None:
    """Sort the results in a file by the entries that they answer. In memory are only where they lie (24 bytes each)."""
    places = _places(path)
    order = np.lexsort((places[:, 1], places[:, 0]))
    if (order == np.arange(len(order))).all():
        return
    sorted_path = path.with_name(path.name + ".sorted")
    with path.open("rb") as old, sorted_path.open("wb") as new:
        for offset in places[order, 2].tolist():
            old.seek(offset)
            new.write(old.readline())
    sorted_path.replace(path)


def _places(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[n, 3]: of each result the entry's id, in its two parts, and where its line begins."""
    rows, offset = [], 0
    with path.open("rb") as file:
        for line in file:
            found = ID.search(line)
            rows.append((int(found[1]), int(found[2]), offset) if found else (0, 0, offset))
            offset += len(line)
    return np.array(rows, np.int64).reshape(-1, 3)


def bad_lines(requests: Path, results: Path) -> Iterator[tuple[int, str]]:
    """Number (from 1) and fate of each line of the file of requests that was not computed; the results are in order."""
    with requests.open("rb") as lines, results.open("rb") as answers:
        for number, line in enumerate(lines, 1):
            if not line.removeprefix(BOM_UTF8).strip():
                continue
            answer = answers.readline()
            if not answer:
                return
            if problem := _problem(orjson.loads(answer)):
                yield number, problem


def _problem(result: dict[str, Any]) -> str:
    """Why a line was not computed; empty if it was."""
    response, error = result.get("response"), result.get("error")
    if response is not None and response.get("status_code") != 200:
        error = (response.get("body") or {}).get("error") or {}
    if error is None:
        return ""
    who = "" if result.get("custom_id") is None else f" (custom_id {str(result['custom_id'])[:60]!r})"
    return f"{error.get('message', 'it failed')}{who}"
