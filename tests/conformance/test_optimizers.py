"""Every optimizer of fusedtrain.optim that is one of torch.optim's, on torch's OptimizerInfo."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from _tables import DTYPES, error, optimizer_info, outcome, short
from differences import judge, unknown_keys
from torch import Tensor, nn

import fusedtrain.optim

NAMES = ["Adagrad", "Adam", "AdamW", "RMSprop", "SGD"]
CHECKS = ("steps", "constructor", "state", "mistakes", "keywords", "parameters")
SHAPES = [(3, 5), (7,), (), (2, 0), (4, 3, 2, 2), (33,)]
# Units in the last place after ten steps; or four times what torch's own result is off.
LIMIT = {torch.float32: 16.0, torch.float64: 256.0, torch.float16: 4.0, torch.bfloat16: 4.0}
Params = list[nn.Parameter]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:The .grad attribute of a"),
]


def classes(name: str) -> tuple[Any, Any]:
    return getattr(fusedtrain.optim, name), getattr(torch.optim, name)


def inputs(name: str) -> list[Any]:
    return list(optimizer_info(name).optim_inputs_func("cpu"))


def parameters(dtype: torch.dtype) -> Params:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def give_gradients(params: Params, seed: int, dtype: torch.dtype) -> None:
    """Numbers that `dtype` holds; one parameter in turn has none."""
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator).to(dtype).to(p.dtype)
        p.grad = None if i == seed % 7 else grad


def step(optimizer: Any, params: Params, seeds: Any, dtype: torch.dtype = torch.float64) -> None:
    for seed in seeds:
        give_gradients(params, seed, dtype)
        optimizer.step()


def values(optimizer: Any, params: Params) -> dict[str, Tensor]:
    """Parameters and states, by name."""
    tensors = {str(i): p.detach() for i, p in enumerate(params)}
    for i, p in enumerate(params):
        for name, value in optimizer.state.get(p, {}).items():
            if value is not None:
                tensors[f"{i} {name}"] = torch.as_tensor(value)
    return tensors


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for what, b in theirs.items():
        assert error(mine[what].double(), b.double()) <= LIMIT[torch.float64], what


def test_every_optimizer_of_torch_is_here() -> None:
    assert {n for n in fusedtrain.optim.__all__ if hasattr(torch.optim, n)} == set(NAMES)
    assert not unknown_keys("optimizers", (f"{check}/{n}" for check in CHECKS for n in NAMES))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", NAMES)
def test_ten_steps(name: str, dtype: torch.dtype) -> None:
    """Every entry of the table; float64 decides which of the two is nearer."""
    differences = set()
    for item in inputs(name):
        results = []
        for cls, wide in zip((*classes(name), classes(name)[1]), (dtype, dtype, torch.float64)):
            params = parameters(dtype)
            if wide is not dtype:
                params = [nn.Parameter(p.detach().to(wide)) for p in params]
            optimizer = cls(params, **copy.deepcopy(item.kwargs))
            step(optimizer, params, range(10), dtype)
            results.append({str(i): p.detach() for i, p in enumerate(params)})
        mine, theirs, truth = results
        for what, a in mine.items():
            allowed = max(LIMIT[dtype], 4 * error(theirs[what], truth[what]))
            if not error(a, truth[what]) <= allowed:
                differences.add(item.desc)
    judge(f"optimizers/steps/{name}", differences, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_schedulers(name: str) -> None:
    for makers in optimizer_info(name).scheduler_inputs:
        results = []
        for cls in classes(name):
            params = parameters(torch.float64)
            optimizer = cls(params, lr=0.1)
            schedulers = [make(optimizer) for make in makers]
            for seed in range(4):
                step(optimizer, params, [seed])
                for scheduler in schedulers:
                    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(*([1.0] if plateau else []))
            results.append(values(optimizer, params))
        assert_same(*results)


@pytest.mark.parametrize("name", NAMES)
def test_constructor(name: str) -> None:
    """torch's arguments in torch's order, with torch's defaults, in torch's groups."""
    ours, stock = classes(name)
    assert issubclass(ours, stock)
    mine, theirs = (inspect.signature(cls).parameters for cls in (ours, stock))
    assert [n for n in mine if n in theirs] == list(theirs)
    assert {n: mine[n].default for n in theirs} == {n: p.default for n, p in theirs.items()}
    assert [mine[n].kind for n in theirs] == [p.kind for p in theirs.values()]
    differences = set()
    for item in inputs(name):
        a, b = (cls(parameters(torch.float32), **item.kwargs) for cls in classes(name))
        differences |= {
            f"group has {k} more" for k in a.param_groups[0].keys() - b.param_groups[0].keys()
        }
        differences |= {
            f"default {k}" for k in b.defaults if str(a.defaults[k]) != str(b.defaults[k])
        }
        for k in b.param_groups[0].keys() - {"params"}:
            if str(a.param_groups[0][k]) != str(b.param_groups[0][k]):
                differences.add(f"{k} of the group")
    judge(f"optimizers/constructor/{name}", differences)


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=short)
@pytest.mark.parametrize("name", NAMES)
def test_state(name: str, default: torch.dtype) -> None:
    """Checkpoints have the same entries; ten more steps after loading are equal, both ways."""
    torch.set_default_dtype(default)
    differences = set()
    try:
        for item in inputs(name):
            made = []
            for cls in classes(name):
                params = parameters(torch.float64)
                optimizer = cls(params, **copy.deepcopy(item.kwargs))
                step(optimizer, params, range(3))
                made.append((optimizer, params))
            (mine, _), (theirs, _) = made
            if len(mine.state) != len(theirs.state):
                differences.add(f"{len(mine.state)} states instead of {len(theirs.state)}")
            differences |= differing_states(
                mine.state_dict()["state"], theirs.state_dict()["state"]
            )
            for source, params in made:
                for cls in classes(name):
                    file = io.BytesIO()
                    torch.save(source.state_dict(), file)
                    file.seek(0)
                    copied = [nn.Parameter(p.detach().clone()) for p in params]
                    target = cls(copied, lr=3.0)
                    target.load_state_dict(torch.load(file, weights_only=True))
                    step(target, copied, range(10, 20))
                    made_on = copy.deepcopy((source, params))
                    step(*made_on, range(10, 20))
                    assert_same(values(target, copied), {
                        k: v for k, v in values(*made_on).items() if " " not in k
                    })  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
    judge(f"optimizers/state/{name}", differences, default)


def differing_states(mine: dict[int, Any], theirs: dict[int, Any]) -> set[str]:
    differences = set()
    if mine.keys() != theirs.keys():
        differences.add(f"states of {sorted(mine)} instead of {sorted(theirs)}")
    for index in mine.keys() & theirs.keys():
        a, b = mine[index], theirs[index]
        if a.keys() != b.keys():
            differences.add(f"{sorted(a)} instead of {sorted(b)}")
        for key in a.keys() & b.keys():
            x, y = a[key], b[key]
            if type(x) is not type(y):
                differences.add(f"{key} is a {type(x).__name__} instead of a {type(y).__name__}")
            elif isinstance(x, Tensor) and (x.dtype, x.shape) != (y.dtype, y.shape):
                differences.add(f"{key} is {short(x.dtype)}{[*x.shape]} instead of "
                                f"{short(y.dtype)}{[*y.shape]}")  # fmt: skip
    return differences


def said_by(cls: Any, mistake: Any) -> str:
    """The message of the exception or warning."""
    params = parameters(torch.float32) if mistake.params is None else mistake.params
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            cls(params, **copy.deepcopy(mistake.kwargs))
        except Exception as error:
            return str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("name", NAMES)
def test_mistakes(name: str) -> None:
    """The types of exceptions and warnings: of the table's mistakes, and of common ones."""
    info, differences = optimizer_info(name), set()
    for item in info.optim_error_inputs_func("cpu", torch.float32):
        mistake = item.optimizer_error_input

        def call(cls: Any, mistake: Any = mistake) -> Any:
            params = parameters(torch.float32) if mistake.params is None else mistake.params
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer = cls(params, **mistake.kwargs)
                step(optimizer, [p for g in optimizer.param_groups for p in g["params"]], [0])

        mine, theirs = (outcome(call, cls) for cls in classes(name))
        assert theirs is item.error_type
        ours, stock = (said_by(cls, mistake) for cls in classes(name))
        assert ours == stock
        if mine is not theirs:
            differences.add(f"{mistake.desc}: {_kind(mine)} instead of {_kind(theirs)}")
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "no parameters": ([], {}),
        "numbers": ([1.0], {}),
        "no leaf": ([torch.ones(2, requires_grad=True) * 2], {}),
        "integers": ([torch.ones(2, dtype=torch.int64)], {}),
        "negative lr": (parameters(torch.float32), {"lr": -1.0}),
        "lr of a string": (parameters(torch.float32), {"lr": "a"}),
        "negative weight decay": (parameters(torch.float32), {"weight_decay": -1.0}),
        "an unknown keyword": (parameters(torch.float32), {"unknown": 1}),
    }
    for what, (params, kwargs) in cases.items():
        mine, theirs = (outcome(cls, params, **kwargs) for cls in classes(name))
        if mine is not theirs and isinstance(mine, type) | isinstance(theirs, type):
            differences.add(f"{what}: {_kind(mine)} instead of {_kind(theirs)}")
    judge(f"optimizers/mistakes/{name}", differences)


