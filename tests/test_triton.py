"""What is Triton's alone: every kernel compiles for every target, to 16-byte accesses without
spills; numbers do not recompile; the ways in which channelwise kernels cut a tensor.

tests/test_kernels.py runs the kernels, interpreted where there is no GPU. Triton decides when a
kernel is defined whether to interpret it, so compilation has processes of its own: this file, run
as a script with the name of a target.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from _cases import DTYPES, POINTWISE, assert_close
from _kernels import BACKENDS
from _triton_interpreter import round_to_nearest

from fusedtrain.reference import ACTIVATIONS

pytest.importorskip("triton", reason="triton is not installed")

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
SHORT = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.uint8: "u8",
}
FEW = ["gelu", "elu", "hardtanh", "softplus"]  # many registers, parameters, rounded parameters
# rows x channels x inner: columns that start on 16 bytes or do not, short and long planes
VIEWS = {
    "columns": (64, 64, 1), "inner": (64, 3, 49), "planes": (4, 3, 784), "odd": (1, 5, 4001),
    "eights": (64, 24, 1),
}  # fmt: skip
_WEIGHTS = ("weight_ptr", "folded_ptr", "grad_ptr", "grad_weight_ptr")
WHOLE = ["columns", "planes", "eights"]


def run(*arguments: str, **environment: str) -> None:
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments], env={**kept, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


# 140 s each on two cores; sm_80 is like sm_90 and runs by `-m long`.
OFTEN = [pytest.param(t, marks=pytest.mark.long) if t == "sm_80" else t for t in TARGETS]


@pytest.mark.parametrize("target", OFTEN)
def test_code(target: str, tmp_path: Path) -> None:
    run(__file__, target, TRITON_CACHE_DIR=str(tmp_path))


def test_launches(tmp_path: Path) -> None:
    run(__file__, "launches", TRITON_CACHE_DIR=str(tmp_path))


def test_import_leaves_triton_alone() -> None:
    # Of optimizers, norms, folding, chains, few bits, images, pooling.
    activations = sum(2 if row.tensors else 3 for row in ACTIVATIONS.values())
    ops = activations + 5 + 8 + 2 + 6 + 3 + 1 + 2
    code = (
        "import sys, torch, fusedtrain, fusedtrain.triton as t;"
        "t.register(torch.library.Library('fusedtrain', 'IMPL'));"
        "reason = t.available();"
        "assert (torch.version.cuda or torch.version.hip) is None or reason is None, reason;"
        "assert 'triton' not in sys.modules;"
        f"assert len(t.OPS) == {ops} and 'triton' in sys.modules"
    )
    run("-c", code)


def test_missing_triton_is_named() -> None:
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
        "import fusedtrain\n"
        "try: import fusedtrain.triton\n"
        "except ImportError as error: assert 'needs triton' in str(error), error\n"
        "else: raise SystemExit('imported')"
    )
    run("-c", code)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["prelu", "star_relu"])
def test_every_cut(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns and planes, several steps a program; the sums have the same bits every time."""
    ops = BACKENDS["triton"]()
    round_to_nearest()
    from fusedtrain.triton import _layout, channelwise

    monkeypatch.setattr(_layout, "_PROGRAMS", 2)
    channelwise._backward_plan.cache_clear()
    row = ACTIVATIONS[name]
    for rows, channels, inner in (*VIEWS.values(), (1000, 3, 1), (3, 2, 1), (2, 2, 300)):
        for count in (1, channels):
            x, g = (torch.randn(rows, channels, inner).to(dtype) for _ in range(2))
            parameters = [torch.randn(count).to(dtype) for _ in row.parameters]
            wide = [t.double().view(1, -1, 1) for t in parameters]
            x64 = x.double()
            prelu = torch.where(x64 > 0, x64, wide[0] * x64)
            want = prelu if name == "prelu" else wide[0] * x64.relu() ** 2 + wide[1]
            on_device = [t.to(ops.device) for t in (x, *parameters)]
            assert_close(ops(name, *on_device).cpu(), want)
            found, again = (
                ops(f"{name}_backward", g.to(ops.device), *on_device) for _ in range(2)
            )  # fmt: skip
            sums = row.backward(g.double(), x64, *(t.double() for t in parameters))
            for one, two, w in zip(found, again, sums, strict=True):
                assert torch.equal(one, two)
                eps = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, torch.finfo(dtype).eps)
                torch.testing.assert_close(one.double().cpu(), w, rtol=eps, atol=10 * eps)


