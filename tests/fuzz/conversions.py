"""Programs that train a network beside its converted or folded copy, in float64. Programs that
compare bits train half of their networks in float32 under bfloat16 autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import strategies as st

from .networks import Network, drawn
from .tensors import Pick

_HEAD = """\
import copy
import fusedtrain
import torch
import torch.nn.functional as N
from fusedtrain.ops import group_norm
from torch import nn

group_norm._gains = lambda *_: True  # images are small

{net}

torch.manual_seed({seed})
net = Net().to(torch.{dtype}){mode}
for t in net.state_dict().values():
    if t.is_floating_point():
        nn.init.uniform_(t, 0.1, 0.6) if t.dim() == 1 else nn.init.uniform_(t, -0.4, 0.5)
{hook}"""
_PROGRAM = (
    _HEAD
    + """\
inputs = [torch.randn(3, 4, 6, 5, dtype=torch.{dtype}) for _ in range(20)]
autocast = torch.autocast("cpu", torch.bfloat16, enabled={autocast})

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for seed, x in enumerate(inputs):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        with autocast:
            y = model(x.clone())
        (y * y.detach().tanh()).mean().backward()
        grads = [0 * p if p.grad is None else p.grad.clone() for p in model.parameters()]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield [y.detach().clone(), *grads, *(b.clone() for b in model.buffers())]

want = next(train(copy.deepcopy(net)))
twin = copy.deepcopy(net)
{shaken}{convert}
stock, ours = train(net), train(twin)
for step in range(20):
    want = next(stock)
    if not want[0].abs().max() < 1e4:
        break  # it diverges, and rounding with it
{conditioned}{results}
    message = f"step {{step}}: {{{{}}}}".format
    torch.testing.assert_close(results, want, rtol={limit}, atol={limit}, msg=message)
"""
)
# torch raises where a converted model modifies what backward needs: convert's docstring says so.
# The same holds after fold_frozen_norms, where the activation of a BatchNormAct2d is a call of its
# own.
_STEP_THAT_MAY_RAISE = """\
    try:
        results = next(ours)
    except RuntimeError as error:
        assert "inplace operation" in str(error), error
        break"""
# A norm of a constant channel, or the larger of two equal values, is rounding's to decide: where
# noise of a hundred roundings in the convolutions moves plain torch, too, nothing is asked.
_SHAKEN = """\
noise = torch.Generator().manual_seed(0)

def shake(module, args, out):
    factors = torch.randn(out.shape, dtype=out.dtype, generator=noise)
    out.data.mul_(1 + 1e-14 * factors)

shaken = copy.deepcopy(net)
for module in shaken.modules():
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        module.register_forward_hook(shake)
shaken = train(shaken)
"""
_CONDITIONED = """\
    gaps = [(a - b).abs() / b.abs().clamp_min(1) for a, b in zip(next(shaken), want) if b.numel()]
    if not max(gap.max() for gap in gaps) < {limit}:
        break
"""
_FOLDED = (
    _HEAD
    + """\
net.eval()
x = torch.randn(3, 4, 6, 5, dtype=torch.float64)
state = copy.deepcopy(net.state_dict())
with torch.no_grad():
    want = net(x.clone())
    folded, _ = fusedtrain.fold_conv_bn(net{example})
    results = folded(x.clone())
torch.testing.assert_close(results, want, rtol=1e-9, atol=1e-9)
torch.testing.assert_close(net.state_dict(), state, rtol=0, atol=0)
"""
)


def _program(
    network: Network, convert: str, mode: str = "", limit: str = "1e-7", may_raise: bool = False,
    autocast: bool = False,
) -> str:  # fmt: skip
    rounds = limit != "0"
    may_raise |= rounds and any(
        call in convert for call in ("convert(twin", "fold_frozen_norms(twin")
    )
    return _PROGRAM.format(
        net=network.source(), seed=network.pick(*range(20)), mode=mode, hook=network.hook(),
        convert=convert, limit=limit, autocast=autocast,
        dtype="float32" if autocast else "float64",
        results=_STEP_THAT_MAY_RAISE if may_raise else "    results = next(ours)",
        shaken=_SHAKEN if rounds else "",
        conditioned=_CONDITIONED.format(limit=limit) if rounds else "",
    )  # fmt: skip


@st.composite
def converted(draw: Callable[..., Any], memory: str, example: bool) -> str:
    pick = Pick(draw)
    network = drawn(pick)
    norms = [name for name in network.modules if name.startswith("norm")]
    mode = "".join(f"\nnet.{name}.eval()" for name in norms if pick.chance(5))
    arguments = ["twin"] + ["inputs[0].clone()"] * example
    arguments += [f"memory={memory!r}"] * (memory != "store")
    return _program(network, f"fusedtrain.convert({', '.join(arguments)})", mode)


@st.composite
def store_and_recompute(draw: Callable[..., Any]) -> str:
    """Not a bit may differ."""
    pick = Pick(draw)
    convert = "fusedtrain.convert(net)\nfusedtrain.convert(twin, memory='recompute')"
    return _program(drawn(pick), convert, limit="0", autocast=pick(False, True))


# A converted model that modifies what backward needs raises in the planner's own step, too.
_PLANNED = """\
converted = copy.deepcopy(net)
fusedtrain.convert(converted)
want = next(train(converted))
budget, chosen = {budget}, random.Random({seed})
example = inputs[0].clone()
loss = lambda y: (y * y.detach().tanh()).mean()
try:
    with autocast:
        plan = fusedtrain.plan_memory(twin, example, budget, loss=loss)
