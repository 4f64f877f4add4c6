"""The optimizer step in Triton: the tests of the CPU kernels, interpreted (or on a GPU); sizes and
alignments; how many launches; and, compiled for every target, 16-byte accesses and no spills.

Compilation has processes of its own, for the reason that tests/test_triton.py gives.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_optimizer_kernels as shared
import torch
from _kernels import HAS_GPU, written_by
from _optimizer_cases import (
    BF16,
    F16,
    F32,
    F64,
    RULE_NAMES,
    Case,
    Spec,
    bits,
    busy,
)
from _placed import call_placed
from _triton_interpreter import ORDERS, programs_in, round_to_nearest
from test_optimizer_reference import _Counted
from test_triton import TARGETS, fake_driver, run, spilled_bytes
from torch import Tensor

from fusedtrain.reference import RULES, optimizers, scaling

pytest.importorskip("triton", reason="triton is not installed")

NAMES = ("measure_gradients", "try_update", "optimizer_step")
ON_HOST = (9, 10)  # table and rows, of the arguments


def _placed_on(device: str) -> SimpleNamespace:
    """The ops, from host memory to the device and back, whatever the alignment and the layout."""
    from fusedtrain.triton import OPS

    def op_of(name: str) -> Callable[..., Tensor]:
        written = written_by(name)
        return lambda *a: call_placed(OPS[name], device, a, written, ON_HOST).cpu()

    return SimpleNamespace(**{name: op_of(name) for name in NAMES})


@pytest.fixture
def kernels() -> Any:
    from fusedtrain.triton import OPS

    if HAS_GPU:
        return _placed_on("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and TRITON_INTERPRET is not 1")
    round_to_nearest()
    return SimpleNamespace(**{n: OPS[n] for n in NAMES})


@pytest.fixture
def ops(kernels: Any) -> Any:
    return kernels


# --- what the CPU kernels are held to, by the same tolerances

test_options_of_a_group = shared.test_options_of_a_group
test_nobody_looks_for_infinities = shared.test_nobody_looks_for_infinities
test_gradients_are_measured_without_states = shared.test_gradients_are_measured_without_states
test_variance_below_zero = shared.test_variance_below_zero
test_rates_on_the_device = shared.test_rates_on_the_device
test_no_tensors = shared.test_no_tensors
test_a_step_count_of_32_bits = shared.test_a_step_count_of_32_bits
test_zeros = shared.test_zeros
test_units_at_their_bound = shared.test_units_at_their_bound
test_nothing_is_measured = shared.test_nothing_is_measured


@pytest.mark.parametrize("step", shared.STEPS)
@pytest.mark.parametrize("rule", RULE_NAMES)
def test_kernels(kernels: Any, rule: str, step: str) -> None:
    """Every kind of tensor in one call; the second step finds the states of the first."""
    case = shared._case(rule, **shared.STEPS[step], stochastic=1, seed=12345)
    for _ in range(2):
        expected = case.clone()
        theirs = optimizers.optimizer_step(*expected.arguments(), None, None)
        ours = kernels.optimizer_step(*case.arguments(), None, None)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)
        shared._assert_close(case, expected)
        case.new_gradients()


@pytest.mark.parametrize("write_back", [0, 1, 2])
@pytest.mark.parametrize("why", ["inf", "nan found_inf"])
def test_skipped_first_step(kernels: Any, why: str, write_back: int) -> None:
    shared.test_skipped_first_step(kernels, why, write_back)


@pytest.mark.parametrize("rule", ["lamb", "novograd"])
def test_parts_of_a_step(kernels: Any, rule: str) -> None:
    shared.test_parts_of_a_step(kernels, rule)


STATES = [
    (rule.name, states)
    for rule in RULES
    for states in ([], [0], [0, 1], [0, 2], [0, 1, 2])
    if rule.least <= len(states) and max(states, default=-1) < rule.most
    if rule.least != 2 or states[1:2] != [2]
]


@pytest.mark.parametrize(("rule", "states"), STATES, ids=str)
def test_states(kernels: Any, rule: str, states: list[int]) -> None:
    """Those that there are, each in another dtype; others read as 0."""
    dtypes = [(F32, None), (F64, None), (BF16, BF16), (F16, F32)]
    specs = [Spec((3, 50), d, states=states, state_dtype=s) for d, s in dtypes]
    case = Case(rule, specs, [busy(rule, cautious=1)], measures=7, trial=1)
    expected = case.clone()
    for _ in range(2):
        optimizers.optimizer_step(*expected.arguments(), None, None)
        kernels.optimizer_step(*case.arguments(), None, None)
    shared._assert_close(case, expected)


# --- sizes, places in memory, orders


def _misaligned(t: Tensor, by: int) -> Tensor:
    return torch.empty(t.numel() + by, dtype=t.dtype)[by:].view(t.shape).copy_(t)


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sizes_and_alignments(kernels: Any, dtype: torch.dtype, units: bool) -> None:
    shapes = [(n,) for n in (0, 1, 15, 17, 1023, 1024, 4097, 8193)] + [(1, 8200), (3, 8200)]
    options = {"unit_factor": 0.2} if units else {}
    specs = [Spec(s, dtype) for s in shapes]
    case = Case("adam", specs, [busy("adam")], measures=7, write_back=1, **options)
    for i, t in enumerate(case.grads):
        case.grads[i] = _misaligned(t, i % 2)
    case.params[3] = _misaligned(case.params[3], 1)
    expected = case.clone()
    theirs = optimizers.optimizer_step(*expected.arguments(), None, None)
    ours = kernels.optimizer_step(*case.arguments(), None, None)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)
    shared._assert_close(case, expected)


@pytest.mark.skipif(HAS_GPU, reason="there all tests do so")
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_tensors_that_were_placed(
    kernels: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the same tensors elsewhere, misaligned alike, and what is written comes back."""
    from fusedtrain.triton import _tables

    case = Case("adam", [Spec((40, 7), F32, layout), Spec((33,))], [busy("adam")], write_back=1)
    case.grads[1] = _misaligned(case.grads[1], 1)
    expected = case.clone()
    entry, aligned = _tables.Tables._entry, []

    def seen(self: Any, i: int) -> Any:
        found = entry(self, i)
        aligned.append(found[0].aligned)
        return found

    monkeypatch.setattr(_tables.Tables, "_entry", seen)
    _placed_on("cpu").optimizer_step(*case.arguments(), None, None)
    assert aligned == [True, False]
    optimizers.optimizer_step(*expected.arguments(), None, None)
    shared._assert_close(case, expected)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels_last", "sliced"])
