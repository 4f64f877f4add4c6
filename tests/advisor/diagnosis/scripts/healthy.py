"""The network of `faults.py`, trained as it should be."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fusedtrain

torch.set_num_threads(1)
torch.backends.cudnn.benchmark = True
torch.set_float32_matmul_precision("high")


class Images(Dataset):
    def __init__(self):
        self.images = torch.randn(64, 3, 16, 16)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.images[index], index % 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.SiLU()
        self.inner = nn.Conv2d(8, 8, 3, padding=1)  # its bias is needed: no norm follows
        self.relu = nn.ReLU(inplace=True)  # in place, and nothing is cloned
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.relu(self.inner(self.act(self.norm(self.conv(x)))))
        return self.head(x.mean((2, 3)))


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    right = 0
    for x, y in batches:
        right += (model(x).argmax(1) == y).sum()
    model.train()
    return right


def main():
    model = Net().to(memory_format=torch.channels_last)
    fusedtrain.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(Images(), batch_size=8)
    total, first = 0, None
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        x = x.to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        first = loss if first is None else first  # one graph that stays does not grow
        if step == 4:
            evaluate(model, [(x, y)])
    return total.item()


if __name__ == "__main__":
    main()
