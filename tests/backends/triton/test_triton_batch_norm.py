"""Batch norm on Triton alone: how its kernels cut a tensor, how they number its elements,
what they refuse, how many are launched; and, compiled for every target, 16-byte accesses without
spills.

test_batch_norm_kernels.py and test_batch_norm_numbers.py have the numbers. Compilation has
processes of its own: see tests/helpers/compiling.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.reference import batch_norm as reference
from fusedtrain.reference.pointwise import POINTWISE
from helpers import TESTS
from helpers.backends import HAS_GPU, Kernels, copied, placed
from helpers.batch_norm import FORMULAS, LAYOUTS, Case, check, kernels_of, last
from helpers.compiling import TARGETS, VIEWS, check_code, compile_for, fake_driver, run
from helpers.triton_interpreter import ORDERS, programs_in

pytest.importorskip("triton", reason="triton is not installed")

RELU = FORMULAS["relu"]
# Rows that start on 16 bytes or do not; a tile's width of columns and more; short and long planes.
SHAPES: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(3, 5, 7, 3),
    "planes": lambda: torch.randn(2, 3, 272),
    "channels_last": lambda: last(3, 5, 3, 2),
    "many channels": lambda: last(2, 144, 2, 2),
}


@pytest.fixture
def ops() -> Kernels:
    return kernels_of("triton")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_placing_keeps_the_layout(layout: str) -> None:
    """Tensors that tests give a kernel on a GPU, where ``x.to(device)`` is dense and aligned."""
    t = LAYOUTS[layout]()
    copy = copied(t, "cpu")
    assert torch.equal(copy, t)
    assert (copy.stride(), copy.storage_offset()) == (t.stride(), t.storage_offset())
    assert copy.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
    assert copy.untyped_storage().nbytes() == t.untyped_storage().nbytes()
    assert copy.data_ptr() % 16 == t.data_ptr() % 16


def many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedtrain.triton import _batch_norm_calls, _layout

    monkeypatch.setattr(_layout, "_PROGRAMS", 2)
    monkeypatch.setattr(_batch_norm_calls, "_cut", _batch_norm_calls._cut.__wrapped__)


@pytest.mark.slow
@pytest.mark.parametrize("view", [*VIEWS.values(), (1100, 3, 1), (3, 2, 1), (1, 3, 2200)], ids=str)
def test_every_cut(ops: Kernels, view: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns and planes, several steps a program, fewer in the last; same bits in every order."""
    many_steps(monkeypatch)
    case = Case(torch.randn(view), activation="silu", residual=True, branch=True, ops=ops)
    check(ops, case)
    results = []
    for order in ["forward"] * 2 if HAS_GPU else ORDERS:
        if HAS_GPU:
            results.append(both(ops, case))
        else:
            with programs_in(order):
                results.append(both(ops, case))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def both(ops: Kernels, case: Case) -> tuple[Tensor, ...]:
    arguments = case.forward()
    output, mean, invstd = ops("batch_norm_act", *arguments)
    gradients = ops("batch_norm_act_backward", *case.backward(output, mean, invstd))
    return output, mean, invstd, *arguments[5:7], *gradients


