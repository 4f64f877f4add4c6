"""The optimizer step of csrc/cpu/optimizers.cpp in plain torch, op by op.

The host never waits for the device: a skipped step is computed, too, and ``torch.where`` keeps
every bit of the old values. The host reads only ``table`` and ``rows``, which are in its memory.

``table`` is a matrix of float64: the row of a `StepOptions`, then the row of each group's
`GroupOptions`. ``rows`` has for each parameter: its group, its column of ``scalars``, the index of
each of its states in ``states``, of its master in ``masters``, of its average in ``averages``; -1
for a tensor that does not exist. A master is float32, or a correction (`split_weights.py`). A state
is of floats, or of 8-bit codes (`state_codes.py`), whose scales follow in ``states``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._capture import is_capturing, pinned
from . import stochastic_rounding as rounding
from .optimizer_rules import RULES, Coefficients, Facts, Stepped, Trial, finish
from .split_weights import NEAREST, follow, is_correction, join_weights, split_weights
from .state_codes import dequantise, is_codes, quantise, random_indices

# csrc/ops/optimizers.h has the same numbers and names (test_optimizer_tables.py compares them).
MEASURE_FINITE, MEASURE_GRADIENTS, MEASURE_PARAMETERS = 1, 2, 4
MAX_STATES = 3
SCALARS = 3  # rows of `scalars`: applied steps, two second moments
CONTROLS = 8  # numbers in `control`; the last are unused
RULE_OPTIONS = 8  # options of a group that only the rule knows


class StepOptions(NamedTuple):
    """The options of one step for all tensors."""

    measures: float  # MEASURE_...: what the sweep over gradients measures
    max_norm: float  # of all gradients together, or 0
    norm_eps: float
    unit_factor: float  # of adaptive (unit-wise) clipping, or 0
    unit_eps: float
    average_weight: float  # weight of the new parameter in its moving average, or 0
    write_back: float  # written to gradients: 0 nothing, 1 unscaled and clipped gradients, 2 zeros
    stochastic: float  # 1: bfloat16 parameters are rounded stochastically
    seed: float  # an integer below 2^53
    trial: float  # 1: the rule needs sums over a trial of the update
    seed_high: float  # an integer below 2^32: the stream's seed is seed + 2^32 seed_high
    masters_follow: float  # 1: float32 masters take what others wrote to 16-bit parameters

    def row(self) -> tuple[float, ...]:
        """WIDTH numbers, the unused ones 0."""
        return self + _UNUSED

    @classmethod
    def of(cls, row: Sequence[float]) -> StepOptions:
        """The options in a row, or in a table that begins with the row."""
        return cls(*row[: len(cls._fields)])


class GroupOptions(NamedTuple):
    """The options of one step for the parameters of a group."""

    lr: float
    lr_index: float  # index of the tensor in `lrs` that replaces `lr`, or -1
    weight_decay: float
    sign: float  # -1: maximize
    max_lr: float  # for "corrected" weight decay, or 0
    cautious: float  # 1: directions that disagree with the gradient's sign are dropped
    option: tuple[float, ...]  # of the rule (csrc/optimizer_rules.h), RULE_OPTIONS at most

    def row(self) -> tuple[float, ...]:
        """WIDTH numbers, the unused ones 0."""
        *shared, option = self
        return (*shared, *option, *_UNUSED_OF_RULE[len(option) :])

    @classmethod
    def column(cls, name: str) -> int:
        """The column of an option; "option": the first column of the rule's options."""
        return cls._fields.index(name)


class Control(NamedTuple):
    """``control``: results of the last step, and counts of all steps, on the device."""

    skipped: Tensor  # 1 or 0
    skipped_steps: Tensor
    grad_norm: Tensor  # of all gradients; nan if the step did not measure it
    clip: Tensor  # coefficient of the clipping
    nonfinite: Tensor  # number of non-finite gradients
    applied_steps: Tensor

    @classmethod
    def of(cls, control: Tensor) -> Control:
        """Views of ``control``."""
        return cls(*control.unbind()[: len(cls._fields)])


