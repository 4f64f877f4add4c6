"""`convert(model, dropout="fused")`: the same distribution, other numbers, exact gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedtrain
from fusedtrain._graph.forward import rewritten_of
from helpers.models import transformers

P = 0.25


class Block(nn.Module):
    """Dropout as a module, as a function, and before a sum."""

    def __init__(self, p: float = P) -> None:
        super().__init__()
        self.linear, self.act, self.p = nn.Linear(16, 16), nn.GELU(), p
        self.first, self.last = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.act(self.linear(x)))
        y = F.dropout(y, self.p, self.training)
        return x + self.last(y)


def seeded(call: Callable[[], Any], seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return call()


def example(*shape: int) -> Tensor:
    return seeded(lambda: torch.randn(shape or (8, 16)), 0)


def test_what_becomes_of_a_block() -> None:
    model = Block()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = fusedtrain.convert(model, example(), dropout="fused")
    dropped = [(e.name, e.target) for e in report.converted if "Dropout" in e.target]
    assert dropped == [("first", "fusedtrain.nn.Dropout"), ("last", "fusedtrain.nn.Dropout")]
    assert [call.activation for call in report.calls] == ["dropout"]
    assert [branch.parts for branch in report.branches] == [("Dropout",)]
    assert report.proof is not None
    assert report.proof.saved_after < report.proof.saved_before
    assert "dropout keeps" not in str(report)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.eval()
    assert torch.equal(model(example()), copy.deepcopy(model).train(False)(example()))
    assert fusedtrain.revert(model) == 4
    assert type(model.first) is nn.Dropout
    assert rewritten_of(model) is None


def test_the_default_leaves_the_numbers_of_torch() -> None:
    stock = nn.Sequential(Block(), nn.Flatten(), nn.Dropout(0.5))
    model, x = copy.deepcopy(stock), example()
    report = fusedtrain.convert(model, x)
    torch.testing.assert_close(seeded(lambda: model(x)), seeded(lambda: stock(x)))
    assert {type(m) for m in model.modules() if isinstance(m, nn.Dropout)} == {nn.Dropout}
    # Four bytes an element on a CPU; that of F.dropout counts for the module called before.
    assert report.proof is not None
    assert report.proof.masks == 4 * 4 * x.numel()
    assert "dropout keeps 2048 bytes of masks: dropout='fused'" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_and_gradients(dtype: torch.dtype) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(P)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + self.drop(y)

    model = Two()
    x, y = torch.zeros(200, 301, dtype=dtype), torch.ones(200, 301, dtype=dtype)
    fusedtrain.convert(model, (x, y), dropout="fused")
    x.requires_grad_(), y.requires_grad_()
    z = seeded(lambda: model(x, y))
    assert torch.equal(z, seeded(lambda: model(x, y)))  # of a seed
    assert not torch.equal(z, seeded(lambda: model(x, y), 4))
    stock = seeded(lambda: F.dropout(y, P))
    assert not torch.equal(z, stock)
    kept = (z != 0).double()
    assert z.unique().tolist() == stock.unique().tolist()
    deviation = (P * (1 - P) / kept.numel()) ** 0.5
    assert abs(kept.mean().item() - (1 - P)) < 5 * deviation
    grad = torch.randn_like(z)
    z.backward(grad)
    assert torch.equal(x.grad, grad)
    exact = grad.double() * kept / (1 - P)
    torch.testing.assert_close(y.grad, exact.to(dtype))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_mask(reentrant: bool) -> None:
    model, x = Block(), example().requires_grad_()
    fusedtrain.convert(model, x.detach(), dropout="fused")
    grads = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        x.grad = None
        seeded(lambda run=run: run(x)).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


class Checkpointed(nn.Sequential):
    """Computes its parts again in backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_within_a_model_are_compared(reentrant: bool) -> None:
    """The comparison goes without dropout where backward computes again, too."""
    model = nn.Sequential(nn.Linear(16, 16), Checkpointed(Block(), Checkpointed(Block())))
    for part in model.modules():
        part.reentrant = reentrant
    report = fusedtrain.convert(model, example(), dropout="fused")
    assert not report.left
    assert len(report.branches) == 2
    assert sum(entry.target == "fusedtrain.nn.Dropout" for entry in report.converted) == 4
    seeded(lambda: model(example())).sum().backward()


class Subclass(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class OfAnotherP(nn.Dropout):
    """Has no number `p`, as where each channel or each step of training has its own."""

    def __init__(self, p: Any) -> None:
        nn.Module.__init__(self)
        self.rate, self.inplace = P, False
        if p is not None:
            self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.rate, self.training)


STAY: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no probability": (lambda: nn.Dropout(0.0), ""),
    "in place": (lambda: nn.Dropout(P, inplace=True), "works in place"),
    "a subclass": (Subclass, "subclass of"),
    "p is missing": (lambda: OfAnotherP(None), "subclass of"),
    "p of channels": (lambda: OfAnotherP(torch.tensor([P, 0.5])), "subclass of"),
    "channels": (lambda: nn.Dropout2d(P), ""),
    "alpha": (lambda: nn.AlphaDropout(P), ""),
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name: str) -> None:
    make, reason = STAY[name]
    model = nn.Sequential(nn.Conv2d(3, 4, 1), make())
    stock, x = copy.deepcopy(model), example(2, 3, 5, 5)
    report = fusedtrain.convert(model, x, dropout="fused")
    assert [left.reason.startswith(reason) for left in report.left] == [True] * bool(reason)
    assert type(model[1]) is type(stock[1])
    assert not report.converted
    assert torch.equal(seeded(lambda: model(x)), seeded(lambda: stock(x)))


