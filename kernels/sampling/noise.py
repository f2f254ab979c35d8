"""Gumbel noise as a pure function of (seed, output index, token id), the same integer hash in torch and in Triton.

A 32-bit key pair per row is mixed from the seed and the index; each token id is mixed with it by two murmur3
finalisers, which are bijective: within a row no two tokens share a hash. The hash gives v in (0, 1), the noise is
-log(-log(1 - v)).
"""

from __future__ import annotations

import torch

from pagebus.kernels.common.triton import tl, triton


def _int32(value: int) -> int:
    """The signed form of a 32-bit constant, as torch's int32 arithmetic needs it."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix_reference(h: torch.Tensor) -> torch.Tensor:
    """murmur3's 32-bit finaliser on int32 tensors (products wrap; a shift right is made logical by its mask)."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * _int32(0x85EBCA6B)
    h = (h ^ ((h >> 13) & 0x7FFFF)) * _int32(0xC2B2AE35)
    return h ^ ((h >> 16) & 0xFFFF)


def row_keys_reference(seeds: torch.Tensor, indexes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two int32 keys of each row. seeds [R] int64, indexes [R] int32 -> two [R]."""
    low, high = seeds.to(torch.int32), (seeds >> 32).to(torch.int32)
    a = _mix_reference(low + _int32(0x9E3779B9))
    b = _mix_reference(high ^ a)
    first = _mix_reference(b + indexes.to(torch.int32) * _int32(0x9E3779B1))
    second = _mix_reference((first ^ a) + _int32(0x7F4A7C15))
    return first, second


def token_hash_reference(keys: tuple[torch.Tensor, torch.Tensor], token_ids: torch.Tensor) -> torch.Tensor:
    """The 32-bit hash (as int32) of every token id [V] under each row's keys [R] -> [R, V]."""
    first, second = keys[0].unsqueeze(1), keys[1].unsqueeze(1)
    h = _mix_reference(token_ids.to(torch.int32) * _int32(0x9E3779B1) + first)
    return _mix_reference(h ^ second)


def gumbel_reference(hashes: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, from int32 hashes of any shape."""
    v = (hashes.long() & 0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    # -log(1 - v) loses small v, and those win: there the series is exact to float32.
    exponential = torch.where(v < 2.0**-6, v * (1 + v * (0.5 + v * (1 / 3 + v * 0.25))), -torch.log(1 - v))
    return -torch.log(exponential)


@triton.jit
def _mix(h):
    """murmur3's 32-bit finaliser on uint32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def row_keys(seed, index):
    """The two uint32 keys of a row. seed int64, index int32."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    a = _mix(low + 0x9E3779B9)
    b = _mix(high ^ a)
    first = _mix(b + index.to(tl.uint32) * 0x9E3779B1)
    second = _mix((first ^ a) + 0x7F4A7C15)
    return first, second


@triton.jit
def token_hash(first, second, token):
    """The uint32 hash of token ids (int32, any shape) under a row's keys."""
    return _mix(_mix(token.to(tl.uint32) * 0x9E3779B1 + first) ^ second)


@triton.jit
def exponential(hashes):
    """Standard exponential noise, float32, from uint32 hashes; minus its logarithm is the Gumbel noise."""
    v = tl.minimum((hashes.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    return tl.where(v < 0.015625, series, -tl.log(1.0 - v))
