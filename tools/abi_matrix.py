"""Installs one wheel beside several releases of torch under several Pythons, and checks each pair.

    python tools/abi_matrix.py dist/*.whl [--torch 2.10.0] [--python python3.14] [--keep FOLDER]

Every pair gets an environment of its own: gigabytes of downloads, so CI does this for releases only
(.github/workflows/wheels.yml). A Python is a command or a path. Those that are not installed, and
releases of torch without a wheel for a Python, are left out by name. The outcome is the table of
docs/install.md.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]
CHECK = Path(__file__).resolve().parent / "wheel_check.py"
PIP = ("-m", "pip", "install", "-q", "--disable-pip-version-check")


def check(wheel: Path, interpreter: str, torch: str, environment: Path) -> str:
    """Installs wheel and torch, and runs the check outside of the checkout.

    Args:
        wheel: the file.
        interpreter: a Python.
        torch: the version.
        environment: the folder of the virtual environment.

    Returns:
        "passed", "FAILED", or "no wheel" where PyPI has that torch for other Pythons only.
    """
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", environment], check=True)
    install = subprocess.run(
        [python, *PIP, f"torch=={torch}", "numpy"], text=True, stderr=subprocess.PIPE, check=False
    )
    print(install.stderr, end="", file=sys.stderr)
    if f"No matching distribution found for torch=={torch}" in install.stderr:
        return "no wheel"
    # In the folder: Python would find the package of the checkout in the checkout's root.
    passed = (
        install.returncode == 0
        and subprocess.call([python, *PIP, "--no-deps", "--force-reinstall", wheel]) == 0
        and subprocess.call([python, CHECK], cwd=environment) == 0
    )
    return "passed" if passed else "FAILED"


def main() -> int:
    """Runs the check under each torch; the exit status says whether all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", nargs="+", default=["2.10.0", "2.13.0", "2.15.0"])
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="COMMAND")
    parser.add_argument("--keep", type=Path, help="put the environments here and leave them")
    options = parser.parse_args()
    pairs = [(command, version) for command in options.python for version in options.torch]
    ends: dict[str, list[str]] = {}
    for number, (command, version) in enumerate(pairs, 1):
        name = f"{Path(command).name}, torch {version}"
        interpreter = shutil.which(command)
        if interpreter is None:
            end = "no such Python"
        else:
            print(f"{number} of {len(pairs)}: {name}: installing, 2 to 5 minutes", flush=True)
            with tempfile.TemporaryDirectory() as temporary:  # 3 to 7 GB each
                folder = (options.keep or Path(temporary)).resolve() / name.replace(", ", "-")
                end = check(options.wheel, interpreter, version, folder)
            print(f"{name}: {end}", flush=True)
        ends.setdefault(end, []).append(name)
    passed = ends.pop("passed", [])
    print(f"{len(passed)} passed")
    for end, names in ends.items():
        print(f"{end}: {'; '.join(names)}")
    return 1 if "FAILED" in ends or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
