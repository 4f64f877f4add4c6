"""Modules and models exported to ONNX by both exporters of torch, run in onnxruntime.

The graphs have operators of ONNX alone, and the numbers are those of eager mode, at another size of
the batch too.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
import fusedtrain.nn as fnn
from helpers.models import but_long, onnxruntime, torchvision

pytestmark = pytest.mark.filterwarnings("ignore")  # of exporters about themselves
EXPORTERS = ["dynamo", "torchscript"]

# The modules that need arguments; x is [N, 4, 4, 4].
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "BatchNormAct1d": (4,),
    "BatchNormAct2d": (4,),
    "BatchNormAct3d": (4,),
    "BatchNormAddAct": (4,),
    "BiasActDropout": (4,),
    "ConvBnAct": (4, 6, 3),
    "DepthwiseConv1d": (4, 8, 3),
    "DepthwiseConv2d": (4, 4, 3, 2, 1),
    "DepthwiseConv3d": (4, 4, (1, 3, 3)),
    "DropPath": (0.5,),
    "Dropout": (0.5,),
    "GroupNorm": (2, 4),
    "GroupNormAct": (4, 2),
    "GroupNorm1Act": (4,),
    "LayerNorm": (4,),
    "LayerNorm2d": (4,),
    "LayerNormAct2d": (4,),
    "MaxPool2d": (2,),
    "NormalizeImages": ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
    "PReLU": (4,),
    "RmsNorm2d": (4,),
    "SyncBatchNormAct": (4,),
    "Threshold": (0.0, 0.0),  # the TorchScript exporter knows no other threshold
}
INPUTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "BatchNormAct1d": lambda x, pixels: (x.flatten(2),),
    "DepthwiseConv1d": lambda x, pixels: (x.flatten(2),),
    "DepthwiseConv3d": lambda x, pixels: (x.unsqueeze(2),),
    "BatchNormAct3d": lambda x, pixels: (x.unsqueeze(2),),
    "BatchNormAddAct": lambda x, pixels: (x, x * 0.5),
    "NormalizeImages": lambda x, pixels: (pixels,),
}
# The TorchScript exporter lacks torch's own RMS norm, too.
_CLASSES = [name for name in fnn.__all__ if isinstance(getattr(fnn, name), type)]
NAMES = [name for name in _CLASSES if name not in ("RMSNorm", "RmsNorm2d")]


def randomized(model: nn.Module) -> nn.Module:
    """In eval mode, with parameters of norms and statistics other than the first ones."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.weight, module.running_var):
                nn.init.uniform_(tensor, 0.7, 1.3)
            for tensor in (module.bias, module.running_mean):
                nn.init.normal_(tensor, std=0.2)
    return model.eval()


