"""Float32 masters after others have written to the 16-bit weights, unseen: through `.data`.

A weight that is not the rounded master is the new master, element by element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.reference import optimizers
from fusedtrain.reference.split_weights import follow
from helpers.activations import error
from helpers.optimizer_cases import BF16, F16, F32, Case, Spec, specs_of
from helpers.optimizer_ops import EVERY_BACKEND, STEPS, TOLERANCE
from helpers.optimizers import busy, counterpart

EVERY_DTYPE = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
NAN, INF = torch.nan, torch.inf


def words(t: Tensor) -> Tensor:
    return t.view(torch.int16 if t.itemsize == 2 else torch.int32)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters, masters around the bounds of what rounds to them, and which pairs belong
    together: by distances in float64."""
    infinite = int(words(torch.tensor(INF, dtype=dtype)))
    near = torch.cat([torch.arange(300), infinite - torch.arange(300)])
    low = torch.cat([near, torch.arange(0, infinite, 97)]).to(torch.int16).view(dtype)

    def value(step: int) -> Tensor:
        """The parameter that many steps on; infinity counts as the next number would."""
        number = (words(low) + step).clamp(0, infinite)
        before = (number - 1).to(torch.int16).clamp(0).view(dtype).double()
        twice = (number - 2).to(torch.int16).clamp(0).view(dtype).double()
        plain = number.to(torch.int16).view(dtype).double()
        return torch.where(number == infinite, 2 * before - twice, plain)

    here, above = value(0), value(1)
    below = torch.where(words(low) == 0, -above, value(-1))
    least, most = (below + here) / 2, (here + above) / 2
    most = torch.where(words(low) == infinite, INF, most)
    toward = torch.tensor(INF)
    masters = [low.float()]
    for bound in (least.float(), most.float()):
        masters += [bound, torch.nextafter(bound, toward), torch.nextafter(bound, -toward)]
    ties = (words(low) & 1 == 0) | (dtype == BF16)  # bfloat16: rounded either way
    belong = [
        ((least < m) & (m < most)) | (ties & ((m == least) | (m == most)))
        for m in map(Tensor.double, masters)
    ]
    belong = [b & (m.signbit() == low.signbit()) for b, m in zip(belong, masters)]
    others = torch.tensor([NAN, 1.0, NAN, -1.0, 0.0]), torch.tensor([1.0, NAN, NAN, 1.0, -0.0])
    params = torch.cat([low.repeat(len(masters)), others[0].to(dtype)])
    every = torch.cat([*masters, others[1]])
    fits = torch.cat([*belong, torch.zeros(5, dtype=torch.bool)])
    return torch.cat([params, -params]), torch.cat([every, -every]), fits.repeat(2)


@EVERY_DTYPE
def test_the_formula(dtype: torch.dtype) -> None:
    param, master, belong = pairs(dtype)
    expected = torch.where(belong, master, param.float())
    torch.testing.assert_close(follow(param, master), expected, rtol=0, atol=0, equal_nan=True)
    assert 1000 < belong.sum() < len(belong) - 1000
    random = torch.randint(-(2**31), 2**31, (10**6,)).to(torch.int32).view(F32)
    rounded = random.to(dtype)
    kept = follow(rounded, random)
    torch.testing.assert_close(kept, random, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@EVERY_DTYPE
def test_kernels_follow_every_write(backend: str, dtype: torch.dtype) -> None:
    """An average of weight 1 is the weight that the step worked on; the step is 0."""
    param, master, _ = pairs(dtype)
    count = len(param) if backend in ("reference", "cpu") else 5000  # more than a chunk of CUDA
    which = torch.arange(len(param)) if count == len(param) else torch.randperm(len(param))[:count]
    param, master = param[which], master[which]
    for size in (count, 17):
        spec = Spec((size,), dtype, master=True, average=F32, states=())
        case = Case("sgd", [spec], [{"lr": 0.5}], measures=0, average_weight=1.0, masters_follow=1)
        case.params[0].copy_(param[-size:])
        case.masters[0].copy_(master[-size:])
        case.grads[0].zero_()
        case.averages[0].zero_()
        expected = follow(case.params[0], case.masters[0])
        EVERY_BACKEND[backend]().optimizer_step(*case.arguments(), None, None)
        for result, wanted in (
            (case.averages[0], expected),
            (case.masters[0], expected),
            (case.params[0], expected.to(dtype)),
        ):
            torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rule", ["adam", "lamb", "rmsprop"])
def test_every_sweep_follows(backend: str, rule: str, step: str) -> None:
    """Measures, trials and updates beside the reference; a third of the weights is written over."""
    kernels = EVERY_BACKEND[backend]()
    specs = [s for s in specs_of(rule) if s.master is True]
    specs += [Spec((4300,), dtype, master=True) for dtype in (BF16, F16)]
    case = Case(rule, specs, [busy(rule), busy(rule, cautious=1)], **STEPS[step], masters_follow=1)
    for p in case.params:
        p.copy_(torch.where(torch.rand(p.shape) > 0.3, p, 0.75))
    expected = case.clone()
    theirs = optimizers.optimizer_step(*expected.arguments(), None, None)
    ours = kernels.optimizer_step(*case.arguments(), None, None)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    tolerance = getattr(kernels, "tolerance", TOLERANCE)
    for (name, one), (_, other) in zip(case.written(), expected.written()):
        assert error(one, other) <= tolerance[one.dtype], name


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "clamp_": lambda w: w.clamp_(-0.5, 0.5),
    "a mask": lambda w: w.mul_((torch.arange(w.numel()) % 3 > 0).view(w.shape)),
    "copy_": lambda w: w.copy_(torch.linspace(-1, 1, w.numel()).view(w.shape)),
    "the next number": lambda w: w.view(torch.int16).add_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "LAMB"])
