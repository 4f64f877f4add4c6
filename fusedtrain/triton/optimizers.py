"""The update rules of the optimizers as functions of blocks: the twin of csrc/optimizers.h.

``<rule>(p, g, s0, s1, s2, c)`` makes of a parameter, its gradient and its states the direction u,
the gradient that caution compares u with, and the new states; a state that a tensor does not have
is 0. ``c`` are eight scalars, which ``prepare_<rule>`` of ``fusedtrain.reference`` makes. All are
float32 or float64. No loops, pointers or layouts here.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl

from .vecmath import at_least, sqrt


@triton.jit
def coupled(p, g, weight_decay):
    """Infinite parameters times 0 would be nan."""
    return tl.where(weight_decay != 0.0, g + weight_decay * p, g)


@triton.jit
def sgd(p, g, s0, s1, s2, c):
    weight_decay, momentum, fresh, nesterov, trust = c[0], c[1], c[2], c[3], c[4]
    g = coupled(p, g, weight_decay) * trust
    s0 = momentum * s0 + fresh * g
    return tl.where(nesterov != 0.0, g + momentum * s0, s0), g, s0, s1, s2


lars = sgd  # all of the difference is in the coefficients


@triton.jit
def adam(p, g, s0, s1, s2, c):
    weight_decay, beta2, fresh1, fresh2, root, eps = c[0], c[2], c[3], c[4], c[5], c[6]
    g = coupled(p, g, weight_decay)
    s0 += (g - s0) * fresh1
    s1 = beta2 * s1 + fresh2 * g * g
    s2 = tl.where((s1 > s2) | (s1 != s1), s1, s2)  # amsgrad: the largest so far
    return s0 / (sqrt(s2) * root + eps), g, s0, s1, s2


@triton.jit
def nadamw(p, g, s0, s1, s2, c):
    beta1, beta2, fresh1, fresh2, root, eps = c[1], c[2], c[3], c[4], c[5], c[6]
    s0 += (g - s0) * fresh1
    s1 = beta2 * s1 + fresh2 * g * g
    ahead = s0 * beta1 + g * fresh1
    return ahead / (sqrt(s1) * root + eps), g, s0, s1, s2


@triton.jit
def lamb(p, g, s0, s1, s2, c):
    beta1, beta2, fresh1, fresh2, root, eps, correction = c[0], c[1], c[2], c[3], c[4], c[5], c[6]
    s0 = beta1 * s0 + fresh1 * g
    s1 = beta2 * s1 + fresh2 * g * g
    return s0 * correction / (sqrt(s1) * root + eps), g, s0, s1, s2


@triton.jit
def lion(p, g, s0, s1, s2, c):
    beta1, fresh1, fresh2 = c[0], c[1], c[2]
    ahead = beta1 * s0 + fresh1 * g
    s0 += (g - s0) * fresh2
    return tl.where(ahead > 0.0, 1.0, tl.where(ahead < 0.0, -1.0, ahead)), g, s0, s1, s2


@triton.jit
def variance_of(square, mean, centered):
    """Below 0 by rounding, where torch's square root is nan."""
    return at_least(tl.where(centered != 0.0, square - mean * mean, square), 0.0)


@triton.jit
def rmsprop(p, g, s0, s1, s2, c):
    weight_decay, alpha, fresh, eps, momentum, centered = c[0], c[1], c[2], c[3], c[4], c[5]
    g = coupled(p, g, weight_decay)
    s0 = alpha * s0 + fresh * g * g
    s2 += (g - s2) * fresh
    s1 = momentum * s1 + g / (sqrt(variance_of(s0, s2, centered)) + eps)
    return s1, g, s0, s1, s2


@triton.jit
def rmsprop_tf(p, g, s0, s1, s2, c):
    weight_decay, fresh, eps, momentum, centered, inner = c[0], c[1], c[2], c[3], c[4], c[5]
    g = coupled(p, g, weight_decay)
    s0 += (g * g - s0) * fresh
    s2 += (g - s2) * fresh
    s1 = momentum * s1 + inner * g / sqrt(variance_of(s0, s2, centered) + eps)
    return s1, g, s0, s1, s2


@triton.jit
def adagrad(p, g, s0, s1, s2, c):
    weight_decay, eps = c[0], c[1]
    g = coupled(p, g, weight_decay)
    s0 += g * g
    return g / (sqrt(s0) + eps), g, s0, s1, s2


@triton.jit
def novograd(p, g, s0, s1, s2, c):
    weight_decay, beta1, per_norm, fresh = c[0], c[1], c[2], c[3]
    g = coupled(p, g * per_norm, weight_decay) * fresh
    s0 = beta1 * s0 + g
    return s0, g, s0, s1, s2


# --- stochastic rounding, with the bits of csrc/optimizers.h


@triton.jit
def random_key(seed, tensor, step):
    """The key of a tensor at a step (splitmix64's finaliser)."""
    x = seed.to(tl.uint64) + tensor.to(tl.uint64) * 0x9E3779B97F4A7C15
    x += step.to(tl.uint64) * 0xD1B54A32D192ED03
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return ((x >> 32) ^ x).to(tl.uint32)


@triton.jit
def random_bits(index, key):
    """32 random bits of each element (lowbias32 of Chris Wellons' hash-prospector)."""
    x = index.to(tl.uint32) * 0x9E3779B9 + key
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def stochastic_bfloat16(x, index, key):
    """float32 values up or down at random, the nearer the likelier. Infinities and NaN stay."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + (random_bits(index, key) >> 16)) >> 16
    rounded = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where((bits & 0x7F800000) != 0x7F800000, rounded, x.to(tl.bfloat16))


# --- the loss scale


@triton.jit
def next_scale(
    scale, growth_tracker, hysteresis_tracker, found_inf,
    growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale,
):  # fmt: skip
    """Scale, growth tracker and hysteresis tracker after a step; factors and bounds are float64."""
    bad = found_inf != 0.0  # also where it is nan
    left = tl.where(bad, tl.maximum(hysteresis_tracker - 1, 0), hysteresis)
    good_steps = growth_tracker + 1
    grows = (good_steps == growth_interval) & (found_inf == 0.0)
    wide = scale.to(tl.float64)
    grown = (wide * growth_factor).to(tl.float32)
    smaller = (wide * backoff_factor).to(tl.float32)
    larger = tl.where(grows & (grown - grown == 0.0), grown, scale)
    new = tl.where(bad, tl.where(left == 0, smaller, scale), larger)
    new = tl.where(new.to(tl.float64) < min_scale, min_scale.to(tl.float32), new)
    new = tl.where(new.to(tl.float64) > max_scale, max_scale.to(tl.float32), new)
    return new, tl.where(bad | grows, 0, good_steps), left
