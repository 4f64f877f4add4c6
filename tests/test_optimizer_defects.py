"""Defects of other fused optimizers (D1 to D20 of the survey): theirs shown, ours absent.

Where the other project is torch, a test first shows that torch has the defect: when that part
fails, torch has been mended, and the test may be cut down to ours. Apex, DeepSpeed, bitsandbytes
and FlashOptim are not installed: what they do is told in a comment.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedtrain

MENDED = "torch has mended this defect: keep only the half of the test that is about fusedtrain"

# Options that bring every state into being.
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01},
    "SGDW": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "caution": True},
    "LARS": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "trust_coeff": 0.1},
    "Adam": {"lr": 0.02, "amsgrad": True, "weight_decay": 0.01},
    "AdamW": {"lr": 0.02},
    "NAdamW": {"lr": 0.02, "caution": True},
    "LAMB": {"lr": 0.02, "caution": True},
    "Lion": {"lr": 0.02, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.02, "momentum": 0.9, "centered": True},
    "RMSpropTF": {"lr": 0.02, "momentum": 0.9, "centered": True, "weight_decay": 0.01},
    "Adagrad": {"lr": 0.1, "weight_decay": 0.01},
    "NovoGrad": {"lr": 0.02, "amsgrad": True, "weight_decay": 0.01},
}
ALL = pytest.mark.parametrize("name", OPTIONS)


def make(name: str, params: Iterable[Any], **options: Any) -> fusedtrain.optim.FusedOptimizer:
    optimizer = getattr(fusedtrain.optim, name)(params, **{**OPTIONS[name], **options})
    assert isinstance(optimizer, fusedtrain.optim.FusedOptimizer)
    return optimizer


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def give_gradients(params: Iterable[Tensor], seed: int, scale: float = 1.0) -> None:
    """The same to every list of equal shapes, and different from seed to seed."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def memory(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of all that a step may write."""
    found = {}
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        found[f"{i}"] = p.detach().clone()
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{i} {key}"] = torch.as_tensor(value).detach().clone()
    return found


