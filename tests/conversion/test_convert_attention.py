"""Modules that call torch's attention, in which convert puts ours: which, numbers, what stays."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as T

import fusedtrain
from fusedtrain.ops import attention
from helpers.models import timm, transformers

WIDTH, HEADS = 16, 4
TARGET = "fusedtrain.functional.scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that multiplies 16-bit matrices."""
    monkeypatch.setattr(attention, "mkldnn_takes", lambda dtype: dtype is torch.bfloat16)


def is_ours(output: Tensor) -> bool:
    return "AttentionBackward" in set(names(output))


def names(output: Tensor) -> Iterator[str]:
    seen, edges = set(), [output.grad_fn]
    for node in edges:
        if node is not None and node not in seen:
            seen.add(node)
            yield node.name()
            edges += [after for after, _ in node.next_functions]


class Attention(nn.Module):
    """As in many a repository: it cannot be traced, since a size becomes a number."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.p = p

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        n = int(x.shape[0])
        heads = (
            t.view(n, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        q, k, v = heads
        p = self.p if self.training else 0.0
        y = T.scaled_dot_product_attention(q, k, v, mask, dropout_p=p, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(n, -1, WIDTH))


class Flat(Attention):
    """Without a mask, in a few calls."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = T.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


class MultiHead(nn.Module):
    def __init__(self, needs_weights: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)
        self.needs_weights = needs_weights

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x, need_weights=self.needs_weights)
        return y if weights is None else y + weights.sum()


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.1, "gelu", batch_first=True)


MODELS = {
    "untraced": Attention, "flat": Flat, "multi-head": MultiHead, "encoder": encoder,
    "nested": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(), nn.Tanh()),
}  # fmt: skip


def batch() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 6, WIDTH)


@pytest.mark.parametrize("name", MODELS)
def test_drops_with_our_numbers(name: str) -> None:
    """In training dropout is ours. Without dropout the numbers are those of the stock model."""
    torch.manual_seed(0)
    stock, x = MODELS[name](), batch()
    model = copy.deepcopy(stock)
    report = fusedtrain.convert(model, x, dropout="fused")
    targets = [entry.target for entry in report.converted] + [c.activation for c in report.calls]
    assert TARGET in targets or "scaled_dot_product_attention" in targets
    assert is_ours(model(x))
    assert not torch.equal(model(x), model(x))
    torch.manual_seed(7)
    first = model(x)
    torch.manual_seed(7)
    assert torch.equal(model(x), first)
    torch.testing.assert_close(model.eval()(x), stock.eval()(x))
    assert report.proof.saved_after < report.proof.saved_before


@pytest.mark.parametrize("name", MODELS)
def test_torchs_numbers_stay(name: str) -> None:
    """With dropout="torch" a step draws what the stock model draws, bit for bit in float32."""
    torch.manual_seed(0)
    stock, x = MODELS[name](), batch()
    model = copy.deepcopy(stock)
    fusedtrain.convert(model, x)
    results = []
    for net in (stock, model):
        for part in net.modules():
            if isinstance(part, nn.TransformerEncoderLayer):
                part.activation = T.gelu  # ours rounds differently
        torch.manual_seed(3)
        results.append(net(x))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["untraced", "flat"])
