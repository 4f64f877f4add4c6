"""An optimizer around another: float32 masters, a loss scale, steps skipped after overflows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._apex_optimizer import attribute_of
from ..amp._gradients import ScaledGradients
from ..amp._loss_scaler import LossScaler, Notices
from ..amp._masters import HALF_DTYPES
from .master_params import clip_grad_norm


class FP16_Optimizer:
    """Steps float32 masters of a half-precision model, as Apex's ``FP16_Optimizer`` did.

    Float32 masters replace the 16-bit parameters in `init_optimizer`. `backward` unscales gradients
    and adds them to the masters'. A step of a fusedtrain optimizer waits for nothing.

    Args:
        init_optimizer: an optimizer of torch.optim, fusedtrain.optim or the like.
        static_loss_scale: the loss scale, unless it is dynamic.
        dynamic_loss_scale: halves the scale after an overflow, and doubles it after a number of
            backward passes without one.
        dynamic_loss_args: ``init_scale`` (65536), ``scale_factor`` (2), ``scale_window`` (2000),
            ``min_loss_scale``, ``max_loss_scale`` (2**24).
        verbose: prints when a step is skipped.

    Raises:
        TypeError: for parameters that are neither 16-bit nor float32.

    Example:
        >>> import torch, fusedtrain
        >>> from fusedtrain.apex.fp16_utils import FP16_Optimizer, network_to_half
        >>> model = network_to_half(torch.nn.Linear(2, 1))
        >>> optimizer = fusedtrain.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0)
        >>> optimizer.zero_grad()
        >>> optimizer.backward(model(torch.ones(4, 2)).float().square().mean())
        >>> norm = optimizer.clip_master_grads(max_norm=1.0)
        >>> optimizer.step()
        >>> optimizer.overflow
        False
    """

    _scales_losses: ClassVar[bool] = True  # amp.initialize would scale again, so it refuses

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        for p in (p for group in init_optimizer.param_groups for p in group["params"]):
            if p.dtype not in (*HALF_DTYPES, torch.float32):
                raise TypeError(
                    "Wrapped parameters must be torch.float16, torch.bfloat16 or torch.float32. "
                    f"Received {p.dtype}"
                )
        scale: float | str = "dynamic" if dynamic_loss_scale else static_loss_scale
        self.loss_scaler = LossScaler(scale, **(dynamic_loss_args or {}))
        self.dynamic_loss_scale = dynamic_loss_scale
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.first_closure_call_this_step = True
        self._gradients = ScaledGradients(init_optimizer, with_masters=True, accumulates=True)
        self._overflow: Tensor | bool = False
        self._notices = Notices()

    # --- gradients

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Runs the backward pass of the loss in float32, scaled. Gradients add up until zero_grad.

        Args:
            loss: of one element, floating-point.
            update_master_grads: False if more passes follow before `update_master_grads` is
                called; their scaled gradients add up.
            retain_graph: as in ``Tensor.backward``.
        """
        scale = self.loss_scaler.scale_on(loss.device)
        self._gradients.prepare(scale)
        try:
            (loss.float() * scale).backward(retain_graph=retain_graph)
        except BaseException:
            self._gradients.abort()
            raise
        self._gradients.delay(scale)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Ends passes with update_master_grads=False: checks, updates the scale, unscales."""
        scale = self._gradients.scaled_by
        if scale is None:
            return
        overflow = self._gradients.finish(scale)
        if not self.loss_scaler.dynamic:
            self.loss_scaler.update_after(overflow)
            self._overflow = False
            return
        # Until zero_grad infs and NaNs stay in the masters' gradients: each later pass overflows.
        overflow = self._gradients.add_overflow(overflow)
        self.loss_scaler.update_after(overflow)
        self._overflow = overflow
        if self.verbose:
            self._notices.add(overflow, self.loss_scaler.scale_on(scale.device), 0)

    @property
    def overflow(self) -> bool:
        """Whether the last backward pass overflowed; waits for the device."""
        if isinstance(self._overflow, Tensor):
            self._overflow = bool(self._overflow.item())
        return self._overflow

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | float:
        """Clips the norm of all unscaled gradients together.

        Args:
            max_norm: largest norm after clipping.
            norm_type: of the p-norm; also "inf".

        Returns:
            The norm before clipping, or -1 after an overflow.
        """
        if self.overflow:
            return -1
        params = [p for group in self.param_groups for p in group["params"]]
        return clip_grad_norm(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The unscaled gradients of each group's parameters, or None after an overflow."""
        if self.overflow:
            return None
        return [
            [None if p.grad is None else p.grad.data for p in group["params"]]
            for group in self.param_groups
        ]

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Drops the gradients of masters and of the model.

        Args:
            set_grads_to_None: False zeroes float32 parameters' gradients in place.
        """
        with self._gradients.zeroing():
            self.optimizer.zero_grad(set_to_none=set_grads_to_None)

    # --- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the masters and rounds them into the model, or does nothing after an overflow.

        Args:
            closure: zeroes the gradients, computes the loss, passes it to `backward` and returns
                it. The closure is called again, with a smaller scale, while gradients overflow.

        Raises:
            RuntimeError: if the closure's gradients overflow at every scale.
        """
        self._notices.tell()
        if closure is None:
            return self._gradients.step(self.optimizer.step, None)
        result = self.optimizer.step(lambda: self._close(closure))
        self._gradients.masters.write_parameters()
        self.first_closure_call_this_step = True
        return result

    def _close(self, closure: Callable[[], Any]) -> Any:
        masters = self._gradients.masters
        if self.first_closure_call_this_step:
            masters.follow_parameters()
        else:
            masters.write_parameters()
        self.first_closure_call_this_step = False
        loss = closure()
        while self.overflow:
            before = self.loss_scale
            loss = closure()
            if self.overflow and self.loss_scale >= before:
                raise RuntimeError(f"gradients are not finite at a loss scale of {before} either")
        self._gradients.found_inf = None
        return loss

    # --- attributes that scripts read

    @property
    def loss_scale(self) -> float:
        """The loss scale; waits for the device."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    state: Any = attribute_of("optimizer", "state", "The inner optimizer's state, of masters.")
    param_groups: Any = attribute_of(
        "optimizer", "param_groups", "The inner optimizer's groups, with masters."
    )

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """`all_fp16_params` by group."""
        low = self._gradients.masters.param_of
        return [[low[id(master)] for master in group] for group in self.fp32_from_fp16_groups]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """`all_fp32_from_fp16_params` by group."""
        return self._by_group(self.all_fp32_from_fp16_params)

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """`all_fp32_from_fp32_params` by group."""
        return self._by_group(self.all_fp32_from_fp32_params)

    def _by_group(self, params: list[Tensor]) -> list[list[Tensor]]:
        wanted = set(map(id, params))
        return [[p for p in group["params"] if id(p) in wanted] for group in self.param_groups]

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The 16-bit parameters of the model."""
        return self._gradients.masters.params

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters of `all_fp16_params`, in the same order."""
        return self._gradients.masters.masters

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters that were float32."""
        return [p for p in self._gradients.plain_params if p.requires_grad]

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Masters, loss scale and the state of the optimizer, under Apex's keys."""
        self._gradients.follow_parameters()
        groups = [[p.detach() for p in group] for group in self.fp32_from_fp16_groups]
        scaler = self.loss_scaler
        return {
            "loss_scaler": {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped},
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`, or of Apex's, and rounds the masters into the model.

        Args:
            state_dict: of an optimizer with the same parameters.

        Raises:
            ValueError: for other numbers or shapes of masters. Nothing is modified.
        """
        saved = [p for group in state_dict["fp32_from_fp16"] for p in group]
        masters = self.all_fp32_from_fp16_params
        if [p.shape for p in saved] != [p.shape for p in masters]:
            raise ValueError(
                "fp32_from_fp16: the loaded masters differ in number or shape from the optimizer's"
            )
        scaler = state_dict["loss_scaler"]
        if not isinstance(scaler, dict):  # the object that Apex pickled
            scaler = {"loss_scale": scaler._loss_scale, "unskipped": scaler._unskipped}
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.loss_scaler.restart(float(scaler["loss_scale"]), int(scaler["unskipped"]))
        self.loss_scaler.dynamic = self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self._overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        with torch.no_grad():
            for master, value in zip(masters, saved, strict=True):
                master.copy_(value)
        self._gradients.masters.write_parameters()

    def __getstate__(self) -> None:
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("FP16_Optimizer should be deserialized using load_state_dict().")
