"""Steps that a CUDA graph can capture, and mistakes that raise there, on a pretended GPU: a host
that waits for the device, copies from memory that is not pinned, states that every replay would
reset.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fusedtrain
from fusedtrain.reference import FAMILIES
from helpers import graphs
from helpers.optimizer_steps import assert_close, give_gradients, same, shaped
from helpers.optimizers import APEX, NAMES, make
from helpers.pretended_gpu import DEVICE, Mode, OnGpu, pretended

pytestmark = pytest.mark.usefixtures("one_thread")

# --- a CUDA graph that is not there

# A real capture refuses a host that waits for the device, and copies from host memory that is not
# pinned. The dispatcher sees what C++ reads, torch functions what Python does.
_PYTHON_READS = (
    Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__,
    Tensor.__int__, Tensor.__index__, Tensor.__contains__, torch.equal, torch.allclose,
)  # fmt: skip
_READS = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero",
    "aten::masked_select", "aten::_unique2", "aten::item",
}  # fmt: skip


class NotCapturable(Exception):
    """A call that a real capture would refuse."""


class _Functions(Mode):
    """The pretended GPU, whose copies from the host need pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.pin_memory:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        if func is Tensor.is_pinned:
            return any(t is args[0] for t in self.pinned)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func in _PYTHON_READS and any(isinstance(t, OnGpu) for t in tensors):
            raise NotCapturable(f"{func} waits for the device")
        masks = func is Tensor.__getitem__ and any(t.dtype is torch.bool for t in tensors[1:])
        if masks and isinstance(args[0], OnGpu):
            raise NotCapturable("a mask's size waits for the device")
        if func is Tensor.to:
            to = [v.type if isinstance(v, torch.device) else v
                  for v in (*args[1:], *kwargs.values())]  # fmt: skip
            on_gpu = isinstance(args[0], OnGpu)
            if on_gpu and "cpu" in to:
                raise NotCapturable("a copy to the host waits for the device")
            if not on_gpu and DEVICE in to and not any(t is args[0] for t in self.pinned):
                raise NotCapturable("a copy from host memory that is not pinned")
        if func is torch.where and any(isinstance(v, (int, float)) for v in args):
            # Torch makes a tensor of the number, which would be on no pretended GPU.
            to = args[0].device
            args = [torch.tensor(v).to(to) if isinstance(v, (int, float)) else v for v in args]
        return super().__torch_function__(func, types, args, kwargs)


