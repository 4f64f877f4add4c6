"""Behaviour that only a GPU shows: streams, graphs, devices, large and misaligned tensors, memory.

The ops are called through the dispatcher: CUDA kernels, or Triton's with FUSEDTRAIN_BACKEND=triton.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.reference import ACTIVATIONS
from helpers.activations import assert_close, backward_scale, public, truth
from helpers.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


# Parameters on the GPU, made before anything is captured or timed.
CALLS = {
    "mish": lambda weight: F.mish,
    "elu": lambda weight: F.elu,
    "prelu": lambda weight: lambda x: F.prelu(x, weight),
}


@pytest.mark.launches_nothing("looks at the registrations")
def test_gpu_kernels_are_loaded() -> None:
    backends = fusedtrain.backend_info().backends
    expected = os.environ.get("FUSEDTRAIN_TEST_GPU_BACKEND")  # set by `make gpu`
    loaded = {name for name in ("cuda", "triton") if backends[name].loaded}
    assert loaded == {expected} if expected else loaded, fusedtrain.backend_info()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name, row in ACTIVATIONS.items():
        for op in (name, f"{name}_backward", *([] if row.tensors else [f"{name}_"])):
            assert has(f"fusedtrain::{op}", "CUDA"), op


@pytest.mark.parametrize("name", ["mish", "prelu"])
def test_side_stream_without_a_sync(name: str) -> None:
    """The op runs where the caller's stream is: behind the slow work that makes its input."""
    call = CALLS[name](torch.tensor([0.25], device="cuda"))
    source = torch.randn(1_000_003, device="cuda")
    x = torch.zeros_like(source)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        x.copy_(source)
        y = call(x)
    side.synchronize()
    torch.testing.assert_close(y, ACTIVATIONS[name].eager(source), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mish", "elu", "prelu"])
def test_cuda_graph(name: str) -> None:
    """Capture forward and backward, replay over new data."""
    row = ACTIVATIONS[name]
    call = CALLS[name](torch.tensor([0.25], device="cuda"))
    x = torch.randn(10_007, device="cuda", requires_grad=True)
    grad = torch.randn(10_007, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up, as torch demands
        for _ in range(3):
            torch.autograd.grad(call(x), x, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(x)
        (g,) = torch.autograd.grad(y, x, grad)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        want, want_g = truth(row, x, grad)
        assert_close(y.detach(), want)
        assert_close(g, want_g, backward_scale(row))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: never in CI")
@pytest.mark.parametrize("name", ["mish", "prelu"])
def test_second_device_while_the_first_is_current(name: str) -> None:
    row = ACTIVATIONS[name]
    x = torch.randn(1000, device="cuda:1", requires_grad=True)
    assert torch.cuda.current_device() == 0
    y = public(row)(x)
    y.sum().backward()
    assert torch.cuda.current_device() == 0
    assert y.device == x.grad.device == x.device
    torch.testing.assert_close(y, row.eager(x))


def test_more_than_2_to_31_elements() -> None:
    n = 2**31 + 7
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory: never in CI")
    x = torch.zeros(n, dtype=torch.float16, device="cuda")
    at = torch.tensor([0, 2**20, 2**31 - 1, 2**31, n - 1], device="cuda")
    x[at] = torch.tensor([-1.0, 7.0, -2.0, 3.0, -3.0], dtype=torch.float16, device="cuda")
    y = F.leaky_relu(x, 0.5)
    assert y[at].tolist() == [-0.5, 7.0, -1.0, 3.0, -1.5]
    g = torch.ops.fusedtrain.leaky_relu_backward(y, y, 0.5)
    assert g[at].tolist() == [-0.25, 7.0, -0.5, 3.0, -0.75]
    assert g[1].item() == 0
    F.leaky_relu(x, 0.5, inplace=True)
    assert torch.equal(x, y)
    del x, y, g
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", ["mish", "elu", "prelu"])
def test_peak_memory(name: str) -> None:
    """Forward allocates the output, backward the gradient of the input; 1 MiB for anything else."""
    row = ACTIVATIONS[name]
    x = torch.randn(1 << 24, device="cuda", requires_grad=True)
    grad = torch.ones_like(x)
    size = x.numel() * 4
    torch.autograd.grad(public(row)(x), x, grad)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = public(row)(x)
    assert torch.cuda.max_memory_allocated() - before <= size + (1 << 20)
    torch.autograd.grad(y, x, grad)
    assert torch.cuda.max_memory_allocated() - before <= 2 * size + (1 << 20)


@pytest.mark.launches_nothing("arguments are refused")
@pytest.mark.parametrize("name", ["mish", "prelu"])
def test_parameters_on_another_device_are_refused_or_torchs_error(name: str) -> None:
    if name == "mish":
        with pytest.raises(RuntimeError):
            torch.ops.fusedtrain.mish_backward(torch.randn(3), torch.randn(3, device="cuda"))
    else:
        with pytest.raises(RuntimeError):
            torch.ops.fusedtrain.prelu(torch.randn(3, device="cuda"), torch.randn(1))


def test_autocast_and_a_training_step() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Mish(), torch.nn.Flatten(),
        torch.nn.Linear(8 * 30 * 30, 10),
    ).cuda()  # fmt: skip
    x, target = torch.randn(4, 3, 32, 32).cuda(), torch.tensor([0, 1, 2, 3]).cuda()

    def step(model: torch.nn.Module, x: torch.Tensor) -> tuple[float, torch.Tensor]:
        with torch.autocast("cuda", torch.float16, enabled=x.dtype is torch.float32):
            loss = torch.nn.functional.cross_entropy(model(x), target)
        loss.backward()
        (gradient,) = (p.grad for n, p in model.named_parameters() if n == "0.weight")
        return loss.item(), gradient.double()

    exact_loss, exact = step(copy.deepcopy(model).double(), x.double())
    stock_loss, stock = step(copy.deepcopy(model), x)
    fusedtrain.convert(model)
    loss, gradient = step(model, x)
    assert abs(loss - exact_loss) < 1e-3 + 2 * abs(stock_loss - exact_loss)
    # One of 216 numbers differed by 8 % from stock's, by rounding alone.
    assert (gradient - exact).norm() <= 1.5 * (stock - exact).norm()