except ValueError as error:
    assert "no plan needs less than" in str(error), error
    with autocast:
        plan = fusedtrain.plan_memory(twin, example, "1GiB", loss=loss)
assert plan.peak <= plan.budget
if {shuffled}:
    plan.steps = [step._replace(recompute=chosen.random() < 0.6) for step in plan.steps]
fusedtrain.convert(net)
fusedtrain.convert(twin, memory=plan)"""


@st.composite
def planned(draw: Callable[..., Any]) -> str:
    """A plan within its budget, or one of random decisions: not a bit may differ."""
    pick = Pick(draw)
    network = drawn(pick)
    budget, shuffled = pick(1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.3), pick(False, True)
    plan = _PLANNED.format(budget=budget, seed=pick(*range(20)), shuffled=shuffled)
    # A plan of random decisions recomputes from what is modified later: torch's error.
    source = _program(network, plan, "", "0", may_raise=shuffled, autocast=pick(False, True))
    return "import random\n" + source


@st.composite
def folded(draw: Callable[..., Any]) -> str:
    pick = Pick(draw)
    network = drawn(pick)
    example = pick("", ", x.clone()", ", fuse_activation=False")
    return _FOLDED.format(
        net=network.source(), seed=pick(*range(20)), hook=network.hook(), example=example,
        dtype="float64", mode="",
    )  # fmt: skip


@st.composite
def tuned(draw: Callable[..., Any]) -> str:
    pick = Pick(draw)
    network = drawn(pick)
    frozen = [n for n in network.modules if n.startswith("norm") and pick(True, True, False)]
    mode = "".join(f"\nnet.{name}.eval()" for name in frozen)
    return _program(network, "fusedtrain.fold_frozen_norms(twin)", mode)


@st.composite
def without_bias(draw: Callable[..., Any]) -> str:
    """Outputs are compared: parameters and running means differ by the biases."""
    network = drawn(Pick(draw))
    example = network.pick("", ", example_inputs=inputs[0].clone()")
    source = _program(network, f"fusedtrain.drop_redundant_bias(twin{example})")
    return source.replace(", *grads, *(b.clone() for b in model.buffers())]", "]")


@st.composite
def reverted(draw: Callable[..., Any]) -> str:
    """Converted and back: the same bits, names and classes."""
    pick = Pick(draw)
    network = drawn(pick)
    calls = ("convert(twin)", "convert(twin, memory='recompute')", "fold_frozen_norms(twin)")
    convert = f"fusedtrain.{pick(*calls)}\nfusedtrain.revert(twin)\nassert str(twin) == str(net)"
    return _program(network, convert, limit="0")


_SHARDED = """\
import tempfile
from pathlib import Path
from helpers.rank_modes import sharded_units
from helpers.rank_processes import results_of_two_ranks

sources = ['''
{0}
''', '''
{1}
''', '''
{2}
''']
with tempfile.TemporaryDirectory() as folder:
    want, results = results_of_two_ranks(sharded_units, Path(folder), sources)[0]
if not isinstance(want, str):  # torch's error
    assert results == want or "inplace operation" in results
"""


@st.composite
def sharded(draw: Callable[..., Any]) -> str:
    """Two ranks of FSDP2: not a bit may differ."""
    return _SHARDED.format(*(drawn(Pick(draw)).source() for _ in range(3)))


PROGRAMS: dict[str, Callable[[], st.SearchStrategy[str]]] = {
    "convert": partial(converted, "store", False),
    "convert with example": partial(converted, "store", True),
    "convert recompute": partial(converted, "recompute", False),
    "convert inplace": partial(converted, "inplace", False),
    "store and recompute": store_and_recompute,
    "plan_memory": planned,
    "fold_conv_bn": folded,
    "fold_frozen_norms": tuned,
    "drop_redundant_bias": without_bias,
    "revert": reverted,
    "sharded": sharded,
}
