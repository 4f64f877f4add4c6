"""Activations that keep their derivative in few bits: tables and their errors, kernels of
every backend, the functions and modules with ``save``, and training with them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain import functional as F
from fusedtrain.ops.few_bit import SAVES
from fusedtrain.reference import few_bit
from fusedtrain.reference.bits import BLOCK, packed_bytes
from fusedtrain.reference.pointwise import INDEX
from helpers.activations import DTYPES
from helpers.backends import Kernels, placed, same_bits
from helpers.few_bit import check, slope_of
from helpers.launches import parameters
from helpers.observed import saved_by

pytestmark = pytest.mark.usefixtures("memory_is_full_of_nan")

CASES = [(name, bits) for name, table in few_bit.TABLES.items() for bits in table.bits()]
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(F, name) for name in few_bit.TABLES if name != "gelu_tanh"
}

FUNCTIONS["gelu_tanh"] = lambda x, save: F.gelu(x, "tanh", save)


GRID = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
WEIGHT = torch.exp(-GRID.square() / 2)
WEIGHT /= WEIGHT.sum()


def error(name: str, bits: int) -> tuple[float, float]:
    """Error of the derivative: maximum, and root mean square for x ~ N(0, 1)."""
    table, slope = few_bit.TABLES[name], slope_of(name, GRID)
    off = table.values(bits)[table.codes(slope, bits)] - slope
    return float(off.abs().max()), float((WEIGHT * off.square()).sum().sqrt())


@pytest.mark.parametrize("name", [name for name in few_bit.TABLES if name != "relu"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_tables_are_lloyds(name: str, bits: int) -> None:
    """Levels are the means of what is nearest to them, and no others have a smaller error."""
    table = few_bit.TABLES[name]
    slope, order = slope_of(name, GRID).sort()
    slopes, weights = slope.numpy(), WEIGHT[order].numpy()
    ends = np.concatenate([[0.0], np.cumsum(weights)])
    sums = np.concatenate([[0.0], np.cumsum(weights * slopes)])
    levels = np.array(table.levels[bits])
    for _ in range(3000):
        cuts = np.searchsorted(slopes, (levels[1:] + levels[:-1]) / 2)
        cuts = np.concatenate([[0], cuts, [len(slopes)]])
        levels = (sums[cuts[1:]] - sums[cuts[:-1]]) / (ends[cuts[1:]] - ends[cuts[:-1]])
    # Levels of gelu serve gelu_tanh, and all levels are rounded to four decimals.
    assert np.abs(levels - table.levels[bits]).max() < (5e-4 if name == "gelu_tanh" else 1e-4)


@pytest.mark.parametrize(("bits", "bound"), [(3, 0.045), (4, 0.022), (8, 0.0015)])
def test_gelu_beats_the_published_tables(bits: int, bound: float) -> None:
    """fewbit's (arXiv:2202.00441) have 0.058 with 3 bits, 0.031 with 4."""
    assert error("gelu", bits)[1] <= bound


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("relu", "gelu_tanh")])
def test_the_docstring_states_the_error(name: str) -> None:
    stated = re.findall(r"q(\d) (0?\.\d+),\s+(0?\.\d+)", FUNCTIONS[name].__doc__ or "")
    assert [int(bits) for bits, _, _ in stated] == [8, 4, 3, 2]
    for bits, most, rms in stated:
        errors = error(name, int(bits))
        for real, printed in zip(errors, (most, rms), strict=True):
            last_place = 10.0 ** -len(printed.split(".")[1])
            assert real <= float(printed) <= real + 2 * last_place, (bits, errors)