# --- in processes of their own ---


def compile_for(
    target: str, kernel: Any, dtype: torch.dtype, *constants: Any, **others: torch.dtype
) -> Any:
    """As for tensors that start on 16 bytes, of `dtype` but for `others`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fusedtrain.triton.launch import _OPTIONS

    signature, constexprs, aligned = {}, {}, {}
    values = iter(constants)
    for p in kernel.params:
        if p.is_constexpr:
            signature[p.name] = "constexpr"
            constexprs[p.name] = next(values)
        elif p.name.endswith("_ptr"):
            # Of folding: all but weights are in the dtype of the math.
            vector = "fold" in kernel.__name__ and p.name not in _WEIGHTS
            narrow = (p.name == "shares_ptr" or vector) and dtype.itemsize < 4
            stored = others.get(p.name, torch.float32 if narrow else dtype)
            signature[p.name] = f"*{SHORT[stored]}"
            aligned[(p.num,)] = [["tt.divisibility", 16]]
        else:
            signature[p.name] = p.annotation_type
    source = ASTSource(kernel, signature, constexprs, aligned)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=dict(_OPTIONS))


def check_code(compiled: Any, loads: int, assemble: bool = True) -> None:
    """16-byte accesses, in at least `loads` loads, and nothing but registers."""
    if "ptx" in compiled.asm:
        code = compiled.asm["ptx"]
        wide = r"\.global\.(?:v4\.b32|v2\.b64)"
        assert len(re.findall(rf"ld{wide}", code)) >= loads
        assert len(re.findall(rf"st{wide}", code)) >= 1
        assert ".local" not in code
        assert not assemble or spilled_bytes(code) == 0
    else:
        code = compiled.asm["amdgcn"]
        assert re.search(r"(?:global|buffer)_load_dwordx4", code)
        assert re.search(r"(?:global|buffer)_store_dwordx4", code)
        assert set(re.findall(r"_spill_count:\s+(\d+)", code)) == {"0"}
        assert set(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", code)) == {"0"}


def spilled_bytes(ptx: str) -> int:
    """The stack frame and the spills, of which Triton's own assembler tells."""
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
    numbers = re.findall(r"(\d+) bytes (?:stack frame|spill)", done.stdout + done.stderr)
    assert len(numbers) == 3
    return sum(map(int, numbers))


def check_target(target: str) -> None:
    from fusedtrain.triton import _layout, fold, formulas, pointwise
    from fusedtrain.triton import channelwise as c

    for dtype in DTYPES:
        check_chains(target, dtype)
        check_few_bits(target, dtype)
        if dtype is not torch.float64:
            check_images(target, dtype)
        check_pool(target, dtype)
        for kernel in (fold.fold_kernel, fold.fold_backward_kernel):
            last = (fold._BLOCK,) if kernel is fold.fold_kernel else (8, fold._BLOCK)
            compiled = compile_for(target, kernel, dtype, True, True, True, *last)
            read = 1 if kernel is fold.fold_kernel else 2
            check_widths(compiled, 16, fold._BLOCK * dtype.itemsize, read, 1)
        # Every formula once; a few for each dtype.
        every = target == "sm_90" and dtype is torch.bfloat16
        for name in POINTWISE if every else FEW:
            for direction in ("forward", "backward"):
                constants = pointwise._constants(name, direction, dtype)
                kernel = getattr(pointwise, f"{direction}_kernel")
                compiled = compile_for(target, kernel, dtype, *constants)
                loads = 2 if (dtype.itemsize, direction) == (2, "forward") else 4
                check_code(compiled, loads, assemble=name in FEW)
                if every:
                    # The parameters stay float64; denormals stay, but for gelu's tail of 1e-38.
                    assert compiled.asm["ptx"].count(".param .f64") == 2
                    assert ".ftz" not in compiled.asm["ptx"] or name == "gelu"
                    # `/` is off by 2 ULP, the other root flushes denormals.
                    exact = {"celu": "div.rn.f32", "squareplus": "sqrt.rn.f32"}.get(name, "")
                    assert exact in compiled.asm["ptx"]
        forward = _layout.FORWARD_BLOCK[dtype.itemsize]
        backward = _layout.BACKWARD_BLOCK[dtype.itemsize]
        f, b = formulas.star_relu_forward, formulas.star_relu_backward
        check_code(compile_for(target, c.flat_forward_kernel, dtype, f, forward), 2)
        check_code(compile_for(target, c.flat_backward_kernel, dtype, b, 2, 2, backward), 4)
        for kind, view in VIEWS.items():
            if kind in WHOLE:
                tiles = c._forward_plan("star_relu", dtype.itemsize, False, view)
                check_code(compile_for(target, c.tile_forward_kernel, dtype, *tiles.constants), 2)
                tiles, finish, _ = c._backward_plan("star_relu", dtype.itemsize, False, view, 2)
                check_code(compile_for(target, c.tile_backward_kernel, dtype, *tiles.constants), 4)
                compile_for(target, c.finish_kernel, dtype, *finish.constants)


