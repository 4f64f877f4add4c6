"""C++ and Python agree about which calls of batch norm are usual: the short way takes these."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import fusedtrain
from fusedtrain import _backends
from fusedtrain._torch_private import TorchDispatchMode
from fusedtrain.ops import batch_norm
from helpers.autograd_routes import NEEDS_CPP
from helpers.batch_norm import FORMULAS
from helpers.batch_norm_calls import CALLS, Arguments, C, usual


class Subclass(Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


# Cases of arguments that torch.nn.functional.batch_norm does not have, or refuses in its own way.
MORE: dict[str, Callable[[], Arguments]] = {
    "fixed": lambda: {"training": False},
    "fixed, eps of 0": lambda: {"training": False, "eps": 0.0},
    "fixed, only a running mean": lambda: {"training": False, "running_var": None},
    "fixed, no statistics": lambda: {"training": False, "running_mean": None, "running_var": None},
    "fixed, one value a channel": lambda: {"training": False, "input": torch.randn(1, C, 1, 1)},
    "softplus": lambda: {"activation": FORMULAS["softplus"]},
    "identity": lambda: {"activation": FORMULAS["identity"]},
    "branch scale": lambda: {"branch_scale": torch.ones(4)},
    "branch scale of 16 bits": lambda: {"branch_scale": torch.ones(4).half()},
    "branch scale of float64": lambda: {"branch_scale": torch.ones(4).double()},
    "branch scale of another size": lambda: {"branch_scale": torch.ones(3)},
    "branch scale [4, 1]": lambda: {"branch_scale": torch.ones(4, 1)},
    "branch scale with gaps": lambda: {"branch_scale": torch.ones(8)[::2]},
    "branch scale with a gradient": lambda: {"branch_scale": torch.ones(4, requires_grad=True)},
    "branch scale, a parameter": lambda: {
        "branch_scale": torch.nn.Parameter(torch.ones(4), requires_grad=False)
    },
    "branch scale, sparse": lambda: {"branch_scale": torch.ones(4).to_sparse()},
    "input of a subclass": lambda: {"input": torch.randn(4, C, 2, 2).as_subclass(Subclass)},
    "input, a parameter": lambda: {"input": torch.nn.Parameter(torch.randn(4, C, 2, 2))},
    "input, sparse": lambda: {"input": torch.randn(4, C, 2, 2).to_sparse()},
    "input on another device": lambda: {"input": torch.randn(4, C, 2, 2, device="meta")},
    "input of 16 bits": lambda: {"input": torch.randn(4, C, 2, 2).bfloat16()},
    "input and vectors of 16 bits": lambda: {
        k: t.detach().half() for k, t in usual().items() if isinstance(t, Tensor)
    },
    "input, channels last": lambda: {
        "input": torch.randn(4, C, 2, 2).to(memory_format=torch.channels_last)
    },
    "input with gaps": lambda: {"input": torch.randn(4, C, 2, 4)[..., ::2]},
    "weight of a subclass": lambda: {"weight": torch.rand(C).as_subclass(Subclass)},
    "weight on another device": lambda: {"weight": torch.rand(C, device="meta")},
    "weight, sparse": lambda: {"weight": torch.rand(C).to_sparse()},
    "running mean, a parameter": lambda: {
        "running_mean": torch.nn.Parameter(torch.zeros(C), requires_grad=False)
    },
    "running variance on another device": lambda: {"running_var": torch.ones(C, device="meta")},
    "residual of a subclass": lambda: {
        "residual": torch.randn(4, C, 2, 2).as_subclass(Subclass)
    },
    "residual, a parameter": lambda: {"residual": torch.nn.Parameter(torch.randn(4, C, 2, 2))},
    "residual on another device": lambda: {"residual": torch.randn(4, C, 2, 2, device="meta")},
}  # fmt: skip

SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "forward AD": forward_ad.dual_level,
    "a mode that sees functions": Functions,
    "a mode that sees operators": Operators,
    "hooks on saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t
    ),
    "recompute": fusedtrain.recompute,
}
# Calls that are usual for one of the two. C++ leaves to Python whatever is rare, and must leave to
# it hooks on saved tensors. Python leaves to torch every call in forward AD's level; C++, those
# with a tensor that has a tangent.
PYTHON_ALONE = {"momentum, a whole number", "negated"}
CPP_ALONE = {"forward AD"}
PYTHON_ALONE_WITHIN = {"a mode that sees functions", "a mode that sees operators"}
PYTHON_ALONE_RECORDS = {"hooks on saved tensors", "recompute"}


def _answers(name: str, surroundings: str) -> tuple[bool, bool, bool]:
    """Whether C++ and Python take the call as it is, and whether autograd is to record it."""
    answers = []
    cpp, relu = _backends.autograd(), FORMULAS["relu"]
    assert cpp is not None
    for route in ("cpp", "python"):
        torch.manual_seed(0)
        changes = {**CALLS, **MORE}[name]()
        a = {**usual(), "training": True, "branch_scale": None, "activation": relu, **changes}
        activation, residual = a.pop("activation"), a.pop("residual")
        scale, input = a.pop("branch_scale"), a.pop("input")
        order = ("weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        rest = [a[k] for k in order]
        tensors = [t for t in (input, residual, *rest) if isinstance(t, Tensor)]
        with SURROUNDINGS[surroundings]():
            records = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
            if route == "cpp":
                result = cpp.batch_norm_act(input, residual, scale, *rest, *activation)
                answers.append(result is not NotImplemented)
                continue
            other = mock.patch.object(batch_norm, "_unusual", return_value=None)
            with mock.patch.object(batch_norm, "_cpp", None), other as unusual:
                batch_norm.run(input, residual, scale, *rest, activation)
            answers.append(not unusual.called)
    return answers[0], answers[1], records


@NEEDS_CPP
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_cpp_and_python_agree(surroundings: str) -> None:
    taken = 0
    for name in (*CALLS, *MORE):
        cpp, python, records = _answers(name, surroundings)
        taken += python
        hooked = records and surroundings in PYTHON_ALONE_RECORDS
        if hooked or name in PYTHON_ALONE or surroundings in PYTHON_ALONE_WITHIN:
            assert not cpp, name
        elif surroundings in CPP_ALONE:
            assert not python, name
        else:
            assert cpp == python, name
    assert taken > 15 or surroundings in CPP_ALONE
