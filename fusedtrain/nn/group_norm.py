"""Group norm and activation as subclasses of torch's group norm: checkpoints load unchanged.

Numerics, layouts and saved tensors: :func:`fusedtrain.functional.group_norm_act`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.jit import is_scripting as _scripting  # type: ignore[attr-defined]

from .._graph.fx import module_call
from ..ops import group_norm as _group_norm
from ..reference.group_norm import Affine
from ..reference.pointwise import Pointwise
from .act_layer import create_activation
from .parts import activation_of, hands_on


class _GroupNormBase(nn.GroupNorm):
    """The forward of all classes: norm, modulation, drop, activation."""

    def _set(self, act: nn.Module, drop: nn.Module, bias: bool) -> None:
        if not bias:  # torch has this keyword from 2.13 on
            self.register_parameter("bias", None)
        self.drop, self.act = drop, act

    def forward(
        self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> Tensor:
        if _scripting():
            return self._scripted(input, scale, shift)
        if isinstance(input, fx.Proxy):
            called = module_call(input)
            if called is not None:
                return called
        return self._fused(input, scale, shift)

    def _scripted(self, input: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
        z = nn.functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        if scale is not None:
            z = z * (1 + scale.reshape(list(scale.shape) + [1] * (z.dim() - 2)))
        if shift is not None:
            z = z + shift.reshape(list(shift.shape) + [1] * (z.dim() - 2))
        return self.act(self.drop(z))

    @torch.jit.unused
    def _fused(self, input: Any, scale: Any, shift: Any) -> Tensor:
        if isinstance(input, fx.Proxy):
            norm = (self.num_groups, self.weight, self.bias, self.eps)
            traced: Any = _group_norm.group_norm_act
            return self.act(self.drop(traced(input, *norm, scale=scale, shift=shift)))
        activation = activation_of(self.act) if hands_on(self.drop) else None
        _group_norm.check_modulation(input, scale, shift)
        affine = Affine(self.weight, self.bias, scale, shift)
        fused = Pointwise() if activation is None else activation
        z = _group_norm.run(input, self.num_groups, affine, self.eps, fused)
        return z if activation is not None else self.act(self.drop(z))


class GroupNorm(_GroupNormBase):
    """:class:`torch.nn.GroupNorm` with an activation, and the modulation of AdaGN and DiT.

    ``forward(input, scale=None, shift=None)`` computes ``activation(norm(input) * (1 + scale) +
    shift)``, scale and shift being [N, C]. See :func:`fusedtrain.functional.group_norm_act` for
    dtypes, layouts and saved tensors.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as in
            :class:`torch.nn.GroupNorm`, where torch has `bias` only from 2.13 on.
        activation: class or name of an activation module; None is none. Activations of torch.nn and
            fusedtrain.nn without trained parameters are part of the op.
        act_kwargs: arguments of `activation`.

    Raises:
        ValueError: an unknown activation, a `scale` or `shift` that is not [N, C], and torch's
            errors for the same mistakes.
        TypeError: `activation` is a module and not its class, or makes none.
        RuntimeError: torch's errors for the same mistakes.

    Example:
        >>> norm = GroupNorm(2, 4, activation="silu")
        >>> norm.load_state_dict(torch.nn.GroupNorm(2, 4).state_dict())
        <All keys matched successfully>
        >>> norm(torch.randn(2, 4, 3, 3), scale=torch.zeros(2, 4)).shape
        torch.Size([2, 4, 3, 3])
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        activation: Any = None,
        act_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        self._set(create_activation(activation, act_kwargs, False), nn.Identity(), bias)


class GroupNormAct(_GroupNormBase):
    """:class:`GroupNorm` with timm's name and arguments: the number of channels comes first.

    Args:
        num_channels, eps, affine, device, dtype: as in :class:`torch.nn.GroupNorm`.
        num_groups: divides `num_channels`.
        group_size: channels of a group, in the place of `num_groups`.
        apply_act: False is no activation.
        act_layer: class or name of an activation module.
        act_kwargs: arguments of `act_layer`.
        inplace: argument of `act_layer`; without effect if the activation is part of the op.
        drop_layer: makes a module that is called between norm and activation.

    Raises:
        ValueError: `group_size` does not divide `num_channels`, and as :class:`GroupNorm`.
        TypeError, RuntimeError: as :class:`GroupNorm`.

    Example:
        >>> GroupNormAct(64, act_layer=torch.nn.SiLU)(torch.randn(2, 64, 3, 3)).shape
        torch.Size([2, 64, 3, 3])
    """

    def __init__(
        self,
        num_channels: int,
        num_groups: int = 32,
        eps: float = 1e-5,
        affine: bool = True,
        group_size: int | None = None,
        apply_act: bool = True,
        act_layer: Any = nn.ReLU,
        act_kwargs: Mapping[str, Any] | None = None,
        inplace: bool = True,
        drop_layer: Callable[[], nn.Module] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if group_size:
            if num_channels % group_size:
                raise ValueError(
                    f"group_size: {group_size} does not divide {num_channels} channels"
                )
            num_groups = num_channels // group_size
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        act = create_activation(act_layer if apply_act else None, act_kwargs, inplace)
        self._set(act, nn.Identity() if drop_layer is None else drop_layer(), True)


class GroupNorm1Act(GroupNormAct):
    """:class:`GroupNormAct` with one group, with timm's name and arguments.

    Example:
        >>> GroupNorm1Act(4)(torch.randn(2, 4, 3, 3)).shape
        torch.Size([2, 4, 3, 3])
    """

    def __init__(self, num_channels: int, *args: Any, **kwargs: Any) -> None:
        names = ("eps", "affine", "apply_act", "act_layer", "act_kwargs", "inplace", "drop_layer",
                 "device", "dtype")  # fmt: skip
        super().__init__(num_channels, 1, **dict(zip(names, args)), **kwargs)
