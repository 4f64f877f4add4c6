"""`fusedtrain.recompute`: what is kept, that gradients have the same bits, consumers, mistakes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import fusedtrain
import fusedtrain.functional as F
from fusedtrain import _recompute
from fusedtrain.nn import BatchNormAct2d, BatchNormAddAct


@contextmanager
def counted() -> Iterator[dict[int, int]]:
    """Bytes by address of all that is kept for backward of what runs inside."""
    kept: dict[int, int] = {}

    def observe(tensor: Tensor, recipe: _recompute.Recipe | None) -> None:
        for one in (tensor,) if recipe is None else recipe.kept():
            if not isinstance(one if one._base is None else one._base, nn.Parameter):
                storage = one.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()

    with _recompute.observed(observe):
        yield kept


def kept_by(run: Callable[[], Tensor], large: int) -> float:
    """How many tensors of so many bytes a forward pass keeps; vectors do not count."""
    with counted() as kept:
        output = run()
    assert output.requires_grad
    return sum(size for size in kept.values() if size > large // 8) / large


def run_both(
    model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] = lambda y: y.square().sum()
) -> list[list[Tensor]]:
    """Output and gradients without recompute, then with it."""
    found = []
    for context in (nullcontext(), fusedtrain.recompute()):
        twin, input = copy.deepcopy(model), x.detach().clone().requires_grad_()
        with context:
            output = twin(input)
        loss(output).backward()
        gradients = [p.grad for p in twin.parameters() if p.grad is not None]
        assert input.grad is not None
        found.append([output.detach(), input.grad, *gradients])
    return found


def assert_same_bits(found: list[list[Tensor]]) -> None:
    first, second = found
    assert len(first) == len(second)
    assert all(map(torch.equal, first, second))


class Computed:
    """How often an output is computed again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        compute = _recompute.Recipe._compute

        def counting(recipe: _recompute.Recipe) -> Tensor:
            self.count += 1
            return compute(recipe)

        monkeypatch.setattr(_recompute.Recipe, "_compute", counting)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Computed:
    return Computed(monkeypatch)


# --- what is kept ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("act", ["relu", "silu", "elu", "gelu", "hardswish", "mish"])
def test_conv_norm_act_conv_keeps_two_tensors(
    act: str, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm = BatchNormAct2d(8, act_layer=act)
    model: Any = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), norm, nn.Conv2d(8, 8, 1))
    model[0].to(dtype), model[2].to(dtype)
    if dtype is torch.float64:
        norm.to(dtype)
    x = torch.randn(4, 8, 6, 5).to(dtype).contiguous(memory_format=layout).requires_grad_()
    assert kept_by(lambda: model(x), x.nbytes) == 3
    assert kept_by(lambda: recomputed(model, x), x.nbytes) == 2
    assert_same_bits(run_both(model, x))


def recomputed(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    with fusedtrain.recompute():
        return function(*arguments)


class Blocks(nn.Module):
    """Residual blocks: conv, norm, ReLU, conv, norm + add + ReLU."""

    def __init__(self, count: int, act: str = "relu") -> None:
        super().__init__()
        self.stem = BatchNormAct2d(8, act_layer=act)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [nn.Conv2d(8, 8, 1), BatchNormAct2d(8, act_layer=act), nn.Conv2d(8, 8, 1),
                 BatchNormAddAct(8, act_layer=act)]
            ) for _ in range(count)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv1, norm1, conv2, norm2 in self.blocks:  # type: ignore[misc]
            x = norm2(conv2(norm1(conv1(x))), x)
        return x


@pytest.mark.parametrize("act", ["relu", "silu"])
@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_block_outputs_come_from_the_block_before(count: int, act: str, computed: Computed) -> None:
    """Kept: the input, two convolutions' outputs a block, and every so many blocks an output."""
    model, x = Blocks(count, act), torch.randn(4, 8, 6, 5)
    x.requires_grad_()
    chain = _recompute.LONGEST
    kept = kept_by(lambda: recomputed(model, x), x.nbytes)
    # The stem's recipe is the first of the chain. The last block's output: nobody but its own ReLU
    # needs it, which SiLU does not.
    outputs = [n for n in range(1, count + 1) if n % (chain + 1) == chain]
    if act == "silu":
        outputs = [n for n in outputs if n < count]
    assert kept == 1 + 2 * count + len(outputs)
    assert_same_bits(run_both(model, x))
    # Each output once: norm1 and block outputs, the stem; but for those that were kept.
    needed = 1 + count + (count if act == "relu" else count - 1) - len(outputs)
    assert computed.count == needed


