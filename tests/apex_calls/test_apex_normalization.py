"""The classes of apex.normalization: arguments, state dicts and dtypes of Apex, numbers of torch's
norms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusedtrain.apex import normalization

TORCH: dict[str, type[nn.Module]] = {
    "FusedLayerNorm": nn.LayerNorm, "MixedFusedLayerNorm": nn.LayerNorm,
    "FusedRMSNorm": nn.RMSNorm, "MixedFusedRMSNorm": nn.RMSNorm,
}  # fmt: skip


@pytest.mark.parametrize("name", normalization.__all__)
def test_numbers_beside_torch(name: str) -> None:
    cls = getattr(normalization, name)
    for shape, memory_efficient in ((6, False), ([4, 6], True)):
        norm = cls(shape, eps=1e-3, memory_efficient=memory_efficient)
        stock = TORCH[name](shape, eps=1e-3)
        for p in stock.parameters():
            nn.init.normal_(p)
        norm.load_state_dict(stock.state_dict())
        results = []
        for module in (norm, stock):
            x = torch.linspace(-2, 3, 72).view(3, 4, 6).requires_grad_()
            y = module(x)
            y.square().sum().backward()
            results.append([y, x.grad, *(p.grad for p in module.parameters())])
            module.zero_grad()
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_dtypes_and_weights() -> None:
    x = torch.randn(3, 6).bfloat16()
    for name in normalization.__all__:
        norm = getattr(normalization, name)(6)
        mixed = name.startswith("Mixed")
        y = norm(x) if mixed else norm.bfloat16()(x)
        assert y.dtype is (torch.float32 if mixed else torch.bfloat16)
        if not mixed:
            plain = getattr(normalization, name)(6, elementwise_affine=False)
            assert not list(plain.parameters())
            assert plain(x).shape == x.shape
        assert norm.eps == 1e-5
