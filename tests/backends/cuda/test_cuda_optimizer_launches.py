"""Launches of the optimizer step on CUDA, emulated: how many, how many bytes of arguments they
carry, and what comes of calls that just fit into a launch's tables, or just do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_emulator
from fusedtrain.reference import optimizers
from helpers.backends import same_bits
from helpers.optimizer_calls import AMP, F32, F64, Call, Kind, check, cpu, one_call
from helpers.optimizer_cases import Case, Spec
from helpers.optimizers import busy

pytestmark = pytest.mark.skipif(bool(cuda_emulator.why_not()), reason=cuda_emulator.why_not())

KB = 1024
SWEPT = (185, 371)  # tensors that the tables of a sweep hold, the small one and the large one
CODED = 145  # with scales of states in codes
ADDED = 1015
PREPARED, GROUPS = (177, 1528), (8, 63)
ZEROED = (204, 1637)


@pytest.fixture(scope="module")
def emulator() -> Iterator[cuda_emulator.Emulator]:
    emulator = cuda_emulator.load()
    yield emulator
    emulator.set_order("forward")


def ones(count: int) -> tuple[tuple[int, ...], ...]:
    return ((1,),) * count


def counted(emulator: cuda_emulator.Emulator, run: Callable[[], Any]) -> tuple[int, int]:
    """Launches, and bytes of their arguments."""
    c = emulator.c
    before = c.emulator_launches(), c.emulator_argument_bytes()
    run()
    return c.emulator_launches() - before[0], c.emulator_argument_bytes() - before[1]


def step(emulator: cuda_emulator.Emulator, case: Kind) -> tuple[int, int]:
    return counted(emulator, lambda: one_call(emulator.call, Call(case)))


def checked(
    emulator: cuda_emulator.Emulator, case: Kind, order: str = "shuffled"
) -> tuple[int, int]:
    """Launches and bytes of a step whose numbers are compared with the CPU's."""
    return counted(emulator, lambda: check(emulator, case, orders=(order,)))


def near(kilobytes: int) -> Any:
    """A launch has some bytes besides the table."""
    return pytest.approx(kilobytes * KB, rel=0.02)


def test_bytes_of_a_step(emulator: cuda_emulator.Emulator) -> None:
    """ResNet-50 has 161 tensors. Measure, add, prepare, update."""
    resnet = Kind("sgd", shapes=ones(161), step=AMP)
    assert step(emulator, resnet) == (4, near(16 + 4 + 4 + 16))
    large = Kind("sgd", shapes=ones(SWEPT[0] + 1), step=AMP)
    assert step(emulator, large) == (4, near(32 + 4 + 32 + 32))


@pytest.mark.parametrize("groups", [1, *GROUPS, GROUPS[0] + 1, GROUPS[1] + 1])
def test_groups_that_just_fit(emulator: cuda_emulator.Emulator, groups: int) -> None:
    case = Kind("lars", shapes=ones(groups), groups=groups, lr=F32, step=AMP)
    fits = 4 if groups <= GROUPS[0] else 32
    launches = 1 if groups <= GROUPS[1] else 2
    bytes_ = 16 + 4 + fits * launches + 16
    assert checked(emulator, case) == (3 + launches, near(bytes_))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "count"),
    [("lamb", PREPARED[0]), ("adam", PREPARED[0] + 1), ("adam", SWEPT[0]), ("lamb", SWEPT[0] + 1)],
)
def test_tensors_that_just_fit(
    emulator: cuda_emulator.Emulator,
    rule: str,
    count: int,
) -> None:
    """The same numbers from the small and from the large tables; the last tensor is not empty."""
    shapes = tuple((i % 4 + (i == count - 1),) for i in range(count))
    case = Kind(rule, shapes=shapes, param=(F32, F64), step={**AMP, "trial": 1, "unit_factor": 0.1})
    sweep, tail = 16 if count <= SWEPT[0] else 32, 4 if count <= PREPARED[0] else 32
    # float64 has sweeps of its own
    assert checked(emulator, case) == (7 + 3, near(2 * 3 * sweep + 2 * tail + 2 * 4))


def test_tensors_without_elements_have_no_sweep(emulator: cuda_emulator.Emulator) -> None:
    case = Kind("sgd", shapes=((0,), (5,)), param=(F32, F64), step=AMP)
    assert step(emulator, case)[0] == 4


@pytest.mark.slow
@pytest.mark.parametrize("count", [SWEPT[1], SWEPT[1] + 1])
def test_tensors_that_just_fit_into_the_large_table(
    emulator: cuda_emulator.Emulator,
    count: int,
) -> None:
    case = Kind("lamb", shapes=((2, 2),) * count, step={**AMP, "unit_factor": 0.1})
    assert checked(emulator, case, "reverse")[0] == (7 if count == SWEPT[1] else 10)


