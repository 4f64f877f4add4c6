"""The formulas that `convert` takes for an activation: their spellings, and that both are equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, fx

import fusedtrain
from fusedtrain import functional as F
from fusedtrain.conversion import _formulas
from fusedtrain.conversion._formulas import FORMULAS, activated, matches_of

Function = Callable[[Tensor], Tensor]
_GELU = math.sqrt(2 / math.pi)

# name -> spellings; all calls of each are one activation.
SPELLINGS: dict[str, list[Function]] = {
    "silu": [
        lambda x: x * torch.sigmoid(x),
        lambda x: x * x.sigmoid(),
        lambda x: torch.sigmoid(x).mul(x),
        lambda x: torch.mul(T.sigmoid(x), x),
        lambda x: x * torch.special.expit(x),
        lambda x: x / (1 + torch.exp(-x)),
        lambda x: x * torch.reciprocal((-x).exp() + 1.0),
        lambda x: 2 * x * (1 / (2 * torch.exp(-x) + 2)),
    ],
    "mish": [
        lambda x: x * T.softplus(x).tanh(),
        lambda x: torch.tanh(T.softplus(x)) * x,
        lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
        lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
    ],
    "hardswish": [
        lambda x: T.relu6(x + 3) / 6 * x,
        lambda x: x * T.relu6(3.0 + x, inplace=False) * (1 / 6),
        lambda x: x * T.hardsigmoid(x),
        lambda x: x * (x + 3).clamp(0, 6) / 6,
        lambda x: x * T.hardtanh(x + 3, 0.0, 6.0) / 6.0,
        lambda x: x * torch.clamp(x / 6 + 0.5, min=0, max=1),
    ],
    "gelu": [
        lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.41421356)),
        lambda x: (0.5 + 0.5 * torch.erf(x * 0.7071067811865476)) * x,
        lambda x: x * (torch.erf(x / math.sqrt(2)) + 1) / 2,
        lambda x: 0.5 * x + 0.5 * x * torch.erf(x / math.sqrt(2)),
        lambda x: x * torch.special.ndtr(x),
        lambda x: torch.special.ndtr(x).mul(x),
        lambda x: 0.5 * x * (1.0 + torch.tanh(_GELU * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: 0.5 * x + 0.5 * x * torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3.0)),
        lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
        lambda x: x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x**3)),
    ],
    "quick_gelu": [lambda x: x * torch.sigmoid(1.702 * x), lambda x: (1.702 * x).sigmoid() * x],
    "relu_squared": [
        lambda x: torch.square(T.relu(x)),
        lambda x: T.relu(x) ** 2,
        lambda x: torch.relu(x).pow(2),
        lambda x: x.clamp(min=0).square(),
    ],
    "hard_mish": [lambda x: 0.5 * x * (x + 2).clamp(min=0, max=2)],
    "hardsigmoid": [lambda x: T.relu6(x + 3) / 6],
    "tanhshrink": [lambda x: x - torch.tanh(x)],
    "softsign": [lambda x: x / (1 + x.abs()), lambda x: x / (torch.abs(x) + 1.0)],
}

# Close to a formula, and none: nothing of more than one call may be taken.
OTHERS: dict[str, Function] = {
    "another slope": lambda x: x * torch.sigmoid(1.7 * x),
    "another divisor": lambda x: x * T.relu6(x + 3) / 6.1,
    "sqrt(2) of five digits": lambda x: 0.5 * x * (1 + torch.erf(x / 1.4142)),
    "it cancels": lambda x: (x + 1e9 - 1e9) * torch.sigmoid(x),
    "hard sigmoid of Keras": lambda x: x * (0.2 * x + 0.5).clamp(0, 1),
    "softplus of another beta": lambda x: x * T.softplus(x, 2.0).tanh(),
    "another threshold": lambda x: x * T.softplus(x, 1.0, 5.0).tanh(),
    "x relu(x)": lambda x: T.relu(x) * x,
    "a scaled one": lambda x: 2 * T.relu(x) * T.relu(x),
    "rounded": lambda x: torch.div(x, 1 + x.abs(), rounding_mode="floor"),
    "alpha": lambda x: torch.sub(x, torch.tanh(x), alpha=2),
    # Far from 0 its gradient is more exact than the sigmoid's, which is made of the output.
    "sigmoid by exp": lambda x: 1 / (1 + torch.exp(-x)),
    "other logistic": lambda x: x / (1 + torch.exp(-2 * x)),
    "logistic of two and one": lambda x: 2 * x / (2 + torch.exp(-x)),
    "logistic of two": lambda x: x / (2 + torch.exp(-x)),
    "a residual sum": lambda x: x + x * torch.erf(x / math.sqrt(2)),
    "times zero": lambda x: x * torch.sigmoid(0 * x),
}


def matches(function: Function) -> list[Any]:
    return list(matches_of(fx.Tracer().trace(function)).values())


def special() -> Tensor:
    """In float64: ordinary numbers, both zeros, subnormals, kinks, large ones."""
    grid = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    kinks = torch.tensor(
        [-6.0, -3.0, -2.0, -1.0, 0.0, -0.0, 1.0, 2.0, 3.0, 6.0], dtype=torch.float64
    )
    tiny = torch.tensor([1e-8, 1e-30, 5e-324, 1e-300], dtype=torch.float64)
    large = torch.tensor([20.0, 21.0, 40.0, 88.0, 89.0, 300.0, 700.0, 1e4, 1e8, 1e30])
    return torch.cat([grid, kinks, tiny, -tiny, large.double(), -large.double()])


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name, forms in SPELLINGS.items() for i in range(len(forms))]
)
def test_a_spelling_is_one_activation_and_equal_to_it(name: str, number: int) -> None:
    function = SPELLINGS[name][number]
    (match,) = matches(function)
    assert (match.name, match.is_formula) == (name, True)
    x = special().requires_grad_()
    expected, actual = function(x), getattr(F, name)(x, **match.parameters)
    if name == "mish" and number > 1:  # exp(710) is infinite, and log(1 + inf) - inf undefined
        x = special()[special() < 80].requires_grad_()
        expected, actual = function(x), F.mish(x)
    assert actual.dtype is expected.dtype
    # Constants of ten digits, and 1 + tanh(x), of which little is left where x is negative.
    torch.testing.assert_close(actual, expected, rtol=2e-7, atol=1e-14)
    smooth = ~torch.isin(x.detach().abs(), torch.tensor([0.0, 2.0, 3.0], dtype=x.dtype))
    want, got = (torch.autograd.grad(y.sum(), x)[0][smooth] for y in (expected, actual))
    defined = want.isfinite()  # x^3 overflows before tanh is 1
    # torch's own backward of Hardsigmoid has factors of float32; see _LEAST of _trials.py.
    torch.testing.assert_close(got[defined], want[defined], rtol=2e-7, atol=1e-8)


@pytest.mark.parametrize("number", range(len(FORMULAS)))
def test_limits_at_infinities(number: int) -> None:
    name, parameters, formula = FORMULAS[number]
    x = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64)
    want, got = formula(x), getattr(F, name)(x, **parameters)
    same = (want == got) | (want.isnan() & got.isnan())
    # Where the formula has inf * 0, inf - inf or inf / inf, the function has its limit.
    assert (same | (want.isnan() & ~x.isnan())).all()
    assert got[2].isnan()


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_close_is_no_formula(name: str) -> None:
    assert not any(match.is_formula for match in matches(OTHERS[name]))


def test_values_in_between_that_others_read() -> None:
    def function(x: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        return x * s + s

    (match,) = matches(function)
    assert (match.name, match.is_formula) == ("sigmoid", False)


def test_the_input_may_be_computed() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        z = 2 * x + y * x
        return z * torch.sigmoid(z) + y

    (match,) = matches(function)
    assert match.name == "silu"
    assert match.input.name == "add"


@pytest.mark.parametrize("number", range(len(FORMULAS)))
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_other_tensors_get_the_formula(number: int, dtype: torch.dtype) -> None:
    name, parameters, formula = FORMULAS[number]
    x = torch.tensor([0, 1, 1]).to(dtype)
    try:
        expected: Any = formula(x)
    except RuntimeError as error:
        expected = type(error)
    if isinstance(expected, type):
        with pytest.raises(expected):
            activated(x, name, number, False, **parameters)
    else:
        assert torch.equal(activated(x, name, number, False, **parameters), expected)


def test_a_subclass_sees_the_calls_of_the_formula() -> None:
    class Counting(Tensor):
        calls: list[str] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.calls.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    y = activated(torch.randn(3).as_subclass(Counting), "silu", 0, False)
    assert isinstance(y, Counting)
    assert {"sigmoid", "mul"} <= set(Counting.calls)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_dtype_stays_under_autocast(dtype: torch.dtype) -> None:
    x = torch.randn(8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        for number, (name, parameters, formula) in enumerate(FORMULAS):
            want = formula(x)
            for widens in (False, True):
                assert activated(x, name, number, widens, **parameters).dtype is want.dtype


@pytest.mark.parametrize("number", range(len(FORMULAS)))
def test_where_autocast_widens_the_result_is_float32(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA's autocast does with softplus and powers."""

    def autocasts(input: Tensor, device_type: str = "") -> bool:
        return device_type != "cpu" and input.dtype is torch.float16

    monkeypatch.setattr(_formulas, "autocasts", autocasts)
    name, parameters, formula = FORMULAS[number]
    x = torch.randn(64).half()
    wide = activated(x, name, number, True, **parameters)
    assert wide.dtype is torch.float32
    torch.testing.assert_close(wide, formula(x.float()))
    assert activated(x, name, number, False, **parameters).dtype is torch.float16