def test_wide_numbers(ops: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns counted with 64 bits."""
    import triton.language as tl

    from fusedtrain.triton import _batch_norm_calls

    monkeypatch.setattr(_batch_norm_calls, "index_of", lambda _: tl.int64)
    monkeypatch.setattr(_batch_norm_calls, "_cut", _batch_norm_calls._cut.__wrapped__)
    for shape in SHAPES.values():
        check(ops, Case(shape(), activation="silu", residual=True, branch=True, ops=ops))


def test_more_channels_than_a_program_inverts(
    ops: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    from fusedtrain.triton import _batch_norm_calls

    monkeypatch.setattr(_batch_norm_calls, "_FINISH_BLOCK", 16)
    monkeypatch.setattr(_batch_norm_calls, "_cut", _batch_norm_calls._cut.__wrapped__)
    check(ops, Case(torch.randn(2, 35, 3), training=False, ops=ops))


@pytest.mark.parametrize("at", [0, 1, 99])
def test_outlier(ops: Kernels, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it lies, it does not take the others' variance with it."""
    many_steps(monkeypatch)
    for inner in (1, 50):
        x = torch.randn(100, 2, inner)
        x[at, :, -1] = 1e6
        x[:, 1] -= 1e6
        variance = ops("batch_norm_stats", placed(x, ops.device))[1].cpu()
        torch.testing.assert_close(variance, reference.batch_norm_stats(x)[1], rtol=1e-6, atol=0)


def test_errors(ops: Kernels) -> None:
    """Before anything is written."""
    case = Case(SHAPES["contiguous"](), residual=True, branch=True, ops=ops)
    good = case.forward()
    assert case.residual is not None
    assert case.weight is not None
    bad = {
        "float32, float64, float16 or bfloat16": (0, case.x.int()),
        "2 dimensions": (0, case.x[0, :, 0, 0]),
        "same shape": (1, case.residual[:2]),
        "same dtype": (1, case.x.half()),
        "branch_scale must have 3 elements": (2, case.weight[:4]),
        "weight must have 5 elements": (3, case.weight[:4]),
        "bias must be float32": (4, case.weight.double()),
        "must be contiguous": (5, case.weight.repeat(2)[::2]),
        "running_mean and running_var": (6, None),
        "no such activation": (10, len(POINTWISE)),
    }
    for message, (at, value) in bad.items():
        arguments = list(good)
        arguments[at] = value
        with pytest.raises(RuntimeError, match=message):
            ops("batch_norm_act", *arguments)
    one = (case.x[:1, :, 0, 0], None, None, *good[3:])
    with pytest.raises(RuntimeError, match="one value a channel"):
        ops("batch_norm_act", *one)
    for i in (5, 6):
        assert torch.equal(good[i], case.forward()[i])


@pytest.mark.slow
def test_registered(tmp_path: Path) -> None:
    """The public function, its gradients, on kernels that the dispatcher found."""
    code = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, "tests")
