"""The CUDA kernels that go over whole tensors, those that do not, and the benchmarks of both.

A kernel is named by its source (without `.cu`) and its function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stream:
    """A kernel that goes over whole tensors.

    Attributes:
        chosen: part of the names of the variants that a training run meets; others are for what is
            not aligned.
        always, most: tensors that it reads in every call, and in a call with all options.
        variants: label and pattern of the names of kernels that have a row of their own.
    """

    chosen: str
    always: int
    most: int
    note: str = ""
    variants: tuple[tuple[str, str], ...] = ()


_WIDE = r", true>\("
_SIZES = (3, 5, 7)
_WALKS = ("planes_kernel", "columns_kernel")
STREAMS = {
    ("pointwise", "forward_kernel"): Stream("", 1, 1),
    ("pointwise", "backward_kernel"): Stream("", 2, 2),
    ("channelwise", "segments_kernel"): Stream(r", true, \w+>\(", 1, 1),
    ("channelwise", "columns_kernel"): Stream(r", true, \w+>\(", 1, 1),
    ("batch_norm", "statistics_kernel"): Stream(_WIDE, 1, 1),
    ("batch_norm_normalise", "normalise_kernel"): Stream(_WIDE, 1, 2, "most: with a residual"),
    ("batch_norm_reduce", "reduce_kernel"): Stream(_WIDE, 2, 3, "most: with a residual"),
    ("batch_norm_grad_input", "grad_input_kernel"): Stream(_WIDE, 2, 3, "most: with a residual"),
    ("batch_norm_restore", "restore_kernel"): Stream(_WIDE, 1, 1),
    ("gated", "gated_kernel"): Stream(_WIDE, 2, 2),
    ("gated", "gated_backward_kernel"): Stream(_WIDE, 3, 3),
    ("row_norm", "rows_forward_kernel"): Stream(r", true, \d+>\(", 1, 2, "most: with a residual"),
    ("row_norm", "rows_backward_kernel"): Stream(
        r", true, \d+>\(", 2, 3, "most: with a gradient of the sum"
    ),
    ("scale_add", "planes_kernel"): Stream(_WIDE, 1, 1),
    ("scale_add", "columns_kernel"): Stream(_WIDE, 1, 1),
    ("bias_act", "planes_kernel"): Stream(_WIDE, 1, 1),
    ("bias_act", "columns_kernel"): Stream(_WIDE, 1, 1),
    ("few_bit", "forward_kernel"): Stream("", 1, 1),
    ("few_bit", "backward_kernel"): Stream("", 1, 1),
    ("images", "three_channels_kernel"): Stream("", 1, 1),
    # The layout stays. Their other variants are for a number of channels that is not three.
    ("images", "to_planes_kernel"): Stream("true, false>", 1, 1),
    ("images", "to_last_kernel"): Stream("true, true>", 1, 1),
    ("optimizers", "measure_kernel"): Stream("", 1, 1),
    ("optimizers", "measure_units_kernel"): Stream("", 1, 1),
    ("optimizer_update", "update_kernel"): Stream("OneRule", 1, 1),
    ("optimizer_update", "trial_kernel"): Stream("OneRule", 1, 1),
    ("optimizer_update_codes", "update_kernel"): Stream(r">, [12], ", 1, 1),
    ("optimizer_update_codes", "trial_kernel"): Stream("", 1, 1),
    ("pool", "max_pool2d_kernel"): Stream(r"int, [23], ", 1, 1),
    ("pool_backward", "max_pool2d_tiles_kernel"): Stream("", 1, 1),
    # A stride of 1.
    ("depthwise_planes", "planes_kernel"): Stream(
        r"Planes<\d, 1, ", 1, 1, variants=tuple((f"{k} x {k}", f"Planes<{k}, ") for k in _SIZES)
    ),
    ("depthwise_strips", "strips_kernel"): Stream(
        r", true, 3, 1, ", 1, 1, variants=(("3 x 3", ""),)
    ),
    ("depthwise_tiles", "tiles_kernel"): Stream(
        "", 1, 1, variants=tuple((f"{k} x {k}", f", {k}>") for k in (5, 7))
    ),
    ("depthwise_weight", "weight_kernel"): Stream(
        r", int, Shape<true, 3, 1>", 1, 1, variants=(("3 x 3", ""),)
    ),
    ("depthwise_weight_tiles", "tiles_weight_kernel"): Stream(
        "", 1, 1, variants=tuple((f"{k} x {k}", f", {k}>") for k in (5, 7))
    ),
    ("depthwise_weight_planes", "planes_weight_kernel"): Stream(
        r"WeightPlanes<\d, 1>",
        1,
        1,
        variants=tuple((f"{k} x {k}", f"WeightPlanes<{k}, ") for k in _SIZES),
    ),
    ("fold", "fold_kernel"): Stream("", 1, 1),
    ("fold", "fold_backward_kernel"): Stream("", 1, 1),
}
_SHARES = "shares of blocks: a thousandth of the tensors"
_WHOLE = "loads of a whole block at once; its loops are in docs/gpu_kernels.md"
# Kernels that are not held to it, and why.
SMALL = {
    ("batch_norm", "merge_statistics_kernel"): _SHARES,
    ("batch_norm", "train_kernel"): _WHOLE,
    ("batch_norm_reduce", "backward_kernel"): _WHOLE,
    ("batch_norm_reduce", "merge_sums_kernel"): _SHARES,
    ("channelwise", "add_shares_kernel"): _SHARES,
    **dict.fromkeys(
        (("group_norm", f"{name}_kernel") for name in ("vectors", "averages", "gradients")),
        "numbers of samples and channels",
    ),
    ("row_norm", "add_shares_kernel"): _SHARES,
    ("row_norm", "far_forward_kernel"): "rows that fit no registers: right rather than fast",
    ("row_norm", "far_backward_kernel"): "rows that fit no registers: right rather than fast",
    ("row_norm", "planes_kernel"): "sums for these rows",
    ("row_norm", "columns_kernel"): "sums for these rows",
    ("scale_add", "add_shares_kernel"): _SHARES,
    ("bias_act", "add_shares_kernel"): _SHARES,
    ("pool_backward", "max_pool2d_backward_kernel"): "unusual windows: right rather than fast",
    ("depthwise", "any_kernel"): "kernels of unusual sizes: right rather than fast",
    ("depthwise_weight", "add_shares_kernel"): _SHARES,
    ("depthwise_weight_planes", "add_shares_kernel"): _SHARES,
    ("depthwise_weight_tiles", "add_shares_kernel"): _SHARES,
    ("optimizers", "add_kernel"): _SHARES,
    ("optimizers", "prepare_kernel"): "one row a tensor",
    ("optimizers", "finish_kernel"): "one row a tensor",
    ("scaling", "update_scale_kernel"): "one number",
    ("scaling", "zero_kernel"): "it reads nothing",
}
# Fewer bytes than ENOUGH are allowed: (source, kernel, part of the name): (KB at least, why).
_MOSTLY_WRITES = "(a byte is read for two or four written: a third of the bytes is asked for)"
_WRITES = "(a quarter of the bytes is read: of 20 KB in flight a quarter is enough)"
_ELEMENTS = "(contiguous tensors: windows begin at any element, so elements are loaded one by one)"
_TRIAL = "(the states of RMSpropTF; trial updates are those of LARS, LAMB and caution alone)"
_ROWS = "(more than 4,096 elements in 16 bits: shorter rows have three times the threads)"
_MANY = "(the 49 sums of an output are 80 % by themselves)"
_WEIGHTS = "(a weight is a hundredth of its layer's tensors)"
EXCEPTIONS: dict[tuple[str, str, str], tuple[float, str]] = {
    ("optimizer_update", "trial_kernel", ""): (24, _TRIAL),
    ("pool", "max_pool2d_kernel", ", false>"): (8, _ELEMENTS),
    ("pool_backward", "max_pool2d_tiles_kernel", ""): (6, _WRITES),
    ("row_norm", "rows_forward_kernel", ""): (8, _ROWS),
    ("row_norm", "rows_backward_kernel", ""): (8, _ROWS),
    ("images", "to_last_kernel", ""): (8, _MOSTLY_WRITES),
    ("fold", "fold_backward_kernel", ""): (6, _WEIGHTS),
}
# How tools/_issue.py goes through a kernel: (source, begin of the kernel, pattern of the name):
# arguments of route(). The first row that fits counts.
_POOL, _POOL_BACKWARD = ("pool", "max_pool2d_kernel"), ("pool_backward", "max_pool2d_tiles_kernel")
ROUTES: dict[tuple[str, str, str], dict[str, Any]] = {
    # Vectors that are loaded together, and computed with one after the other.
    ("bias_act", "", "DropoutAddForwardJob|BackwardJob"): {"moved": 3, "inner": 2},
    ("bias_act", "", "ForwardJob"): {"moved": 2, "inner": 4},
    ("scale_add", "", r"ForwardJob<\w+, false"): {"moved": 2, "inner": 4},
    ("scale_add", "", r"ForwardJob|BackwardJob<\w+, true"): {"moved": 3, "inner": 2},
    ("scale_add", "", "BackwardJob"): {"moved": 2, "inner": 4},
    # Codes of 2 bits, and the instructions of those of 8, whose stores are more.
    ("few_bit", "forward", ""): {"moved": 4.25 / 3, "inner": 2},
    ("few_bit", "backward", ""): {"moved": 4.25 / 2},
    ("images", "", ""): {"moved": 1.5},  # 16 bits
    # A thread has four vectors at least (kFewestVectors): a turn of four, or two turns.
    ("batch_norm_normalise", "", ""): {"moved": 3, "inner": 4, "fewest": 1},
    ("batch_norm_reduce", "", ""): {"inner": 2, "fewest": 2},
    ("batch_norm_grad_input", "", ""): {"inner": 2, "fewest": 2},
    ("batch_norm_restore", "", ""): {"moved": 2, "inner": 4, "fewest": 1},
    # Windows of stride 2, 16 bits: four inputs and a code an output. A loop is for the last ones.
    (*_POOL, "int, 2, "): {"moved": 10.25 / 2.25, "turns": 0},
    (*_POOL, "int, 3, "): {"moved": 10.5 / 2.5, "turns": 0},
    (*_POOL_BACKWARD, "Windows<2, 2, "): {"moved": 2.5625 / 2, "turns": 0},
    (*_POOL_BACKWARD, "Windows<3, 2, "): {"moved": 2.625 / 2, "turns": 0},
    (*_POOL_BACKWARD, "Windows<3, 1, "): {"moved": 4.5 / 2, "turns": 0},
}
# The way with the most sums. As many bytes are read as are written; loops over a kernel's columns
# write none.
_SUMS = {"moved": 2, "by": "[FD]FMA"}
_LAID = "FFMA|STS"  # and all that lays a tile out
ROUTES["depthwise_planes", "", ""] = ROUTES["depthwise_strips", "", "false>"] = _SUMS
ROUTES["depthwise_strips", "", "true>"] = {**_SUMS, "silent": 3}
for _k in (5, 7):
    ROUTES["depthwise_tiles", "", f", {_k}>"] = {"moved": 2, "by": _LAID, "silent": _k}
# A turn of the weight's gradient goes over a strip or a tile of gradients and of as many inputs; in
# channels_last the threads of all columns of a kernel do.
ROUTES["depthwise_weight", "", "Shape<true, 3, 1"] = {"by": "FFMA", "turn": 2 * 16 * 4 / 3}
for _dtype, _bytes in (("float", 4), ("__half", 2), ("__nv_bfloat16", 2)):
    for _k, _tile in ((3, 32), (5, 32), (7, 16)):
        ROUTES["depthwise_weight_planes", "", rf"<{_dtype}, WeightPlanes<{_k}, 1"] = {
            "by": "FFMA", "turn": 2 * _bytes * _tile,
        }  # fmt: skip
        ROUTES["depthwise_weight_tiles", "", rf"<{_dtype}, WeightTiles<{_dtype}, {_k}>"] = {
            "by": _LAID, "turn": 8 * 8 * 32 * 4 * _bytes / (32 * _k), "silent": 4,
        }  # fmt: skip
# Less of a copy than FAST of occupancy.py asks for: (source, begin of the kernel, pattern):
# (percent of a copy at least, why).
SLOW: dict[tuple[str, str, str], tuple[float, str]] = {
    ("depthwise_planes", "", "Planes<5"): (70, "(25 sums an output, and a third of the loads)"),
    ("depthwise_planes", "", "Planes<7"): (40, _MANY),
    ("depthwise_tiles", "", ", 7>"): (50, _MANY),
    ("depthwise_weight_planes", "", "<7, "): (40, _MANY),
    ("depthwise_weight_tiles", "", ", 5>"): (60, "(25 sums a gradient)"),
    ("depthwise_weight_tiles", "", ", 7>"): (40, _MANY),
    ("pool_backward", "", r"Windows<3, 1, 1>, \w+, false"): (
        55, "(stride 1 in planes: nine windows an input, each with a code of its own)",
    ),
}  # fmt: skip
# Variants that the first rows of `make gpu` are of.
FIRST = ("3 x 3",)
# The kernels of the calls that benchmarks time, by family and pass.
_FORWARD, _BOTH = "forward", "forward+backward"
_CHAINS = [("gated", "gated_kernel")]
_CHAINS += [(source, name) for source in ("scale_add", "bias_act") for name in _WALKS]
_NORM = [("batch_norm", "statistics_kernel"), ("batch_norm_normalise", "normalise_kernel")]
TIMED = {
    ("activations", _FORWARD): [("pointwise", "forward_kernel")],
    ("activations", _BOTH): [("pointwise", "forward_kernel"), ("pointwise", "backward_kernel")],
    ("batch_norm", _FORWARD): _NORM,
    ("batch_norm", _BOTH): [
        *_NORM, ("batch_norm_reduce", "reduce_kernel"),
        ("batch_norm_grad_input", "grad_input_kernel"),
    ],
    ("chains", _FORWARD): _CHAINS,
    ("chains", _BOTH): [*_CHAINS, ("gated", "gated_backward_kernel")],
    ("depthwise", _FORWARD): [
        ("depthwise_planes", "planes_kernel"), ("depthwise_strips", "strips_kernel"),
    ],
    ("depthwise", _BOTH): [
        ("depthwise_planes", "planes_kernel"), ("depthwise_strips", "strips_kernel"),
        ("depthwise_weight", "weight_kernel"), ("depthwise_weight_planes", "planes_weight_kernel"),
    ],
    ("few_bit", _FORWARD): [("few_bit", "forward_kernel")],
    ("few_bit", "backward"): [("few_bit", "backward_kernel")],
    ("images", _FORWARD): [
        ("images", "three_channels_kernel"), ("images", "to_planes_kernel"),
        ("images", "to_last_kernel"),
    ],
    ("pool", _FORWARD): [("pool", "max_pool2d_kernel")],
    ("pool", _BOTH): [
        ("pool", "max_pool2d_kernel"), ("pool_backward", "max_pool2d_tiles_kernel"),
    ],
    ("amp_step", ""): [
        ("optimizers", "measure_kernel"), ("optimizer_update", "update_kernel"),
    ],
}  # fmt: skip
# Kinds of AMP steps that no kernel has in its name, and the part of float32's bandwidth that they
# should have. Masters are float32. States of 8 bits: 1.2 to 1.5 times as many steps, by an earlier
# count of instructions, of 1 / 2.2 of the bytes (docs/gpu_kernels.md).
KINDS = {"bfloat16+master": 1.0, "bfloat16+q8": 1.35 / 2.2}