def _kind(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


@pytest.mark.parametrize("name", NAMES)
def test_keywords(name: str) -> None:
    """foreach, fused, capturable, differentiable: taken with the same steps, or refused."""
    differences = set()
    for key in ("foreach", "fused", "capturable", "differentiable"):
        results: list[Any] = []
        for cls in classes(name):

            def call(cls: Any = cls, key: str = key) -> Any:
                params: Any = parameters(torch.float64)
                if key == "differentiable":  # torch wants no leaves there
                    params = [p.clone() for p in params]
                optimizer = cls(params, lr=0.1, **{key: True})
                step(optimizer, params, range(3))
                return list(params)

            results.append(outcome(call))
        mine, theirs = results
        if isinstance(mine, list) and isinstance(theirs, list):
            assert_same(*({str(i): p.detach() for i, p in enumerate(r)} for r in results))
        elif mine is not theirs:
            differences.add(f"{key}: {_kind(mine)} instead of {_kind(theirs)}")
    judge(f"optimizers/keywords/{name}", differences)


@pytest.mark.parametrize("name", NAMES)
def test_parameters(name: str) -> None:
    """Kinds of parameters and gradients: complex, sparse, expanded, with gaps, of other dtypes."""
    differences = set()
    gradients = {
        "complex": torch.ones(4, 2, dtype=torch.complex64),
        "sparse": torch.eye(4, 2).to_sparse(),
        "expanded": torch.ones(4, 1).expand(4, 2),
        "with gaps": torch.ones(4, 4)[:, ::2],
        "transposed": torch.arange(8.0).view(2, 4).t(),
        "of another shape": torch.ones(2, 4),
        "of another dtype": torch.ones(4, 2, dtype=torch.float64),
    }
    for what, grad in gradients.items():
        results: list[Any] = []
        for cls in classes(name):

            def call(cls: Any = cls, grad: Tensor = grad) -> Any:
                dtype = torch.complex64 if grad.is_complex() else torch.float32
                p = nn.Parameter(torch.full((4, 2), 2.0, dtype=dtype))
                p.grad = grad.clone() if grad.layout is torch.strided else grad
                optimizer = cls([p], lr=0.1)
                for _ in range(3):
                    optimizer.step()
                return p.detach()

            results.append(outcome(call))
        mine, theirs = results
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        elif mine is not theirs:
            differences.add(f"{what}: {_kind(mine)} instead of {_kind(theirs)}")
    judge(f"optimizers/parameters/{name}", differences)


@pytest.mark.parametrize("name", NAMES)
def test_life(name: str) -> None:
    """Groups that are added, hooks, closures, zero_grad, pickle and deepcopy, repr, own states."""
    results = []
    for cls in classes(name):
        params, seen = parameters(torch.float64), []
        optimizer = cls(params[:2], lr=0.1)
        optimizer.add_param_group({"params": params[2:], "lr": 0.05})
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
        try:
            step(optimizer, params, range(2))
        except KeyError:
            if cls is not torch.optim.Adagrad:
                raise
            pytest.skip("needs torch 2.12: Adagrad of older ones takes no groups later")
        loss = optimizer.step(lambda: (give_gradients(params, 9, torch.float64), 5.0)[1])  # noqa: B023
        assert loss == 5.0
        assert seen == ["before", "after"] * 3
        again, copied = copy.deepcopy((optimizer, params))
        step(again, copied, [4])
        step(optimizer, params, [4])
        assert_same(values(again, copied), values(optimizer, params))
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is None or not p.grad.any() for p in params)
        optimizer.zero_grad()
        assert all(p.grad is None for p in params)
        optimizer.state["x"] = 1
        assert optimizer.state_dict()["state"]["x"] == 1
        del optimizer.state["x"]
        assert repr(optimizer).startswith(f"{name} (\nParameter Group 0\n")
        loaded = pickle.loads(pickle.dumps(optimizer))
        assert loaded.param_groups[1]["lr"] == 0.05
        results.append(values(optimizer, params))
    assert_same(*results)
