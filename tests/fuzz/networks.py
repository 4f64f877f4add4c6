"""Programs that train a network beside its converted, folded or tuned copy, in float64.

A network is a class whose forward is a list of drawn statements. All tensors have the shape
[N, 4, 6, 5], so that any statement may read any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import strategies as st

from .tensors import Pick

CHANNELS = 4
MODULES = {
    "act": (
        "nn.ReLU()", "nn.SiLU()", "nn.ReLU(inplace=True)", "nn.LeakyReLU(0.1)", "nn.SiLU(inplace=True)",
        "nn.GELU()", "nn.Hardswish()", "nn.ELU()", "nn.Sigmoid()", "nn.Mish()", "nn.PReLU()", "nn.Identity()",
        "nn.LeakyReLU(0.1, inplace=True)", "nn.Tanh()",
    ),
    "conv": (
        "nn.Conv2d(4, 4, 3, padding=1, bias=False)", "nn.Conv2d(4, 4, 1)", "nn.Conv2d(4, 4, 3, padding=1)",
        "nn.Conv2d(4, 4, 1, groups=2)", "nn.ConvTranspose2d(4, 4, 1)",
        "nn.Conv2d(4, 4, 3, padding=1, padding_mode='circular')",
    ),
    "norm": (
        "nn.BatchNorm2d(4)", "nn.BatchNorm2d(4, momentum=None)", "nn.BatchNorm2d(4, affine=False)",
        "nn.BatchNorm2d(4, track_running_stats=False)", "fusedtrain.nn.BatchNormAct2d(4)",
    ),
    "mix": (
        "nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())",
        "nn.MaxPool2d(3, 1, 1)",
        "nn.Sequential(nn.BatchNorm2d(4), nn.SiLU(inplace=True), nn.Conv2d(4, 4, 1))",
        "nn.Dropout(0.25)", "fusedtrain.nn.DropPath(0.25)", "nn.Dropout(0.0, inplace=True)",
        "nn.AvgPool2d(3, 1, 1)",
    ),
    "gate": (
        "nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1), nn.Sigmoid())",
        "nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 1), nn.Hardsigmoid())",
        "nn.Sequential(nn.Conv2d(4, 4, 1), nn.SiLU())",
    ),
}  # fmt: skip
ACTIVATED = (
    "torch.relu({a})", "N.silu({a})", "{a}.sigmoid()", "N.relu({a})", "N.relu({a}, inplace=True)",
    "{a}.relu()", "torch.tanh({a})", "N.leaky_relu({a}, 0.1)", "{a}.relu_()",
)  # fmt: skip
# Statements that write, of a tensor `a`, of another one `b` and of an activation in place.
WRITES = (
    "{a}.relu_()", "{a}.mul_(0.5)", "torch.relu_({a})", "N.relu({a}, inplace=True)", "self.{inplace}({a})",
    "{a} += 0.5", "{a}.add_({b})", "{a}[:, :2].mul_(0.5)", "{a}.flatten(1).mul_(0.5)", "{a}.detach().mul_(0.5)",
    "{a}.clamp_(-0.5, 0.5)", "{a}.data.mul_(0.5)", "{a}.copy_({b})", "nn.init.constant_({a}.detach()[:1], 0.5)",
    "torch.mul({a}, 0.5, out={a}.detach())", "{a}[0] = 0.25", "N.dropout({a}, 0.25, inplace=True)",
    "self.{container}({a})",
)  # fmt: skip


@dataclass
class Network:
    """A class under construction."""

    pick: Pick
    modules: dict[str, str] = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    more: list[str] = field(default_factory=list)  # of __init__, behind the modules

    def module(self, kind: str) -> str:
        """A new one, or now and then one that is there already."""
        there = [name for name in self.modules if name.startswith(kind)]
        if there and self.pick.chance(6):
            return str(self.pick(*there))
        name = f"{kind}{len(there)}"
        self.modules[name] = self.pick(*MODULES[kind])
        return name

    def named(self, name: str, source: str) -> str:
        self.modules.setdefault(name, source)
        return name

    def any(self) -> str:
        """A tensor; of late ones more often."""
        return str(self.pick(*self.tensors[::-1]))

    def new(self, expression: str) -> str:
        name = f"t{len(self.tensors) + 1}"
        self.statements.append(f"{name} = {expression}")
        self.tensors.append(name)
        return name

    def write(self, a: str) -> None:
        form = self.pick(*WRITES)
        inplace = container = ""
        if "{inplace}" in form:
            inplace = self.named("inplace", "nn.ReLU(inplace=True)")
        if "{container}" in form:
            container = self.named(
                "container", "nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))"
            )
        self.statements.append(form.format(a=a, b=self.any(), inplace=inplace, container=container))

    def statement(self) -> None:
        kind = self.pick(
            "norm",
            "residual",
            "residual",
            "residual",
            "act",
            "gate",
            "scale",
            "mix",
            "write",
            "sum",
            "buffer",
        )
        if kind == "norm":
            self.new(f"self.{self.module('norm')}(self.{self.module('conv')}({self.any()}))")
        elif kind == "residual":
            self.residual()
        elif kind == "act":
            a = self.any()
            if self.pick(True, False):
                self.new(f"self.{self.module('act')}({a})")
            else:
                self.new(self.pick(*ACTIVATED).format(a=a))
        elif kind == "gate":
            a, b = self.any(), self.any()
            self.new(
                self.pick(f"{a} * self.{self.module('gate')}({b})", f"{a} * torch.sigmoid({b})")
            )
        elif kind == "scale":
            a, b = self.any(), self.any()
            gamma = self.pick("gamma", "gamma[:, None, None]")
            form = (
                "nn.Parameter(torch.ones(4, 1, 1))"
                if gamma == "gamma"
                else "nn.Parameter(torch.ones(4))"
            )
            name = self.named("gamma" if gamma == "gamma" else "flat", form)
            self.new(f"{a} + {b} * self.{gamma.replace('gamma', name)}")
        elif kind == "mix":
            self.new(f"self.{self.module('mix')}({self.any()})")
        elif kind == "write":
            self.write(self.any())
        elif kind == "sum":
            self.new(
                self.pick("{a} + {b}", "torch.add({a}, {b})", "{a}.add_({b})", "{a} + {a}").format(
                    a=self.any(), b=self.any()
                )
            )
        else:
            norm = self.module("norm")
            if "track" in self.modules[norm]:
                return
            self.new(f"{self.any()} * self.{norm}.running_var[:, None, None].clone()")

    def residual(self) -> None:
        """A branch with a norm, and the sum with what it started from; anything may come between."""
        shortcut = self.new(f"self.{self.module('conv')}({self.any()})")
        branch = self.new(f"self.{self.module('norm')}(self.{self.module('conv')}({shortcut} * 1))")
        between = self.pick("nothing", "write", "write", "drop", "statement")
        if between == "write":
            self.write(self.pick(shortcut, shortcut, branch))
        elif between == "drop":
            branch = self.new(
                f"self.{self.named('drop', 'fusedtrain.nn.DropPath(0.25)')}({branch})"
            )
        elif between == "statement":
            self.statement()
        form = self.pick("{b} + {a}", "{a} + {b}", "{b}.add_({a})", "torch.add({b}, {a})")
        total = self.new(form.format(a=shortcut, b=branch))
        if self.pick(True, True, False):
            self.new(
                self.pick("torch.relu({a})", f"self.{self.module('act')}({{a}})").format(a=total)
            )

    def share(self) -> None:
        """Parameters and buffers that two modules have in common."""
        convs = [
            n
            for n, s in self.modules.items()
            if n.startswith("conv") and "groups" not in s and "Transpose" not in s
        ]
        same = [
            (a, b) for a in convs for b in convs if a < b and self.modules[a] == self.modules[b]
        ]
        norms = [n for n, s in self.modules.items() if s == "nn.BatchNorm2d(4)"]
        if same and self.pick.chance(4):
            a, b = self.pick(*same)
            shared = self.pick("weight", *([] if "bias=False" in self.modules[a] else ["bias"]))
            self.more.append(f"self.{b}.{shared} = self.{a}.{shared}")
        if len(norms) > 1 and self.pick.chance(6):
            shared = self.pick("weight", "bias", "running_mean")
            self.more.append(f"self.{norms[1]}.{shared} = self.{norms[0]}.{shared}")

    def hook(self) -> str:
        """A line that hooks one of the modules, or nothing."""
        names = list(self.modules)
        modules = [n for n in names if "Parameter" not in self.modules[n]]
        if not modules or not self.pick.chance(6):
            return ""
        form = self.pick(
            "register_forward_hook(lambda m, args, out: out * 1.5)",
            "register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))",
            "register_full_backward_hook(lambda m, grads, outs: (grads[0] * 0.5,))",
        )
        return f"net.{self.pick(*modules)}.{form}\n"

    def source(self) -> str:
        lines = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        self.{name} = {made}" for name, made in self.modules.items()]
        lines += [f"        {line}" for line in self.more]
        lines += ["", "    def forward(self, x):"]
        lines += [f"        {statement}" for statement in self.statements]
        return "\n".join([*lines, f"        return {self.tensors[-1]}"])


_PROGRAM = """\
import copy
import fusedtrain
import torch
import torch.nn.functional as N
from torch import nn

