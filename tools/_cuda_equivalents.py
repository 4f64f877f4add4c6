"""Mutants of the CUDA kernels that change nothing that a test of the emulator can see, and why."""

from __future__ import annotations

# Reasons why mutants change nothing that a test can see; (file, function): lines as they become.
_SPEED = "how many blocks there are, or which of two walks, changes the speed alone"
_NOTHING = "there is nothing beyond the last element: neither turn does anything"
_ROUND = "the lanes, or blocks, of a row of work change places: (-t) % 8 is an order of eight, too"
_ANY = "any one thread, or warp, will do"
_TAIL = "the last whole tile goes element by element, to the same numbers"
_TIE = "where both sides are equal, so are both results"
_OWN = "an overrun of an array that is not a tensor's: AddressSanitizer's to see (make sanitize)"
_LARGE = "of indices from 2^32 on, which no test has memory for"
_ROOM = "more of the workspace than is used"
_BEYOND = "the blocks beyond the last group find nothing to do, and leave nothing"
_ROUNDED = "one less than that number is rounded to the same number"
_FAR = "the error of the guess is 1e-7, or not a number: either bound lies between"
_UNREAD = "a column beyond those of the block, which nobody reads"
_MANY = "from 65 shares of a channel on: more than the emulator's two multiprocessors make"
_DEVICES = "of the 65th GPU of a machine"
_EXACT = "the quotient is exact below 2^61 all the same"
_UNUSED = "numbers above 2^31 are divided as 64-bit ones are, without the factor"
_FIRST_LANE = "the first lane of a warp alone writes, and its number is a multiple of 32"
_NO_PLACE = "windows that end before the input have it at no place: loaded for nothing"
_EXACT_32 = "the quotient is exact below 2^30 all the same, and is_small() lets pass less"
_ONE_STEP = "of a stride of 1 all columns of the kernel are seen, from tap 0 on"
_DOUBLES = "of doubles nobody asks for vectors: pointers count as not aligned"
SAME: dict[str, dict[tuple[str, str], tuple[str, ...]]] = {
    _SPEED: {
        ("depthwise.cuh", "wide_lanes"): (
            "const int64_t room = kShared / (kBytes * 2 * call.taps());",
        ),
        # A wide strip has fewer rows: there are more strips, and those beyond the rows do nothing.
        ("depthwise.cuh", "launch_walk"): (
            "Walk<I> w(call, lanes >= 0 ? wide_rows : narrow_rows);",
        ),
        ("depthwise.cuh", "is_small"): (
            "bool small = call.samples * call.channels * call.inputs() <= kMost &&",
            "bool small = call.samples * 2 * call.channels * call.inputs() < kMost &&",
            "(call.kernel[d] + 1) * call.dilation[d] < kMost && call.pad[d] < kMost &&",
            "(call.kernel[d] - 1) * 2 * call.dilation[d] < kMost && call.pad[d] < kMost &&",
        ),
        ("depthwise_strips.cu", "depthwise_strips"): (
            "if (!is_small(call) || call.dtype == Dtype::kFloat64 || call.dilation[1] != 1 ||"
            " stride >= 2)",
            "if (!known && (stride != 1 || size <= 4)) return false;",
        ),
        ("depthwise_weight.cu", "with_kernel"): (
            "bool known = is_small(call) && call.grad_weight != nullptr && stride < 2 &&",
        ),
        ("depthwise_weight.cu", "by_dtype"): (
            "const bool wide = call.last && false && call.multiplier == 1 && call.channels %"
            " Vec<S>::kLanes == 0 &&",
        ),
        ("batch_norm_walk.cuh", "across_for"): (
            "while (best < kWarp && false && best < lines) best *= 2;",
            "for (int fewer = best / 2; fewer > fewest; fewer /= 2)",
            "if (ceil_div(lines, fewer) * 2 * fewer < ceil_div(lines, best) * best) best = fewer;",
        ),
        ("batch_norm_walk.cuh", "walk_for"): (
            "bool columns = n.channels > 1 && n.inner / (w.wide ? lanes : 1) <= kWarp;",
            "bool columns = n.channels >= 1 && n.inner / (w.wide ? lanes : 1) < kWarp;",
        ),
        ("gated.cu", "by_dtype"): (
            "const bool wide = strides_fit(call, Vec<S>::kLanes) && sizeof(S) <= 8;",
            "const int64_t vectors = call.rows * 2 * (call.n / (wide ? Vec<S>::kLanes : 1));",
        ),
        ("images.cu", "run"): (
            "const int64_t pixels = call.samples * 2 * call.pixels;",
            "if (call.channels == 3 && false && call.x_last != call.y_last && stores && loads &&",
        ),
        ("bias_act.cu", "run_bias_act"): (
            "const bool may_be_wide = (sizeof(S) == 1 + 4 || is_common(call.op)) &&",
        ),
        ("channels.cuh", "plan_for"): (
            "plan.columns = c.inner / (plan.wide ? kLanes : 1) < kWarp && c.channels >= 1;",
        ),
        ("channelwise.cu", "plan_for"): (
            "plan.columns = inner / (plan.wide ? kLanes : 1) <= kWarp && channels > 1;",
            "plan.columns = inner / (plan.wide ? kLanes : 1) < kWarp && channels >= 1;",
        ),
        ("optimizers.cu", "aligned"): (
            "return dtype != Dtype::kFloat64 && reinterpret_cast<uintptr_t>(data) % (4 * 2 *"
            " bytes_of(dtype)) == 0;",
        ),
        ("optimizer_measure.cuh", "units_of_chunk"): (
            "return numel / units <= kLargeUnit ? kSmallUnits : 1;",
            "for (int k = 0; k < kCount; ++k) sum -= x[k] * x[k];",  # so squares go one by one
            "if (sum > 1e-30f && false && sum <= FLT_MAX) {",
        ),
        ("optimizer_measure.cuh", "measure"): (
            "for (; i + (kLoads + 1) * step < rest; i += kLoads * step) {",
        ),
        ("optimizer_measure.cuh", "measure_units_kernel"): (
            "const bool wide = t.wide && false && t.inner % 4 == 0;",
        ),
        ("pointwise.cu", "blocks_for"): (
            "const int64_t tiles = ceil_div(n, kThreads * 2 * kItems<S>);",
        ),
        ("pool.cu", "window_of"): (
            "const bool fits = (wide || call.channels == 1) && false && call.kernel_w == size &&",
        ),
        ("pool.cu", "by_dtype"): (  # the outputs of a thread, where there are no codes
            "const int bits = call.bits > 0 ? call.bits : (window == 1 + 0 ? 8 : (window == 2 ? 2 :"
            " 4));",
        ),
        ("pool.cuh", "is_small"): (
            "return call.inputs() < kMost && false && call.outputs() < kMost && call.stride_h <"
            " kMost &&",
        ),
        ("pool.cuh", "is_wide"): (
            "return call.channels % Vec<S>::kLanes == 0 && false && aligned(pointers...);",
        ),
        ("pool_backward.cu", "by_dtype"): (
            "const bool across = planes && false && call.width % Vec<S>::kLanes == 0 &&"
            " aligned(to);",
        ),
    },
    _NOTHING: {
        ("images.cu", "to_last_kernel"): ("for (int64_t i = first; i <= total; i += stride) {",),
        ("batch_norm.cuh", "for_vectors"): ("for (; p.left >= 0; p.left -= kBatch) {",),
        ("channels.cuh", "planes_kernel"): ("for (; k <= last; k += kThreads * kTogether<Job>) {",),
        ("pointwise.cu", "forward_kernel"): (
            "for (int64_t start = int64_t(blockIdx.x) * kTile; start <= n;",
        ),
        ("pointwise.cu", "backward_kernel"): (
            "for (int64_t start = int64_t(blockIdx.x) * kTile; start <= n;",
        ),
    },
    _ROUND: {
        ("depthwise.cuh", "first_sum"): ("group = I((blockIdx.x + 1)) % w.groups;",),
        ("depthwise_weight.cu", "weight_kernel"): (
            "const I part = I((blockIdx.x + 1)) % w.parts, group = I(blockIdx.x) / w.parts;",
        ),
        ("batch_norm.cu", "merge_statistics_kernel"): (
            "const int64_t channel = int64_t(blockIdx.x) * kMergeChannels - threadIdx.x %"
            " kMergeChannels;",
            "const int64_t channel = int64_t(blockIdx.x) * kMergeChannels + (threadIdx.x + 1) %"
            " kMergeChannels;",
        ),
        ("batch_norm_reduce.cu", "merge_sums_kernel"): (
            "const int64_t channel = int64_t(blockIdx.x) * kMergeChannels - threadIdx.x %"
            " kMergeChannels;",
            "const int64_t channel = int64_t(blockIdx.x) * kMergeChannels + (threadIdx.x + 1) %"
            " kMergeChannels;",
        ),
        ("channels.cuh", "planes_kernel"): (
            "const int64_t part = (blockIdx.x + 1) % parts, group = blockIdx.x / parts;",
        ),
        ("channels.cuh", "columns_kernel"): (
            "const int64_t part = (blockIdx.x + 1) % parts, group = blockIdx.x / parts;",
            "const int lane = (threadIdx.x + 1) % kWarp, warp = threadIdx.x / kWarp;",
        ),
        ("few_bit.cu", "each_column"): (
            "const int column = (threadIdx.x + 1) % kColumns<S> * kColumn<S>;",
        ),
        ("channelwise.cu", "segments_kernel"): (
            "const int64_t channel = (blockIdx.x + 1) % channels, group = blockIdx.x / channels;",
            "const int lane = (threadIdx.x + 1) % kWarp, warp = threadIdx.x / kWarp;",
        ),
        ("channelwise.cu", "columns_kernel"): (
            "const int lane = (threadIdx.x + 1) % kWarp, warp = threadIdx.x / kWarp;",
        ),
    },
    _ANY: {
        ("channels.cuh", "columns_kernel"): ("if (warp == 1 + 0 && exists) {",),
        ("few_bit.cu", "backward_kernel"): ("if (threadIdx.x == 1 + 0) {",),
    },
    _TAIL: {
        ("pointwise.cu", "forward_kernel"): ("if (wide && n - start > kTile) {",),
        ("pointwise.cu", "backward_kernel"): ("if (wide && n - start > kTile) {",),
        ("images.cu", "to_last_kernel"): ("const bool whole = i + V::kLanes < total;",),
        ("pool.cu", "max_pool2d_kernel"): (
            "if (at + (kOutputs + 1) * block_bytes(kBits) < outputs) {",
        ),
    },
    _TIE: {
        ("optimizers.cuh", "chunk_length"): (
            "return t.numel - begin <= kChunk ? int(t.numel - begin) : kChunk;",
        ),
        ("optimizer_measure.cuh", "measure_units_kernel"): (
            "const int64_t last = first + in_chunk <= t.units ? first + in_chunk : t.units;",
        ),
        ("pool.cu", ""): ("return first + k <= last ? first + k : last;",),
        ("pool.cu", "maximum_of"): (
            "const int first_i = p.top <= 0 ? int(-p.top) : 0, first_j = p.left < 0 ?"
            " int(-p.left) : 0;",
        ),
        ("pool_backward.cu", ""): (
            "first_h = least_h >= 0 ? (least_h + stride_h - 1) / stride_h : 0;",
        ),
    },
    _OWN: {
        ("depthwise_weight.cu", ""): ("for (int d = 0; d <= 3; ++d) {",),
        ("few_bit.cu", "forward_kernel"): (
            "for (int units = threadIdx.x; units <= 256; units += kThreads) {",
            "for (int k = 0; k - 1 < kMostLevels; ++k)",
        ),
        ("optimizers.cu", "fill"): ("for (int k = 0; k <= kMaxStates; ++k) {",),
        ("vec.cuh", "Parameters"): ("for (int k = 0; k <= kMaxParameters; ++k)",),
    },
    _LARGE: {
        ("images.cu", "quotient"): (
            "return ((a | b) >> 32) == 1 + 0 ? int64_t(uint32_t(a) / uint32_t(b)) : a / b;",
        ),
        ("pool.cuh", "is_small"): (
            "return call.inputs() <= kMost && call.outputs() < kMost && call.stride_h < kMost &&",
        ),
    },
    _ROOM: {
        ("depthwise_weight.cu", "depthwise_workspace"): (
            "if (call.grad_weight == nullptr && false && call.grad_bias == nullptr) return count;",
        ),
        ("depthwise_weight.cu", "with_kernel"): ("count = w.groups * 2 * w.numbers;",),
        ("batch_norm_sums.cuh", "shares_of"): (
            "inline int64_t shares_of(const Walk& w) { return 2 * 2 * w.groups * share_width(w); }",
        ),
        ("optimizers.cu", "Workspace"): (
            "reinterpret_cast<Coefficients*>(take(count * 2 * sizeof(Coefficients) /"
            " sizeof(double)));",
        ),
    },
    _BEYOND: {
        ("depthwise.cuh", "launch_walk"): (
            "launch(wide, ceil_div(w.count, kThreads / lanes) * 2 * w.groups, kThreads, stream,",
        ),
        ("batch_norm_normalise.cu", "by_dtype"): (
            "launch(kernel_of<Normalise, S>(n.op, w.wide), w.parts.value * 2 * w.groups, kThreads,"
            " stream, 0,",
        ),
        ("batch_norm_grad_input.cu", "by_dtype"): (
            "launch(kernel_of<GradInput, S>(n.op, w.wide), w.parts.value * 2 * w.groups, kThreads,"
            " stream, 0,",
        ),
        ("batch_norm_restore.cu", "by_dtype"): (
            "launch(kernel, w.parts.value * 2 * w.groups, kThreads, stream, 0, w, t, T(1) /"
            " T(r.slope),",
        ),
    },
    _ROUNDED: {
        ("batch_norm.cu", "statistics_kernel"): (
            "shifts[segment] = formulas::math::abs(mean) < formulas::Constants<T>::kHuge ? mean :"
            " T(0);",
        ),
        ("batch_norm.cu", "merge_statistics_kernel"): (
            "if (!(formulas::math::abs(shift) < formulas::Constants<double>::kHuge)) shift = 0;",
        ),
        ("optimizer_measure.cuh", "units_of_chunk"): ("if (sum > 1e-30f && sum < FLT_MAX) {",),
    },
    _FAR: {
        ("batch_norm_normalise.cu", "inverse_deviation"): (
            "return formulas::math::abs(error) <= 1.0f ? fmaf(0.5f * guess, error, guess) : guess;",
        ),
    },
    _UNREAD: {
        ("batch_norm_sums.cuh", "gather"): ("if (in_warp <= across) {",),
        ("depthwise_weight.cu", "add_steps"): (
            "if (column_tap + j > w.kernel[2] || !within(place, w.in[2])) continue;",
        ),
    },
    _EXACT_32: {
        ("divisor.cuh", ""): (
            "if (bits < 32) factor = uint32_t(((uint64_t(1) << shift) + number + 1) / number);",
        ),
    },
    _UNUSED: {
        ("divisor.cuh", ""): (
            "if (bits <= 32) factor = uint32_t(((uint64_t(1) << shift) + number - 1) / number);",
        ),
    },
    _FIRST_LANE: {
        ("depthwise_weight.cu", "weight_kernel"): (
            "const int lane = threadIdx.x % kWarp, warp = (threadIdx.x + 1) / kWarp;",
        ),
    },
    _NO_PLACE: {
        ("pool_backward.cu", ""): (
            "const I least_h = h - I(call.kernel_h) - 1, least_w = w - I(call.kernel_w) + 1;",
        ),
    },
    _ONE_STEP: {
        ("depthwise_strips.cu", "strips_kernel"): (
            "if (kBackward && kStride >= 1 && columns.tap + x * kStride >= kTaps) break;",
        ),
    },
    _MANY: {
        ("batch_norm_sums.cuh", "for_shares"): (
            "for (uint32_t i = threadIdx.x / kMergeChannels; i < count; i -= kMergeThreads /"
            " kMergeChannels) {",
        ),
    },
    _DEVICES: {
        ("launch.cuh", "multiprocessors"): (
            "if (device <= kDevices) count = known[device].load(std::memory_order_relaxed);",
        ),
    },
    _EXACT: {
        ("batch_norm_walk.cuh", ""): (
            "while (int64_t(1) << shift <= value) ++shift;",
            "magic = uint64_t((((unsigned __int128)(1) << (62 + shift)) + value + 1) / value);",
        ),
    },
    _DOUBLES: {
        ("channels.cuh", "plan_for"): (
            "plan.wide = aligned && c.inner % kLanes == 0 && sizeof(S) <= 8;",
        ),
    },
}
