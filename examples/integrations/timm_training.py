"""timm: its factory, scaler, averages and schedule, with fused layers and a fused optimizer."""

import timm
import torch
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3

import fusedtrain

fusedtrain.integrations.timm.register()
device = "cuda" if torch.cuda.is_available() else "cpu"
pixels, labels = map(torch.as_tensor, load_digits(return_X_y=True))
images = pixels.float().view(-1, 1, 8, 8) / 16
images = torch.nn.functional.interpolate(images, 32).to(memory_format=torch.channels_last)

model = timm.create_model("test_resnet", num_classes=10, in_chans=1, act_layer="fusedtrain-silu")
model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
fusedtrain.convert(model, lambda: images[:4].to(device))
optimizer = create_optimizer_v2(model, opt="fusedtrain-adamw", lr=3e-3, weight_decay=0.05, agc=0.05)
scaler = fusedtrain.amp.GradScaler(device)
averages = ModelEmaV3(model, decay=0.95)
schedule, _ = create_scheduler_v2(
    optimizer, num_epochs=2, step_on_epochs=False, updates_per_epoch=8
)

for step in range(16):
    x, y = (t[step * 32 :][:32].to(device) for t in (images, labels))
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # unscales, clips and updates in two sweeps
    scaler.update()
    averages.update(model)
    schedule.step_update(step + 1)
    print(f"step {step}, loss {loss.item():.3f}")
