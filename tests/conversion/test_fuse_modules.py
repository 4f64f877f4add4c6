"""torch.ao.quantization.fuse_modules makes of a converted model what it makes of the stock one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import fuse_modules, fuse_modules_qat

import fusedtrain

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:.*fusedtrain.convert found"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.last, self.alone = nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.alone(self.last(self.act(self.norm(self.conv(x)))))
        return y


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("names", ["conv norm act", "conv norm", "norm act", "last alone"])
@pytest.mark.parametrize("memory", ["store", "recompute", "inplace"])
def test_modules_are_fused_as_in_the_stock_model(
    memory: Any, names: str, training: bool, inplace: bool
) -> None:
    if training and names == "norm act":
        pytest.skip("not a case: torch fuses none for training")
    torch.manual_seed(0)
    stock, x = Block(), torch.randn(4, 3, 8, 8)
    stock(x)
    model = copy.deepcopy(stock)
    fusedtrain.convert(model, memory=memory)
    fuse = fuse_modules_qat if training else fuse_modules
    results = []
    for one in (stock.train(training), model.train(training)):
        fused = fuse(one, names.split(), inplace=inplace)
        results.append((fused(x), type(fused.get_submodule(names.split()[0]))))
    torch.testing.assert_close(results[1][0], results[0][0])
    assert results[1][1] is results[0][1]


def test_fused_modules_that_convert_has_not_made_are_refused_as_by_torch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), fusedtrain.nn.ReLU()).eval()
    with pytest.raises(AssertionError, match="did not find fuser method"):
        fuse_modules(model, ["0", "1"])
