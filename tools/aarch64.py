"""Compiles the CPU's kernels for aarch64 and checks their numbers in an emulator: `make aarch64`.

    python tools/aarch64.py [--compiler aarch64-linux-gnu-g++] [--emulator qemu-aarch64-static]

Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static. Neither torch for aarch64 nor such a
machine is needed: tools/kernel_driver.cpp calls the kernels, and this machine's torch has the truth
in float64: the activations of numbers in four dtypes, batch norm with an activation, AdamW.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fusedtrain.reference import ACTIVATIONS  # noqa: E402

BUILD = ROOT / "build" / "aarch64"
FLAGS = "-O3 -std=c++17 -fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-unused-function"
DEFAULT = "-DFT_ISA=isa_default -DFT_ISA_NAME=default"
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # the order of Dtype
ELEMENTS = 70_001  # several pieces, of an odd size
LIMITS = {"pointwise": 8.0, "batch_norm": 64.0, "adamw": 32.0}  # in eps of the largest magnitude


@dataclass
class Call:
    """A line for the driver, its inputs, and what it must write."""

    line: str
    inputs: list[Tensor]
    truths: list[Tensor]
    dtype: torch.dtype = torch.float32
    names: tuple[str, ...] = field(default=("y", "grad_input", "grad_weight", "grad_bias"))

    @property
    def limit(self) -> float:
        return LIMITS[self.line.split()[0]]


def ops() -> list[str]:
    """The formulas in the order of their numbers."""
    body = (ROOT / "csrc/formulas.h").read_text().split("#define FT_POINTWISE(X)")[1]
    return re.findall(r"X\((\w+),", body.split("\n\n")[0])


def gradients(forward: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The result in float64, and the gradients of the inputs."""
    wide = [x.double().requires_grad_() for x in inputs]
    y = forward(*wide)
    return [y.detach(), *torch.autograd.grad(y, wide, grad.double())]


def calls() -> list[Call]:
    """Calls of kernels whose results are compared."""
    torch.manual_seed(0)
    made = []
    for op, name in enumerate(ops()):
        row = ACTIVATIONS[name]
        parameters = [*map(float, row.example), 0.0, 0.0][:2]
        for number, dtype in enumerate(DTYPES):
            x = (torch.randn(ELEMENTS) * 3).to(dtype)
            # Off the kinks, where the slope is a convention.
            x = torch.where(x * 2 == (x * 2).round(), x + 0.125, x)
            grad = torch.randn(ELEMENTS).to(dtype)
            line = f"pointwise {op} {number} {ELEMENTS} {parameters[0]!r} {parameters[1]!r}"
            made.append(Call(line, [x, grad], gradients(row.eager, [x], grad), dtype))
    for op in (-1, ops().index("silu"), ops().index("relu")):
        shape = (6, 19, 143)
        x, grad = torch.randn(shape), torch.randn(shape)
        weight, bias = torch.rand(19) + 0.5, torch.randn(19)

        def forward(x: Tensor, weight: Tensor, bias: Tensor, op: int = op) -> Tensor:
            y = torch.nn.functional.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5)
            return y if op < 0 else ACTIVATIONS[ops()[op]].eager(y)

        line = f"batch_norm {op} {shape[0]} {shape[1]} {shape[2]}"
        truths = gradients(forward, [x, weight, bias], grad)
        made.append(Call(line, [x, grad, weight, bias], truths))
    start, grads = torch.randn(ELEMENTS), torch.randn(10, ELEMENTS)
    p = torch.nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([p], lr=0.01, weight_decay=0.1)
    for grad in grads:
        p.grad = grad.double()
        optimizer.step()
    made.append(Call(f"adamw {ELEMENTS} 10 0.01 0.1", [start, grads], [p.detach()]))
    return made


def compare(made: list[Call], results: bytes) -> dict[str, float]:
    """The worst error of each kind of call, in eps; AssertionError where one is too large."""
    worst: dict[str, float] = {}
    at = 0
    for call in made:
        for name, truth in zip(call.names, call.truths, strict=False):
            size = truth.numel() * call.dtype.itemsize
            result = torch.frombuffer(bytearray(results[at : at + size]), dtype=call.dtype)
            at += size
            difference = (
                result.double() - truth.flatten()
            ).abs() / truth.flatten().abs().clamp_min(1)
            # In float64 the truth is torch's, whose slope of hardsigmoid is a float32 1/6.
            eps = torch.finfo(call.dtype).eps if call.dtype != torch.float64 else 1e-8
            error = difference.max().item() / eps
            # NaN is not smaller, either.
            assert error <= call.limit, f"{call.line}, {name}, {call.dtype}: {error:.1f} eps"
            kind = call.line.split()[0]
            worst[kind] = max(worst.get(kind, 0.0), error)
    assert at == len(results), "the driver wrote more than was asked for"
    return worst


def build(compiler: str) -> Path:
    """Compiles what has changed, and links the driver without shared libraries."""
    units = [(source, "") for source in sorted((ROOT / "csrc/cpu").glob("*.cpp"))]
    units += [(source, DEFAULT) for source in sorted((ROOT / "csrc/cpu/isa").glob("*.cpp"))]
    units.append((ROOT / "tools/kernel_driver.cpp", ""))
    newest = max(path.stat().st_mtime for path in (ROOT / "csrc").rglob("*.h"))
    BUILD.mkdir(parents=True, exist_ok=True)

    def compile(unit: tuple[Path, str]) -> Path:
        source, flags = unit
        out = BUILD / f"{source.parent.name}.{source.stem}.o"
        if not out.exists() or out.stat().st_mtime < max(newest, source.stat().st_mtime):
            start = time.monotonic()
            command = [compiler, *FLAGS.split(), *flags.split(), "-c", source, "-o", out]
            subprocess.run([str(word) for word in command], check=True)
            print(f"  {source.relative_to(ROOT)}: {time.monotonic() - start:.0f} s", flush=True)
        return out

    print(f"compiling {len(units)} units with {compiler}, about 1 minute of 2 cores", flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(path) for path in pool.map(compile, units)]
    driver = BUILD / "kernel_driver"
    subprocess.run([compiler, "-static", *objects, "-o", str(driver)], check=True)
    return driver


def main() -> int:
    """Builds, runs and compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--compiler", default="aarch64-linux-gnu-g++")
    parser.add_argument("--emulator", default="qemu-aarch64-static", help="empty: none is needed")
    options = parser.parse_args()
    for tool in filter(None, (options.compiler, options.emulator)):
        if shutil.which(tool) is None:
            print(
                f"missing: {tool} (Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static)"
            )
            return 2
    driver = build(options.compiler)
    made = calls()
    print(f"running {len(made)} calls, about 20 seconds", flush=True)
    (BUILD / "calls").write_text("".join(f"{call.line}\n" for call in made))
    with (BUILD / "numbers").open("wb") as file:
        for call in made:
            for numbers in call.inputs:
                file.write(numbers.contiguous().view(torch.uint8).numpy().tobytes())
    command = [*filter(None, [options.emulator]), driver]
    files = (BUILD / name for name in ("calls", "numbers", "results"))
    start = time.monotonic()
    subprocess.run(
        [str(word) for word in (*command, *files)], check=True, stdout=subprocess.DEVNULL
    )
    worst = compare(made, (BUILD / "results").read_bytes())
    errors = ", ".join(f"{kind} {error:.2f}" for kind, error in worst.items())
    print(
        f"{len(made)} calls right in {time.monotonic() - start:.0f} s; "
        f"worst errors in eps: {errors}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
