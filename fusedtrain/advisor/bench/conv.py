"""Convolution, batch norm and activation, twice: a training step after ``convert``, inference after
``fold_conv_bn``, and training with frozen statistics after ``fold_frozen_norms``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._text import shape_text
from ...conversion import convert
from ...folding import fold_conv_bn, fold_frozen_norms
from ._match import COMPILE, EAGER, LAYOUTS, OURS, Entry, Match, Options
from .clock import Call
from .gate import CHAIN, NetworkGate, Results

CHANNELS, LAYERS = 64, 2
GATE_BATCH = 2
TRAIN, TUNE, INFERENCE = "training", "frozen statistics", "inference"
# Tensors as large as the input that a layer reads and writes at least. A convolution: 2 forward, 4
# backward (the gradient twice, for both of its results); the norm with its activation in training:
# 3 and 5; the activation alone, after folding in training: 2 and 3; in inference it is folded, too.
TENSORS = {TRAIN: 2 + 4 + 3 + 5, TUNE: 2 + 4 + 2 + 3, INFERENCE: 2}


def network(options: Options, job: str, layout: str) -> nn.Module:
    """Seeded; without ReLU, on whose edge rounding would decide about gradients."""
    generator = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        norm = nn.BatchNorm2d(CHANNELS)
        layers += [conv, norm, nn.SiLU()]
        with torch.no_grad():
            for tensor, around in ((norm.weight, 1.0), (norm.bias, 0.0), (norm.running_var, 1.0)):
                assert tensor is not None
                tensor.copy_(around + 0.2 * torch.rand(CHANNELS, generator=generator) - 0.1)
            conv.weight.copy_(0.06 * torch.randn(conv.weight.shape, generator=generator))
    model = nn.Sequential(*layers).to(options.device, options.dtype)
    model.to(memory_format=LAYOUTS[layout])  # type: ignore[call-overload]
    for module in model.modules():
        if job == INFERENCE or (job == TUNE and isinstance(module, nn.BatchNorm2d)):
            module.eval()
    return model


def _converted(model: nn.Module, x: Tensor) -> nn.Module:
    convert(model, x)
    return model


def _tuned(model: nn.Module, x: Tensor) -> nn.Module:
    fold_frozen_norms(model)
    return model


_CHANGES: Mapping[str, Callable[[nn.Module, Tensor], Any]] = {
    TRAIN: _converted,
    TUNE: _tuned,
    INFERENCE: lambda model, x: fold_conv_bn(model, x)[0],
}


def entries(options: Options) -> Iterator[Entry]:
    """The rows of the family."""
    pixels = 14 if options.quick else 56
    image = CHANNELS * pixels**2
    batch = max(1, options.elements(8 * image, 128 * image, 2 * image) // image)
    shape = (batch, CHANNELS, pixels, pixels)
    for job in (TRAIN, TUNE, INFERENCE):
        for layout in tuple(LAYOUTS)[options.quick :]:
            make = partial(_match, options, job, shape, layout)
            yield Entry("conv", "conv_bn_silu x2", job, shape_text(shape), make, layout)


def _call(job: str, model: Any, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """The output, and in training the gradients of all parameters."""
    if job == INFERENCE:
        with torch.no_grad():
            return [model(x)]
    output = model(x)
    return [output.detach(), *torch.autograd.grad(output, list(model.parameters()), gradient)]


def _results(job: str, model: Any, x: Tensor, gradient: Tensor) -> Results:
    names = ["output", *(f"gradient of parameter {n}" for n, _ in enumerate(model.parameters()))]
    return {name: [t] for name, t in zip(names, _call(job, model, x, gradient))}


def _match(options: Options, job: str, shape: tuple[int, ...], layout: str) -> Match:
    x, gradient = (options.random(*shape, seed=n, layout=layout) for n in (0, 1))
    stock = network(options, job, layout)

    def model_of(who: str) -> Any:
        model = copy.deepcopy(stock)
        if who == COMPILE:
            torch.compiler.reset()
            return torch.compile(model, dynamic=False)
        return _CHANGES[job](model, x) if who == OURS else model

    models = {who: model_of(who) for who in (OURS, EAGER, *[COMPILE] * options.compiled)}
    # The whole batch where torch.compile takes part: its code is for one size.
    few = shape[0] if options.compiled else min(shape[0], GATE_BATCH)
    floor = CHAIN[options.dtype].norm
    gate = NetworkGate(partial(_results, job), stock, [(x[:few], gradient[:few])], floor)
    calls: dict[str, Call] = {who: partial(_call, job, m, x, gradient) for who, m in models.items()}
    weights = LAYERS * CHANNELS**2 * 9 * options.dtype.itemsize
    moved = LAYERS * TENSORS[job] * x.nbytes + weights * (1 if job == INFERENCE else 3)
    return Match(calls, lambda who: gate.check(who, models[who]), moved, x)
