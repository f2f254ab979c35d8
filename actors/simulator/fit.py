"""Fits a profile to measured steps: ``python -m pagebus.actors.simulator.fit run.jsonl --base h200-llama8b --out
mine.json``.

``run.jsonl`` is what ``pagebus record`` wrote. The law of :mod:`pagebus.actors.simulator.profile` is linear in its
parameters (the values of the table at its knots, the time per context token, the time per prefill pair), so it is
fitted by least squares of the relative errors, twice: the second time without the tenth of the steps that fit worst
(hiccups). What the steps say nothing about keeps the value of the base profile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.simulator.profile import Profile, ProfileError, load_profile, to_json
from pagebus.actors.simulator.recording.trace import open_text

Floats = NDArray[np.float64]
PRIOR_WEIGHT = 0.0005
"""Weight of the base profile, as steps in 1000."""
KEPT = 0.9
MIN_STEPS = 20


def read_steps(path: str | Path) -> list[dict[str, Any]]:
    """The step log in a recording, by replica and step; each with ``seconds``, the time the device took for it."""
    with open_text(path) as file:
        rows = [row for row in map(json.loads, file) if "step" in row and row.get("decode_context") is not None]
    rows.sort(key=lambda row: (row["replica"], row["step"]))
    steps = []
    for before, row in zip([None, *rows], rows, strict=False):
        begun_s = row["launched_s"]
        if before is not None and (before["replica"], before["step"] + 1) == (row["replica"], row["step"]):
            begun_s = max(begun_s, before["done_s"])
        row["seconds"] = row["done_s"] - begun_s
        if row["seconds"] > 0 and row["decodes"] + row["prefill_tokens"] > 0 and not row["swapped_in"]:
            steps.append(row)
    return steps


def fit(base: Profile, steps: Sequence[dict[str, Any]]) -> tuple[Profile, Floats]:
    """The fitted profile, and the relative errors [n] that it leaves.

    Raises:
        ProfileError: there are too few steps, or the base profile has windows.
    """
    if base.has_windows:
        raise ProfileError("a model with windows cannot be fitted: the log of steps does not tell what its layers read")
    if len(steps) < MIN_STEPS:
        raise ProfileError(f"{len(steps)} steps are too few to fit {MIN_STEPS}")
    knots = np.array(base.base_tokens, float)
    features = _features(knots, steps)
    seconds = np.array([step["seconds"] for step in steps])
    prior = np.array([*base.base_ms, base.kv_token_s * 1e3, base.pair_s * 1e3]) / 1e3
    kept = np.ones(len(steps), bool)
    for _ in range(2):
        weights = _solve(features[kept], seconds[kept], prior)
        errors = features @ weights / seconds - 1
        kept = np.abs(errors) <= np.quantile(np.abs(errors), KEPT)
    eager = seconds[[step["prefill_tokens"] > 0 and _tokens(step) > base.graph_tokens for step in steps]]
    bus_s = float(np.median([step["received_s"] - step["planned_s"] for step in steps]))
    profile = dataclasses.replace(
        base,
        description=f"Fitted to {len(steps)} steps. Before: {base.description}",
        base_ms=tuple(float(f"{value * 1e3:.4g}") for value in weights[:-2]),
        kv_read_bytes_per_s=float(f"{base.kv_bytes_per_token / weights[-2]:.4g}"),
        attention_flops_per_s=float(f"{base.attention_flops_per_pair / weights[-1]:.4g}"),
        eager_floor_ms=float(f"{np.quantile(eager, 0.02) * 1e3:.4g}")
        if len(eager) >= MIN_STEPS
        else base.eager_floor_ms,
        bus_s=float(f"{bus_s:.3g}") if bus_s > 0 else base.bus_s,
    )
    return profile, errors


def _tokens(step: dict[str, Any]) -> int:
    return int(step["decodes"] + step["prefill_tokens"])


def _features(knots: Floats, steps: Sequence[dict[str, Any]]) -> Floats:
    """[n, knots + 2]: share of each knot, context tokens read, prefill pairs."""
    tokens = np.array([_tokens(step) for step in steps], float)
    hats = [np.interp(tokens, knots, unit) for unit in np.eye(len(knots))]
    context = [step["decode_context"] for step in steps]
    pairs = [step["prefill_pairs"] for step in steps]
    return np.stack([*hats, np.array(context, float), np.array(pairs, float)], axis=1)


def _solve(features: Floats, seconds: Floats, prior: Floats) -> Floats:
    """Least squares of the relative errors with a slight pull to ``prior``, no parameter below a tenth of it."""
    scaled = features * prior / seconds[:, None]  # parameters as multiples of the prior
    pull = np.sqrt(PRIOR_WEIGHT * len(seconds) / 1000)
    rows = np.vstack([scaled, pull * np.eye(len(prior))])
    targets = np.concatenate([np.ones(len(seconds)), np.full(len(prior), pull)])
    multiples = np.linalg.lstsq(rows, targets, rcond=None)[0]
    return np.asarray(np.maximum(multiples, 0.1) * prior, np.float64)


def main(argv: Iterable[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m pagebus.actors.simulator.fit", description="Fit a profile to a recording."
    )
    parser.add_argument("recording", nargs="+", help="files that 'pagebus record' wrote")
    parser.add_argument("--base", required=True, help="the profile to start from")
    parser.add_argument("--out", help="where the fitted profile goes (default: standard output)")
    arguments = parser.parse_args(None if argv is None else list(argv))
    try:
        steps = [step for path in arguments.recording for step in read_steps(path)]
        profile, errors = fit(load_profile(arguments.base), steps)
    except (OSError, ValueError) as error:
        print(f"fit: {error}", file=sys.stderr)
        return 2
    shares = np.quantile(np.abs(errors), [0.5, 0.9])
    print(
        f"{len(steps)} steps; error of half of them below {shares[0]:.1%}, of 90% below {shares[1]:.1%}",
        file=sys.stderr,
    )
    if arguments.out:
        Path(arguments.out).write_text(to_json(profile))
    else:
        print(to_json(profile), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
