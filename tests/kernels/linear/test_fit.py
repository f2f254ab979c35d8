"""The cost model against what was measured on an H200: `docs/measurements`."""

from __future__ import annotations

import math
from pathlib import Path

from pagebus.kernels.common.machines import machine_of
from pagebus.kernels.linear.costs import CostModel
from pagebus.kernels.linear.dispatch import MARGIN
from pagebus.kernels.linear.shapes import MANY, DenseConfig
from pagebus.kernels.linear.tables import load_table, table_path
from tests.kernels.linear.fit_costs import H200, descend, losses, objective, read, summary

TIMES = sorted((Path(__file__).parents[3] / "docs/measurements/h200-issue18").glob("products-*.jsonl"))


def test_times_are_near_those_measured() -> None:
    """Half of them within 10%, nine of ten within 25%."""
    model, errors = CostModel(machine_of(H200)), []
    for (product, bucket), timed in read(TIMES).items():
        for config, us in timed.items():
            guess = model.library(*product[:3], bucket) if config is None else model.own(config, *product[:3], bucket)
            if guess is not None:
                errors.append(abs(math.log(guess / us)))
    errors.sort()
    assert len(errors) > 100
    assert errors[len(errors) // 2] < 0.10
    assert errors[len(errors) * 9 // 10] < 0.25


def test_it_would_mostly_decide_as_the_tables_do() -> None:
    """Whether the library or our kernel is faster: in three of four entries as was measured."""
    model, same, count = CostModel(machine_of(H200)), 0, 0
    for product, choices in load_table(table_path(H200)).items():
        if product.form == "residual":
            continue
        for bucket, measured in choices.items():
            if bucket == MANY:
                continue
            estimate = model.best(*product[:3], bucket)
            takes_ours = estimate.us < MARGIN * estimate.library
            same, count = same + (takes_ours == isinstance(measured, DenseConfig)), count + 1
    assert count > 100
    assert same >= 0.75 * count


def test_a_fit_recovers_what_made_the_times() -> None:
    """Times by known constants, and a start beside them: the fit ends with a smaller error."""
    machine, times = machine_of(H200), read(TIMES)
    truth = CostModel(machine)
    made = {
        (product, bucket): {
            config: us
            for config in timed
            if (
                us := truth.library(*product[:3], bucket) if config is None else truth.own(config, *product[:3], bucket)
            )
        }
        for (product, bucket), timed in list(times.items())[:12]
    }
    begin = truth.constants._replace(chain=2 * truth.constants.chain, library_chain=0.6 * truth.constants.library_chain)
    best = descend(lambda tried: objective(made, machine, tried), begin, 3)
    assert objective(made, machine, truth.constants) < 1e-9
    assert objective(made, machine, best) < 0.3 * objective(made, machine, begin)


def test_losses_are_told_in_words() -> None:
    """Of picks among several launch shapes."""
    found = losses(read(TIMES), CostModel(machine_of(H200)), 2)
    assert f"{len(found)} entries" in summary("fitted", found)
    assert "no picks" in summary("held out", [])
