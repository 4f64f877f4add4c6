"""Training steps of small transformers and of a diffusion U-Net, with dropout and AdamW.

`convert(dropout="fused")` and `fusedtrain.optim.AdamW` against eager torch with its fused AdamW,
and torch.compile. Rivals take turns within one test, each with a copy of the same network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from benchmarks.harness.cases import LAYOUTS, Options
from benchmarks.harness.networks import LR, Contestant, import_module
from benchmarks.harness.race import Race, admit, refuse_the_reference
from fusedtrain._graph.kept import kept_bytes
from fusedtrain.advisor.bench.gate import NetworkGate, Results

FAMILY = "transformers"
WIDTH, LAYERS, HEADS, WORDS, TIMES = 384, 4, 6, 1000, 1000
TEXT = ("gpt", "bert", "llama")
DTYPES = ("bfloat16 AMP", "float32")
FLOOR, SEEDS = 1e-5, (1, 2, 3)
SHAPES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "cpu": dict.fromkeys(TEXT, (8, 128)) | {"diffusion_unet": (8, 3, 32, 32)},
    "cuda": dict.fromkeys(TEXT, (64, 512)) | {"diffusion_unet": (64, 3, 64, 64)},
}


class GPT(nn.Module):
    """torch's own layers, with a causal mask."""

    mask: Tensor

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(tokens, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True
        )
        norm, mask = nn.LayerNorm(WIDTH), nn.Transformer.generate_square_subsequent_mask(tokens)
        self.layers = nn.TransformerEncoder(layer, LAYERS, norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", mask)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight
        output: Tensor = self.head(self.layers(x, self.mask, is_causal=True))
        return output


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        import_module("torchvision")
        library = import_module("transformers")
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
        config = getattr(library, f"{kind}Config")(vocab_size=WORDS, **sizes, **settings)
        suffix = "ForCausalLM" if kind == "Llama" else "ForMaskedLM"
        self.model = getattr(library, kind + suffix)(config)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.model(words).logits
        return logits


NETWORKS: Mapping[str, Callable[[int], nn.Module]] = {
    "gpt": GPT,
    "bert": lambda _: Logits("Bert", intermediate_size=4 * WIDTH),
    "llama": lambda _: Logits("Llama", intermediate_size=1024, num_key_value_heads=2),
    "diffusion_unet": lambda _: import_module("examples.recipes.diffusion_unet").UNet(64),
}


@dataclass(frozen=True)
class Case:
    """One row. `shape`: [batch, tokens], or that of the images."""

    model: str
    shape: tuple[int, ...]
    dtype: str
    layout: str = ""
    compiled: bool = False
    op = "train"

    def __str__(self) -> str:
        return "-".join(filter(None, (self.model, self.layout, self.dtype.replace(" ", "_"))))

    def build(self, device: str) -> nn.Module:
        torch.manual_seed(0)
        network = NETWORKS[self.model](self.shape[-1]).to(device)
        format: Any = {"memory_format": LAYOUTS[self.layout]} if self.layout else {}
        return network.to(**format)

    def inputs(self, device: str, seed: int = 1) -> tuple[Tensor, ...]:
        """Tokens; or images and times of diffusion."""
        random = torch.Generator().manual_seed(seed)
        if not self.layout:
            return (torch.randint(1, WORDS, self.shape, generator=random).to(device),)
        images = torch.randn(self.shape, generator=random).to(device)
        times = torch.randint(TIMES, self.shape[:1], generator=random).to(device)
        return images.contiguous(memory_format=LAYOUTS[self.layout]), times

    def loss(self, model: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, under autocast unless the model is in float64, and the output."""
        exact = next(model.parameters()).dtype is torch.float64
        amp = self.dtype != "float32" and not exact
        with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=amp):
            output: Tensor = model(*inputs)
        wide = output.to(torch.promote_types(output.dtype, torch.float32))
        return wide.square().mean(), output.detach()


def select(options: Options) -> list[Case]:
    """The cases of a run."""
    compiled = options.compiled and not options.quick
    shapes = {"gpt": (2, 16)} if options.quick else SHAPES[options.device]
    return [
        Case(model, shape, dtype, "channels_last" if len(shape) > 2 else "", compiled)
        for model, shape in shapes.items()
        for dtype in DTYPES[: 1 if options.quick else None]
        if options.wants("train", model)
    ]


def results(case: Case, model: Any, *inputs: Tensor) -> Results:
    """Output and gradients without dropout, whose masks differ: of evaluation. `convert` has
    compared training, with dropout that drops nothing."""
    model.eval()
    model.zero_grad()
    loss, output = case.loss(model, *inputs)
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    model.train()
    return {"output": [output], "gradient": gradients}


def contestants(case: Case, stock: nn.Module, device: str) -> dict[str, Contestant]:
    """Copies of the stock network."""
    ours, example = copy.deepcopy(stock), case.inputs(device)
    with torch.autocast(device, torch.bfloat16, enabled=case.dtype != "float32"):
        report = fusedtrain.convert(ours, example, dropout="fused")
    made = {"eager": Contestant(copy.deepcopy(stock))}
    made["fusedtrain"] = Contestant(ours, str(report).partition("\n")[0])
    if case.compiled:
        torch.compiler.reset()
        made["compile"] = Contestant(torch.compile(copy.deepcopy(stock), dynamic=False))
    return made


def step_of(case: Case, who: str, model: Any, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    """A training step."""
    if who == "fusedtrain":
        optimizer: Any = fusedtrain.optim.AdamW(model.parameters(), lr=LR)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss, _ = case.loss(model, *inputs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_transformers(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("row_norm", race.device)
    try:
        stock = case.build(race.device)
    except ImportError as error:
        pytest.skip(f"{case}: {error}")
    batches = [case.inputs(race.device, seed) for seed in SEEDS]
    gate = NetworkGate(partial(results, case), stock, batches, FLOOR)
    entrants = contestants(case, stock, race.device)
    entrants = admit(entrants, lambda who, entrant: gate.check(who, entrant.model), f"{case}")
    if race.is_off:
        return
    inputs = case.inputs(race.device)
    models = {who: entrant.model for who, entrant in entrants.items()}
    owned = {who: (*inputs, *m.parameters(), *m.buffers()) for who, m in models.items()}
    saved = {
        who: kept_bytes(partial(case.loss, model, *inputs), owned[who])
        for who, model in models.items()
        if who != "compile"
    }
    race.finish(
        FAMILY,
        race.samples({who: step_of(case, who, m, inputs) for who, m in models.items()}),
        op="train",
        model=case.model,
        shape=list(case.shape),
        layout=case.layout,
        dtype=case.dtype,
        optimizer="AdamW",
        saved=saved,
        note=entrants["fusedtrain"].note,
        errors=gate.errors["fusedtrain"],
    )
