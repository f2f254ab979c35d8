"""What adapters add to a layer's products, in the passes in which some token has one."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from pagebus.kernels.lora.pages import PagedTable
from pagebus.kernels.lora.plan import AdapterPlan
from pagebus.kernels.moe.adapted.experts import ExpertTables


class AdapterPass(threading.local):
    """Which tokens of the present pass have which adapter; None: no token has one, and nothing is launched for them.
    ``last``: the same of the tokens that the last layer goes on with; ``rows``: of those whose logits are computed.
    ``of_token`` [T]: the place of the adapter of each token of the newest pass, which logits behind it are made by.

    Each thread has a pass of its own: graphs are captured beside steps.
    """

    plan: AdapterPlan | None = None
    last: AdapterPlan | None = None
    rows: AdapterPlan | None = None
    of_token: torch.Tensor | None = None

    def begin(self, plan: AdapterPlan, last: AdapterPlan) -> None:
        """For the pass that follows."""
        self.plan, self.last, self.of_token = plan, last, plan.of_token

    def end(self) -> None:
        """The pass is over."""
        self.plan = self.last = None

    def begin_logits(self, rows: AdapterPlan | None) -> None:
        """For the logits that follow."""
        self.rows = rows

    def keep_last(self) -> None:
        """From here on the pass has the last tokens only."""
        self.plan = self.last


class Addition(NamedTuple):
    """What adapters add to one product of a pass."""

    table: PagedTable
    plan: AdapterPlan


class Adapted:
    """The matrices of one product, of all adapters in their places."""

    __slots__ = ("_current", "table")

    def __init__(self, table: PagedTable, current: AdapterPass) -> None:
        self.table = table
        self._current = current

    @property
    def addition(self) -> Addition | None:
        """None: no token of the present pass has an adapter."""
        plan = self._current.plan
        return None if plan is None else Addition(self.table, plan)


class AdaptedHead(Adapted):
    """The matrices of the head, of all adapters in their places."""

    __slots__ = ()

    @property
    def addition(self) -> Addition | None:
        """None: none of the rows has an adapter."""
        rows = self._current.rows
        return None if rows is None else Addition(self.table, rows)


class ExpertsAddition(NamedTuple):
    """What adapters add to the experts of a layer in a pass: the place of each token's adapter [T], -1: it has none."""

    tables: ExpertTables
    of_token: torch.Tensor


class AdaptedExperts:
    """The matrices of both products of a layer's experts, of all adapters in their places."""

    __slots__ = ("_current", "tables")

    def __init__(self, tables: ExpertTables, current: AdapterPass) -> None:
        self.tables = tables
        self._current = current

    @property
    def addition(self) -> ExpertsAddition | None:
        """None: no token of the present pass has an adapter."""
        plan = self._current.plan
        return None if plan is None else ExpertsAddition(self.tables, plan.of_token)
