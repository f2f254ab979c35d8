"""What an architecture would need that is not served: for the error that refuses it by name."""

from __future__ import annotations

import re

SPARSE = "sparse attention"
EXPERTS = "a mixture of experts of another kind"
STATE = "layers with a recurrent state"
NEEDS = (
    (r"Deepseek(V32|V4)|GlmMoeDsa|Glm5", SPARSE),
    (r"KimiK25|DeepseekVL", "a text tower of a family that is served"),
    (r"LongcatFlash", "two attentions in each layer, and experts that do nothing"),
    (r"Qwen3Next|Qwen3_5|NemotronH|Mamba|Jamba|Bamba|Zamba|FalconH1|KimiLinear|GraniteMoeHybrid|Lfm", STATE),
    (r"MiniMax", STATE),
    (r"Gemma4|Gemma3n", "two sizes of heads in one model, and embeddings of each layer"),
    (r"T5|Bart|Whisper|Marian", "an encoder beside the decoder"),
    (r"VL|Llava|Vision|Pixtral|ConditionalGeneration", "a text tower of a family that is served"),
    (r"Moe|MoE|Olmoe|Dots1", EXPERTS),
    (r"SequenceClassification|Bert|Roberta|ForMaskedLM|Embedding", "encoders or pooling heads of another kind"),
    (r"GPT|Gpt|Bloom|OPT|Falcon|StableLm|Phi(ForCausal|Moe)", "feed-forward parts without a gate"),
)  # fmt: skip
"""The first pattern that is found in an architecture's name says what it needs."""


def why_refused(architecture: str) -> str:
    """``: it needs ...``, or nothing if that is not known."""
    return next((f": it needs {what}" for pattern, what in NEEDS if re.search(pattern, architecture)), "")
