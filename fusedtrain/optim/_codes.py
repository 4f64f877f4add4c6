"""States of an optimizer in 8-bit codes: codes under the name of the state, and their scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..reference.optimizer_rules import RULES, Rule
from ..reference.state_codes import (
    GROUP,
    SIGNED,
    SQUARES,
    dequantise,
    group_count,
    in_memory_order,
    is_codes,
    quantise,
)
from ._distributed import is_distributed, local

Q8 = "q8"  # the value of the option `state_dtype`
_SCALE = "_scale"
# States of smaller parameters stay float32: biases and weights of norms are 0.2 % of ResNet-50.
LEAST_ELEMENTS = 4096
_PIECE = 1 << 20  # elements that are converted at once: plain torch takes 50 bytes for each

_BY_NAME = {rule.name: rule for rule in RULES}


def scale_name(name: str) -> str:
    """The key of the scales of a state."""
    return name + _SCALE


def is_scale_name(name: str, p_state: dict[str, Any]) -> bool:
    """Whether a key of a parameter's state names the scales of another state."""
    return name.endswith(_SCALE) and name.removesuffix(_SCALE) in p_state


def code_dtype(
    rule_name: str, slots: tuple[str | None, ...], which: int, p: Tensor
) -> torch.dtype | None:
    """The dtype of the codes of a parameter's state; None: the state is float32.

    A third state of Adam and RMSprop is compared with, or subtracted from, the average of squares
    (amsgrad, centered). Rounding of 8 bits would decide the result: both stay float32.
    """
    if p.dtype is torch.float64 or p.numel() < LEAST_ELEMENTS:
        return None
    dtype = any_code_dtype(rule_name, which)
    compared = len(slots) > 2 and slots[2] is not None
    return None if compared and (dtype == SQUARES or which == 2) else dtype


def any_code_dtype(rule_name: str, which: int) -> torch.dtype:
    """The dtype of the codes of a rule's state, whatever the parameter and other states are."""
    rule: Rule = _BY_NAME[rule_name]
    return SQUARES if which in rule.squares else SIGNED


