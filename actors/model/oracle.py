"""A model for tests, without weights: :mod:`pagebus.actors.executor.models.oracle`."""

from __future__ import annotations

from pagebus.actors.model.families.llama import parse
from pagebus.actors.model.family import Family

ORACLE = "OracleForCausalLM"
FAMILY = Family(name="Oracle", architectures=(ORACLE,), model_type="", parse=parse)
