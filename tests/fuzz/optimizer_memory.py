"""Programs of optimizers that save memory: split masters, 8-bit states, gradient release.

Each is compared with fusedtrain's optimizer without the option.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from helpers.optimizers import NAMES

from .tensors import Pick

# Steps of an optimizer, of which one may be skipped, and which may be saved and loaded after one.
_RUN = """\
import copy
import torch, fusedtrain

def run(saved={saved}, lr={lr}, **options):
    torch.manual_seed({seed})
    model = torch.nn.Module()
    model.p = torch.nn.Parameter((torch.randn({shape}) * {size}).to(torch.{dtype}){layout})
    model.q = torch.nn.Parameter(torch.randn(5))
    optimizer = fusedtrain.optim.{name}(model.parameters(), lr=lr, **options)
    for step in range({steps}):
        for p in model.parameters():
            p.grad = torch.randn(p.shape).to(p) * {gradients}
        if step == {bad}:
            model.p.grad.fill_(torch.inf)
            scaler = fusedtrain.amp.GradScaler("cpu", init_scale=2.0)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
        else:
            optimizer.step()
        if step == saved:
            random = torch.get_rng_state()
            state = copy.deepcopy(optimizer.state_dict(compressed={compressed}))
            optimizer = fusedtrain.optim.{name}(model.parameters(), lr=lr, **options)
            optimizer.load_state_dict(state)
            torch.set_rng_state(random)
    weights = fusedtrain.optim.float32_state_dict(model, optimizer)
    assert {{value.dtype for value in weights.values()}} == {{torch.float32}}
    assert torch.equal(weights["q"], model.q) or options.get("state_dtype") == "q8"
    return weights

"""
_SPLIT = (
    _RUN
    + """\
split, want = run(master_weights="{kind}"), run(master_weights=True)
for name in want:
    torch.testing.assert_close(split[name], want[name], rtol={limit}, atol={limit} * {size})
"""
)
# Four times what seven roundings add: a bfloat16 weight of 24 bits has a significand of 16, a
# float16 weight one of 19, each rounding half a unit. With 32 bits only kernels of other widths
# differ.
_LIMITS = {
    ("bfloat16", "split32"): 1e-6, ("bfloat16", "split24"): 2**-12,
    ("float16", "split32"): 1e-6, ("float16", "split24"): 2**-15,
}  # fmt: skip


@st.composite
def split(draw: Callable[..., Any]) -> str:
    pick = Pick(draw)
    dtype, kind = pick(*_LIMITS)
    return _SPLIT.format(
        seed=pick(*range(20)), shape=pick("3, 4", "[]", "0", "33", "5, 2, 2, 3"), dtype=dtype,
        kind=kind, size=pick(1.0, 0.125, 8.0), name=pick("SGD", "AdamW", "Lion", "RMSprop"),
        lr=pick(0.0, 0.001, 0.05), steps=pick(3, 1, 6), bad=pick(-1, 0, 2), saved=pick(-1, 0, 1),
        compressed=pick(False, True), limit=_LIMITS[dtype, kind], layout="", gradients=1.0,
    )  # fmt: skip


_CODED = (
    _RUN
    + """\
options = dict({options})
whole, resumed = run(-1, state_dtype="q8", **options), run({saved}, state_dtype="q8", **options)
wide = run(-1, state_dtype=torch.float32, **options)
for name in whole:
    assert torch.equal(whole[name], resumed[name]), name
    assert whole[name].isfinite().all()
# A root far below its neighbours' is rounded by much of itself: a mean over all elements.
start = run(-1, lr=0.0, weight_decay=0.0, state_dtype=torch.float32, **options)["p"]
moved = (wide["p"] - start).abs().mean()
assert (whole["p"] - wide["p"]).abs().mean() < 0.1 * moved, moved
"""
)
_RATES = (("SGDW", 0.1), ("AdamW", 0.01), ("RMSprop", 0.01), ("NovoGrad", 0.01))


@st.composite
def coded(draw: Callable[..., Any]) -> str:
    """8-bit states: a run that is saved and loaded is the whole run, bit for bit."""
    pick = Pick(draw)
    shape = pick("4096", "64, 70", "8, 16, 6, 6", "5003", "20, 33, 7")
    layout = pick("", ".contiguous(memory_format=torch.channels_last)") if "6, 6" in shape else ""
    name, lr = pick(*_RATES)
    return _CODED.format(
        seed=pick(*range(20)), shape=shape, dtype=pick("float32", "bfloat16", "float16"),
        layout=layout, name=name, lr=lr, size=1.0, gradients=pick(1.0, 1e-3), steps=5, bad=-1,
        compressed=pick(False, True), saved=pick(0, 2, 3),
        options=("momentum=0.9, " if name in ("SGDW", "RMSprop") else "")
        + pick("", 'master_weights="split24"', "master_weights=True, ema_decay=0.9"),
    )  # fmt: skip


_RELEASED = """\
import copy
import torch, fusedtrain

