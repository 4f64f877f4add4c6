"""The update rules of the optimizers as functions of blocks: the twin of csrc/optimizer_rules.h.

``prepare_<rule>(t)`` turns options, step counts and norms of tensors, one per lane, into float64
coefficients; ``finish_<rule>`` turns a trial of the update into a factor of the step size.
``<rule>(p, g, s0, s1, s2, c)`` returns for a parameter, its gradient and its states the direction
u, the gradient that caution compares u with, and the new states, in float32 or float64; an absent
state is 0, and ``c`` are the scalars of ``prepare_<rule>``. This module has no pointers or layouts.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .vecmath import at_least, at_most, power, reciprocal, sqrt


class Facts(NamedTuple):
    """Options and measures of tensors before the step, as in ``fusedtrain.reference``."""

    lr: Any
    weight_decay: Any
    max_lr: Any
    cautious: Any
    option: Any  # eight
    step: Any
    grad_norm: Any
    param_norm: Any
    moments: Any  # two, of float32


class Coefficients(NamedTuple):
    """The coefficients of the update p' = keep p - size (caution u + late_decay p)."""

    size: Any
    c: Any
    keep: Any
    cautious: Any
    moments: Any
    late_decay: Any = 0.0


class Trial(NamedTuple):
    """Sums over a trial of the update."""

    agreeing: Any
    squares: Any
    products: Any
    numel: Any


# --- shared by all rules


@triton.jit
def unscale(scale):
    return reciprocal(scale)


@triton.jit
def clip_coefficient(norm, max_norm, eps):
    """Clipping by the global norm: torch's max_norm / (norm + eps), at most 1; nan stays."""
    return tl.where(max_norm == 0.0, 1.0, at_most(max_norm / (norm + eps), 1.0))


@triton.jit
def adaptive_clip_coefficient(grad_norm, param_norm, factor, eps):
    """Clipping of one unit (arXiv 2102.06171), with timm's constants."""
    most = at_least(param_norm, eps) * factor
    return tl.where(grad_norm < most, 1.0, most / at_least(grad_norm, 1e-6))


@triton.jit
def kept(t):
    """The factor of decoupled weight decay; "corrected" decay has the rate lr^2 / max_lr."""
    corrected = t.max_lr != 0.0
    rate = tl.where(corrected, t.lr * t.lr / tl.where(corrected, t.max_lr, 1.0), t.lr)
    return 1.0 - rate * t.weight_decay


@triton.jit
def caution_after(k, trial):
    """Caution (arXiv 2411.16085, with timm's bound)."""
    share = trial.agreeing / at_least(trial.numel, 1.0)
    return tl.where(k.cautious != 0.0, 1.0 / at_least(share, 1e-3), 1.0)


@triton.jit
def coupled(p, g, weight_decay):
    """Adds an L2 penalty; without one infinite parameters times 0 would be nan."""
    return tl.where(weight_decay != 0.0, g + weight_decay * p, g)


# --- the rules


@triton.jit
def with_momentum(t, weight_decay, trust, keep):
    momentum, dampening, nesterov = t.option[0], t.option[1], t.option[2]
    fresh = tl.where((momentum == 0.0) | (t.step == 1.0), 1.0, 1.0 - dampening)
    # Without momentum the direction is the gradient itself, and timm has no caution.
    cautious = tl.where(momentum != 0.0, t.cautious, 0.0)
    c = (weight_decay, momentum, fresh, nesterov, trust)
    return Coefficients(t.lr, c, keep, cautious, t.moments)


@triton.jit
def prepare_sgd(t):
    decoupled = t.option[3] != 0.0
    weight_decay = tl.where(decoupled, 0.0, t.weight_decay)
    return with_momentum(t, weight_decay, 1.0, tl.where(decoupled, kept(t), 1.0))


@triton.jit
def prepare_lars(t):
    trust_coeff, eps, trust_clip, always_adapt = t.option[3], t.option[4], t.option[5], t.option[6]
    trust = trust_coeff * t.param_norm / (t.grad_norm + t.param_norm * t.weight_decay + eps)
    trust = tl.where((t.param_norm > 0.0) & (t.grad_norm > 0.0), trust, 1.0)
    trust = tl.where(trust_clip != 0.0, at_most(trust / t.lr, 1.0), trust)
    trust = tl.where((t.weight_decay != 0.0) | (always_adapt != 0.0), trust, 1.0)
    return with_momentum(t, t.weight_decay, trust, 1.0)


@triton.jit
def sgd(p, g, s0, s1, s2, c):
    weight_decay, momentum, fresh, nesterov, trust = c[0], c[1], c[2], c[3], c[4]
    g = coupled(p, g, weight_decay) * trust
    s0 = momentum * s0 + fresh * g
    return tl.where(nesterov != 0.0, g + momentum * s0, s0), g, s0, s1, s2


