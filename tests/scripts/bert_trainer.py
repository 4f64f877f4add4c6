"""BERT by the Trainer of transformers, which owns the loop, the schedule and the clipping."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import fusedtrain
from helpers.models import accelerate, transformers

from .harness import Part, Run
from .transformers_loop import MODELS, batches


def main(fused: str = "") -> Run:
    accelerate()
    package: Any = transformers()
    torch.manual_seed(42)
    kind, options = MODELS["Bert"]
    options = {**options, "hidden_size": 64, "intermediate_size": 128}
    model, report = getattr(package, kind)(package.BertConfig(**options)), None
    rows: Any = batches("Bert")
    example = next(iter(DataLoader(rows, batch_size=4)))
    if fused:
        report = fusedtrain.convert(model, example, memory=fused)
    losses: list[float] = []

    class Trainer(package.Trainer):
        def training_step(self, model: nn.Module, *inputs: Any, **named: Any) -> torch.Tensor:
            loss = super().training_step(model, *inputs, **named)
            losses.append(loss.item())
            return loss

    AdamW = fusedtrain.optim.AdamW if fused else torch.optim.AdamW
    with tempfile.TemporaryDirectory() as folder:
        settings = package.TrainingArguments(
            output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
            logging_strategy="no", per_device_train_batch_size=4, num_train_epochs=1,
            warmup_steps=1, max_grad_norm=0.0 if fused else 1.0, weight_decay=0.01,
        )  # fmt: skip
        keywords = {"lr": 2e-3, **({"max_grad_norm": 1.0} if fused else {})}
        trainer = Trainer(
            model, settings, train_dataset=rows, optimizer_cls_and_kwargs=(AdamW, keywords)
        )

        def train() -> list[float]:
            losses.clear()
            trainer.train()
            return losses[:]

        part = Part(model, torch.optim.Optimizer([torch.zeros(1)], {}), example, report)
        run = Run({"bert": part}, train(), train)
    part.optimizer = trainer.optimizer.optimizer  # within accelerate's
    return run
