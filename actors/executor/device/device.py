"""Chooses the engine's device and number format, and applies the torch settings that follow from them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch

from pagebus.actors.settings import Settings, SettingsError

CPU_MAX_BATCHED_TOKENS = 2048
CUDA_MAX_BATCHED_TOKENS = 8192

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {
    "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8,
    "int8_per_token_head": torch.int8,
}  # fmt: skip


def resolve_device(settings: Settings) -> torch.device:
    """``auto`` is the first CUDA device if there is one, of a rank the one of that number, else the CPU. Ranks take
    those that are visible in turn.

    Raises:
        SettingsError: ``cuda`` was asked for and there is none, or nothing that compiles kernels for it.
    """
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise SettingsError(
            "--device cuda: torch finds no CUDA device (driver missing, or a CPU build of torch); "
            "--device cpu needs none"
        )
    use_cuda = settings.device == "cuda" or (settings.device == "auto" and available)
    if not use_cuda:
        return torch.device("cpu")
    if find_spec("triton") is None:
        raise SettingsError("--device cuda: Triton is missing, which torch brings along with CUDA: pip install triton")
    return torch.device("cuda", settings.rank % torch.cuda.device_count())


def resolve_dtype(settings: Settings, model_dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is the model's own format on CUDA and float32 on a CPU, where the narrow formats are slower."""
    name = settings.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model_dtype
    if name not in DTYPES:
        raise SettingsError(
            f"the model's dtype {name!r} is not supported: choose one with --dtype ({', '.join(DTYPES)})"
        )
    return DTYPES[name]


def resolve_kv_dtype(settings: Settings, dtype: torch.dtype) -> torch.dtype:
    """The cache's format: ``dtype``, the model's, unless one of a byte per number was asked for."""
    return KV_DTYPES.get(settings.kv_cache_dtype, dtype)


def resolve_token_budget(settings: Settings, device: torch.device) -> int:
    """The most tokens one step may compute."""
    default = CPU_MAX_BATCHED_TOKENS if device.type == "cpu" else CUDA_MAX_BATCHED_TOKENS
    return settings.max_num_batched_tokens or default


def check_attention(settings: Settings, device: torch.device) -> None:
    """Whether the device can do what the settings ask of attention.

    Raises:
        SettingsError: it cannot.
    """
    if device.type == "cuda":
        return
    if settings.attention_backend == "triton":
        raise SettingsError("--attention-backend triton: the kernels need a CUDA device; a CPU has auto and torch")
    if settings.deterministic:
        raise SettingsError("--deterministic: needs a CUDA device; on a CPU, products depend on the size of the batch")


def prepare_thread(settings: Settings, device: torch.device, dtype: torch.dtype) -> None:
    """Set what torch keeps per thread or process. Call it in the thread that computes."""
    if device.type == "cpu":
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        return
    torch.cuda.set_device(device)
    if dtype == torch.float32:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def new_event(*, timing: bool = False, blocking: bool = False) -> torch.cuda.Event:
    """An event; with ``timing``, the time between two of them can be asked for; with ``blocking``, who waits for it
    takes no processor meanwhile."""
    return torch.cuda.Event(enable_timing=timing, blocking=blocking)


def is_done(event: torch.cuda.Event) -> bool:
    """Whether what was queued before the event is done."""
    return bool(event.query())


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A new stream of the device."""
    return torch.cuda.Stream(device)


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """A context with a stream other than the default one, as graph capture needs."""
    return torch.cuda.stream(new_stream(device)) if device.type == "cuda" else nullcontext()