WIDTH = GroupOptions.column("option") + RULE_OPTIONS  # of the table
_UNUSED = (0.0,) * (WIDTH - len(StepOptions._fields))
_UNUSED_OF_RULE = (0.0,) * RULE_OPTIONS


class _Measures(NamedTuple):
    sums: Tensor  # [n, 3]: number of non-finite gradients, sum of g^2, sum of p^2
    squares: Tensor  # [n]: sum of g^2 after unit-wise clipping
    unit_factors: list[Tensor] | None


class _Plan(NamedTuple):
    """The coefficients of the update of every tensor."""

    skip: Tensor
    gradient: Tensor  # [n]: factors of the stored gradients
    unit_factors: list[Tensor] | None
    facts: Facts
    k: Coefficients


@dataclass
class OptimizerCall:
    """The arguments that all three ops share, in their order."""

    rule: int  # index in RULES
    params: list[Tensor]
    grads: list[Tensor]
    states: list[Tensor]
    masters: list[Tensor]
    averages: list[Tensor]
    lrs: list[Tensor]
    scalars: Tensor
    control: Tensor
    table: Tensor
    rows: Tensor
    scale: Tensor | None
    found_inf: Tensor | None

    def __post_init__(self) -> None:
        step, *self.groups = self.table.view(-1, WIDTH).tolist()
        self.option = StepOptions.of(step)
        self.measures = int(self.option.measures)
        columns = self.rows.view(-1, 4 + MAX_STATES).tolist()
        self.group = [row[0] for row in columns]
        self.column = [row[1] for row in columns]

        def chosen(tensors: list[Tensor], which: int) -> list[Tensor | None]:
            return [tensors[row[which]] if row[which] >= 0 else None for row in columns]

        states = [chosen(self.states, 2 + k) for k in range(MAX_STATES)]
        self.state = list(zip(*states))
        self.places = [row[2 : 2 + MAX_STATES] for row in columns]
        self.master = chosen(self.masters, 2 + MAX_STATES)
        self.average = chosen(self.averages, 3 + MAX_STATES)
        self.dtype = [torch.promote_types(p.dtype, torch.float32) for p in self.params]
        if len(self.grads) != len(self.params) or any(
            t is not None and t.shape != p.shape
            for p, *others in zip(self.params, self.grads, *states, self.master, self.average)
            for t in others
        ):
            raise RuntimeError("fusedtrain: all that belongs to a parameter must have its shape")

    def read_state(self, i: int, k: int) -> Tensor:
        """State k of tensor i, 0 if there is none."""
        state = self.state[i][k]
        if state is None:
            return torch.zeros((), dtype=self.dtype[i], device=self.scalars.device)
        if is_codes(state):
            state = dequantise(state, self.states[self.places[i][k] + 1])
        return state.to(self.dtype[i])

    def on_device(self, numbers: list[Any]) -> Tensor:
        dtype = torch.float64 if isinstance(numbers[0], float) else torch.int64
        return self.sent(torch.tensor(numbers, dtype=dtype, device="cpu"))

    def sent(self, host: Tensor) -> Tensor:
        """The numbers on the device. Pinning costs more than the copy: only for a CUDA graph."""
        host = pinned(host) if is_capturing() else host
        return host.to(self.scalars.device, non_blocking=True)

    def param(self, i: int) -> Tensor:
        master = self.master[i]
        if master is not None and is_correction(master):
            return join_weights(self.params[i], master)
        if master is not None and self.option.masters_follow and self.params[i].itemsize == 2:
            return follow(self.params[i], master)
        return (self.params[i] if master is None else master).to(self.dtype[i])

    def grad(self, i: int, unit_factors: list[Tensor] | None) -> Tensor:
        """The stored gradient, clipped unit by unit."""
        grad = self.grads[i].to(self.dtype[i])
        return grad if unit_factors is None else grad * unit_factors[i].to(grad.dtype)

    def unscale(self) -> Tensor:
        if self.scale is None:
            return torch.ones((), dtype=torch.float64, device=self.scalars.device)
        # Rounded to float32, as in torch's GradScaler.
        return self.scale.reshape(()).double().reciprocal().float().double()

    # --- the sweep over gradients

    def measure(self) -> _Measures:
        unscale = self.unscale()
        sums, clipped, factors = [], [], []
        for i, dtype in enumerate(self.dtype):
            grad = self.grad(i, None) * unscale.to(dtype)
            # A unit is an index of dimension 0: an output channel of a convolution, a neuron.
            over = list(range(1 if grad.dim() > 1 else 0, grad.dim()))
            squares = grad.double().square().sum(over, keepdim=True)
            weights = torch.zeros_like(squares)
            if self.measures & MEASURE_PARAMETERS:
                weights = self.param(i).double().square().sum(over, keepdim=True)
            factor = self.unit_factor(squares.sqrt(), weights.sqrt())
            bad = (grad - grad != 0).sum()
            sums.append(torch.stack([bad.double(), squares.sum(), weights.sum()]))
            clipped.append((squares * factor.square()).sum())
            factors.append(factor)
        if self.option.unit_factor == 0:
            return self.measured(torch.stack(sums))
        return _Measures(torch.stack(sums), torch.stack(clipped), factors)

    def unit_factor(self, grad_norm: Tensor, param_norm: Tensor) -> Tensor:
        """Adaptive clipping (arXiv 2102.06171), timm's constants."""
        most = param_norm.clamp(min=self.option.unit_eps) * self.option.unit_factor
        return torch.where(grad_norm < most, 1.0, most / grad_norm.clamp(min=1e-6))

    def measured(self, sums: Tensor | None) -> _Measures:
        """The measures from another call's sums, or without sums zeros."""
        if sums is None:
            shape, device = (len(self.params), 3), self.scalars.device
            sums = torch.zeros(shape, dtype=torch.float64, device=device)
        return _Measures(sums, sums[:, 1], None)

    # --- the scalar tail

    def norm(self, sums: Tensor) -> Tensor:
        return sums[:, 1].sum().sqrt()

    def clip(self, sums: Tensor) -> Tensor:
        norm, most = self.norm(sums), self.option.max_norm
        if most == 0:
            return torch.ones_like(norm)
        return (most / (norm + self.option.norm_eps)).clamp(max=1)

    def skip(self, sums: Tensor) -> Tensor:
        skip = torch.zeros((), dtype=torch.bool, device=self.scalars.device)
        if self.found_inf is not None:
            skip = ~(self.found_inf.reshape(()) == 0)
        if self.measures & MEASURE_FINITE:
            skip = skip | (sums[:, 0] != 0).any()
        return skip

    def plan(self, measures: _Measures) -> _Plan:
        table = self.sent(self.table.view(-1, WIDTH)[1:])
        column = GroupOptions.column
        indices = [int(row[column("lr_index")]) for row in self.groups]
        lrs = [
            table[g, column("lr")] if index < 0 else self.lrs[index].reshape(()).double()
            for g, index in enumerate(indices)
        ]
        group = self.on_device(self.group)
        options = table[group]
        scalars = self.scalars.view(SCALARS, -1)[:, self.on_device(self.column)]
        clip = self.clip(measures.sums)
        facts = Facts(
            lr=torch.stack(lrs)[group],
            weight_decay=options[:, column("weight_decay")],
            max_lr=options[:, column("max_lr")],
            cautious=options[:, column("cautious")],
            option=options[:, column("option") :],
            step=scalars[0].double() + 1,
            grad_norm=measures.squares.sqrt() * clip,
            param_norm=measures.sums[:, 2].sqrt(),
            moments=scalars[1:].t(),
        )
        return _Plan(
            skip=self.skip(measures.sums),
            gradient=self.unscale() * clip * options[:, column("sign")],
            unit_factors=measures.unit_factors,
            facts=facts,
            k=RULES[self.rule].prepare(facts),
        )

    def finished(self, plan: _Plan, sums: Tensor) -> _Plan:
        """The plan with the coefficients that depend on the trial update."""
        numel = self.on_device([float(p.numel()) for p in self.params])
        trial = Trial(sums[:, 0], sums[:, 1], sums[:, 2], numel)
        k, rule_finish = finish(plan.k, trial), RULES[self.rule].finish
        return plan._replace(k=k if rule_finish is None else rule_finish(plan.facts, k, trial))

    def commit(self, plan: _Plan, sums: Tensor) -> None:
        """Writes step counts and ``control``."""
        scalars, column = self.scalars.view(SCALARS, -1), self.on_device(self.column)
        old = scalars[:, column]
        new = torch.cat([old[:1] + 1, plan.k.moments.t()])
        scalars.index_copy_(1, column, torch.where(plan.skip, old, new))
        skipped, norm, clip, bad = plan.skip.double(), self.norm(sums), self.clip(sums), sums[:, 0]
        if self.measures == 0:
            norm, clip, bad = norm * torch.nan, torch.ones_like(clip), bad * 0
        before = Control.of(self.control)
        now = Control(
            skipped=skipped,
            skipped_steps=before.skipped_steps + skipped,
            grad_norm=norm,
            clip=clip,
            nonfinite=bad.sum(),
            applied_steps=before.applied_steps + (1 - skipped),
        )
        self.control[: len(now)].copy_(torch.stack(now))

    # --- the sweep over parameters

    def direction(self, i: int, plan: _Plan) -> Stepped:
        """The direction of tensor i, with 0 where it disagrees with the gradient's sign; the mask
        of agreement; the new states."""
        dtype = self.dtype[i]
        grad = self.grad(i, plan.unit_factors) * plan.gradient[i].to(dtype)
        c, states = (
            list(plan.k.c[i].to(dtype).unbind()),
            [self.read_state(i, k) for k in range(MAX_STATES)],
        )
        u, grad, states = RULES[self.rule].update(self.param(i), grad, states, c)
        agrees = u * grad > 0
        return torch.where((plan.k.cautious[i] == 0) | agrees, u, u * 0), agrees, states

    def trial(self, plan: _Plan) -> Tensor:
        sums = []
        for i in range(len(self.params)):
            u, agrees, _ = self.direction(i, plan)
            square, product = u.double().square(), u.double() * self.param(i).double()
            sums.append(torch.stack([agrees.sum().double(), square.sum(), product.sum()]))
        return torch.where(plan.skip, 0.0, torch.stack(sums))

    def update(self, i: int, plan: _Plan) -> None:
        dtype, k = self.dtype[i], plan.k

        def write(to: Tensor | None, values: Tensor) -> None:
            if to is not None:
                to.copy_(torch.where(plan.skip, to, values.to(to.dtype)))

        direction, _, states = self.direction(i, plan)
        param, grad = self.param(i), self.grad(i, plan.unit_factors)
        u, late_decay = direction * k.caution[i].to(dtype), k.late_decay[i].to(dtype)
        u = torch.where(late_decay != 0, u + late_decay * param, u)
        param = k.keep[i].to(dtype) * param - k.size[i].to(dtype) * u
        for which, new in enumerate(states):
            self.write_state(i, which, new, write)
        average, weight = self.average[i], self.option.average_weight
        if average is not None and weight != 0:
            old = average.to(dtype)
            write(average, old + weight * (param - old))
        self.write_weights(i, param, write)
        if self.option.write_back == 1:
            clipped = grad * plan.gradient[i].abs().to(dtype)
            unscaled = self.grad(i, None) * self.unscale().to(dtype)
            left = self.grads[i] if self.scale is None else unscaled.to(self.grads[i].dtype)
            self.grads[i].copy_(torch.where(plan.skip, left, clipped.to(left.dtype)))
        elif self.option.write_back == 2:
            self.grads[i].zero_()

    def key(self, i: int) -> Tensor:
        """The key of the random numbers of tensor i at this step."""
        seed = rounding.whole_seed(self.option.seed, self.option.seed_high)
        return rounding.random_key(seed, self.column[i], Control.of(self.control).applied_steps)

    def write_state(
        self, i: int, k: int, values: Tensor, write: Callable[[Tensor | None, Tensor], None]
    ) -> None:
        """Writes state k of parameter i, and the scales of codes, each by `write`."""
        state = self.state[i][k]
        if state is None or not is_codes(state):
            return write(state, values)
        indices = random_indices(state.numel(), k, state.device)
        random = rounding.random_bits(indices, self.key(i))
        dense = torch.empty_like(state, dtype=torch.float32).copy_(values)
        stored = state, self.states[self.places[i][k] + 1]
        for old, new in zip(stored, quantise(dense, state.dtype, random)):
            write(old, new.view_as(old))

    def write_weights(
        self, i: int, weights: Tensor, write: Callable[[Tensor | None, Tensor], None]
    ) -> None:
        """Writes parameter i and its master, each by `write`."""
        stored, master = self.params[i], self.master[i]
        splits = is_correction(master)
        key = None
        if self.option.stochastic and stored.dtype == torch.bfloat16 and (splits or master is None):
            key = self.key(i)
        if master is not None and splits:
            added: Tensor | int = NEAREST
            if key is not None:
                added = rounding.random_bits(rounding.memory_index(stored), key) >> 24
            param, correction = split_weights(weights, stored.dtype, master.dtype, added)
            write(stored, param)
            write(master, correction)
            return
        write(master, weights)
        if key is not None:
            weights = rounding.stochastic_bfloat16(weights, rounding.memory_index(stored), key)
        write(stored, weights)


