"""Matrix products in float32, and nothing but them."""

import torch
from torch import nn

torch.set_num_threads(1)


def main():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(64, 64)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
