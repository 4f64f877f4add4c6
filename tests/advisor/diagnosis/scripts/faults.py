"""A small network with many faults; `healthy.py` has none of them."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.002)  # a file is read
        return torch.randn(3, 16, 16), index % 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.SiLU(inplace=True)
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=True),
            nn.BatchNorm2d(8),
            nn.Mish(True),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.body(self.act(self.norm(self.conv(x))))
        return self.head(x.mean((2, 3)))


def evaluate(model, batches):
    model.eval()
    right = 0
    for x, y in batches:
        right += (model(x).argmax(1) == y).sum()
    model.train()
    return right


def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Slow(), batch_size=8)
    total, losses, history = 0, [], {}
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad(set_to_none=False)
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        total += loss * len(x)
        right = output.detach().argmax(1) == y
        hard = output.detach()[~right]
        history[step] = (loss.item(), len(hard), right.nonzero().shape)
        if step == 1:
            print(loss)
        if step == 4:
            evaluate(model, [(x, y)])
    return total / len(losses or history)


if __name__ == "__main__":
    main()
