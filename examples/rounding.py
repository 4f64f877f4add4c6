"""Same numbers, to rounding: three training curves of a ResNet-18 on digits, in float32.

    python examples/rounding.py                       # 19 steps, under a minute on a CPU
    python examples/rounding.py --output docs/charts/rounding.svg

Stock PyTorch; fusedtrain (layers and optimizer); and, as a control, stock PyTorch in which the
weights of one layer start off by one unit in the last place. Weights and batches are equal
otherwise. Training amplifies any rounding: if fusedtrain stays as close to stock as the control,
it differs by no more than rounding.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import fusedtrain
from _data import digits, gather, small_resnet
from fusedtrain.advisor.bench import clock

BATCH = 32
STOCK, OURS, CONTROL = "stock", "fusedtrain", "stock, one layer off by 1 ulp"
Batches = Sequence[tuple[Tensor, Tensor]]
Optimizer = Callable[..., torch.optim.Optimizer]


def nudge(layer: nn.Module) -> None:
    """Moves every weight of a layer to the next larger float32."""
    with torch.no_grad():
        for parameter in layer.parameters(recurse=False):
            parameter.copy_(parameter.nextafter(torch.full_like(parameter, torch.inf)))


def losses_of(model: nn.Module, optimizer: Optimizer, batches: Batches, lr: float) -> list[float]:
    model.train()
    stepper = optimizer(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for images, labels in batches:
        stepper.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses


def curves(base: nn.Module, batches: Batches, lr: float) -> dict[str, list[float]]:
    """Losses by step: stock, fusedtrain, control."""
    converted, control = copy.deepcopy(base), copy.deepcopy(base)
    report = fusedtrain.convert(converted, batches[0][0])
    assert len(report) > 0, "nothing was converted"
    nudge(next(module for module in control.modules() if isinstance(module, nn.Conv2d)))
    return {
        STOCK: losses_of(base, torch.optim.SGD, batches, lr),
        OURS: losses_of(converted, fusedtrain.optim.SGD, batches, lr),
        CONTROL: losses_of(control, torch.optim.SGD, batches, lr),
    }


def draw(losses: dict[str, list[float]], setting: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "rounding"  # the same curves give the same file
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 5), height_ratios=(2, 1), sharex=True, layout="constrained"
    )
    looks = {STOCK: ("#8c8c8c", "-"), OURS: ("#e1812c", "--"), CONTROL: ("#3b75af", ":")}
    steps = range(1, len(losses[STOCK]) + 1)
    for name, curve in losses.items():
        colour, style = looks[name]
        above.plot(steps, curve, color=colour, linestyle=style, linewidth=2,
                   label=f"{name}: {curve[-1]:.3f} at the end")  # fmt: skip
        if name != STOCK:
            distance = [abs(a - b) or None for a, b in zip(curve, losses[STOCK], strict=True)]
            below.plot(steps, distance, color=colour, linestyle=style, linewidth=2)
    above.set_title(f"Training loss\n{setting}", fontsize=10, loc="left")
    above.set_ylim(bottom=0)
    above.legend(frameon=False)
    below.set_title("Distance from stock", fontsize=10, loc="left")
    below.set_yscale("log")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=19)
    parser.add_argument("--width", type=int, default=16, help="channels of the stem")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/rounding.svg"))
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    data = digits()
    order = torch.randperm(len(data.train)).split(BATCH)  # type: ignore[arg-type]
    batches = [gather(data.train, order[i % len(order)].tolist()) for i in range(args.steps)]
    losses = curves(small_resnet("resnet18", data.classes, args.width), batches, args.lr)
    threads = f"{torch.get_num_threads()} thread(s)"
    machine = f"{clock.device_name('cpu')}, {threads}, torch {torch.__version__}"
    setting = f"ResNet-18, digits, float32, SGD, rate {args.lr:g}; {machine}"
    draw(losses, setting, args.output)
    for name, curve in losses.items():
        farthest = max(abs(a - b) for a, b in zip(curve, losses[STOCK], strict=True))
        print(
            f"{name}: loss {curve[-1]:.3f} at step {args.steps}, {farthest:.2g} from stock at most"
        )
    print(f"Wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