def _pieces(count: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the elements, and of the scales of their groups."""
    for start in range(0, count, _PIECE):
        end = start + _PIECE
        yield slice(start, end), slice(start // GROUP, end // GROUP)


@torch.no_grad()
def floats(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of codes; a DTensor if the codes are."""
    values = torch.empty_like(codes, dtype=torch.float32, memory_format=torch.preserve_format)
    mine = in_memory_order(local(codes))
    flat, of_groups = in_memory_order(local(values)), local(scales).to(mine.device).reshape(-1)
    for piece, groups in _pieces(len(mine)):
        flat[piece] = dequantise(mine[piece], of_groups[groups])
    return values


def _quantised(values: Tensor, model: Tensor) -> tuple[Tensor, Tensor]:
    """Codes like `model` and scales of float32 values in its layout."""
    codes = torch.empty_like(model, memory_format=torch.preserve_format)
    scales = values.new_empty(group_count(values.numel()))
    flat, of_codes = in_memory_order(values), in_memory_order(codes)
    for piece, groups in _pieces(len(flat)):
        of_codes[piece], scales[groups] = quantise(flat[piece], model.dtype)
    return codes, scales


@torch.no_grad()
def coded_state(
    p_state: dict[str, Any], name: str, p: Tensor, dtype: torch.dtype, initial: float
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a state: those of the parameter's state, or new ones of its values.

    Args:
        p_state: the parameter's state, which is not changed.
        dtype: of the codes.
        initial: the value of a state that is not there yet.
    """
    inner = local(p)
    model = torch.empty_like(inner, dtype=dtype, memory_format=torch.preserve_format)
    state, scales = p_state.get(name), p_state.get(scale_name(name))
    if state is not None and is_codes(state):
        mine = local(state)
        fits = state.dtype == dtype and mine.stride() == model.stride()
        if fits and mine.device == p.device and scales is not None:
            flat = local(scales).to(p.device, torch.float32)
            if flat.dim() != 1:  # else the same object, which other plans have, too
                flat = flat.reshape(-1)
            if len(flat) == group_count(mine.numel()):
                return state, flat
        state = floats(state, scales)  # type: ignore[arg-type]
    if state is None:
        codes, flat = _constant(model, initial)
    else:
        values = torch.empty_like(model, dtype=torch.float32)
        codes, flat = _quantised(values.copy_(local(state)), model)
    if not is_distributed(p):
        return codes, flat
    whole = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format)
    local(whole).copy_(codes)
    return whole, flat


def _constant(model: Tensor, value: float) -> tuple[Tensor, Tensor]:
    """Codes and scales of equal numbers, made without the 50 bytes an element of `quantise`."""
    one = torch.full((1,), value, dtype=torch.float32, device=model.device)
    code, scale = quantise(one, model.dtype)
    codes = torch.empty_like(model).copy_(code.reshape(()))
    return codes, scale.repeat(group_count(model.numel()))


def for_checkpoint(p_state: dict[str, Any], compressed: bool) -> dict[str, Any]:
    """A parameter's state as a state dict has it: codes and scales, or float32 values.

    Scales are [rows, groups of a row] where a row is a whole number of groups, so that a checkpoint
    can be loaded by other numbers of ranks. Where it is not, of DTensors the values are saved.
    Scales of whole tensors that lie in memory in another order have three dimensions, the last of
    size 1: formats that forget strides cannot mix them up with those of contiguous tensors.
    """
    saved = {name: value for name, value in p_state.items() if not is_scale_name(name, p_state)}
    for name, value in list(saved.items()):
        if not (isinstance(value, Tensor) and is_codes(value) and scale_name(name) in p_state):
            continue
        scales = local(p_state[scale_name(name)]).reshape(-1)
        by_rows = _by_rows(value, scales) if compressed else None
        if by_rows is None:
            saved[name] = floats(value, scales)
        else:
            if not (is_distributed(value) or value.is_contiguous()):
                by_rows = by_rows.reshape(len(by_rows), -1, 1)
            saved[scale_name(name)] = by_rows
    return saved


def _by_rows(codes: Any, scales: Tensor) -> Any:
    """The scales by rows; flat, or of DTensors None, where groups are no parts of rows."""
    sharded, mine = is_distributed(codes), local(codes)
    flat = None if sharded else scales
    if codes.dim() < 2 or codes.numel() == 0:
        return flat
    rows, of_row = codes.shape[0], codes.numel() // codes.shape[0]
    if of_row % GROUP or (mine.shape[0] > 1 and mine.stride(0) != of_row):
        return flat
    shape = torch.Size([rows, of_row // GROUP])
    scales = scales.view(mine.shape[0], shape[1])
    if not sharded:
        return scales
    if not all(p.is_replicate() or p.is_shard(0) for p in codes.placements):
        return None
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        scales, codes.device_mesh, codes.placements,
        run_check=False, shape=shape, stride=(shape[1], 1),
    )  # fmt: skip


def check_codes(name: str, p_state: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Raises ValueError for a loaded state of integers that are no codes, or lack their scales.

    Args:
        name: of the state.
        p_state: the loaded states of the parameter.
        dtype: of the state's codes; None: the state is never in codes.
    """
    codes = p_state[name]
    if not isinstance(codes, Tensor) or codes.is_floating_point():
        return
    if codes.dtype != dtype:
        or_codes = "" if dtype is None else f" or codes of {dtype}"
        raise ValueError(
            f"state_dict: {name!r} must be floating point{or_codes}, got {codes.dtype}"
        )
    scales, wanted = p_state.get(scale_name(name)), group_count(local(codes).numel())
    got: Any = "none"
    if isinstance(scales, Tensor):
        of_floats = scales.is_floating_point()
        got = local(scales).numel() if of_floats else f"a tensor of {scales.dtype}"
    if scales is None or got != wanted:
        raise ValueError(
            f"state_dict: {name!r} is of 8-bit codes and needs {wanted} scales in "
            f"{scale_name(name)!r}, got {got}"
        )
    if scales.dim() == 3 and codes.is_contiguous():
        raise ValueError(
            f"state_dict: {name!r} is contiguous, and was not when its scales were made. Save and "
            "load 8-bit codes with their strides, or state_dict() without compressed"
        )