@EVERY_DTYPE
def test_steps_go_on_from_writes(dtype: torch.dtype, name: str, write: Any) -> None:
    """Beside the counterpart, whose float32 weights take the elements that were written."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(40, 30).to(dtype))
    q = nn.Parameter(p.detach().float())
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    options |= {"max_grad_norm": None} if name == "LAMB" else {}
    ours = getattr(fusedtrain.optim, name)(
        [p], lr=0.013, **options, master_weights=True, state_dtype=F32
    )
    theirs = counterpart(name)([q], lr=0.013, **options)  # no ties
    model = nn.Module()
    model.p = p
    for number in range(6):
        if number % 2:
            before = p.detach().clone()
            version = p._version
            write(p.data)
            assert p._version == version
            q.data = torch.where(words(p.data) == words(before), q.data, p.data.float())
            assert (words(p.data) != words(before)).sum() > 100
        if number == 3:  # all that reads masters sees the writes, too
            seen = [
                fusedtrain.optim.float32_state_dict(model, ours)["p"],
                ours.state_dict()["state"][0]["master_param"],
            ]
            for master in seen:
                torch.testing.assert_close(master, q.data, rtol=2e-6, atol=1e-7)
        p.grad = torch.randn(40, 30).to(dtype)
        q.grad = p.grad.float()
        ours.step()
        theirs.step()
        torch.testing.assert_close(ours.state[p]["master_param"], q.data, rtol=2e-6, atol=1e-6)


def test_a_clamp_holds() -> None:
    """The largest weight was 2.61 after each step's clamp to 0.5."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64, 64).bfloat16())
    optimizer = fusedtrain.optim.AdamW([p], lr=1e-3, weight_decay=0.0, master_weights=True)
    for _ in range(5):
        p.grad = torch.randn(64, 64).bfloat16()
        optimizer.step()
        p.data.clamp_(-0.5, 0.5)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert p.abs().max() == 0.5
    assert optimizer.state[p]["master_param"].bfloat16().abs().max() == 0.5


@EVERY_DTYPE
def test_nothing_changes_without_writes(dtype: torch.dtype) -> None:
    """Steps with and without the option have the same bits."""
    torch.manual_seed(0)
    runs = []
    for follows in (0, 1):
        specs = [Spec((300,), dtype, master=True), Spec((9, 40), dtype, "transposed", master=True)]
        case = Case("adam", specs, [{"lr": 0.05, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}],
                    measures=7, max_norm=1.0, masters_follow=follows)  # fmt: skip
        for _ in range(20):
            case.new_gradients()
            torch.ops.fusedtrain.optimizer_step(*case.arguments(), None, None)
        runs.append([t for _, t in case.written()])
    for a, b in zip(*runs):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [True, "split32"])
def test_averages_in_the_place_of_weights_are_no_masters(kind: Any) -> None:
    """The float32 weights of the model are then the averages: those of float32 parameters are."""
    p = nn.Parameter(torch.randn(50).bfloat16())
    model = nn.Module()
    model.p = p
    optimizer = fusedtrain.optim.AdamW([p], lr=0.1, master_weights=kind, ema_decay=0.5)
    for _ in range(3):
        p.grad = torch.randn(50).bfloat16()
        optimizer.step()
    master = optimizer.state_dict()["state"][0]["master_param"].clone()
    with optimizer.swap_averages():
        average = optimizer.state[p]["ema"]
        assert torch.equal(fusedtrain.optim.float32_state_dict(model, optimizer)["p"], average)
        assert torch.equal(optimizer.state_dict()["state"][0]["master_param"], master)
    assert torch.equal(fusedtrain.optim.float32_state_dict(model, optimizer)["p"], master)


@EVERY_DTYPE
def test_a_master_may_be_written_too(dtype: torch.dtype) -> None:
    """In place, as torch sees it: the parameter is then the rounded master."""
    p = nn.Parameter(torch.randn(50).to(dtype))
    optimizer = fusedtrain.optim.AdamW([p], lr=0.0, weight_decay=0.0, master_weights=True)
    for number in range(4):
        if number in (1, 3):
            optimizer.state[p]["master_param"].clamp_(-0.25, 0.25 / number)
        if number == 2:
            p.data.mul_(0.5)
        p.grad = torch.randn(50).to(dtype)
        expected = p.detach().float() if number in (0, 2) else optimizer.state[p]["master_param"]
        expected = expected.clone()
        optimizer.step()
        assert torch.equal(optimizer.state[p]["master_param"], expected)
        assert torch.equal(p, expected.to(dtype))
    p.data = torch.ones(1, 50).to(dtype)[0]  # another place: the parameter counts
    optimizer.step()
    assert (optimizer.state[p]["master_param"] == 1).all()
