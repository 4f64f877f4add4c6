"""What a module is to those who rewrite models: its hooks, its package, stochastic depth."""

from __future__ import annotations

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Modules that multiply each sample by 0 or 1 / keep_prob -> the attribute with the probability. By
# package and name, since none of them is imported here; others of these names may do otherwise.
STOCHASTIC_DEPTH = {
    ("fusedtrain", "DropPath"): "drop_prob",
    ("timm", "DropPath"): "drop_prob",
    ("torchvision", "StochasticDepth"): "p",
}


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks run with its calls. A scripted module has no such tables."""
    return any(getattr(module, hooks, None) for hooks in HOOKS)


def package_and_name(module: nn.Module) -> tuple[str, str]:
    """The top-level package of its class, and the name of the class."""
    cls = type(module)
    return cls.__module__.partition(".")[0], cls.__name__
