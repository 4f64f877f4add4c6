"""The update rules of the optimizers in plain torch: the twin of csrc/optimizer_rules.h.

``prepare_<rule>`` turns options, step counts and norms of all tensors of a call into coefficients:
vectors of float64, one number a tensor, on the tensors' device. ``<rule>(param, grad, states, c)``
returns for a tensor its direction u, the gradient that caution compares u with, and the new states;
it modifies nothing. ``c`` are the tensor's coefficients, 0-dim and of the dtype of ``param``. An
absent state is a 0. Every function scripts, and none waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# The result of a rule: direction, the gradient that caution compares with it, new states.
Stepped = tuple[Tensor, Tensor, list[Tensor]]


class Facts(NamedTuple):
    """Options and measures of a call's tensors before the step: float64 vectors, except for two."""

    lr: Tensor
    weight_decay: Tensor
    max_lr: Tensor  # for "corrected" weight decay, or 0
    cautious: Tensor
    option: Tensor  # [n, 8]: options of the rule
    step: Tensor  # number of this update, from 1
    grad_norm: Tensor  # of the rule's gradient; 0 if it was not measured
    param_norm: Tensor
    moments: Tensor  # [n, 2] of float32, kept from step to step


class Coefficients(NamedTuple):
    """The coefficients of the update p' = keep p - size (caution u + late_decay p)."""

    keep: Tensor
    size: Tensor
    late_decay: Tensor
    cautious: Tensor
    caution: Tensor
    moments: Tensor  # [n, 2] of float32: after the step
    c: Tensor  # [n, ...]: coefficients of the rule


class Trial(NamedTuple):
    """Sums over a trial of the update; in a cautious group, over elements that agree."""

    agreeing: Tensor  # number of elements with u g > 0
    squares: Tensor  # sum of u^2
    products: Tensor  # sum of u p
    numel: Tensor


def _coefficients(
    t: Facts,
    size: Tensor,
    c: list[Tensor],
    keep: Tensor | None = None,
    late_decay: Tensor | None = None,
    cautious: Tensor | None = None,
    moments: Tensor | None = None,
) -> Coefficients:
    one, zero = torch.ones_like(size), torch.zeros_like(size)
    return Coefficients(
        one if keep is None else keep,
        size,
        zero if late_decay is None else late_decay,
        t.cautious if cautious is None else cautious,
        one,
        t.moments if moments is None else moments,
        torch.stack(c, 1),
    )


def _where(condition: Tensor, then: Tensor, other: float) -> Tensor:
    return torch.where(condition != 0, then, torch.full_like(then, other))


def _kept(t: Facts, decoupled: Tensor) -> Tensor:
    """The factor of decoupled weight decay; "corrected" decay has the rate lr^2 / max_lr."""
    rate = torch.where(t.max_lr == 0, t.lr, t.lr * t.lr / t.max_lr)
    return _where(decoupled, 1 - rate * t.weight_decay, 1.0)


def _coupled(param: Tensor, grad: Tensor, weight_decay: Tensor) -> Tensor:
    # Infinite parameters times 0 would be nan.
    return torch.where(weight_decay != 0, grad + weight_decay * param, grad)


def finish(k: Coefficients, trial: Trial) -> Coefficients:
    """Caution (arXiv 2411.16085, with timm's bound)."""
    share = trial.agreeing / trial.numel.clamp(min=1)
    caution = _where(k.cautious, 1 / share.clamp(min=1e-3), 1.0)
    return Coefficients(k.keep, k.size, k.late_decay, k.cautious, caution, k.moments, k.c)


# --- sgd: torch.optim.SGD; with decoupled weight decay timm's SGDW.
# --- lars: timm's Lars (LARC with trust_clip), SGD behind a trust ratio of each tensor.


def _with_momentum(t: Facts, weight_decay: Tensor, trust: Tensor, keep: Tensor) -> Coefficients:
    momentum, dampening, nesterov = t.option[:, :3].unbind(1)
    undampened = (momentum == 0) | (t.step == 1)
    fresh = _where(undampened == 0, 1 - dampening, 1.0)
    c = [weight_decay, momentum, fresh, nesterov, trust]
    # Without momentum the direction is the gradient itself, and timm has no caution.
    return _coefficients(t, t.lr, c, keep, cautious=_where(momentum, t.cautious, 0.0))


