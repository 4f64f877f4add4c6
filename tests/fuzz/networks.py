"""The source of a network: a class whose forward is a list of drawn statements.

All tensors have the shape [N, 4, 6, 5], so that any statement may read any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .tensors import Pick

_POOLED = "nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1), "
MODULES = {
    "act": (
        "nn.ReLU()", "nn.SiLU()", "nn.ReLU(inplace=True)", "nn.LeakyReLU(0.1)",
        "nn.SiLU(inplace=True)", "nn.GELU()", "nn.Hardswish()", "nn.ELU()", "nn.Sigmoid()",
        "nn.Mish()", "nn.PReLU()", "nn.Identity()", "nn.LeakyReLU(0.1, inplace=True)", "nn.Tanh()",
    ),
    "conv": (
        "nn.Conv2d(4, 4, 3, padding=1, bias=False)", "nn.Conv2d(4, 4, 1)",
        "nn.Conv2d(4, 4, 3, padding=1)", "nn.Conv2d(4, 4, 1, groups=2)",
        "nn.ConvTranspose2d(4, 4, 1)", "nn.Conv2d(4, 4, 3, padding=1, padding_mode='circular')",
        "nn.Conv2d(4, 4, 5, padding=2, groups=4)",
    ),
    "norm": (
        "nn.BatchNorm2d(4)", "nn.BatchNorm2d(4, momentum=None)", "nn.BatchNorm2d(4, affine=False)",
        "nn.BatchNorm2d(4, track_running_stats=False)", "fusedtrain.nn.BatchNormAct2d(4)",
        "nn.GroupNorm(2, 4)", "nn.InstanceNorm2d(4, affine=True)", "nn.InstanceNorm2d(4)",
    ),
    "mix": (
        "nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())", "nn.MaxPool2d(3, 1, 1)",
        "nn.Sequential(nn.BatchNorm2d(4), nn.SiLU(inplace=True), nn.Conv2d(4, 4, 1))",
        "nn.Dropout(0.25)", "fusedtrain.nn.DropPath(0.25)", "nn.Dropout(0.0, inplace=True)",
        "nn.AvgPool2d(3, 1, 1)", "nn.GroupNorm(2, 4)", "nn.LayerNorm([6, 5])", "nn.Linear(5, 5)",
    ),
    "gate": (
        _POOLED + "nn.Sigmoid())", _POOLED + "nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Hardsigmoid())",
        "nn.Sequential(nn.Conv2d(4, 4, 1), nn.SiLU())",
    ),
}  # fmt: skip
ACTIVATED = (
    "torch.relu({a})", "N.silu({a})", "{a}.sigmoid()", "N.relu({a})", "N.relu({a}, inplace=True)",
    "{a}.relu()", "torch.tanh({a})", "N.leaky_relu({a}, 0.1)", "{a}.relu_()",
)  # fmt: skip
# Statements that write over a tensor `a`; `b` is another one.
WRITES = (
    "{a}.relu_()", "{a}.mul_(0.5)", "torch.relu_({a})", "N.relu({a}, inplace=True)",
    "self.{inplace}({a})", "{a} += 0.5", "{a}.add_({b})", "{a}[:, :2].mul_(0.5)",
    "{a}.flatten(1).mul_(0.5)", "{a}.detach().mul_(0.5)", "{a}.clamp_(-0.5, 0.5)",
    "{a}.data.mul_(0.5)", "{a}.copy_({b})", "nn.init.constant_({a}.detach()[:1], 0.5)",
    "torch.mul({a}, 0.5, out={a}.detach())", "{a}[0] = 0.25", "self.{container}({a})",
    "N.dropout({a}, 0.25, self.training, inplace=True)",
)  # fmt: skip
SUMS = ("{b} + {a}", "{a} + {b}", "{b}.add_({a})", "torch.add({b}, {a})")
# Functions of torch alone, which `convert` leaves and a memory plan can recompute.
MIXTURES = (
    "torch.cat([{a}[:, :2], {b}[:, 2:]], 1)", "N.avg_pool2d({a}, 3, 1, 1)", "{a} ** 2",
    "N.scaled_dot_product_attention({a}, {b}, {b})", "{a} @ ({b}.mT @ {b}).softmax(-1)",
    "torch.where({a} > 0, {a}, {b})", "N.dropout({a}, 0.25, self.training)",
    "N.layer_norm({a}, (5,))", "{a}.mT.reshape({a}.shape)", "N.max_pool2d({a}, 3, 1, 1)",
    "{a}.view_as({b}) * 0.5", "{a} - {b}.mean(1, True)",
)  # fmt: skip
HOOKS = (
    "register_forward_hook(lambda m, args, out: out * 1.5)",
    "register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))",
    "register_full_backward_hook(lambda m, grads, outs: (grads[0] * 0.5,))",
)


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
        if "{inplace}" in form:
            self.modules.setdefault("inplace", "nn.ReLU(inplace=True)")
        if "{container}" in form:
            both = "nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))"
            self.modules.setdefault("container", both)
        form = form.format(a=a, b=self.any(), inplace="inplace", container="container")
        self.statements.append(form)

    def statement(self) -> None:
        """Any; a sum with the output of a norm more often than the others."""
        kinds = ("norm", "residual", "residual", "residual", "act", "gate", "scale", "mix", "write",
                 "sum", "torch", "buffer")  # fmt: skip
        a, b, kind = self.any(), self.any(), self.pick(*kinds)
        if kind == "norm":
            self.new(f"self.{self.module('norm')}(self.{self.module('conv')}({a}))")
        elif kind == "residual":
            self.residual(a)
        elif kind == "act":
            form = self.pick("", *ACTIVATED)
            self.new(form.format(a=a) if form else f"self.{self.module('act')}({a})")
        elif kind == "gate":
            form = self.pick("self.{gate}({b})", "torch.sigmoid({b})")
            gate = self.module("gate") if "gate" in form else ""
            self.new(f"{a} * " + form.format(gate=gate, b=b))
        elif kind == "scale":
            flat = self.pick(False, True)
            made = "nn.Parameter(torch.ones(4))" if flat else "nn.Parameter(torch.ones(4, 1, 1))"
            self.modules.setdefault("flat" if flat else "gamma", made)
            self.new(f"{a} + {b} * self." + ("flat[:, None, None]" if flat else "gamma"))
        elif kind == "mix":
            self.new(f"self.{self.module('mix')}({a})")
        elif kind == "write":
            self.write(a)
        elif kind == "sum":
            self.new(self.pick(*SUMS, "{a} + {a}").format(a=a, b=b))
        elif kind == "torch":
            self.new(self.pick(*MIXTURES).format(a=a, b=b))
        else:
            norm = self.module("norm")
            if "BatchNorm" in self.modules[norm] and "track" not in self.modules[norm]:
                self.new(f"{a} * self.{norm}.running_var[:, None, None].tanh()")

    def residual(self, a: str) -> None:
        """A branch with a norm, and the sum with its start; anything may come between."""
        shortcut = self.new(f"self.{self.module('conv')}({a})")
        branch = self.new(f"self.{self.module('norm')}(self.{self.module('conv')}({shortcut} * 1))")
        between = self.pick("nothing", "write", "write", "drop", "statement")
        if between == "write":
            self.write(self.pick(shortcut, shortcut, branch))
        elif between == "drop":
            self.modules.setdefault("drop", "fusedtrain.nn.DropPath(0.25)")
            branch = self.new(f"self.drop({branch})")
        elif between == "statement":
            self.statement()
        total = self.new(self.pick(*SUMS).format(a=shortcut, b=branch))
        after = self.pick("torch.relu({a})", "self.{act}({a})", "")
        if after:
            self.new(after.format(a=total, act=self.module("act") if "act" in after else ""))

    def share(self) -> None:
        """Now and then parameters or buffers that two modules have in common."""
        by_source: dict[str, list[str]] = {}
        for name, made in self.modules.items():
            if made.startswith(("nn.Conv2d", "nn.BatchNorm2d(4)")):
                by_source.setdefault(made, []).append(name)
        for made, names in by_source.items():
            if len(names) < 2 or not self.pick.chance(4):
                continue
            kinds = ["weight"] if "bias=False" in made else ["weight", "bias"]
            shared = self.pick(*kinds, *(["running_mean"] if "BatchNorm" in made else []))
            self.more.append(f"self.{names[1]}.{shared} = self.{names[0]}.{shared}")

    def hook(self) -> str:
        """Now and then a line that hooks one of the modules."""
        modules = [name for name, made in self.modules.items() if "Parameter" not in made]
        if not self.pick.chance(6):
            return ""
        return f"net.{self.pick(*modules)}.{self.pick(*HOOKS)}\n"

    def source(self) -> str:
        lines = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        self.{name} = {made}" for name, made in self.modules.items()]
        lines += [f"        {line}" for line in self.more]
        lines += ["", "    def forward(self, x):"]
        lines += [f"        {statement}" for statement in self.statements]
        return "\n".join([*lines, f"        return {self.tensors[-1]}"])


def drawn(pick: Pick) -> Network:
    """A network of some statements behind a convolution."""
    network = Network(pick)
    network.new(f"self.{network.module('conv')}(x)")
    for _ in range(pick(1, 2, 3, 4)):
        network.statement()
    network.share()
    return network
