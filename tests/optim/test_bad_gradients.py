"""One gradient that is not finite, or that alone is not 0, wherever it is: in each tensor, chunk,
unit, thread and lane of a vector. CPU, emulated CUDA, interpreted Triton; on a GPU the real ones.

Kernels add up what their lanes, warps, blocks and launches have found. A sum that forgets one of
them is right in nearly every test, and trains on nan.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusedtrain.reference import optimizers
from helpers.backends import BACKENDS, HAS_GPU, Emulated
from helpers.optimizer_cases import BF16, F16, F32, F64, Case, Spec, bits
from helpers.optimizers import busy

BAD = (math.inf, -math.inf, math.nan)
CHUNK, THREADS, WARP = 4096, 256, 32  # of the CUDA kernels


class Backend:
    """The ops of a backend, and the device that they want tensors on."""

    def __init__(self, name: str) -> None:
        self.kernels = BACKENDS[name]()
        if isinstance(self.kernels, Emulated):
            self.kernels.orders = ("shuffled",)
        self.interpreted = name == "triton" and not HAS_GPU
        self.device = self.kernels.device

    def step(self, case: Case) -> Tensor:
        return self.kernels("optimizer_step", *case.arguments(), None, None)

    def measure(self, case: Case) -> Tensor:
        return self.kernels("measure_gradients", *case.arguments()).cpu()

    def some(self, places: list[int]) -> list[int]:
        """The interpreter takes 1 ms a program: it gets the ends and every 29th place."""
        return sorted({*places[:2], *places[::29], *places[-1:]}) if self.interpreted else places


@pytest.fixture(params=[name for name in BACKENDS if name != "reference"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param)


def without_gradients(case: Case) -> Case:
    for grad in case.grads:
        grad.zero_()
    return case


@pytest.mark.slow
@pytest.mark.parametrize("trial", [0, 1])
def test_the_only_bad_tensor(backend: Backend, trial: int) -> None:
    """More tensors than a warp has lanes: no bit of any changes, and the host is told of one."""
    count = WARP + 5
    specs = [Spec((1 + i % 3,)) for i in range(count)]
    case = Case("adam", specs, [busy("adam")], measures=1, trial=trial).to(backend.device)
    before = {name: bits(t.cpu()) for name, t in case.written() if name != "control"}
    for i in backend.some([*range(count)]):
        good = case.grads[i][-1].clone()
        case.grads[i][-1] = BAD[i % 3]
        case.control.zero_()
        backend.step(case)
        assert case.control[[0, 1, 4, 5]].tolist() == [1, 1, 1, 0], f"tensor {i}"
        case.grads[i][-1] = good
        assert before == {name: bits(t.cpu()) for name, t in case.written() if name != "control"}
    backend.step(case)
    assert case.control[[0, 1, 4, 5]].tolist() == [0, 1, 0, 1]
    params = [name for name in before if name.startswith("params")]
    after = dict(case.written())
    assert all(bits(after[name].cpu()) != before[name] for name in params)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sgd", "lars"])
def test_the_only_tensor_with_a_gradient(backend: Backend, rule: str) -> None:
    """The norm, and what is clipped by it, as in plain torch; trust ratios are a tensor's own."""
    count = WARP + 5
    specs = [Spec((1 + i % 3,)) for i in range(count)]
    case = Case(rule, specs, [busy(rule)], measures=7, max_norm=1.0)
    for i in backend.some([*range(count)]):
        ours = without_gradients(case.clone())
        ours.grads[i].fill_(3.0 + i)
        theirs = ours.clone()
        optimizers.optimizer_step(*theirs.arguments(), None, None)
        ours = ours.to(backend.device)
        backend.step(ours)
        norm = (3.0 + i) * math.sqrt(1 + i % 3)
        assert ours.control[2].item() == pytest.approx(norm, rel=1e-6), f"tensor {i}"
        for (name, a), (_, b) in zip(ours.written(), theirs.written(), strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=2e-6, atol=1e-7, msg=f"{name}, tensor {i}")