@pytest.mark.parametrize("name", few_bit.TABLES)
def test_slopes_that_must_be_exact(name: str) -> None:
    """0 and 1, for far inputs, in 8 bits; all of relu's in 1."""
    bits = 8 if name != "relu" else 1
    table = few_bit.TABLES[name]
    values = table.values(bits)[table.codes(torch.tensor([0.0, 1.0], dtype=torch.float64), bits)]
    assert values.tolist() == [0.0, 1.0]
    assert float(torch.tensor(1.0 / table.unit, dtype=torch.float32) * table.unit) == 1.0


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "one": lambda: torch.randn(1),
    "half a block": lambda: torch.randn(128),
    "a block": lambda: torch.randn(256),
    "a block but for an element": lambda: torch.randn(767)[:255],
    "blocks and a rest": lambda: torch.randn(7, 333),
    "many": lambda: torch.randn(40, 1001),
    "channels last": lambda: torch.randn(2, 5, 6, 7).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(40, 30).t(),
    "sliced": lambda: torch.randn(20, 40)[:, 3:30],
    "off 16 bytes": lambda: torch.randn(1001)[1:],
    "empty": lambda: torch.randn(0, 4),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", parameters(LAYOUTS, "empty"))
def test_kernels(ops: Kernels, layout: str, dtype: torch.dtype) -> None:
    every = layout == "blocks and a rest" and not ops.slow
    every |= layout == "a block" and dtype is torch.float32
    cases = CASES if every else CASES[:: 3 + ops.slow]
    if layout == "many" and ops.slow:  # a fifth of this file's time, each
        cases = cases[DTYPES.index(dtype) :: 4]
    for name, bits in cases:
        x = placed(LAYOUTS[layout]().mul_(2.5), ops.device, dtype)
        assert (x.data_ptr() % 16 > 0) == (layout in ("off 16 bytes", "sliced"))
        check(ops, name, bits, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_codes_anywhere_in_memory(ops: Kernels, bits: int, dtype: torch.dtype) -> None:
    """A slice of a buffer of codes begins at any byte; the gradient is the same, to the bit."""
    name = "relu" if bits == 1 else "silu"
    x = torch.randn(3 * BLOCK + 37).to(ops.device, dtype)
    grad = torch.randn(x.shape).to(ops.device, dtype)
    _, codes = ops("few_bit", x, INDEX[name], bits)
    want = ops("few_bit_backward", grad, codes, INDEX[name], bits)
    assert want.any()
    for offset in (1, 2, 4, 8) if dtype in (torch.float32, torch.float16) else (3,):
        buffer = codes.new_empty(codes.numel() + offset)
        assert buffer.data_ptr() % 16 == 0
        gradient = ops("few_bit_backward", grad, buffer[offset:].copy_(codes), INDEX[name], bits)
        assert same_bits(gradient, want), offset


def test_more_blocks_of_codes_than_a_grid_takes(ops: Kernels) -> None:
    """The emulator has two multiprocessors, whose thread blocks go round then."""
    if ops.counter == "triton" and ops.slow:
        pytest.skip("slow where it is emulated or interpreted: needs a GPU")
    x = torch.randn(2 * 32 * 16 * BLOCK + 5 * BLOCK + 3, dtype=torch.float64).to(ops.device)
    y, codes = ops("few_bit", x, INDEX["relu"], 1)
    assert y.equal(x.relu())
    assert ops("few_bit_backward", x, codes, INDEX["relu"], 1).equal(x.relu())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", few_bit.TABLES)
def test_special_inputs(ops: Kernels, name: str, dtype: torch.dtype) -> None:
    """Infinities have the slope of the limit; of NaN the output is NaN, and so is the gradient of
    whatever comes after."""
    inf = float("inf")
    x = torch.tensor([-inf, inf, float("nan"), 0.0, -0.0, 1e30, -1e30], dtype=torch.float64)
    x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(ops.device, dtype)
    x[0], x[1] = -inf, inf
    bits = few_bit.TABLES[name].bits()[-1]
    y, codes = ops("few_bit", x, INDEX[name], bits)
    assert y.isnan().tolist()[2]
    if ops.kernel:
        assert abs(float(y[0])) < 1e-30
        assert y[1] == inf
    gradient = ops("few_bit_backward", torch.ones_like(x), codes, INDEX[name], bits)
    if ops.kernel:
        assert gradient[[0, 1, 5, 6]].tolist() == [0.0, 1.0, 1.0, 0.0]


def test_no_code_is_above_the_last(ops: Kernels) -> None:
    """The slope of hardswish just below 3 is 255 units, more than that of any other input."""
    x = torch.randn(300)
    x[::150] = torch.tensor(3.0).nextafter(torch.tensor(0.0))
    for bits in few_bit.TABLES["hardswish"].bits():
        check(ops, "hardswish", bits, x.to(ops.device))


@pytest.mark.launches_nothing("arguments are refused")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((INDEX["tanh"], 8), "no derivative in few bits"),
        ((-1, 8), "no derivative in few bits"),
        ((INDEX["gelu"], 5), "no derivative of gelu in 5 bits"),
        ((INDEX["gelu"], 1), "no derivative of gelu in 1 bits"),
        ((INDEX["relu"], 8), "no derivative of relu in 8 bits"),
    ],
)
def test_ops_reject(ops: Kernels, arguments: tuple[int, int], message: str) -> None:
    x = torch.randn(3).to(ops.device)
    with pytest.raises(RuntimeError, match=message):
        ops("few_bit", x, *arguments)
    if ops.kernel:
        with pytest.raises(RuntimeError, match="codes must be 256 numbers"):
            ops("few_bit_backward", x, x.new_zeros(3, dtype=torch.uint8), INDEX["gelu"], 8)


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_functions_keep_the_codes_alone(name: str, bits: int) -> None:
    x = torch.randn(4, 4096, requires_grad=True)
    y, kept = saved_by(lambda: FUNCTIONS[name](x, save=f"q{bits}"))
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.uint8, 4 * 4096 * bits // 8)]
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    most, rms = error(name, bits)
    off = (x.grad.double() - slope_of(name, x.detach())).abs()
    assert off.max() <= most + 1e-6
    assert off.square().mean().sqrt() <= 1.1 * rms + 1e-6
    # Nothing is kept where nobody asks for a gradient, and the output has the same digits.
    with torch.no_grad():
        exact = FUNCTIONS[name](x, save=None)
    torch.testing.assert_close(y.detach(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [3, 8])
def test_gradients_of_any_layout(bits: int) -> None:
    """A gradient laid out otherwise than the output meets the codes of its own elements."""
    x = torch.randn(2, 6, 5, 7).to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(2, 6, 5, 7)  # contiguous, as the gradient then is
    (F.gelu(x, save=f"q{bits}") * weight).sum().backward()
    assert x.grad is not None
    most, _ = error("gelu", bits)
    off = (x.grad / weight - slope_of("gelu", x.detach())).abs()
    assert off.max() <= most + 1e-4
    y = torch.randn(6, 9, requires_grad=True)
    other = torch.randn(9, 6)
    (F.relu(y, save="q1").t() * other).sum().backward()
    assert y.grad is not None
    assert torch.equal(y.grad, torch.where(y > 0, other.t(), 0.0))


@pytest.mark.parametrize("name", ["relu", "silu", "mish", "quick_gelu", "hardswish"])
def test_in_place(name: str) -> None:
    """No clone of the input is kept. Torch's own functions would keep one."""
    save = next(iter(reversed(SAVES[name])))
    x = torch.randn(1000, requires_grad=True)
    for make in (lambda: x * 1, lambda: (x * 1).view(10, 100)[:, :].reshape(-1)):
        middle = make()
        y, kept = saved_by(lambda m=middle: FUNCTIONS[name](m, inplace=True, save=save))
        assert y is middle
        assert sum(t.nbytes for t in kept if t.dtype is torch.uint8) == packed_bytes(
            1000, SAVES[name][save]
        )
        (gradient,) = torch.autograd.grad(y.sum(), x)
        (want,) = torch.autograd.grad(FUNCTIONS[name](x * 1, save=save).sum(), x)
        assert torch.equal(gradient, want)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        FUNCTIONS[name](x, inplace=True, save=save)


def test_second_derivatives() -> None:
    x = torch.randn(5, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"gelu with save='q4' .* needs save=None"):
        torch.autograd.grad(F.gelu(x, save="q4").sum(), x, create_graph=True)
    # That of relu is exact, and its derivative 0.
    y = F.relu(x, save="q1").square().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, torch.where(x > 0, 2.0, 0.0))


