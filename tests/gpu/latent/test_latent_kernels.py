"""Kernels over latents on CUDA, at the sizes of real models, against the references in float32.

Runs on a bare GPU host too: ``PYTHONPATH=. pytest -c /dev/null --rootdir . --noconftest --import-mode=importlib
tests.gpu.latent.test_latent_kernels.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.latent.expanded import expanded_attention
from pagebus.kernels.latent.head_product import head_product, head_product_invariant
from pagebus.kernels.latent.reference import expanded_attention_reference, latent_attention_reference
from tests.kernels.latent.latent_cases import LatentCase, make_latents
from tests.kernels.latent.test_latent_attention import by_kernel, live

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
CUDA = "cuda"
V2_LITE: dict[str, Any] = {"heads": 16, "rank": 512, "nope": 128, "rope": 64, "value": 128}
GLM_FLASH: dict[str, Any] = {"heads": 20, "rank": 512, "nope": 192, "rope": 64, "value": 256}
MINICPM3: dict[str, Any] = {"heads": 40, "rank": 256, "nope": 64, "rope": 32, "value": 64}
V3: dict[str, Any] = {**V2_LITE, "heads": 128}
MODELS = {"v2-lite": V2_LITE, "glm-flash": GLM_FLASH, "minicpm3": MINICPM3, "v3": V3}
ROWS = [
    ([1, 31, 32, 33, 4000, 17, 900, 0, 15000], [1] * 9),
    ([500, 40, 3000], [500, 40, 7]),
    ([5000, 12, 700, 64, 2000], [1, 1, 1, 64, 100]),
]


def wide(case: LatentCase) -> LatentCase:
    """The same in float32."""
    return LatentCase(
        case.q.float(), case.cache.float(), case.expansion.float(), case.rows, case.nope, case.context_lens,
        case.query_lens,
    )  # fmt: skip


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=["decodes", "prompts", "both"])
@pytest.mark.parametrize("model", MODELS)
def test_attention_over_latents(model: str, rows: tuple[list[int], list[int]], dtype: torch.dtype) -> None:
    """Decodes that are cut and merged, prompts, both; with results that depend on no other token too."""
    torch.manual_seed(3)
    case = make_latents(*rows, **MODELS[model], dtype=dtype, device=CUDA)
    absorbed = case.absorbed
    wanted = latent_attention_reference(absorbed.float(), wide(case).q[..., case.nope :], wide(case).cache, **case.rows)
    tokens, bound = live(case), 1e-4 if dtype == torch.float32 else 1e-2
    for invariant in (False, True):
        assert error(by_kernel(case, absorbed, invariant=invariant)[tokens], wanted[tokens]) < bound


@pytest.mark.parametrize("model", MODELS)
def test_expanded_prompts(model: str) -> None:
    """With a past, without, and of a context that is expanded in pieces (128 heads: 8192 tokens each)."""
    torch.manual_seed(4)
    case = make_latents([700, 10000, 300], [700, 400, 300], **MODELS[model], dtype=torch.bfloat16, device=CUDA)
    rows = (LongRow(0, 0, 700, 700), LongRow(1, 700, 400, 10000), LongRow(2, 1100, 300, 300))
    arguments = {key: case.rows[key] for key in ("slots", "block_tables", "scale")} | {"rows": rows}
    size = len(case.q), MODELS[model]["heads"], MODELS[model]["value"]
    got, wanted = torch.empty(size, dtype=torch.bfloat16, device=CUDA), torch.empty(size, device=CUDA)
    expanded_attention(case.q, case.cache, case.expansion, got, **arguments)
    exact = wide(case)
    expanded_attention_reference(exact.q, exact.cache, exact.expansion, wanted, **arguments)
    assert error(got, wanted) < 1e-2


@pytest.mark.parametrize("tokens", [1, 64, 65, 5000])
def test_products_of_heads(tokens: int) -> None:
    """Both parts of the expansion; alone and among others a token has the same bits."""
    torch.manual_seed(5)
    expansion = torch.randn(16, 256, 512, device=CUDA).bfloat16()
    for weight in (expansion[:, :128], expansion[:, 128:].transpose(1, 2)):
        x = torch.randn(tokens, 16, weight.shape[1], device=CUDA).bfloat16()
        wanted = torch.einsum("tha,hab->thb", x.float(), weight.float())
        assert error(head_product(x, weight), wanted) < 1e-2
        assert torch.equal(head_product_invariant(x, weight)[-1], head_product_invariant(x[-1:], weight)[0])
