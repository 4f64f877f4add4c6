"""Apex's optimizers in float64, tensor by tensor, from the formulas of its csrc/multi_tensor_*.cu.

Options that Apex has as attributes of the optimizer are among those of a group here. Checkpoints
have the layout of Apex's: steps are counted by group, and NovoGrad's norms are of a group. While it
runs, NovoGrad's ``exp_avg_sq`` is a state of a parameter, the square of Apex's norm.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor


class _Truth(torch.optim.Optimizer):
    options: ClassVar[dict[str, Any]]
    max_grad_norm: float | None = None
    counts: ClassVar[bool] = True
    attributes: ClassVar[tuple[str, ...]] = ()  # of Apex's optimizer, not in its checkpoints

    def __init__(self, params: Any, **options: Any) -> None:
        self.max_grad_norm = options.get("max_grad_norm")
        super().__init__(params, {**self.options, **options})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        clip = 1.0
        if self.max_grad_norm is not None:
            norm = torch.stack([g.norm() for g in grads if g is not None]).norm().item()
            clip = norm / self.max_grad_norm if norm > self.max_grad_norm else 1.0
        for group in self.param_groups:
            count = int(group.get("step", 0)) + 1
            if self.counts:
                group["step"] = count
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad / clip, group, self.state[p], count)

    def one(self, p: Tensor, g: Tensor, o: dict[str, Any], state: Any, t: float) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        for group in saved["param_groups"]:
            for name in self.attributes:
                del group[name]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.update({name: self.defaults[name] for name in self.attributes})


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
    attributes = ("adam_w_mode",)
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
    counts = False
    attributes = ("wd_after_momentum",)
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
    attributes = ("adam_w_mode", "use_nvlamb")
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
    counts = False
    attributes = ("adagrad_w_mode",)
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
    attributes = ("moment_mode",)
    options: ClassVar = {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8,
        "weight_decay": 0.0, "grad_averaging": True, "norm_type": 2, "init_zero": False,
        "moment_mode": 1,
    }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        for saved_group, group in zip(saved["param_groups"], self.param_groups, strict=True):
            norms: tuple[list[Tensor], list[Tensor]] = ([], [])
            for number, p in zip(saved_group["params"], group["params"], strict=True):
                if self.state.get(p):
                    state = dict(self.state[p])
                    norms[p.dtype == torch.float32].append(state.pop("exp_avg_sq").sqrt())
                    saved["state"][number] = state
            saved_group["exp_avg_sq"] = [torch.tensor(some) for some in norms]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            half, single = (some.tolist() for some in group.pop("exp_avg_sq"))
            for p in filter(self.state.get, group["params"]):
                norm = (single if p.dtype == torch.float32 else half).pop(0)
                self.state[p]["exp_avg_sq"] = torch.tensor(norm**2, dtype=torch.float64)
            assert not half
            assert not single

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


TRUTHS: dict[str, type[_Truth]] = {
    "FusedAdam": Adam, "FusedSGD": SGD, "FusedLAMB": LAMB, "FusedAdagrad": Adagrad,
    "FusedNovoGrad": NovoGrad,
}  # fmt: skip