def test_excluded_hooked_and_patched() -> None:
    model = nn.Sequential(Block(), Block())
    calls: list[Any] = []
    model[1].last.register_forward_hook(lambda *args: calls.append(args))
    report = fusedtrain.convert(model, example(), exclude=["0.last"], dropout="fused")
    assert type(model[0].last) is nn.Dropout
    assert type(model[1].last) is fusedtrain.nn.Dropout
    assert not report.branches
    calls.clear()
    model(example())
    assert len(calls) == 1


def test_a_number_that_changes_later() -> None:
    """`p` counts as it is at each call, in the rewritten forward, too."""
    model, x = Block(), example(100, 16)
    fusedtrain.convert(model, example(), dropout="fused")
    model.p = model.first.p = model.last.p = 0.0
    stock = copy.deepcopy(model)
    fusedtrain.revert(stock)
    torch.testing.assert_close(model(x), stock(x))
    model.last.p = 1.0
    assert torch.equal(model(x), x)


def test_a_number_set_for_one_call() -> None:
    """Both models are compared without dropout, so nothing but the forward tells."""

    class Quiet(Block):
        quiet: ClassVar[dict[str, Any]]

        def forward(self, x: Tensor) -> Tensor:
            before = {name: getattr(self.last, name) for name in self.quiet}
            vars(self.last).update(self.quiet)
            y = x + self.last(self.linear(x))
            vars(self.last).update(before)
            return y

    for Quiet.quiet in ({"p": 0.0}, {"training": False}):
        model, x = Quiet(), example()
        want = model(x)
        report = fusedtrain.convert(model, x, dropout="fused")
        assert not report.branches
        torch.testing.assert_close(model(x), want)


def test_copies_and_pickles() -> None:
    model, x = nn.Sequential(Block()), example()
    fusedtrain.convert(model, x, dropout="fused")
    want = seeded(lambda: model(x))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(seeded(lambda twin=twin: twin(x)), want)
        fusedtrain.revert(twin)
        assert type(twin[0].first) is nn.Dropout


def test_attention_is_compared_with_its_own_dropout() -> None:
    """Torch's attention draws the same numbers in both runs of the proof."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.3, F.gelu, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2), example(2, 7, 16)
    report = fusedtrain.convert(model, x, dropout="fused")
    assert sum(entry.target == "fusedtrain.nn.Dropout" for entry in report.converted) == 6
    assert len(report.left) == 0
    model.eval()
    stock = copy.deepcopy(model)
    fusedtrain.revert(stock)
    with torch.no_grad():  # torch's fast path
        torch.testing.assert_close(model(x), stock(x))


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_transformers(name: str) -> None:
    package: Any = transformers()
    sizes = {"Bert": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                      "num_attention_heads": 4, "vocab_size": 60},
             "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60,
                      "bos_token_id": 1, "eos_token_id": 2}}  # fmt: skip
    config = getattr(package, f"{name}Config")(**sizes[name])
    model = getattr(package, f"{name}Model")(config).train()
    ids = torch.randint(3, 60, (2, 7))
    report = fusedtrain.convert(model, {"input_ids": ids}, dropout="fused")
    count = sum(type(m) is fusedtrain.nn.Dropout for m in model.modules())
    assert count == sum(isinstance(m, nn.Dropout) for m in model.modules()) > 0
    assert len(report.branches) == {"Bert": 4, "GPT2": 0}[name]
    model(input_ids=ids).last_hidden_state.sum().backward()


def test_plans() -> None:
    model = nn.Sequential(nn.Linear(16, 64), Block64(), Block64(), nn.Linear(64, 4))
    x = example(256, 16)
    plan = fusedtrain.plan_memory(model, x, 0.9, dropout="fused")
    with pytest.raises(ValueError, match="dropout: the plan was made with dropout='fused'"):
        fusedtrain.convert(model, x, memory=plan)
    twin = copy.deepcopy(model)
    fusedtrain.convert(twin, dropout="fused")
    fusedtrain.convert(model, x, memory=plan, dropout="fused")
    for one in (model, twin):
        seeded(lambda one=one: one(x)).square().sum().backward()
    for a, b in zip(model.parameters(), twin.parameters()):
        assert torch.equal(a.grad, b.grad)


class Block64(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)


def test_compiled() -> None:
    """Torch's own dropout, which Inductor fuses."""
    model, x = Block(), example(500, 16)
    fusedtrain.convert(model, x, dropout="fused")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    kept = ((compiled(x) - x) != 0).double().mean().item()
    assert abs(kept - (1 - P) ** 3) < 0.03
    model.eval()
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("autocast", [False, True])
def test_recomputed(autocast: bool) -> None:
    model, x = nn.Sequential(Block(), Block(), nn.Linear(16, 4)), example(64, 16)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        fusedtrain.convert(model, x, dropout="fused", memory="recompute")
        fusedtrain.convert(twin, x, dropout="fused")
        for one in (model, twin):
            seeded(lambda one=one: one(x)).square().sum().backward()
    for a, b in zip(model.parameters(), twin.parameters()):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("value", ["fast", None, True])
def test_another_value(value: Any) -> None:
    model = Block()
    with pytest.raises(ValueError, match="dropout: must be 'torch' or 'fused', not"):
        fusedtrain.convert(model, example(), dropout=value)
    with pytest.raises(ValueError, match="dropout: must be 'torch' or 'fused', not"):
        fusedtrain.plan_memory(model, example(), 0.5, dropout=value)
    assert type(model.first) is nn.Dropout
