"""Installs one wheel beside several releases of torch and checks its numbers under each.

    python tools/abi_matrix.py dist/fusedtrain-*.whl [--torch 2.10.0 2.13.0 2.15.0] [--keep FOLDER]

Every torch gets an environment of its own: gigabytes of downloads, so this is not part of CI. The
outcome is recorded in docs/decisions/0001-stable-abi.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

CHECK = """
import torch, fusedtrain, fusedtrain.functional as F
from fusedtrain.reference import ACTIVATIONS
assert fusedtrain.backend_info().backends["cpu"].loaded, fusedtrain.backend_info()
worst = 0.0
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    for row in ACTIVATIONS.values():
        for x in (torch.randn(7, 9) * 3, torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)):
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
            eps = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-8
            for a, b in ((y, z), (gx, gz)):
                error = ((a.double() - b).abs() / b.abs().clamp_min(1)).max().item() / eps
                assert error <= 8, (row.name, dtype, error)
                worst = max(worst, error)
print(f"torch {torch.__version__}: {len(ACTIVATIONS)} ops x 4 dtypes right, worst {worst:.2f} eps;",
      fusedtrain.backend_info().backends["cpu"])
"""  # noqa: E501


def run(*command: str | Path) -> None:
    subprocess.run([str(c) for c in command], check=True)


def main() -> int:
    """Runs the check under each torch; the exit status says whether all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", nargs="+", default=["2.10.0", "2.13.0", "2.15.0"])
    parser.add_argument("--keep", type=Path, help="put the environments here and leave them")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        for version in options.torch:
            environment = folder / version
            python = environment / "bin" / "python"
            if not python.exists():
                run(sys.executable, "-m", "venv", environment)
            run(python, "-m", "pip", "install", "-q", f"torch=={version}", "numpy")
            reinstall = ["-q", "--no-deps", "--force-reinstall", options.wheel]
            run(python, "-m", "pip", "install", *reinstall)
            if subprocess.run([python, "-c", CHECK], cwd=folder, check=False).returncode:
                failed.append(version)
    print("failed under: " + ", ".join(failed) if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