def test_numbers_are_no_tensors() -> None:
    def function(x: Tensor) -> Any:
        n = x.shape[0]
        return n / (1 + abs(n))

    graph = fx.Tracer().trace(function)
    (match,) = matches_of(graph).values()
    assert activated(3, match.name, match.number, False) == 0.75


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [name for name in SPELLINGS if name != "softsign"])
def test_a_function_is_as_exact_as_its_spellings(name: str, dtype: torch.dtype) -> None:
    """Against float64, forward and gradient, and where a spelling has infinities on the way."""
    x = torch.cat([torch.linspace(-30, 30, 601), torch.tensor([0.0, -0.0, 90.0, -90.0])]).to(dtype)
    for function in SPELLINGS[name]:
        (match,) = matches(function)
        results = []
        for one in (lambda x, f=function: f(x), lambda x, m=match: activated(
            x, m.name, m.number, False, **m.parameters
        )):  # fmt: skip
            leaf = x.clone().requires_grad_()
            y = one(leaf)
            results.append((y.detach(), torch.autograd.grad(y.sum(), leaf)[0]))
        wide = x.double().requires_grad_()
        y = getattr(F, name)(wide, **match.parameters)
        truth = (y.detach(), torch.autograd.grad(y.sum(), wide)[0])
        kinks = torch.isin(x.abs(), torch.tensor([0.0, 2.0, 3.0], dtype=dtype))
        for formula, fused, exact, mask in zip(*results, truth, (kinks & False, kinks)):
            # Rounding the argument by eps changes exp(-x^2) by x^2 eps; 1 + erf(x), and a slope
            # near its zero, are differences of numbers of about 1.
            eps, size = torch.finfo(dtype).eps, x.double().abs()
            unit = eps * (exact.abs() * (1 + size**2) + (size < 7)) + 1e-14  # as exact as float64
            error, allowed = (fused - exact).abs(), (formula.nan_to_num() - exact).abs()
            assert (error <= allowed + 8 * unit)[~mask].all(), ((error - allowed) / unit).max()
            assert fused.dtype is dtype
            assert fused.isfinite().all()


