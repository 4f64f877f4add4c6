"""Mutants of the CUDA kernels that change nothing that a test of the emulator can see, and why."""

from __future__ import annotations

# Reasons why mutants change nothing that a test can see; (file, function): lines as they become.
_SPEED = "how many blocks there are, or which of two walks, changes the speed alone"
_NOTHING = "there is nothing beyond the last element: neither turn does anything"
_ROUND = "the lanes, or blocks, of a row of work change places"
_TAIL = "the last whole tile goes element by element, to the same numbers"
_OWN = "an overrun of a thread's own array: AddressSanitizer's to see (make sanitize)"
_LARGE = "of indices from 2^32 on, which no test has memory for"
_FACTOR = "twice a count is above 0 where the count is"
SAME: dict[str, dict[tuple[str, str], tuple[str, ...]]] = {
    _SPEED: {
        ("channelwise.cu", "plan_for"): (
            "const int64_t most = int64_t(multiprocessors()) * 2 * kBlocksPerMultiprocessor;",
            "plan.columns = inner / (plan.wide ? kLanes : 1) <= kWarp && channels > 1;",
            "plan.columns = inner / (plan.wide ? kLanes : 1) < kWarp && channels >= 1;",
        ),
        ("images.cu", "run"): (
            "const int64_t most = int64_t(multiprocessors()) * 2 * kBlocksPerMultiprocessor;",
            "const bool loads = aligned(call.x) || (call.y_last && false && !call.x_last);",
        ),
        ("pointwise.cu", "blocks_for"): (
            "const int64_t tiles = ceil_div(n, kThreads * 2 * kItems<S>);",
        ),
    },
    _NOTHING: {
        ("channelwise.cu", "apply"): ("for (int j = 0; j <= kVectors; ++j) {",),
        ("pointwise.cu", "forward_kernel"): (
            "for (int64_t start = int64_t(blockIdx.x) * kTile; start <= n;",
        ),
        ("pointwise.cu", "backward_kernel"): (
            "for (int64_t start = int64_t(blockIdx.x) * kTile; start <= n;",
        ),
    },
    _ROUND: {
        ("channelwise.cu", "segments_kernel"): (
            "const int64_t channel = (blockIdx.x + 1) % channels, group = blockIdx.x / channels;",
            "const int lane = (threadIdx.x + 1) % kWarp, warp = threadIdx.x / kWarp;",
        ),
        ("channelwise.cu", "columns_kernel"): (
            "const int lane = (threadIdx.x + 1) % kWarp, warp = threadIdx.x / kWarp;",
        ),
    },
    _TAIL: {
        ("pointwise.cu", "forward_kernel"): ("if (wide && n - start > kTile) {",),
        ("pointwise.cu", "backward_kernel"): ("if (wide && n - start > kTile) {",),
        ("images.cu", "to_last_kernel"): ("const bool whole = i + V::kLanes < total;",),
    },
    _OWN: {("images.cu", "to_last_kernel"): ("for (int l = 0; l <= V::kLanes; ++l) {",)},
    _LARGE: {
        ("images.cu", "quotient"): (
            "return ((a | b) >> 32) == 1 + 0 ? int64_t(uint32_t(a) / uint32_t(b)) : a / b;",
        ),
    },
    _FACTOR: {
        ("channelwise.cu", "run_op"): (
            "if (call.rows * 2 * call.channels * call.inner > 0) kRuns[call.op](call, stream);",
        ),
    },
}
