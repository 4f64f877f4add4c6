"""The switches, as a table: values, when they apply, the lines of code that they are.

A trial runs the lines that the recipe shows: see `_recipe.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# name of a switch -> name of its value; "batch" -> a number
Config = dict[str, Any]

BATCH = "batch"
EPS = {"fp32": 2.0**-23, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}


@dataclass(frozen=True)
class Conditions:
    """Facts that decide which switches apply.

    Args:
        device: "cpu" or "cuda".
        capability: of the GPU.
        convolutions: the model has two-dimensional convolutions, and images for input.
        loader: the user has given a loader.
        compile: trials with torch.compile are wanted.
        cores: CPUs that a loader may use.
    """

    device: str = "cpu"
    capability: tuple[int, int] = (0, 0)
    convolutions: bool = False
    loader: bool = False
    compile: bool = False
    cores: int = 1

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


def _always(facts: Conditions) -> bool:
    return True


def _cuda(facts: Conditions) -> bool:
    return facts.cuda


@dataclass(frozen=True)
class Value:
    """A value of a switch.

    Args:
        name: of the value.
        code: place in the recipe -> its text there (`_recipe.py` has the places).
        applies: whether the value makes sense.
    """

    name: str
    code: Mapping[str, str] = field(default_factory=dict)
    applies: Callable[[Conditions], bool] = _always


@dataclass(frozen=True)
class Switch:
    """A switch; the first value is that of a plain script in torch."""

    name: str
    values: Sequence[Value]

    def others(self, facts: Conditions) -> list[Value]:
        """The values that may be tried instead of the first one."""
        return [value for value in self.values[1:] if value.applies(facts)]


_EXACT = (
    'torch.backends.cuda.matmul.fp32_precision = "ieee"\n'
    'torch.backends.cudnn.conv.fp32_precision = "ieee"'
)
SWITCHES = (
    Switch("precision", (
        Value("fp32", {"settings, cuda": _EXACT}),
        Value("tf32", {"settings": _EXACT.replace("ieee", "tf32")},
              lambda facts: facts.cuda and facts.capability >= (8, 0)),
        Value("bf16", {"context": "torch.autocast(device.type, dtype=torch.bfloat16)"},
              lambda facts: not facts.cuda or facts.capability >= (8, 0)),
        Value("fp16", {"context": "torch.autocast(device.type, dtype=torch.float16)",
                       "scaler": "torch.amp.GradScaler(device.type)"}, _cuda),
    )),
    Switch("cudnn autotune", (
        Value("off"),
        Value("on", {"settings": "torch.backends.cudnn.benchmark = True"}, _cuda),
    )),
    Switch("channels_last", (
        Value("off"),
        Value("on", {"model": "model = model.to(memory_format=torch.channels_last)",
                     "inputs": "memory_format=torch.channels_last"},
              lambda facts: facts.convolutions),
    )),
    Switch("fusedtrain", (
        Value("off"),
        Value("convert", {"convert": ""}),
        Value("convert + plan", {"convert": "memory=plan",
                                 "plan": "plan = fusedtrain.plan_memory(model, example, 0.8)"}),
        Value("convert + recompute", {"convert": 'memory="recompute"'}),
    )),
    Switch("optimizer", (
        Value("torch"),
        Value("torch, fused=True", {"optimizer": "torch.optim", "options": "fused=True"}),
        Value("fusedtrain", {"optimizer": "fusedtrain.optim"}),
    )),
    Switch("torch.compile", (
        Value("off"),
        Value("on", {"compile": "model = torch.compile(model)"}, lambda facts: facts.compile),
    )),
    Switch("workers", (
        Value("0"),
        *(Value(str(n), {"workers": str(n)},
                lambda facts, n=n: facts.loader and n <= facts.cores)  # type: ignore[misc]
          for n in (1, 2, 4, 8)),
    )),
    Switch("pin_memory", (
        Value("off"),
        Value("on", {"pin_memory": "True"}, lambda facts: facts.loader and facts.cuda),
    )),
)  # fmt: skip
NAMES = (*(switch.name for switch in SWITCHES), BATCH)


def plain(batch: int) -> Config:
    """All switches at their first value: the plain script."""
    return {**{switch.name: switch.values[0].name for switch in SWITCHES}, BATCH: batch}


def code_of(config: Config, device: str) -> dict[str, list[str]]:
    """Place in the recipe -> the texts that the values of the configuration have there."""
    texts: dict[str, list[str]] = {}
    for switch in SWITCHES:
        value = next(v for v in switch.values if v.name == config[switch.name])
        for place, text in value.code.items():
            name, _, only = place.partition(", ")
            if not only or only == device:
                texts.setdefault(name, []).append(text)
    return texts


def difference(config: Config, base: Config) -> str:
    """The switches in which the first differs from the second, in words."""
    parts = [f"{name} {value}" for name, value in config.items() if base[name] != value]
    return ", ".join(parts) or "plain"