def test_unknown_save() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"silu: save must be None or one of 'q2', .* not 'q5'"):
        F.silu(x, save="q5")
    with pytest.raises(ValueError, match=r"relu: save must be None or one of 'q1', not 'q8'"):
        fusedtrain.nn.ReLU(save="q8")


def test_where_torch_must_see_plain_operators() -> None:
    x = torch.randn(33, requires_grad=True)
    want = slope_of("mish", x.detach()).float()
    compiled = torch.compile(lambda t: F.mish(t, save="q2"), backend="aot_eager")
    for run in (compiled, lambda t: torch.func.vmap(lambda u: F.mish(u, save="q2"))(t)):
        (gradient,) = torch.autograd.grad(run(x).sum(), x)
        torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-6)


def test_modules() -> None:
    made = [
        fusedtrain.nn.GELU("tanh", save="q4"), fusedtrain.nn.SiLU(True, save="q8"),
        fusedtrain.nn.Mish(save="q3"), fusedtrain.nn.QuickGELU(save="q2"),
        fusedtrain.nn.Hardswish(save="q8"), fusedtrain.nn.ReLU(save="q1"),
    ]  # fmt: skip
    assert [repr(m) for m in made[:2]] == [
        "GELU(approximate='tanh', save='q4')", "SiLU(inplace=True, save='q8')",
    ]  # fmt: skip
    x = torch.randn(300, requires_grad=True)
    for module in made:
        bits = int(module.save[1:])
        _, kept = saved_by(lambda m=module: m(x * 1))
        assert sum(t.nbytes for t in kept if t.dtype is torch.uint8) == packed_bytes(300, bits)
        with torch.no_grad():
            torch.testing.assert_close(torch.jit.script(module)(x * 1), module(x * 1))


