"""Helpers of the activation tests: the ugly shapes, the tolerances, the comparison."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

import torch
from torch import Tensor

from fusedtrain import functional
from fusedtrain.reference import ACTIVATIONS, Activation

NAMES = list(ACTIVATIONS)
POINTWISE = [name for name, row in ACTIVATIONS.items() if not row.tensors]
INPLACE = [
    n for n, f in vars(functional).items() if n in NAMES and "inplace" in signature(f).parameters
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

# Error relative to max(|expected|, 1), in units of the dtype's eps. 16-bit: one rounding of the
# output (0.5), doubled where backward starts from the rounded output, whose error the slope passes
# on. float64 is compared with eager torch, which itself is off by 40 eps in gelu_tanh's slope.
TOLERANCE = {torch.float32: 8.0, torch.float64: 64.0, torch.float16: 1.0, torch.bfloat16: 1.0}


def public(row: Activation) -> Callable[[Tensor], Tensor]:
    """The public function of fusedtrain, with the example parameters."""
    if row.name == "gelu_tanh":
        return lambda input: functional.gelu(input, approximate="tanh")
    function = getattr(functional, row.name)
    return lambda input: function(input, *row.arguments_for(input))


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of every ugly kind, values within the range where activations bend."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 3).to(dtype)

    image = random(2, 5, 4, 3)
    return {
        "empty": random(0),
        "empty channels": random(2, 0, 3),
        "0-dim": random(),
        "1": random(1),
        "15": random(15),
        "17": random(17),
        "1023": random(1023),
        "4097": random(4097),
        "2-d": random(7, 9),
        "contiguous": image,
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "channels_last_3d": random(2, 3, 2, 4, 5).contiguous(memory_format=torch.channels_last_3d),
        "transposed": random(6, 11).t(),
        "permuted": random(3, 4, 5, 6).permute(2, 0, 3, 1),
        "sliced": random(9, 14)[1:7, 2:11:2],
        "offset": random(1030)[3:],
        "offset, whole vectors": random(4099)[3:],
        "offset, long rows": random(1 + 2 * 8 * 32)[1:].view(2, 8, 32),
        "offset, columns": random(1 + 64 * 16)[1:].view(64, 16),
        "expanded": random(5, 1).expand(5, 6),
        "size-1 dims": random(1, 6, 1, 4),
        "many dims": random(2, 1, 3, 2, 1, 2, 2),
        "channels of 1": random(4, 1, 5),
        "wide": random(3, 2500),
    }


def truth(row: Activation, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of eager torch in float64, on the device of x."""
    # torch's CUDA kernels of these two use 1/6 rounded to float32.
    device = "cpu" if row.name in ("hardswish", "hardsigmoid") else x.device
    wide = x.detach().double().to(device).requires_grad_()
    y = row.eager(wide)
    (g,) = torch.autograd.grad(y, wide, grad.double().to(device))
    return y.detach().to(x.device), g.to(x.device)


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest error relative to max(|expected|, 1), in eps of the actual dtype; inf for a nan."""
    if actual.numel() == 0:
        return 0.0
    expected = expected.double()
    difference = (actual.double() - expected).abs() / expected.abs().clamp_min(1)
    worst = difference.max().item() / torch.finfo(actual.dtype).eps
    return worst if worst == worst else float("inf")


def assert_close(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Shape, and error within TOLERANCE of the dtype (times `scale`)."""
    assert actual.shape == expected.shape
    worst = error(actual, expected)
    limit = scale * TOLERANCE[actual.dtype]
    assert worst <= limit, f"error of {worst:.2f} eps, allowed {limit}"


def backward_scale(row: Activation) -> float:
    """How much of the tolerance backward needs: 2 where it starts from a rounded output."""
    return 2.0 if row.saves == "output" or row.tensors else 1.5


def at_infinities(name: str, far: float = float("inf")) -> Tensor:
    """Values of eager torch in float64 at minus and plus infinity, or at other numbers."""
    return ACTIVATIONS[name].eager(torch.tensor([-far, far], dtype=torch.float64, device="cpu"))


def limits(name: str) -> Tensor:
    """Values at both infinities; the limit where torch returns nan and the function has one."""
    far, farther = at_infinities(name, 1e290), at_infinities(name, 1e300)
    limit = torch.where(farther.abs() > 1e280, farther * float("inf"), farther) + 0.0  # no -0
    has_one = (far == farther) | limit.isinf()
    values = at_infinities(name)
    return torch.where(values.isnan() & has_one, limit, values)


def special_values(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Infinities, NaN, zeros of both signs, denormals; and what the activation makes of them."""
    tiny = torch.finfo(dtype).smallest_normal
    inf, nan = float("inf"), float("nan")
    values = [-inf, inf, nan, -0.0, 0.0, tiny, -tiny, tiny / 4, -tiny / 4]
    # 17 copies: through the vector body and through the tail
    x = torch.tensor(values * 17, dtype=dtype, device="cpu")
    expected = ACTIVATIONS[name].eager(x)
    for i, limit in enumerate(limits(name).to(dtype)):
        expected[i :: len(values)] = limit
    # oneDNN's gelu of a vector loses the sign of zero where the processor has AVX2 alone.
    zero = (x == 0) & (expected == 0)
    expected[zero] = expected[zero].copysign(ACTIVATIONS[name].eager(x.double())[zero].to(dtype))
    device = torch.get_default_device()
    return x.to(device), expected.to(device)


def check_every_layout(name: str, dtype: torch.dtype) -> None:
    """The public function's output, gradient and strides."""
    row = ACTIVATIONS[name]
    for kind, x in layouts(dtype).items():
        if name == "star_relu" and kind == "0-dim":
            continue  # broadcasts with its parameters to one dimension, as in eager torch
        x = x.detach().requires_grad_()
        y = public(row)(x)
        grad = torch.randn_like(y)
        (g,) = torch.autograd.grad(y, x, grad)
        want_y, want_g = truth(row, x, grad)
        assert y.dtype == dtype, kind
        assert g.dtype == dtype, kind
        if name == "logsigmoid":  # as torch's on the CPU
            assert y.is_contiguous(), kind
        else:
            assert y.stride() == torch.empty_like(x).stride(), kind
        assert_close(y.detach(), want_y)
        if name == "hardsigmoid" and dtype == torch.float64:
            # torch's own float64 gradient is 1/6 rounded to float32.
            want_g = torch.where(want_g == 0, 0.0, grad.double() / 6)
        assert_close(g, want_g, backward_scale(row))
