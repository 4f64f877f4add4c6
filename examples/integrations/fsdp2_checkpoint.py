"""FSDP2: run `torchrun --nproc-per-node 2 fsdp2_checkpoint.py`; again with 1 or 3 ranks."""

import os

import torch
from sklearn.datasets import load_digits
from torch import distributed as dist, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

import fusedtrain

device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
dist.init_process_group()  # nccl on a GPU, else gloo
rank, ranks, folder = dist.get_rank(), dist.get_world_size(), "fsdp2_checkpoint"
torch.manual_seed(0)  # every rank makes the same weights, of which it keeps a part
model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.SiLU(), nn.Linear(256, 10))
fusedtrain.convert(model.to(device))  # before fully_shard
for layer in (model[0], model[3], model):
    fully_shard(layer)
optimizer = fusedtrain.optim.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0, ema_decay=0.9)
weights, states = get_state_dict(model, optimizer)
if os.path.exists(folder):  # written by any number of ranks
    load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
images, labels = (torch.as_tensor(t, device=device) for t in load_digits(return_X_y=True))
for step in range(20):
    batch = slice(128 * (step % 14) + rank, 128 * (step % 14 + 1), ranks)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[batch].float() / 16), labels[batch])
    loss.backward()
    optimizer.step()
weights, states = get_state_dict(model, optimizer)
save({"model": weights, "optimizer": states}, checkpoint_id=folder)
if rank == 0:
    print(f"loss {loss.item():.3f}, norm of all gradients {optimizer.grad_norm:.3f}")
dist.destroy_process_group()
