"""Installs one wheel beside several releases of torch under several Pythons, and checks each pair.

    python tools/abi_matrix.py dist/*.whl [--torch 2.10.0] [--python python3.14] [--keep FOLDER]

Every pair gets an environment of its own: gigabytes of downloads, so CI does this for releases only
(.github/workflows/wheels.yml). A Python is a command or a path; those that are not installed are
left out by name. The outcome is the table of docs/install.md.
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


def run(*command: str | Path) -> None:
    subprocess.run([str(c) for c in command], check=True)


def check(wheel: Path, interpreter: str, torch: str, environment: Path) -> bool:
    """Installs wheel and torch, and runs the check outside of the checkout.

    Args:
        wheel: the file.
        interpreter: a Python.
        torch: the version.
        environment: the folder of the virtual environment.
    """
    python = environment / "bin" / "python"
    if not python.exists():
        run(interpreter, "-m", "venv", environment)
    run(python, "-m", "pip", "install", "-q", f"torch=={torch}", "numpy")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel)
    # In the folder: Python would find the package of the checkout in the checkout's root.
    return not subprocess.run([python, CHECK], cwd=environment, check=False).returncode


def main() -> int:
    """Runs the check under each torch; the exit status says whether all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", nargs="+", default=["2.10.0", "2.13.0", "2.15.0"])
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="COMMAND")
    parser.add_argument("--keep", type=Path, help="put the environments here and leave them")
    options = parser.parse_args()
    failed, passed, absent = [], 0, []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        for command in options.python:
            interpreter = shutil.which(command)
            if interpreter is None:
                absent.append(command)
                continue
            for version in options.torch:
                name = f"{Path(command).name}, torch {version}"
                print(f"{name}: installing, about 2 minutes", flush=True)
                if check(options.wheel, interpreter, version, folder / name.replace(", ", "-")):
                    passed += 1
                else:
                    failed.append(name)
    print(f"{passed} passed" + "".join(f"; FAILED: {name}" for name in failed))
    if absent:
        print(f"not installed, so not tried: {', '.join(absent)}")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
