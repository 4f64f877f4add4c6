"""Apex's optimizers that need norms of each tensor: FusedLAMB, FusedNovoGrad."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ..optim import LAMB, FusedOptimizer, FusedOptions, NovoGrad
from ..optim._checks import two
from ..optim._options import OtherOptions
from ._apex_optimizer import ApexOptimizer

_HALF = (torch.float16, torch.bfloat16)


class FusedLAMB(ApexOptimizer, LAMB):
    """Apex's ``FusedLAMB`` (arXiv 1904.00962): Adam's update, scaled by |p| / |update|.

    Args:
        params, lr, bias_correction, betas, eps, amsgrad, set_grad_none, options: as in `FusedAdam`.
        weight_decay: L2 penalty of the update. Groups without it are not scaled, unless
            `use_nvlamb`.
        adam_w_mode: False puts the penalty into the clipped gradient, before the averages.
        grad_averaging: multiplies the gradient by 1 - beta1 in its average.
        max_grad_norm: norm that all gradients together are clipped to, or None.
        use_nvlamb: scales groups without weight decay too.

    Raises:
        ValueError: for values out of range. RuntimeError: for `amsgrad`.

    Example:
        >>> import torch
        >>> from fusedtrain.apex.optimizers import FusedLAMB
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedLAMB([weight], lr=0.25, weight_decay=0.0)
        >>> weight.grad = torch.tensor([3.0, -5.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.7500, 1.2500], requires_grad=True)
    """

    adam_w_mode: int
    use_nvlamb: bool
    _attributes = ("set_grad_none", "adam_w_mode", "use_nvlamb")
    _counts = True
    _absent: ClassVar = {}
    _keys = (
        "lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging", "max_grad_norm",
    )  # fmt: skip

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        **options: Unpack[OtherOptions],
    ) -> None:
        self._start(locals())

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        corrects, averages = group["bias_correction"], group["grad_averaging"]
        coupled = 0 if self.adam_w_mode else 2
        return (
            *two(group["betas"]), group["eps"], corrects, averages, 0, self.use_nvlamb, coupled,
        )  # fmt: skip


class FusedNovoGrad(ApexOptimizer, NovoGrad):
    """Apex's ``FusedNovoGrad`` (arXiv 1905.11286): gradients divided by a norm of each tensor.

    The averaged squared norm is a parameter's state ``"exp_avg_sq"``. Apex's checkpoints, with
    norms by group, load.

    Args:
        params, lr, weight_decay, amsgrad, set_grad_none, options: as in `FusedAdam`; the decay is
            an L2 penalty.
        bias_correction: divides the average by 1 - beta1^t, and the norm by sqrt(1 - beta2^t).
        betas: decays of the averages of the gradient and of its squared norm.
        eps: added to the norm.
        reg_inside_moment: averages gradients after they are divided by the norm and penalised.
            Otherwise plain gradients are averaged, and the average is divided and penalised.
        grad_averaging: multiplies the averaged term by 1 - beta1.
        norm_type: 2. Apex's other norm, 0 for the largest magnitude, is not supported: the sweep
            over gradients does not measure it.
        init_zero: norms start at 0, instead of at the first gradient's.

    Raises:
        ValueError: for values out of range. RuntimeError: for `amsgrad` and other norms.

    Example:
        >>> import torch
        >>> from fusedtrain.apex.optimizers import FusedNovoGrad
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedNovoGrad([weight], lr=0.25, bias_correction=False, betas=(0.0, 0.9))
        >>> weight.grad = torch.tensor([3.0, -4.0])
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.8500, 1.2000], requires_grad=True)
    """

    moment_mode: int
    _scalar_names = ("step", "exp_avg_sq", None)
    _attributes = ("set_grad_none", "moment_mode")
    _counts = True
    _absent: ClassVar = {}
    _keys = (
        "lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging", "norm_type",
        "init_zero",
    )  # fmt: skip

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        **options: Unpack[FusedOptions],
    ) -> None:
        self._start({**locals(), "moment_mode": not reg_inside_moment})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_norm_type(param_group.get("norm_type", self.defaults["norm_type"]))
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            _check_norm_type(group.get("norm_type", 2))
        FusedOptimizer.load_state_dict(self, _without_old_norms(state_dict))

    def _as_torch_has_it(self, state_dict: dict[str, Any], compressed: bool) -> dict[str, Any]:
        state_dict = super()._as_torch_has_it(state_dict, compressed)
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            norms: tuple[list[Tensor], list[Tensor]] = ([], [])
            for number, p in zip(saved["params"], group["params"], strict=True):
                square = state_dict["state"].get(number, {}).get("exp_avg_sq")
                if square is not None:
                    norms[p.dtype not in _HALF].append(square.float().sqrt())
            if any(norms):
                device = group["params"][0].device
                saved["exp_avg_sq"] = [
                    torch.stack([norm.to(device) for norm in some])
                    if some
                    else torch.empty(0, device=device)
                    for some in norms
                ]
        return state_dict

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            norms = group.pop("exp_avg_sq", None)
            if norms is not None:
                stepped = [p for p in group["params"] if state["state"].get(p)]
                for p, norm in zip(stepped, _in_order(norms, stepped), strict=True):
                    state["state"][p].setdefault("exp_avg_sq", norm.square())
        super().__setstate__(state)

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        _check_norm_type(group["norm_type"])
        corrects, averages = group["bias_correction"], group["grad_averaging"]
        start = 2 if group["init_zero"] else 1
        return (
            *two(group["betas"]), group["eps"], averages, 0, corrects, self.moment_mode, start,
        )  # fmt: skip


def _without_old_norms(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Drops our exact norms by parameter if Apex has stepped since: only the group's are right."""
    state = dict(state_dict["state"])
    for group in state_dict["param_groups"]:
        known = [float(norm) for some in group.get("exp_avg_sq", ()) for norm in some.flatten()]
        ours = [n for n in group["params"] if "exp_avg_sq" in state.get(n, {})]
        roots = [float(state[n]["exp_avg_sq"].float().sqrt()) for n in ours]
        if known and sorted(roots) != sorted(known):
            for n in ours:
                state[n] = {k: v for k, v in state[n].items() if k != "exp_avg_sq"}
    return {**state_dict, "state": state}


def _check_norm_type(norm_type: int) -> None:
    if norm_type != 2:
        raise RuntimeError(f"FusedNovoGrad supports norm_type=2, the 2-norm, only; got {norm_type}")


def _in_order(norms: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """Apex's norms of a group (first of float16, then of float32 parameters) by parameter."""
    half, single = (list(some.flatten().unbind()) for some in norms)
    # If a list is empty, the order does not depend on the present dtypes.
    ours = [bool(single) and (not half or p.dtype not in _HALF) for p in params]
    if len(single) != sum(ours) or len(half) != len(ours) - sum(ours):
        raise ValueError(
            f"exp_avg_sq has norms of {len(half)} float16 and {len(single)} float32 parameters; "
            f"of this group {len(ours) - sum(ours)} and {sum(ours)} have states"
        )
    return [(single if is_single else half).pop(0) for is_single in ours]
