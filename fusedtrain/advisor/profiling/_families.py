"""Families of operators and GPU kernels: one table of rules over names."""

from __future__ import annotations

import re
from collections.abc import Sequence

# In the order in which tables and charts show them.
FAMILIES = (
    "conv", "matmul", "norm", "pointwise", "pooling", "optimizer", "copies", "loader", "other",
    "idle",
)  # fmt: skip
OPTIMIZER_RANGE = "fusedtrain: optimizer step"

# Ranges of the profiler: whatever runs in one belongs to the family, whatever the work is. A norm
# may be made of pointwise operators.
_RANGES = (
    ("loader", re.compile(r"^enumerate\(DataLoader\)")),
    ("optimizer", re.compile(rf"^{re.escape(OPTIMIZER_RANGE)}|^Optimizer\.(step|zero_grad)#")),
    ("norm", re.compile(r"^aten::(batch|layer|group|instance|rms)_norm$")),
)
# Rules for operators (aten::...) and for kernels; the first that matches decides.
_RULES = tuple(
    (family, re.compile(pattern, re.IGNORECASE | re.VERBOSE))
    for family, pattern in (
        ("copies", r"""
            ^memcpy | ^memset | copy_kernel | CatArray | nchwToNhwc | nhwcToNchw
            | ^aten::(copy_|_to_copy|to$|clone|contiguous|cat$|stack$|fill_|zero_|pin_memory
                      |index_select|_local_scalar_dense)"""),
        ("optimizer", r"""
            _foreach_ | multi_tensor | _fused_(adam|sgd|adagrad) | fused_?adam | _amp_ | unscale
            | optimizer_(step|up|measure|tail)"""),
        ("pooling", r"pool"),
        ("norm", r"""
            (batch|layer|group|instance|rms|row)_?norm | bn_[fb]w | native_norm | norm_act
            | NormForward | NormBackward"""),
        ("conv", r"conv(?!ert) | winograd | wgrad | dgrad | fprop | im2col | col2im"),
        ("matmul", r"""
            gemm | gemv | matmul | cutlass | nvjet | fmha | flash | attention | einsum
            | (?<!bi)linear | ::(add|b|baddb)?mm(_out)?$ | ::addmv | ::mv$ | ::dot$
            | (Mm|Bmm|Addmm)Backward"""),
        ("pointwise", r"""
            elementwise | triton_poi | dropout | [ceg]?elu | silu | mish | swish | sigmoid | tanh
            | softplus | softsign | softshrink | hardshrink | threshold | glu | gated | bias_act
            | scale_add | residual | few_bit | normalize_images
            | ^aten::(add|sub|rsub|mul|div|neg|abs|exp2?|expm1|log(2|10|1p)?|r?sqrt|pow|square
                      |clamp(_min|_max)?|where|masked_fill|lerp|addcmul|addcdiv|reciprocal
                      |maximum|minimum|sign|floor|round|sin|cos|erf|bernoulli|bitwise_\w+
                      |logical_\w+|eq|ne|lt|le|gt|ge|ones_like)_?$"""),
    )
)  # fmt: skip
# Instructions of tensor cores in the names of kernels: cuBLAS and cuDNN (s16816, tensorop, xmma,
# hmma, gmma), cuBLAS since CUDA 12.8 (nvjet), flash attention.
_TENSOR_CORES = re.compile(
    r"tensorop|1688|16816|16832|884(gemm|cudnn)|xmma|[hig]mma|wgmma|nvjet|fmha|flash_(fwd|bwd)",
    re.IGNORECASE,
)


def family_of(name: str, ranges: Sequence[str] = (), operator: str = "") -> str:
    """The family of an operator or a kernel.

    Args:
        name: of the operator or the kernel.
        ranges: names of the ranges around the operator, the innermost first.
        operator: the launcher of a kernel. Its name says more: a convolution may run a kernel that
            is named after a matrix product.
    """
    for family, pattern in _RANGES:
        if any(pattern.search(text) for text in (name, operator, *ranges)):
            return family
    # A part of an operator whose name says nothing belongs to the nearest range that says more.
    for text in (operator, name, *ranges):
        for family, pattern in _RULES:
            if text and pattern.search(text):
                return family
    return "other"


def uses_tensor_cores(kernel: str) -> bool:
    """Whether the kernel's name has an instruction of tensor cores."""
    return _TENSOR_CORES.search(kernel) is not None