@torch.no_grad()
def measure_gradients(*arguments: Any) -> Tensor:
    """The sums of every tensor, [n, 3] of float64: see _Measures.

    Args:
        arguments: the fields of OptimizerCall.
    """
    call = OptimizerCall(*arguments)
    return call.measure().sums if call.params else call.measured(None).sums


@torch.no_grad()
def try_update(*arguments: Any) -> Tensor:
    """Sums over a trial of the update, [n, 3] of float64; 0 if the step would be skipped.

    Args:
        arguments: the fields of OptimizerCall, and the sums of ``measure_gradients``.
    """
    call = OptimizerCall(*arguments[:-1])
    if not call.params:
        return call.measured(None).sums
    if call.option.unit_factor != 0:
        raise RuntimeError("fusedtrain: units are clipped by what their own call measures")
    return call.trial(call.plan(call.measured(arguments[-1])))


@torch.no_grad()
def optimizer_step(*arguments: Any) -> Tensor:
    """The step, in place; returns the sums of ``measure_gradients``.

    Args:
        arguments: the fields of OptimizerCall, then the sums of ``measure_gradients`` and those of
            ``try_update``; None: the step computes the sums itself.
    """
    call, sums, trial_sums = OptimizerCall(*arguments[:-2]), arguments[-2], arguments[-1]
    if sums is not None and call.option.unit_factor != 0:
        raise RuntimeError("fusedtrain: units are clipped by what their own call measures")
    if not call.params:
        return call.measured(sums).sums.clone()
    measures = call.measure() if sums is None and call.measures else call.measured(sums)
    plan = call.plan(measures)
    if call.option.trial != 0:
        plan = call.finished(plan, call.trial(plan) if trial_sums is None else trial_sums)
    for i in range(len(call.params)):
        call.update(i, plan)
    call.commit(plan, measures.sums)
    return measures.sums.clone()
