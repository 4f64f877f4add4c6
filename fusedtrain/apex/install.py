"""Makes ``import apex`` find a stand-in for NVIDIA Apex."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .._version import __version__

# Module of Apex -> the module with its names, which is imported on first use.
_TARGETS = {
    "apex": None,
    "apex.amp": "fusedtrain.apex.amp",
    "apex.fp16_utils": "fusedtrain.apex.fp16_utils",
    "apex.multi_tensor_apply": "fusedtrain.apex.multi_tensor_apply",
    "apex.normalization": "fusedtrain.apex.normalization",
    "apex.normalization.fused_layer_norm": "fusedtrain.apex.normalization",
    "apex.optimizers": "fusedtrain.apex.optimizers",
    "apex.parallel": "fusedtrain.apex.parallel",
    "apex.parallel.LARC": "fusedtrain.apex.larc",
    "apex.parallel.distributed": "fusedtrain.apex.parallel",
    "apex.parallel.sync_batchnorm": "fusedtrain.apex.parallel",
    "apex.parallel.optimized_sync_batchnorm": "fusedtrain.apex.parallel",
    "apex.fp16_utils.fp16util": "fusedtrain.apex.fp16_utils",
    "apex.fp16_utils.fp16_optimizer": "fusedtrain.apex.fp16_utils",
    "apex.fp16_utils.loss_scaler": "fusedtrain.apex.fp16_utils",
    **{
        f"apex.optimizers.fused_{name}": "fusedtrain.apex.optimizers"
        for name in ("adagrad", "adam", "lamb", "novograd", "sgd")
    },
}


class _StandIn(ModuleType):
    """A module of Apex with the names of another module, which is imported on first use."""

    def __getattr__(self, name: str) -> Any:
        target = _TARGETS[self.__name__]
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if target is not None:
            module, names = _open(target)
            vars(self).update({each: getattr(module, each) for each in names}, __all__=names)
            if name in vars(self):
                return vars(self)[name]
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(_has_not(f"{self.__name__}.{name}"))

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *_names_of(self.__name__)})


def _open(target: str) -> tuple[ModuleType, list[str]]:
    """A module and its public names: `__all__`, or else the names that are defined in it."""
    module = importlib.import_module(target)
    defined = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == target
    ]
    return module, list(getattr(module, "__all__", defined))


def _names_of(module: str) -> list[str]:
    prefix, target = f"{module}.", _TARGETS[module]
    names = {name.removeprefix(prefix) for name in _TARGETS if name.startswith(prefix)}
    names = {name for name in names if "." not in name}
    return sorted(names if target is None else names.union(_open(target)[1]))


def _has_not(name: str) -> str:
    owner = name.rpartition(".")[0]
    return (
        f"fusedtrain's stand-in for Apex has no {name}; {owner} has: {', '.join(_names_of(owner))}"
    )


class _Importer:
    """Makes the modules of the stand-in, and raises for other modules under `apex`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "apex":
            return None
        if fullname not in _TARGETS:
            # Without `name`: ``from apex import x`` would hide an error with a name.
            raise ModuleNotFoundError(_has_not(fullname))
        return ModuleSpec(
            fullname,
            self,  # type: ignore[arg-type]
            origin=f"stand-in of fusedtrain {__version__}",
            is_package=True,
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"Stand-in of fusedtrain {__version__} for NVIDIA Apex."
        if module.__name__ == "apex":
            vars(module)["__version__"] = f"0.1+fusedtrain.{__version__}"


def _other_apex() -> str | None:
    """The place of an `apex` that is not the stand-in."""
    module = sys.modules.get("apex")
    if module is not None:
        return f"imported already, from {getattr(module, '__file__', None) or module}"
    spec = importlib.util.find_spec("apex")
    if spec is not None and not isinstance(spec.loader, _Importer):
        return spec.origin or ", ".join(spec.submodule_search_locations or ())
    try:
        package = importlib.metadata.distribution("apex")
    except importlib.metadata.PackageNotFoundError:
        return None
    return f"{package.locate_file('')}, version {package.version}"


def install_apex() -> ModuleType:
    """Makes ``import apex`` find a stand-in: the parts of Apex in :mod:`fusedtrain.apex`.

    The modules are apex, apex.amp, apex.fp16_utils, apex.multi_tensor_apply (not available),
    apex.normalization, apex.optimizers, apex.parallel and apex.parallel.LARC. Importing another
    module of apex raises ModuleNotFoundError, which names these. The stand-in exists only in a
    process that calls this function; ``python -m fusedtrain.apex`` also installs it in processes of
    multiprocessing.

    Returns:
        the module apex; the same module at every call.

    Raises:
        RuntimeError: if an apex is imported already or can be imported: NVIDIA's, the package of
        that name on PyPI, or a folder. Nothing is modified.

    Example:
        In a separate process, since the stand-in is for the whole process:

        >>> import subprocess, sys
        >>> script = "import fusedtrain; fusedtrain.apex.install_apex(); import apex.parallel"
        >>> subprocess.run([sys.executable, "-c", script]).returncode
        0
    """
    installed = sys.modules.get("apex")
    if isinstance(installed, _StandIn):
        return installed
    where = _other_apex()
    if where is not None:
        raise RuntimeError(
            f"install_apex: there is an apex already ({where}), which the stand-in would hide. "
            "Remove it (pip uninstall apex, or rename the folder), or import from "
            "fusedtrain.apex instead of apex"
        )
    sys.modules.pop("apex", None)  # None in sys.modules blocks the import
    if not any(isinstance(finder, _Importer) for finder in sys.meta_path):
        sys.meta_path.append(_Importer())
    for name in _TARGETS:
        importlib.import_module(name)
    return sys.modules["apex"]
