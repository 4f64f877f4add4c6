"""A whole AMP step as a CUDA graph, replayed with other learning rates and over an overflow, is the
eager one. tests/optim/test_captured_steps.py rehearses the step without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.gpu import NEEDS_GPU
from helpers.graphs import Step, train
from helpers.optimizers import APEX, NAMES

pytestmark = NEEDS_GPU


def captured(step: Step) -> Step:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@pytest.mark.parametrize("convert", [False, True], ids=["stock", "converted"])
@pytest.mark.parametrize("name", NAMES + APEX)
def test_a_replayed_step_is_the_eager_one(name: str, convert: bool) -> None:
    eager = train(name, "cuda", lambda step: step, convert)
    replayed = train(name, "cuda", captured, convert)
    for part, value in eager.items():
        torch.testing.assert_close(
            replayed[part], value, rtol=1e-5, atol=1e-6, equal_nan=True, msg=part
        )  # the loss of an infinity is NaN


def test_a_first_step_within_a_capture_raises() -> None:
    model = nn.Linear(4, 4, device="cuda")
    fusedtrain.functional.mish(model.weight)  # a kernel runs, as the rule of this file demands
    optimizer = fusedtrain.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with (
        pytest.raises(RuntimeError, match="would be reset by every replay"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    optimizer.step()