@pytest.mark.parametrize("how", [
    lambda x: x.clamp(0, 6), lambda x: x.clamp(min=0), lambda x: torch.clamp(x, min=0),
    lambda x: x.clip(0.0), lambda x: torch.maximum(x, torch.zeros(())),
])  # fmt: skip
def test_a_clamp_keeps_its_slope_at_zero(how: Function) -> None:
    """Weights that start as zeros learn through a clamp, and would not through ReLU."""

    class Clamping(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return how(x)

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), Clamping())
    torch.nn.init.zeros_(model[0].weight)
    torch.nn.init.zeros_(model[0].bias)
    fusedtrain.convert(model)
    model(torch.randn(4, 3)).sum().backward()
    assert (model[0].bias.grad > 0).all()


def test_a_clamp_that_stays_is_in_the_report() -> None:
    class Clamping(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clamp(min=0) + x.clamp(1, 2)

    report = fusedtrain.convert(torch.nn.Sequential(Clamping()))
    assert [tuple(left)[:2] for left in report.left_calls] == [("0", "clamp")]
    assert "slope at 0: write `torch.nn.functional.relu(x)`" in str(report)


def test_widening_is_noticed() -> None:
    assert all(matches(SPELLINGS["mish"][i])[0].widens for i in range(4))
    assert [matches(form)[0].widens for form in SPELLINGS["relu_squared"]] == [True] * 4
    assert not matches(SPELLINGS["silu"][0])[0].widens
