"""Layer norms whose outputs memory="recompute" need not keep; with another they are torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as T

import fusedtrain
from helpers.models import timm
from helpers.recompute import bytes_kept


class Mlp(nn.Module):
    """A block of ConvNeXt or a transformer: its norm is a module, a call, or a subclass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = Own(16) if kind == "subclass" else nn.LayerNorm(16, bias=kind != "no bias")
        self.kind, self.up, self.down = kind, nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "call":
            y = T.layer_norm(x, self.norm.normalized_shape, self.norm.weight, self.norm.bias, 1e-4)
        else:
            y = self.norm(x)
        return x + self.down(T.gelu(self.up(y)))


class Own(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return T.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps) * 1.0


@pytest.mark.parametrize("kind", ["module", "no bias", "call", "subclass"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_is_not_kept(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Linear(16, 16), Mlp(kind)).to(dtype)
    x = torch.randn(4, 32, 16, dtype=dtype)
    kept, results = {}, {}
    for memory in ("", "store", "recompute"):
        model = copy.deepcopy(stock)
        if memory:
            fusedtrain.convert(model, x, memory=memory)
        ours = memory == "recompute" and kind != "subclass"
        assert (type(model[1].norm) is fusedtrain.nn.LayerNorm) is ours
        kept[memory] = bytes_kept(model, x)
        y = model(x)
        results[memory] = [y, *torch.autograd.grad(y.float().square().sum(), model.parameters())]
    tensor = x.numel() * x.element_size()
    if kind != "subclass":  # whose product keeps the output of the norm
        assert kept["recompute"] <= kept["store"] - 4.5 * tensor  # and that of GELU
    for memory in ("store", "recompute"):
        for want, got in zip(results[""], results[memory]):
            limit = 64 * torch.finfo(dtype).eps
            assert (got - want).norm() <= limit * want.norm()


def test_is_undone_by_another_conversion() -> None:
    model, x = nn.Sequential(Mlp("module")), torch.randn(2, 3, 16)
    fusedtrain.convert(model, x, memory="recompute")
    assert type(model[0].norm) is fusedtrain.nn.LayerNorm
    want = list(model.state_dict())
    fusedtrain.revert(model)
    assert type(model[0].norm) is nn.LayerNorm
    assert list(model.state_dict()) == want


@pytest.mark.parametrize("name", ["test_convnext", "test_vit"])
def test_models_of_timm(name: str) -> None:
    torch.manual_seed(0)
    options = {"img_size": 32} if name == "test_vit" else {}
    model, x = timm().create_model(name, num_classes=4, **options), torch.randn(2, 3, 32, 32)
    before = fusedtrain.convert(model, x).proof
    assert fusedtrain.revert(model)
    proof = fusedtrain.convert(model, x, memory="recompute").proof
    assert before is not None
    assert proof is not None
    assert proof.saved_after < 0.75 * before.saved_after
