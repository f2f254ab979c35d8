"""Fits the constants of the cost model to times of launch shapes, and says how far its picks are from the fastest.

    python -m pagebus.kernels.linear.tuning.tune --no-table --record times.jsonl PRODUCT...        # on the GPU
    python -m tests.kernels.linear.fit_costs times.jsonl --write --hold-out gated:37888x3584     # anywhere

A pick's loss is what it takes over the fastest of all that were timed for its product and bucket, the library included;
products that are held out do not take part in the fit. Without ``--write`` nothing changes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from pagebus.kernels.common.machines import Machine, machine_of
from pagebus.kernels.common.target import Target
from pagebus.kernels.linear.costs import CostModel
from pagebus.kernels.linear.dispatch import MARGIN
from pagebus.kernels.linear.library_parts import LibraryConfig
from pagebus.kernels.linear.shapes import Config, DenseConfig, Product, parse
from pagebus.kernels.linear.waves import DATA, Constants, constants
from pagebus.kernels.moe.launch.costs import ExpertConstants

H200 = Target(90, 132)
STEPS = (1.3, 1 / 1.3, 1.1, 1 / 1.1, 1.03, 1 / 1.03)
BOUNDS = {
    "reach": (0.9, 1.12), "surplus": (1.0, 3.0), "tiles": (0.3, 1.2), "specialized": (0.3, 1.2), "overlap": (1.0, 8.0),
    "latency": (0.5, 2.5), "l2": (0.8, 6.0), "start": (0.1, 3.0), "library_reach": (0.7, 1.12),
}  # fmt: skip
LOSS_WEIGHT = 3.0
"""Of a loss, beside the error of a time."""

Fitted = TypeVar("Fitted", Constants, ExpertConstants)
Times = dict[tuple[Product, int], dict[Config | None, float]]


class Loss(NamedTuple):
    """``share``: of time lost by the pick; ``own``: by the pick among our own launch shapes."""

    product: Product
    bucket: int
    share: float
    own: float
    picked: Config | None
    fastest: Config | None


def read(paths: Iterable[Path]) -> Times:
    """Microseconds by product and bucket, and launch shape; of several times the last."""
    found: Times = {}
    for path in paths:
        for line in path.read_text().splitlines():
            stored = json.loads(line)
            key = Product(stored["form"], stored["rows"], stored["inputs"]), stored["bucket"]
            found.setdefault(key, {})[parse(stored["config"])] = stored["us"]
    return found


def losses(times: Times, model: CostModel, least: int) -> list[Loss]:
    """Of all products and buckets of which at least so many launch shapes were timed."""
    found = []
    for (product, bucket), timed in times.items():
        own = {config: us for config, us in timed.items() if isinstance(config, DenseConfig)}
        guessed = {config: us for config in own if (us := model.own(config, *product[:3], bucket)) is not None}
        if len(guessed) < least:
            continue
        best = min(guessed, key=guessed.__getitem__)
        takes_library = None in timed and guessed[best] >= MARGIN * model.library(*product[:3], bucket)
        picked = None if takes_library else best
        fastest = min(timed, key=timed.__getitem__)
        fastest_own = min(own.values())
        found.append(
            Loss(product, bucket, timed[picked] / timed[fastest] - 1, own[best] / fastest_own - 1, picked, fastest)
        )
    return found


def objective(times: Times, machine: Machine, fitted: Constants) -> float:
    """Mean error of the times' logarithms, and mean loss."""
    model, total, count = CostModel(machine, fitted), 0.0, 0
    for (product, bucket), timed in times.items():
        for config, us in timed.items():
            if isinstance(config, LibraryConfig):
                continue
            guess = model.library(*product[:3], bucket) if config is None else model.own(config, *product[:3], bucket)
            if guess is not None:
                total, count = total + min(1.0, abs(math.log(max(guess, 0.1) / us))), count + 1
    lost = [min(each.share, 0.5) + min(each.own, 0.5) for each in losses(times, model, 3)]
    return total / max(count, 1) + LOSS_WEIGHT * sum(lost) / max(len(lost), 1)


def descend(score: Callable[[Fitted], float], start: Fitted, rounds: int) -> Fitted:
    """Change one constant at a time, as long as that helps."""
    best, lowest = start, score(start)
    for _ in range(rounds):
        before = lowest
        for name in start._fields:
            for step in STEPS:
                value = getattr(best, name) * step
                low, high = BOUNDS.get(name, (0.0, 1e3))
                tried = best._replace(**{name: float(f"{min(high, max(low, value)):.4g}")})
                found = score(tried)
                if found < lowest:
                    best, lowest = tried, found
        if before - lowest < 1e-5:
            break
    return best


def summary(name: str, found: list[Loss]) -> str:
    """Shares of picks within 5 and 10% of the fastest."""
    if not found:
        return f"{name}: no picks among several launch shapes"
    words = []
    for what, shares in (("picks", [each.share for each in found]), ("own kernels", [each.own for each in found])):
        near = [sum(share <= limit for share in shares) / len(shares) for limit in (0.05, 0.10)]
        words.append(f"{what}: {near[0]:.0%} within 5%, {near[1]:.0%} within 10%, worst {max(shares):.0%}")
    return f"{name}: {len(found)} entries; " + "; ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", nargs="+", type=Path)
    parser.add_argument("--hold-out", nargs="*", type=Product.parse, default=[], metavar="FORM:ROWSxINPUTS")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="write the constants that are used from now on")
    parser.add_argument("--worst", type=int, default=12, help="print so many of the largest losses")
    arguments = parser.parse_args()
    times, machine = read(arguments.times), machine_of(H200)
    fit = {key: timed for key, timed in times.items() if key[0] not in arguments.hold_out}
    rest = {key: timed for key, timed in times.items() if key[0] in arguments.hold_out}
    best = descend(lambda tried: objective(fit, machine, tried), constants(), arguments.rounds)
    model = CostModel(machine, best)
    print(json.dumps(best._asdict()))
    print(f"error of times: {objective({k: v for k, v in fit.items()}, machine, best):.3f} with losses")
    print(summary("fitted", losses(fit, model, 3)))
    print(summary("held out", losses(rest, model, 3)))
    for each in sorted(losses(times, model, 3), key=lambda loss: -loss.share)[: arguments.worst]:
        print(f"{each.share:6.1%} {each.product.name} {each.bucket}: {each.picked} instead of {each.fastest}")
    if arguments.write:
        about = f"{len(fit)} products and buckets of {', '.join(path.name for path in arguments.times)}"
        DATA.write_text(json.dumps({"fitted_to": about, "constants": best._asdict()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
