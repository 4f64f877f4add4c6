"""The peak of a training step under a plan, beside the predicted one. `make gpu` runs this alone,
for the GPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from benchmarks.harness import networks
from benchmarks.harness.memory import most_allocated

Job = tuple[nn.Module, Any, Callable[[Any], Tensor]]  # model, example, loss of the output


def _resnet() -> Job:
    setup = networks.Setup("train", "resnet50", 64, 224)
    images, labels = networks.batch_of(setup, "cuda")
    return networks.build(setup, "cuda"), images, lambda output: F.cross_entropy(output, labels)


def _gpt() -> Job:
    from scripts.nanogpt import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(1024, 50304, n_layer=12, n_head=12, n_embd=768)).cuda()
    tokens = torch.randint(50304, (2, 8, 1024), device="cuda")
    return model, (tokens[0], tokens[1]), lambda output: output[1]


def _small() -> Job:
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()) for _ in range(4)]
    return nn.Sequential(*sum(layers, ())), torch.randn(2, 8, 32, 32), torch.sum


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "budget"),
    [
        *(pytest.param(m, b, marks=on_gpu) for m in (_resnet, _gpt) for b in (0.85, 0.7)),
        (_small, 0.8),
    ],
)
def test_a_budget_is_kept(make: Callable[[], Job], budget: float) -> None:
    model, example, loss = make()
    arguments = example if isinstance(example, tuple) else (example,)
    device = arguments[0].device.type
    with torch.autocast(device, torch.bfloat16):
        plan = fusedtrain.plan_memory(model, example, budget, loss=loss)
    fusedtrain.convert(model, memory=plan)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        # Its end drops the 16-bit copies of weights: 51 MB of a ResNet-50.
        with torch.autocast(device, torch.bfloat16):
            output = model(*arguments)
            value = loss(output)
        value.backward()

    step()
    model.zero_grad(set_to_none=True)
    peak, _ = most_allocated(step, device)
    sizes = {"eager's peak": plan.eager_peak, "allowed": plan.budget, "predicted": plan.predicted,
             "measured by the planner": plan.peak, "in training": peak}  # fmt: skip
    print("\nMB:", ", ".join(f"{size / 1e6:.1f} {what}" for what, size in sizes.items()))
    assert peak <= 1.02 * plan.budget
