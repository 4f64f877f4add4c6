"""Job to tune: model, input, batch, optimizer, device; and where a function can be imported."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LIBRARIES = ("torchvision", "timm", "transformers")
TOKENS = 100  # token ids for a model of transformers; each vocabulary has as many
LEARNING_RATES = {"sgd": 0.1, "adamw": 1e-3}


@dataclass(frozen=True)
class Job:
    """Training that each trial does; `tune` says what its arguments mean. `model` and `loader` are
    names, `input` is the shape of one sample."""

    model: str
    input: tuple[int, ...]
    batch: int = 32
    classes: int = 1000
    tokens: int = 0
    loader: str = ""
    device: str = "cpu"
    optimizer: str = "sgd"
    lr: float = LEARNING_RATES["sgd"]
    config: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Job:
        return Job(**{**values, "input": tuple(values["input"])})


def split(place: str) -> tuple[str, str]:
    """``where:name``; the colon of ``C:\\model.py`` is not meant.

    Raises:
        ValueError: there is no name.
    """
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise ValueError(
            f"{place}: expected torchvision:NAME, timm:NAME, transformers:CONFIGCLASS or "
            "path.py:FUNCTION"
        )
    return where, name


def checked_job(
    model: str, example: Any, batch: int, classes: int, tokens: int, loader: str, optimizer: str,
    lr: float | None, device: str | None, config: Mapping[str, Any] | None,
) -> Job:  # fmt: skip
    """The job with its defaults filled in. `example`: one sample, or its shape.

    Raises:
        ValueError: an argument has no sense.
    """
    shape = tuple(int(n) for n in (example.shape if torch.is_tensor(example) else example))
    if torch.is_tensor(example) and not example.is_floating_point() and not tokens:
        tokens = int(example.max()) + 1
    if min(shape, default=0) < 1:
        raise ValueError(f"example: expected the shape of one sample, got {shape}")
    if batch < 2:
        raise ValueError(f"batch: expected 2 or more, for batch norm; got {batch}")
    if optimizer not in LEARNING_RATES:
        raise ValueError(f"optimizer: expected sgd or adamw, got {optimizer!r}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: torch sees no CUDA device")
    if split(model)[0] == "transformers":
        tokens = tokens or TOKENS
    lr = LEARNING_RATES[optimizer] if lr is None else lr
    return Job(
        model, shape, batch, classes, tokens, loader, device, optimizer, lr, dict(config or {})
    )


def random_inputs(job: Job, batch: int, generator: torch.Generator | None = None) -> Tensor:
    shape = (batch, *job.input)
    if job.tokens:
        return torch.randint(job.tokens, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def target_of(job: Job, output: Any, batch: int) -> tuple[int, list[int]]:
    """Classes, and the shape of the targets beside the batch, by the output of a batch.

    Raises:
        TypeError: the model is no classifier.
    """
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor) or output.dim() < 2 or len(output) != batch:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            f"{job.model}: for {batch} samples the model returns {shape}; cross-entropy needs a "
            "tensor [batch, classes, ...] (fit: pass step=)"
        )
    return output.shape[1], list(output.shape[2:])


def load_function(place: str) -> Callable[..., Any]:
    """The function of ``path.py:FUNCTION`` or ``package.module:FUNCTION``."""
    where, name = split(place)
    file = Path(where).resolve() if where.endswith(".py") else None
    module = importlib.import_module(where) if file is None else _from_file(file)
    function: Any = functools.reduce(getattr, name.split("."), module)
    if not callable(function):
        raise TypeError(f"{place}: expected a function, got {type(function).__name__}")
    return function


def search_path(job: Job) -> list[str]:
    """Folders in which a trial finds modules: those of this process.

    The working directory is among them only where a module is named, which may lie there. A file
    comes with its folder, and runs no other file of the working directory.
    """
    places = [split(place)[0] for place in (job.model, job.loader) if place]
    if any(not where.endswith(".py") and where not in LIBRARIES for where in places):
        return sys.path
    working = os.getcwd()
    return [folder for folder in sys.path if os.path.abspath(folder) != working]


@functools.cache  # functions of one file share its names
def _from_file(path: Path) -> ModuleType:
    """Imports a file under its name, with its folder first in sys.path, as a script has."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # worker processes of a loader unpickle functions by this name
    spec.loader.exec_module(module)
    return module


def place_of(function: Callable[..., Any] | str, argument: str) -> str:
    """The name by which a fresh process finds the function.

    Raises:
        TypeError: the function has no such place: a lambda, a nested function, one typed at a
            prompt.
    """
    if isinstance(function, str):
        split(function)
        return function
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if not name or "<" in name or not callable(function):
        raise TypeError(
            f"{argument}: expected a function at the top of a file, which a fresh process can "
            f"import, or 'path.py:FUNCTION'; got {function!r}"
        )
    if module != "__main__":
        return f"{module}:{name}"
    try:
        path = inspect.getsourcefile(function)
    except TypeError:
        path = None
    if path is None or not Path(path).is_file():
        raise TypeError(f"{argument}: {name} is in no file, which a fresh process could import")
    return f"{path}:{name}"
