"""`convert(memory="inplace")`: which norms write over their input, and how such models train."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from helpers.models import Parts, model_of, timm

pytestmark = pytest.mark.usefixtures("one_thread")


def darknet(act: Any = nn.LeakyReLU) -> nn.Sequential:
    def block(inputs: int, outputs: int, size: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, size, bias=False), nn.BatchNorm2d(outputs), act(0.1)]

    return nn.Sequential(
        *block(3, 8, 3), *block(8, 8, 1), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8),
        *block(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip


def train(net: nn.Module, steps: int = 4, dtype: torch.dtype | None = None) -> list[float]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        x, target = torch.randn(8, 3, 12, 12), torch.randint(2, (8,))
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(net(x).float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _keeps(conv: nn.Module) -> None:
    conv.kept = []
    conv.register_forward_hook(lambda module, args, output: module.kept.append(output))


class _Through(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return input


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a hook keeps its output": _keeps,
    "a hook gives its input": lambda conv: conv.register_forward_hook(lambda m, args, y: args[0]),
    "its forward gives its input": lambda conv: setattr(conv, "forward", lambda x: x),
    "its class gives its input": lambda conv: setattr(conv, "__class__", _Through),
}


@pytest.mark.parametrize("change", CHANGES)
def test_who_made_the_input_has_changed_since(change: str) -> None:
    stock = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.LeakyReLU(0.1)).double()
    net = copy.deepcopy(stock)
    assert fusedtrain.convert(net, memory="inplace").overwriting == ["1"]
    results = []
    for model in (stock, net):
        CHANGES[change](model[0])
        torch.manual_seed(0)
        x = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
        inside = x * 1.0
        output = model(inside)
        total = output + sum(getattr(model[0], "kept", [inside]))
        total.sin().sum().backward()
        results.append([output, total, x.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results)


def test_convert() -> None:
    net = darknet()
    stock = copy.deepcopy(net)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    report = fusedtrain.convert(net, torch.randn(2, 3, 12, 12), memory="inplace")
    assert report.overwriting == ["1", "4", "7", "9"]
    assert "the output takes the place of the input in 4 batch norms" in str(report)
    assert list(net.state_dict()) == list(state)
    torch.testing.assert_close(train(net), train(copy.deepcopy(stock)))
    assert fusedtrain.convert(net, memory="store").overwriting == []
    assert fusedtrain.convert(net, memory="inplace").overwriting == ["1", "4", "7", "9"]
    fusedtrain.revert(net)
    for module, twin in zip(net.modules(), stock.modules(), strict=True):
        assert type(module) is type(twin)
        assert vars(module).keys() == vars(twin).keys()


def test_autocast() -> None:
    net = darknet()
    twin = copy.deepcopy(net)
    fusedtrain.convert(net, memory="inplace")
    fusedtrain.convert(twin)
    torch.testing.assert_close(
        train(net, 3, torch.bfloat16), train(twin, 3, torch.bfloat16), atol=0.03, rtol=0
    )


def test_checkpoint_and_accumulation() -> None:
    net = darknet()
    twin = copy.deepcopy(net)
    fusedtrain.convert(net, memory="inplace")
    x = torch.randn(4, 3, 12, 12)
    for model in (net, twin):
        for _ in range(2):
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)


def test_memory_of_a_model() -> None:
    """Three outputs are kept for the next convolution, in the place of two tensors each; for the
    last norm its input or its output."""
    totals = fusedtrain.memory_report(darknet(), torch.randn(2, 3, 12, 12)).totals
    planes = 2 * 8 * 10 * 10 * 4
    assert totals["store"] - totals["inplace"] == 3 * planes
    assert totals["eager"] >= totals["store"]


class Memo(nn.Conv2d):
    """A convolution that does something of its own with its output."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = super().forward(x)
        return self.seen


def two_ways(self: Any, x: Tensor) -> Tensor:
    y = self.conv(x)
    z = self.norm(y)
    return z if z.mean() > 9 else z + y


READERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "another reader of what the norm reads": (
        lambda self, x: self.norm(y := self.conv(x)).sigmoid() + y
    ),
    "of images": lambda self, x: self.conv(self.norm(x)),
    "of what an activation saved": lambda self, x: self.norm(self.act(self.conv(x))),
    "a sum": lambda self, x: self.norm(self.conv(x)) + x,
    "two ways": two_ways,
}


@pytest.mark.parametrize("name", READERS)
def test_norms_that_do_not_overwrite(name: str) -> None:
    parts = {"conv": nn.Conv2d(3, 3, 1), "act": nn.Sigmoid(), "norm": nn.BatchNorm2d(3)}
    net = model_of(READERS[name], **parts)
    twin = copy.deepcopy(net)
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    assert fusedtrain.convert(net, memory="inplace").overwriting == []
    y = net(x)
    torch.testing.assert_close(y, twin(x))
    y.sum().backward()


def test_hooks_and_exclusion() -> None:
    net = darknet()
    net[0].register_forward_hook(lambda *_: None)
    report = fusedtrain.convert(net, exclude=["4"], memory="inplace")
    assert report.overwriting == ["7", "9"]
    net[7].register_forward_hook(lambda *_: None)  # gets the input of the norm
    assert fusedtrain.convert(net, memory="inplace").overwriting == ["4", "9"]
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert fusedtrain.convert(darknet(), memory="inplace").overwriting == []
    finally:
        handle.remove()


