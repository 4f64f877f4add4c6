"""Programs that drive an optimizer of fusedtrain and its counterpart in the same way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import strategies as st

from fusedtrain import optim
from helpers import models
from helpers.optimizers import CLASSES, NAMES

from .optimizer_memory import coded, released, split
from .tensors import Pick

# Arguments that are not options of a group.
_MORE: dict[str, dict[str, list[float | None]]] = {
    "Adagrad": {"initial_accumulator_value": [0.0, 0.25]},
    "LAMB": {"max_grad_norm": [None, 1.0]},
}
# Optimizer -> its counterpart, and the arguments that are drawn, as a program has them.
COUNTERPARTS: dict[str, tuple[str, dict[str, list[str]]]] = {
    name: (
        CLASSES[name].theirs,
        {
            option: list(map(repr, values))
            for option, values in (CLASSES[name].values | _MORE.get(name, {})).items()
        },
    )
    for name in NAMES
}
_SHAPES = ("(3, 5)", "(7,)", "()", "(2, 0)", "(4, 3, 2, 2)", "(33,)", "(1,)")

_HEAD = """\
import copy, io, pickle
import torch, fusedtrain{timm}

def run(make, other, GradScaler):
    torch.manual_seed({seed})
    values = [
{params}
    ]
    params = [torch.nn.Parameter(value) for value in values]
    spare = torch.nn.Parameter(torch.randn(4, 2, dtype=torch.float64))
    optimizer = make({groups})
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def give(missing=(), scale=1.0):
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, dtype=torch.float64).to(p) * scale
            p.grad = None if i in missing else grad
{scaled}
"""
_SCALED = """
    def give_scaled(missing=()):
        scaler.scale(torch.ones(()))
        give(missing, scaler.get_scale())

    def step_scaled():
        scaler.step(optimizer)
        scaler.update()
"""
_TAIL = """\
    return [*params, spare]

def ours(params):
    return fusedtrain.optim.{ours}(params{arguments})

def theirs(params):
    return {theirs}(params{arguments})

want = run(theirs, theirs, torch.amp.GradScaler)
results = run(ours, {other}, {scaler})
for a, b in zip(results, want, strict=True):
    torch.testing.assert_close(a, b, rtol={limit}, atol={limit})
"""

# Operations on an optimizer, as lines; {k} is a number of a parameter.
_AGAIN = "([{{'params': g['params']}} for g in optimizer.param_groups])"
STEPS = {
    "step": "give(); optimizer.step()",
    "without a gradient": "give({{{k}}}); optimizer.step()",
    "without any": "give(range(9)); optimizer.step()",
    "closure": "def closure():\n    give()\n    return torch.tensor(1.0)\noptimizer.step(closure)",
    "zeros": "give(scale=0.0); optimizer.step()",
    "zero_grad": "give(); optimizer.zero_grad({none}); optimizer.step()",
    "new lr": "optimizer.param_groups[0]['lr'] *= 0.5",
    "tensor lr": "optimizer.param_groups[0]['lr'] = torch.tensor(0.02, dtype=torch.float64)",
    "new decay": "optimizer.param_groups[-1]['weight_decay'] = 0.05",
    "add group": "params.append(spare)\n"
    "optimizer.add_param_group({{'params': [spare], 'lr': 0.005}})",
    "round trip": "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
    "into a new one": f"old, optimizer = optimizer, make{_AGAIN}\n"
    "optimizer.load_state_dict(old.state_dict())",
    "into the other": f"old, optimizer = optimizer, other{_AGAIN}\n"
    "optimizer.load_state_dict(copy.deepcopy(old.state_dict()))",
    "from a file": "file = io.BytesIO(); torch.save(optimizer.state_dict(), file); file.seek(0)\n"
    "optimizer.load_state_dict(torch.load(file))",
    "deepcopy": "params, spare, optimizer = copy.deepcopy((params, spare, optimizer))",
    "pickle": "params, spare, optimizer = pickle.loads(pickle.dumps((params, spare, optimizer)))",
    "scaled step": "give_scaled(); step_scaled()",
    "scaled, missing": "give_scaled({{{k}}}); step_scaled()",
    "overflow": "give_scaled(); params[{k}].grad.fill_({bad}); step_scaled()",
    "unscale, clip": "give_scaled(); scaler.unscale_(optimizer)\n"
    "torch.nn.utils.clip_grad_norm_(params, 0.5); step_scaled()",
    "clip": "give(); torch.nn.utils.clip_grad_norm_(params, 0.5); optimizer.step()",
    "new memory": "for p in params:\n    p.data = p.data.clone()",
    "written": "with torch.no_grad():\n    params[{k}].mul_(0.5)",
    "turned": "for p in params:\n    p.data = p.data.mT.contiguous().mT if p.dim() > 1 else p.data",
    "scaler state": "scaler.load_state_dict(copy.deepcopy(scaler.state_dict()))",
    "frozen": "params[{k}].requires_grad_(False)\n"
    "give({{{k}}}); optimizer.step(); params[{k}].requires_grad_()",
}


@st.composite
def programs(draw: Callable[..., Any], name: str) -> str:
    pick = Pick(draw)
    theirs, options = COUNTERPARTS[name]
    if theirs.startswith("timm"):
        models.timm()  # it imports where torchvision is half installed, too
    chosen = {option: pick(*values) for option, values in options.items()}
    if chosen.get("nesterov") == "True":
        chosen |= {"momentum": "0.9", "dampening": "0.0"}
    lr = pick("0.01", "0.05")
    count = pick(2, 1, 3)
    shapes = [pick(*_SHAPES) for _ in range(count)]
    values = [f"torch.randn({s}, dtype=torch.float64){_memory(pick, s)}" for s in shapes]
    two = "[{'params': params[:1]}, {'params': params[1:], 'lr': 0.02}]"
    groups = pick("params", "iter(params)", *([two] if count > 1 else []))
    arguments = "".join(f", {k}={v}" for k, v in {"lr": lr, **chosen}.items())
    lines: list[str] = []
    steps = list(STEPS)
    added = scaled = False
    other = "ours"
    for _ in range(pick(2, 4, 7)):
        step = pick("step", "step", *steps)
        if step == "add group":
            if added:
                continue
            added = True
        if step == "into the other":
            other = "theirs"
        scaled = scaled or "_scaled" in STEPS[step]
        lines += STEPS[step].format(
            k=pick(*range(count)), none=pick("", "set_to_none=False"),
            bad=pick("torch.inf", "torch.nan"),
        ).split("\n")  # fmt: skip
    lines.append("give(); optimizer.step()")
    body = "\n".join(f"    {line}" for line in lines) + "\n"
    timm = "\nimport timm.optim" if theirs.startswith("timm") else ""
    scaler = pick("torch", *(["fusedtrain"] if scaled else [])) + ".amp.GradScaler"
    head = _HEAD.format(
        timm=timm, seed=pick(*range(20)), params="\n".join(f"        {v}," for v in values),
        groups=groups, scaled=_SCALED if scaled else "",
    )  # fmt: skip
    return head + body + _TAIL.format(
        ours=name, theirs=theirs, arguments=arguments, other=other, scaler=scaler,
        limit=1e-5 if name == "NovoGrad" else 1e-9,  # timm's second moments are float32
    )  # fmt: skip


def _memory(pick: Pick, shape: str) -> str:
    if shape == "(3, 5)":
        return str(pick("", ".t().contiguous().t()"))
    if shape == "(4, 3, 2, 2)":
        return str(pick("", ".contiguous(memory_format=torch.channels_last)"))
    return ""


_SCHEDULED = """\
import torch, fusedtrain

