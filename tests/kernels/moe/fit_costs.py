"""Fits the constants of experts' estimates to times on an H200, and says how far estimates and picks are off.

    python -m tests.kernels.moe.fit_costs --hold-out deepseek-v2-lite gpt-oss-20b --write

Models that are held out do not take part in the fit. Without ``--write`` nothing changes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from statistics import mean

from pagebus.kernels.common.machines import machine_of
from pagebus.kernels.common.target import Target
from pagebus.kernels.moe.launch.costs import DATA, ExpertConstants, ExpertCosts, constants
from tests.kernels.linear.fit_costs import descend
from tests.kernels.moe.measured import MODELS, Measured, measured

FILES = ("experts-first.txt", "experts-tune.txt", "experts.txt", "experts-hopper.txt", "experts-prompts.txt")
H200 = Target(90, 132)
LEAST, MOST = 0.8, 1.25
"""Bounds of ratios: the constants of dense products hold, by and large."""
LEAST_LAUNCH = 1.5
"""Of a few tokens, sorting and adding up took 2 to 3.5 microseconds each, alone."""


def errors(times: Sequence[Measured], fitted: ExpertConstants) -> list[float]:
    """Of the logarithms of all times that the model knows."""
    model = ExpertCosts(machine_of(H200), fitted=fitted)
    known = ((model.own(each.tokens, each.shape, each.config), each.us) for each in times)
    return [abs(math.log(guess / us)) for guess, us in known if guess is not None]


def losses(times: Sequence[Measured], fitted: ExpertConstants) -> list[float]:
    """What the estimates' favourite takes beyond the fastest, where several were timed."""
    model, found = ExpertCosts(machine_of(H200), fitted=fitted), []
    for key in {(each.shape, each.tokens) for each in times}:
        timed = {each.config: each.us for each in times if (each.shape, each.tokens) == key}
        guessed = {config: us for config in timed if (us := model.own(key[1], key[0], config)) is not None}
        if len(guessed) > 1:
            found.append(timed[min(guessed, key=guessed.__getitem__)] / min(timed[config] for config in guessed) - 1)
    return found


def summary(name: str, times: Sequence[Measured], fitted: ExpertConstants) -> str:
    """Mean and worst error of times, and losses of picks."""
    off, lost = errors(times, fitted), losses(times, fitted)
    text = f"{name}: {len(off)} times, error {mean(off):.1%} in the mean, at most {max(off):.0%}"
    return f"{text}; {len(lost)} picks lose {mean(lost):.1%} in the mean, at most {max(lost):.0%}"


def _is_within(tried: ExpertConstants) -> bool:
    ratios = tried.tiles, tried.specialized, tried.vectors, tried.copies
    return tried.launch >= LEAST_LAUNCH and all(LEAST <= value <= MOST for value in ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hold-out", nargs="*", default=[], choices=MODELS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="write the constants that are used from now on")
    arguments = parser.parse_args()
    times = list(measured(*FILES))
    fit = [each for each in times if each.model not in arguments.hold_out]
    rest = [each for each in times if each.model in arguments.hold_out]
    best = descend(
        lambda tried: mean(errors(fit, tried)) if _is_within(tried) else math.inf, constants(), arguments.rounds
    )
    print(json.dumps(best._asdict()))
    print(summary("fitted", fit, best))
    if rest:
        print(summary("held out", rest, best))
    if arguments.write:
        about = f"{len(errors(fit, best))} times of {', '.join(sorted({each.model for each in fit}))} on an H200"
        DATA.write_text(json.dumps({"fitted_to": about, "constants": best._asdict()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