def test_convert() -> None:
    """Activations on their own; what is part of a norm stays exact; other modes and revert."""
    model = nn.Sequential(
        nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8), nn.BatchNorm1d(8), nn.SiLU(),
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Hardswish(),
    )  # fmt: skip
    x = torch.randn(16, 8)
    report = fusedtrain.convert(model, x, memory="q8", exclude=["8"])
    assert "kept in 8 bits" in str(report)
    assert report.memory == "q8"
    assert [getattr(m, "save", None) for m in model] == [
        None, "q8", None, None, None, None, None, None, None,
    ]  # fmt: skip
    _, kept = saved_by(lambda: model(x))
    assert sum(t.nbytes for t in kept if t.dtype is torch.uint8) == 16 * 512
    fusedtrain.convert(model)
    assert model[1].save is None
    fusedtrain.convert(model, memory="q8")
    assert model[1].save == "q8"
    fusedtrain.revert(model)
    assert type(model[1]) is nn.GELU
    assert "save" not in vars(model[1])


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return torch.tensor(bunch.images, dtype=torch.float32) / 16, torch.tensor(bunch.target)


def accuracy(save: str | None, seed: int) -> float:
    """Accuracy of a small network on the digits that it was not trained on."""
    images, labels = digits()
    torch.manual_seed(seed)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:500], order[500:]
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 96), fusedtrain.nn.GELU(save=save), nn.Linear(96, 96),
        fusedtrain.nn.GELU(save=save), nn.Linear(96, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(8):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(images[test]).argmax(1) == labels[test]).float().mean())


@pytest.mark.slow
def test_training_reaches_the_exact_accuracy() -> None:
    """On real images, over three seeds: the mean within the spread of the exact runs."""
    pytest.importorskip("sklearn")
    seeds = range(3)
    exact = torch.tensor([accuracy(None, seed) for seed in seeds])
    assert exact.min() > 0.9
    spread = exact.std().item() + 1 / 500
    for save in ("q8", "q4"):
        accuracies = torch.tensor([accuracy(save, seed) for seed in seeds])
        assert accuracies.mean() >= exact.mean() - 2 * spread, (save, accuracies, exact)


def test_all_saves_are_tested() -> None:
    assert {(n, b) for n, saves in SAVES.items() for b in saves.values()} == set(CASES)
    assert len(set(itertools.chain(*SAVES.values()))) == 5