def bits(tensor: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(-1).view(sizes[tensor.element_size()])


def assert_same_bits(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    for key, value in before.items():
        assert value.dtype == after[key].dtype, key
        assert torch.equal(bits(value), bits(after[key])), key


def nearly_equal(a: Tensor, b: Tensor, ulps: float = 8.0) -> bool:
    limit = ulps * torch.finfo(a.dtype).eps
    return bool(((a - b).abs() <= limit * b.abs().clamp_min(1)).all())


def numbers(value: float, *, like: Tensor | None = None) -> Tensor:
    return torch.tensor(value) if like is None else torch.full_like(like, value)


# --- D1: a first step that is skipped


def first_step_skipped_then_no_gradient(optimizer: torch.optim.Optimizer, p: Tensor) -> None:
    p.grad = torch.full_like(p, float("inf"))
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    p.grad = torch.zeros_like(p)
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    optimizer.step()


@pytest.fixture
def uninitialised_memory_is_nan() -> Iterable[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialised_memory_is_nan")
def test_d1_torch_leaves_momentum_uninitialised() -> None:
    (p,) = parameters((33,))
    first_step_skipped_then_no_gradient(torch.optim.SGD([p], momentum=0.9, fused=True), p)
    assert p.isnan().all(), MENDED


@pytest.mark.usefixtures("uninitialised_memory_is_nan")
@ALL
def test_d1_first_step_skipped(name: str) -> None:
    (p,) = parameters((33,))
    kept = p.detach().clone()
    first_step_skipped_then_no_gradient(make(name, [p], weight_decay=0.0), p)
    assert torch.equal(p, kept)


@pytest.mark.parametrize("name", ["SGD", "LARS"])
def test_d1_the_first_applied_step_is_not_dampened(name: str) -> None:
    """The buffer starts with the whole gradient at the first step that counts."""
    pair = [nn.Parameter(torch.ones(9)) for _ in range(2)]
    optimizers = [make(name, [p]) for p in pair]
    for _ in range(2):
        pair[0].grad = torch.full_like(pair[0], float("nan"))
        optimizers[0].found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
        optimizers[0].step()
    optimizers[0].found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    for seed in range(3):
        for p, optimizer in zip(pair, optimizers, strict=True):
            give_gradients([p], seed)
            optimizer.step()
    assert torch.equal(pair[0], pair[1])


# --- D2: sums of found_inf


def test_d2_torch_skips_only_at_exactly_1() -> None:
    (p,) = parameters((9,))
    optimizer = torch.optim.Adam([p], fused=True)
    p.grad = torch.full_like(p, float("nan"))
    optimizer.found_inf = torch.tensor(2.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert p.isnan().all(), MENDED
    assert optimizer.state[p]["step"] == -1, MENDED


@pytest.mark.parametrize("found_inf", [1.0, 2.0, 17.0, 0.5, float("inf"), float("nan")])
@ALL
def test_d2_every_found_inf_but_0_skips(name: str, found_inf: float) -> None:
    (p,) = parameters((9,))
    optimizer = make(name, [p])
    give_gradients([p], 0)
    optimizer.step()
    before = memory(optimizer)
    p.grad = torch.full_like(p, float("nan"))
    optimizer.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]
    optimizer.step()
    assert_same_bits(before, memory(optimizer))
    assert optimizer.last_step_skipped
    assert optimizer.skipped_steps == 1
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    give_gradients([p], 1)
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert not torch.equal(p, before["0"])


# D3 (ShardedGradScaler does not reduce found_inf): tests/test_optimizer_ranks.py.


# --- D4, D12, D14, D17, D20: strides
#
# Apex checks each tensor, but not that the lists agree, so mixed layouts permute the update (D12).
# DeepSpeed's CPU optimizers update a contiguous copy of the parameter and drop it (D14).
# bitsandbytes replaces channels_last parameters by contiguous ones (D17). FlashOptim raises (D20).


def channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def channels_last_3d(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last_3d)


def contiguous(t: Tensor) -> Tensor:
    return t.contiguous().clone()


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def reversed_dims(t: Tensor) -> Tensor:
    order = list(range(t.dim()))[::-1]
    return t.permute(order).contiguous().permute(order)


def sliced(t: Tensor) -> Tensor:
    """Every other column of a larger tensor: not dense."""
    larger = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), 99.0, dtype=t.dtype)
    larger[..., 1::2] = t
    return larger[..., 1::2]


def offset(t: Tensor) -> Tensor:
    larger = torch.full((t.numel() + 3,), 99.0, dtype=t.dtype)
    larger[3:] = t.flatten()
    return larger[3:].view(t.shape)


IMAGE, VOLUME, MATRIX = (5, 6, 4, 3), (3, 4, 2, 3, 5), (37, 53)
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "channels_last param": (IMAGE, channels_last, contiguous),
    "channels_last grad": (IMAGE, contiguous, channels_last),
    "both channels_last": (IMAGE, channels_last, channels_last),
    "reversed grad": (IMAGE, channels_last, reversed_dims),
    "channels_last_3d param": (VOLUME, channels_last_3d, contiguous),
    "channels_last_3d grad": (VOLUME, contiguous, channels_last_3d),
    "transposed weight": (MATRIX, transposed, contiguous),
    "transposed grad": (MATRIX, contiguous, transposed),
    "sliced param": (MATRIX, sliced, contiguous),
    "sliced grad": (MATRIX, contiguous, sliced),
    "sliced, transposed": (MATRIX, sliced, transposed),
    "both sliced": (MATRIX, sliced, sliced),
    "offset": (MATRIX, offset, offset),
    "sliced channels": (IMAGE, lambda t: sliced(channels_last(t)), channels_last),
}


def after_steps(optimizer: torch.optim.Optimizer, params: list[Tensor], grad: Any) -> list[Tensor]:
    """Parameters after three steps; gradients laid out by `grad`."""
    for seed in range(3):
        give_gradients(params, seed)
        for p in params:
            assert p.grad is not None
            p.grad = grad(p.grad)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("which", ["SGD", "Adam"])
def test_d4_torch_ignores_strides(which: str) -> None:
    values = torch.randn(IMAGE)
    results = []
    for fused in (False, True):
        p = nn.Parameter(channels_last(values))
        optimizer = getattr(torch.optim, which)([p], lr=0.1, fused=fused)
        results += after_steps(optimizer, [p], contiguous)
    assert (results[0] - results[1]).abs().max() > 0.01, MENDED


