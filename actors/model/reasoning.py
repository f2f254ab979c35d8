"""Formats in which models mark their reasoning, by the names of vLLM's parsers, for grammars and for parsing texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """``opens``, ``closes``: the marks around reasoning, in each spelling.

    ``inside``: the text is reasoning from its beginning, because the chat template has written the mark; the model may
    write it once more. Otherwise only a text that begins with the mark has reasoning; without any it begins with
    ``instead``. ``switches``: variables of the chat template that turn reasoning on and off, ``default`` without them.
    ``implied_by``: marks of calls that end reasoning without its own mark.
    """

    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    inside: bool = True
    instead: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    default: bool = True
    implied_by: tuple[str, ...] = ()

    def is_on(self, template_kwargs: Mapping[str, object]) -> bool:
        """Whether a model reasons that was asked with these variables of its chat template."""
        given = [template_kwargs[name] for name in self.switches if template_kwargs.get(name) is not None]
        return any(given) if given else self.default


_FINAL = tuple(f"<|channel|>final{form}<|message|>" for form in ("", " <|constrain|>json", " json"))
SWITCHES = ("thinking", "enable_thinking")
"""Variables of chat templates that turn reasoning on and off."""
FORMATS = {
    "deepseek_r1": ReasoningFormat(),
    "deepseek_v3": ReasoningFormat(switches=SWITCHES, default=False),
    "glm45": ReasoningFormat(switches=SWITCHES, implied_by=("<tool_call>",)),
    "granite": ReasoningFormat(
        opens=("Here is my thought process:", "Here's my thought process:"),
        closes=("Here is my response:", "Here's my response:"),
        inside=False,
    ),
    "holo2": ReasoningFormat(switches=SWITCHES),
    "kimi_k2": ReasoningFormat(switches=SWITCHES, implied_by=("<|tool_calls_section_begin|>",)),
    "mistral": ReasoningFormat(opens=("[THINK]",), closes=("[/THINK]",), inside=False, implied_by=("[TOOL_CALLS]",)),
    "openai_gptoss": ReasoningFormat(
        opens=("<|channel|>analysis<|message|>",),
        closes=tuple(f"<|end|><|start|>assistant{final}" for final in _FINAL),
        inside=False,
        instead=_FINAL,
    ),
    "qwen3": ReasoningFormat(switches=("enable_thinking",), implied_by=("<tool_call>",)),
}
FORMATS["glm47"] = FORMATS["glm45"]
