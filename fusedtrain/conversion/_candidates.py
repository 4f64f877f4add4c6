"""Tests for worthwhile work: forwards that may call a norm or an activation or have a branch are
worth tracing, activations that gain time or memory are worth a swap."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from .._graph.modules import is_container, is_scripted
from .._graph.names import mentioned
from .._torch_private import BatchNormBase
from ..reference.pointwise import POINTWISE
from ._algebra import TELLING
from ._branches import may_have_branches
from ._formulas import OTHERS
from ._norms import is_activation

_AMBIGUOUS = {"threshold"}  # the name of many things
_NAMES = {row.name for row in POINTWISE} - _AMBIGUOUS | set(OTHERS.values())
_WORDS = _NAMES | TELLING | {f"{name}_" for name in _NAMES}

# Activations of a few instructions that are one kernel in torch, too, forward and backward, and for
# which torch saves as much: the output. Of LeakyReLU torch saves it only in place; of ReLU6 and
# Hardtanh in place it clones the input.
_ALWAYS = {"relu"}
_IN_PLACE = {"relu", "leaky_relu"}
GAINS_NOTHING = "gains nothing: torch's own is one kernel and saves as much"
TORCH_IS_FASTER = "gains nothing: torch's own kernels are faster in all passes of the example"


def gains(name: str, in_place: bool, memory: str) -> bool:
    """Whether an activation that is part of nothing else is faster, or saves less, as a fused one.

    Args:
        name: of a line of ``FT_POINTWISE``, as torch's function or module computes it.
        memory: of `convert`; "recompute" needs the fused ones.
    """
    return memory == "recompute" or name not in (_IN_PLACE if in_place else _ALWAYS)


class Candidates:
    """Tests of one model's modules for worthwhile work; each module is looked at once."""

    def __init__(self) -> None:
        self._words: dict[nn.Module, set[str]] = {}

    def tracing(self, module: nn.Module) -> bool:
        if isinstance(module, BatchNormBase):
            return False
        forward = type(module).forward
        # Wrappers such as DistributedDataParallel call what they wrap and no part of it.
        foreign = (forward.__module__ or "").startswith("torch.")
        if foreign and forward is not nn.Sequential.forward:
            return False
        if any(isinstance(part, BatchNormBase) for part in module.modules()):
            return True
        if forward is nn.Sequential.forward:
            return False
        if self.mentions(module) or any(map(self._may_be_activation, module.modules())):
            return True
        return _refers(module) or may_have_branches(module)

    def mentions(self, module: nn.Module) -> bool:
        """Whether the forward of a module, which is the user's, may call an activation."""
        if module not in self._words:
            self._words[module] = set() if _is_others(module) else mentioned(module) & _WORDS
        return bool(self._words[module])

    def names(self, module: nn.Module) -> list[str]:
        """Names of the activations that a forward may call."""
        return sorted(self._words[module] & _NAMES) if self.mentions(module) else []

    def applied(self, module: nn.Module) -> str:
        """The name of the user's torch.autograd.Function that a forward applies, if its forward
        calls what activations are made of: `MemoryEfficientSwish`."""
        forward = type(module).forward
        if _is_others(module) or not inspect.isfunction(forward):
            return ""
        outside = inspect.getclosurevars(forward)
        for value in (*outside.globals.values(), *outside.nonlocals.values()):
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                code = getattr(value.forward, "__code__", None)
                if code is not None and _WORDS & set(code.co_names):
                    return value.__name__
        return ""

    def _may_be_activation(self, module: nn.Module) -> bool:
        return is_activation(module) or (is_bare(module) and self.mentions(module))


def is_bare(module: nn.Module) -> bool:
    """Whether a module has no parts and no tensors."""
    return not (module._modules or module._parameters or module._buffers)


def _is_others(module: nn.Module) -> bool:
    if is_scripted(module) or is_container(module):
        return True
    forward = getattr(type(module).forward, "__module__", None) or ""
    return forward.partition(".")[0] in ("torch", "fusedtrain")


def _refers(module: nn.Module) -> bool:
    """Whether an attribute holds a module without registering it: `self.parent = [parent]`."""
    held = (v if type(v) in (list, tuple) else (v,) for v in vars(module).values())
    return any(isinstance(item, nn.Module) for values in held for item in values)
