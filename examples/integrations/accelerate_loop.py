"""Accelerate: accumulated gradients, loss scaling on a GPU, clipping within the update."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import fusedtrain
from fusedtrain.integrations.accelerate import use_fused_scaler

precision = "fp16" if torch.cuda.is_available() else "bf16"
accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
use_fused_scaler(accelerator)  # before prepare

images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
data = DataLoader(TensorDataset(images.float() / 16, labels), batch_size=64, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.SiLU(), torch.nn.Linear(64, 10))
fusedtrain.convert(model)
optimizer = fusedtrain.optim.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)

skipped = steps = 0
for _ in range(3):
    for x, y in data:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()  # not after a skipped step
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps += 1
            skipped += accelerator.optimizer_step_was_skipped
print(f"loss {loss.item():.3f}, skipped {skipped} of {steps} steps")