def check_chains(target: str, dtype: torch.dtype) -> None:
    """16-byte accesses to all tensors where rows are a multiple of 16 bytes long, 8-byte ones where
    they are of 8 (float64: 16); nothing spills, in odd rows neither."""
    from fusedtrain.reference.pointwise import INDEX
    from fusedtrain.triton import _chain_kernels as k
    from fusedtrain.triton import chains as c
    from fusedtrain.triton.formulas import formula_of

    silu = INDEX["silu"]
    forward, backward, by_output, stored = formula_of(silu, dtype)
    block, small = c._BLOCK[dtype.itemsize], c._BIAS_BLOCK[dtype.itemsize]
    odd = dtype in (torch.float32, torch.bfloat16)
    for unit in (8, 8 // dtype.itemsize, 1) if odd else (8,):
        # Kernel, constants, elements of a tile, tensors that are read and that are written.
        kernels = [
            (k.gated_kernel, (forward, stored, unit, 1, block), block, 2, 1),
            (
                k.gated_backward_kernel,
                (forward, backward, by_output, stored, unit, 1, block), block, 3, 2,
            ),
        ]  # fmt: skip
        for planes, last in ((True, False), (False, True), (False, False)):
            tile = (unit, planes, last, 4, block // 4)
            smaller = (unit, planes, last, 4, small // 4)
            flags = (True, True, True, unit > 1)
            both = (forward, backward, by_output, stored)
            kernels += [
                (k.scale_kernel, (True, *tile), block, 2, 1),
                (k.scale_backward_kernel, (True, True, *tile), block, 2, 1),
                (k.bias_act_kernel, (forward, stored, *flags, *smaller), small, 1, 1),
                (
                    k.bias_act_backward_kernel,
                    (*both, *flags[:3], True, unit > 1, *smaller), small, 2, 1,
                ),
            ]  # fmt: skip
        for kernel, constants, elements, read, written in kernels:
            compiled = compile_for(target, kernel, dtype, *constants, seed_ptr=torch.int64)
            size = min(16, unit * dtype.itemsize) if unit > 1 else 0
            check_widths(compiled, size, elements * dtype.itemsize, read, written)


def check_widths(compiled: Any, size: int, tile: int, read: int, written: int) -> None:
    """Tiles of so many bytes, of `read` and `written` tensors, are accessed `size` bytes at a time
    (0: anyhow) by 128 threads; nothing spills."""
    if "ptx" not in compiled.asm:
        assert set(re.findall(r"_spill_count:\s+(\d+)", compiled.asm["amdgcn"])) == {"0"}
        return
    code = compiled.asm["ptx"]
    assert ".local" not in code
    assert spilled_bytes(code) == 0
    if size:
        names = {16: r"(?:v4\.b32|v2\.b64)", 8: r"(?:v2\.b32|b64)", 4: r"b32"}[size]
        for kind, tensors in (("ld", read), ("st", written)):
            found = len(re.findall(rf"{kind}\.global\.{names}", code))
            assert found >= tensors * tile // (128 * size), (compiled.metadata.name, kind, found)


def check_few_bits(target: str, dtype: torch.dtype) -> None:
    """16-byte accesses, but in forward of 16 bits, where tiles are smaller; nothing spills."""
    from fusedtrain.reference.pointwise import INDEX
    from fusedtrain.triton import few_bit

    silu = INDEX["silu"]
    for bits in (2, 3, 8):
        forward, backward = few_bit._constants(silu, bits, dtype.itemsize)
        for kernel, constants in (
            (few_bit.forward_kernel, forward), (few_bit.backward_kernel, backward),
        ):  # fmt: skip
            compiled = compile_for(target, kernel, dtype, *constants, codes_ptr=torch.uint8)
            size = 8 if constants is forward and dtype.itemsize == 2 else 16
            tile = constants[-1] * 256 * dtype.itemsize
            check_widths(compiled, size, tile, 1, 1)


def check_images(target: str, dtype: torch.dtype) -> None:
    """16-byte stores, and loads of as many bytes where those are neighbours."""
    from fusedtrain.triton import images as m

    block = m._BLOCK[dtype.itemsize]
    for kernel, rest in ((m.to_planes_kernel, (16, block)), (m.to_last_kernel, (block,))):
        for last in (True, False):
            others = {"x_ptr": torch.uint8, "coefficients_ptr": torch.float32}
            compiled = compile_for(target, kernel, dtype, last, *rest, **others)
            code = compiled.asm.get("ptx")
            if code is None:
                assert set(re.findall(r"_spill_count:\s+(\d+)", compiled.asm["amdgcn"])) == {"0"}
                continue
            assert ".local" not in code
            assert spilled_bytes(code) == 0
            assert re.search(r"st\.global\.(?:v4\.b32|v2\.b64)", code)
            neighbours = (kernel is m.to_last_kernel) == last
            assert bool(re.search(r"ld\.global\.v[24]\.b32", code)) == neighbours


def check_pool(target: str, dtype: torch.dtype) -> None:
    """16-byte accesses where a pixel has as many channels, single ones elsewhere; nothing leaves
    the registers."""
    from fusedtrain.triton import pool

    for channels, small in ((24, True), (1, True), (24, False)):
        unit = pool._unit(channels, dtype.itemsize, small)
        block = unit * pool._BLOCK
        for bits in (1, 2, 4, 8) if small else (2,):
            for kernel, constants in (
                (pool.max_pool2d_kernel, (bits, True, small, unit, block)),
                (pool.max_pool2d_backward_kernel, (bits, small, unit, block)),
            ):
                compiled = compile_for(target, kernel, dtype, *constants, codes_ptr=torch.uint8)
                if not small and "ptx" in compiled.asm:
                    # Calls that divide 64 bits put registers by.
                    assert ".local" not in compiled.asm["ptx"]
                    continue
                size = 16 if unit > 1 else 0
                check_widths(compiled, size, 128 * size, 1, 1)


def fake_driver() -> Any:
    """A driver that does nothing, and remembers what was launched."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        launched: list[Any] = []  # noqa: RUF012
        utils: Any = None

        def load_binary(self, *_: Any) -> tuple[int, ...]:
            return 1, 2, 32, 0, 1024

        def get_device_properties(self, _: int) -> dict[str, int]:
            return {"max_shared_mem": 2**17}

        def unload_module(self, _: int) -> None:
            pass

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _: int) -> int:
            return 7

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def launcher_cls(self, *_: Any) -> Any:
            return lambda *arguments: self.launched.append(arguments)

    driver = Driver()
    driver.utils = driver
    triton.runtime.driver.set_active(driver)
    return driver


def check_launches() -> None:
    """One compilation for all sizes and parameters."""
    driver = fake_driver()
    from fusedtrain.triton import OPS, channelwise, pointwise

    cache = pointwise._launch_forward._compiled
    for n, alpha in ((1, 0.1), (7, 1.0), (2048, 0.0), (4096, 1e300), (5000, -3.0)):
        x = torch.empty(n)
        OPS["elu"](x, alpha)
        arguments = driver.launched[-1]
        assert arguments[:4] == (-(-n // 2048), 1, 1, 7)
        assert arguments[9].data_ptr() == x.data_ptr()
        assert arguments[11:14] == (n, alpha, 0.0)
    assert len(cache) == 1
    OPS["elu"](torch.empty(9)[1:], 1.0)  # not on 16 bytes: a kernel of its own, not remembered
    assert len(cache) == 1
    kernels = pointwise.forward_kernel.device_caches[0][0]
    assert len(kernels) == 2
    for dtype in (torch.float16, torch.bfloat16):  # sums of one dtype, gradients of two
        x = torch.empty(64, dtype=dtype)
        OPS["prelu_backward"](x, x, x[:1])
    finish = channelwise._launch_finish._compiled.values()
    assert len({kernel.asm["ptx"] for _, kernel in finish}) == 2
    before = len(driver.launched)
    OPS["elu_"](torch.empty(2, 0), 1.0)
    OPS["prelu"](torch.empty(0, 3), torch.empty(3))
    OPS["elu_backward"](torch.empty(0), torch.empty(0), 1.0)
    assert len(driver.launched) == before


if __name__ == "__main__":
    check_launches() if sys.argv[1] == "launches" else check_target(sys.argv[1])
