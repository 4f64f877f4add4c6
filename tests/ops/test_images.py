"""Normalised images: the function and the module."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.ops import images as _images
from helpers.backends import Registered
from helpers.images import DTYPES, FORMATS, MEAN, STD, check, last, random_bytes

pytestmark = pytest.mark.usefixtures("memory_is_full_of_nan")


@pytest.mark.long  # 20 s each, most of which is page faults
@pytest.mark.skipif(
    os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") < 10 << 30,
    reason="needs 10 GiB of free memory",
)
@pytest.mark.parametrize("to", FORMATS[1:], ids=str)
def test_more_than_2_to_31_elements(to: torch.memory_format) -> None:
    torch.use_deterministic_algorithms(False)  # which would fill the output once more
    x = torch.zeros(715_900 * 1000 * 3, dtype=torch.uint8).view(1, 715_900, 1000, 3)
    x = x.permute(0, 3, 1, 2)
    x[0, :, -1, -1] = torch.tensor([51, 102, 255], dtype=torch.uint8)
    y = F.normalize_images(x, [0.0, 0.1, 0.2], 1.0, torch.float16, to)
    assert y.is_contiguous(memory_format=to)
    want = torch.tensor([0.2, 0.3, 0.8], dtype=torch.float16)
    assert torch.equal(y[0, :, -1, -1], want)
    assert torch.equal(y[0, :, -1, -2], torch.tensor([0.0, -0.1, -0.2], dtype=torch.float16))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_as_torch_does_it(dtype: torch.dtype) -> None:
    for x in (random_bytes(3, 10, 12), random_bytes(2, 3, 10, 12), last(random_bytes(2, 3, 9, 9))):
        mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (MEAN, STD))
        y = F.normalize_images(x, MEAN, STD, dtype=dtype)
        assert y.dtype is dtype
        assert y.stride() == x.stride()
        assert not y.requires_grad
        if dtype is torch.float64:
            torch.testing.assert_close(y, (x.double() / 255 - mean) / std, rtol=1e-14, atol=1e-14)
        else:
            check(y, x, MEAN, STD)


def test_numbers_of_every_kind() -> None:
    x = random_bytes(2, 3, 4, 5)
    want = F.normalize_images(x, [0.5] * 3, [0.25] * 3)
    for mean, std in (
        (0.5, 0.25),
        ((0.5, 0.5, 0.5), 0.25),
        (torch.tensor(0.5), torch.full((3,), 0.25, dtype=torch.float64)),
        (torch.full((1, 3, 1, 1), 0.5, requires_grad=True), np.float64(0.25)),
    ):
        assert torch.equal(F.normalize_images(x, mean, std), want)
    whole = F.normalize_images(x, 0, 1)
    assert torch.equal(whole, F.normalize_images(x, 0.0, 1.0))
    assert not F.normalize_images(x, torch.zeros(3, requires_grad=True), 1.0).requires_grad


def test_one_image_in_either_format() -> None:
    hwc = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    image = torch.from_numpy(hwc).permute(2, 0, 1)
    want = F.normalize_images(image[None], MEAN, STD)[0]
    strides = {
        torch.preserve_format: (1, 15, 3),
        torch.contiguous_format: (20, 5, 1),
        torch.channels_last: (1, 15, 3),
    }
    for memory_format, stride in strides.items():
        output = F.normalize_images(image, MEAN, STD, memory_format=memory_format)
        assert torch.equal(output, want)
        assert output.stride() == stride


def test_kernels_run() -> None:
    """Not the fallback, and float64 without an op of its own."""
    if not fusedtrain.backend_info().backends["cpu"].loaded:
        pytest.skip("needs _C.so (make build)")
    assert Registered("cpu").has("normalize_images")
    with torch.profiler.profile() as profile:
        F.normalize_images(random_bytes(1, 3, 4, 4), MEAN, STD, dtype=torch.float16)
    assert any("normalize_images" in event.name for event in profile.events())


def test_mistakes() -> None:
    x = random_bytes(2, 3, 4, 4)
    with pytest.raises(TypeError, match=r"input: expected uint8, got torch.float32.*torchvision"):
        F.normalize_images(x.float(), MEAN, STD)
    for wrong in (x[0, 0], x[None]):
        with pytest.raises(ValueError, match=r"input: expected \[C, H, W\] or \[N, C, H, W\]"):
            F.normalize_images(wrong, MEAN, STD)
    with pytest.raises(ValueError, match="mean: expected one value, or one for each of 3 channels"):
        F.normalize_images(x, [0.5, 0.5], STD)
    with pytest.raises(ValueError, match="std: expected one value, or one for each of 3 channels"):
        F.normalize_images(x, 0.5, torch.ones(4))
    for std in (0.0, -1.0, float("inf"), float("nan"), [1.0, 0.0, 1.0], torch.zeros(3)):
        with pytest.raises(ValueError, match="std: must be positive and finite"):
            F.normalize_images(x, MEAN, std)
    for mean, std in ((float("nan"), 1.0), (0.5, 1e-40), (1e30, 1e-30)):
        with pytest.raises(ValueError, match="must be finite in float32"):
            F.normalize_images(x, mean, std)
    for dtype in (torch.int32, torch.complex64, torch.float8_e5m2):
        with pytest.raises(TypeError, match="dtype: expected float32"):
            F.normalize_images(x, MEAN, STD, dtype=dtype)
    with pytest.raises(ValueError, match="memory_format: expected preserve_format"):
        F.normalize_images(x, MEAN, STD, memory_format=torch.channels_last_3d)


def test_imagenet_by_default() -> None:
    x = random_bytes(2, 3, 4, 5)
    want = F.normalize_images(x, MEAN, STD)
    assert torch.equal(F.normalize_images(x), want)
    assert torch.equal(
        F.normalize_images(x[:, :, ::2]), F.normalize_images(x[:, :, ::2], MEAN, STD)
    )
    assert torch.equal(F.normalize_images(x, std=STD), want)
    assert torch.equal(torch.jit.script(F.normalize_images)(x), want)
    torch.compiler.reset()
    compiled = torch.compile(F.normalize_images, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), want)


class _Picture:
    """Stands for PIL.Image.Image, which need not be installed."""

    __module__, __qualname__ = "PIL.Image", "Image"


@pytest.mark.parametrize("function", [F.normalize_images, fusedtrain.nn.NormalizeImages()])
def test_what_is_no_tensor_is_named_with_the_remedy(function: Any) -> None:
    """numpy's bytes were refused by "expected uint8, got uint8"."""
    with pytest.raises(
        TypeError, match=r"got numpy\.ndarray\. torch\.from_numpy.*permute\(2, 0, 1"
    ):
        function(np.zeros((4, 5, 3), np.uint8))
    with pytest.raises(TypeError, match=r"got PIL\.Image\.Image\. .*pil_to_tensor\(input\)"):
        function(_Picture())
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor of uint8, got list$"):
        function([1, 2, 3])