@pytest.mark.parametrize("autocast", [True, False])
def test_16_bits_without_dropout(name: str, autocast: bool) -> None:
    torch.manual_seed(0)
    stock, x = MODELS[name](p=0.0), batch()
    if not autocast:
        stock, x = stock.bfloat16(), x.bfloat16()
    model = copy.deepcopy(stock)
    fusedtrain.convert(model, x)
    grads = []
    for net in (stock, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = net(x)
        assert is_ours(y) is (net is model)
        assert y.dtype is torch.bfloat16
        grads.append([y, *torch.autograd.grad(y.float().square().sum(), list(net.parameters()))])
    for want, got in zip(*grads):
        assert got.dtype is want.dtype
        assert (got - want).float().norm() <= 0.02 * want.float().norm() + 1e-3


def test_weights_that_are_returned_are_dropped_by_ours() -> None:
    model, x = MultiHead(needs_weights=True), batch()
    fusedtrain.convert(model, x, dropout="fused")
    y = model(x)
    assert "NativeDropoutBackward0" not in set(names(y))
    assert any("BiasAct" in name for name in names(y))


def test_without_an_example() -> None:
    """Torch's class is known; a module of one's own needs an example."""
    model, x = nn.Sequential(MultiHead(), Attention()), batch()
    report = fusedtrain.convert(model, dropout="fused")
    assert [entry.name for entry in report.converted] == ["0.attention"]
    assert is_ours(model[0](x))
    assert not is_ours(model[1](x))
    assert not fusedtrain.convert(nn.Sequential(MultiHead())).converted


def test_excluded_and_patched_ones_stay() -> None:
    model, x = nn.Sequential(Attention(), Attention(), Attention()), batch()
    stock = Attention.forward
    model[1].forward = lambda x: stock(model[1], x) * 1.0  # type: ignore[method-assign]
    report = fusedtrain.convert(model, x, dropout="fused", exclude=["0"])
    assert [entry.name for entry in report.converted] == ["2"]
    assert {left.name for left in report.left} == {"0", "1"}
    assert not is_ours(model[0](x))
    assert not is_ours(model[1](x))


def test_copies_pickles_and_revert() -> None:
    model, x = nn.Sequential(MultiHead(), Attention()), batch()
    want = copy.deepcopy(model).eval()(x)
    fusedtrain.convert(model, x, dropout="fused")
    for net in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_ours(net.train()(x))
        torch.testing.assert_close(net.eval()(x), want)
    assert fusedtrain.revert(model) == 2
    assert not is_ours(model.train()(x))
    fusedtrain.convert(model.train(), x, dropout="fused")
    again = fusedtrain.convert(model, x, dropout="fused")
    assert is_ours(model(x))
    assert not again.converted
    assert again.already == 2
    fusedtrain.convert(model, dropout="fused")  # without an example it knows both
    assert is_ours(model[0](x))
    assert is_ours(model[1](x))


def test_masks_of_torchs_module() -> None:
    torch.manual_seed(0)
    stock, x = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.0, batch_first=True), batch()
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 5 + [True]])
    causal = nn.Transformer.generate_square_subsequent_mask(6).bfloat16()
    options: list[dict[str, Any]] = [
        {"key_padding_mask": padding}, {"attn_mask": causal}, {"attn_mask": causal != 0},
        {"attn_mask": causal, "is_causal": True, "need_weights": False},
        {"attn_mask": causal != 0, "key_padding_mask": padding, "need_weights": False},
    ]  # fmt: skip
    model = copy.deepcopy(stock)
    fusedtrain.convert(model, (x, x, x))
    for named in options:
        pairs = zip(*(net.bfloat16()(*[x.bfloat16()] * 3, **named) for net in (stock, model)))
        for want, got in pairs:
            if want is None or got is None:
                assert want is got
            else:
                torch.testing.assert_close(got, want, rtol=3e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["Bert", "Llama", "GPT2", "ViT"])
def test_models_of_transformers(name: str) -> None:
    package: Any = transformers()
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 60,
            "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "attn_implementation": "sdpa"}  # fmt: skip
    if name == "ViT":
        size |= {"image_size": 16, "patch_size": 8, "attention_probs_dropout_prob": 0.1}
    if name == "Llama":
        size |= {"attention_dropout": 0.1}
    if name == "GPT2":
        size |= {"n_embd": 32, "n_layer": 2, "n_head": 4}
    model = getattr(package, f"{name}Model")(getattr(package, f"{name}Config")(**size)).train()
    example = {"input_ids": torch.randint(3, 60, (2, 7))}
    if name == "ViT":
        example = {"pixel_values": torch.randn(2, 3, 16, 16)}
    report = fusedtrain.convert(model, example, dropout="fused")
    assert [entry.target for entry in report.converted].count(TARGET) == 2
    assert is_ours(model(**example)[0])


def test_a_model_of_timm() -> None:
    model = timm().create_model("vit_tiny_patch16_224", depth=2, img_size=32, attn_drop_rate=0.1)
    x = torch.randn(2, 3, 32, 32)
    report = fusedtrain.convert(model, x, dropout="fused")
    assert [c.activation for c in report.calls].count("scaled_dot_product_attention") == 2
    assert is_ours(model(x))


class DiTBlock(nn.Module):
    """As the authors of DiT write it (arXiv:2212.09748): norms without weights, modulated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.attn = Flat(p=0.0)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU("tanh"), nn.Linear(24, WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, *others = self.modulation(c).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate * self.attn(self.norm1(x) * (1 + scale) + shift)
        shift, scale, gate = others
        return x + gate * self.mlp(self.norm2(x) * (1 + scale) + shift)


@pytest.mark.parametrize("memory", ["store", "recompute"])
def test_a_diffusion_transformer(memory: str) -> None:
    torch.manual_seed(0)
    stock, example = DiTBlock(), (batch(), torch.randn(3, WIDTH))
    model = copy.deepcopy(stock)
    fusedtrain.convert(model, example, memory=memory)
    for net in (stock, model):
        with torch.autocast("cpu", torch.bfloat16):
            y = net(*example)
        assert is_ours(y) is (net is model)
        y.float().square().sum().backward()
    for want, got in zip(stock.parameters(), model.parameters()):
        assert want.grad is not None
        assert got.grad is not None
        assert (got.grad - want.grad).norm() <= 0.03 * want.grad.norm() + 1e-3


def test_checkpoint_and_plans() -> None:
    model, x = nn.Sequential(Attention(), MultiHead()), batch()
    plan = fusedtrain.plan_memory(model, x, 100_000, dropout="fused")
    fusedtrain.convert(model, x, memory=plan, dropout="fused")
    results = []
    for context in (False, True):
        torch.manual_seed(2)
        if context:
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        else:
            y = model(x)
        results.append(torch.autograd.grad(y.square().sum(), list(model.parameters())))
    for want, got in zip(*results):
        torch.testing.assert_close(got, want)


class Checkpointed(Attention):
    """Its own forward computes attention again in backward, where no forward is at work: such
    attention is torch's."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        again = super().forward
        return torch.utils.checkpoint.checkpoint(again, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_within_the_forward(reentrant: bool) -> None:
    torch.manual_seed(0)
    stock, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(reentrant)), batch()
    model = copy.deepcopy(stock)
    fusedtrain.convert(model, x, dropout="fused")
    results = []
    for net in (stock, model):
        torch.manual_seed(3)
        y = net(x)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in net.parameters())])
    assert all(map(torch.equal, *results))


def test_a_part_that_is_excluded_keeps_its_numbers() -> None:
    class Outer(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention()

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(self.inner(x), mask)

    model, x = nn.Sequential(Outer()), batch()
    report = fusedtrain.convert(model, x, dropout="fused", exclude=["0.inner"])
    assert {left.name for left in report.left} == {"0", "0.inner"}
    assert not is_ours(model(x))


def test_patched_functions_of_torch_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, calls = nn.Sequential(MultiHead()), batch(), 0
    fusedtrain.convert(model, x, dropout="fused")
    stock = T.multi_head_attention_forward

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return stock(*args, **kwargs)

    monkeypatch.setattr(T, "multi_head_attention_forward", patched)
    assert not is_ours(model(x))
    assert calls == 1


class Edits(Attention):
    """Torch keeps a scaled copy of the query, ours the query."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (t * 1.0 for t in self.qkv(x[: int(x.shape[0])]).chunk(3, -1))
        p = self.p if self.training else 0.0
        y = T.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], dropout_p=p)
        return self.out(y[:, 0] + q.mul_(2))


def test_a_query_that_is_edited_later_is_left() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Edits(), MultiHead()), batch()
    report = fusedtrain.convert(model, x, dropout="fused")
    assert [left.name for left in report.left] == ["1"]
    model(x).sum().backward()


def test_a_wrong_attention_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison, without dropout, runs ours, in float32, too."""
    right = attention._weights
    monkeypatch.setattr(attention, "_weights", lambda *args: right(*args) * 1.01)
    report = fusedtrain.convert(nn.Sequential(Attention(), Flat()), batch(), dropout="fused")
    assert not report.converted
    assert "scaled_dot_product_attention" not in [call.activation for call in report.calls]


def test_the_precision_of_a_forward_of_indices() -> None:
    class Embeds(Attention):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(T.one_hot(ids, WIDTH).to(self.out.weight.dtype), mask)

    model, ids = nn.Sequential(Embeds(0.0)).bfloat16(), torch.randint(WIDTH, (2, 6))
    fusedtrain.convert(model, ids)
    assert is_ours(model(ids))


def test_torch_compile_and_export_see_torchs() -> None:
    model, x = nn.Sequential(MultiHead(), Attention()).eval(), batch()
    want = model(x)
    fusedtrain.convert(model.train(), x, dropout="fused")
    model.eval()
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), want)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), want)
    torch.testing.assert_close(torch.jit.trace(model, x, check_trace=False)(x), want)
