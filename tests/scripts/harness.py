"""Results that scripts hand to the tests, data and loops of scripts, and the comparison of runs."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fusedtrain

State = dict[str, dict[str, Any]]  # of each part: its state dicts


@dataclass
class Part:
    """A trained model with its optimizer and arguments that the model takes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    example: Any
    report: fusedtrain.ConversionReport | None = None


@dataclass
class Run:
    """Results of a script. `again` trains another epoch and returns its losses."""

    parts: dict[str, Part]
    losses: list[float]
    again: Callable[[], list[float]]
    averages: dict[str, Tensor] = field(default_factory=dict)  # of the weights, by name
    checkpoint: bytes = b""  # after the first epoch


Loss = Callable[[Any, Tensor], Tensor]  # of output and target


def epoch(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, loss_of: Loss
) -> list[float]:
    """The plainest loop; its losses."""
    model.train()
    losses = []
    for input, target in loader:
        optimizer.zero_grad()
        loss = loss_of(model(input), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def validate(model: nn.Module, loader: DataLoader, loss_of: Loss) -> float:
    """The mean loss in evaluation."""
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model(input), target).item() for input, target in loader]
    return sum(losses) / len(losses)


def epochs(
    parts: Mapping[str, Any], resume: bytes, run: Callable[[], list[float]]
) -> tuple[list[float], bytes]:
    """Losses of two epochs, of which a resumed run does the second; a checkpoint of the first."""
    losses: list[float] = []
    checkpoint, first = b"", 0
    if resume:
        states = torch.load(io.BytesIO(resume))
        first = states["epoch"]
        for name, part in parts.items():
            part.load_state_dict(states[name])
    for number in range(first, 2):
        torch.manual_seed(number)  # a resumed run sees the same batches
        losses += run()
        if number == 0:
            file = io.BytesIO()
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "epoch": number + 1}, file)
            checkpoint = file.getvalue()
    return losses, checkpoint


def call(model: nn.Module, example: Any) -> Any:
    return model(**example) if isinstance(example, dict) else model(example)


def leaves(output: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def images(count: int, size: int, channels: int = 3, classes: int = 10) -> TensorDataset:
    """A pattern for each class, with noise."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(count) % classes
    patterns = torch.randn(classes, channels, size, size, generator=generator)
    noise = torch.randn(count, channels, size, size, generator=generator)
    return TensorDataset(patterns[labels] + 0.5 * noise, labels)


def tokens(count: int, length: int, vocabulary: int) -> Tensor:
    """Rows that count upwards from random starts, without the token 0."""
    starts = torch.randint(vocabulary, (count, 1), generator=torch.Generator().manual_seed(5))
    return (starts + torch.arange(length)) % (vocabulary - 1) + 1


def saved(value: Any) -> Any:
    """A value after torch.save and torch.load: a checkpoint holds no classes."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def saved_whole(model: nn.Module) -> nn.Module:
    """The same for a module as such."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def state_of(run: Run) -> State:
    return {
        name: {"model": part.model.state_dict(), "optimizer": part.optimizer.state_dict()}
        for name, part in run.parts.items()
    }


def load(run: Run, state: State) -> None:
    for name, part in run.parts.items():
        part.model.load_state_dict(state[name]["model"])
        part.optimizer.load_state_dict(copy.deepcopy(state[name]["optimizer"]))


def continued(run: Run, state: State) -> list[float]:
    """The losses of an epoch that begins with this checkpoint."""
    load(run, state)
    torch.manual_seed(11)
    return run.again()


def evaluated(model: nn.Module, example: Any) -> dict[str, Tensor]:
    torch.manual_seed(7)  # an autoencoder draws in evaluation, too
    model.eval()
    with torch.no_grad():
        return {f"output {i}": leaf for i, leaf in enumerate(leaves(call(model, example)))}


def trained(model: nn.Module, example: Any) -> dict[str, Tensor]:
    """Outputs, gradients and buffers of a forward and backward in training."""
    torch.manual_seed(7)
    model.train()
    model.zero_grad()
    outputs = [leaf for leaf in leaves(call(model, example)) if leaf.requires_grad]
    terms = [(y * torch.linspace(-1, 1.5, y.numel()).view_as(y)).sum() for y in outputs]
    torch.stack(terms).sum().backward()
    results = {f"output {i}": leaf.detach() for i, leaf in enumerate(outputs)}
    named = model.named_parameters()
    results |= {f"gradient of {name}": p.grad for name, p in named if p.grad is not None}
    return results | {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    """Compares the norms of tensors; a norm below 1e-3 counts as 1e-3."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].dtype is value.dtype, name
        if value.is_floating_point():
            largest = max(float(value.detach().norm()), 1e-3)
            assert float((actual[name] - value).detach().norm()) <= tolerance * largest, name
        else:
            assert torch.equal(actual[name], value), name


def assert_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