def prepare_sgd(t: Facts) -> Coefficients:
    decoupled = t.option[:, 3]
    weight_decay = _where(decoupled == 0, t.weight_decay, 0.0)
    return _with_momentum(t, weight_decay, torch.ones_like(t.lr), _kept(t, decoupled))


def prepare_lars(t: Facts) -> Coefficients:
    trust_coeff, eps, trust_clip, always_adapt = t.option[:, 3:7].unbind(1)
    trust = trust_coeff * t.param_norm / (t.grad_norm + t.param_norm * t.weight_decay + eps)
    trust = _where((t.param_norm > 0) & (t.grad_norm > 0), trust, 1.0)
    trust = torch.where(trust_clip != 0, (trust / t.lr).clamp(max=1), trust)
    adapts = (t.weight_decay != 0) | (always_adapt != 0)
    return _with_momentum(t, t.weight_decay, _where(adapts, trust, 1.0), torch.ones_like(t.lr))


def sgd(param: Tensor, grad: Tensor, states: list[Tensor], c: list[Tensor]) -> Stepped:
    weight_decay, momentum, fresh, nesterov, trust = c
    grad = _coupled(param, grad, weight_decay) * trust
    buffer = momentum * states[0] + fresh * grad
    return torch.where(nesterov != 0, grad + momentum * buffer, buffer), grad, [buffer]


# --- adam: torch.optim.Adam and AdamW. nadamw: timm's NAdamW.


def prepare_adam(t: Facts) -> Coefficients:
    beta1, beta2, eps, decoupled, uncorrected = t.option[:, :5].unbind(1)
    root = _where(uncorrected == 0, 1 / (1 - beta2**t.step).sqrt(), 1.0)
    correction = _where(uncorrected == 0, 1 - beta1**t.step, 1.0)
    weight_decay = _where(decoupled == 0, t.weight_decay, 0.0)
    c = [weight_decay, beta1, beta2, 1 - beta1, 1 - beta2, root, eps]
    return _coefficients(t, t.lr / correction, c, _kept(t, decoupled))


def adam(param: Tensor, grad: Tensor, states: list[Tensor], c: list[Tensor]) -> Stepped:
    weight_decay, _, beta2, fresh1, fresh2, root, eps = c
    grad = _coupled(param, grad, weight_decay)
    first = states[0] + (grad - states[0]) * fresh1
    second = beta2 * states[1] + fresh2 * grad * grad
    largest = torch.maximum(second, states[2])  # amsgrad
    return first / (largest.sqrt() * root + eps), grad, [first, second, largest]


def nadamw(param: Tensor, grad: Tensor, states: list[Tensor], c: list[Tensor]) -> Stepped:
    _, beta1, beta2, fresh1, fresh2, root, eps = c
    first = states[0] + (grad - states[0]) * fresh1
    second = beta2 * states[1] + fresh2 * grad * grad
    ahead = first * beta1 + grad * fresh1
    return ahead / (second.sqrt() * root + eps), grad, [first, second]


# --- lamb: timm's Lamb, Adam's direction with a trust ratio of each tensor. A decoupled_decay of 2
# is Apex's adam_w_mode=False: weight decay is part of the averaged gradient.


def prepare_lamb(t: Facts) -> Coefficients:
    beta1, beta2, eps, corrects, averages = t.option[:, :5].unbind(1)
    decoupled, coupled = t.option[:, 7] == 1, t.option[:, 7] == 2
    fresh1 = _where(averages, 1 - beta1, 1.0)
    root = _where(corrects, 1 / (1 - beta2**t.step).sqrt(), 1.0)
    correction = _where(corrects, 1 / (1 - beta1**t.step), 1.0)
    late_decay = _where(t.option[:, 7] == 0, t.weight_decay, 0.0)
    weight_decay = _where(coupled, t.weight_decay, 0.0)
    c = [weight_decay, beta1, beta2, fresh1, 1 - beta2, root, eps, correction]
    return _coefficients(t, t.lr, c, _kept(t, decoupled), late_decay)