def test_convolutions_that_do_something_of_their_own() -> None:
    for change in (False, True):
        net = darknet()
        if change:
            net[0].forward = net[0].forward
        else:
            net[0] = Memo(3, 8, 3)
        assert fusedtrain.convert(net, memory="inplace").overwriting == ["4", "7", "9"]
    net = darknet()
    nn.utils.parametrizations.weight_norm(net[0])  # another class, the same forward
    assert len(fusedtrain.convert(net, memory="inplace").overwriting) == 4


def method(self: Any, y: Tensor) -> Tensor:
    y.clamp_(min=0.0)
    return y


def multiplied(self: Any, y: Tensor) -> Tensor:
    y *= 2.0
    return y


def of_a_view(self: Any, y: Tensor) -> Tensor:
    y.view(-1).mul_(2.0)
    return y


def behind_a_module(self: Any, y: Tensor) -> Tensor:
    y = self.plain(y)
    y += 1.0
    return y


def of_another_value(self: Any, y: Tensor) -> Tensor:
    z = y + 1.0
    z *= 2.0
    z += y
    return z


# Calls that may write over the output of a norm.
FOLLOWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "method": method, "operator": multiplied, "view": of_a_view,
    "function": lambda self, y: nn.functional.dropout(y, 0.5, True, True),
    "module": lambda self, y: self.dropout(y),
    "behind a module that may hand it on": behind_a_module,
    "next layers": lambda self, y: self.next(y) + y,
    "another value": of_another_value,
}  # fmt: skip


@pytest.mark.parametrize("how", FOLLOWS)
def test_outputs_that_are_written_over(how: str) -> None:
    part = model_of(
        lambda self, x: self.last(FOLLOWS[how](self, self.norm(self.conv(x)))),
        conv=nn.Conv2d(3, 4, 1), norm=nn.BatchNorm2d(4), last=nn.Conv2d(4, 4, 1),
        next=nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)),
        dropout=nn.Dropout(0.5, inplace=True), plain=nn.Dropout(0.0),
    )  # fmt: skip
    net = nn.Sequential(part, nn.Conv2d(4, 2, 1))
    report = fusedtrain.convert(net, memory="inplace")
    assert report.overwriting == (["0.norm"] if how == "another value" else [])
    net(torch.randn(2, 3, 5, 5)).sum().backward()


class Outer(Parts):
    """The forward around writes over what the one inside returns."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y.mul_(2.0)
        return y


def test_outputs_that_are_written_over_further_out() -> None:
    net = Outer(inner=nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    assert fusedtrain.convert(net, memory="inplace").overwriting == []
    net(torch.randn(2, 3, 5, 5)).sum().backward()
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.LeakyReLU(inplace=True))
    net = nn.Sequential(net, nn.Conv2d(4, 4, 1))
    for _ in range(2):  # the second time the activation is part of the norm
        assert fusedtrain.convert(net, memory="inplace").overwriting == ["0.1"]
        net(torch.randn(2, 3, 5, 5)).sum().backward()


def test_checkpoints_that_begin_at_a_norm() -> None:
    from torch.utils.checkpoint import checkpoint_sequential

    gradients = []
    for memory in ("store", "inplace"):
        torch.manual_seed(5)
        net = darknet()
        fusedtrain.convert(net, memory=memory)
        x = torch.randn(2, 3, 12, 12, requires_grad=True)
        for segments in (4, 7):
            checkpoint_sequential(net, segments, x, use_reentrant=False).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_memory_report_on_meta() -> None:
    """Nothing is known of weights there, and nothing overwritten."""
    x = torch.empty(2, 3, 12, 12, device="meta")
    totals = fusedtrain.memory_report(darknet().to("meta"), x).totals
    assert totals["inplace"] == totals["store"]


def test_a_hook_that_comes_later_gets_its_gradients() -> None:
    """torch wraps what such a module takes and returns into views, which are not overwritten."""
    net, seen = darknet(), []
    fusedtrain.convert(net, memory="inplace")
    net[1].register_full_backward_hook(lambda *gradients: seen.append(gradients))
    net(torch.randn(2, 3, 12, 12)).sum().backward()
    assert len(seen) == 1


def test_a_norm_that_overwrote_before_still_does_afterwards() -> None:
    norm = fusedtrain.nn.BatchNormAct2d(4, apply_act=False, overwrite_input=True)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.ReLU())
    fusedtrain.convert(net)
    fusedtrain.revert(net)
    assert norm.overwrite_input


def test_timm_darknet() -> None:
    csp = importlib.import_module(f"{timm().__name__}.models.cspnet")
    cfg = csp.model_cfgs["cspresnet50"]  # LeakyReLU
    stages = dataclasses.replace(cfg.stages, depth=(1, 2), out_chs=(16, 32), stride=(1, 2))
    stem = dataclasses.replace(cfg.stem, out_chs=16)
    net = csp.CspNet(dataclasses.replace(cfg, stem=stem, stages=stages), num_classes=2)
    report = fusedtrain.convert(net, memory="inplace")
    assert len(report.overwriting) >= 8
    flow_free = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(report.overwriting) < len(flow_free)  # those before a residual sum do not
    x = torch.randn(2, 3, 64, 64)
    net(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


class Residual(nn.Module):
    """Its forward is rewritten: the sum becomes part of the second norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.act = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x))
        return self.act(self.norm2(self.conv2(y)) + x)


def test_rewritten_forwards_are_read_as_they_are() -> None:
    net = nn.Sequential(Residual(), Residual())
    for memory in ("store", "inplace", "recompute", "inplace"):
        report = fusedtrain.convert(net, memory=memory)
        expected = ["0.norm1", "1.norm1"] if memory == "inplace" else []
        assert report.overwriting == expected, memory
        net(torch.randn(2, 4, 5, 5, requires_grad=True)).sum().backward()
