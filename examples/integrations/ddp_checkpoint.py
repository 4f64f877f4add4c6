"""DDP: run `torchrun --nproc-per-node 2 ddp_checkpoint.py`; the second run goes on."""

import os
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import distributed as dist, nn

import fusedtrain

device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
dist.init_process_group()  # nccl on a GPU, else gloo
rank, ranks, path = dist.get_rank(), dist.get_world_size(), "ddp_checkpoint.pt"
norm, last = nn.BatchNorm2d(8), nn.Linear(8 * 36, 10)
model = nn.Sequential(nn.Conv2d(1, 8, 3), norm, nn.SiLU(), nn.Flatten(), last).to(device)
fusedtrain.convert(model)
fusedtrain.nn.convert_sync_batchnorm(model)
ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = fusedtrain.optim.AdamW(model.parameters(), lr=3e-3, gradient_writeback="zero")
scaler = fusedtrain.amp.GradScaler("cuda", enabled=device != "cpu")
parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scaler": scaler}
state = torch.load(path, map_location=device) if os.path.exists(path) else {"step": 0}
for name in parts.keys() & state.keys():
    parts[name].load_state_dict(state[name])
images, labels = (torch.as_tensor(t, device=device) for t in load_digits(return_X_y=True))
for step in range(state["step"], state["step"] + 20):
    batch = slice(128 * (step % 14) + rank, 128 * (step % 14 + 1), ranks)
    with torch.autocast("cuda", torch.float16, enabled=device != "cpu"):
        logits = ddp(images[batch].float().reshape(-1, 1, 8, 8) / 16)
    scaler.scale(nn.functional.cross_entropy(logits.float(), labels[batch])).backward()
    scaler.step(optimizer)
    scaler.update()
if rank == 0:  # all ranks hold the same; the file is replaced as a whole
    state_dicts = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state_dicts, "step": step + 1}, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)
    print(f"from step {state['step']}: {(logits.argmax(1) == labels[batch]).float().mean():.2f}")
dist.destroy_process_group()
