"""Checks that every installation must pass: the README's examples, and right numbers.

    cd /tmp && python .../tools/wheel_check.py

It uses the installed package and needs nothing else but torch: neither pytest nor the checkout's
package. The activations are compared with float64, batch norm and AdamW with torch's own.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from torch import Tensor

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.reference import ACTIVATIONS

ROOT = Path(__file__).resolve().parents[1]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LIMITS = {"activations": 8.0, "batch norm": 32.0, "AdamW": 32.0}  # in eps
WORST = dict.fromkeys(LIMITS, 0.0)


def check(kind: str, name: str, result: Tensor, truth: Tensor) -> None:
    """Compares in eps of the dtype (of 1e-8 for float64, whose truth is no better)."""
    eps = torch.finfo(result.dtype).eps if result.dtype != torch.float64 else 1e-8
    errors = (result.detach().double() - truth.detach()).abs() / truth.detach().abs().clamp_min(1)
    error = float(errors.max()) / eps
    assert error <= LIMITS[kind], f"{name}, {result.dtype}: {error} eps"
    WORST[kind] = max(WORST[kind], error)


def activations(dtype: torch.dtype, shape: tuple[int, ...], layout: torch.memory_format) -> None:
    """Each activation, forward and backward."""
    x = (torch.randn(shape) * 3).to(dtype).contiguous(memory_format=layout)
    # Off the kinks: torch 2.15 changed the slope of clamp at its bounds.
    x = torch.where(x * 2 == (x * 2).round(), x + 0.125, x).requires_grad_()
    for row in ACTIVATIONS.values():
        approximate = row.name == "gelu_tanh"
        function = F.gelu if approximate else getattr(F, row.name)
        y = function(x, approximate="tanh") if approximate else function(x, *row.arguments_for(x))
        wide = x.detach().double().requires_grad_()
        truth, grad = row.eager(wide), torch.randn_like(y)
        check("activations", row.name, y, truth)
        (grad_x,) = torch.autograd.grad(y, x, grad)
        check("activations", row.name, grad_x, *torch.autograd.grad(truth, wide, grad.double()))


def batch_norm() -> None:
    """Batch norm with SiLU, forward and backward."""
    a = torch.randn(8, 5, 6, 7).requires_grad_()
    b = a.detach().double().requires_grad_()
    y = fusedtrain.nn.BatchNormAct2d(5, act_layer=torch.nn.SiLU)(a)
    z = torch.nn.Sequential(torch.nn.BatchNorm2d(5), torch.nn.SiLU()).double()(b)
    check("batch norm", "forward", y, z)
    grad = torch.randn_like(y)
    check(
        "batch norm", "backward",
        *torch.autograd.grad(y, a, grad), *torch.autograd.grad(z, b, grad.double()),
    )  # fmt: skip


def adamw() -> None:
    """Ten steps."""
    p = torch.nn.Parameter(torch.randn(1001))
    q = torch.nn.Parameter(p.detach().double())
    ours, theirs = fusedtrain.optim.AdamW([p], lr=0.01), torch.optim.AdamW([q], lr=0.01)
    for grad in torch.randn(10, 1001):
        p.grad, q.grad = grad.clone(), grad.double()
        ours.step()
        theirs.step()
    check("AdamW", "AdamW", p, q)


def main() -> int:
    """Runs all of it; any failure is an error."""
    installed = Path(fusedtrain.__file__).resolve()
    assert ROOT not in installed.parents, f"{installed} is the checkout, not an installation"
    cpu = fusedtrain.backend_info().backends["cpu"]
    assert cpu.loaded, fusedtrain.backend_info()
    torch.manual_seed(0)
    for dtype in DTYPES:
        activations(dtype, (7, 9), torch.contiguous_format)
        activations(dtype, (2, 3, 8, 8), torch.channels_last)
    batch_norm()
    adamw()
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S)
    assert blocks, "README has no Python example"
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "example"})
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {cpu}")
    print(
        f"{len(blocks)} examples of README run; worst errors in eps:",
        *(f"{kind} {error:.2f};" for kind, error in WORST.items()),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