def places_of(numel: int) -> list[int]:
    """All threads; all lanes of all vectors that a thread loads together; ends of chunks."""
    lanes = range(4 * THREADS - 4, CHUNK, 4 * THREADS)
    wanted = {*range(0, 4 * THREADS, 4), *(i + k for i in lanes for k in range(4))}
    wanted |= {CHUNK - 1, CHUNK, CHUNK + 5, 2 * CHUNK - 1, 2 * CHUNK, numel - 2, numel - 1}
    return sorted(i for i in wanted if i < numel)


@pytest.mark.parametrize("numel", [2 * CHUNK + 7, 3 * THREADS + 2], ids=["chunks", "less"])
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_the_only_bad_element(
    backend: Backend, dtype: torch.dtype, numel: int, offset: int
) -> None:
    """Also of gradients whose address is no multiple of a vector."""
    case = Case("sgd", [Spec((5,)), Spec((numel,), dtype)], [busy("sgd")], measures=7)
    case = without_gradients(case).to(backend.device)
    case.grads[1] = torch.zeros(numel + offset, dtype=dtype, device=backend.device)[offset:]
    places = places_of(numel)
    if offset or dtype is not F32:
        places = [*places[:-12:9], *places[-12:]]
    for turn, i in enumerate(backend.some(places)):
        case.grads[1][i] = BAD[turn % 3]
        assert backend.measure(case)[:, 0].tolist() == [0, 1], f"element {i}"
        case.grads[1][i] = 2.0
        assert backend.measure(case)[:, :2].tolist() == [[0, 0], [0, 4]], f"element {i}"
        case.grads[1][i] = 0.0
    case.grads[1][numel - 1] = math.nan
    backend.step(case)
    assert case.control[[0, 4]].tolist() == [1, 1]


@pytest.mark.slow
def test_the_only_bad_chunk(backend: Backend) -> None:
    """More chunks than a block of CUDA's has threads to add them up; a part where it is slow."""
    threads = WARP if backend.interpreted else THREADS
    chunks = threads + 3
    case = Case("sgd", [Spec((chunks * CHUNK - 5,), BF16)], [busy("sgd")], measures=3)
    case = without_gradients(case).to(backend.device)
    (grad,) = case.grads
    for chunk in sorted({0, WARP - 1, WARP, threads - 1, threads, chunks - 1}):
        last = min((chunk + 1) * CHUNK, grad.numel()) - 1
        grad[last] = math.nan
        assert backend.measure(case)[0, 0] == 1, f"chunk {chunk}"
        grad[last] = 2.0
        assert backend.measure(case)[0, :2].tolist() == [0, 4], f"chunk {chunk}"
        grad[last] = 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(40, 9), (3, 2600), (5, 3, 4, 4)], ids=["small", "large", "channels_last"]
)
def test_the_only_bad_unit(backend: Backend, shape: tuple[int, ...]) -> None:
    """Units are measured by a warp each, or by a block: every one of them counts."""
    layout = "channels_last" if len(shape) == 4 else "contiguous"
    spec = Spec(shape, layout=layout)
    case = Case("sgd", [Spec((2, 3)), spec], [busy("sgd")], measures=7, unit_factor=0.1)
    case = without_gradients(case).to(backend.device)
    grad = case.grads[1]
    units = [*range(shape[0])]
    for unit in backend.some(units):
        for place in ((0,) * (len(shape) - 1), tuple(n - 1 for n in shape[1:])):
            grad[(unit, *place)] = BAD[unit % 3]
            assert backend.measure(case)[:, 0].tolist() == [0, 1], f"unit {unit}"
            grad[(unit, *place)] = 2.0
            assert backend.measure(case)[:, :2].tolist() == [[0, 0], [0, 4]], f"unit {unit}"
            grad[(unit, *place)] = 0.0
