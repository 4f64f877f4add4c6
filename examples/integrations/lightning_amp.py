"""Lightning: mixed precision with clipping, a converted model, validation on averaged weights."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fusedtrain
from fusedtrain.integrations.lightning import FusedCallback, FusedMixedPrecision


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(32)
        layers = [nn.Conv2d(1, 32, 3, bias=False), norm, nn.SiLU(), nn.Flatten()]
        self.model = nn.Sequential(*layers, nn.Linear(32 * 36, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.model(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return fusedtrain.optim.AdamW(self.parameters(), lr=3e-3, ema_decay=0.9)


images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
data = TensorDataset(images.float().reshape(-1, 1, 8, 8) / 16, labels)
train, test = (torch.utils.data.Subset(data, range(i, 1797, 2)) for i in (0, 1))
trainer = lightning.Trainer(
    max_epochs=2, gradient_clip_val=1.0, log_every_n_steps=5, logger=False,
    plugins=FusedMixedPrecision("16-mixed" if torch.cuda.is_available() else "bf16-mixed"),
    callbacks=FusedCallback(submodule="model", averages=True), enable_checkpointing=False,
)  # fmt: skip
trainer.fit(Digits(), DataLoader(train, 64, shuffle=True), DataLoader(test, 256))
print({name: round(value.item(), 3) for name, value in trainer.logged_metrics.items()})
