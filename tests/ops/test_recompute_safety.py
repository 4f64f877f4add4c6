"""`fusedtrain.recompute` among other contexts, after mistakes, and what it leaves alive."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import fusedtrain
import fusedtrain.functional as F
from fusedtrain import _recompute
from fusedtrain.nn import BatchNormAct2d, BatchNormAddAct
from helpers.recompute import Blocks, assert_same_bits, kept_by, recomputed, run_both


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    """A checkpointed block keeps its input alone; what is around it is computed again."""
    blocks = [Blocks(2), Blocks(2), Blocks(2)]

    class Model(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.blocks, self.checkpointed = nn.ModuleList(copy.deepcopy(blocks)), checkpointed

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            if self.checkpointed:
                x = checkpoint(self.blocks[1], x, use_reentrant=reentrant)
            else:
                x = self.blocks[1](x)
            return self.blocks[2](x)

    x = torch.randn(3, 8, 4, 4)
    stock = run_both(Model(False), x)
    assert_same_bits(run_both(Model(True), x))
    assert all(map(torch.equal, stock[0], run_both(Model(True), x)[1]))
    model = Model(True)
    kept = kept_by(lambda: recomputed(model, x.requires_grad_()), x.nbytes)
    # The input of the first block, and of the second; its output; four convolutions each.
    assert kept <= 3 + 2 * 4


def test_a_checkpoint_around_decides() -> None:
    """Within it, recipes would keep what it means to drop."""
    model, x = Blocks(2), torch.randn(3, 8, 4, 4, requires_grad=True)
    inside = lambda x: recomputed(model, x)  # noqa: E731
    kept = kept_by(lambda: checkpoint(inside, x, use_reentrant=False) * 1, x.nbytes)
    assert kept == 1  # its input
    stock = copy.deepcopy(model)
    stock(x).sum().backward()
    want, x.grad = x.grad, None
    for p in model.parameters():
        p.grad = None
    checkpoint(inside, x, use_reentrant=False).sum().backward()
    assert torch.equal(want, x.grad)


def test_save_on_cpu_inside_and_around() -> None:
    model, x = Blocks(1), torch.randn(3, 8, 4, 4)
    want = run_both(model, x)[0]
    for order in ((save_on_cpu(), fusedtrain.recompute()), (fusedtrain.recompute(), save_on_cpu())):
        twin, input = copy.deepcopy(model), x.clone().requires_grad_()
        with order[0], order[1]:
            y = twin(input)
        y.square().sum().backward()
        results = [y.detach(), input.grad, *(p.grad for p in twin.parameters())]
        assert all(map(torch.equal, results, want))


def test_transforms_and_compile_see_plain_operators() -> None:
    model, x = Blocks(1).eval(), torch.randn(3, 8, 4, 4)
    want = model(x)
    with fusedtrain.recompute():
        output = torch.func.vmap(lambda x: model(x[None])[0])(x)
    torch.testing.assert_close(output, want)
    grad = torch.func.grad(lambda x: recomputed(model, x).sum())(x)
    assert grad.shape == x.shape
    compiled = torch.compile(model, backend="aot_eager")
    with fusedtrain.recompute():
        torch.testing.assert_close(compiled(x), want)


@pytest.mark.slow
def test_compiled_autograd() -> None:
    """It compiled the hook that unpacks, whose callback torch refuses there: AssertionError."""
    model = nn.Sequential(BatchNormAct2d(2), nn.Conv2d(2, 2, 1))
    gradients, x = [], torch.randn(2, 2, 3, 3)
    for compiled in (False, True):
        loss = recomputed(model, x).square().sum()
        with compiled_autograd._enable(eager_graph) if compiled else nullcontext():
            loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(*gradients)


def eager_graph(graph: nn.Module) -> Any:
    return torch.compile(graph, backend="eager")


def test_nested_and_reused() -> None:
    context = fusedtrain.recompute()
    model, x = Blocks(1), torch.randn(3, 8, 4, 4)
    outer = kept_by(lambda: recomputed(model, x.requires_grad_()), x.nbytes)
    with context, context:
        with context:
            pass
        assert _recompute.scope() is not None
    assert _recompute.scope() is None
    with context:
        inner = kept_by(lambda: recomputed(model, x), x.nbytes)
    assert inner == outer == 3
    model(x).sum().backward()


def test_an_exception_leaves_nothing_behind() -> None:
    def fails() -> None:
        F.silu(torch.randn(3, requires_grad=True))
        raise KeyError

    with pytest.raises(KeyError), fusedtrain.recompute():
        fails()
    assert _recompute.scope() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_threads_do_not_share_it() -> None:
    seen: list[Any] = []
    with fusedtrain.recompute():
        thread = threading.Thread(target=lambda: seen.append(_recompute.scope()))
        thread.start()
        thread.join()
        assert _recompute.scope() is not None
    assert seen == [None]


def test_without_gradients_nothing_is_noted() -> None:
    norm, x = BatchNormAct2d(4), torch.randn(2, 4, 3, 3)
    with torch.no_grad(), fusedtrain.recompute():
        assert _recompute.tagged(norm(x)) is None
    with torch.inference_mode(), fusedtrain.recompute():
        assert _recompute.tagged(norm(x)) is None


MODIFIED = "modified by an inplace operation"


def test_an_output_that_is_modified_after_it_was_saved() -> None:
    """torch's own error for the same mistake; also once the output itself is gone."""
    norm, conv = BatchNormAct2d(4, act_layer="silu"), nn.Conv2d(4, 4, 1)
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    for context in (nullcontext(), fusedtrain.recompute()):
        with context:
            y = norm(x)
            z = conv(y)
            y += 1
        del y
        with pytest.raises(RuntimeError, match=MODIFIED):
            z.sum().backward()


