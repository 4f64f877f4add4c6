"""The optimizer step of a mode: stock (torch's or timm's, and a loop around it) or fusedtrain's."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import fusedtrain
from _train.models import import_torchvision


@dataclass(frozen=True)
class Recipe:
    """An optimizer: the stock class, fusedtrain's, and what both are made with."""

    stock: str  # module.Class
    fused: str  # in fusedtrain.optim
    lr: float  # default peak
    options: Mapping[str, Any] = field(default_factory=dict)
    stock_options: Mapping[str, Any] = field(default_factory=dict)


_FUSED = {"fused": True}
# SGD's decay and momentum as in the usual CIFAR recipes; momentum stays off where it is optional
# and the recipes do not have it.
_SGD = {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
_DECAY = {"weight_decay": 0.05}
RECIPES = {
    "sgd": Recipe("torch.optim.SGD", "SGD", 0.03, _SGD, _FUSED),
    "sgdw": Recipe("timm.optim.SGDW", "SGDW", 0.03, _SGD, {"foreach": True}),
    "adam": Recipe("torch.optim.Adam", "Adam", 1e-3, {}, _FUSED),
    "adamw": Recipe("torch.optim.AdamW", "AdamW", 1e-3, _DECAY, _FUSED),
    "nadamw": Recipe("timm.optim.NAdamW", "NAdamW", 1e-3, _DECAY, {"foreach": True}),
    "adagrad": Recipe("torch.optim.Adagrad", "Adagrad", 1e-2, {}, _FUSED),
    "rmsprop": Recipe("torch.optim.RMSprop", "RMSprop", 1e-3, {}, {"foreach": True}),
    "rmsproptf": Recipe(
        "timm.optim.RMSpropTF", "RMSpropTF", 2e-3,
        {"alpha": 0.9, "eps": 1e-3, "momentum": 0.9, "weight_decay": 1e-5},
    ),
    "lars": Recipe("timm.optim.Lars", "LARS", 2.0, {"momentum": 0.9, "weight_decay": 1e-4}),
    "lamb": Recipe("timm.optim.Lamb", "LAMB", 5e-3, {"weight_decay": 0.02, "max_grad_norm": None}),
    "novograd": Recipe("timm.optim.NvNovoGrad", "NovoGrad", 1e-2, {"weight_decay": 1e-3}),
    "lion": Recipe("timm.optim.Lion", "Lion", 1e-4, _DECAY, {"foreach": True}),
}  # fmt: skip


# --optimizer-state and --masters, and what fusedtrain's optimizers call them.
STATES: dict[str, Any] = {"float32": torch.float32, "bf16": torch.bfloat16, "q8": "q8"}
MASTERS: dict[str, Any] = {
    "none": False, "float32": True, "split32": "split32", "split24": "split24",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of the optimizer step, from the command line."""

    name: str = "sgd"
    clip: float | None = None  # norm of all gradients
    ema: float | None = None  # decay of the averaged weights
    states: str = "float32"  # of STATES; of the fused modes alone
    masters: str = "none"  # of MASTERS; of the fused modes with AMP alone

    @property
    def rounds(self) -> bool:
        """Whether the fused modes keep fewer bits than the stock ones."""
        return self.states != "float32" or self.masters != "none"


class Stepper:
    """Everything between backward and the next forward; ``seconds`` has how long each took."""

    def __init__(
        self,
        params: Iterable[Tensor],
        settings: Settings,
        *,
        fused: bool,
        device: torch.device,
        scaled: bool,
        scale: float = 2.0**16,
    ) -> None:
        """With ``scaled``, the loss scale starts at ``scale``."""
        self.params = [p for p in params if p.requires_grad]
        self.settings = settings
        self.fused = fused
        self.device = device
        recipe = RECIPES[settings.name]
        if fused:
            options = {
                "max_grad_norm": settings.clip,
                "ema_decay": settings.ema,
                "state_dtype": STATES[settings.states],
                "master_weights": MASTERS[settings.masters],
            }
            of: Any = getattr(fusedtrain.optim, recipe.fused)
            self.optimizer = of(self.params, lr=recipe.lr, **{**recipe.options, **options})
            self.scaler: Any = fusedtrain.amp.GradScaler(device.type, scale, enabled=scaled)
        else:
            options = _stock_options(recipe, self.params, scaled)
            self.optimizer = _stock_class(recipe)(self.params, lr=recipe.lr, **options)
            self.scaler = torch.amp.GradScaler(device.type, scale, enabled=scaled)
        self._averages: list[Tensor] = []
        if settings.ema is not None and not fused:
            self._averages = [p.detach().clone() for p in self.params]
            self._average = get_ema_multi_avg_fn(settings.ema)
        self.seconds: list[float] = []
        self._events: list[tuple[Any, Any]] = []

    def set_lr(self, lr: float) -> None:
        """The rate of the next steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self) -> None:
        """Unscale, check, clip, step, average, and drop the gradients.

        On CUDA it is timed by events on the stream, and nothing waits: ``collect`` reads them.
        """
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._step()
            end.record()
            self._events.append((start, end))
            return
        before = time.perf_counter()
        self._step()
        self.seconds.append(time.perf_counter() - before)

    def _step(self) -> None:
        if self.settings.clip is not None and not self.fused:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.params, self.settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self._averages:
            self._average(self._averages, self.params, None)
        self.optimizer.zero_grad(set_to_none=True)

    def collect(self) -> None:
        """After the device has finished: the seconds of the steps on CUDA."""
        self.seconds += [start.elapsed_time(end) / 1e3 for start, end in self._events]
        self._events.clear()

    def averages(self) -> list[Tensor]:
        """The averaged weights; none without ``ema``."""
        if self.fused and self.settings.ema is not None:
            return [average for _, average in self.optimizer.averaged_parameters()]
        return self._averages

    def weights(self) -> list[Tensor]:
        """The weights in float32: those behind 16-bit parameters, and the other parameters."""
        if not self.fused:
            return list(self.params)
        values = fusedtrain.optim.float32_state_dict(nn.ParameterList(self.params), self.optimizer)
        return [values[str(index)] for index in range(len(self.params))]

    def weight_bytes(self) -> int:
        """Bytes of the parameters themselves."""
        return sum(p.nbytes for p in self.params)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's states, masters among them, and the averages."""
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        held = [t for t in (*states, *self._averages) if torch.is_tensor(t)]
        return sum(t.nbytes for t in held)


def _stock_class(recipe: Recipe) -> Any:
    module, _, name = recipe.stock.rpartition(".")
    if module.startswith("timm"):
        import_torchvision()  # which timm imports
    return getattr(importlib.import_module(module), name)


def _stock_options(recipe: Recipe, params: Sequence[Tensor], scaled: bool) -> dict[str, Any]:
    """torch's fused kernels where they can be trusted, foreach elsewhere.

    Two faults, seen with torch 2.13: the CPU kernels ignore strides (a channels_last weight with a
    contiguous gradient gets another's update), and SGD's momentum is uninitialised memory after a
    GradScaler skipped the first step, as it often does.
    """
    options = {**recipe.options, **recipe.stock_options}
    strided = any(not p.is_cuda and not p.is_contiguous() for p in params)
    if options.get("fused") and (strided or (scaled and recipe.stock == "torch.optim.SGD")):
        del options["fused"]
        options["foreach"] = True
    return options


Make = Callable[[list[Tensor], bool], Stepper]


class Updates(NamedTuple):
    """Changes by three steps."""

    weights: list[Tensor]  # of float32, those behind 16-bit parameters
    averages: list[Tensor]
    rounding: float  # the largest relative distance of a parameter from its float32 weight


def updates(
    make: Make, fused: bool, weights: Sequence[Tensor], grads: Sequence[Tensor], lr: float
) -> Updates:
    """Changes by three steps on given gradients.

    Weights and gradients have the dtypes of ``weights`` in the fused optimizer. In the stock one
    all are float32, of the same values.
    """
    params: list[Tensor] = [
        nn.Parameter(w.detach().to(w.dtype if fused else torch.float32, copy=True)) for w in weights
    ]
    stepper = make(params, fused)
    stepper.set_lr(lr)
    for factor in (1.0, 0.5, -2.0):
        for p, grad, weight in zip(params, grads, weights, strict=True):
            p.grad = stepper.scaler.scale(grad * factor).to(weight.dtype).to(p.dtype)
        stepper.step()
    ends = [w.detach().double() for w in stepper.weights()]
    starts = [w.detach().double() for w in weights]
    changes = [end - start for end, start in zip(ends, starts, strict=True)]
    averages = [a.detach().double() - start for a, start in zip(stepper.averages(), starts)]
    rounding = [
        float((p.detach().double() - end).norm() / end.norm()) for p, end in zip(params, ends)
        if p.dtype is not torch.float32
    ]  # fmt: skip
    # max() would lose a NaN.
    return Updates(changes, averages, float(torch.tensor([0.0, *rounding]).max()))