lars = sgd  # only the coefficients differ


@triton.jit
def prepare_adam(t):
    beta1, beta2, eps = t.option[0], t.option[1], t.option[2]
    decoupled, corrects = t.option[3] != 0.0, t.option[4] == 0.0
    root = tl.where(corrects, 1.0 / sqrt(1.0 - power(beta2, t.step)), 1.0)
    weight_decay = tl.where(decoupled, 0.0, t.weight_decay)
    c = (weight_decay, beta1, beta2, 1.0 - beta1, 1.0 - beta2, root, eps)
    size = t.lr / tl.where(corrects, 1.0 - power(beta1, t.step), 1.0)
    return Coefficients(size, c, tl.where(decoupled, kept(t), 1.0), t.cautious, t.moments)


@triton.jit
def adam(p, g, s0, s1, s2, c):
    weight_decay, beta2, fresh1, fresh2, root, eps = c[0], c[2], c[3], c[4], c[5], c[6]
    g = coupled(p, g, weight_decay)
    s0 += (g - s0) * fresh1
    s1 = beta2 * s1 + fresh2 * g * g
    # equal (>= for >): the larger of two equal numbers
    s2 = tl.where((s1 > s2) | (s1 != s1), s1, s2)  # amsgrad: the largest so far
    return s0 / (sqrt(s2) * root + eps), g, s0, s1, s2


prepare_nadamw = prepare_adam


@triton.jit
def nadamw(p, g, s0, s1, s2, c):
    beta1, beta2, fresh1, fresh2, root, eps = c[1], c[2], c[3], c[4], c[5], c[6]
    s0 += (g - s0) * fresh1
    s1 = beta2 * s1 + fresh2 * g * g
    ahead = s0 * beta1 + g * fresh1
    return ahead / (sqrt(s1) * root + eps), g, s0, s1, s2


@triton.jit
def prepare_lamb(t):
    beta1, beta2, eps = t.option[0], t.option[1], t.option[2]
    corrects, averages, decay = t.option[3] != 0.0, t.option[4] != 0.0, t.option[7]
    fresh1 = tl.where(averages, 1.0 - beta1, 1.0)
    root = tl.where(corrects, 1.0 / sqrt(1.0 - power(beta2, t.step)), 1.0)
    correction = tl.where(corrects, 1.0 / (1.0 - power(beta1, t.step)), 1.0)
    late_decay = tl.where(decay == 0.0, t.weight_decay, 0.0)
    coupled_decay = tl.where(decay == 2.0, t.weight_decay, 0.0)
    c = (coupled_decay, beta1, beta2, fresh1, 1.0 - beta2, root, eps, correction)
    keep = tl.where(decay == 1.0, kept(t), 1.0)
    return Coefficients(t.lr, c, keep, t.cautious, t.moments, late_decay)


@triton.jit
def finish_lamb(t, k, caution, trial):
    """The trust ratio of each tensor."""
    late = k.late_decay * t.param_norm
    squares = caution * caution * trial.squares + 2.0 * caution * k.late_decay * trial.products
    update_norm = sqrt(squares + late * late)
    param_norm = tl.abs(k.keep) * t.param_norm
    trust = tl.where((param_norm > 0.0) & (update_norm > 0.0), param_norm / update_norm, 1.0)
    trust = tl.where(t.option[5] != 0.0, at_most(trust, 1.0), trust)
    return tl.where((t.weight_decay != 0.0) | (t.option[6] != 0.0), trust, 1.0)


@triton.jit
def lamb(p, g, s0, s1, s2, c):
    beta1, beta2, fresh1, fresh2, root, eps, correction = c[1], c[2], c[3], c[4], c[5], c[6], c[7]
    g = coupled(p, g, c[0])
    s0 = beta1 * s0 + fresh1 * g
    s1 = beta2 * s1 + fresh2 * g * g
    return s0 * correction / (sqrt(s1) * root + eps), g, s0, s1, s2


@triton.jit
def prepare_lion(t):
    beta1, beta2 = t.option[0], t.option[1]
    c = (beta1, 1.0 - beta1, 1.0 - beta2)
    return Coefficients(t.lr, c, kept(t), t.cautious, t.moments)


@triton.jit
def lion(p, g, s0, s1, s2, c):
    beta1, fresh1, fresh2 = c[0], c[1], c[2]
    ahead = beta1 * s0 + fresh1 * g
    s0 += (g - s0) * fresh2
    return tl.where(ahead > 0.0, 1.0, tl.where(ahead < 0.0, -1.0, ahead)), g, s0, s1, s2


@triton.jit
def variance_of(square, mean, centered):
    """The variance, at least 0: rounding may make it negative, and torch's root is then nan."""
    return at_least(tl.where(centered != 0.0, square - mean * mean, square), 0.0)