class _Operators(TorchDispatchMode):
    """Refuses the operators that read from the device."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func._schema.name
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(isinstance(t, OnGpu) for t in tensors):
            both = not all(isinstance(t, OnGpu) for t in tensors)
            to_host = kwargs.get("device") == torch.device("cpu")
            if name in _READS or to_host or (name == "aten::copy_" and both):
                raise NotCapturable(f"{name} waits for the device")
        return func(*args, **kwargs)


@contextmanager
def capture(kernels: bool = True) -> Iterator[None]:
    """Within it a CUDA graph is said to be captured.

    Args:
        kernels: False: the optimizers' ops run in plain torch.
    """
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.multiple(
                torch.cuda, is_initialized=lambda: True, is_current_stream_capturing=lambda: True
            )
        )
        if not kernels:
            for family in ("optimizers", "scaling"):
                module = importlib.import_module(f"fusedtrain.reference.{family}")
                for name in FAMILIES[family]:
                    plain = mock.patch.object(torch.ops.fusedtrain, name, getattr(module, name))
                    stack.enter_context(plain)
        stack.enter_context(_Functions())
        stack.enter_context(_Operators())
        yield


# --- tests

SIZES = [(3, 5), (7,), (), (4, 3, 2, 2)]
# Options of a step, and the optimizers that are tried with them.
OPTIONS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "clipped": (NAMES + APEX, {"ema_decay": 0.9}),
    "clipped by unit": (["SGD"], {"agc": 0.01, "gradient_writeback": "unscaled"}),
    "masters": (["AdamW"], {"master_weights": True, "max_grad_norm": 1.0}),
    "split masters": (["AdamW"], {"master_weights": "split24", "max_grad_norm": 1.0}),
    "stochastic": (["AdamW"], {"stochastic_rounding": True, "gradient_writeback": "zero"}),
}
CASES = [
    (name, which, kernels)
    for which, (names, _) in OPTIONS.items()
    for name in names
    # The formula of stochastic rounding asks for strides by the device that is the pretended GPU's.
    for kernels in ([True] if which == "stochastic" else [True, False])
]


def on_gpu(tensors: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(t.detach().to(DEVICE)) for t in tensors]


def gradients(params: list[nn.Parameter], seed: int) -> None:
    """The same numbers on either device, scaled by 8."""
    on_cpu = [nn.Parameter(torch.zeros(p.shape, dtype=p.dtype)) for p in params]
    give_gradients(on_cpu, seed, 8.0)
    for p, q in zip(params, on_cpu, strict=True):
        assert q.grad is not None
        p.grad = q.grad.to(p.device)


def started(device: str, **options: Any) -> fusedtrain.amp.GradScaler:
    scaler = fusedtrain.amp.GradScaler(device, init_scale=8.0, **options)
    scaler.scale(torch.ones(()).to(device))
    return scaler


def numbers(params: list[nn.Parameter]) -> list[Tensor]:
    return [(p.on_cpu if isinstance(p, OnGpu) else p).detach().float() for p in params]


@pytest.mark.parametrize(
    ("name", "which", "kernels"),
    CASES,
    ids=lambda v: str(v) if isinstance(v, str) else f"kernels={v}",
)
def test_a_step_can_be_captured(name: str, which: str, kernels: bool) -> None:
    """With a learning rate that is a tensor: it changes in place. The numbers are the CPU's."""
    options = OPTIONS[which][1]
    dtype = torch.bfloat16 if which in ("masters", "split masters", "stochastic") else torch.float32
    with pretended():
        start = shaped(*SIZES, dtype=dtype)
        runs = []
        for device in ("cpu", DEVICE):
            params = on_gpu(start) if device == DEVICE else [nn.Parameter(p.clone()) for p in start]
            rate = torch.tensor(0.1).to(device)
            optimizer = make(name, params, lr=rate, **options)
            scaler = started(device, hysteresis=2)
            for seed in range(3):
                gradients(params, seed)
                rate.fill_(0.1 / (seed + 1))
                if seed and device == DEVICE:
                    with capture(kernels):
                        scaler.step(optimizer)
                        scaler.update()
                        fusedtrain.zero_grad(optimizer, set_to_none=False)
                        _ = optimizer.last_step_skipped, optimizer.grad_norm
                else:
                    scaler.step(optimizer)
                    scaler.update()
            runs.append(numbers(params))
    assert not same(runs[0], numbers(start))
    if kernels:
        assert same(runs[1], runs[0])
    else:
        assert_close(runs[1], runs[0], 2.0**16 if "masters" in which else 64)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, fusedtrain.amp.GradScaler])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_other_ways_of_scaling(kind: Any, unscale: bool) -> None:
    """torch's scaler; gradients that the script unscales and clips."""
    with pretended():
        params = on_gpu(shaped(*SIZES))
        optimizer = make("AdamW", params, lr=torch.tensor(0.1).to(DEVICE))
        scaler = kind(DEVICE, init_scale=8.0)
        scaler.scale(torch.ones(()).to(DEVICE))
        for seed in range(2):
            gradients(params, seed)
            if not seed:
                scaler.step(optimizer)
                scaler.update()
        with capture():
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(params, 1.0, foreach=False)
            scaler.step(optimizer)
            scaler.update()
        assert int(optimizer.applied_steps.cpu()) == 2


def test_a_pretended_capture_refuses_what_a_real_one_does() -> None:
    with pretended():
        x, host = torch.ones(3).to(DEVICE), torch.ones(3)
        number = x.sum()
        reads: list[Any] = [
            number.item, lambda: float(number), lambda: bool(number > 1), x.tolist, x.cpu,
            lambda: x.to("cpu"), lambda: x.nonzero(), lambda: x[x > 0], lambda: torch.equal(x, x),
            lambda: host.to(DEVICE), lambda: x.copy_(host), lambda: host.copy_(x),
        ]  # fmt: skip
        with capture():
            for read in reads:
                with pytest.raises(NotCapturable):
                    read()
            assert x.add(1).device.type == DEVICE
            host.pin_memory().to(DEVICE)
        assert float(number.cpu()) == 3


