"""Loss scales on the host: a fixed scale, and a scale that follows the gradients' overflows."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ._gradients import all_finite, refuse_sparse


class _Scaler:
    cur_scale: float

    @property
    def loss_scale(self) -> float:
        """The factor of the loss."""
        return self.cur_scale

    def scale_gradient(
        self,
        module: nn.Module | None,
        grad_in: tuple[Tensor | None, ...],
        grad_out: tuple[Tensor | None, ...],
    ) -> tuple[Tensor | None, ...]:
        """A backward hook that multiplies the gradients of a module's inputs by the scale.

        Args:
            module, grad_out: not used.
            grad_in: tensors, or None for inputs that need no gradient.
        """
        scale = float(self.loss_scale)
        return tuple(None if g is None else scale * g for g in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs the backward pass of the loss times the scale.

        Args:
            loss: of one element. A scale above 65504 makes a float16 loss infinite: compute the
                loss in float32.
            retain_graph: as in `torch.Tensor.backward`.
        """
        (loss * float(self.loss_scale)).backward(retain_graph=retain_graph)


class LossScaler(_Scaler):
    """A fixed loss scale.

    Args:
        scale: factor of the loss, also ``cur_scale`` and ``loss_scale``.

    Raises:
        ValueError: for a scale that is not above 0.

    Example:
        >>> import torch
        >>> weight = torch.ones(1, requires_grad=True)
        >>> LossScaler(128).backward((3 * weight).sum())
        >>> weight.grad
        tensor([384.])
    """

    def __init__(self, scale: float = 1) -> None:
        _check_scale("scale", scale)
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """False: a fixed scale heeds no overflow."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing."""


class DynamicLossScaler(_Scaler):
    """A loss scale that falls when gradients overflow and grows after a while without overflow.

    An overflow divides the scale by `scale_factor`, but not below 1. After `scale_window` updates
    in a row without overflow, the scale is multiplied by `scale_factor`. The caller skips the step
    that overflowed. In `fusedtrain.amp.GradScaler` the host does not wait.

    Args:
        init_scale: first scale.
        scale_factor: see above.
        scale_window: see above.

    Attributes:
        cur_scale: the scale, also `loss_scale`.
        cur_iter: number of updates so far.
        last_overflow_iter: number of the update with the last overflow, from 0; -1 before any.

    Raises:
        ValueError: for an `init_scale` or `scale_factor` that is not above 0, or a `scale_window`
            below 1.

    Example:
        >>> scaler = DynamicLossScaler(init_scale=8.0, scale_window=2)
        >>> for overflow in (True, False, False):
        ...     scaler.update_scale(overflow)
        ...     print(scaler.loss_scale)
        4.0
        4.0
        8.0
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        _check_scale("init_scale", init_scale)
        _check_scale("scale_factor", scale_factor)
        if scale_window < 1:
            raise ValueError(f"scale_window must be at least 1, got {scale_window}")
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether the gradient of any parameter holds an inf or a NaN.

        Finite values are no overflow, whatever they sum to (Apex took their sum). The host waits
        once for each device.

        Args:
            params: tensors of any floating dtype, with gradients or without.

        Raises:
            RuntimeError: for sparse gradients.
        """
        params = [params] if isinstance(params, Tensor) else list(params)
        refuse_sparse(params, "params")
        return not all_finite(p.grad for p in params if p.grad is not None)

    def update_scale(self, overflow: bool) -> None:
        """Sets the scale for the next step.

        Args:
            overflow: whether the gradients of this step overflowed.
        """
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


def _check_scale(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")
