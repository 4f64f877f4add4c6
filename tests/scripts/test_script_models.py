"""The models of training scripts in what else people do with them: torch.compile, distributed
training, TorchScript, export, feature extraction, generation, checkpointed blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.models import transformers
from scripts import cifar_efficientnet, dcgan, imagenet, mnist, nanogpt, transformers_loop, vae
from scripts.harness import leaves

pytestmark = pytest.mark.usefixtures("one_thread")

_IMAGE = (2, 3, 16, 16)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mnist": (mnist.Net, (2, 1, 12, 12)),
    "vae": (vae.VAE, (2, 1, 8, 8)),
    "dcgan generator": (dcgan.Generator, (2, dcgan.nz, 1, 1)),
    "dcgan discriminator": (dcgan.Discriminator, _IMAGE),
    "imagenet": (imagenet.make_model, (2, 3, 32, 32)),
    "cifar_efficientnet": (lambda: cifar_efficientnet.EfficientNet(2), (2, 3, 16, 16)),
}


def script(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.jit.script(model)


def trace(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.jit.trace(model, x, check_trace=False)


def export(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.export.export(model, (x,)).module()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", [script, trace, export], ids=lambda way: way.__name__)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_the_stock_model_can_do_the_converted_one_can(
    name: str, way: Callable[[nn.Module, torch.Tensor], Any]
) -> None:
    make, shape = MODELS[name]
    stock, x = make().eval(), torch.rand(shape)
    fused = copy.deepcopy(stock)
    assert len(fusedtrain.convert(fused))
    y = x if way is export else torch.rand(3, *shape[1:])  # another size of the batch
    with torch.no_grad():
        deployed = [way(model, x) for model in (stock, fused)]
        outputs = []
        for model in deployed:
            torch.manual_seed(0)
            outputs.append(leaves(model(y)))
    torch.testing.assert_close(outputs[1], outputs[0])


@pytest.fixture
def one_process() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_distributed_training() -> None:
    single, distributed = imagenet.main("recompute"), imagenet.main("recompute", distributed=True)
    assert distributed.losses == single.losses
    keys = list(distributed.parts["model"].model.state_dict())
    assert keys == [f"module.{key}" for key in single.parts["model"].model.state_dict()]


@pytest.mark.slow
def test_compiled_training() -> None:
    torch._dynamo.reset()
    stock, fused = nanogpt.main(), nanogpt.main("recompute", compiled=True)
    assert fused.losses == pytest.approx(stock.losses, rel=1e-2)  # bfloat16


def test_checkpointed_blocks_of_transformers() -> None:
    """Inside of torch.utils.checkpoint nothing is computed again by fusedtrain."""
    stock = transformers_loop.main(name="Llama", checkpointing=True)
    fused = transformers_loop.main("recompute", name="Llama", checkpointing=True)
    assert fused.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_generation(name: str) -> None:
    package: Any = transformers()
    kind, options = transformers_loop.MODELS[name]
    torch.manual_seed(0)
    model = getattr(package, kind)(getattr(package, f"{name}Config")(**options)).eval()
    prompt = torch.tensor([[3, 4, 5], [7, 8, 9]])
    settings = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **settings)
    assert fusedtrain.convert(model, {"input_ids": prompt}, memory="recompute")
    assert torch.equal(model.generate(prompt, **settings), expected)