def test_what_replays_would_reset_raises() -> None:
    with pretended():
        params = on_gpu(shaped(*SIZES))
        optimizer = fusedtrain.optim.AdamW(params, lr=0.1)
        gradients(params, 0)
        with capture(), pytest.raises(RuntimeError, match="the state of AdamW would be reset"):
            optimizer.step()
        optimizer.step()
        with capture():
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        with capture(), pytest.raises(RuntimeError, match="the state of AdamW would be reset"):
            optimizer.step()
        scaler = fusedtrain.amp.GradScaler(DEVICE, hysteresis=2)
        loss = torch.ones(()).to(DEVICE)
        with capture(), pytest.raises(RuntimeError, match="the loss scale would be reset"):
            scaler.scale(loss)
        scaler.scale(loss)
        gradients(params, 1)
        optimizer.step()
        with capture():
            scaler.step(optimizer)
            with pytest.raises(RuntimeError, match="hysteresis of the loss scale would be reset"):
                scaler.update()


def test_a_learning_rate_in_host_memory_raises() -> None:
    """Without a capture it is copied at each step."""
    with pretended():
        params = on_gpu(shaped(*SIZES))
        rate = torch.tensor(0.1)
        optimizer = fusedtrain.optim.AdamW(params, lr=rate)
        gradients(params, 0)
        optimizer.step()
        with (
            capture(),
            pytest.raises(RuntimeError, match=r"learning rate.* on the CPU"),
        ):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = rate.to(DEVICE)
        with capture():
            optimizer.step()


@pytest.mark.parametrize("name", ["NAdamW", "SGDW", "Lion", "RMSpropTF", "LAMB"])
def test_corrected_decay_refers_to_the_first_rate(name: str) -> None:
    """Also where the rate is a tensor, which schedulers write to."""
    runs = []
    for first in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        params = shaped(*SIZES, dtype=torch.float64)
        kind: Any = getattr(fusedtrain.optim, name)
        optimizer = kind(params, lr=first, weight_decay=0.1, corrected_weight_decay=True)
        for seed in range(3):
            give_gradients(params, seed)
            rate = 0.1 / (seed + 1)
            if isinstance(first, Tensor):
                first.fill_(rate)
            else:
                optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        runs.append(params)
    assert same(*runs)


@pytest.mark.parametrize("convert", [False, True], ids=["stock", "converted"])
def test_the_step_that_the_gpu_captures(convert: bool) -> None:
    """The rehearsal of test_gpu_graphs.py: eager on the CPU; a rate of 0 moves no parameter."""
    seen: list[float] = []

    def replayed(step: graphs.Step) -> graphs.Step:
        def counted() -> None:
            step()
            seen.append(1.0)

        return counted

    results = graphs.train("AdamW", "cpu", replayed, convert)
    assert len(seen) == len(graphs.RATES)
    assert results["scales"][graphs.OVERFLOWS] == results["scales"][graphs.OVERFLOWS - 1] / 2
    assert results["losses"].isfinite().sum() == len(graphs.RATES) - 1
    assert all(value.isfinite().all() for n, value in results.items() if n != "losses")


@pytest.mark.parametrize("convert", [False, True], ids=["stock", "converted"])
def test_forward_and_backward_can_be_captured(convert: bool) -> None:
    cpu = graphs.network(convert, "cpu")
    with pretended():
        gpu = graphs.network(convert, "cpu")
        for module in gpu.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(p.detach().to(DEVICE)))
            for name, b in list(module.named_buffers(recurse=False)):
                module.register_buffer(name, b.to(DEVICE))
        x = torch.randn(8, 3, 10, 10)
        for model, data in ((cpu, x), (gpu, x.to(DEVICE))):
            optimizer = fusedtrain.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=1.0)
            scaler = fusedtrain.amp.GradScaler(data.device.type)
            for captures in (False, model is gpu):
                with capture() if captures else nullcontext():
                    fusedtrain.zero_grad(optimizer, set_to_none=False)
                    loss = model(data).square().mean()
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
        results = [numbers(list(model.parameters())) for model in (cpu, gpu)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
