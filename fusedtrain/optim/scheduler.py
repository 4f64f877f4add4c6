"""Learning rates that count only applied steps, not skipped ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ._engine import FusedOptimizer


class _Shadow(torch.optim.Optimizer):
    """Groups and rates for a scheduler; nothing to train."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing; schedulers warn if it is not called."""


class AppliedStepScheduler:
    """Drives an optimizer's learning rates by a torch scheduler that ignores skipped steps.

    Under loss scaling some steps are skipped. torch's schedulers count calls, and so run ahead; the
    host would have to wait for the device to learn which steps were skipped. This scheduler runs on
    the host and writes each call's rates to a table, and the device picks the entry of its count of
    applied steps. Nothing waits, and CUDA graphs can be replayed.

    Every group's ``lr`` becomes a float32 tensor on the device of its first parameter.

    Args:
        optimizer: an optimizer of `fusedtrain.optim`.
        make: makes the scheduler for its argument, an optimizer with the same groups and rates but
            without parameters to train. Only ``lr`` may be scheduled.

    Raises:
        TypeError: `optimizer` is not one of fusedtrain.
        RuntimeError: the scheduler changes an option other than ``lr``.

    Example:
        >>> import torch, fusedtrain
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = fusedtrain.optim.SGD([weight], lr=1.0)
        >>> scheduler = fusedtrain.optim.AppliedStepScheduler(
        ...     optimizer, lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5)
        ... )
        >>> weight.grad = torch.zeros(2)
        >>> optimizer.step()
        >>> scheduler.step()
        >>> optimizer.param_groups[0]["lr"]
        tensor(0.5000)
    """

    def __init__(
        self,
        optimizer: FusedOptimizer,
        make: Callable[[torch.optim.Optimizer], LRScheduler],
    ) -> None:
        if not isinstance(optimizer, FusedOptimizer):
            raise TypeError(
                f"optimizer must be of fusedtrain.optim, got {type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        groups = [
            {**group, "params": [torch.zeros(1)], "lr": float(group["lr"])}
            for group in optimizer.param_groups
        ]
        self._shadow = _Shadow(groups, dict(optimizer.defaults))
        self._others = self._other_options()
        self.scheduler = make(self._shadow)
        if not isinstance(self.scheduler, LRScheduler):
            raise TypeError(f"make must return a scheduler, got {type(self.scheduler).__name__}")
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError("ReduceLROnPlateau asks for a metric at each step: not supported")
        self._check()
        self._applied_before = int(optimizer.applied_steps)
        self._rates = [self._current()]
        self._tables: list[Tensor] = []
        for group, rate in zip(optimizer.param_groups, self._rates[0], strict=True):
            lr = torch.tensor(rate, dtype=torch.float32, device=self._device_of(group))
            group["lr"] = lr
            self._tables.append(lr.clone().reshape(1))

    def step(self) -> None:
        """Advances the rates; call once after each step of the optimizer, applied or skipped."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._tables):
            raise RuntimeError("AppliedStepScheduler: the optimizer has other groups than at first")
        if not all(isinstance(group["lr"], Tensor) for group in groups):
            raise RuntimeError("AppliedStepScheduler: a group's lr has been replaced by a number")
        self._shadow.step()
        self.scheduler.step()
        self._check()
        self._rates.append(self._current())
        for number, group in enumerate(self.optimizer.param_groups):
            lr, table = group["lr"], self._tables[number]
            if len(self._rates) > table.numel():
                table = self._grown(table, number)
            rate = torch.tensor([self._rates[-1][number]], dtype=torch.float32)
            table[len(self._rates) - 1].copy_(rate[0].to(lr.device, non_blocking=True))
            applied = self.optimizer.applied_steps.to(lr.device) - self._applied_before
            lr.copy_(table[applied.clamp(0, len(self._rates) - 1).reshape(1)].reshape(()))

    def _grown(self, table: Tensor, number: int) -> Tensor:
        larger = table.new_empty(max(64, 2 * table.numel()))
        larger[: table.numel()].copy_(table)
        self._tables[number] = larger
        return larger

    def get_last_lr(self) -> list[Tensor]:
        """The rates of the next step: the groups' tensors."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """State of the scheduler and of its table."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "rates": self._rates,
            "applied_before": int(self.optimizer.applied_steps) - self._applied_before,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from the saved scheduler's place."""
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self._rates = [list(rates) for rates in state_dict["rates"]]
        for group, rate in zip(self._shadow.param_groups, self._rates[-1], strict=True):
            group["lr"] = rate  # most schedulers go on from it
        self._applied_before = int(self.optimizer.applied_steps) - state_dict["applied_before"]
        for number, group in enumerate(self.optimizer.param_groups):
            rates = [rates[number] for rates in self._rates]
            lr = torch.as_tensor(group["lr"], dtype=torch.float32)
            device = self._device_of(group)
            self._tables[number] = torch.tensor(rates, dtype=torch.float32, device=device)
            group["lr"] = lr.to(device)
            applied = min(state_dict["applied_before"], len(rates) - 1)
            group["lr"].fill_(rates[applied])

    def _device_of(self, group: dict[str, Any]) -> torch.device:
        """The device of a group's rate; a group may have no parameters."""
        params: list[Tensor] = group["params"] or self.optimizer._all_params()
        return params[0].device if params else torch.device("cpu")

    def _current(self) -> list[float]:
        return [float(group["lr"]) for group in self._shadow.param_groups]

    def _other_options(self) -> list[dict[str, Any]]:
        hidden = ("params", "lr", "initial_lr", "max_lr", "min_lr")
        return [
            {k: v for k, v in group.items() if k not in hidden}
            for group in self._shadow.param_groups
        ]

    def _check(self) -> None:
        for before, after in zip(self._others, self._other_options(), strict=True):
            for name, value in before.items():
                now = after[name]
                if now is not value and (isinstance(value, Tensor) or now != value):
                    raise RuntimeError(
                        f"AppliedStepScheduler: the scheduler changes {name!r}, only 'lr' can be "
                        "scheduled (OneCycleLR and CyclicLR: cycle_momentum=False)"
                    )
