"""What goes into the cache of latents, and products of heads with matrices of their own."""

from __future__ import annotations

import pytest
import torch

from pagebus.kernels.latent.head_product import head_product, head_product_invariant
from pagebus.kernels.latent.reference import head_product_reference, latent_write_reference
from pagebus.kernels.latent.write import latent_write


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "rank", "nope", "rope"), [(4, 32, 16, 16), (19, 40, 24, 12)])
def test_entries_are_normed_turned_and_stored(
    heads: int, rank: int, nope: int, rope: int, dtype: torch.dtype, device: torch.device
) -> None:
    """As the reference has it, to the bit but for the norm's sum; what has no slot is not stored, and the queries' own
    parts stay."""
    product = torch.randn(5, heads * (nope + rope) + rank + rope, device=device).to(dtype)
    positions, mapping = torch.tensor([3, 0, 9, 4, 7], device=device), torch.tensor([5, 17, -1, 0, 31], device=device)
    table, norm = torch.randn(10, rope, device=device), (1 + 0.1 * torch.randn(rank, device=device)).to(dtype)
    results = []
    for write in (latent_write, latent_write_reference):
        both = product.clone()
        q, latents = both.split_with_sizes((heads * (nope + rope), rank + rope), 1)
        cache = torch.zeros(4, 3, 8, rank + rope, device=device).to(dtype)
        write(q.view(5, heads, -1), latents, positions, table, cache[:, 1], mapping, norm=norm, eps=1e-6)
        results.append((both, cache))
    (got, got_cache), (expected, cache) = results
    assert torch.equal(got, expected)
    torch.testing.assert_close(got_cache, cache)
    assert int((got_cache != 0).any(-1).sum()) == 4
    heads_of = got[:, : heads * (nope + rope)].view(5, heads, -1)
    assert torch.equal(heads_of[..., :nope], product[:, : heads * (nope + rope)].view(5, heads, -1)[..., :nope])


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize(("heads", "inner", "width"), [(3, 24, 40), (2, 128, 80)])
def test_heads_are_multiplied_with_their_own_matrices(
    tokens: int, heads: int, inner: int, width: int, device: torch.device
) -> None:
    """Strided on all sides, in either order of the matrix's dimensions."""
    x = torch.randn(tokens, heads, inner + 8, device=device)[..., :inner]
    matrices = torch.randn(heads, inner + width, max(inner, width), device=device)
    for weight in (matrices[:, :inner, :width], matrices[:, :width, :inner].transpose(1, 2)):
        expected = torch.einsum("tha,hab->thb", x.double(), weight.double()).float()
        out = torch.empty(tokens, heads, width + 4, device=device)[..., :width]
        assert head_product(x, weight, out) is out
        for got in (out, head_product(x, weight), head_product_invariant(x, weight), head_product_reference(x, weight)):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_token_has_the_same_bits_in_any_number(device: torch.device) -> None:
    """Of the product for reproducible results."""
    x, weight = torch.randn(100, 2, 48, device=device), torch.randn(2, 48, 32, device=device)
    whole = head_product_invariant(x, weight)
    assert torch.equal(head_product_invariant(x[99:], weight)[0], whole[99])
