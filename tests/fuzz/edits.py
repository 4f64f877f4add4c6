"""Programs that edit a stock model and its converted copy alike: a caller's own way to call a part,
hooks, other children, flags, patches. All that is seen from outside agrees after every edit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from hypothesis import strategies as st
from torch import nn

from . import zoo
from .tensors import Pick

_BLOCKS = (
    "Unit", "Basic", "Nested", "Gate", "Glu", "Dropped", "Calls", "Asking", "Deployed", "Switching",
    "Reading", "Moved",
)  # fmt: skip
_ACTS = ("nn.ReLU()", "nn.SiLU()", "nn.SiLU(inplace=True)", "nn.ReLU(inplace=True)", "nn.Sigmoid()",
         "nn.GELU()", "nn.Hardswish()", "nn.LeakyReLU(0.1)")  # fmt: skip
_HOOKS = (
    "forward", "forward_pre", "full_backward", "full_backward_pre", "forward with_kwargs",
    "forward_pre with_kwargs", "forward always_call", "forward prepend", "forward_pre prepend",
)  # fmt: skip
_EFFECTS = ("", "", "", "changes", "raises")
_MADE = (
    "copy", "same class", "wrapped", "wrapped and more", "nn.Identity()", "nn.ReLU()", "nn.SiLU()",
    "nn.BatchNorm2d(4)", "zoo.Other()", "nn.Conv2d(4, 4, 1)", "zoo.OtherSiLU()", "zoo.OtherNorm(4)",
    "nn.Dropout(0.5)", "nn.Tanh()", "nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())",
)  # fmt: skip
# Lines that change a module, by its class.
_LINES: dict[str, tuple[str, ...]] = {
    "BatchNorm2d": (
        "m.momentum = 0.5", "m.eps = 0.1", "m.momentum = None", "m.track_running_stats = False",
        "m.running_mean = None; m.running_var = None", "m.weight.data.mul_(0.5)", "m.weight = None",
        "m.bias = None", "m.weight.requires_grad_(False)", "m.reset_running_stats()", "m.eval()",
        "m.weight = nn.Parameter(m.weight.detach() * 0.5)", "m.__class__ = zoo.OtherNorm",
        "m.running_mean = m.running_mean * 0.5", "m.num_batches_tracked = None",
    ),
    "SiLU": ("m.inplace = not m.inplace", "m.__class__ = zoo.OtherSiLU", "m.__class__ = nn.ReLU"),
    "ReLU": ("m.inplace = not m.inplace", "m.__class__ = nn.Tanh"),
    "LeakyReLU": ("m.negative_slope = 0.5", "m.inplace = True"),
    "GELU": ("m.approximate = 'tanh'",),
    "DropPath": ("m.drop_prob = 0.0", "m.drop_prob = 0.9", "m.scale_by_keep = False", "m.eval()"),
    "Sequential": (
        "m.append(nn.Tanh())", "m.insert(0, nn.Tanh())", "m.pop(-1)", "m[0] = nn.Identity()",
        "m._modules = dict(reversed(m._modules.items()))", "m.eval()", "del m[-1]",
        "m.extend([nn.Tanh()])", "m.add_module('1', nn.Tanh())",
        "m.register_module('more', nn.Tanh())",
    ),
    "ModuleList": ("m.append(nn.Tanh())", "m[1] = nn.Tanh()", "del m[1]", "m.insert(0, nn.ReLU())"),
    "Unit": ("m.fuse()", "m.act = None", "m.forward = m.forward_fuse", "m.act = nn.Identity()"),
    "Basic": ("m.downsample = None", "m.downsample = nn.Tanh()", "m.bn2 = m.bn1",
    "m.conv2 = m.conv1"),
    "Nested": ("m.body = m.body[:1]", "m.body[-1] = nn.Tanh()", "m.body.append(nn.Tanh())"),
    "Gate": ("m.gate = nn.Hardsigmoid()", "m.gate = m.act", "m.pool = nn.Identity()"),
    "Glu": ("m.act = nn.Tanh()", "m.up = m.gate", "m.act = m.gate"),
    "Dropped": ("m.gamma = nn.Parameter(m.gamma.detach() * 0.5)", "m.gamma = None", "m.drop = None",
                "m.gamma.data.fill_(0.5)", "m.gamma = nn.Parameter(torch.ones(()).double())",
                "del m.gamma; m.gamma = torch.ones(4, 1, 1).double()",
                "del m.gamma; m.gamma = 0.5", "m.drop = nn.Identity()",
                "m.register_parameter('gamma', None)"),
    "Calls": ("m.slope = 0.5", "m.slope = 0", "del m.slope", "m.norm = m.bn",
              "m.slope = torch.tensor(0.5)"),
    "Asking": (
        "del m.bn", "m.bn = None", "m.scale = 0.5", "m.scale = None", "m.deploy = True",
        "m.wide = True",
        "m.extra = nn.Tanh()", "m.extra = None", "m.weights[0] = 0.5", "m.weights = (0.5, 0.5)",
        "m.options.scale = 0.25", "m.options.sizes['b'][0] = 0.25", "m.options = zoo.Options()",
        "m.plain['bias'] = 0.5", "m.plain = {'bias': 1}", "m.mode = 'difference'",
        "m.names = ('one',)",
        "m.conv = nn.Sequential(m.conv)", "m.parts = m.parts[:1]", "m.parts = [m.parts[0]]",
        "m.scale = nn.Parameter(torch.ones(4, 1, 1).double())", "m.mixed = lambda x: x * 0.25",
        "m.half = 3", "m.register_buffer('scale', torch.ones(1).double())", "m.weights.append(3)",
    ),
    "Deployed": ("m.switch_to_deploy()", "m.reparam = m.dense", "m.dense = m.one", "m.norm = None"),
    "Moved": ("m.short.insert(0, nn.ReLU(inplace=True))", "m.body.insert(0, nn.Dropout(0.5))",
              "m.short.append(nn.Dropout(0.5))", "m.short = m.body",
              "m.short[1] = nn.Dropout(0.5)"),
    "Reading": ("zoo.SETTINGS['gain'] = 0.5", "zoo.SIZES[0] = 0.5"),
    "Switching": ("m.rate = 0.25", "m.training = not m.training", "m.bn.eval()"),
}  # fmt: skip
# Things that both models share: owner, name, value.
_PATCHES = (
    ("zoo", "BOOSTED", "True"), ("zoo", "FACTOR", "0.25"), ("zoo", "boost", "lambda x: x * 3"),
    ("zoo.Asking", "wide", "True"), ("zoo.Asking", "names", "('one', 'two', 'three')"),
    ("zoo.Asking", "mixed", "lambda self, x: x * 0.5"), ("zoo.Asking", "half", "0.5"),
    ("zoo.Asking", "scale", "0.5"), ("zoo.Asking", "deploy", "True"),
    ("zoo", "SETTINGS", "{'gain': 0.5}"), ("zoo", "OPTIONS", "zoo.Options(0.5)"),
    ("zoo", "Defaults", "zoo.Options(0.5)"), ("zoo.Defaults", "scale", "0.5"), ("zoo", "silu",
    "torch.tanh"),
    ("zoo.OPTIONS", "scale", "0.5"), ("zoo", "sigmoid", "torch.tanh"),
    ("zoo", "boost", "lambda x: x * 4"), ("zoo", "SIZES", "[0.5, 0.5]"),
    ("nn.Sequential", "forward", "lambda self, x: x * 0.5"),
    *((f"zoo.{name}", "forward", "lambda self, x: self.act(x) * 0.5") for name in _BLOCKS),
    ("zoo.Unit", "__call__", "lambda self, x: self.act(x) * 0.5"),
)  # fmt: skip
_CALLS = (
    "whole", "whole", "whole", "part", "forward_of", "of_class", "without_gradient",
    "functional, 0.5",
    "checkpointed, True", "checkpointed, False", "in_segments, 2", "traced", "one_by_one",
    "replica",
    *(f"odd, {kind!r}" for kind in
      ("flat", "narrow", "single", "none", "channels_last", "float", "no gradient")),
)  # fmt: skip


@lru_cache(1024)
def _parts(source: str) -> dict[str, str]:
    """Path and class of each module."""
    model = eval(source, {"nn": nn, "zoo": zoo})
    return {name: type(module).__name__ for name, module in model.named_modules()}


class _Program:
    def __init__(self, pick: Pick, compiles: bool) -> None:
        self.pick, self.compiles = pick, compiles
        blocks = [self._block() for _ in range(pick(1, 1, 2, 3))]
        self.model = blocks[0] if len(blocks) == 1 else f"nn.Sequential({', '.join(blocks)})"
        self.parts = _parts(self.model)
        self.below = [path for path in self.parts if path]
        self.lines: list[str] = []

    def _block(self) -> str:
        act = self.pick(*_ACTS)
        kind = self.pick("chain", *_BLOCKS)
        if kind == "chain":
            return f"zoo.chain({act}{self.pick('', ', 3, 4')})"
        more = ""
        if kind == "Basic" and self.pick(True, False):
            more = ", nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))"
        if kind == "Nested" and self.pick(True, False):
            more = ", True"
        return f"zoo.{kind}({act}{more})"

    def any(self, root: bool = True) -> str:
        return str(self.pick(*(self.parts if root else self.below)))

    def edit(self, name: str, *args: Any) -> None:
        self.lines.append(f"pair.edit(changes.{', '.join([name, *map(repr, args)])})")

    def change(self) -> None:
        pick = self.pick
        kinds = ["line"] * 5 + ["hook"] * 4 + ["replace"] * 3 + [
            "unhook", "hook_all", "delete", "share", "swap", "cut", "regroup", "move", "deepcopied",
            "shallow", "cloned", "pickled", "reloaded", "rebind", "reparametrised", "folded",
            "patch", "patch", "convert", "revert", "mode",
        ]  # fmt: skip
        if self.compiles:
            kinds += ["compiled"] * 6
        kind = pick(*kinds)
        if kind == "line":
            path = pick(*(p for p, cls in self.parts.items() if cls in _LINES))
            self.edit("run", path, pick(*_LINES[self.parts[path]]))
        elif kind == "hook":
            self.edit(kind, self.any(), pick(*_HOOKS), pick(*_EFFECTS))
        elif kind == "hook_all":
            base = ("forward", "forward_pre", "full_backward", "full_backward_pre")
            self.edit(kind, pick(*base), pick(*_EFFECTS))
        elif kind == "replace":
            self.edit(kind, self.any(root=False), pick(*_MADE))
        elif kind == "delete":
            above, _, name = self.any(root=False).rpartition(".")
            self.edit(kind, above, name)
        elif kind in ("share", "swap"):
            self.edit(kind, self.any(root=False), self.any(root=False))
        elif kind == "cut":
            self.edit(kind, pick(0, 0, 1), pick(2, 1, -1))
        elif kind == "regroup":
            self.edit(kind, pick(-1, 2, -2, 10))
        elif kind == "move":
            self.edit(kind, self.any())
        elif kind == "rebind":
            self.edit(kind, self.any(), pick("same", "around", "own", "function"))
        elif kind == "compiled":
            self.edit(kind, self.any(root=False), pick("method", "wrapper"))
        elif kind == "reparametrised":
            ways = (
                "parametrize",
                "weight_norm",
                "old weight_norm",
                "spectral_norm",
                "prune",
                "unprune",
            )
            weighty = [p for p, cls in self.parts.items() if cls in ("Conv2d", "BatchNorm2d")]
            self.edit(kind, pick(*weighty), pick(*ways))
        elif kind == "folded":
            norms = [p for p, cls in self.parts.items() if cls == "BatchNorm2d"]
            convs = [p for p, cls in self.parts.items() if cls == "Conv2d"]
            if norms:
                self.edit(kind, pick(*convs), pick(*norms))
        elif kind == "patch":
            owner, name, value = pick(*_PATCHES)
            self.lines.append(f"pair.patch({owner}, {name!r}, {value})")
        elif kind in ("convert", "revert"):
            self.lines.append(f"pair.{kind}()")
        elif kind == "mode":
            line = pick("m.eval()", "m.train()", "m.requires_grad_(False)")
            self.edit("run", self.any(), line)
        else:
            self.edit(kind)

    def call(self) -> None:
        name, *rest = self.pick(*_CALLS).split(", ")
        if name in ("part", "forward_of", "of_class"):
            rest = [repr(self.any())]
        self.lines.append(f"pair.call(changes.{', '.join([name, *rest])})")

    def source(self, memory: str) -> str:
        for _ in range(self.pick(1, 2, 2, 3, 4)):
            self.change()
            self.call()
        training = self.pick(True, True, False)
        made = f"lambda: {self.model}, {memory!r}, {training}"
        lines = [
            "import torch", "from torch import nn", "from fuzz import changes, zoo",
            "from fuzz.pairs import Pair", "", f"with Pair({made}) as pair:",
        ]  # fmt: skip
        return "\n".join([*lines, *(f"    {line}" for line in self.lines), ""])


@st.composite
def edited(draw: Callable[..., Any], memory: str, compiles: bool = False) -> str:
    return _Program(Pick(draw), compiles).source(memory)


PROGRAMS: dict[str, Callable[[], st.SearchStrategy[str]]] = {
    "edits": partial(edited, "store"),
    "edits recompute": partial(edited, "recompute"),
    "edits inplace": partial(edited, "inplace"),
    "edits compiled": partial(edited, "store", True),
}
