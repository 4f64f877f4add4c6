"""Master weights in the states: float32, or split into the 16-bit parameter and a correction.

Both kinds have one key: flattened state dicts of torch.distributed.checkpoint keep only the keys
that the state of the loading optimizer has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference.split_weights import CORRECTIONS, follow, join_weights, split_weights
from ._distributed import local

MASTER = "master_param"  # key of a parameter's state: float32 weights, or integers that correct it
CORRECTION = "master_correction"  # key of corrections in compressed state dicts


def correction_dtype(master_weights: bool | str) -> torch.dtype | None:
    """The dtype of the corrections that the option asks for, or None."""
    return CORRECTIONS[master_weights] if isinstance(master_weights, str) else None


def is_correction(master: Any) -> bool:
    """Whether a master is split, so that only its correction is in the state."""
    return isinstance(master, Tensor) and not master.is_floating_point()


@torch.no_grad()
def joined(p: Tensor, correction: Tensor) -> Tensor:
    """The float32 weights of a parameter and its correction; a DTensor if these are."""
    weights = torch.empty_like(p, dtype=torch.float32, memory_format=torch.preserve_format)
    local(weights).copy_(join_weights(local(p), local(correction)))
    return weights


@torch.no_grad()
def take_other_form(p_state: dict[str, Any], p: Tensor, dtype: torch.dtype | None) -> bool:
    """Turns the master of a state into corrections of `dtype`, or (None) into float32 weights.

    The parameter becomes the rounded weight: it changes only where the weight lies in the middle
    between two parameters. If others have written to the parameter, so that it is not the rounded
    weight, the master becomes the parameter.

    Returns:
        whether there was a master in another form.
    """
    weights = p_state.get(MASTER)
    if weights is None or dtype == (weights.dtype if is_correction(weights) else None):
        return False
    if is_correction(weights):
        weights = joined(p, weights)
    if dtype is None:
        p_state[MASTER] = weights
        return True
    inner = local(p)
    master = follow(inner, local(weights).to(p.device, torch.float32))
    param, values = split_weights(master, p.dtype, dtype)
    new = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
    local(new).copy_(values)
    inner.copy_(param)
    p_state[MASTER] = new
    return True


def version_of(p: Tensor, inner: Tensor) -> int:
    """A number that grows with every write to a parameter or to this rank's part of it: operators
    on a DTensor count as writes to the DTensor alone."""
    return inner._version if inner is p else p._version + inner._version


def _seen(p: Tensor, inner: Tensor) -> tuple[int, int]:
    """A parameter's version and place in memory, which writing to ``p.data`` may change."""
    return version_of(p, inner), inner.data_ptr()


class Versions:
    """The versions of 16-bit parameters that corrections, and masters in `param_groups`, belong to.

    If others write to a parameter, its version is a new one. A correction says nothing of the
    parameter that it was made for, so that all corrections of this parameter become 0: the master
    is then the parameter. Of a float32 master the elements that still round to the parameter stay.
    Versions are unknown until the first step after the optimizer was made, loaded or copied; the
    parameter and its master then belong together. Steps compare the float32 masters in states
    themselves; for these the masters' own versions count.
    """

    def __init__(self) -> None:
        self._of: dict[int, Any] = {}  # by the parameter's id
        self._masters: dict[int, tuple[int, int]] = {}  # id and version of a float32 master

    def note(self, p: Tensor, inner: Tensor) -> None:
        self._of[id(p)] = version_of(p, inner)

    def note_whole(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Records versions of parameters that have float32 masters, and of this rank's parts."""
        self._of.update({id(p): _seen(p, inner) for p, inner in pairs})

    def follow(self, p: Tensor, inner: Tensor, master: Tensor) -> None:
        """Copies to a float32 master what others have written to the parameter."""
        now = _seen(p, inner)
        if self._of.get(id(p), now) != now:
            self.compare(p, inner, master)

    @torch.no_grad()
    def compare(self, p: Tensor, inner: Tensor, master: Tensor) -> None:
        """As `follow`, whatever the version."""
        master.copy_(follow(inner, master))
        self.note_whole([(p, inner)])

    @torch.no_grad()
    def take_master(self, p: Tensor, inner: Tensor, master: Tensor) -> None:
        """Rounds a float32 master to its parameter, if others have written to the master."""
        which, version = self._masters.get(id(p), (0, 0))
        if which == id(master) and version != master._version:
            inner.copy_(master)

    def note_master(self, p: Tensor, master: Tensor) -> None:
        self._masters[id(p)] = (id(master), master._version)

    @torch.no_grad()
    def follow_whole(self, p: Tensor, inner: Tensor, master: Tensor) -> None:
        """Brings a parameter and its float32 master together, whichever others have written to."""
        self.take_master(p, inner, master)
        master.copy_(follow(inner, master))
        self.note_master(p, master)

    def forget(self, p: Tensor) -> bool:
        """Returns whether the version was known."""
        return self._of.pop(id(p), None) is not None

    def take_over(self, other: Versions, params: list[Tensor]) -> None:
        self._of.update({id(p): other._of[id(p)] for p in params if id(p) in other._of})

    def drop_stale(self, p: Tensor, inner: Tensor, correction: Tensor) -> bool:
        """Makes the correction 0 if others have written to the parameter; returns whether."""
        known = self._of.get(id(p))
        stale = known is not None and known != version_of(p, inner)
        if stale:
            correction.zero_()
            self.note(p, inner)
        return stale


def float32_state_dict(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """The model's state dict with the optimizer's master weights in the place of 16-bit parameters.

    Args:
        model: its keys are those of the result.
        optimizer: a fusedtrain optimizer of the model's parameters.

    Returns:
        Every float16 or bfloat16 tensor is float32: a parameter is its master weight, if the
        optimizer has one (within `swap_averages` its average); other tensors are converted. All
        else is as in ``model.state_dict()``.

    Raises:
        TypeError: the optimizer is not one of fusedtrain.

    Example:
        >>> import fusedtrain
        >>> model = torch.nn.Linear(2, 1).bfloat16()
        >>> optimizer = fusedtrain.optim.AdamW(model.parameters(), master_weights="split32")
        >>> model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> weights = fusedtrain.optim.float32_state_dict(model, optimizer)
        >>> weights["weight"].dtype, model.weight.dtype
        (torch.float32, torch.bfloat16)
    """
    if not hasattr(optimizer, "_float32_masters"):
        raise TypeError(
            "float32_state_dict: expected an optimizer of fusedtrain, got "
            f"{type(optimizer).__name__}"
        )
    masters: dict[int, Tensor] = optimizer._float32_masters()
    result: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            master = masters.get(id(value))
            value = value.detach() if master is None else master
            if value.dtype in (torch.float16, torch.bfloat16):
                value = value.float()
        result[name] = value
    return result