def run(released):
    torch.manual_seed({seed})
    first, last = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6, bias={bias})
    model = torch.nn.Sequential(first, torch.nn.{between}, last).to(torch.{dtype})
    {tie}
    spare = torch.nn.Linear(6, 6).to(torch.{dtype})

    def make():
        return fusedtrain.optim.{name}(
            [{{"params": first.parameters(), "lr": 0.02}}, {{"params": {rest}}}],
            lr=0.01, {options}
        )

    def release():
        return optimizer.release_gradients(model) if released else None

    def train(skip=False, extra=False):
        x = torch.randn(4, 6).to(first.weight)
        y = last(x) if skip else model(x)
        (spare(y) if extra else y).square().mean().backward()
        if released and handle._hooks:
            assert all(p.grad is None for p in model.parameters() if p.requires_grad)
        optimizer.step()
        for p in [*model.parameters(), *spare.parameters()]:
            p.grad = None

    optimizer = make()
    handle = release()
{lines}
    train()
    weights = [*model.parameters(), *spare.parameters()]
    return weights, optimizer.grad_norm, optimizer.applied_steps, optimizer.state_dict()["state"]

torch.testing.assert_close(run(True), run(False), rtol=0, atol=0, equal_nan=True)
"""
_BETWEEN_STEPS = {
    "step": "train()",
    "without a layer": "train(skip=True)",
    "another model": "train(extra=True)",
    "new lr": "optimizer.param_groups[0]['lr'] *= 0.5",
    "decay": "optimizer.param_groups[-1]['weight_decay'] = 0.05",
    "add group": "optimizer.add_param_group({'params': list(spare.parameters())})",
    "move": "groups = optimizer.param_groups\nif len(groups[0]['params']) > 1:\n"
    "    groups[-1]['params'].append(groups[0]['params'].pop())",
    "round trip": "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
    "compressed": "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict(compressed=True)))",
    "again": "if released:\n    handle.remove()\n    handle = release()",
    "ordinary": "if released:\n    handle.remove()\ntrain()\nhandle = release()",
    "into a new one": "if released:\n    handle.remove()\n"
    "state = copy.deepcopy(optimizer.state_dict())\noptimizer = make()\n"
    "optimizer.load_state_dict(state)\nhandle = release()",
    "frozen": "first.weight.requires_grad_(False)\ntrain()\nfirst.weight.requires_grad_()",
    "new memory": "for p in model.parameters():\n    p.data = p.data.clone()",
    "written": "with torch.no_grad():\n    last.weight.mul_(0.5)",
    "open step": "model(torch.randn(4, 6).to(first.weight)).sum().backward()\n"
    "if released:\n    handle.remove()\noptimizer.step()\noptimizer.zero_grad()\n"
    "handle = release()",
}


@st.composite
def released(draw: Callable[..., Any]) -> str:
    """Gradient release: the bits of ordinary steps, whatever happens between them."""
    pick = Pick(draw)
    name = pick(*NAMES)
    tied = pick(False, True)
    dtype = pick("bfloat16", "float32", "float64")
    lines: list[str] = []
    others = False
    for _ in range(pick(2, 4, 7)):
        step = pick("step", *_BETWEEN_STEPS)
        # A new optimizer has the first groups.
        if step in ("add group", "move", "into a new one"):
            if others and step != "move":
                continue
            others = step != "into a new one"
        lines += _BETWEEN_STEPS[step].split("\n")
    masters = pick("", "master_weights=True, ", 'master_weights="split24", ')
    options = [
        "max_grad_norm=None, " if name == "LAMB" else "",
        pick("", "agc=0.05, "),
        pick("", "ema_decay=0.9, "),
        masters if dtype == "bfloat16" else "",
        pick("", "stochastic_rounding=True, ")
        if dtype == "bfloat16" and "True" not in masters else "",
        pick("", "state_dtype=torch.float32, ") if dtype == "bfloat16" else "",
    ]  # fmt: skip
    return _RELEASED.format(
        seed=pick(*range(20)), bias=pick(True, False), dtype=dtype,
        between=pick("Tanh()", "LayerNorm(6, elementwise_affine=False)"),
        tie="last.weight = first.weight" if tied else "", name=name,
        rest="[p for p in last.parameters() if p is not first.weight]"
        if tied else "last.parameters()",
        options="".join(options), lines="\n".join(f"    {line}" for line in lines),
    )  # fmt: skip
