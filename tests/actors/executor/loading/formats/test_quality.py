"""What formats cost in quality stays where it is: a loader that took a number for another would be far off."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagebus.actors.model.config import SHIPPED_MODEL
from tests.actors.executor.loading.float8_quality import Quality, compare
from tests.actors.executor.loading.formats.quality import formats, logits, model_of, read_text, tokens_of

LIMITS = {"float": (0.03, 1.02), "int8": (0.04, 1.02), "fp8": (0.1, 1.05), "F16": (0.03, 1.02), "Q8": (0.04, 1.02),
          "Q6": (0.1, 1.05), "Q5": (0.2, 1.15), "Q4": (0.4, 1.5), "int4": (0.4, 1.5)}  # fmt: skip
"""Of the logits' error, and of the growth of perplexity."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Quality]:
    samples = read_text()[:2]
    truth = logits(model_of(SHIPPED_MODEL), samples)
    folder: Path = tmp_path_factory.mktemp("gguf")
    tokens = tokens_of(samples)
    return {each.name: compare(logits(each.load(folder)[0], samples), truth, tokens) for each in formats()}


def test_no_format_changes_the_model(found: dict[str, Quality]) -> None:
    """The exact one is exact, 8 bits are nearly so, and 4 bits near: a number that is taken for another costs far
    more."""
    assert found["float32"].logit_error == 0
    assert found["GGUF `BF16`"].logit_error < 1e-5
    for name, quality in found.items():
        error, growth = next(limits for part, limits in LIMITS.items() if part in name)
        assert quality.logit_error < error, name
        assert quality.perplexity < found["float32"].perplexity * growth, name


def test_more_bits_are_more_exact(found: dict[str, Quality]) -> None:
    """Among types of one kind."""
    for names in (("Q8_0", "Q6_K", "Q5_K", "Q4_K"), ("Q8_0", "Q5_0", "Q4_0"), ("Q5_1", "Q4_1")):
        errors = [found[f"GGUF `{name}`"].logit_error for name in names]
        assert errors == sorted(errors)
    assert found["GGUF, as `Q4_K_M`"].logit_error < found["GGUF `Q4_K`"].logit_error
    assert found["`--quantization int8`"].logit_error < found["`--quantization int4`"].logit_error
