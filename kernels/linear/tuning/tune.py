"""Finds launch shapes by timing: for a user's model the cost model's best few, for the shipped tables all there are.

    python -m pagebus.kernels.linear.tuning.tune plain:6144x4096 partial:4096x4096 residual:4096x4096 gated:28672x4096
    python -m pagebus.kernels.linear.tuning.tune --record times.jsonl --no-table gated:37888x3584

``pagebus tune`` does the former. A product is named by its form and the shape of its weights, rows x inputs; time
``partial`` before the ``residual`` that takes its place. Run as a program, this module times every candidate and writes
the shipped table; ``--record`` also writes all times, for `tests.kernels.linear.fit_costs`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from pagebus.kernels.common.target import Target, target_of
from pagebus.kernels.common.user_tables import read_user_tables, user_path
from pagebus.kernels.linear.candidates import parts_tried
from pagebus.kernels.linear.dispatch import choose_product, model_of
from pagebus.kernels.linear.shapes import BUCKETS, Config, Product, pack
from pagebus.kernels.linear.tables import merge_table, table_path
from pagebus.kernels.linear.tuning.timing import Bench, Compiled, Compilers, Job

GAIN = 0.98
"""A choice is replaced by one that takes at most this share of its time."""
BEST = 6
"""Launch shapes that are timed for a product and bucket, besides what is chosen now and the library."""
ORDER = (1, 32, 256, 8, 128, 64, 16, 4, 2, 96, 192)
"""Buckets, the most telling first: time may end before all are done."""
ALL = 10_000

Tell = Callable[[str], None]


class Timed(NamedTuple):
    """What was found for a product and bucket: microseconds before and after."""

    product: Product
    bucket: int
    before: float
    after: float
    config: Config | None
    changed: bool


class Benched(Protocol):
    """One product with its weights."""

    product: Product

    def microseconds(self, config: Config | None, tokens: int) -> float: ...


class Sort(NamedTuple):
    """How products of one sort are tuned: which launch shapes are timed (of a product, bucket and target; at most so
    many), what is ``chosen`` now, and what compiles and times them."""

    candidates: Callable[[Product, int, Target, int], list[Config]]
    chosen: Callable[[Product, int, Target], Config | None]
    job: Callable[[Product, int, Config], Compiled]
    bench: Callable[[Product], Benched]


class Timer:
    """Times launch shapes; keeps one product's weights at a time."""

    def __init__(self, tell: Tell, record: Path | None = None, bench: Callable[[Product], Benched] = Bench) -> None:
        self._tell, self._record, self._make = tell, record, bench
        self._bench: Benched | None = None

    def times(self, product: Product, bucket: int, configs: Iterable[Config | None]) -> dict[Config | None, float]:
        """Microseconds of each launch shape that this GPU takes, and of the library (None)."""
        if self._bench is None or self._bench.product != product:
            self._bench = None  # its memory first
            self._bench = self._make(product)
        found: dict[Config | None, float] = {}
        for config in configs:
            try:
                found[config] = self._bench.microseconds(config, bucket)
            except Exception as error:
                self._tell(f"{product.name} {bucket} {config}: {str(error)[:100]}")
        if self._record is not None:
            with self._record.open("a") as file:
                file.writelines(_line(product, bucket, config, us) for config, us in found.items())
        return found


def _line(product: Product, bucket: int, config: Config | None, us: float) -> str:
    return json.dumps({**product._asdict(), "bucket": bucket, "us": round(us, 3), "config": pack(config)}) + "\n"


def candidates_for(product: Product, bucket: int, target: Target, count: int) -> list[Config]:
    """The ``count`` launch shapes that the cost model finds best, and the library's products in parts."""
    ranked = model_of(target).ranked(product.form, product.rows, product.inputs, bucket, count)
    return [*(config for _, config in ranked), *parts_tried(product, bucket)]


def chosen_for(product: Product, bucket: int, target: Target) -> Config | None:
    """What is chosen now; None: the library."""
    given = product.form, bucket, product.rows, product.inputs
    return choose_product(*given, torch.bfloat16, target).config


DENSE = Sort(candidates_for, chosen_for, Job, Bench)


def _dense(product: Product) -> Sort:
    return DENSE