def finish_lamb(t: Facts, k: Coefficients, trial: Trial) -> Coefficients:
    trust_clip, always_adapt = t.option[:, 5:7].unbind(1)
    squares = k.caution.square() * trial.squares + 2 * k.caution * k.late_decay * trial.products
    update_norm = (squares + (k.late_decay * t.param_norm).square()).sqrt()
    param_norm = k.keep.abs() * t.param_norm
    trust = _where((param_norm > 0) & (update_norm > 0), param_norm / update_norm, 1.0)
    trust = torch.where(trust_clip != 0, trust.clamp(max=1), trust)
    adapts = (t.weight_decay != 0) | (always_adapt != 0)
    size = k.size * _where(adapts, trust, 1.0)
    return Coefficients(k.keep, size, k.late_decay, k.cautious, k.caution, k.moments, k.c)


def lamb(param: Tensor, grad: Tensor, states: list[Tensor], c: list[Tensor]) -> Stepped:
    weight_decay, beta1, beta2, fresh1, fresh2, root, eps, correction = c
    grad = _coupled(param, grad, weight_decay)
    first = beta1 * states[0] + fresh1 * grad
    second = beta2 * states[1] + fresh2 * grad * grad
    return first * correction / (second.sqrt() * root + eps), grad, [first, second]


# --- lion: arXiv 2302.06675, as timm has it. The sign of 0 is 0, that of nan nan.


def prepare_lion(t: Facts) -> Coefficients:
    beta1, beta2 = t.option[:, :2].unbind(1)
    return _coefficients(t, t.lr, [beta1, 1 - beta1, 1 - beta2], _kept(t, torch.ones_like(t.lr)))


def lion(param: Tensor, grad: Tensor, states: list[Tensor], c: list[Tensor]) -> Stepped:
    beta1, fresh1, fresh2 = c
    ahead = beta1 * states[0] + fresh1 * grad
    direction = torch.where(ahead.isnan(), ahead, ahead.sign())
    return direction, grad, [states[0] + (grad - states[0]) * fresh2]


# --- rmsprop: torch.optim.RMSprop. States: square_avg, momentum_buffer, grad_avg.


def prepare_rmsprop(t: Facts) -> Coefficients:
    alpha, eps, momentum, centered = t.option[:, :4].unbind(1)
    return _coefficients(t, t.lr, [t.weight_decay, alpha, 1 - alpha, eps, momentum, centered])


def rmsprop(param: Tensor, grad: Tensor, states: list[Tensor], c: list[Tensor]) -> Stepped:
    weight_decay, alpha, fresh, eps, momentum, centered = c
    grad = _coupled(param, grad, weight_decay)
    square = alpha * states[0] + fresh * grad * grad
    mean = states[2] + (grad - states[2]) * fresh
    # Rounding may make the variance negative, and torch's root is then nan.
    variance = torch.where(centered != 0, square - mean * mean, square).clamp(min=0)
    buffer = momentum * states[1] + grad / (variance.sqrt() + eps)
    return buffer, grad, [square, buffer, mean]


# --- rmsprop_tf: timm's RMSpropTF, eps inside the root, the rate inside the momentum buffer.


def prepare_rmsprop_tf(t: Facts) -> Coefficients:
    alpha, eps, momentum, centered, decoupled, lr_in_momentum = t.option[:, :6].unbind(1)
    inside = (lr_in_momentum != 0) & (momentum > 0)
    weight_decay = _where(decoupled == 0, t.weight_decay, 0.0)
    inner = _where(inside, t.lr, 1.0)
    c = [weight_decay, 1 - alpha, eps, momentum, centered, inner]
    cautious = _where(momentum, t.cautious, 0.0)  # as timm has it
    size = _where(inside == 0, t.lr, 1.0)
    return _coefficients(t, size, c, _kept(t, decoupled), cautious=cautious)


def rmsprop_tf(param: Tensor, grad: Tensor, states: list[Tensor], c: list[Tensor]) -> Stepped:
    weight_decay, fresh, eps, momentum, centered, inner = c
    grad = _coupled(param, grad, weight_decay)
    square = states[0] + (grad * grad - states[0]) * fresh
    mean = states[2] + (grad - states[2]) * fresh
    variance = torch.where(centered != 0, square - mean * mean, square).clamp(min=0)
    buffer = momentum * states[1] + inner * grad / (variance + eps).sqrt()
    return buffer, grad, [square, buffer, mean]


