"""The scales of a float8 cache: what keys and values of each head are divided by before they are stored.

Float8 is a floating-point format: as long as nothing is cut off at its largest number or falls below its smallest one,
the scale hardly matters. So its order of magnitude is enough, and that shows in any text. Where a checkpoint brings no
scales, a made-up prompt runs through the model once at start, over a cache of the model's own format; the largest key
and the largest value of each head give the scales, with room left for others to be larger. This depends on nothing but
the model, so that all executors, and all runs, have the same scales.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from pagebus.actors.executor.layers.attention import attention_shape
from pagebus.actors.executor.loading.weights import our_names, read_headers, weight_files
from pagebus.actors.executor.memory.kv_cache import allocate_kv_cache
from pagebus.actors.executor.models import AttentionBatch, Model
from pagebus.actors.executor.models.decoder import as_decoder
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.model.gguf.files import is_gguf
from pagebus.actors.model.shards.stage import first_layer
from pagebus.actors.settings import Settings, SettingsError
from pagebus.kernels.attention.paged_attention import Spans, cut_prompts

PROMPT_TOKENS = 256
BLOCK_SIZE = 16
LARGEST = 64.0
"""What the largest number of the prompt becomes, at most: a seventh of what fits into fp8_e4m3."""
NAMES = (
    *("self_attn.{name}_scale", "self_attn.attn.{name}_scale", "self_attn.{name}_proj.{name}_scale"),
    *("self_attn.{name}_proj.output_scale", "self_attn.kv_scale"),
)
"""Names of the scale of a layer's keys or values. The last two are of older checkpoints: the scale of a projection's
output, and one scale for both."""


@torch.inference_mode()
def set_kv_scales(model: Model, path: Path, settings: Settings) -> None:
    """Give the model's layers the checkpoint's scales, else calculated ones if that is wanted, else 1.

    Raises:
        ModelError: the checkpoint has scales that make no sense.
        SettingsError: a stage of a pipeline would have to calculate them: it sees no whole pass.
    """
    stored = None if settings.load_format == "dummy" else read_scales(model, path)
    scales = stored
    if stored is None and settings.calculate_kv_scales:
        if model.passage is not None:
            raise SettingsError(
                f"--kv-cache-dtype {settings.kv_cache_dtype}: with --pipeline-parallel-size, scales are not "
                "calculated; use a checkpoint that has some, or --no-calculate-kv-scales"
            )
        scales = calculate_scales(model)
    if scales is not None:
        for layer, values in zip(as_decoder(model).layers, scales, strict=True):
            layer.attention.kv_scales.copy_(values)


def read_scales(model: Model, path: Path) -> torch.Tensor | None:
    """The checkpoint's scales [layers, 2, Hkv]; None if it has none. Each is one number or one per head."""
    config = model.config
    if is_gguf(path):
        return None
    files = read_headers(weight_files(path))
    tensors, theirs = our_names(files, config.names), {id(tensor): name for name, tensor in files.items()}
    found: dict[tuple[int, int], torch.Tensor] = {}
    for layer in range(config.num_layers):
        for part, name in enumerate("kv"):
            for place in NAMES:
                full = f"model.layers.{first_layer(config.stage) + layer}.{place.format(name=name)}"
                if full in tensors:
                    with safe_open(str(tensors[full].file), framework="pt", device="cpu") as source:
                        found[layer, part] = _own_heads(full, source.get_tensor(theirs[id(tensors[full])]), config)
    if not found:
        return None
    wanted = [(layer, part) for layer in range(config.num_layers) for part in range(2)]
    missing = [key for key in wanted if key not in found]
    if missing:
        layer, part = missing[0]
        raise ModelError(
            f"the weights have {len(found)} scales of the KV cache, but none of layer {layer}'s {'kv'[part]}"
        )
    return torch.stack([found[key] for key in wanted]).view(config.num_layers, 2, -1)


def _own_heads(name: str, scale: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """One layer's scales [Hkv], of this rank's heads only."""
    if config.shard is None:
        return _checked(name, scale, config.num_kv_heads)
    mixer = config.shard.whole.layers[0].mixer  # all layers have equal heads
    own = config.shard.kv_heads(mixer)
    return _checked(name, scale, mixer.kv_heads)[own.start : own.stop]


def _checked(name: str, scale: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """One layer's scales [Hkv]."""
    scale = scale.float().flatten()
    if len(scale) not in (1, num_kv_heads) or not bool((scale.isfinite() & (scale > 0)).all()):
        raise ModelError(f"tensor {name} is no scale, nor one for each of {num_kv_heads} heads")
    return scale.expand(num_kv_heads)


@torch.inference_mode()
def calculate_scales(model: Model) -> torch.Tensor:
    """Scales [layers, 2, Hkv], powers of two, from random tokens. Powers of two, so that they round nothing."""
    config, parameters = model.config, model.parameters
    device, count = parameters.device, min(PROMPT_TOKENS, model.num_positions)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (count,), generator=generator, dtype=torch.int32).to(device)
    num_blocks, groups = -(-count // BLOCK_SIZE), config.cache_groups
    num_pages = 1 + groups.windowed_pages
    cache = allocate_kv_cache(config, num_pages * num_blocks, BLOCK_SIZE, parameters.dtype, device)
    places = torch.arange(count, device=device)
    pages = torch.arange(num_pages * num_blocks, device=device, dtype=torch.int32).view(num_pages, 1, num_blocks)
    shape = attention_shape(config, parameters.dtype, parameters.dtype, device)
    cut = cut_prompts(np.array([0, count], np.int32), np.array([count], np.int32), 0, shape, device)
    batch = AttentionBatch(
        slots=places[:1].int(),
        query_start=places.new_tensor([0, count]).int(),
        context_lens=places.new_tensor([count]).int(),
        slot_mapping=places[:count],
        block_tables=pages[0],
        num_decodes=0,
        spans=Spans.copied(cut, device),
        windowed_tables=tuple(pages[1:]),
        windowed_mappings=tuple(places + page * num_blocks * BLOCK_SIZE for page in range(1, num_pages)),
    )
    model.forward(tokens, places[:count].int(), cache, batch)
    found = cache.unflatten(0, (num_pages, num_blocks)).float().abs().amax(dim=(1, 4, 6)).nan_to_num(0.0, 0.0)
    largest = torch.stack([found[page, place] for page, place in groups.layers])
    return torch.where(largest > 0, (largest / LARGEST).log2().ceil().exp2(), 1.0)
