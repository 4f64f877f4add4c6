"""A Launcher's cached kernels are launched for what they were compiled for, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.compiling import run

pytest.importorskip("triton", reason="triton is not installed")


def test_numbers_do_not_specialize(tmp_path: Path) -> None:
    """In a process of its own: interpreted kernels do not tell."""
    run(__file__, TRITON_CACHE_DIR=str(tmp_path))


def test_what_was_compiled_for_other_constants_is_not_launched() -> None:
    from fusedtrain.triton.launch import Launcher

    made: list[tuple[Any, ...]] = []
    launched: list[tuple[Any, ...]] = []

    class Kernel:
        """As Triton's: launches, and returns what it compiled."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, **options: Any) -> Any:
                constants = arguments[2:]
                made.append(constants)
                launched.append(constants)
                return {(1, 1, 1): lambda *again: launched.append(constants)}

            return launch

    launcher = Launcher(Kernel())
    x = torch.empty(64)
    assert x.data_ptr() % 16 == 0
    for block in (64, 64, 32, 32, 64):
        launcher("variant", 1, (x,), (7,), (block,))
        assert launched[-1] == (block,)
    assert made == [(64,), (32,), (64,)]


def launchers() -> dict[str, Any]:
    """The launchers of all kernels, by module and name."""
    import fusedtrain.triton
    from fusedtrain.triton.launch import Launcher

    assert fusedtrain.triton.OPS["mish"]
    modules = [m for name, m in sys.modules.items() if name.startswith("fusedtrain.triton.")]
    return {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Launcher)
    }


def check_numbers() -> None:
    """Triton would compile again for some sizes and strides. A Launcher does not know of that."""
    by_name = launchers()
    assert len(by_name) > 25
    for name, launcher in by_name.items():
        for p in launcher._kernel.params:
            if not p.is_constexpr and not p.name.endswith("_ptr"):
                assert p.annotation_type, (name, p.name)
                assert p.do_not_specialize or p.annotation_type.startswith("fp"), (name, p.name)


if __name__ == "__main__":
    check_numbers()