class Every(nn.Module):
    """Every module of fusedtrain.nn once: one export of all takes a fifth of an export of each."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {f"part_{name}": getattr(fnn, name)(*ARGUMENTS.get(name, ())) for name in NAMES}
        )

    def forward(self, x: Tensor, pixels: Tensor) -> tuple[Tensor, ...]:
        parts = zip(NAMES, self.parts.values(), strict=True)
        return tuple(
            part(*(INPUTS[name](x, pixels) if name in INPUTS else (x,))) for name, part in parts
        )


class Exported(NamedTuple):
    proto: Any
    operators: set[tuple[str, str]]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        session = onnxruntime().InferenceSession(
            self.proto.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        arguments = zip(session.get_inputs(), inputs, strict=True)
        outputs = session.run(None, {a.name: value.numpy() for a, value in arguments})
        return [torch.from_numpy(output) for output in outputs]


def export(model: nn.Module, inputs: tuple[Tensor, ...], exporter: str) -> Exported:
    """With a batch of any size."""
    onnxruntime()
    import onnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "dynamo":
            sizes = tuple({0: "batch"} for _ in inputs)
            program = torch.onnx.export(
                model, inputs, dynamo=True, dynamic_shapes=sizes, verbose=False
            )
            assert program is not None
            proto = program.model_proto
        else:
            names = [f"input_{number}" for number in range(len(inputs))]
            file = io.BytesIO()
            torch.onnx.export(
                model, inputs, file, dynamo=False, input_names=names,
                dynamic_axes={name: {0: "batch"} for name in names},
            )  # fmt: skip
            proto = onnx.load_from_string(file.getvalue())
    assert not proto.functions
    return Exported(proto, {(node.domain, node.op_type) for node in proto.graph.node})


def inputs_of(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 4, 4, 4, generator=generator) * 4
    x[0, 0, 0] = torch.tensor([-25.0, 0.0, 25.0, -0.5])  # tails of every formula, and its kink
    return x, torch.randint(256, (samples, 3, 5, 5), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_every_module(exporter: str) -> None:
    torch.manual_seed(0)
    model = randomized(Every())
    exported = export(model, inputs_of(2), exporter)
    assert {domain for domain, _ in exported.operators} == {""}
    inputs = inputs_of(3)
    outputs, expected = list(exported(*inputs)), list(model(*inputs))
    # The exporters write torch's LogSigmoid as Log(Sigmoid(x)): -inf at -25 in onnxruntime.
    tail = NAMES.index("LogSigmoid")
    outputs[tail], expected[tail] = (y.clamp_min(-4) for y in (outputs[tail], expected[tail]))
    wrong = {
        name: (got - want).abs().max().item() if got.shape == want.shape else got.shape
        for name, got, want in zip(NAMES, outputs, expected, strict=True)
        if got.shape != want.shape
        or not torch.allclose(got, want, rtol=1e-5, atol=2e-6 * (1 + want.abs().max().item()))
    }
    assert not wrong


def resnet(*blocks: int) -> nn.Module:
    """torchvision's ResNet of bottlenecks, of one eighth of the width inside of a block."""
    torchvision()
    from torchvision.models.resnet import Bottleneck, ResNet

    torch.manual_seed(0)
    return randomized(ResNet(Bottleneck, blocks, num_classes=5, width_per_group=8))


@pytest.mark.slow
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("change", [fusedtrain.convert, fusedtrain.fold_conv_bn])
def test_resnet(change: Callable[[nn.Module], Any], exporter: str) -> None:
    """As deep as ResNet-50, but for the dynamo exporter, which takes ten times longer."""
    blocks = (3, 4, 6, 3) if exporter == "torchscript" else (1, 1, 1, 1)
    model = resnet(*blocks)
    x = torch.randn(3, 3, 40, 40)
    with torch.no_grad():
        stock = model(x)
    if change is fusedtrain.fold_conv_bn:
        model, report = change(model)  # a copy
        assert len(report.folded) == len([m for m in model.modules() if isinstance(m, nn.Conv2d)])
    else:
        assert change(model)
    exported = export(model, (x[:2],), exporter)
    assert {domain for domain, _ in exported.operators} == {""}
    names = {name for _, name in exported.operators}
    # The exporters fold norms into convolutions, too. A cast would be one between equal dtypes.
    assert not names & {"BatchNormalization", "Cast"}
    torch.testing.assert_close(
        exported(x)[0], stock, rtol=1e-4, atol=1e-5 * stock.abs().max().item()
    )


@pytest.mark.slow
@pytest.mark.parametrize("exporter", but_long(["torchscript", "dynamo"], "dynamo"))
def test_resnet50(exporter: str) -> None:
    """Full width, converted and folded, at another batch than the exporter's."""
    torchvision()
    from torchvision.models import resnet50

    torch.manual_seed(0)
    model = randomized(resnet50(num_classes=10))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        stock = model(x)
    assert len(fusedtrain.convert(model).norms) == 49  # but those of shortcuts
    model, report = fusedtrain.fold_conv_bn(model)
    assert len(report.folded) == 53
    exported = export(model, (x[:1],), exporter)
    assert {domain for domain, _ in exported.operators} == {""}
    assert not {name for _, name in exported.operators} & {"BatchNormalization", "Cast"}
    torch.testing.assert_close(
        exported(x)[0], stock, rtol=1e-4, atol=2e-5 * stock.abs().max().item()
    )
