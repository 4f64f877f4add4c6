"""The compiled code of Triton's optimizer step: 16-byte accesses and no spills; and what compiles
anew.

Compilation has processes of its own, for the reason that helpers/compiling.py gives: this file, run
as a script.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedtrain.reference import RULES
from helpers.compiling import TARGETS, assembled, fake_driver, run, source_of, spilled_bytes
from helpers.optimizer_cases import BF16, F16, F32, F64, Case, Spec
from helpers.optimizers import busy

pytest.importorskip("triton", reason="triton is not installed")


def test_registered() -> None:
    # Not on CUDA: there the import has registered them, where torch is a build for it.
    code = (
        "import torch, fusedtrain, fusedtrain.triton as t;"
        "library = torch.library.Library('fusedtrain', 'IMPL'); t.register(library, 'XPU');"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key;"
        "names = ('measure_gradients', 'try_update', 'optimizer_step', 'update_scale',"
        " 'zero_tensors');"
        "assert all(has('fusedtrain::' + n, 'XPU') and n in t.OPS for n in names)"
    )
    run("-c", code)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "rules"),
    [("sm_90", "lamb"), *(pytest.param(t, "all", marks=pytest.mark.long) for t in TARGETS)],
)
def test_code(target: str, rules: str, tmp_path: Path) -> None:
    """`rules` are prepared in every way; the others in the one way that does most."""
    run(__file__, target, rules, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.slow
def test_compilations(tmp_path: Path) -> None:
    run(__file__, "launches", TRITON_CACHE_DIR=str(tmp_path))


POINTERS = {
    "table_ptr": "i64", "part_ptr": "i64", "first_ptr": "i64", "rates_ptr": "i64",
    "control_ptr": "fp32", "scalars_ptr": "fp32", "scale_ptr": "fp32", "found_inf_ptr": "fp32",
    "growth_ptr": "i32", "hysteresis_ptr": "i32",
}  # fmt: skip


def compile_for(target: str, launcher: Any, constants: tuple[Any, ...]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    source = source_of(launcher._kernel, constants, lambda name: POINTERS.get(name, "fp64"))
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=launcher.options)


def check_code(compiled: Any, loads: int, stores: int) -> None:
    """At least `loads` and `stores` accesses of 16 bytes, and no local memory."""
    if "ptx" in compiled.asm:
        code = compiled.asm["ptx"]
        wide = r"\.global\.(?:v4\.b32|v2\.b64)"
        assert ".local" not in code
        assert spilled_bytes(code) == 0
        counts = [len(re.findall(kind + wide, code)) for kind in ("ld", "st")]
    else:
        code = compiled.asm["amdgcn"]
        assert set(re.findall(r"_spill_count:\s+(\d+)", code)) == {"0"}
        assert set(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", code)) == {"0"}
        wide = r"(?:global|buffer)_{}_dwordx4"
        counts = [len(re.findall(wide.format(kind), code)) for kind in ("load", "store")]
    assert counts[0] >= loads, f"{counts} 16-byte loads and stores"
    assert counts[1] >= stores, f"{counts} 16-byte loads and stores"


def check_launches() -> None:
    """With a driver that does nothing: one compilation for all tensors, sizes and options."""
    driver = fake_driver()
    from fusedtrain.triton import OPS, optimizers as m, scaling

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
    match = re.search(r"Used (\d+) registers", assembled(ptx))
    assert match is not None
    return int(match[1])


def check_target(target: str, rules: str) -> None:
    from fusedtrain.triton import optimizers as m, scaling as s
    from fusedtrain.triton._optimizer_tables import Kind

    if TARGETS[target][0] == "hip":
        m._BLOCK, m._CODES_BLOCK = 2048, 1024
    plain = Kind(F32, F32, (None,) * 3, None, None, True, False)
    kinds = {
        "float32": plain,
        "float64": plain._replace(param=F64, grad=F64, average=F64),
        "master": plain._replace(param=BF16, grad=F16, master=F32, average=F32),
        "stochastic": plain._replace(param=BF16, grad=BF16),
        "split32": plain._replace(param=BF16, grad=BF16, master=torch.int16),
        "split24": plain._replace(param=torch.float16, grad=F16, master=torch.int8),
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
    for name, bytes_of_codes in (("float32", 3), ("split24", 4)):
        kind = kinds[name]._replace(states=(torch.int8, torch.uint8, torch.uint8))
        wide = 2 if name == "float32" else 0  # of gradient and parameter; 16-bit ones take 8 bytes
        update = m._update_constants("adam", kind, False, True, 1, False)
        compiled = compile_for(target, m._launch_update, update)
        check_code(compiled, wide, wide)
        if "ptx" in compiled.asm:
            code = compiled.asm["ptx"]
            assert registers(code) <= 96
            for access in ("ld", "st"):
                # Four elements of a thread are one access, but at the tensor's end.
                assert code.count(f"{access}.global.b8") == 4 * bytes_of_codes
                assert wide or code.count(f"{access}.global.v2.b32") == 2
        for units in (False, True):
            tried = m._try_constants("adam", kind, units)
            check_code(compile_for(target, m._launch_try, tried), wide, 0)
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
            if rules in ("all", rule.name) or (measured and clipped and tried):
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
    check_launches() if sys.argv[1] == "launches" else check_target(*sys.argv[1:])
