"""How often the CUDA kernels of a call go over a tensor, and how many of them there are.

A pass is one reading or writing of a whole tensor in its own dtype. `least` are the passes without
which the result cannot be had where a tensor is larger than the caches; `passes` are those that
the kernels make. test_kernel_traffic.py counts each byte on the emulator and fails where an entry
is exceeded; tools/occupancy.py shows the table.
"""

from __future__ import annotations

from typing import NamedTuple


class Traffic(NamedTuple):
    """One call. ``why``: what the passes above ``least`` are for."""

    least: float
    passes: float
    launches: int
    why: str = ""


_ONE_OP = "statistics of a whole channel come before its first output"
TRAFFIC = {
    "pointwise forward": Traffic(2, 2, 1),
    "pointwise backward": Traffic(3, 3, 1),
    "channelwise forward": Traffic(2, 2, 1),
    "channelwise backward": Traffic(3, 3, 2, "the second launch adds up blocks' shares"),
    "batch_norm train forward": Traffic(3, 3, 3, _ONE_OP),
    "batch_norm train forward, residual": Traffic(4, 4, 3, _ONE_OP),
    "batch_norm eval forward": Traffic(2, 2, 1),
    "batch_norm backward": Traffic(5, 5, 3, "both sums of a channel come before its first output"),
    "batch_norm backward, residual": Traffic(7, 7, 3),
    "batch_norm train forward, whole": Traffic(2, 2, 1),
    "batch_norm train forward, whole, residual": Traffic(3, 3, 1),
    "batch_norm backward, whole": Traffic(3, 3, 1),
    "batch_norm backward, whole, residual": Traffic(5, 5, 1),
    "batch_norm restore": Traffic(2, 2, 1),
    "group_norm forward": Traffic(3, 3, 4, _ONE_OP),
    "group_norm backward": Traffic(5, 5, 5, "sums come before the first output"),
    "gated forward": Traffic(3, 3, 1),
    "gated backward": Traffic(5, 5, 1),
    "row_norm forward": Traffic(2, 2, 1),
    "row_norm backward": Traffic(
        3, 4.5, 2, "threads read their row's statistics from the caches; shares of 16 rows each"
    ),
    "scale_add forward": Traffic(2, 2, 1),
    "scale_add backward": Traffic(3, 3, 2),
    "bias_act forward": Traffic(2, 2, 1),
    "bias_act backward": Traffic(3, 3, 2),
    "few_bit forward": Traffic(2.125, 2.125, 1, "2 of 16 bits of an element are codes"),
    "few_bit backward": Traffic(2.125, 2.125, 1),
    "max_pool2d forward": Traffic(1.28125, 1.28125, 1, "windows of 2 x 2, codes of 2 bits"),
    "max_pool2d backward": Traffic(
        1.28125,
        1.43,
        1,
        "a byte of codes is read once an output of it, from the caches",
    ),
    "depthwise_conv forward": Traffic(
        2,
        5.5,
        1,
        "a strip of rows reads each input once a column of the kernel, from the caches",
    ),
    "depthwise_conv backward": Traffic(
        3,
        13,
        3,
        "so do both gradients; a launch each, and one that adds up blocks' shares",
    ),
    "normalize_images": Traffic(1.5, 1.5, 1, "bytes in, 16 bits out"),
    "fold_weight": Traffic(2, 2, 1),
    "optimizer_step, SGD with momentum": Traffic(5, 5, 2),
    "optimizer_step, Adam, measured": Traffic(8, 8, 4, "the gradient's norm comes before the step"),
    "optimizer_step, Adam in codes": Traffic(4, 4, 2, "a code is a quarter of a float"),
}