@pytest.mark.parametrize("layout", LAYOUTS)
@ALL
def test_d4_d12_d14_d17_d20_any_strides(name: str, layout: str) -> None:
    """As in contiguous memory; parameters keep their memory and strides."""
    shape, lay_param, lay_grad = LAYOUTS[layout]
    values = torch.randn(shape)
    # A second one of another layout, in the same call.
    plain, mixed = ([nn.Parameter(v.clone()) for v in (values, -values)] for _ in range(2))
    mixed[0].data = lay_param(values)
    kept = [(p.data_ptr(), p.stride(), p.untyped_storage().data_ptr()) for p in mixed]
    start = [p.detach().clone() for p in mixed]
    want = after_steps(make(name, plain), list(plain), contiguous)
    optimizer = make(name, mixed)
    got = after_steps(optimizer, list(mixed), lay_grad)
    assert kept == [(p.data_ptr(), p.stride(), p.untyped_storage().data_ptr()) for p in mixed]
    for ours, theirs, first in zip(got, want, start, strict=True):
        assert nearly_equal(ours, theirs)
        assert (ours - first).abs().max() > 1e-4  # it has moved
    for p in mixed:
        for key, value in optimizer.state[p].items():
            if value.shape == p.shape:
                assert value.stride() == torch.empty_like(p).stride(), key


def test_what_lies_beside_a_sliced_parameter_stays() -> None:
    base = torch.randn(8, 20)
    kept = base.clone()
    p = nn.Parameter(torch.empty(0))
    p.data = base[1:7, 2:18:2]
    optimizer = make("AdamW", [p], ema_decay=0.9)
    after_steps(optimizer, [p], contiguous)
    inside = torch.zeros_like(base, dtype=torch.bool)
    inside[1:7, 2:18:2] = True
    assert torch.equal(base[~inside], kept[~inside])
    assert (base[inside] != kept[inside]).all()


@ALL
def test_d12_states_of_another_layout(name: str) -> None:
    """A checkpoint of a contiguous model, loaded by one in channels_last."""
    values = torch.randn(IMAGE)
    p, q = nn.Parameter(values.clone()), nn.Parameter(channels_last(values))
    first = make(name, [p], ema_decay=0.9)
    after_steps(first, [p], contiguous)
    q.data.copy_(p)
    second = make(name, [q], ema_decay=0.9)
    second.load_state_dict(first.state_dict())
    for optimizer, x in ((first, p), (second, q)):
        after_steps(optimizer, [x], contiguous)
    assert nearly_equal(q.detach(), p.detach())
    assert nearly_equal(second.state[q]["ema"], first.state[p]["ema"])
    assert q.is_contiguous(memory_format=torch.channels_last)


# --- D5: a loss scale below 1


def scaled_below_1(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, p: Tensor
) -> None:
    """The gradient is finite, and infinite once it is divided by the scale."""
    scaler.scale(torch.zeros(()))  # creates the scale
    p.grad = torch.full_like(p, 1e36)
    scaler.step(optimizer)


def test_d5_torch_looks_at_the_scaled_gradient() -> None:
    (p,) = parameters((9,))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-10)
    scaled_below_1(torch.optim.Adam([p], fused=True), scaler, p)
    assert not p.isfinite().all(), MENDED


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, fusedtrain.amp.GradScaler])
@ALL
def test_d5_a_scale_below_1(name: str, kind: type[torch.amp.GradScaler]) -> None:
    (p,) = parameters((9,))
    optimizer = make(name, [p])
    kept = p.detach().clone()
    scaler = kind("cpu", init_scale=2.0**-10)
    scaled_below_1(optimizer, scaler, p)
    assert torch.equal(p, kept)
    assert optimizer.last_step_skipped
    scaler.update()
    if kind is fusedtrain.amp.GradScaler:
        assert scaler.get_scale() == 2.0**-11


# --- D6: gradients after a step


