"""Every op refuses wrong arguments and a tensor of another device before it starts or writes
anything; and its fake kernel and schema are right, by torch.library.opcheck.

The other device is meta: the op's kernel is called past the dispatcher, which would take meta's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.reference import ACTIVATIONS, FAMILIES
from helpers.backends import BACKENDS, Kernels, Registered, placed
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


def _affine() -> tuple[Tensor, ...]:
    return (*_norm()[:2], torch.rand(3, 4), torch.rand(3, 4))


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
    "row_norm": lambda: (
        X.clone(), X.clone(), PER_CHANNEL.clone(), PER_CHANNEL.clone(), 1, 1, 1e-5, True,
    ),
    "row_norm_backward": lambda: (
        X.clone(), X.clone(), X.clone(), PER_CHANNEL.clone(), X[:, :1].clone(), X[:, :1].clone(), 1,
        1, True, True,
    ),
    "group_norm_act": lambda: (X.clone(), 2, *_affine(), 1e-5, *ACT),
    "group_norm_act_apply": lambda: (X.clone(), torch.rand(4, 3, 4), *ACT),
    "group_norm_act_backward": lambda: (
        X.clone(), X.clone(), 2, *_affine(), torch.rand(4, 3, 4), *ACT, *(True,) * 5,
    ),
    "scale_add": lambda: (X.clone(), torch.randn(3, 4), X.clone(), 1),
    "scale_add_backward": lambda: (X.clone(), X.clone(), torch.randn(3, 4), 1, True),
    "bias_act": lambda: (
        X.clone(), PER_CHANNEL.clone(), SEED.clone(), X.clone(), 1, *ACT, 1.0, -1.0, 0.5,
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


# Changes of the calls above, or of a call in full, and the error.
Mistake = tuple[dict[int, Any], str]
MISTAKES: dict[str, list[Mistake]] = {
    "gated": [
        ({1: X[:2]}, "fusedtrain"),
        ({0: X.double()}, "fusedtrain"),
        ({2: 99}, "fusedtrain"),
    ],
    "gated_spread": [  # without an activation: see above
        ({0: torch.ones(3, 5, 1), 2: -1}, "fusedtrain"),
        ({0: torch.ones(3, 4), 2: -1}, "fusedtrain"),
        ({0: torch.ones(3, 4, 2), 2: -1}, "fusedtrain"),
        ({0: torch.ones(3, 4, 1).double(), 2: -1}, "fusedtrain"),
        ({2: 99}, "fusedtrain"),
    ],
    "gated_spread_backward": [
        ({1: torch.ones(2, 4, 1)}, "fusedtrain"),
        ({2: X[:2]}, "fusedtrain"),
    ],
    "row_norm": [
        ({0: X.int()}, "input must be float32"),
        ({0: X[:, ::2]}, "input must be dense"),
        ({4: 2}, "must be dimensions of input"),
        ({0: X.transpose(1, 2), 5: 2}, "must lie one in another"),
        ({1: X[:2]}, "must have the same shape"),
        ({2: torch.ones(5)}, "weight must have 4 elements"),
        ({3: torch.ones(4).double()}, "bias must have the dtype of input"),
        ({0: X.bfloat16(), 1: None, 2: torch.ones(4).bfloat16()}, "must have one dtype"),
        ({7: False}, "only a centered norm has a bias"),
    ],
    "row_norm_backward": [
        ({0: X[:2]}, "must have the same shape"),
        ({1: X.double()}, "must have the same dtype"),
        ({4: X[:, :1].double()}, "mean must have a number for each block"),
        ({5: X[:, :1, :2].clone()}, "rstd must have a number for each block"),
        ({5: X[:, :1].transpose(0, 2).contiguous().transpose(0, 2)}, "rstd must have the layout"),
    ],
    "group_norm_act": [
        ({0: X.int()}, "input must be float32"),
        ({0: X[0, 0]}, "input must have 2 dimensions"),
        ({1: 3}, "num_groups must divide"),
        ({1: 0}, "num_groups must divide"),
        ({2: torch.ones(5)}, "weight must have 4 elements"),
        ({2: torch.ones(4).double()}, "must have one dtype"),
        ({2: torch.ones(4).half(), 3: torch.ones(4).half()}, "weight must have the dtype"),
        ({4: torch.ones(4)}, "scale must have 12 elements"),
        ({5: torch.ones(3, 4).half()}, "shift must have the dtype"),
        ({7: 99}, "no such activation"),
    ],
    "group_norm_act_apply": [
        ({1: torch.ones(4, 12)}, "vectors must be"),
        ({1: torch.ones(4, 3, 5)}, "vectors must have 48 elements"),
        ({1: torch.ones(4, 3, 4).double()}, "vectors must have the dtype"),
    ],
    "group_norm_act_backward": [
        ({0: X[:2]}, "must have the same shape"),
        ({7: torch.ones(4, 2, 4)}, "vectors must be"),
    ],
    "scale_add": [
        ({1: torch.ones(3, 5)}, "fusedtrain"),
        ({1: torch.ones(2, 4)}, "fusedtrain"),
        ({1: torch.ones(3, 4).double()}, "fusedtrain"),
        ({3: 3}, "fusedtrain"),
        ({2: X[:2]}, "fusedtrain"),
    ],
    "bias_act": [
        ({1: torch.ones(5)}, "fusedtrain"),
        ({10: 1.0}, "fusedtrain"),
        ({2: SEED.int()}, "fusedtrain"),
        ({3: X[:2]}, "fusedtrain"),
        ({3: X.double()}, "fusedtrain"),
        ({0: X.int(), 1: None, 3: None}, "fusedtrain"),
    ],
    "max_pool2d": [
        ({0: torch.zeros(6, 6)}, r"expected \[N, C, H, W\]"),
        ({0: torch.zeros(2, 6, 6), 6: True}, r"expected \[N, C, H, W\]"),
        ({0: torch.zeros(1, 2, 6, 6).int()}, "input must be float32"),
        ({1: [2]}, "must be two numbers"),
        ({1: [0, 2]}, "kernel_size must be from 1 to 256"),
        ({2: [1, 0]}, "stride at least 1"),
        ({3: [2, 0]}, "at most|half of kernel_size"),
        ({5: 3}, "bits must be 0, 1, 2, 4 or 8"),
        ({1: [3, 3]}, "2 bits are too few"),
        ({1: [7, 7], 5: 8}, "smaller than a window"),
        ({0: torch.zeros(1, 2, 0, 6)}, "no pixels"),
    ],
    "max_pool2d_backward": [
        ({1: torch.zeros(63, dtype=torch.uint8)}, "codes must be the 2-bit codes"),
        ({1: torch.zeros(64, dtype=torch.int32)}, "codes must be the 2-bit codes"),
        ({1: torch.zeros(1, 64, dtype=torch.uint8)}, "codes must be the 2-bit codes"),
    ],
    "depthwise_conv": [
        ({1: torch.ones(3, 1, 3, 3).half()}, "weight must have the dtype of the others"),
        ({0: torch.ones(6, 6)}, r"expected \[N, C, L\]"),
        ({1: torch.ones(2, 1, 3, 3), 2: None}, "weight must be"),
        ({2: torch.ones(2)}, "bias must have a number for each channel"),
        ({3: [1]}, "a number for each dimension"),
        ({3: [0, 0]}, "must be positive"),
        ({0: torch.ones(2, 3, 2, 6), 4: [0, 0], 5: [0, 0]}, "smaller than the kernel"),
        (
            {0: torch.ones(2, 3, 6), 1: torch.ones(3, 1, 3), 3: [1], 4: [0], 5: [0], 6: [1],
             7: True}, "has no channels_last",
        ),
    ],
    "depthwise_conv_backward": [
        ({0: torch.randn(1, 3, 6, 6)}, "grad must have the shape of the output"),
    ],
    "fold_weight": [
        ({4: torch.ones(3)}, "running_mean must have one element for each of the 4"),
        ({7: True, 8: 3}, "groups must divide"),
        ({0: torch.ones(4, 2, 3, 3).int()}, "weight must be float32"),
        ({0: torch.ones(4)}, "weight must have 2 dimensions"),
    ],
    "fold_weight_backward": [({0: torch.randn(1, 2, 3, 3)}, "must have the same shape")],
    "normalize_images": [
        ({0: torch.zeros(1, 3, 4, 4)}, "input must be uint8"),
        ({0: torch.zeros(3, 4, 4, dtype=torch.uint8)}, "input must have 4 dimensions"),
        ({1: torch.ones(3, 2)}, r"must be float32 \[3, 3\]"),
        ({1: torch.ones(3, 3).double()}, r"must be float32 \[3, 3\]"),
        ({2: torch.float64}, "dtype must be float32, float16 or bfloat16"),
        ({3: torch.channels_last_3d}, "memory_format must be preserve"),
    ],
    "batch_norm_act_": [({0: torch.randn(3, 4, 10)[..., ::2]}, "input must be dense")],
}  # fmt: skip


@pytest.mark.launches_nothing("arguments are refused")
@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_arguments(ops: Kernels, name: str) -> None:
    if not ops.kernel:
        pytest.skip("not a case: plain torch raises errors of its own")
    pool = (torch.zeros(1, 2, 6, 6), *POOL, False, 2, False)
    for changes, message in MISTAKES[name]:
        call = dict(enumerate(CALLS[name]() if name in CALLS else pool)) | changes
        arguments = [placed(a, ops.device) if isinstance(a, Tensor) else a for a in call.values()]
        with pytest.raises(RuntimeError, match=message):
            ops(name, *arguments)


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
    "row_norm": [
        (X, None, None, None, 1, 2, 1e-5, False),
        (X.transpose(0, 2), None, None, None, 1, 1, 1e-5, True),
    ],
    "row_norm_backward": [
        (X, None, X, None, X.new_empty(0), torch.ones(3, 1, 1), 1, 2, False, False),
    ],
    "group_norm_act": [(X, 2, None, None, None, None, 1e-5, *ACT)],
    "group_norm_act_backward": [
        (X, X, 2, *_affine(), torch.rand(4, 3, 4), *ACT, *needs)
        for needs in ((True,) + (False,) * 4, (False,) + (True,) * 4)
    ],
    "scale_add": [(X, torch.randn(3, 4), None, 1)],
    "scale_add_backward": [(X, None, torch.randn(3, 4), 1, True)],
    "bias_act": [(X, None, None, None, -1, *ACT, 1.0, 2.0, 0.0)],
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
