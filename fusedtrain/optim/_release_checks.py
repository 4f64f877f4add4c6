"""The hooks of gradient release, and what gradients that are freed exclude."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import disable_dynamo, pytree

_SCALED = (
    "release_gradients: a GradScaler finds out whether gradients are finite after backward, which "
    "has updated the parameters by then. Train in bfloat16 without a scaler, or remove() the handle"
)
# The handles with hooks: scalers look at graphs only where there are some.
RELEASES: weakref.WeakSet[Any] = weakref.WeakSet()


class Hook:
    """The hook of a parameter. torch keeps it alive, and with it all that it refers to: weakly."""

    def __init__(self, release: Any, number: int) -> None:
        self.release = weakref.ref(release)
        self.number = number

    @disable_dynamo  # under torch.compile, and by compiled autograd
    def __call__(self, p: Tensor) -> None:
        release = self.release()
        if release is not None:  # the optimizer lives
            release.update(self.number, p)


def check_options(options: Any) -> None:
    """Raises ValueError for options of an optimizer that need all gradients."""
    if options["max_grad_norm"] is not None:
        raise ValueError(
            "release_gradients: max_grad_norm clips the norm of all gradients together, which is "
            "known only after backward. Set max_grad_norm=None, and agc for clipping by unit"
        )
    if options["gradient_writeback"] != "none":
        raise ValueError(
            "release_gradients: gradients are freed, so there is none to write to. Set "
            f"gradient_writeback='none', got {options['gradient_writeback']!r}"
        )


def check_unscaled(optimizer: Any) -> None:
    """Raises RuntimeError if a GradScaler is at work."""
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        raise RuntimeError(_SCALED)


def check_loss(outputs: Any) -> None:
    """Raises RuntimeError before a loss is scaled whose gradients are released."""
    if not RELEASES:
        return
    nodes = [t.grad_fn for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]
    reached: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in reached:
            continue
        reached.add(node)
        nodes += [before for before, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is not None and is_released(leaf):
            raise RuntimeError(_SCALED)


def check_reducers(model: nn.Module | None, params: Iterable[Tensor]) -> None:
    """Raises RuntimeError if DistributedDataParallel reads these gradients after they are freed."""
    ranks = torch.distributed
    if not ranks.is_available():
        return
    wrapper = nn.parallel.DistributedDataParallel
    modules = [] if model is None else list(model.modules())
    if ranks.is_initialized():  # a wrapper around the model does not show in the model
        modules += [o for o in gc.get_objects() if issubclass(type(o), wrapper)]
    ids = set(map(id, params))
    for module in modules:
        if isinstance(module, wrapper) and any(id(p) in ids for p in module.parameters()):
            raise RuntimeError(
                "release_gradients: DistributedDataParallel sums gradients over the ranks after "
                "they are complete, and would find none. Shard with "
                "torch.distributed.fsdp.fully_shard (FSDP2), or take ordinary steps"
            )


def is_released(p: Tensor) -> bool:
    """Whether a living optimizer releases the parameter's gradient."""
    hooks = p._post_accumulate_grad_hooks or {}
    return any(isinstance(hook, Hook) and hook.release() is not None for hook in hooks.values())