import torch, fusedtrain.triton, fusedtrain.functional as F
from fusedtrain.triton import launch
from helpers.triton_interpreter import round_to_nearest
round_to_nearest()
library = torch.library.Library("fusedtrain", "IMPL")
fusedtrain.triton.register(library, "CPU")
launches = []
call = launch.Launcher.__call__
launch.Launcher.__call__ = lambda self, *a: (launches.append(self), call(self, *a))[1]
x = torch.randn(3, 4, 5, requires_grad=True)
running = torch.zeros(4), torch.ones(4)
y = F.batch_norm_act(x, *running, training=True, activation="silu")
assert len(launches) == 3, launches
g = torch.randn_like(y)
ours = torch.autograd.grad(y, x, g)[0]
assert len(launches) == 6, launches
expected = torch.nn.functional.silu(torch.nn.functional.batch_norm(x, None, None, training=True))
torch.testing.assert_close(y, expected)
torch.testing.assert_close(ours, torch.autograd.grad(expected, x, g)[0])
assert running[0].any()
"""
    code = code.replace('"tests"', repr(str(TESTS)))
    run("-W", "ignore", "-c", code)


LONG = [pytest.param(t, marks=pytest.mark.long) if t != "sm_90" else t for t in TARGETS]


@pytest.mark.slow
@pytest.mark.parametrize("target", LONG)
def test_code(target: str, tmp_path: Path) -> None:
    run(__file__, target, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.slow
def test_launches(tmp_path: Path) -> None:
    run(__file__, "launches", TRITON_CACHE_DIR=str(tmp_path))


# --- in processes of their own ---


def check_target(target: str) -> None:
    from fusedtrain.triton import _batch_norm_calls as c, _batch_norm_kernels as k, _layout
    from fusedtrain.triton.formulas import formula_of

    last, planes = c._View(32 * 784, 64, 1, 784), c._View(32, 64, 784, 1)
    # Saved for backward: the output, computed again, the input (many registers).
    for dtype, view, name, saved in (
        (torch.bfloat16, last, "relu", k.SAVED_OUTPUT),
        (torch.float32, planes, "gelu", k.SAVED_RESIDUAL),
        (torch.float16, planes, "softplus", k.SAVED_NOTHING),
        (torch.float64, last, "identity", k.SAVED_NOTHING),
    ):
        vector = torch.float64 if dtype is torch.float64 else torch.float32
        names = ("branch", "weight", "bias", "mean", "invstd", "shares")
        others = {f"{n}_ptr": vector for n in names} | {"averages_ptr": torch.float64}
        block = _layout.BACKWARD_BLOCK[dtype.itemsize]
        summed, cut = c._cut(view, block, True), c._cut(view, block, False)
        whole = c._cut(view, _layout.FORWARD_BLOCK[dtype.itemsize], False)
        op = FORMULAS[name].op
        forward, backward, by_output, stored = formula_of(op, dtype)
        again = forward if by_output else None
        residual = saved.value != 0
        flags = (residual, True, True)

        def compiled(kernel: Any, *constants: Any) -> Any:
            return compile_for(target, kernel, dtype, *constants, **others)  # noqa: B023

        normalise = compiled(k.normalise_kernel, forward, stored, residual, *flags, *whole.tile)
        check_code(normalise, 2)
        check_code(compiled(k.restore_kernel, True, True, *whole.tile), 1)
        formula = (again, backward, stored, saved.value, *flags)
        reduce = (*formula, True, summed.steps, *summed.tile)
        check_code(compiled(k.reduce_kernel, *reduce), 4)
        check_code(compiled(k.apply_kernel, *formula, False, True, True, *cut.tile), 4)
        others["shares_ptr"] = torch.float64
        check_reads(compiled(k.stats_kernel, summed.steps, *summed.tile))
    sides = summed.merging[1:]
    for dtype in (torch.float32, torch.float64):
        vectors: dict[str, torch.dtype] = {"shares_ptr": dtype, "sums_ptr": torch.float64}
        compile_for(target, k.finish_kernel, dtype, True, *sides, **vectors)
        vectors = {"shares_ptr": torch.float64}
        compile_for(target, k.merge_kernel, dtype, True, True, *sides, **vectors)
        compile_for(target, k.invert_kernel, dtype, 64)


def check_reads(compiled: Any) -> None:
    """As check_code, of a kernel that writes a few numbers."""
    if "ptx" in compiled.asm:
        assert ".v4.b32" in compiled.asm["ptx"] or ".v2.b64" in compiled.asm["ptx"]
        assert ".local" not in compiled.asm["ptx"]
    else:
        assert "load_dwordx4" in compiled.asm["amdgcn"]


def check_launches() -> None:
    """Three launches forward, three backward, two in eval, one to restore; one compilation for all
    sizes."""
    driver = fake_driver()
    from fusedtrain.triton import OPS, _batch_norm_calls as c

    def channels_last(samples: int) -> Tensor:
        return torch.empty(samples, 16, 16, 64).permute(0, 3, 1, 2)

    vectors = [torch.empty(64) for _ in range(4)]
    for samples, momentum in ((2, 0.1), (3, 0.0), (5, 1.0)):
        x = channels_last(samples)
        statistics = (*vectors, True, momentum, 1e-5)
        before = len(driver.launched)
        y, mean, invstd = OPS["batch_norm_act"](x, None, None, *statistics, *RELU)
        assert y.stride() == x.stride()
        assert len(driver.launched) == before + 3
        shared = (None, *vectors[:2], mean, invstd, True, *RELU, True, False, True)
        OPS["batch_norm_act_backward"](x, x, None, *shared)
        assert len(driver.launched) == before + 6
    launchers = [v for n, v in vars(c).items() if n.startswith("_launch_")]
    assert sum(len(launcher._compiled) for launcher in launchers) == 6
    OPS["batch_norm_act"](x, x, None, *vectors, False, 0.1, 1e-5, *RELU)
    assert len(driver.launched) == before + 8
    OPS["batch_norm_stats"](x)
    assert len(driver.launched) == before + 10
    OPS["batch_norm_act_"](x, *vectors, True, 0.1, 1e-5, *RELU)
    OPS["batch_norm_act_restore"](x, *vectors, 1.0)
    before += 4
    assert len(driver.launched) == before + 10
    empty = torch.empty(0, 64, 2)
    OPS["batch_norm_act"](empty, None, None, *vectors, True, 0.1, 1e-5, *RELU)
    OPS["batch_norm_act_backward"](empty, empty, None, *shared)
    assert len(driver.launched) == before + 10


if __name__ == "__main__":
    check_launches() if sys.argv[1] == "launches" else check_target(sys.argv[1])
