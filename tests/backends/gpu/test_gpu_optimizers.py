"""The optimizer step on a GPU: the numbers of the CPU, no host sync, CUDA graphs, streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain import optim
from fusedtrain.reference import FAMILIES
from helpers.gpu import NEEDS_GPU, no_sync
from helpers.optimizers import NAMES, make

pytestmark = NEEDS_GPU

SHAPES = [(64, 3, 7, 7), (128, 64, 3, 3), (1000, 129), (129,), (), (0,), (4099,)]


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, shape in enumerate(SHAPES):
        value = torch.randn(shape, generator=generator).to(device, dtype)
        if value.dim() == 4 and number % 2:
            value = value.to(memory_format=torch.channels_last)
        made.append(nn.Parameter(value))
    return made


def set_gradients(params: list[Tensor], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p)


@pytest.mark.launches_nothing("looks at the registrations")
def test_kernels_are_registered() -> None:
    for op in (*FAMILIES["optimizers"], *FAMILIES["scaling"]):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fusedtrain::{op}", "CUDA"), op


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_same_numbers_as_the_cpu(name: str, dtype: torch.dtype) -> None:
    """Clipped, scaled, averaged, with a skipped step: parameters and all states."""
    results = []
    for device in ("cpu", "cuda"):
        params = parameters(device, dtype)
        options: dict[str, Any] = {"max_grad_norm": 3.0, "ema_decay": 0.9}
        optimizer = make(name, params, **options)
        scaler = fusedtrain.amp.GradScaler(device, init_scale=8.0)
        for step in range(4):
            set_gradients(params, step, float("inf") if step == 1 else scaler.get_scale())
            scaler.scale(torch.ones((), device=device))
            scaler.step(optimizer)
            scaler.update()
        assert int(optimizer.skipped_steps) == 1
        assert int(optimizer.applied_steps) == 3
        state = optimizer.state_dict()["state"]
        results.append((params, state, optimizer.grad_norm))
    (params, state, norm), (gpu_params, gpu_state, gpu_norm) = results
    # Approximate division and square root differ by units in the last place; Lion's sign of a sum
    # that is nearly 0 may differ as well, in a handful of places.
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5}.get(dtype, 2e-2)
    for a, b in zip(params, gpu_params, strict=True):
        off = (a - b.cpu()).abs() > tolerance * (a.abs() + 1)
        assert off.sum() <= (3 if name == "Lion" else 0)
    for number, states in state.items():
        for key, value in states.items():
            if isinstance(value, Tensor) and key != "ema":
                torch.testing.assert_close(
                    gpu_state[number][key].cpu().double(), value.cpu().double(),
                    rtol=tolerance, atol=tolerance,
                )  # fmt: skip
    assert norm is not None
    assert gpu_norm is not None
    torch.testing.assert_close(gpu_norm.cpu(), norm)


@pytest.mark.parametrize("name", NAMES)
def test_no_host_sync(name: str) -> None:
    params = parameters("cuda")
    optimizer = make(name, params, max_grad_norm=1.0, ema_decay=0.9)
    scaler = fusedtrain.amp.GradScaler("cuda", hysteresis=2, min_scale=1.0)
    scaler.scale(torch.ones((), device="cuda"))
    for step in range(3):
        set_gradients(params, step, 65536.0)
        if step == 0:  # states are made, and the plan
            scaler.step(optimizer)
            scaler.update()
            continue
        with no_sync():
            scaler.step(optimizer)
            scaler.update()
            fusedtrain.zero_grad(optimizer, set_to_none=False)
            _ = optimizer.last_step_skipped, optimizer.grad_norm, optimizer.skipped_steps
    assert not optimizer.last_step_skipped


def test_side_stream() -> None:
    """The step runs behind the slow work that makes its gradients."""
    params = [nn.Parameter(torch.zeros(100_003, device="cuda"))]
    optimizer = optim.SGD(params, lr=1.0)
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    source = torch.ones_like(params[0])
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        params[0].grad.copy_(source)
        optimizer.step()
    side.synchronize()
    assert (params[0] == -1).all()


def test_more_parameters_than_one_launch_takes() -> None:
    params = [nn.Parameter(torch.ones(3, device="cuda")) for _ in range(1500)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = optim.SGD(params, lr=0.5, max_grad_norm=1e9)
    optimizer.step()
    assert all((p == 0.5).all() for p in params)
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(optimizer.grad_norm.item(), 4500**0.5)


def test_a_parameter_of_more_than_2_31_elements() -> None:
    count = 2**31 + 7
    if torch.cuda.mem_get_info()[0] < 5 * 2 * count:
        pytest.skip("needs more free memory on the GPU: never in CI")
    p = nn.Parameter(torch.zeros(count, dtype=torch.float16, device="cuda"))
    p.grad = torch.ones_like(p)
    optim.SGD([p], lr=0.5).step()
    assert p[-1] == -0.5
    assert p[2**31 - 1] == -0.5
    fusedtrain.zero_grad([p], set_to_none=False)
    assert p.grad[-1] == 0
