"""Published experiments repeated: their numbers beside ours, and whether the claim holds here."""

from __future__ import annotations

# The files of this folder that are an experiment, in the order of the page.
NAMES = (
    "amp_autotune",
    "fp16_resnet",
    "amp_kernels",
    "data_loading",
    "conv_autotune",
    "zero_grad",
    "fused_gelu",
    "checkpointing",
    "conv_bias",
    "accumulation",
    "large_batch",
    "eight_bit_states",
    "retained_graph",
    "data_parallel",
    "networks",
)
FOLDER = "experiments"  # of their results, in the folder of all results