@pytest.mark.parametrize(("fused", "left"), [(False, 0.5), (True, 512.0)])
def test_d6_torch_leaves_scaled_or_unscaled_gradients(fused: bool, left: float) -> None:
    (p,) = parameters((2,))
    optimizer = torch.optim.SGD([p], fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    p.grad = torch.tensor([512.0, float("inf")])
    scaler.step(optimizer)
    assert p.grad[0] == left, MENDED


@pytest.mark.parametrize("skipped", [False, True], ids=["applied", "skipped"])
@pytest.mark.parametrize("mode", ["none", "unscaled", "zero"])
@pytest.mark.parametrize("lay", [contiguous, transposed, sliced])
@ALL
def test_d6_gradients_after_a_step(name: str, lay: Any, mode: str, skipped: bool) -> None:
    params = parameters((7, 11), (0,), (5,))
    # LAMB has a clipping norm of its own.
    optimizer = make(name, params, gradient_writeback=mode, max_grad_norm=1.0)
    scaler = fusedtrain.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    give_gradients(params, 0, scale=1024.0)
    assert params[0].grad is not None
    params[0].grad = lay(params[0].grad)
    if skipped:
        params[0].grad[3, 4] = float("inf")
    grads = [p.grad for p in params]
    before = [p.grad.clone() for p in params if p.grad is not None]
    scaler.step(optimizer)
    assert bool(optimizer.last_step_skipped) == skipped
    norm = torch.cat([(g / 1024).flatten() for g in before]).norm()
    for p, kept, grad in zip(params, before, grads, strict=True):
        assert p.grad is grad
        if mode == "zero":
            assert (p.grad == 0).all()
        elif mode == "none" or skipped:
            assert torch.equal(p.grad, kept if mode == "none" else kept / 1024)
        else:
            eps = 0.0 if name == "LAMB" else 1e-6
            assert nearly_equal(p.grad, kept / 1024 / (norm + eps))


# --- D7, D8: float32 states of 16-bit parameters
#
# Apex's FusedAdam keeps float32 moments of 16-bit parameters; torch's load_state_dict makes them
# 16-bit ones, which Apex's kernels then read and write as float32, past their end (D8).


def test_d7_torch_cuts_loaded_states() -> None:
    (p,) = parameters((9,), dtype=torch.bfloat16)
    optimizer = torch.optim.Adam([p])
    give_gradients([p], 0)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.randn(9)
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["exp_avg"].dtype is torch.bfloat16, MENDED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("master_weights", [False, True])
@ALL
def test_d7_d8_float32_states_survive(name: str, master_weights: bool, dtype: torch.dtype) -> None:
    options = {
        "state_dtype": torch.float32,
        "ema_decay": 0.9,
        "master_weights": master_weights,
    }
    runs = [parameters((33, 3), (7,), dtype=dtype) for _ in range(2)]
    first = make(name, runs[0], **options)
    for seed in range(3):
        give_gradients(runs[0], seed)
        first.step()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    for p, q in zip(*runs, strict=True):
        q.data.copy_(p.detach())
    second = make(name, runs[1], **options)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert_same_bits(memory(first), memory(second))
    for p in runs[1]:
        states = [v for k, v in second.state[p].items() if v.shape == p.shape]
        assert len(states) >= 1
        assert all(v.dtype is torch.float32 for v in states)
        assert ("master_param" in second.state[p]) == master_weights
    for optimizer, params in ((first, runs[0]), (second, runs[1])):
        give_gradients(params, 5)
        optimizer.step()
    if name in ("SGD", "SGDW", "LARS", "Lion") or not master_weights:
        assert_same_bits(memory(first), memory(second))
    for p, q in zip(*runs, strict=True):
        assert torch.equal(p, q)


# --- D9: master weights
#
# Apex's FusedAdam allocates float32 master weights of bfloat16 parameters and never uses them.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ALL
def test_d9_master_weights_add_up_small_steps(name: str, dtype: torch.dtype) -> None:
    """Each step is far below half an ulp of the parameter."""
    momentum = ("SGD", "SGDW", "LARS", "RMSprop", "RMSpropTF")  # lengthens the step tenfold
    lr = 1e-5 if name in momentum else 1e-4
    runs = []
    for master_weights in (False, True):
        p = nn.Parameter(torch.full((33,), 1.5, dtype=dtype))
        options: dict[str, Any] = {"lr": lr, "weight_decay": 0.0}
        if name.startswith("RMSprop"):
            options["centered"] = False
        optimizer = make(name, [p], master_weights=master_weights, **options)
        for _ in range(40):
            p.grad = torch.ones_like(p)
            optimizer.step()
            if master_weights:
                master = optimizer.state[p]["master_param"]
                assert master.dtype is torch.float32
                assert torch.equal(p, master.to(dtype))
        runs.append(p)
    assert (runs[0] == 1.5).all()
    master = optimizer.state[p]["master_param"]
    assert (master < 1.5 - 1e-4).all()
    assert (master > 1.4).all()


# --- D10: float32 states are not rounded
#
# Apex's capturable Adam casts the new moments to the parameter's dtype before it stores them as
# float32: second moments of small gradients underflow.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdamW", "LAMB", "RMSprop", "Adagrad"])
def test_d10_float32_states_are_not_rounded(name: str, dtype: torch.dtype) -> None:
    half = nn.Parameter(torch.randn(65).to(dtype))
    full = nn.Parameter(half.detach().float())
    options = {"weight_decay": 0.0, "caution": False} if name in ("NAdamW", "LAMB") else {}
    options |= {"weight_decay": 0.0}
    with_half = make(name, [half], state_dtype=torch.float32, **options)
    with_full = make(name, [full], **options)
    for seed in range(3):
        give_gradients([half], seed, scale=1e-4)
        assert half.grad is not None
        full.grad = half.grad.float()
        with_half.step()
        with_full.step()
    for key, value in with_full.state[full].items():
        assert torch.equal(with_half.state[half][key], value), key
        if key in ("exp_avg_sq", "square_avg", "sum"):
            assert (value > 0).all()
            assert (value < 6e-8).any()  # float16 has nothing below


# --- D11: empty tensors
#
# Apex and DeepSpeed launch what is pending from within the loop over chunks: an empty last tensor
# has none, and updates are lost. An empty tensor in the last slot writes out of bounds.


@pytest.mark.parametrize(
    "places",
    [(0,), (1,), (3,), (0, 1, 2, 3), (3, 3, 3), (0, 0), tuple([3] * 120), tuple([1] * 37)],
    ids=lambda places: f"{len(places)} at {places[0]}",
)
@ALL
def test_d11_empty_tensors(name: str, places: tuple[int, ...]) -> None:
    shapes = [(17, 3), (1,), (40000,)]
    plain = parameters(*shapes)
    others = [nn.Parameter(p.detach().clone()) for p in plain]
    with_empty: list[Tensor] = list(others)
    for place in sorted(places, reverse=True):
        with_empty.insert(place, nn.Parameter(torch.empty(0 if place else (2, 0, 3))))
    optimizers = [make(name, plain, ema_decay=0.5), make(name, with_empty, ema_decay=0.5)]
    for seed in range(2):
        give_gradients(plain, seed)
        for p, q in zip(plain, others, strict=True):
            q.grad = p.grad
        for p in with_empty:
            if p.numel() == 0:
                p.grad = torch.empty_like(p)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(plain, others, strict=True):
        assert torch.equal(p, q)


@ALL
def test_d11_nothing_but_empty_tensors(name: str) -> None:
    params = parameters((0,), (3, 0))
    optimizer = make(name, params, max_grad_norm=1.0, ema_decay=0.9)
    scaler = fusedtrain.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    give_gradients(params, 0)
    scaler.step(optimizer)
    scaler.update()
    assert not optimizer.last_step_skipped
    assert optimizer.grad_norm == 0


# --- D13: no host synchronisation
#
# Apex's clip_grad_norm_ hands a tensor to a float parameter, which waits for the device.


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket
        waiting = (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal)
        self.count += name in (*waiting, torch.ops.aten.is_nonzero, torch.ops.aten.nonzero)
        return func(*args, **(kwargs or {}))


def test_d13_torch_reads_found_inf() -> None:
    (p,) = parameters((9,))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    give_gradients([p], 0)
    with Reads() as reads:
        scaler.step(torch.optim.SGD([p], fused=False))
    assert reads.count > 0, MENDED


@pytest.mark.parametrize("hysteresis", [1, 2])
@ALL
def test_d13_no_read(name: str, hysteresis: int) -> None:
    params = parameters((9, 2), (4,), (3, 2))
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": torch.tensor(0.1)}]
    optimizer = make(name, groups, max_grad_norm=1.0, ema_decay=0.9)
    scheduler = fusedtrain.optim.AppliedStepScheduler(
        optimizer, lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)
    )
    scaler = fusedtrain.amp.GradScaler("cpu", hysteresis=hysteresis)
    scaler.scale(torch.zeros(()))
    for seed in range(3):
        give_gradients(params, seed)
        if seed == 1:
            params[0].grad = None
        with Reads() as reads:
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            _ = (optimizer.last_step_skipped, optimizer.grad_norm, optimizer.applied_steps)
        assert reads.count == 0


