"""FP16_Optimizer after a backward pass that raised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _amp_runs import MAKERS, gradients_alike, images, network
from torch import Tensor, nn

from fusedtrain import fp16_utils

pytestmark = pytest.mark.usefixtures("one_thread")


def _refuse(grad: Tensor) -> Tensor:
    raise KeyError


@pytest.mark.parametrize("maker", ["torch-SGD", "fused-SGD"])
def test_a_backward_pass_that_raises_leaves_no_gradients(maker: str) -> None:
    model = fp16_utils.convert_network(network(), torch.float16)
    optimizer = fp16_utils.FP16_Optimizer(MAKERS[maker](model.parameters()), 64.0, verbose=False)
    x, y = images()

    def loss(stem: Any = None) -> Tensor:
        hidden = model[0](x.half())
        if stem is not None:
            hidden.register_hook(stem)
        result: Tensor = nn.functional.cross_entropy(model[1:](hidden).float(), y)
        return result

    with pytest.raises(KeyError):
        optimizer.backward(loss(_refuse))
    assert all(p.grad is None for p in model.parameters())
    optimizer.backward(loss())
    reference = network()
    nn.functional.cross_entropy(reference(x), y).backward()
    gradients_alike((p for g in optimizer.param_groups for p in g["params"]), reference)
