"""Settings of the model: its path, tokenizer, names and load format."""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.actors.settings.declaring import setting


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model is served, and under which name."""

    model: str = setting("", help="folder, GGUF file or Hugging Face id of the model; empty: the small shipped one")
    tokenizer: str | None = setting(None, help="folder or id of the tokenizer (default: the model's)")
    skip_tokenizer_init: bool = setting(False, help="run without a tokenizer: prompts and answers are token ids")
    served_model_name: tuple[str, ...] = setting(
        (), help="name or names of the model in the API (default: MODEL as given)"
    )
    revision: str | None = setting(None, help="branch, tag or commit of the model on the hub")
    chat_template: str | None = setting(
        None, help="a Jinja chat template, or the path of a file with one (default: the model's)"
    )
    generation_config: str = setting(
        "auto",
        help="source of sampling defaults: the model's generation_config.json (auto) or none (vllm)",
        choices=("auto", "vllm"),
    )
    quantization: str | None = setting(
        None,
        help="format of the weights (default: the checkpoint's); fp8, int8 and int4 are made of 16 bits at load",
        choices=(
            *("fp8", "int8", "int4", "gptq", "awq", "compressed-tensors", "modelopt", "bitsandbytes", "mxfp4"),
            *("torchao", "fbgemm_fp8", "gguf", "gptq_marlin", "awq_marlin", "modelopt_fp4"),
        ),
    )
    load_format: str = setting(
        "auto",
        help="dummy: random weights, to measure without a download",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
