"""Fine-tune a timm model: first the head on a frozen, folded backbone, then all with frozen norms.

python examples/recipes/finetune_frozen.py --pretrained --model resnet50 --steps 200
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import timm
import torch
from torch import Tensor, nn

import fusedtrain

CLASSES, SIZE = 4, 64


def pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise with one bright quarter; the label says which one."""
    images = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    half = SIZE // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = divmod(label, 2)
        image[:, top * half :, left * half :][:, :half, :half] += 1.0
    return images, labels


def train_head(backbone: nn.Module, head: nn.Module, steps: int, batch: int) -> float:
    """The backbone gives features and learns nothing: its copy runs folded, without norms."""
    generator = torch.Generator().manual_seed(1)
    example = torch.randn(batch, 3, SIZE, SIZE)
    features, report = fusedtrain.fold_conv_bn(backbone.eval(), example)
    print(report)
    optimizer = fusedtrain.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(steps):
        images, labels = pictures(batch, generator)
        with torch.no_grad():
            inputs = features(images)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(head(inputs), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


def train_all(backbone: nn.Module, head: nn.Module, steps: int, batch: int) -> float:
    """Everything learns but the running statistics: norms stay in eval mode."""
    generator = torch.Generator().manual_seed(2)
    print(fusedtrain.fold_frozen_norms(backbone, torch.randn(batch, 3, SIZE, SIZE)))
    model = nn.Sequential(backbone, head)
    optimizer = fusedtrain.optim.AdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)
    for _ in range(steps):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        images, labels = pictures(batch, generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    fusedtrain.revert(backbone)  # the checkpoint was a plain one all along
    return loss.item()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--pretrained", action="store_true", help="timm downloads the weights")
    parser.add_argument("--steps", type=int, default=30, help="of each of the two parts")
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    backbone = timm.create_model(args.model, pretrained=args.pretrained, num_classes=0)
    features = int(backbone.num_features)  # type: ignore[arg-type]
    head = nn.Linear(features, CLASSES)
    frozen = train_head(backbone, head, args.steps, args.batch_size)
    tuned = train_all(backbone, head, args.steps, args.batch_size)
    print(f"loss: {frozen:.3f} with the head alone, {tuned:.3f} after fine-tuning everything")
    return 0


if __name__ == "__main__":
    sys.exit(main())