{net}

torch.manual_seed({seed})
net = Net().double(){mode}
for t in net.state_dict().values():
    if t.is_floating_point():
        nn.init.uniform_(t, 0.1, 0.6) if t.dim() == 1 else nn.init.uniform_(t, -0.4, 0.5)
{hook}inputs = [torch.randn(3, 4, 6, 5, dtype=torch.float64) for _ in range(20)]

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    seen = []
    for seed, x in enumerate(inputs):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        y = model(x.clone())
        (y * y.detach().sin()).mean().backward()
        grads = [0 * p if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        seen.append([y.detach().clone(), *grads, *(b.clone() for b in model.buffers())])
    return seen

twin = copy.deepcopy(net)
{first}want = train(net)
{found}
for step, (a, b) in enumerate(zip(found, want, strict=True)):
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7, msg=lambda m: f"step {{step}}: {{m}}")
"""
# torch raises where a converted model modifies what backward needs; convert's docstring says so.
_FOUND = """\
try:
    {convert}
    found = train(twin)
except RuntimeError as error:
    found = want if "inplace operation" in str(error) else [error]"""
_FOLDED = """\
import copy
import fusedtrain
import torch
import torch.nn.functional as N
from torch import nn

{net}

torch.manual_seed({seed})
net = Net().double()
for t in net.state_dict().values():
    if t.is_floating_point():
        nn.init.uniform_(t, 0.1, 0.6) if t.dim() == 1 else nn.init.uniform_(t, -0.4, 0.5)
{hook}net.eval()
x = torch.randn(3, 4, 6, 5, dtype=torch.float64)
state = copy.deepcopy(net.state_dict())
with torch.no_grad():
    want = net(x.clone())
    folded, _ = fusedtrain.fold_conv_bn(net{example})
    found = folded(x.clone())
torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
torch.testing.assert_close(net.state_dict(), state, rtol=0, atol=0)
"""


def _network(pick: Pick) -> Network:
    network = Network(pick)
    network.new(f"self.{network.module('conv')}(x)")
    for _ in range(pick(1, 2, 3, 4)):
        network.statement()
    network.share()
    return network


def _program(
    network: Network, found: str, mode: str = "", first: str = "", bits: bool = False
) -> str:
    pick = network.pick
    source = _PROGRAM.format(
        net=network.source(), seed=pick(*range(20)), mode=mode, hook=network.hook(), first=first,
        found=found,
    )  # fmt: skip
    return source.replace("rtol=1e-7, atol=1e-7", "rtol=0, atol=0") if bits else source


@st.composite
def converted(draw: Callable[..., Any], memory: str, example: bool) -> str:
    pick = Pick(draw)
    network = _network(pick)
    norms = [name for name in network.modules if name.startswith("norm")]
    mode = "".join(f"\nnet.{name}.eval()" for name in norms if pick.chance(5))
    arguments = ["twin"] + ["inputs[0].clone()"] * example
    arguments += [f"memory={memory!r}"] * (memory != "store")
    call = f"fusedtrain.convert({', '.join(arguments)})"
    return _program(network, _FOUND.format(convert=call), mode)


@st.composite
def store_and_recompute(draw: Callable[..., Any]) -> str:
    """Not a bit may differ."""
    first = "fusedtrain.convert(net)\nfusedtrain.convert(twin, memory='recompute')\n"
    return _program(_network(Pick(draw)), "found = train(twin)", "", first, bits=True)


@st.composite
def folded(draw: Callable[..., Any]) -> str:
    pick = Pick(draw)
    network = _network(pick)
    example = pick("", ", x.clone()", ", fuse_activation=False")
    return _FOLDED.format(
        net=network.source(), seed=pick(*range(20)), hook=network.hook(), example=example
    )


@st.composite
def tuned(draw: Callable[..., Any]) -> str:
    pick = Pick(draw)
    network = _network(pick)
    frozen = [n for n in network.modules if n.startswith("norm") and pick(True, True, False)]
    mode = "".join(f"\nnet.{name}.eval()" for name in frozen)
    return _program(network, "fusedtrain.tune_mode(twin)\nfound = train(twin)", mode)


@st.composite
def without_bias(draw: Callable[..., Any]) -> str:
    """Parameters and running means differ by the biases; outputs do not, and revert undoes it."""
    network = _network(Pick(draw))
    found = "fusedtrain.drop_redundant_bias(twin{})\nfound = train(twin)".format(
        network.pick("", ", example_inputs=inputs[0].clone()")
    )
    source = _program(network, found)
    return source.replace(", *grads, *(b.clone() for b in model.buffers())]", "]")


@st.composite
def reverted(draw: Callable[..., Any]) -> str:
    """Converted and back: the same bits, names and classes."""
    pick = Pick(draw)
    network = _network(pick)
    call = pick(
        "convert(twin)", "convert(twin)", "convert(twin, memory='recompute')", "tune_mode(twin)"
    )
    first = f"fusedtrain.{call}\nfusedtrain.revert(twin)\n"
    first += (
        "assert str(twin) == str(net) and twin.state_dict().keys() == net.state_dict().keys()\n"
    )
    return _program(network, "found = train(twin)", "", first, bits=True)


PROGRAMS: dict[str, Callable[[], st.SearchStrategy[str]]] = {
    "convert": partial(converted, "store", False),
    "convert with example": partial(converted, "store", True),
    "convert recompute": partial(converted, "recompute", False),
    "convert inplace": partial(converted, "inplace", False),
    "store and recompute": store_and_recompute,
    "fold_conv_bn": folded,
    "tune_mode": tuned,
    "drop_redundant_bias": without_bias,
    "revert": reverted,
}
