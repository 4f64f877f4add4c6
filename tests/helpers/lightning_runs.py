"""Runs of Lightning's Trainer on small networks in float64, by fusedtrain and by torch."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fusedtrain
from helpers.models import lightning

BATCHES, SIZE = 4, 4
OPTIMIZERS = {"ours": fusedtrain.optim.AdamW, "torch": torch.optim.AdamW}


def plugin(precision: str = "16-mixed", package: str = "lightning", **options: Any) -> Any:
    lightning(package)
    module = importlib.import_module(f"fusedtrain.integrations.{package}")
    return module.FusedMixedPrecision(precision, "cpu", **options)


def callback(package: str = "lightning", **options: Any) -> Any:
    lightning(package)
    return importlib.import_module(f"fusedtrain.integrations.{package}").FusedCallback(**options)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    # A bias before the norm would have rounding for a gradient, which Adam makes a step of.
    layers = (
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(16, 1),
    )
    return nn.Sequential(*layers).double()


def module(whose: str, package: str = "lightning", base: Any = None, **options: Any) -> Any:
    """A LightningModule with the network, whose loss is float64 in spite of autocast.

    Args:
        whose: key of OPTIMIZERS.
        base: class with hooks, which comes first.
        options: arguments of the optimizer.
    """

    class Module(lightning(package).LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()
            self.val_losses: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.model(x)

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            x, y = batch
            return (self(x) - y).square().mean()

        def validation_step(self, batch: list[Tensor], number: int) -> None:
            x, y = batch
            self.val_losses.append((self(x) - y).square().mean().item())

        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[whose](self.parameters(), **{"lr": 0.02, **options})

    return Module() if base is None else type("Based", (base, Module), {})()


def data(overflow: int | None = None) -> DataLoader[Any]:
    """Four batches; the loss of batch `overflow` is infinite."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(BATCHES * SIZE, 2, 4, 4, generator=generator, dtype=torch.float64)
    y = 3 * torch.randn(BATCHES * SIZE, 1, generator=generator, dtype=torch.float64)
    if overflow is not None:
        y[overflow * SIZE] = float("inf")
    return DataLoader(TensorDataset(x, y), batch_size=SIZE)


def trainer(package: str = "lightning", **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": 1, "max_epochs": 2}
    return lightning(package).Trainer(**{**quiet, **options})


def assert_equal_parameters(ours: nn.Module, theirs: nn.Module, rtol: float = 1e-9) -> None:
    """Compares float64 networks whose gradients' norm is summed in another order."""
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=rtol, atol=rtol)
