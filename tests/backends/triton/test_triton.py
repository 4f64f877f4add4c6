"""Tests of Triton alone: every kernel compiles for every target, to 16-byte accesses without
spills; numbers do not recompile; the ways in which channelwise kernels cut a tensor.

test_activation_kernels.py runs the kernels, interpreted where there is no GPU. Triton decides when
a kernel is defined whether to interpret it, so compilation has processes of its own: this file, run
as a script with the name of a target.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedtrain.reference import ACTIVATIONS
from helpers.activations import DTYPES, POINTWISE, assert_close
from helpers.backends import BACKENDS
from helpers.compiling import (
    VIEWS,
    check_code,
    check_widths,
    compile_for,
    fake_driver,
    run,
    spilled_bytes,
)
from helpers.triton_interpreter import round_to_nearest

pytest.importorskip("triton", reason="triton is not installed")

FEW = ["gelu", "elu", "hardtanh", "softplus"]  # many registers, parameters, rounded parameters
WHOLE = ["columns", "planes", "eights"]


# 50 s of a processor; all the rest is 250 s.
ALL = "float32 float64 float16 bfloat16"
long = pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtypes"),
    [
        ("sm_90", "bfloat16"),
        pytest.param("sm_90", "float32 float64 float16", marks=long),
        pytest.param("sm_80", ALL, marks=long),
        pytest.param("gfx942", ALL, marks=long),
    ],
)
def test_code(target: str, dtypes: str, tmp_path: Path) -> None:
    run(__file__, target, *dtypes.split(), TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.slow
def test_launches(tmp_path: Path) -> None:
    run(__file__, "launches", TRITON_CACHE_DIR=str(tmp_path))


def test_import_leaves_triton_alone() -> None:
    # Other ops: optimizers, norms, folding, chains, few bits, images, pooling, convolutions,
    # rows, groups.
    activations = sum(2 if row.tensors else 3 for row in ACTIVATIONS.values())
    ops = activations + 5 + 8 + 2 + 8 + 3 + 1 + 2 + 2 + 2 + 3
    code = (
        "import sys, torch, fusedtrain, fusedtrain.triton as t;"
        "t.register(torch.library.Library('fusedtrain', 'IMPL'), 'XPU');"
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["prelu", "star_relu"])
def test_every_cut(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns and planes, several steps a program, fewer in the last; the same bits each time."""
    ops = BACKENDS["triton"]()
    round_to_nearest()
    from fusedtrain.triton import _layout, channelwise

    monkeypatch.setattr(_layout, "_PROGRAMS", 2)
    channelwise._backward_plan.cache_clear()
    channelwise.finish_plan.cache_clear()
    row = ACTIVATIONS[name]
    for rows, channels, inner in (*VIEWS.values(), (1100, 3, 1), (3, 2, 1), (1, 3, 2200)):
        # The width of a tile of shares, which has a rest; for all views 2 would take 4 s more.
        monkeypatch.setattr(channelwise, "_FINISH_BLOCK", 2 if rows == 1100 else 1024)
        for count in (1, channels):
            x, g = (torch.randn(rows, channels, inner).to(dtype) for _ in range(2))
            parameters = [torch.randn(count).to(dtype) for _ in row.parameters]
            wide = [t.double().view(1, -1, 1) for t in parameters]
            x64 = x.double()
            prelu = torch.where(x64 > 0, x64, wide[0] * x64)
            want = prelu if name == "prelu" else wide[0] * x64.relu() ** 2 + wide[1]
            on_device = [t.to(ops.device) for t in (x, *parameters)]
            assert_close(ops(name, *on_device).cpu(), want)
            first, again = (
                ops(f"{name}_backward", g.to(ops.device), *on_device) for _ in range(2)
            )  # fmt: skip
            sums = row.backward(g.double(), x64, *(t.double() for t in parameters))
            for one, two, w in zip(first, again, sums, strict=True):
                assert torch.equal(one, two)
                eps = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, torch.finfo(dtype).eps)
                torch.testing.assert_close(one.double().cpu(), w, rtol=eps, atol=10 * eps)


# --- in processes of their own ---