def test_nothing_is_gained_where_nothing_else_is_kept() -> None:
    """ReLU keeps its output alone, so the output has no recipe; norms that are frozen likewise."""
    conv = nn.Conv2d(8, 8, 1)
    x = torch.randn(4, 8, 6, 5, requires_grad=True)
    shifted = x + 1
    assert kept_by(lambda: recomputed(lambda: conv(F.relu(shifted))), x.nbytes) == 1
    frozen = BatchNormAct2d(8).eval().requires_grad_(False)
    assert kept_by(lambda: recomputed(lambda: conv(frozen(shifted))), x.nbytes) == 1
    assert kept_by(lambda: recomputed(lambda: conv(F.silu(shifted))), x.nbytes) == 1  # its input


@pytest.mark.parametrize("name", ["silu", "gelu", "mish", "hardswish", "quick_gelu", "tanhshrink"])
def test_activations_that_keep_their_input(name: str) -> None:
    linear = nn.Linear(16, 16)
    x = torch.randn(4, 6, 16, requires_grad=True)
    run = lambda: linear(getattr(F, name)(linear(x)))  # noqa: E731
    assert kept_by(run, x.nbytes) == 3
    assert kept_by(lambda: recomputed(run), x.nbytes) == 2
    module: Any = nn.Sequential(linear, fusedtrain.nn.GELU(), nn.Linear(16, 16))
    assert_same_bits(run_both(module, x))


def test_prelu_is_computed_again() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), fusedtrain.nn.PReLU(8), nn.Conv2d(8, 8, 1))
    x = torch.randn(4, 8, 6, 5)
    assert kept_by(lambda: recomputed(model, x.requires_grad_()), x.nbytes) == 2
    assert_same_bits(run_both(model, x))


# --- consumers ---


class Consumers(nn.Module):
    """All at once: conv, linear on a view, pooling, a product, a sum, a slice, a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = BatchNormAct2d(8, act_layer="silu")
        self.conv, self.linear = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = self.conv(y) * y + nn.functional.max_pool2d(y, 3, 1, 1)
        z = z + self.linear(y.flatten(2)).view_as(y)
        z = z + (y[:, 2:5] * y[:, 3:6]).sum(1, keepdim=True)
        products: Tensor = y.flatten(2) @ y.flatten(2).transpose(1, 2)
        return z + products.mean()


def test_every_consumer_gets_it_and_it_is_computed_once(computed: Computed) -> None:
    x = torch.randn(2, 8, 6, 8)
    assert_same_bits(run_both(Consumers(), x))
    assert computed.count == 1


def test_views_of_views_and_offsets() -> None:
    norm = BatchNormAct2d(8)

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = copy.deepcopy(norm)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            first, second = y.chunk(2, 1)
            tokens = y.permute(0, 2, 3, 1).reshape(-1, 8)[1:-1:2]
            wide = y.expand(2, 3, 8, 4, 4).exp()
            return (first * second).sum() + (tokens * tokens).sum() + wide.mean()

    for layout in (torch.contiguous_format, torch.channels_last):
        assert_same_bits(run_both(Views(), torch.randn(3, 8, 4, 4).to(memory_format=layout)))


def test_an_output_made_of_a_view_of_another(computed: Computed) -> None:
    """Else the view would keep what its recipe is to replace."""
    norm, linear = BatchNormAct2d(8, act_layer="silu"), nn.Linear(24, 24)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = copy.deepcopy(norm), copy.deepcopy(linear)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.norm(x).flatten(2)
            return self.linear(F.swiglu(tokens)) + self.linear(F.gelu(tokens[..., 24:]))

    x = torch.randn(4, 8, 6, 8, requires_grad=True)
    assert kept_by(lambda: recomputed(Model(), x), x.nbytes) == 1
    assert_same_bits(run_both(Model(), x))
    assert computed.count == 3


def test_retained_graph_and_partial_gradients(computed: Computed) -> None:
    model, x = Consumers(), torch.randn(2, 8, 6, 8, requires_grad=True)
    want = model(x).square().sum()
    weights = [*model.conv.parameters(), *model.linear.parameters()]
    wanted = torch.autograd.grad(want, [x, *weights], retain_graph=True)
    with fusedtrain.recompute():
        loss = model(x).square().sum()
    for _ in range(3):
        found = torch.autograd.grad(loss, [x, *weights], retain_graph=True)
        assert all(map(torch.equal, found, wanted))
    assert computed.count == 3
    some = torch.autograd.grad(loss, weights[:1], retain_graph=True)
    assert torch.equal(some[0], wanted[1])
    assert computed.count == 4
    assert not _recompute._pending
    recipes = [o for o in gc.get_objects() if type(o) is _recompute.Recipe]
    assert recipes
    assert all(r._value is None for r in recipes), "kept after a backward that not all asked in"


def test_a_branch_outlives_the_backward_of_another() -> None:
    """Two heads; the norm's own graph is freed by the first, the second asks for its weights."""
    norm, a, b = BatchNormAct2d(4), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    with fusedtrain.recompute():
        y = norm(x)
        first, second = a(y).sum(), b(y).sum()
    first.backward()
    (found,) = torch.autograd.grad(second, [b.weight])
    expected = norm(x).sum((0, 2, 3)).expand(4, 4)
    torch.testing.assert_close(found.flatten(1), expected)


