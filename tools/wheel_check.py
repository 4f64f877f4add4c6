"""Checks that every installation must pass: the README's examples, and right numbers.

    cd /tmp && python .../tools/wheel_check.py

It uses the installed package and needs nothing else but torch: neither pytest nor the checkout's
package. The activations are compared with float64, batch norm and AdamW with torch's own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.reference import ACTIVATIONS

ROOT = Path(__file__).resolve().parents[1]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MOST_EPS = 8.0


def error(result: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest error, in eps of the dtype (of 1e-8 for float64, whose truth is no better)."""
    eps = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-8
    return float(((result.double() - truth).abs() / truth.abs().clamp_min(1)).max()) / eps


def activations() -> Iterator[float]:
    """Errors of each activation, forward and backward."""
    for dtype in DTYPES:
        for row in ACTIVATIONS.values():
            for x in (
                torch.randn(7, 9) * 3,
                torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
            ):
                x = x.to(dtype)
                # Off the kinks: torch 2.15 changed the slope of clamp at its bounds.
                x = torch.where(x * 2 == (x * 2).round(), x + 0.125, x).requires_grad_()
                if row.name == "gelu_tanh":
                    y = F.gelu(x, approximate="tanh")
                else:
                    y = getattr(F, row.name)(x, *row.arguments_for(x))
                g = torch.randn_like(y)
                (gx,) = torch.autograd.grad(y, x, g)
                wide = x.detach().double().requires_grad_()
                z = row.eager(wide)
                (gz,) = torch.autograd.grad(z, wide, g.double())
                for one, truth in ((y, z), (gx, gz)):
                    worst = error(one.detach(), truth.detach(), dtype)
                    assert worst <= MOST_EPS, f"{row.name}, {dtype}: {worst} eps"
                    yield worst


def batch_norm() -> float:
    """The error of batch norm with SiLU, forward and backward, in float32 eps."""
    x = torch.randn(8, 5, 6, 7)
    ours = fusedtrain.nn.BatchNormAct2d(5, act_layer=torch.nn.SiLU)
    theirs = torch.nn.Sequential(torch.nn.BatchNorm2d(5), torch.nn.SiLU()).double()
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    y, z = ours(a), theirs(b)
    g = torch.randn_like(y)
    y.backward(g)
    z.backward(g.double())
    assert a.grad is not None
    assert b.grad is not None
    worst = max(error(y.detach(), z.detach(), x.dtype), error(a.grad, b.grad, x.dtype))
    assert worst <= 4 * MOST_EPS, f"batch norm: {worst} eps"
    return worst


def adamw() -> float:
    """The error of AdamW after 10 steps, in float32 eps."""
    start, grads = torch.randn(1001), torch.randn(10, 1001)
    p, q = (torch.nn.Parameter(start.to(dtype)) for dtype in (torch.float32, torch.float64))
    ours = fusedtrain.optim.AdamW([p], lr=0.01)
    theirs = torch.optim.AdamW([q], lr=0.01)
    for grad in grads:
        p.grad, q.grad = grad.clone(), grad.double()
        ours.step()
        theirs.step()
    worst = error(p.detach(), q.detach(), torch.float32)
    assert worst <= 4 * MOST_EPS, f"AdamW: {worst} eps"
    return worst


def examples() -> int:
    """Runs the Python blocks of README, and counts them."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert blocks, "README has no Python example"
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "example"})
    return len(blocks)


def main() -> int:
    """Runs all of it; any failure is an error."""
    installed = Path(fusedtrain.__file__).resolve()
    assert ROOT not in installed.parents, f"{installed} is the checkout, not an installation"
    cpu = fusedtrain.backend_info().backends["cpu"]
    assert cpu.loaded, fusedtrain.backend_info()
    torch.manual_seed(0)
    worst = max(activations())
    print(
        f"Python {sys.version.split()[0]}, torch {torch.__version__}, {cpu}: "
        f"{examples()} examples of README run; "
        f"{len(ACTIVATIONS)} activations x {len(DTYPES)} dtypes right, worst {worst:.2f} eps; "
        f"batch norm {batch_norm():.2f} eps; AdamW {adamw():.2f} eps"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