@pytest.mark.parametrize("function", [F.normalize_images, fusedtrain.nn.NormalizeImages()])
def test_channels_in_the_last_dimension_are_pointed_out(function: Any) -> None:
    hwc = random_bytes(4, 5, 3)
    with pytest.raises(ValueError, match=r"4 channels|3 channels") as error:
        function(hwc)
    assert "input.permute(2, 0, 1) puts them first" in str(error.value)
    with pytest.raises(ValueError, match=r"input\.permute\(0, 3, 1, 2\) puts them first"):
        function(hwc[None])
    with pytest.raises(ValueError, match="channels") as error:
        function(random_bytes(4, 5, 6))
    assert "permute" not in str(error.value)


def test_numbers_made_in_inference_mode_serve_outside() -> None:
    _images.coefficients_of.cache_clear()
    x = random_bytes(2, 3, 4, 4)
    with torch.inference_mode():
        inside = F.normalize_images(x, MEAN, STD)
    outside = F.normalize_images(x, MEAN, STD)
    assert torch.equal(inside, outside)
    assert inside.is_inference()
    assert not outside.is_inference()
    conv = nn.Conv2d(3, 2, 1)
    conv(outside).sum().backward()
    assert conv.weight.grad is not None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
def test_compiled_to_plain_operators(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    """The same bits as the kernel, and without the op, so that Inductor may fuse it."""
    seen: list[str] = []

    def look(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    constants = ((MEAN, STD), (torch.tensor(MEAN), torch.tensor(STD)), (0.5, 1))
    for mean, std in constants if dtype is torch.float32 else constants[1:2]:
        torch.compiler.reset()
        compiled = torch.compile(F.normalize_images, backend=look, fullgraph=True)
        for x in (random_bytes(2, 3, 4, 5), last(random_bytes(2, 3, 4, 5)), random_bytes(3, 4, 5)):
            want = F.normalize_images(x, mean, std, dtype, memory_format)
            output = compiled(x, mean, std, dtype, memory_format)
            assert torch.equal(output, want)
            assert output.stride() == want.stride()
    assert seen
    assert not any("normalize_images" in target for target in seen)


@pytest.mark.slow
def test_inductor_gives_the_same_bits() -> None:
    torch.compiler.reset()
    module = fusedtrain.nn.NormalizeImages(memory_format=torch.channels_last)
    x = random_bytes(2, 3, 6, 7)
    assert torch.equal(torch.compile(module, fullgraph=True)(x), module(x))


def test_exported() -> None:
    for strict in (False, True):
        module = fusedtrain.nn.NormalizeImages(dtype=torch.float16)
        x = random_bytes(2, 3, 4, 5)
        program = torch.export.export(module, (x,), strict=strict)
        assert torch.equal(program.module()(x), module(x))
        assert not any("normalize_images" in str(n.target) for n in program.graph.nodes)


def test_scripted() -> None:
    scripted = torch.jit.script(F.normalize_images)
    for x in (random_bytes(2, 3, 4, 5), last(random_bytes(2, 3, 4, 5)), random_bytes(3, 4, 5)):
        for memory_format in FORMATS:
            want = F.normalize_images(x, MEAN, STD, torch.float16, memory_format)
            for numbers in ((list(MEAN), list(STD)), (torch.tensor(MEAN).double(), list(STD))):
                output = scripted(x, *numbers, torch.float16, memory_format)
                assert torch.equal(output, want)
                assert output.stride() == want.stride()
    assert torch.equal(scripted(x, 0.5, 0.25), F.normalize_images(x, 0.5, 0.25))
    with pytest.raises(torch.jit.Error, match="std: must be positive and finite"):
        scripted(x, 0.5, 0.0)
    with pytest.raises(torch.jit.Error, match="input: expected uint8"):
        scripted(x.float(), 0.5, 1.0)


def test_transforms_see_plain_operators() -> None:
    x = random_bytes(4, 3, 4, 5)
    want = F.normalize_images(x, MEAN, STD)
    assert torch.equal(torch.func.vmap(lambda x: F.normalize_images(x, MEAN, STD))(x), want)
    traced = torch.jit.trace(lambda x: F.normalize_images(x, MEAN, STD), (x,))
    assert torch.equal(traced(x), want)

    class Marked(Tensor):
        pass

    output = F.normalize_images(x.as_subclass(Marked), MEAN, STD)
    assert type(output) is Marked
    assert torch.equal(output.as_subclass(Tensor), want)


def test_module() -> None:
    module = fusedtrain.nn.NormalizeImages(dtype=torch.bfloat16, memory_format=torch.channels_last)
    x = random_bytes(2, 3, 4, 5)
    want = F.normalize_images(x, MEAN, STD, torch.bfloat16, torch.channels_last)
    for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(one(x), want)
        assert one(x).is_contiguous(memory_format=torch.channels_last)
    assert repr(module) == (
        "NormalizeImages(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), "
        "dtype=torch.bfloat16, memory_format=torch.channels_last)"
    )
    assert torch.equal(torch.jit.script(module)(x), want)
    grey = fusedtrain.nn.NormalizeImages(0.5, 0.25)
    assert torch.equal(grey(x), F.normalize_images(x, 0.5, 0.25))
    wide = fusedtrain.nn.NormalizeImages(dtype=torch.float64)
    assert torch.equal(wide(x), F.normalize_images(x, MEAN, STD, torch.float64))


def test_module_leaves_the_state_dict_alone() -> None:
    model = nn.Conv2d(3, 4, 3)
    keys = list(model.state_dict())
    front = fusedtrain.nn.NormalizeImages()
    assert front.state_dict() == {}
    assert list(nn.Sequential(model, front).state_dict()) == [f"0.{key}" for key in keys]
    front.load_state_dict({})
    assert list(front.parameters()) == []


def test_module_is_not_rounded_by_its_model() -> None:
    x = random_bytes(2, 3, 4, 5)
    want = F.normalize_images(x, MEAN, STD)
    module = fusedtrain.nn.NormalizeImages()
    for cast in (module.half, module.bfloat16, module.double, lambda: module.to("cpu")):
        assert torch.equal(cast()(x), want)
    with torch.device("meta"):
        empty = fusedtrain.nn.NormalizeImages()
    assert empty.coefficients.is_meta
    assert torch.equal(empty.to_empty(device="cpu")(x), want)
    one, other = fusedtrain.nn.NormalizeImages(), fusedtrain.nn.NormalizeImages()
    one.coefficients.zero_()
    assert torch.equal(other(x), want)
    assert torch.equal(F.normalize_images(x, MEAN, STD), want)


def test_mistakes_of_the_module() -> None:
    with pytest.raises(ValueError, match="std: must be positive"):
        fusedtrain.nn.NormalizeImages(0.5, 0.0)
    with pytest.raises(ValueError, match="std: expected one value, or one for each of 3 channels"):
        fusedtrain.nn.NormalizeImages(MEAN, [1.0, 1.0])
    with pytest.raises(TypeError, match="dtype: expected float32"):
        fusedtrain.nn.NormalizeImages(dtype=torch.uint8)
    with pytest.raises(ValueError, match="memory_format: expected"):
        fusedtrain.nn.NormalizeImages(memory_format=torch.channels_last_3d)
    module = fusedtrain.nn.NormalizeImages()
    with pytest.raises(ValueError, match="input: expected 3 channels"):
        module(random_bytes(2, 4, 4, 4))
    with pytest.raises(TypeError, match="input: expected uint8"):
        module(torch.randn(2, 3, 4, 4))