def test_an_output_that_is_modified_before_it_is_saved() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = BatchNormAct2d(8, act_layer="silu"), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            y += 1
            y[:, 1:3].mul_(2)
            output: Tensor = self.conv(y)
            return output

    assert_same_bits(run_both(Model(), torch.randn(2, 8, 3, 3)))


@pytest.mark.parametrize("what", ["input", "weight", "residual"])
def test_what_an_output_is_made_of_is_modified(what: str) -> None:
    norm, conv = BatchNormAddAct(4, act_layer="silu"), nn.Conv2d(4, 4, 1)
    x, residual = (torch.randn(2, 4, 3, 3, requires_grad=True) for _ in range(2))
    with fusedtrain.recompute():
        shifted, other = x + 1, residual + 1
        z = conv(norm(shifted, other))
    with torch.no_grad():
        {"input": shifted, "weight": norm.weight, "residual": other}[what].mul_(2)
    with pytest.raises(RuntimeError, match=MODIFIED):
        torch.autograd.grad(z.sum(), [conv.weight])


def test_other_tensors_keep_torchs_check() -> None:
    """Saved-tensor hooks turn it off; ours make it themselves."""
    x = torch.randn(3, requires_grad=True)
    with fusedtrain.recompute():
        y = x.exp()
        z = y.sin()
        y.add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        z.sum().backward()
    with fusedtrain.recompute():
        z = (torch.nn.functional.linear(x, weight := torch.ones(3, 3, requires_grad=True))).exp()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match=r"float32 \[3, 3\]"):
        z.sum().backward()


def test_a_second_backward_without_a_graph() -> None:
    with fusedtrain.recompute():
        y = nn.Conv2d(8, 8, 1)(Blocks(1)(torch.randn(2, 8, 3, 3)))
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_no_cycle_keeps_anything_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        model, x = Blocks(3), torch.randn(3, 8, 4, 4)
        refs = []
        handles = [
            m.register_forward_hook(lambda m, a, y: refs.append(weakref.ref(y.untyped_storage())))
            for m in model.modules()
        ]
        with fusedtrain.recompute():
            y = model(x)
        y.sum().backward()
        del y
        for handle in handles:
            handle.remove()
        assert not [o for o in gc.get_objects() if type(o) is _recompute.Recipe]
        with fusedtrain.recompute():
            y = model(x)
        del y  # without backward
        assert not [o for o in gc.get_objects() if type(o) is _recompute.Recipe]
    finally:
        gc.enable()


def test_outputs_that_live_on_let_go_of_recipes() -> None:
    """Features that are kept hold their own memory only, and can be saved, copied and pickled."""
    norm, x = BatchNormAct2d(4), torch.randn(2, 4, 3, 3)
    with fusedtrain.recompute():
        y = norm(x)
        assert _recompute.tagged(y) is not None
        assert pickle.loads(pickle.dumps(y.detach())).shape == y.shape
        buffer = io.BytesIO()
        torch.save(y, buffer)
    assert _recompute.tagged(y) is None
    assert buffer.tell() < 8000
    assert not [o for o in gc.get_objects() if type(o) is _recompute.Recipe]


def test_tensors_without_storage() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    with fusedtrain.recompute():
        torch.sparse.mm(torch.eye(4).to_sparse(), F.silu(w)).sum().backward()
    assert w.grad is not None


def test_a_backward_that_raises_leaves_nothing() -> None:
    def fail(grad: Tensor) -> Tensor:
        raise ValueError("in a hook")

    x = torch.randn(8, 8, requires_grad=True)
    with fusedtrain.recompute():
        y = F.silu(x)
        middle = y * 1.0
        middle.register_hook(fail)
        loss = y.cos().sum() + middle.sum() + y.sin().sum()
    for _ in range(3):
        with pytest.raises(ValueError, match="in a hook"):
            loss.backward(retain_graph=True)
        gc.collect()
        recipes = [o for o in gc.get_objects() if type(o) is _recompute.Recipe]
        assert [r._value for r in recipes if r._value is not None] == []


def test_a_parameter_that_was_freed_is_not_one_that_is_missing() -> None:
    """FSDP2 frees gathered parameters behind forward: a null pointer, as of a norm without one."""
    layers = [nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.SiLU()]
    model = nn.Sequential(*layers, nn.Conv2d(4, 4, 3))
    fusedtrain.convert(model, memory="recompute")
    loss = model(torch.randn(2, 4, 9, 9)).square().mean()
    model.get_parameter("3.weight").untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="reshard_after_forward=False"):
        loss.backward()
