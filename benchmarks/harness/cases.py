"""Parts of the cases of all families: the options of a run, layouts, names of dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusedtrain.advisor.bench import LAYOUTS, Options as Work

__all__ = ["LAYOUTS", "Options", "Work", "dtype_name"]


@dataclass(frozen=True)
class Options:
    """Options of a run, from the command line."""

    device: str = "cpu"
    full: bool = False
    quick: bool = False
    float64: bool = False
    compiled: bool = True
    ops: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def wants(self, op: str, model: str = "") -> bool:
        """Whether the names of a case are among those asked for; none asked for: all are."""
        return (not self.ops or op in self.ops) and (not self.models or model in self.models)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``float32``."""
    return str(dtype).removeprefix("torch.")