def check_target(target: str, *dtypes: str) -> None:
    from fusedtrain.triton import _layout, channelwise as c, fold, formulas, pointwise

    for dtype in (getattr(torch, name) for name in dtypes):
        check_chains(target, dtype)
        check_few_bits(target, dtype)
        if dtype is not torch.float64:
            check_images(target, dtype)
        check_row_norm(target, dtype)
        check_pool(target, dtype)
        check_depthwise(target, dtype)
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
                check_code(compiled, loads)
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
    from fusedtrain.triton import _channels, bias_act, gated, scale_add
    from fusedtrain.triton.formulas import formula_of

    silu = INDEX["silu"]
    forward, backward, by_output, stored = formula_of(silu, dtype)
    block, small = _channels.BLOCK[dtype.itemsize], bias_act._BLOCK[dtype.itemsize]
    tiles = {"planes": (True, False), "last": (False, True), "rows": (False, False)}
    units = {8: list(tiles)}
    if dtype in (torch.float32, torch.bfloat16):
        units |= {8 // dtype.itemsize: ["last"], 1: ["planes"]}
    for unit, kinds in units.items():
        # Kernel, constants, elements of a tile, tensors that are read and that are written.
        kernels = [
            (gated.gated_kernel, (forward, stored, unit, 1, block), block, 2, 1),
            (
                gated.gated_backward_kernel,
                (forward, backward, by_output, stored, unit, 1, block), block, 3, 2,
            ),
        ]  # fmt: skip
        for planes, last in (tiles[kind] for kind in kinds):
            tile = (unit, planes, last, 4, block // 4)
            smaller = (unit, planes, last, 4, small // 4)
            together = bias_act.drawn_together(unit, dtype.itemsize)
            flags = (True, True, True)
            both = (forward, backward, by_output, stored)
            kernels += [
                (scale_add.scale_kernel, (True, *tile), block, 2, 1),
                (scale_add.scale_backward_kernel, (True, True, *tile), block, 2, 1),
                (
                    bias_act.bias_act_kernel,
                    (forward, stored, *flags, True, together, *smaller), small, 2, 1,
                ),
                (
                    bias_act.bias_act_backward_kernel,
                    (*both, *flags, True, together, *smaller), small, 2, 1,
                ),
            ]  # fmt: skip
        for kernel, constants, elements, read, written in kernels:
            compiled = compile_for(target, kernel, dtype, *constants, seed_ptr=torch.int64)
            size = min(16, unit * dtype.itemsize) if unit > 1 else 0
            check_widths(compiled, size, elements * dtype.itemsize, read, written)


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


def check_row_norm(target: str, dtype: torch.dtype) -> None:
    """16-byte accesses to rows; nothing spills: whole rows, longer ones, blocks of places."""
    from fusedtrain.triton import row_norm as r

    wide = torch.float64 if dtype is torch.float64 else torch.float32
    others = dict.fromkeys(("mean_ptr", "rstd_ptr", "shares_ptr"), wide)
    block, most = r._BLOCK[dtype.itemsize], r._MOST[dtype.itemsize]
    for n, inner, height, width in (
        (256, 1, block // 256, 256), (most, 1, 1, most), (20_000, 1, 1, block),
        (96, 49, 64, block // 64),
    ):  # fmt: skip
        rest = r.Shape(64, n, inner, height, width).constants
        for kernel, constants in (
            (r.forward_kernel, (True, True, True, True, *rest)),
            (r.backward_kernel, (True, True, True, *rest)),
            (r.sums_kernel, (True, inner == 1, 1024 // min(128, width), min(128, width))),
        ):
            compiled = compile_for(target, kernel, dtype, *constants, **others)
            vectors = inner == 1 and kernel is not r.sums_kernel
            check_widths(compiled, 16 if vectors else 0, height * width * dtype.itemsize, 2, 1)


def check_pool(target: str, dtype: torch.dtype) -> None:
    """16-byte accesses where a pixel has as many channels, single ones elsewhere; nothing leaves
    the registers."""
    from fusedtrain.triton import pool

    for channels, small in ((24, True), (1, True), (24, False)):
        unit = pool._unit(channels, dtype.itemsize, small)
        block = unit * pool._BLOCK
        # Pixels of one channel: the least and the most bits.
        for bits in ((1, 2, 4, 8) if channels > 1 else (1, 8)) if small else (2,):
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


def check_depthwise(target: str, dtype: torch.dtype) -> None:
    """16-byte accesses where a pixel has as many channels; nothing spills: taps without a loop and
    with one, with phases and without, in either layout."""
    from fusedtrain.triton import depthwise as d

    for last, kernel, stride in ((True, 3, 2), (True, 7, 1), (False, 5, 1), (False, 7, 2)):
        pad = kernel // 2
        call = d.ConvShape(
            dtype.itemsize, last, 64, 32, 1, (1, 56, 56), (1, 56 // stride, 56 // stride),
            (1, kernel, kernel), (1, stride, stride), (1, 1, 1), (0, pad, pad),
        )  # fmt: skip
        tile = (d._BLOCK_LAST[dtype.itemsize] if last else d._BLOCK) * dtype.itemsize
        size = 16 if last else 0
        for plan in (d._plan(call, False, True), d._plan(call, True, False)):
            compiled = compile_for(target, d.depthwise_kernel, dtype, *plan.constants)
            check_widths(compiled, size, tile, 2, 1)
        plan, _ = d._weight_plan(call, True, True)
        compiled = compile_for(target, d.depthwise_weight_kernel, dtype, *plan.constants)
        check_widths(compiled, 0, 0, 0, 0)
        if last:
            assert re.search(r"ld\.global\.(?:v4\.b32|v2\.b64)|load_dwordx4", _code(compiled))
    plan = d._plan(call._replace(samples=2**26), False, False)
    assert not plan.constants[-5]  # 64 bits
    compile_for(target, d.depthwise_kernel, dtype, *plan.constants)


def _code(compiled: Any) -> str:
    text: str = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    return text


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
    check_launches() if sys.argv[1] == "launches" else check_target(*sys.argv[1:])
