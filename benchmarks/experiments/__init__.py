"""Published experiments repeated. docs/experiments.md has what they found, with the dates."""

from __future__ import annotations

# The modules of this folder that have ``rows(settings)``, in the order of the page.
NAMES = (
    "amp_autotune",
    "fp16_resnet",
    "amp_kernels",
    "zero_grad",
    "fused_gelu",
    "checkpointing",
    "conv_bias",
    "large_batch",
    "eight_bit_states",
    "retained_graph",
    "data_parallel",
    "networks",
)
