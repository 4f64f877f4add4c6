"""Every op refuses a tensor of another device before it starts or writes anything; and its fake
kernel and schema are right, by torch.library.opcheck.

The other device is meta: the op's kernel is called past the dispatcher, which would take meta's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.reference import ACTIVATIONS, FAMILIES
from helpers.backends import BACKENDS, Registered
from helpers.batch_norm import FORMULAS
from helpers.launches import emulated
from helpers.optimizer_cases import Case, Spec, bits
from helpers.optimizers import busy

ACT = tuple(FORMULAS["silu"])
X, PER_CHANNEL = torch.randn(3, 4, 5), torch.randn(4)
POOL = ([2, 2], [2, 2], [0, 0])
CONV = ([1, 1], [1, 1], [1, 1])
SEED = torch.tensor([1, 2])


def _one(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(1, dtype=dtype)


def _norm() -> tuple[Tensor, ...]:
    """Weight, bias and two statistics."""
    return tuple(torch.rand(4) + 0.5 for _ in range(4))


def _optimizer() -> tuple[Any, ...]:
    case = Case("adam", [Spec((4, 6), torch.bfloat16, master=True, average=torch.float32)],
                [busy("adam", lr_index=0)], lrs=[torch.tensor([0.1])], scale=2.0, found_inf=0.0,
                measures=7)  # fmt: skip
    return case.arguments()


# Arguments of each op of several tensors.
CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "mish_backward": lambda: (X.clone(), X.clone()),
    "prelu": lambda: (X.clone(), PER_CHANNEL.clone()),
    "prelu_backward": lambda: (X.clone(), X.clone(), PER_CHANNEL.clone()),
    "star_relu": lambda: (X.clone(), _one(), _one()),
    "star_relu_backward": lambda: (X.clone(), X.clone(), _one(), _one()),
    "few_bit_backward": lambda: (X.clone(), torch.zeros(256, dtype=torch.uint8), 8, 8),
    "normalize_images": lambda: (
        torch.zeros(1, 3, 4, 4, dtype=torch.uint8), torch.ones(3, 3), torch.float32,
        torch.contiguous_format,
    ),
    "max_pool2d_backward": lambda: (
        torch.randn(1, 2, 3, 3), torch.zeros(64, dtype=torch.uint8), 6, 6, *POOL, 2, False,
    ),
    "depthwise_conv": lambda: (
        torch.randn(2, 3, 6, 6), torch.randn(3, 1, 3, 3), torch.randn(3), *CONV, [1, 1], False,
    ),
    "depthwise_conv_backward": lambda: (
        torch.randn(2, 3, 6, 6), torch.randn(2, 3, 6, 6), torch.randn(3, 1, 3, 3), *CONV, False,
        True, True, True,
    ),
    "fold_weight": lambda: (torch.randn(4, 2, 3, 3), X[0, :, 0].clone(), *_norm(), 1e-3, False, 1),
    "fold_weight_backward": lambda: (
        torch.randn(4, 2, 3, 3), X[0, :, 0].clone(), torch.randn(4, 2, 3, 3), *_norm(), 1e-3, False,
        1,
    ),
    "gated": lambda: (X.clone(), X.clone(), *ACT),
    "gated_backward": lambda: (*(X.clone() for _ in range(5)), *ACT),
    "gated_spread": lambda: (torch.randn(3, 4, 1), X.clone(), *ACT),
    # With an activation, the gate's is computed, into memory of its own, before `value` is seen.
    "gated_spread_backward": lambda: (
        X.clone(), torch.randn(3, 4, 1), X.clone(), *FORMULAS["identity"], True,
    ),
    "scale_add": lambda: (X.clone(), torch.randn(3, 4), X.clone(), 1),
    "scale_add_backward": lambda: (X.clone(), X.clone(), torch.randn(3, 4), 1, True),
    "bias_act": lambda: (
        X.clone(), PER_CHANNEL.clone(), SEED.clone(), 1, *ACT, 1.0, -1.0, 0.5,
    ),
    "bias_act_backward": lambda: (
        X.clone(), X.clone(), PER_CHANNEL.clone(), SEED.clone(), 1, *ACT, 1.0, -1.0, 0.5, True,
    ),
    "batch_norm_act": lambda: (
        X.clone(), X.clone(), torch.ones(3), *_norm(), True, 0.1, 1e-3, *ACT,
    ),
    "batch_norm_act_": lambda: (
        X.clone(), *_norm(), True, 0.1, 1e-3, *FORMULAS["leaky_relu"],
    ),
    "batch_norm_act_restore": lambda: (X.clone(), *_norm(), 0.2),
    "batch_norm_act_apply": lambda: (X.clone(), X.clone(), torch.ones(3), *_norm(), *ACT),
    "batch_norm_act_backward": lambda: (
        X.clone(), X.clone(), X.clone(), torch.ones(3), *_norm(), True, *ACT, True, True, True,
    ),
    "batch_norm_act_backward_reduce": lambda: (
        X.clone(), X.clone(), X.clone(), torch.ones(3), *_norm(), *ACT, True,
    ),
    "batch_norm_act_backward_apply": lambda: (
        X.clone(), X.clone(), X.clone(), torch.ones(3), *_norm(),
        torch.zeros(2, 4, dtype=torch.float64), *ACT, True,
    ),
    "measure_gradients": lambda: _optimizer(),
    "try_update": lambda: (*_optimizer(), torch.zeros(1, 3, dtype=torch.float64)),
    "optimizer_step": lambda: (
        *_optimizer(), *(torch.zeros(1, 3, dtype=torch.float64) for _ in "ab"),
    ),
    "update_scale": lambda: (
        _one(), _one(torch.int32), _one(torch.int32), _one(), 2.0, 0.5, 2, 2, 1.0, 8.0,
    ),
    "zero_tensors": lambda: ([X.clone(), torch.ones(6, 5)[:, 1:3], X.clone()],),
}  # fmt: skip


def _places(arguments: tuple[Any, ...]) -> list[tuple[int, int | None]]:
    """The places of tensors: the number of the argument and, in a list, that of the element."""
    places: list[tuple[int, int | None]] = []
    for i, a in enumerate(arguments):
        if isinstance(a, Tensor):
            places.append((i, None))
        elif isinstance(a, list):
            places += [(i, j) for j, t in enumerate(a) if isinstance(t, Tensor)]
    return places


@pytest.mark.parametrize("backend", ["cpu", "emulated"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.launches_nothing("arguments are refused")
def test_a_tensor_of_another_device(name: str, backend: str) -> None:
    kernels = BACKENDS[backend]()
    space = torch.ops.fusedtrain_emulated if backend == "emulated" else torch.ops.fusedtrain
    op = getattr(space, name).default
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    assert kernels.has(name)
    places = _places(CALLS[name]())
    assert len(places) > 1
    for i, j in places:
        arguments = list(CALLS[name]())
        owner, at = (arguments, i) if j is None else (arguments[i], j)
        owner[at] = owner[at].to("meta")
        rest = [t for t in torch.utils._pytree.tree_leaves(arguments)
                if isinstance(t, Tensor) and not t.is_meta]  # fmt: skip
        before = [bits(t) for t in rest]
        started = emulated()
        if backend == "emulated":
            kernels.emulator.c.emulator_reset()  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=r"fusedtrain") as raised:
            op.redispatch(cpu, *arguments)
        assert "emulator:" not in str(raised.value), f"argument {i} is not looked at in time"
        assert started == emulated()
        assert [bits(t) for t in rest] == before, f"argument {i}: something was written"


def test_every_op_of_several_tensors_is_here() -> None:
    """Activations are all like mish, prelu or star_relu."""
    kernels, missing = Registered("cpu"), set()
    for entry in torch._C._dispatch_get_registrations_for_dispatch_key("Meta"):
        space, _, name = entry.partition("::")
        if space != "fusedtrain" or not kernels.has(name):
            continue
        schema = getattr(torch.ops.fusedtrain, name).default._schema
        several = sum("Tensor" in str(a.type) for a in schema.arguments) > 1
        if several and name.removesuffix("_backward") not in ACTIVATIONS:
            missing.add(name)
    assert missing - set(CALLS) == set()


def _image(*shape: int, last: bool) -> Tensor:
    x = torch.randn(shape)
    return x.contiguous(memory_format=torch.channels_last) if last else x


_CODES = torch.zeros(256, dtype=torch.uint8)
_RESNET = ([3, 3], [2, 2], [1, 1])
# Calls besides those above: of one tensor, without a tensor, with nothing asked for.
MORE: dict[str, list[tuple[Any, ...]]] = {
    "few_bit": [(X, 8, 3)],
    "few_bit_backward": [(torch.randn(3, 5), _CODES[:96], 8, 3)],
    "max_pool2d": [
        (_image(2, 3, 7, 6, last=last), *_RESNET, True, 4, last) for last in (False, True)
    ],
    "max_pool2d_backward": [
        (_image(2, 3, 4, 4, last=last), _CODES[:128], 7, 6, *_RESNET, 4, last)
        for last in (False, True)
    ],
    "gated_spread_backward": [
        (X, torch.randn(3, 4, 1), X, *ACT, True),
        (X, torch.randn(3, 4, 1), None, *ACT, True),
        (X, torch.randn(3, 4, 1), X, *ACT, False),
    ],
    "scale_add": [(X, torch.randn(3, 4), None, 1)],
    "scale_add_backward": [(X, None, torch.randn(3, 4), 1, True)],
    "bias_act_backward": [(X, X, None, None, 1, *ACT, 1.0, 2.0, 0.0, False)],
}  # fmt: skip
CHAINS = tuple(n for family in ("gated", "scale_add", "bias_act") for n in FAMILIES[family])
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in dict.fromkeys((*CALLS, *MORE))
        if name not in (*FAMILIES["activations"], *FAMILIES["optimizers"], *FAMILIES["scaling"])
        and not name.startswith("batch_norm")
        for dtype in (DTYPES if name in CHAINS else DTYPES[:1])
    ],
    ids=str,
)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    """test_autograd.py has the activations', test_batch_norm_compilers.py batch norm's."""
    calls = MORE.get(name, []) + ([CALLS[name]()] if name in CALLS else [])
    for call in calls:
        floats = [isinstance(a, Tensor) and a.dtype is torch.float32 for a in call]
        arguments = tuple(
            a.to(dtype) if is_float else a for a, is_float in zip(call, floats, strict=True)
        )
        torch.library.opcheck(
            getattr(torch.ops.fusedtrain, name).default, arguments,
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip
