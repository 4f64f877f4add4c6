"""Models of transformers in a loop of one's own, which accumulates gradients as accelerate does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fusedtrain
from helpers.models import transformers

from .harness import Part, Run, images, tokens

_TEXT: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 40, "pad_token_id": 0,
}  # fmt: skip
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 16}
_VIT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_labels": 4,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
_CONVNEXT = {"hidden_sizes": [4, 6, 8, 8], "depths": [1, 1, 2, 1], "num_labels": 4,
             "layer_scale_init_value": 0.5, "drop_path_rate": 0.1}  # fmt: skip
# Name -> class, arguments of its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", _TEXT | {"num_key_value_heads": 1}),
    "GPT2": ("GPT2LMHeadModel", _GPT2 | {"bos_token_id": 1, "eos_token_id": 2}),
    "Bert": ("BertForSequenceClassification", _TEXT | {"num_labels": 4}),
    "ViT": ("ViTForImageClassification", _VIT),
    "ConvNext": ("ConvNextForImageClassification", _CONVNEXT),
}


class Accelerator:
    """Accumulates gradients, scales no losses, and steps at the end of an accumulation."""

    def __init__(self, gradient_accumulation_steps: int) -> None:
        self.steps, self.calls = gradient_accumulation_steps, 0
        self.sync_gradients = False

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        self.calls += 1
        self.sync_gradients = self.calls % self.steps == 0
        yield

    def backward(self, loss: Tensor) -> None:
        (loss / self.steps).backward()


def batches(name: str) -> list[dict[str, Tensor]]:
    if name in ("ViT", "ConvNext"):
        dataset = images(16, 16 if name == "ViT" else 32, classes=4)
        rows = [{"pixel_values": x, "labels": y} for x, y in dataset]
    else:
        ids = tokens(16, 9, 40)
        ids[::2, -2:] = 0  # padding
        rows = [{"input_ids": row, "attention_mask": (row != 0).long()} for row in ids]
        for i, row in enumerate(rows):
            causal = torch.where(row["input_ids"] == 0, -100, row["input_ids"])
            row["labels"] = torch.tensor(i % 4) if name == "Bert" else causal
    return rows


def main(fused: str = "", name: str = "Llama", checkpointing: bool = False) -> Run:
    package: Any = transformers()
    torch.manual_seed(42)
    kind, options = MODELS[name]
    model = getattr(package, kind)(getattr(package, f"{name}Config")(**options))
    if checkpointing:
        model.gradient_checkpointing_enable()
    report = None
    rows = batches(name)
    loader = DataLoader(rows, batch_size=4, shuffle=True)
    example = next(iter(DataLoader(rows, batch_size=4)))
    if fused:
        report = fusedtrain.convert(model, example, memory=fused)
    no_decay = ["bias", "norm", "ln_"]
    named = list(model.named_parameters())
    groups = [
        {
            "params": [p for n, p in named if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    if fused:
        optimizer = fusedtrain.optim.AdamW(groups, lr=2e-3, max_grad_norm=1.0)
    else:
        optimizer = torch.optim.AdamW(groups, lr=2e-3)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    lr_scheduler = package.get_linear_schedule_with_warmup(optimizer, 1, 6)

    def train() -> list[float]:
        model.train()
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                if accelerator.sync_gradients:
                    if not fused:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    lr_scheduler.step()
                    optimizer.zero_grad()
            losses.append(outputs.loss.item())
        return losses

    losses = train()
    model.eval()
    with torch.no_grad():
        losses.append(model(**example).loss.item())
    return Run({"model": Part(model, optimizer, example, report)}, losses, train)