# --- D15: the sign of 0
#
# DeepSpeed's FusedLion takes the sign of 0 for -1: parameters without gradient drift.


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_d15_lion_stays_without_gradient(zero: float) -> None:
    (p,) = parameters((65,))
    kept = p.detach().clone()
    optimizer = fusedtrain.optim.Lion([p], lr=0.1)
    for _ in range(3):
        p.grad = torch.full_like(p, zero)
        optimizer.step()
    assert torch.equal(p, kept)


# --- D16: step counts
#
# DeepSpeed's FusedAdam counts in the last parameter's state, once for each dtype.


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdamW", "RMSprop", "Adagrad", "NovoGrad"])
def test_d16_step_counts(name: str) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    params = [nn.Parameter(torch.randn(5).to(d)) for d in dtypes]
    groups = [{"params": params[:2]}, {"params": params[2:3], "lr": 0.1}, {"params": params[3:]}]
    optimizer = make(name, groups)
    want = [0] * 5
    for seed in range(6):
        give_gradients(params, seed)
        for i, p in enumerate(params):
            if (seed + i) % 3 == 0:
                p.grad = None
            else:
                want[i] += 1
        optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == want
    saved = optimizer.state_dict()["state"]
    assert [float(saved[i]["step"]) for i in range(5)] == want