@pytest.mark.parametrize("count", [CODED, CODED + 1])
def test_tensors_with_codes_that_just_fit(
    emulator: cuda_emulator.Emulator,
    count: int,
) -> None:
    """One of them has codes; one is of float64 and has sweeps of its own."""
    specs = [Spec((i % 3,), F64 if i == 7 else F32) for i in range(count)]
    specs[-1] = Spec((40,), state_dtype=torch.int8)
    case = Case("lion", specs, [busy("lion", cautious=0)], max_norm=1.0, measures=3)
    other = case.clone()
    launches, size = counted(
        emulator, lambda: emulator.call("optimizer_step", *case.arguments(), None, None)
    )
    sweeps = 1 if count <= CODED else 2
    assert (launches, size) == (4 + sweeps + 1, near(2 * 16 + 4 + 4 + 16 * sweeps + 16))
    optimizers.optimizer_step(*other.arguments(), None, None)
    assert torch.equal(case.states[-2], other.states[-2])
    assert all(map(torch.allclose, case.params, other.params))


@pytest.mark.slow
@pytest.mark.parametrize("count", [ADDED, ADDED + 1, PREPARED[1], PREPARED[1] + 1])
def test_sums_and_coefficients_of_many_tensors(
    emulator: cuda_emulator.Emulator,
    count: int,
) -> None:
    shapes = tuple((int(i % 97 == 0 or i > count - 3),) for i in range(count))
    case = Kind("sgd", shapes=shapes, groups=1, step=AMP)
    sweeps = -(-count // SWEPT[1])
    others = -(-count // ADDED) + -(-count // PREPARED[1])
    assert checked(emulator, case)[0] == 2 * sweeps + others


@pytest.mark.parametrize("count", [161, ZEROED[0], ZEROED[0] + 1, ZEROED[1], ZEROED[1] + 1])
def test_ranges_of_zeros(emulator: cuda_emulator.Emulator, count: int) -> None:
    around = [torch.ones(3 + i % 2) for i in range(count)]

    def run() -> None:
        emulator.call("zero_tensors", [t[1:-1] for t in around])

    launches = 2 if count > ZEROED[1] else 1
    kilobytes = 4 if count <= ZEROED[0] else 32
    assert counted(emulator, run) == (launches, near(launches * kilobytes))
    assert all(t.tolist() == [1, *[0] * (t.numel() - 2), 1] for t in around)


def fills(run: Callable[[], Any]) -> list[str]:
    """Operators of torch that would be launches of their own."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    names = {event.key for event in profile.key_averages()}
    assert any("fusedtrain" in name for name in names), "the profiler saw nothing"
    return sorted(n for n in names if n in ("aten::zero_", "aten::fill_", "aten::copy_"))


@pytest.mark.parametrize("trial", [0, 1])
@pytest.mark.parametrize("measures", [0, 7])
def test_a_step_launches_nothing_else(
    emulator: cuda_emulator.Emulator,
    measures: int,
    trial: int,
) -> None:
    """No operator of torch fills the sums that the kernels write anyway."""
    call = Call(Kind(step={**AMP, "measures": measures, "trial": trial}))
    assert fills(lambda: emulator.call("optimizer_step", *call.arguments(), None, None)) == []
    arguments = call.arguments()
    assert fills(lambda: emulator.call("measure_gradients", *arguments)) == []
    sums = emulator.call("measure_gradients", *arguments)
    assert fills(lambda: emulator.call("try_update", *arguments, sums)) == []


@pytest.mark.parametrize("backend", ["cpu", "emulated"])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("rule", ["adam", "lamb"])
def test_sums_of_what_nobody_measures(
    emulator: cuda_emulator.Emulator,
    rule: str,
    found_inf: float | None,
    backend: str,
) -> None:
    """The sums are 0, in memory that held something else. The step is that of sums of 0."""
    op = cpu if backend == "cpu" else emulator.call
    step = {"measures": 0, "max_norm": 1.0, "trial": 1}
    case = Kind(rule, shapes=ones(40), found_inf=found_inf, step=step, group={"cautious": 1})
    torch.use_deterministic_algorithms(True)  # new memory is full of NaN
    try:
        call, expected = Call(case), Call(case)
        sums = op("optimizer_step", *call.arguments(), None, None)
        assert isinstance(sums, Tensor)
        assert sums.shape == (40, 3)
        assert not sums.any()
        op("optimizer_step", *expected.arguments(), torch.zeros(40, 3, dtype=F64), None)
        for mine, other in zip(call.results().values(), expected.results().values(), strict=True):
            assert same_bits(mine, other)
        tried = op("try_update", *Call(case).arguments(), sums)
        assert isinstance(tried, Tensor)
        assert tried.shape == (40, 3)
        assert tried.isfinite().all()
        assert bool(tried.any()) == (found_inf != 1.0)
    finally:
        torch.use_deterministic_algorithms(False)


def test_measuring_is_what_was_asked_for(emulator: cuda_emulator.Emulator) -> None:
    """The step's own `measures` has no influence."""
    call = Call(Kind(step={"measures": 0}))
    want = cpu("measure_gradients", *call.arguments())
    assert want[:, 1].any()
    sums = emulator.call("measure_gradients", *call.arguments())
    torch.testing.assert_close(sums, want, rtol=5e-7, atol=0)
