"""Runs of an optimizer: what they are made of, those that hypothesis draws, and some by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings, strategies as st
from torch import Tensor

from fusedtrain.optim import FusedOptimizer
from helpers.optimizers import CLASSES, ours

LAMBS = ("LAMB", "FusedLAMB")  # clip by max_grad_norm unless told otherwise

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
    """Numbers of both signs, size / 2 to 2 size: sums of two cancel by a factor, not altogether."""
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


# A failing run is printed whole: Checked(Run(...)).all() repeats it. Shrinking it takes minutes.
REPEATABLE = settings(
    derandomize=True, database=None, deadline=None, report_multiple_bugs=False,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip

EXAMPLES = pytest.mark.parametrize("examples", [25, pytest.param(150, marks=pytest.mark.long)])
SCALER = {
    "init_scale": 96.0, "growth_interval": 2, "growth_factor": 2.0, "backoff_factor": 0.25,
    "hysteresis": 2, "max_scale": 600.0,
}  # fmt: skip
# Runs that hypothesis should not have to find anew each time.
SPECIAL = {
    "skips at first, two in a row, then a reload": [
        Iteration(bad={0: float("nan")}), Iteration(bad={1: float("inf")}), Iteration(),
        Iteration(bad={0: -float("inf")}, event="reload"), Iteration(), Iteration(),
    ],
    "a skip, then a reload": [
        Iteration(bad={0: float("nan")}), Iteration(event="reload"), Iteration(),
    ],
    "new memory, states and dictionaries": [
        Iteration(), Iteration(event="new memory"), Iteration(event="new state"),
        Iteration(event="new state dict"), Iteration(event="new lr"),
    ],
    "gradients that come and go": [
        Iteration(), Iteration(missing={0}), Iteration(missing={0, 1}), Iteration(missing={1}),
        Iteration(),
    ],
}  # fmt: skip


EVENTS = ["none"] * 6 + ["reload", "new memory", "new state", "new state dict", "new lr"]


@st.composite
def runs(draw: Callable[..., Any], name: str) -> Run:
    def pick(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    groups = []
    for _ in range(pick(1, 2, 3)):
        group = {option: pick(*some) for option, some in CLASSES[name].values.items()}
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
    fused |= {switch: pick(False, True) for switch in CLASSES[name].switches}
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
    return ours(run.name, [g for g in groups if g["params"]], {"lr": 0.02, **extra, **run.fused})


def happen(event: str, optimizer: FusedOptimizer, params: list[Tensor]) -> None:
    """Does as users do between steps. A cached plan must notice."""
    if event == "reload":
        before = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(copy.deepcopy(before))
        for number, state in before["state"].items():
            for name, value in state.items():
                again = optimizer.state[params_in_order(optimizer)[number]][name]
                assert torch.equal(again, value)
                # Adagrad's states have the parameter's dtype until the first step.
                assert again.dtype == value.dtype or state.get("step") == 0
    elif event == "new memory":
        for p in params:
            p.data = p.data.clone()
    elif event == "new state":
        for state in optimizer.state.values():
            for name, value in state.items():
                if value is not None and value.dim() and name != "step":
                    state[name] = value * 0.5 if name != "master_param" else value.clone()
    elif event == "new state dict":
        for p in list(optimizer.state):
            kept = {k: v for k, v in optimizer.state[p].items() if v is not None}
            optimizer.state[p] = {k: v.clone() for k, v in kept.items()}
    elif event == "new lr":
        for number, group in enumerate(optimizer.param_groups):
            lr = float(group["lr"]) * 0.5
            group["lr"] = torch.tensor(lr) if number == 0 else lr


def params_in_order(optimizer: FusedOptimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def simple(name: str, options: dict[str, Any], fused: dict[str, Any], **more: Any) -> Run:
    """Three steps of two parameters in one group, all options on unless given."""
    group = {option: some[-1] for option, some in CLASSES[name].values.items()}
    group.update({"lr": 0.05, "nesterov": False} if "nesterov" in group else {"lr": 0.05})
    single = (torch.float32, torch.float32)
    ones = [
        One((4, 3, 5, 2), "contiguous", "channels_last", single, 0, 1.0),
        One((1027,), "contiguous", "contiguous", single, 0, 1.0),
    ]
    fused = {"ema_decay": None, "gradient_writeback": "none", "state_dtype": None, **fused}
    iterations = more.pop("iterations", [Iteration() for _ in range(3)])
    return Run(name, ones, [{**group, **options}], fused, iterations, **more)