def run(optimizer_of, scheduler_of):
    torch.manual_seed({seed})
    p = torch.nn.Parameter(torch.randn(3, dtype=torch.float64))
    optimizer = optimizer_of([p])
    scheduler = scheduler_of(optimizer)
    for _ in range({steps}):
        p.grad = torch.randn(3, dtype=torch.float64)
        optimizer.step()
        scheduler.step()
    return p

def make(optimizer):
    return torch.optim.lr_scheduler.{scheduler}

want = run(lambda params: torch.optim.{name}(params, lr=0.125), make)
results = run(
    lambda params: fusedtrain.optim.{name}(params, lr=0.125),
    lambda optimizer: fusedtrain.optim.AppliedStepScheduler(optimizer, make),
)
torch.testing.assert_close(results, want, rtol=1e-6, atol=1e-6)  # rates are float32 on the device
"""


@st.composite
def scheduled(draw: Callable[..., Any]) -> str:
    pick = Pick(draw)
    return _SCHEDULED.format(
        seed=pick(*range(20)), steps=pick(3, 1, 6), name=pick("SGD", "AdamW"),
        scheduler=pick(
            "StepLR(optimizer, 1, 0.5)", "CosineAnnealingLR(optimizer, 4)",
            "OneCycleLR(optimizer, 0.5, 9, cycle_momentum=False)",
            "LinearLR(optimizer, 0.25, 1.0, 3)",
        ),
    )  # fmt: skip


_ZEROED = """\
import torch, fusedtrain

torch.manual_seed({seed})
params = [torch.nn.Parameter(torch.randn({shape}).to(torch.{dtype})) for _ in range(3)]
for p in params[: {count}]:
    p.grad = torch.randn(p.shape).to(p)
kept = [p.grad for p in params]
fusedtrain.optim.zero_grad({source}, set_to_none={none})
for p, grad in zip(params, kept, strict=True):
    assert p.grad is (None if {none} else grad)
    assert p.grad is None or not p.grad.any()
"""


@st.composite
def zeroed(draw: Callable[..., Any]) -> str:
    pick = Pick(draw)
    return _ZEROED.format(
        seed=pick(*range(20)), shape=pick("3, 4", "[]", "0", "33"), count=pick(3, 2, 0),
        dtype=pick("float32", "float64", "float16", "bfloat16"), none=pick(False, True),
        source=pick(
            "params", "iter(params)", "torch.optim.SGD(params)", "fusedtrain.optim.SGD(params)"
        ),
    )  # fmt: skip


PROGRAMS: dict[str, Callable[[], st.SearchStrategy[str]]] = {
    **{name: partial(programs, name) for name in COUNTERPARTS},
    "AppliedStepScheduler": scheduled,
    "float32_state_dict": lambda: st.one_of(split(), coded()),
    "release_gradients": released,
    "zero_grad": zeroed,
}
# The base class of all, and a type for annotations.
_MISSING = set(optim.__all__) - PROGRAMS.keys() - {"FusedOptimizer", "FusedOptions"}
assert not _MISSING, f"no programs call {_MISSING}"