# --- adagrad: torch.optim.Adagrad; decoupled is Apex's adagrad_w_mode.


def prepare_adagrad(t: Facts) -> Coefficients:
    lr_decay, eps, decoupled = t.option[:, :3].unbind(1)
    weight_decay = _where(decoupled == 0, t.weight_decay, 0.0)
    size = t.lr / (1 + (t.step - 1) * lr_decay)
    return _coefficients(t, size, [weight_decay, eps], _kept(t, decoupled))


def adagrad(param: Tensor, grad: Tensor, states: list[Tensor], c: list[Tensor]) -> Stepped:
    weight_decay, eps = c
    grad = _coupled(param, grad, weight_decay)
    total = states[0] + grad * grad
    return grad / (total.sqrt() + eps), grad, [total]


# --- novograd: arXiv 1905.11286, as in timm's NvNovoGrad; one second moment per tensor. Apex adds
# bias_correction; `outside` 1 (its moment_mode) divides and decays after the average, 2 is timm's
# decoupled_decay. The squared norm becomes the second moment if that is 0 (`start` 0), at the first
# step (1) or never (2).


def prepare_novograd(t: Facts) -> Coefficients:
    beta1, beta2, eps, averages, amsgrad, corrects, outside, start = t.option.unbind(1)
    squares = t.grad_norm.square()
    kept, largest = t.moments.double().unbind(1)
    is_first = torch.where(start == 0, kept == 0, (start == 1) & (t.step == 1))
    second = torch.where(is_first, squares, beta2 * kept + (1 - beta2) * squares)
    second = second.to(t.moments.dtype).double()
    largest = torch.where((amsgrad == 0) | (largest > second), largest, second)
    root = _where(corrects, (1 - beta2**t.step).sqrt(), 1.0)
    denominator = torch.where(amsgrad != 0, largest, second).sqrt() / root + eps
    size = t.lr / _where(corrects, 1 - beta1**t.step, 1.0)
    size = torch.where(outside == 1, size / denominator, size)
    weight_decay = _where(outside == 0, t.weight_decay, 0.0)
    fresh = _where(averages, 1 - beta1, 1.0)
    c = [weight_decay, beta1, _where(outside != 1, 1 / denominator, 1.0), fresh]
    moments = torch.stack([second, largest], 1).to(t.moments.dtype)
    return _coefficients(t, size, c, _kept(t, outside), moments=moments)


def novograd(param: Tensor, grad: Tensor, states: list[Tensor], c: list[Tensor]) -> Stepped:
    weight_decay, beta1, per_norm, fresh = c
    grad = _coupled(param, grad * per_norm, weight_decay) * fresh
    buffer = beta1 * states[0] + grad
    return buffer, grad, [buffer]


lars = sgd  # only the coefficients differ


class Rule(NamedTuple):
    """One row of the table: a rule, and its least and most states per element."""

    name: str
    least: int
    most: int
    prepare: Callable[[Facts], Coefficients]
    update: Callable[[Tensor, Tensor, list[Tensor], list[Tensor]], Stepped]
    finish: Callable[[Facts, Coefficients, Trial], Coefficients] | None = None
    squares: tuple[int, ...] = ()  # the states that are averages or sums of squares


# In the order of FT_RULES in csrc/optimizer_rules.h.
RULES: tuple[Rule, ...] = (
    Rule("sgd", 0, 1, prepare_sgd, sgd),
    Rule("lars", 0, 1, prepare_lars, lars),
    Rule("adam", 2, 3, prepare_adam, adam, squares=(1, 2)),
    Rule("nadamw", 2, 2, prepare_adam, nadamw, squares=(1,)),
    Rule("lamb", 2, 2, prepare_lamb, lamb, finish_lamb, squares=(1,)),
    Rule("lion", 1, 1, prepare_lion, lion),
    Rule("rmsprop", 1, 3, prepare_rmsprop, rmsprop, squares=(0,)),
    Rule("rmsprop_tf", 1, 3, prepare_rmsprop_tf, rmsprop_tf, squares=(0,)),
    Rule("adagrad", 1, 1, prepare_adagrad, adagrad, squares=(0,)),
    Rule("novograd", 1, 1, prepare_novograd, novograd),
)
