"""Apex's optimizers in float64, tensor by tensor, from the formulas of its csrc/multi_tensor_*.cu.

Options that Apex has as attributes of the optimizer are among those of a group here. States have
the names of fusedtrain's; NovoGrad's ``exp_avg_sq`` is the square of Apex's norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor


class _Truth(torch.optim.Optimizer):
    options: ClassVar[dict[str, Any]]
    max_grad_norm: float | None = None

    def __init__(self, params: Any, **options: Any) -> None:
        self.max_grad_norm = options.pop("max_grad_norm", None)
        super().__init__(params, {**self.options, **options})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        clip = 1.0
        if self.max_grad_norm is not None:
            norm = torch.stack([p.grad.norm() for p, _ in params]).norm().item()
            clip = norm / self.max_grad_norm if norm > self.max_grad_norm else 1.0
        for p, group in params:
            state = self.state[p]
            state["step"] = torch.as_tensor(state.get("step", 0.0)) + 1
            self.one(p, p.grad / clip, group, state, state["step"].item())

    def one(self, p: Tensor, g: Tensor, o: dict[str, Any], state: Any, t: float) -> None:
        raise NotImplementedError


def _moments(
    g: Tensor, o: dict[str, Any], state: Any, fresh: float, t: float
) -> Tensor:  # the direction of Adam
    beta1, beta2 = o["betas"]
    m = beta1 * state.get("exp_avg", torch.zeros_like(g)) + fresh * g
    v = beta2 * state.get("exp_avg_sq", torch.zeros_like(g)) + (1 - beta2) * g**2
    state.update(exp_avg=m, exp_avg_sq=v)
    if o["bias_correction"]:
        m, v = m / (1 - beta1**t), v / (1 - beta2**t)
    return m / (v.sqrt() + o["eps"])


class Adam(_Truth):
    options: ClassVar = {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8,
        "weight_decay": 0.0, "adam_w_mode": 1,
    }  # fmt: skip

    def one(self, p: Tensor, g: Tensor, o: dict[str, Any], state: Any, t: float) -> None:
        if not o["adam_w_mode"]:
            g = g + o["weight_decay"] * p
        update = _moments(g, o, state, 1 - o["betas"][0], t)
        if o["adam_w_mode"]:
            update = update + o["weight_decay"] * p
        p -= o["lr"] * update


class SGD(_Truth):
    options: ClassVar = {
        "lr": 1e-3, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False,
        "wd_after_momentum": False,
    }  # fmt: skip

    def one(self, p: Tensor, g: Tensor, o: dict[str, Any], state: Any, t: float) -> None:
        decay = o["weight_decay"] * p
        if not o["wd_after_momentum"]:
            g = g + decay
        if o["momentum"] != 0:
            if "momentum_buffer" in state:
                buffer = state["momentum_buffer"] * o["momentum"] + (1 - o["dampening"]) * g
            else:
                buffer = g.clone()
            state["momentum_buffer"] = buffer
            g = g + o["momentum"] * buffer if o["nesterov"] else buffer
        if o["wd_after_momentum"]:
            g = g + decay
        p -= o["lr"] * g


class LAMB(_Truth):
    options: ClassVar = {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6,
        "weight_decay": 0.01, "grad_averaging": True, "adam_w_mode": 1, "use_nvlamb": False,
    }  # fmt: skip

    def one(self, p: Tensor, g: Tensor, o: dict[str, Any], state: Any, t: float) -> None:
        decay = o["weight_decay"]
        if not o["adam_w_mode"]:
            g = g + decay * p
        update = _moments(g, o, state, 1 - o["betas"][0] if o["grad_averaging"] else 1.0, t)
        if o["adam_w_mode"]:
            update = update + decay * p
        ratio = 1.0
        if o["use_nvlamb"] or decay != 0:
            p_norm, norm = p.norm().item(), update.norm().item()
            ratio = p_norm / norm if p_norm != 0 and norm != 0 else 1.0
        p -= o["lr"] * ratio * update


class Adagrad(_Truth):
    options: ClassVar = {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0, "adagrad_w_mode": 0}

    def one(self, p: Tensor, g: Tensor, o: dict[str, Any], state: Any, t: float) -> None:
        if not o["adagrad_w_mode"]:
            g = g + o["weight_decay"] * p
        h = state.get("sum", torch.zeros_like(g)) + g**2
        state["sum"] = h
        update = g / (h.sqrt() + o["eps"])
        if o["adagrad_w_mode"]:
            update = update + o["weight_decay"] * p
        p -= o["lr"] * update


class NovoGrad(_Truth):
    options: ClassVar = {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8,
        "weight_decay": 0.0, "grad_averaging": True, "norm_type": 2, "init_zero": False,
        "moment_mode": 1,
    }  # fmt: skip

    def one(self, p: Tensor, g: Tensor, o: dict[str, Any], state: Any, t: float) -> None:
        beta1, beta2 = o["betas"]
        norm = g.norm().item()
        if t == 1:
            state["exp_avg"] = torch.zeros_like(g)
            v = 0.0 if o["init_zero"] else norm
        else:
            v = math.sqrt(state["exp_avg_sq"].item())
        v = math.sqrt(beta2 * v**2 + (1 - beta2) * norm**2)
        state["exp_avg_sq"] = torch.tensor(v**2, dtype=torch.float64)
        fresh = 1 - beta1 if o["grad_averaging"] else 1.0
        correction1, correction2 = 1.0, 1.0
        if o["bias_correction"]:
            correction1, correction2 = 1 - beta1**t, math.sqrt(1 - beta2**t)
        denominator = v / correction2 + o["eps"]
        if o["moment_mode"] == 0:
            g = g / denominator + o["weight_decay"] * p
            m = beta1 * state["exp_avg"] + fresh * g
            update = m / correction1
        else:
            m = beta1 * state["exp_avg"] + fresh * g
            update = m / correction1 / denominator + o["weight_decay"] * p
        state["exp_avg"] = m
        p -= o["lr"] * update


TRUTHS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "FusedAdam": Adam, "FusedSGD": SGD, "FusedLAMB": LAMB, "FusedAdagrad": Adagrad,
    "FusedNovoGrad": NovoGrad,
}  # fmt: skip