# --- D18, D19: a skipped step
#
# bitsandbytes zeroes the moments of elements whose gradient is not finite and goes on (D18). Apex's
# reversible Adam and DeepSpeed's CPU rollback invert the update: not to the bit, and Apex only one
# element of four (D19).


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [(0, 0), (1, 20000), (2, -1)])
@ALL
def test_d18_one_bad_number_skips_all(name: str, where: tuple[int, int], bad: float) -> None:
    params = parameters((17,), (40000,), (5,))
    optimizer = make(name, params, ema_decay=0.9)
    scaler = fusedtrain.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    give_gradients(params, 0, scale=65536)
    scaler.step(optimizer)
    scaler.update()
    before = memory(optimizer)
    give_gradients(params, 1, scale=65536)
    grad = params[where[0]].grad
    assert grad is not None
    grad[where[1]] = bad
    scaler.step(optimizer)
    scaler.update()
    assert_same_bits(before, memory(optimizer))
    assert optimizer.last_step_skipped
    assert scaler.get_scale() == 32768
    counts = [float(count) for _, count in optimizer.nonfinite_gradients()]
    assert counts == [float(i == where[0]) for i in range(3)]


PATTERNS = [(1, 0, 0, 0), (1, 1, 0, 0), (0, 1, 0, 0), (0, 1, 1, 0), (1, 0, 1, 0), (0, 0, 0, 1)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@ALL
def test_d19_a_skipped_step_never_was(
    name: str, dtype: torch.dtype, pattern: tuple[int, ...]
) -> None:
    """Every bit of the run is that of one without the bad step."""
    runs = [parameters((33,), (7, 3), dtype=dtype)]
    runs.append([nn.Parameter(p.detach().clone()) for p in runs[0]])
    options = {"ema_decay": 0.9, "master_weights": True, "state_dtype": torch.float32}
    if dtype is torch.float64:
        options["state_dtype"] = None
    optimizers = [make(name, params, **options) for params in runs]
    scaler = fusedtrain.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6)
    scaler.scale(torch.zeros(()))
    for seed, skip in enumerate(pattern):
        give_gradients(runs[0], seed, scale=8.0)
        give_gradients(runs[1], seed, scale=8.0)
        if skip:
            assert runs[0][1].grad is not None
            runs[0][1].grad[2, 1] = float("inf")
        scaler.step(optimizers[0])
        scaler.update(8.0)
        if not skip:
            scaler.step(optimizers[1])
            scaler.update(8.0)
    assert_same_bits(memory(optimizers[1]), memory(optimizers[0]))
    assert optimizers[0].skipped_steps == sum(pattern)
    assert optimizers[0].applied_steps == len(pattern) - sum(pattern)