@triton.jit
def prepare_rmsprop(t):
    alpha, eps, momentum, centered = t.option[0], t.option[1], t.option[2], t.option[3]
    c = (t.weight_decay, alpha, 1.0 - alpha, eps, momentum, centered)
    return Coefficients(t.lr, c, 1.0, t.cautious, t.moments)


@triton.jit
def rmsprop(p, g, s0, s1, s2, c):
    weight_decay, alpha, fresh, eps, momentum, centered = c[0], c[1], c[2], c[3], c[4], c[5]
    g = coupled(p, g, weight_decay)
    s0 = alpha * s0 + fresh * g * g
    s2 += (g - s2) * fresh
    s1 = momentum * s1 + g / (sqrt(variance_of(s0, s2, centered)) + eps)
    return s1, g, s0, s1, s2


@triton.jit
def prepare_rmsprop_tf(t):
    alpha, eps, momentum, centered = t.option[0], t.option[1], t.option[2], t.option[3]
    decoupled, inside = t.option[4] != 0.0, (t.option[5] != 0.0) & (momentum > 0.0)
    weight_decay = tl.where(decoupled, 0.0, t.weight_decay)
    c = (weight_decay, 1.0 - alpha, eps, momentum, centered, tl.where(inside, t.lr, 1.0))
    keep = tl.where(decoupled, kept(t), 1.0)
    cautious = tl.where(momentum != 0.0, t.cautious, 0.0)  # as timm has it
    return Coefficients(tl.where(inside, 1.0, t.lr), c, keep, cautious, t.moments)


@triton.jit
def rmsprop_tf(p, g, s0, s1, s2, c):
    weight_decay, fresh, eps, momentum, centered, inner = c[0], c[1], c[2], c[3], c[4], c[5]
    g = coupled(p, g, weight_decay)
    s0 += (g * g - s0) * fresh
    s2 += (g - s2) * fresh
    s1 = momentum * s1 + inner * g / sqrt(variance_of(s0, s2, centered) + eps)
    return s1, g, s0, s1, s2


@triton.jit
def prepare_adagrad(t):
    decoupled = t.option[2] != 0.0
    size = t.lr / (1.0 + (t.step - 1.0) * t.option[0])
    c = (tl.where(decoupled, 0.0, t.weight_decay), t.option[1])
    return Coefficients(size, c, tl.where(decoupled, kept(t), 1.0), t.cautious, t.moments)


@triton.jit
def adagrad(p, g, s0, s1, s2, c):
    weight_decay, eps = c[0], c[1]
    g = coupled(p, g, weight_decay)
    s0 += g * g
    return g / (sqrt(s0) + eps), g, s0, s1, s2


@triton.jit
def prepare_novograd(t):
    beta1, beta2, eps = t.option[0], t.option[1], t.option[2]
    averages, amsgrad = t.option[3] != 0.0, t.option[4] != 0.0
    corrects, outside, start = t.option[5] != 0.0, t.option[6] == 1.0, t.option[7]
    inside = t.option[6] == 0.0
    # Computed first: below the moments, ptxas spills 8 bytes (sm_90).
    root = tl.where(corrects, sqrt(1.0 - power(beta2, t.step)), 1.0)
    size = t.lr / tl.where(corrects, 1.0 - power(beta1, t.step), 1.0)
    squares = t.grad_norm * t.grad_norm
    second, largest = t.moments[0].to(tl.float64), t.moments[1]
    is_first = ((start == 0.0) & (second == 0.0)) | ((start == 1.0) & (t.step == 1.0))
    second = tl.where(is_first, squares, beta2 * second + (1.0 - beta2) * squares)
    stored = second.to(tl.float32)
    # equal (>= for >): the larger of two equal numbers
    largest = tl.where(amsgrad & ~(largest > stored), stored, largest)
    denominator = sqrt(tl.where(amsgrad, largest, stored).to(tl.float64)) / root + eps
    size = tl.where(outside, size / denominator, size)
    weight_decay = tl.where(inside, t.weight_decay, 0.0)
    per_norm = tl.where(outside, 1.0, 1.0 / denominator)
    c = (weight_decay, beta1, per_norm, tl.where(averages, 1.0 - beta1, 1.0))
    keep = tl.where(inside, 1.0, kept(t))
    return Coefficients(size, c, keep, t.cautious, (stored, largest))


@triton.jit
def novograd(p, g, s0, s1, s2, c):
    weight_decay, beta1, per_norm, fresh = c[0], c[1], c[2], c[3]
    g = coupled(p, g * per_norm, weight_decay) * fresh
    s0 = beta1 * s0 + g
    return s0, g, s0, s1, s2