def tune(
    products: Sequence[Product], target: Target, folder: Path, minutes: float, tell: Tell, compilers: Compilers,
    clock: Callable[[], float] = time.monotonic, timer: Timer | None = None,
    sort_of: Callable[[Product], Sort] = _dense,
) -> list[Timed]:  # fmt: skip
    """Time the best few of each product and bucket, and write the user's table in ``folder`` bucket by bucket.
    ``sort_of`` says of each product how it is tuned."""
    end_s, found = clock() + 60 * minutes, []
    timer = timer or Timer(tell, bench=lambda product: sort_of(product).bench(product))
    read_user_tables(folder)
    for bucket in ORDER:
        if clock() >= end_s:
            tell(f"time is over: {bucket} tokens and what comes behind keep their choices")
            break
        jobs = [job for product in products for job in _jobs(product, bucket, target, sort_of(product))]
        for failure in compilers.compile(jobs):
            tell(failure)
        found += [_tune_one(product, bucket, target, folder, timer, sort_of(product)) for product in products]
        _tell_bucket(found[-len(products) :], tell)
    return found


def _jobs(product: Product, bucket: int, target: Target, sort: Sort) -> list[Compiled]:
    return [sort.job(product, bucket, config) for config in sort.candidates(product, bucket, target, BEST)]


def _tune_one(product: Product, bucket: int, target: Target, folder: Path, timer: Timer, sort: Sort) -> Timed:
    """Keep what is chosen, unless something else is clearly faster."""
    current = sort.chosen(product, bucket, target)
    configs = dict.fromkeys([None, current, *sort.candidates(product, bucket, target, BEST)])
    times = timer.times(product, bucket, configs)
    if current not in times:
        current = None
    if not times:
        return Timed(product, bucket, 0.0, 0.0, current, changed=False)
    best = min(times, key=lambda config: times[config])
    changed = times[best] <= GAIN * times[current]
    chosen = best if changed else current
    if changed:  # a row counts as measured in every use, also where a norm is completed, which was not timed
        merge_table(user_path(target, folder), product, {bucket: chosen})
    return Timed(product, bucket, times[current], times[chosen], chosen, changed)


def _tell_bucket(found: Sequence[Timed], tell: Tell) -> None:
    for each in found:
        what = "library" if each.config is None else f"{each.config}"
        saved = f"{1 - each.after / each.before:.0%} less" if each.changed else "kept"
        times = f"{each.before:>8.2f} → {each.after:>8.2f} µs"
        tell(f"{each.product.name:24} {each.bucket:>4} tokens {times}, {saved}: {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("products", nargs="+", type=Product.parse, metavar="FORM:ROWSxINPUTS")
    parser.add_argument("--buckets", nargs="+", type=int, choices=BUCKETS, default=BUCKETS, help="only these")
    parser.add_argument("--out", type=Path, help="the table that gets the results; without it, the shipped one")
    parser.add_argument("--no-table", action="store_true", help="write none")
    parser.add_argument("--record", type=Path, help="append all times to this file, a JSON line each")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no product later than this")
    arguments = parser.parse_args()
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    assert target is not None
    end_s, timer = time.monotonic() + arguments.seconds, Timer(_print, arguments.record)
    with Compilers() as compilers:
        for product in arguments.products:
            if time.monotonic() > end_s:
                _print(f"no time for {product.name}")
                continue
            chosen = _measure(product, arguments.buckets, target, timer, compilers)
            if not arguments.no_table:
                merge_table(arguments.out or table_path(target), product, chosen)


def _measure(
    product: Product, buckets: Sequence[int], target: Target, timer: Timer, compilers: Compilers
) -> dict[int, Config | None]:
    """The fastest of all for each bucket; compiled before, so that nothing else uses the GPU then."""
    jobs = [
        Job(product, bucket, config) for bucket in buckets for config in candidates_for(product, bucket, target, ALL)
    ]
    for failure in compilers.compile(jobs):
        _print(failure)
    return {bucket: _fastest(product, bucket, target, timer) for bucket in buckets}


def _fastest(product: Product, bucket: int, target: Target, timer: Timer) -> Config | None:
    """The library keeps its place unless it is beaten by 1%."""
    times = timer.times(product, bucket, [None, *candidates_for(product, bucket, target, ALL)])
    best = min(times, key=lambda config: times[config])
    _print(f"{product.name:20} {bucket:>4} library {times[None]:8.2f} µs, best {times[best]:8.2f} {best}")
    return best if times[best] < 0.99 * times[None] else None


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
