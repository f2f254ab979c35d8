"""vLLM's flags that take a JSON object: which of its fields are settings here, and which ask for how it is anyway."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagebus.actors.settings.declaring import SettingsError
from pagebus.actors.settings.vllm_rows import ANY


@dataclass(frozen=True, slots=True)
class Part:
    """One field. ``setting``: what it sets, by ``value`` of it; else ``taken``: the values that change nothing, by
    their JSON or, of texts, as they are."""

    setting: str = ""
    value: Callable[[Any], Any] = str
    taken: tuple[str, ...] = ()

    def takes(self, value: Any) -> bool:
        text = value if isinstance(value, str) else json.dumps(value)
        return self.taken == ANY or text in self.taken


def _lower(value: Any) -> str:
    return str(value).lower()


def _method(value: Any) -> str:
    """vLLM has names by family for the layers that checkpoints bring along, and means the same."""
    name = _lower(value)
    return "mtp" if name in ("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp") else name


def _eager(value: Any) -> bool:
    return _lower(value) in ("none", "0")


def _whole(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingsError(f"{json.dumps(value)} is no whole number")
    return value


_POOLING = Part("pooling_type", _lower)
_GRAPHS = Part("enforce_eager", _eager)
_OFF = Part(taken=("false",))
OBJECTS: Mapping[str, Mapping[str, Part]] = {
    "--structured-outputs-config": {
        "backend": Part(taken=("auto", "guidance", "xgrammar")),
        "reasoning_parser": Part("reasoning_parser"),
        "disable_fallback": Part(taken=ANY),
        "disable_any_whitespace": _OFF,
        "disable_additional_properties": _OFF,
        "enable_in_reasoning": _OFF,
    },
    "--reasoning-config": {"reasoning_parser": Part("reasoning_parser")},
    "--compilation-config": {
        "cudagraph_mode": _GRAPHS,
        "mode": Part(taken=ANY),
        "max_cudagraph_capture_size": Part("max_cudagraph_capture_size"),
    },
    "--attention-config": {"backend": Part("attention_backend", _lower)},
    "--pooler-config": {
        "pooling_type": _POOLING,
        "seq_pooling_type": _POOLING,
        "normalize": Part(taken=("true",)),
        "use_activation": Part(taken=("true",)),
    },
    "--kernel-config": {},
    "--additional-config": {},
    "--aux-output-config": {},
    "--model-loader-extra-config": {},
    "--hf-overrides": {
        "classifier_from_token": Part("classifier_from_token", tuple),
        "architectures": Part(
            taken=(
                '["Qwen3ForSequenceClassification"]',
                '["Qwen2ForSequenceClassification"]',
                '["LlamaForSequenceClassification"]',
                '["GemmaForSequenceClassification"]',
            )
        ),
        "is_original_qwen3_reranker": Part(taken=("true",)),
        "method": Part(taken=("from_2_way_softmax",)),
    },
    "--override-generation-config": {},
    "--default-chat-template-kwargs": {},
    "--limit-mm-per-prompt": {},
    "--mm-processor-kwargs": {},
    "--media-io-kwargs": {},
    "--profiler-config": {},
    "--kv-transfer-config": {},
    "--kv-events-config": {},
    "--ec-transfer-config": {},
    "--speculative-config": {
        "method": Part("spec_method", _method),
        "model": Part("spec_model"),
        "num_speculative_tokens": Part("spec_tokens", _whole),
        "prompt_lookup_max": Part("prompt_lookup_max", _whole),
        "prompt_lookup_min": Part("prompt_lookup_min", _whole),
        "draft_tensor_parallel_size": Part("draft_tensor_parallel_size", _whole),
    },
    "--eplb-config": {},
    "--quantization-config": {},
    "--watchdog-config": {},
    "--fault-tolerance-config": {},
    "--weight-transfer-config": {},
    "--watermark-config": {},
    "--diffusion-config": {},
    "--engram-config": {},
    "--ec-manager-config": {},
    "--reasoning-effort-map": {},
}
"""By flag; every other field is refused, and an object without fields asks for nothing."""
SHORT = {
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
    "-dc": "--diffusion-config",
}


def takes_object(flag: str) -> bool:
    return SHORT.get(flag, flag) in OBJECTS


def settings_in(flag: str, text: str, otherwise: str) -> dict[str, Any]:
    """The settings that an object says. ``otherwise``: what is said of a field that cannot be had.

    Raises:
        SettingsError: it is no object, or has such a field.
    """
    try:
        given = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{flag}: {otherwise} ({text!r} is no JSON)") from error
    if not isinstance(given, dict):
        raise SettingsError(f"{flag}: {otherwise} ({text!r} is no JSON object)")
    if "architectures" in given and "classifier_from_token" not in given:
        raise SettingsError(f"{flag}: architectures: {otherwise}, or give classifier_from_token beside it")
    parts, told = OBJECTS[SHORT.get(flag, flag)], {}
    for name, value in given.items():
        part = parts.get(name.replace("-", "_"))
        if part is not None and part.setting:
            told[part.setting] = _converted(part, f"{flag}: {name}", value)
        elif part is None or not part.takes(value):
            raise SettingsError(f"{flag}: {name}: {otherwise}")
    return told


def _converted(part: Part, place: str, value: Any) -> Any:
    try:
        return part.value(value)
    except SettingsError as error:
        raise SettingsError(f"{place}: {error}") from error