def test_double_backward() -> None:
    model, x = Consumers().double(), torch.randn(2, 8, 6, 8, dtype=torch.float64)

    def penalty(y: Tensor, input: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(y.square().sum(), input, create_graph=True)
        return g.square().sum()

    found = []
    for context in (nullcontext(), fusedtrain.recompute()):
        twin, input = copy.deepcopy(model), x.clone().requires_grad_()
        with context:
            y = twin(input)
        penalty(y, input).backward()
        assert input.grad is not None
        found.append([input.grad, *(p.grad for p in twin.parameters() if p.grad is not None)])
    assert_same_bits(found)
    x.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: recomputed(model.eval(), x), (x,), nondet_tol=0)


def test_accumulated_gradients_and_backward_inside() -> None:
    model = Blocks(2)
    batches = [torch.randn(3, 8, 4, 4) for _ in range(3)]
    found = []
    for context in (nullcontext(), fusedtrain.recompute()):
        twin = copy.deepcopy(model)
        with context:
            for x in batches[:2]:
                twin(x).square().sum().backward()
            total = twin(batches[2]).square().sum() + twin(batches[0]).sum()
        total.backward()
        found.append([p.grad for p in twin.parameters() if p.grad is not None])
    assert_same_bits(found)


# --- together with what else there is ---


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
        found = [y.detach(), input.grad, *(p.grad for p in twin.parameters())]
        assert all(map(torch.equal, found, want))


def test_autocast() -> None:
    model, x = Blocks(2), torch.randn(3, 8, 4, 4)
    found = []
    for context in (nullcontext(), fusedtrain.recompute()):
        twin = copy.deepcopy(model)
        with torch.autocast("cpu", torch.bfloat16), context:
            y = twin(x)
        y.float().square().sum().backward()
        found.append([y.detach(), *(p.grad for p in twin.parameters() if p.grad is not None)])
    assert_same_bits(found)


def test_transforms_and_compile_see_plain_operators() -> None:
    model, x = Blocks(1).eval(), torch.randn(3, 8, 4, 4)
    want = model(x)
    with fusedtrain.recompute():
        found = torch.func.vmap(lambda x: model(x[None])[0])(x)
    torch.testing.assert_close(found, want)
    grad = torch.func.grad(lambda x: recomputed(model, x).sum())(x)
    assert grad.shape == x.shape
    compiled = torch.compile(model, backend="aot_eager")
    with fusedtrain.recompute():
        torch.testing.assert_close(compiled(x), want)


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


# --- mistakes ---


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


# --- lifetimes ---


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
        assert not _recompute._pending
        recipes = [o for o in gc.get_objects() if type(o) is _recompute.Recipe]
        assert [r._value for r in recipes if r._value is not None] == []
