"""Fields of a message that carries sampling parameters, given side by side."""

from __future__ import annotations

from typing import Any

from pagebus.bus.messages import NewSequence, SamplingParams, SequenceStarted


def gathered(cls: type[NewSequence | SequenceStarted], fields: dict[str, Any]) -> dict[str, Any]:
    """The same with those that are sampling parameters, and no fields of ``cls`` itself, as ``sampling``."""
    names = set(SamplingParams.__struct_fields__) - set(cls.__struct_fields__)
    sampling = {name: value for name, value in fields.items() if name in names}
    return {name: value for name, value in fields.items() if name not in names} | {
        "sampling": SamplingParams(**sampling)
    }