def test_units_of_layouts(
    kernels: Any,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """In one piece and in several."""
    from fusedtrain.triton import _tables, multi_tensor

    def clear() -> None:
        for name in ("measure", "prepare", "try", "update"):
            getattr(multi_tensor, f"_{name}_constants").cache_clear()

    for module in (_tables, multi_tensor):
        monkeypatch.setattr(module, "CHUNK", 64)
    monkeypatch.setattr(multi_tensor, "_BLOCK", 32)
    monkeypatch.setattr(multi_tensor, "_ADD_BLOCK", 4)
    clear()
    request.addfinalizer(clear)
    specs = [Spec((3, 5, 4, 5), layout=layout), Spec((70,)), Spec((2, 30), F64, layout)]
    case = Case("sgd", specs, [busy("sgd")], measures=7, unit_factor=0.1, write_back=1)
    expected = case.clone()
    optimizers.optimizer_step(*expected.arguments(), None, None)
    kernels.optimizer_step(*case.arguments(), None, None)
    shared._assert_close(case, expected)


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_more_tensors_than_a_program_prepares(kernels: Any, rule: str) -> None:
    groups = [busy(rule, cautious=1), busy(rule, lr_index=0), busy(rule, lr_index=1)]
    lrs = [torch.tensor(0.25, dtype=F64), torch.tensor([0.5])]
    count = 70
    specs = [Spec((3 + i % 5,), F32 if i % 7 else F64, group=i % 3) for i in range(count)]
    step = {"scale": 8.0, "found_inf": 0.0, "max_norm": 5.0, "norm_eps": 0.5, "trial": 1}
    case = Case(rule, specs, groups, lrs=lrs, measures=7, **step)
    case.rows[:, 1] = torch.arange(count).flip(0)  # whose scalars are whose
    case.scalars[0] = torch.arange(count) ** 2 * 3500  # up to 2^24, where float32 ceases to count
    case.scalars[1:] = torch.rand(2, count)
    expected = case.clone()
    optimizers.optimizer_step(*expected.arguments(), None, None)
    kernels.optimizer_step(*case.arguments(), None, None)
    shared._assert_close(case, expected)
    assert torch.equal(case.scalars[0], expected.scalars[0])


@pytest.mark.skipif(HAS_GPU, reason="a GPU has an order of its own")
@pytest.mark.parametrize("units", [False, True])
def test_order_of_programs(
    kernels: Any,
    units: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    from fusedtrain.triton import multi_tensor

    monkeypatch.setattr(multi_tensor, "_TAIL_BLOCK", 4)  # several programs prepare, too
    multi_tensor._prepare_constants.cache_clear()
    request.addfinalizer(multi_tensor._prepare_constants.cache_clear)
    options = {"unit_factor": 0.1} if units else {"max_norm": 1.0}
    case = shared._case("lamb", measures=7, trial=1, write_back=1, stochastic=1, **options)
    found = []
    for order in ORDERS:
        copy = case.clone()
        with programs_in(order):
            sums = kernels.optimizer_step(*copy.arguments(), None, None)
        found.append([bits(t) for _, t in copy.written()] + [bits(sums)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_stochastic_rounding(kernels: Any, layout: str) -> None:
    """The bits of the reference, which are those of the C++ kernels."""
    group = {"lr": 2.0**-10}  # exact with fused multiplies and without
    # More than a chunk, which counts elements from 0 itself.
    case = Case("sgd", [Spec((97, 90), BF16, layout, states=[])] * 2, [group], stochastic=1)
    case.set("seed", 2**53 - 1)
    case.set("seed_high", 2**31 + 3)
    case.control[5] = 3
    expected, cpp = case.clone(), case.clone()
    kernels.optimizer_step(*case.arguments(), None, None)
    optimizers.optimizer_step(*expected.arguments(), None, None)
    torch.ops.fusedtrain.optimizer_step(*cpp.arguments(), None, None)
    for ours, theirs, others in zip(case.params, expected.params, cpp.params):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, others)


def test_errors(kernels: Any) -> None:
    case = Case("adam", [Spec((4, 6))], [busy("adam")])
    before = [bits(t) for _, t in case.written()]
    for name, bad, match in (
        ("grads", torch.zeros(4, 6, dtype=torch.int32), "grad must be float32"),
        ("states", torch.zeros(6, 4).t(), "same shape and strides"),
        ("params", torch.zeros(4, 5), "must have its shape"),
    ):
        broken = case.clone()
        getattr(broken, name)[0] = bad
        with pytest.raises(RuntimeError, match=match):
            kernels.optimizer_step(*broken.arguments(), None, None)
    for name, bad, match in (
        ("scale", torch.ones(1, dtype=F64), "scale"),
        ("found_inf", torch.zeros(2), "found_inf"),
        ("control", torch.zeros(8, dtype=F64), "control"),
        ("lrs", [torch.ones(1, dtype=BF16)], "lr must be one"),
        ("rows", case.rows + torch.tensor([1, 0, 0, 0, 0, 0, 0]), "group"),
    ):
        broken = case.clone()
        broken.table = case.table.clone()
        broken.table[1, 1] = -1.0 if name != "lrs" else 0.0
        setattr(broken, name, bad)
        with pytest.raises(RuntimeError, match=match):
            kernels.optimizer_step(*broken.arguments(), None, None)
    with pytest.raises(RuntimeError, match="sums"):
        kernels.optimizer_step(*case.arguments(), torch.zeros(1, 3), None)
    if not HAS_GPU:
        broken = case.clone()
        broken.params[0] = torch.empty(4, 6, device="meta")
        with pytest.raises(RuntimeError, match="one device"):
            kernels.optimizer_step(*broken.arguments(), None, None)
    assert before == [bits(t) for _, t in case.written()]


# --- launches


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    from fusedtrain.triton.launch import Launcher

    names: list[str] = []
    call = Launcher.__call__

    def counted(self: Any, *arguments: Any) -> None:
        names.append(self._kernel.fn.__name__)
        call(self, *arguments)

    monkeypatch.setattr(Launcher, "__call__", counted)
    return names


def test_launches_of_a_step(kernels: Any, launched: list[str]) -> None:
    """One a sweep for all tensors of a kind, however many; and no number is waited for."""
    for count, extra in ((1, []), (5, []), (5, [Spec((7,), BF16)])):
        case = Case("adam", [Spec((30, 7))] * count + extra, [busy("adam")], measures=7)
        kinds = 1 + len(extra)
        measured = [*["measure_kernel"] * kinds, "add_kernel", "prepare_kernel"]
        tried = [*["try_kernel"] * kinds, "add_kernel", "prepare_kernel"]
        updated = ["update_kernel"] * kinds
        for trial, expected in ((0, measured + updated), (1, measured + tried + updated)):
            case.set("trial", trial)
            launched.clear()
            with _Counted() as counted:
                kernels.optimizer_step(*case.arguments(), None, None)
            assert launched == expected
            if not HAS_GPU:
                waits = ("_local_scalar_dense", "nonzero", "item")
                assert not [c for c in counted.calls if any(w in c for w in waits)]
    launched.clear()
    empty = Case("adam", [Spec((0,)), Spec((3, 0))], [busy("adam")], measures=0)
    kernels.optimizer_step(*empty.arguments(), None, None)
    assert launched == ["prepare_kernel"]
    assert empty.control[5] == 1


@pytest.mark.skipif(HAS_GPU, reason="interpreted tensors need not be sent")
def test_torch_launches_nothing_of_a_step(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever there is to decide: memory is allocated and looked at, and that is all."""
    from fusedtrain.triton.launch import Launcher

    names: list[str] = []
    monkeypatch.setattr(
        Launcher, "__call__", lambda self, *_: names.append(self._kernel.fn.__name__)
    )
    step = {"scale": 4.0, "found_inf": 0.0, "lrs": [torch.tensor(0.1)], "max_norm": 1.0}
    for options, launches in (
        ({}, 4), ({"trial": 1}, 7), ({"unit_factor": 0.1, "max_norm": 0.0}, 5),
        ({"trial": 1, "unit_factor": 0.1}, 8), ({"measures": 0}, 2),
    ):  # fmt: skip
        case = Case(
            "lamb",
            [Spec((30, 7))] * 3,
            [busy("lamb", lr_index=0)],
            **{"measures": 7, **step, **options},
        )
        names.clear()
        with _Counted() as counted:
            kernels.optimizer_step(*case.arguments(), None, None)
        assert len(names) == launches, names
        called = {c.split(".")[1] for c in counted.calls} - {"promote_types"}  # of no tensors
        assert called <= {"new_empty", "view", "slice", "detach"}


# --- what surrounds the step


def test_zero_tensors(kernels: Any, launched: list[str]) -> None:
    from fusedtrain.triton import OPS

    device = "cuda" if HAS_GPU else "cpu"
    tensors, around = [], []
    for dtype in (F32, F64, F16, BF16, torch.int32, torch.bool):
        for n in (0, 1, 3, 15, 17, 1023, 4097, 70000 if dtype == F32 else 5):
            for offset in (8, 9):
                memory = torch.ones(n + 32, dtype=dtype, device=device)
                tensors.append(memory[offset : offset + n])
                around.append((memory, offset, n))
    tensors += [torch.ones(4, 6, device=device).t(), torch.ones(4, 6, device=device)[:, ::2]]
    OPS["zero_tensors"](tensors)
    assert launched == ["zero_kernel"]
    assert not any(t.any() for t in tensors)
    for memory, offset, n in around:
        assert memory[:offset].all()
        assert memory[offset + n :].all()
    OPS["zero_tensors"]([torch.ones(0, device=device)])
    assert len(launched) == 1


@pytest.mark.parametrize("hysteresis", [1, 2])
@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.7, 0.3)])
def test_update_scale(
    kernels: Any, factors: tuple[float, float], hysteresis: int, launched: list[str]
) -> None:
    from fusedtrain.triton import OPS

    device = "cuda" if HAS_GPU else "cpu"
    found = [0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, math.nan, math.inf, *[0] * 12, *[1] * 8]
    for first, low, high in ((3.0, 0.01, 100.0), (3e38, 0.0, math.inf), (1e-3, 1e-3, 1.0)):
        ours = [torch.tensor(first), torch.tensor(0, dtype=torch.int32),
                torch.tensor(hysteresis, dtype=torch.int32)]  # fmt: skip
        theirs = [t.clone() for t in ours]
        ours = [t.to(device) for t in ours]
        cpp = [t.clone() for t in theirs]
        for value in found:
            options = (*factors, 2, hysteresis, low, high)
            bad = torch.tensor(float(value))
            OPS["update_scale"](*ours, bad.to(device), *options)
            scaling.update_scale(*theirs, bad, *options)
            torch.ops.fusedtrain.update_scale(*cpp, bad, *options)
            for a, b, c in zip(ours, theirs, cpp):
                torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=0)
                assert torch.equal(a.cpu(), c)
            theirs[0].copy_(cpp[0])  # the reference multiplies in float32
    assert launched == ["update_scale_kernel"] * 3 * len(found)


def test_registered() -> None:
    code = (
        "import torch, fusedtrain, fusedtrain.triton as t;"
        "library = torch.library.Library('fusedtrain', 'IMPL'); t.register(library);"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key;"
        "names = ('measure_gradients', 'try_update', 'optimizer_step', 'update_scale',"
        " 'zero_tensors');"
        "assert all(has('fusedtrain::' + n, 'CUDA') and n in t.OPS for n in names)"
    )
    run("-c", code)


# --- compiled, in processes of their own


@pytest.mark.parametrize("target", TARGETS)
def test_code(target: str, tmp_path: Path) -> None:
    run(__file__, target, TRITON_CACHE_DIR=str(tmp_path))


def test_compilations(tmp_path: Path) -> None:
    run(__file__, "launches", TRITON_CACHE_DIR=str(tmp_path))


POINTERS = {
    "table_ptr": "*i64", "part_ptr": "*i64", "first_ptr": "*i64", "rates_ptr": "*i64",
    "control_ptr": "*fp32", "scalars_ptr": "*fp32", "scale_ptr": "*fp32", "found_inf_ptr": "*fp32",
    "growth_ptr": "*i32", "hysteresis_ptr": "*i32",
}  # fmt: skip


def compile_for(target: str, launcher: Any, constants: tuple[Any, ...]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = launcher._kernel
    signature, constexprs, aligned = {}, {}, {}
    values = iter(constants)
    for p in kernel.params:
        if p.is_constexpr:
            signature[p.name] = "constexpr"
            constexprs[p.name] = next(values)
        elif p.name.endswith("_ptr"):
            signature[p.name] = POINTERS.get(p.name, "*fp64")
            aligned[(p.num,)] = [["tt.divisibility", 16]]
        else:
            signature[p.name] = p.annotation_type
    source = ASTSource(kernel, signature, constexprs, aligned)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=launcher.options)


def check_code(compiled: Any, loads: int, stores: int) -> None:
    """At least that many 16-byte accesses, and nothing but registers."""
    if "ptx" in compiled.asm:
        code = compiled.asm["ptx"]
        wide = r"\.global\.(?:v4\.b32|v2\.b64)"
        assert ".local" not in code
        assert spilled_bytes(code) == 0
        found = [len(re.findall(kind + wide, code)) for kind in ("ld", "st")]
    else:
        code = compiled.asm["amdgcn"]
        assert set(re.findall(r"_spill_count:\s+(\d+)", code)) == {"0"}
        assert set(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", code)) == {"0"}
        wide = r"(?:global|buffer)_{}_dwordx4"
        found = [len(re.findall(wide.format(kind), code)) for kind in ("load", "store")]
    assert found[0] >= loads, f"{found} 16-byte loads and stores"
    assert found[1] >= stores, f"{found} 16-byte loads and stores"


def check_launches() -> None:
    """With a driver that does nothing: one compilation for all tensors, sizes and options."""
    driver = fake_driver()
    from fusedtrain.triton import OPS, scaling
    from fusedtrain.triton import multi_tensor as m

    options: dict[str, Any] = {"measures": 7, "trial": 1, "average_weight": 0.1, "stochastic": 1}
    for i, shapes in enumerate([[(1,)], [(5, 7), (4,)], [(100000,), (3, 0), (16,)]]):
        specs = [Spec(shape, average=F32) for shape in shapes]
        case = Case("lamb", specs, [busy("lamb", cautious=i % 2)], seed=i, **options)
        case.set("average_weight", 0.1 * (i + 1))
        OPS["optimizer_step"](*case.arguments(), None, None)
        arguments = driver.launched[-1]
        chunks = sum(-(-t.numel() // m.CHUNK) for t in case.params)
        assert arguments[:4] == (chunks, 1, 1, 7)
        assert arguments[9 + 4 : 9 + 7] == (chunks - 1, 0.1 * (i + 1), i)
    assert len(driver.launched) == 3 * 7
    case.grads[0] = torch.empty(100001)[1:]
    OPS["optimizer_step"](*case.arguments(), None, None)
    assert len(driver.launched) == 3 * 7 + 10, "one kind more"
    for kernel in (m.measure_kernel, m.try_kernel, m.update_kernel):
        assert len(kernel.device_caches[0][0]) == 2
    assert len(m.prepare_kernel.device_caches[0][0]) == 2, "before a trial and after it"
    assert len(m.add_kernel.device_caches[0][0]) == 1
    number = torch.zeros(1)
    trackers = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
    for interval in (1, 2000):
        OPS["update_scale"](number, *trackers, number, 2.0, 0.5, interval, 1, 0.0, 1e9)
    assert len(scaling.update_scale_kernel.device_caches[0][0]) == 1
    for n in (1, 100):
        OPS["zero_tensors"]([torch.ones(n), torch.ones(7)])
    assert len(scaling.zero_kernel.device_caches[0][0]) == 1


def registers(ptx: str) -> int:
    from triton.backends.nvidia.compiler import get_ptxas

    arch = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    assert arch is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = subprocess.run(
            [get_ptxas(int(arch[2])).path, "-v", "-arch", arch[1], "-o", "/dev/null", file.name],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    found = re.search(r"Used (\d+) registers", done.stdout + done.stderr)
    assert found is not None
    return int(found[1])


def check_target(target: str) -> None:
    from fusedtrain.triton import multi_tensor as m
    from fusedtrain.triton import scaling as s
    from fusedtrain.triton._tables import Kind

    if TARGETS[target][0] == "hip":
        m._BLOCK = 2048
    plain = Kind(F32, F32, (None,) * 3, False, None, True, False)
    kinds = {
        "float32": plain,
        "float64": plain._replace(param=F64, grad=F64, average=F64),
        "master": plain._replace(param=BF16, grad=F16, master=True, average=F32),
        "stochastic": plain._replace(param=BF16, grad=BF16),
    }

    def with_states(kind: Kind, count: int) -> Kind:
        dtype = {F64: F64, BF16: BF16}.get(kind.param, F32) if not kind.master else F32
        return kind._replace(states=(dtype,) * count + (None,) * (3 - count))

    for rule in RULES:
        kind = with_states(plain, rule.most)
        update = m._update_constants(rule.name, kind, False, False, 0, False)
        compiled = compile_for(target, m._launch_update, update)
        # Blocks of 1024 are two accesses of each thread to each buffer.
        check_code(compiled, 2 * (2 + rule.most), 2 * (1 + rule.most))
        if rule.name == "adam" and "ptx" in compiled.asm:
            assert registers(compiled.asm["ptx"]) <= 96
    for name, kind in kinds.items():
        kind = with_states(kind, 3)
        stochastic = name == "stochastic"
        update = m._update_constants("adam", kind, False, True, 1, stochastic)
        check_code(compile_for(target, m._launch_update, update), 5, 5)
        check_code(compile_for(target, m._launch_try, m._try_constants("adam", kind, False)), 5, 0)
        check_code(
            compile_for(target, m._launch_measure, m._measure_constants(kind, False, True)), 2, 0
        )
        if name in ("float32", "stochastic"):
            units = m._measure_constants(kind, True, True)
            check_code(compile_for(target, m._launch_measure, units), 0, 0)
            update = m._update_constants("adam", kind, True, True, 2, stochastic)
            check_code(compile_for(target, m._launch_update, update), 5, 5)
    misaligned = m._update_constants(
        "adam", kinds["float32"]._replace(aligned=False), False, False, 0, False
    )
    code = compile_for(target, m._launch_update, misaligned)
    assert "ptx" not in code.asm or not re.search(r"st\.global\.v", code.asm["ptx"])
    for measured, clipped, tried, commits in (
        (True, False, False, True), (True, True, False, False), (True, True, True, True),
        (False, False, False, True),
    ):  # fmt: skip
        for rule in RULES:
            prepare = m._prepare_constants(rule.name, measured, clipped, tried, commits)
            check_code(compile_for(target, m._launch_prepare, prepare), 0, 0)
    check_code(compile_for(target, m._launch_clip_units, (m._ADD_BLOCK,)), 0, 0)
    for width in (3, 4):
        check_code(compile_for(target, m._launch_add, (width, m._ADD_BLOCK)), 0, 0)
    zero = compile_for(target, s._launch_zero, (s._CHUNK, s._BLOCK))
    scale = compile_for(target, s._launch_update_scale, ())
    check_code(zero, 0, 1)
    check_code(scale, 0, 0)
    if "ptx" in zero.asm:
        assert registers(zero.asm["ptx"]) <= 32
        assert registers(scale.asm["ptx"]) <= 32


if __name__ == "__main__":
    check_launches() if sys.argv[1] == "launches" else check_target(sys.argv[1])
