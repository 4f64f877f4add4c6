"""Runs of an optimizer: what hypothesis draws, and each step beside the truth."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from _models import timm
from _optimizer_truth import Step, excess, true_step
from hypothesis import strategies as st
from torch import Tensor

import fusedtrain.compat.optimizers
import fusedtrain.optim
from fusedtrain.amp import GradScaler
from fusedtrain.optim import FusedOptimizer

# Options of a group, by optimizer: the values that may be drawn.
_L2 = {"weight_decay": [0.0, 0.1]}
_BETAS = {"betas": [(0.9, 0.99), (0.6, 0.95), (0.0, 0.5)]}
_EPS = {"eps": [1e-8, 1e-2]}
_SGD = {"momentum": [0.9, 0.5, 0.0], "dampening": [0.0, 0.3], "nesterov": [False, True], **_L2}
_CAUTION = {"caution": [False, True], "corrected_weight_decay": [False, True]}
_CORRECTION = {"bias_correction": [True, False]}
_ASCENT = {"maximize": [False, True]}
_ADAM = {**_BETAS, **_EPS, **_L2, "amsgrad": [False, True], **_ASCENT}
_SQUARES = {"alpha": [0.9, 0.5], **_EPS, **_L2, "momentum": [0.9, 0.0], "centered": [False, True]}
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "SGD": {**_SGD, **_ASCENT},
    "SGDW": {**_SGD, **_CAUTION, **_ASCENT},
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "NAdamW": {**_BETAS, **_EPS, **_L2, **_CAUTION, **_ASCENT},
    "Lion": {**_BETAS, **_L2, **_CAUTION, **_ASCENT},
    "RMSprop": {**_SQUARES, **_ASCENT},
    "RMSpropTF": {
        **_SQUARES, **_CAUTION, "decoupled_decay": [False, True], "lr_in_momentum": [True, False],
    },
    "Adagrad": {"lr_decay": [0.0, 0.5], **_EPS, **_L2, **_ASCENT},
    "LARS": {
        **_SGD, "trust_coeff": [0.02, 0.5], "eps": [1e-8, 0.1], "trust_clip": [False, True],
        "always_adapt": [False, True],
    },
    "LAMB": {
        **_BETAS, **_EPS, **_L2, **_CAUTION, "bias_correction": [True, False],
        "grad_averaging": [True, False], "trust_clip": [False, True],
        "always_adapt": [False, True], "decoupled_decay": [False, True],
    },
    "NovoGrad": {
        **_BETAS, **_EPS, **_L2, "grad_averaging": [False, True], "amsgrad": [False, True],
    },
    "FusedAdam": {**_BETAS, **_EPS, **_L2, **_CORRECTION},
    "FusedSGD": _SGD,
    "FusedLAMB": {**_BETAS, **_EPS, **_L2, **_CORRECTION, "grad_averaging": [True, False]},
    "FusedAdagrad": {**_EPS, **_L2},
    "FusedNovoGrad": {
        **_BETAS, **_EPS, **_L2, **_CORRECTION, "grad_averaging": [True, False],
        "init_zero": [False, True],
    },
}  # fmt: skip
# What Apex's optimizers have as options of the whole optimizer.
SWITCHES: dict[str, tuple[str, ...]] = {
    "FusedAdam": ("adam_w_mode",),
    "FusedSGD": ("wd_after_momentum",),
    "FusedLAMB": ("adam_w_mode", "use_nvlamb"),
    "FusedAdagrad": ("adagrad_w_mode",),
    "FusedNovoGrad": ("reg_inside_moment",),
}
APEX = list(SWITCHES)
NAMES = [name for name in OPTIONS if name not in APEX]
LAMBS, NOVOGRADS = ("LAMB", "FusedLAMB"), ("NovoGrad", "FusedNovoGrad")
SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"}

# The last cross a block (1024) or a chunk (16384) of the kernels, some in the middle of a unit.
SHAPES = [
    (7, 9), (4, 3, 5, 2), (5,), (), (1, 6, 1, 4), (1,), (0,), (2, 0, 3), (3, 2, 2, 3, 2),
    (8, 1), (1027,), (33, 34), (16389,), (3, 6000), (4, 3, 37, 40),
]  # fmt: skip
SMALL = SHAPES[:10]
DTYPES = [  # of parameter and gradient
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16), (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16), (torch.float64, torch.float32),
]  # fmt: skip


def _strided(t: Tensor, memory: Tensor) -> Tensor:
    return memory.copy_(t)


# The same values, in memory of another kind.
ARRANGEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: (
        t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t.contiguous()
    ),
    "transposed": lambda t: _strided(
        t, t.new_empty(t.shape[::-1]).permute(tuple(range(t.dim()))[::-1])
    ),
    "sliced": lambda t: _strided(t, t.new_empty(*t.shape, 2)[..., 1]),
    "offset": lambda t: _strided(t, t.new_empty(t.numel() + 3)[3:].view(t.shape)),
}


def values(generator: torch.Generator, shape: tuple[int, ...], size: float) -> Tensor:
    """Of both signs, from size / 2 to 2 size: sums of two cancel by a factor, not altogether."""
    random = torch.rand(shape, generator=generator, dtype=torch.float64)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return sign * size * 2 ** (2 * random - 1)


@dataclass
class One:
    """A parameter of a run."""

    shape: tuple[int, ...]
    arrangement: str
    grad_arrangement: str
    dtypes: tuple[torch.dtype, torch.dtype]
    group: int
    size: float  # of gradients


@dataclass
class Iteration:
    """A step: which parameters have gradients, what is wrong with them, what comes before."""

    missing: set[int] = field(default_factory=set)
    bad: dict[int, float] = field(default_factory=dict)  # values put in, by parameter
    event: str = "none"
    unscale_first: bool = False


@dataclass
class Run:
    """All that decides over some steps of an optimizer."""

    name: str
    ones: list[One]
    groups: list[dict[str, Any]]
    fused: dict[str, Any]
    iterations: list[Iteration]
    scaler: dict[str, Any] | None = None
    zeros: bool = False  # some gradients are 0
    seed: int = 0


EVENTS = ["none"] * 6 + ["reload", "new memory", "new state", "new state dict", "new lr"]


@st.composite
def runs(draw: Callable[..., Any], name: str) -> Run:
    def pick(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    groups = []
    for _ in range(pick(1, 2, 3)):
        group = {option: pick(*some) for option, some in OPTIONS[name].items()}
        if "nesterov" in group and (group["momentum"] == 0 or group["dampening"] != 0):
            group["nesterov"] = False
        group["lr"] = pick(0.01, 0.05, 0.003)
        groups.append(group)
    count = pick(2, 3, 5)
    large = draw(st.booleans())
    ones = [
        One(
            draw(st.sampled_from(SHAPES if large and i == 0 else SMALL)),
            draw(st.sampled_from(list(ARRANGEMENTS))),
            draw(st.sampled_from(list(ARRANGEMENTS))),
            draw(st.sampled_from(DTYPES)),
            i % len(groups),
            pick(1.0, 1e-3, 8.0),
        )
        for i in range(count)
    ]
    clipping = pick("no", "no", "norm", "agc")
    fused: dict[str, Any] = {
        "ema_decay": pick(None, 0.9, 0.25),
        "gradient_writeback": pick("none", "unscaled", "zero"),
        "state_dtype": pick(None, None, torch.float32, torch.bfloat16),
        "master_weights": pick(False, True),
    }
    fused |= {switch: pick(False, True) for switch in SWITCHES.get(name, ())}
    if clipping == "norm" or (name in LAMBS and clipping == "no"):
        fused["max_grad_norm"] = pick(0.5, 3.0, 1e6) if clipping == "norm" else None
    if clipping == "agc":
        fused.update(agc=pick(0.05, 0.5), agc_eps=pick(1e-3, 1.0))
        if name in LAMBS:
            fused["max_grad_norm"] = None
    scaler = None
    if draw(st.booleans()):
        scaler = {
            "init_scale": pick(96.0, 0.7, 512.0), "growth_interval": pick(1, 2),
            "growth_factor": 2.0, "backoff_factor": 0.25, "hysteresis": pick(1, 2),
            "max_scale": pick(None, 600.0),
        }  # fmt: skip
    iterations = []
    for _ in range(4):
        bad: dict[int, float] = {}
        if scaler and pick(False, False, True):
            bad = {i: pick(float("inf"), float("nan"), -float("inf")) for i in range(pick(1, 2))}
        iterations.append(
            Iteration(
                {i for i in range(count) if pick(False, False, False, True)},
                bad, pick(*EVENTS), scaler is not None and pick(False, False, False, True),
            )
        )  # fmt: skip
    return Run(
        name, ones, groups, fused, iterations, scaler, draw(st.booleans()), draw(st.integers(0, 99))
    )


def build(run: Run, params: list[Tensor]) -> FusedOptimizer:
    groups = [
        {**group, "params": [p for p, one in zip(params, run.ones) if one.group == number]}
        for number, group in enumerate(run.groups)
    ]
    extra: dict[str, Any] = {"initial_accumulator_value": 0.25} if run.name == "Adagrad" else {}
    if run.name == "FusedAdam":
        extra["capturable"] = run.fused.get("master_weights", False)
    module = fusedtrain.compat.optimizers if run.name in APEX else fusedtrain.optim
    optimizer = getattr(module, run.name)(
        [g for g in groups if g["params"]], lr=0.02, **extra, **run.fused
    )
    assert isinstance(optimizer, FusedOptimizer)
    return optimizer


def happen(event: str, optimizer: FusedOptimizer, params: list[Tensor]) -> None:
    """What users do between steps, that a cached plan must notice."""
    if event == "reload":
        before = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(copy.deepcopy(before))
        for number, own in before["state"].items():
            for name, value in own.items():
                again = optimizer.state[params_in_order(optimizer)[number]][name]
                assert torch.equal(again, value)
                # Adagrad's are of the parameter's dtype until the first step.
                assert again.dtype == value.dtype or own.get("step") == 0
    elif event == "new memory":
        for p in params:
            p.data = p.data.clone()
    elif event == "new state":
        for own in optimizer.state.values():
            for name, value in own.items():
                if value.dim() and name != "step":
                    own[name] = value * 0.5 if name != "master_param" else value.clone()
    elif event == "new state dict":
        for p in list(optimizer.state):
            optimizer.state[p] = {k: v.clone() for k, v in optimizer.state[p].items()}
    elif event == "new lr":
        for number, group in enumerate(optimizer.param_groups):
            lr = float(group["lr"]) * 0.5
            group["lr"] = torch.tensor(lr) if number == 0 else lr


def params_in_order(optimizer: FusedOptimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Checked:
    """A run, step by step beside the truth."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.generator = torch.Generator().manual_seed(run.seed)
        self.params: list[Tensor] = []
        for one in run.ones:
            start = values(self.generator, one.shape, 1.0).to(one.dtypes[0])
            p = torch.nn.Parameter(ARRANGEMENTS[one.arrangement](start))
            p.grad_dtype = one.dtypes[1]
            self.params.append(p)
        self.optimizer = build(run, self.params)
        self.group = {id(p): g for g in self.optimizer.param_groups for p in g["params"]}
        self.steps = dict.fromkeys(map(id, self.params), 0)
        self.scaler = GradScaler("cpu", **run.scaler) if run.scaler else None
        self.applied = self.skipped = 0

    def all(self) -> None:
        for iteration in self.run.iterations:
            happen(iteration.event, self.optimizer, self.params)
            if iteration.event == "reload":
                self.group = {id(p): g for g in self.optimizer.param_groups for p in g["params"]}
            self.give_gradients(iteration)
            if any(p.grad is not None for p in self.params):
                self.step(iteration)

    def give_gradients(self, iteration: Iteration) -> None:
        scale = self.scaler.get_scale() if self.scaler else 1.0
        for number, (one, p) in enumerate(zip(self.run.ones, self.params)):
            p.grad = None
            if number in iteration.missing:
                continue
            grad = values(self.generator, one.shape, one.size * scale)
            if self.run.zeros and grad.dim():
                grad[::3] = 0
            if number in iteration.bad and grad.numel():
                grad.view(-1)[grad.numel() // 2] = iteration.bad[number]
            p.grad = ARRANGEMENTS[one.grad_arrangement](grad.to(one.dtypes[1]))

    def true_gradients(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Unscaled, and clipped as well, by the id of the parameter."""
        inverse = 1.0
        if self.scaler and not self.unscaled:
            assert self.scaler._scale is not None
            inverse = self.scaler._scale.double().reciprocal().float().item()
        grads = {
            id(p): p.grad.double().contiguous() * inverse for p in self.params if p.grad is not None
        }
        clipped = {}
        options = self.run.fused
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        self.norm = norm
        most = options.get("max_grad_norm", 1.0 if self.run.name in LAMBS else None)
        for p in self.params:
            if id(p) not in grads:
                continue
            start = self.optimizer.state.get(p, {}).get("master_param", p).detach().double()
            like = torch.nn.Parameter(start.contiguous())
            like.grad = grads[id(p)].clone()
            if options.get("agc"):
                agc = importlib.import_module(timm().__name__ + ".utils.agc").adaptive_clip_grad
                agc(like, options["agc"], eps=options["agc_eps"])
            elif most is not None:
                eps = 0.0 if self.run.name in LAMBS else 1e-6
                like.grad *= (most / (norm + eps)).clamp(max=1)
            clipped[id(p)] = like.grad
        return grads, clipped

    def step(self, iteration: Iteration) -> None:
        optimizer, scaler = self.optimizer, self.scaler
        self.unscaled = bool(scaler) and iteration.unscale_first
        if scaler:
            scaler.scale(torch.zeros(()))  # makes the scale
        if self.unscaled:
            assert scaler is not None
            scaler.unscale_(optimizer)
        grads, clipped = self.true_gradients()
        skip = bool(scaler) and not all(g.isfinite().all() for g in grads.values())
        before = {id(p): snapshot(optimizer, p) for p in self.params}
        given = {id(p): p.grad.clone() for p in self.params if p.grad is not None}
        truths = {
            id(p): true_step(
                optimizer, self.group[id(p)], p, clipped[id(p)], self.steps[id(p)]
            )
            for p in self.params
            if p.grad is not None and not skip
        }  # fmt: skip
        if scaler is None:
            optimizer.step()
        else:
            expected_scale = self.next_scale(skip)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == expected_scale
        self.applied += not skip
        self.skipped += skip
        assert bool(optimizer.last_step_skipped) == skip
        assert int(optimizer.applied_steps) == self.applied
        assert int(optimizer.skipped_steps) == self.skipped
        if optimizer.grad_norm is not None and not skip and self.norm != 0:
            assert abs(optimizer.grad_norm.item() / self.norm.item() - 1) < 1e-6
        if optimizer.nonfinite_gradients() and scaler and not self.unscaled:
            for p, number in optimizer.nonfinite_gradients():
                assert number == (~grads[id(p)].float().isfinite()).sum()
        for p in self.params:
            self.steps[id(p)] += p.grad is not None and not skip
            if p.grad is not None:
                expected = grads[id(p)] if skip else clipped[id(p)]
                self.compare_gradient(p, given[id(p)], expected)
            if id(p) in truths:
                self.compare(p, truths[id(p)], before[id(p)])
            else:
                self.unchanged(p, before[id(p)], not skip)

    def next_scale(self, skip: bool) -> float:
        """By the rules of torch's GradScaler, with hysteresis and a bound."""
        own, options = self.__dict__, self.run.scaler
        assert self.scaler is not None
        assert options is not None
        scale = self.scaler.get_scale()
        left = own.setdefault("left", options["hysteresis"])
        good = own.setdefault("good", 0)
        if skip:
            own["good"], own["left"] = 0, max(left - 1, 0)
            scale *= options["backoff_factor"] if own["left"] == 0 else 1
        else:
            own["good"], own["left"] = good + 1, options["hysteresis"]
            if own["good"] == options["growth_interval"]:
                scale *= options["growth_factor"]
                own["good"] = 0
        scale = torch.tensor(scale, dtype=torch.float32).item()
        return min(scale, options["max_scale"] or float("inf"))

    @property
    def rough(self) -> float:
        """Error of float64 parameters from numbers that are measured or kept in float32."""
        clips = "max_grad_norm" in self.run.fused or self.run.name in (*LAMBS, *NOVOGRADS)
        return 4 * torch.finfo(torch.float32).eps if clips else 0.0

    def near(self, *arguments: Any, what: str, **more: Any) -> None:
        worst = excess(*arguments, **more)
        assert worst <= 1, f"{what}: error {worst:.3g} times what is allowed"

    def compare(self, p: Tensor, truth: Step, before: dict[str, Tensor]) -> None:
        own = self.optimizer.state[p]
        single = self.run.name in NOVOGRADS
        rough = self.rough
        exact = before.get("master_param", before["param"])
        new = own.get("master_param", p).detach().clone()
        expected = torch.where(truth.open, new.double(), truth.param)
        self.near(new, expected, exact, rough, what="parameter")
        if "master_param" in own:
            assert torch.equal(p.detach(), new.to(p.dtype))
        if "step" in own:
            assert own["step"] == self.steps[id(p)]
        decay = self.group[id(p)]["weight_decay"]  # its part cancels with the gradient's
        for name, value in truth.states.items():
            old = before.get(name, torch.zeros_like(value))
            if self.steps[id(p)] == 1 and name == "square_avg" and self.run.name == "RMSpropTF":
                old = torch.ones_like(value)
            scalar = value.dim() == 0 and p.dim() != 0
            dtype = torch.float32 if scalar or (single and name != "exp_avg") else None
            mine = own[name]
            if dtype is None:
                usual = p.dtype
                if self.run.name == "FusedAdam":
                    usual = torch.promote_types(p.dtype, torch.float32)
                assert mine.dtype == (self.run.fused["state_dtype"] or usual)
            parts = decay * (exact.abs() if value.dim() else exact.norm())
            parts = parts**2 if name in SQUARES else parts
            self.near(mine, value.view_as(mine), old, rough, what=name, dtype=dtype, parts=parts)
        if "ema" in own:
            decay = self.run.fused["ema_decay"]
            old = before.get("ema", before["param"])
            average = old + (1 - decay) * (expected - old)
            # of a parameter that is itself rounded
            rough = 2 * rough + (0 if p.dtype == torch.float64 else 1e-6)
            self.near(own["ema"], average, old, rough, what="ema")
        else:
            assert self.run.fused["ema_decay"] is None

    def unchanged(self, p: Tensor, before: dict[str, Tensor], applied: bool) -> None:
        now = snapshot(self.optimizer, p)
        for name, old in before.items():
            if name == "ema" and applied:
                decay = self.run.fused["ema_decay"]
                average = old + (1 - decay) * (before["param"] - old)
                self.near(self.optimizer.state[p]["ema"], average, old, what="ema")
            else:
                assert torch.equal(now[name], old), name

    def compare_gradient(self, p: Tensor, given: Tensor, expected: Tensor) -> None:
        assert p.grad is not None
        kind = self.run.fused["gradient_writeback"]
        if kind == "zero":
            assert torch.count_nonzero(p.grad) == 0
        elif kind == "none":
            assert torch.equal(p.grad.nan_to_num(7), given.nan_to_num(7))
        else:
            finite = expected.isfinite()
            assert not p.grad[~finite].isfinite().any()
            left, expected = p.grad[finite], expected[finite]
            self.near(left, expected, torch.zeros_like(expected), self.rough, what="gradient")


def snapshot(optimizer: FusedOptimizer, p: Tensor) -> dict[str, Tensor]:
    states = optimizer.state.get(p, {})
    return {k: v.detach().double().clone() for k, v in {"param": p, **states}.items()}


def simple(name: str, options: dict[str, Any], fused: dict[str, Any], **more: Any) -> Run:
    """Three steps of two parameters in one group, all options on unless given."""
    group = {option: some[-1] for option, some in OPTIONS[name].items()}
    group.update({"lr": 0.05, "nesterov": False} if "nesterov" in group else {"lr": 0.05})
    single = (torch.float32, torch.float32)
    ones = [
        One((4, 3, 5, 2), "contiguous", "channels_last", single, 0, 1.0),
        One((1027,), "contiguous", "contiguous", single, 0, 1.0),
    ]
    fused = {"ema_decay": None, "gradient_writeback": "none", "state_dtype": None, **fused}
    iterations = more.pop("iterations", [Iteration() for _ in range(3)])
    return Run(name, ones, [{**group, **options}], fused, iterations, **more)
