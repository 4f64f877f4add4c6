"""Mutants of the Triton kernels that change nothing that a test could see, and why."""

from __future__ import annotations

from _mutant import Key

FOLDER = "fusedtrain/triton"
_BIAS = f"{FOLDER}/bias_act.py"
_KERNELS, _TILES = f"{FOLDER}/_batch_norm_kernels.py", f"{FOLDER}/_batch_norm_tiles.py"
_CHANNELS, _BITS = f"{FOLDER}/channelwise.py", f"{FOLDER}/few_bit.py"
_MATH, _FORMULAS = f"{FOLDER}/vecmath.py", f"{FOLDER}/formulas.py"
_MEMORY = f"{FOLDER}/_optimizer_memory.py"
_TAIL = f"{FOLDER}/_optimizer_tail.py"
EQUIVALENT: dict[Key, str] = {
    (_KERNELS, "merge_kernel", "inside = (channel <= channels)[:, None] & (j < n)[None, :]"):
        "what the channel after the last comes to is not stored",
    (_KERNELS, "move", "moved = tl.where(momentum <= 0.5, near, far)"):
        "at a half both forms are old / 2 + value / 2, but for rounding in float64",
    (_KERNELS, "restore_kernel", "s = tl.where(y >= 0, y, y * tl.full((), below, y.dtype))"):
        "0 times what is finite is 0",
    (_KERNELS, "restore_kernel",
     "x = tl.where(x > most, most, tl.where(x <= -most, -most, x))"):
        "a number that is the bound becomes the bound",
    (_TILES, "channel_places", "return row % channels.to(INDEX), row <= rows"):
        "the row after the last has the coefficients of a channel, and is not stored",
    (_CHANNELS, "flat_backward_kernel", "if COUNT >= 1:"):
        "a sum that is not stored (a store would be outside of the shares)",
    (_CHANNELS, "tile_backward_kernel", "if COUNT >= 1:"):
        "a sum that is not stored (a store would be outside of the shares)",
    (_MEMORY, "read_state", "codes = tl.load(state + at, mask=inside, other=1)"):
        "what is outside is in no sum, and `write_state` takes 0 for it",
    (f"{FOLDER}/split_weights.py", "split_bfloat16",
     "lower = (bits - (upper >> 16)).to(tl.int32, bitcast=True) >> (16 - BITS)"):
        "`upper` has 16 bits, and the correction is stored without those above its own",
    (f"{FOLDER}/split_weights.py", "split_bfloat16",
     "lower = (bits + (upper << 16)).to(tl.int32, bitcast=True) >> (16 - BITS)"):
        "the correction is stored without the bits above its own",
    (_BITS, "level_of", "if len(LEVELS) > 1:"): "no table has a single level",
    (f"{FOLDER}/depthwise.py", "depthwise_kernel",
     "copy = part // PARTS if MULTIPLIER >= 1 else 0"):
        "without a multiplier there are PARTS parts, and the quotient is 0",
    (_FORMULAS, "hardshrink_backward",
     "return tl.where((saved == 0.0) & (a - saved >= 0.0), 0.0, g)"): "where it counts, saved is 0",
    (_FORMULAS, "softshrink_forward",
     "return tl.where(x >= a, x - a, tl.where(x < -a, x + a, x * 0.0))"): "0 either way",
    (_FORMULAS, "softshrink_forward",
     "return tl.where(x > a, x - a, tl.where(x <= -a, x + a, x * 0.0))"):
        "0 either way; torch's vectors and its tail disagree about the sign",
    (_FORMULAS, "hardsigmoid_forward", "return tl.where(x <= 0.0, t, 1.0 - t)"):
        "a half either way",
    (_FORMULAS, "hard_mish_backward",
     "return tl.where(saved < -2.0, 0.0, tl.where(saved >= 0.0, g, g * (saved + 1.0)))"):
        "the slope of 0 is 1 either way",
    (_FORMULAS, "elu_forward", "return tl.where(x >= 0.0, x, e)"):
        "0 either way, but for its sign where alpha is negative",
    (_FORMULAS, "elu_forward", "e = a * expm1(at_most(x, 1.0))"):
        "of positive numbers x is taken",
    (_FORMULAS, "celu_forward", "e = a * expm1(at_most(x, 1.0) * reciprocal(a))"):
        "of positive numbers x is taken",
    (_FORMULAS, "celu_forward", "return tl.where(x >= 0.0, x, e)"):
        "expm1 keeps zeros, and alpha divides before it multiplies",
    (_FORMULAS, "celu_backward",
     "return tl.where(saved >= 0.0, g, g * tl.exp(at_most(saved, 0.0) * reciprocal(a)))"):
        "the slope of 0 is 1 either way",
    (_FORMULAS, "celu_backward",
     "return tl.where(saved > 1.0, g, g * tl.exp(at_most(saved, 0.0) * reciprocal(a)))"):
        "of positive numbers the slope is exp(0)",
    (_FORMULAS, "selu_forward", "return tl.where(x >= 0.0, 1.0507009873554804934 * x, e)"):
        "zeros are kept either way",
    (_FORMULAS, "softsign_forward", "x = clamp(x, -3.0000000000000003e+30, 1e30)"):
        "it is -1 from -1e30 on",
    (_FORMULAS, "silu_forward", "x = at_least(x, -3000.0)"): "it is -0 from -1000 on",
    (_FORMULAS, "silu_backward", "x = clamp(saved, -3000.0, 1000.0)"): "it is 0 from -1000 on",
    (_FORMULAS, "quick_gelu_forward", "x = at_least(x, -3000.0)"): "it is -0 from -1000 on",
    (_FORMULAS, "quick_gelu_backward", "x = clamp(saved, -3000.0, 1000.0)"):
        "it is 0 from -1000 on",
    (_FORMULAS, "mish_backward", "x = clamp(saved, -3000.0, 20.0)"): "it is 0 from -1000 on",
    (_FORMULAS, "gelu_forward", "return at_least(x, -120.0) * normal_cdf(x)"):
        "the probability is 0 from -40 on",
    (_FORMULAS, "gelu_backward", "x = clamp(saved, -120.0, 40.0)"):
        "probability and density are 0 from -40 on",
    (_FORMULAS, "gelu_tanh_forward", "z = clamp(x, -90.0, 30.0)"): "the sigmoid is 0 from -30 on",
    (_FORMULAS, "gelu_tanh_backward", "x = clamp(saved, -90.0, 30.0)"):
        "sigmoid and slope are 0 from -30 on",
    (_FORMULAS, "squareplus_root", "c = at_most(tl.abs(x), 3e+18)"):
        "3e18 has a square in float32, too",
    (_FORMULAS, "squareplus_backward", "x = clamp(saved, -3e+18, 1e18)"):
        "the slope is 0 from -1e18 on",
    (_FORMULAS, "prelu_backward", "share = tl.where(saved >= 0.0, 0.0, g * saved)"):
        "0 times a finite gradient is 0",
    (_MATH, "expm1", "z = clamp(x, -120.0, 710.0)"): "it is -1 from -40 on",
    (_MATH, "log1p_unit", "upper = x >= 0.41421356237309504880"): "both forms hold at the border",
    (_MATH, "sigmoid_and_slope", "return tl.where(x <= 0.0, e * r, r), e * r * r"):
        "e is 1 at 0",
    (_MATH, "tanh", "return tl.where(x == 0.0, x, tl.where(x <= 0.0, t, -t))"):
        "0 was taken before",
    (_MATH, "normal_cdf", "return tl.where(x >= 0.0, 1.0 - upper_tail, upper_tail)"):
        "at 0 both are a half within the error of the polynomial",
    (_MATH, "normal_cdf_and_density",
     "return tl.where(x >= 0.0, 1.0 - upper_tail, upper_tail), density"):
        "at 0 both are a half within the error of the polynomial",
    (_MEMORY, "memory", "if not (ALIGNED):"):
        "a hint for the compiler: test_code counts the 16-byte accesses with it and without",
    (_MEMORY, "memory", "pointer = tl.multiple_of(pointer, 48)"):
        "a hint for the compiler, which takes the power of two in it",
    (_TAIL, "prepare_kernel", "inside = line <= count"):
        "the lane after the last has the last tensor's line, too, and stores the same",
    (_TAIL, "prepare_kernel", "tl.store(sums_ptr + i, squares, mask=(inside) | True)"):
        "lanes after the last have the last tensor's line, too, and store the same",
    (f"{FOLDER}/optimizer_rules.py", "adam",
     "s2 = tl.where((s1 >= s2) | (s1 != s1), s1, s2)"): "the larger of two equal numbers",
    (f"{FOLDER}/optimizer_rules.py", "prepare_novograd",
     "largest = tl.where(amsgrad & ~(largest >= stored), stored, largest)"):
        "the larger of two equal numbers",
    (_BIAS, "bias_act_kernel", "exists = row <= rows if PLANES else column < columns"):
        "the row after the last has the coefficient of channel 0, and is not stored",
    (f"{FOLDER}/few_bit.py", "code_of", "counted = tl.where(counted > 0.0, counted, 0.0)"):
        "0 stays 0",
    (f"{FOLDER}/scaling.py", "next_scale",
     "new = tl.where(new.to(tl.float64) <= min_scale, min_scale.to(tl.float32), new)"):
        "a scale that is the bound becomes the bound",
    (f"{FOLDER}/scaling.py", "next_scale",
     "new = tl.where(new.to(tl.float64) >= max_scale, max_scale.to(tl.float32), new)"):
        "a scale that is the bound becomes the bound",
}  # fmt: skip
for _function in ("reciprocal", "sqrt"):
    for _line in ("if not (x.dtype == tl.float64):", "if x.dtype != tl.float64:"):
        EQUIVALENT[_MATH, _function, _line] = "interpreted alike; test_code reads the compiled code"
_ENDS = "a block that ends with the data is masked, too: slower, with the same result"
for _file, _function, _line in (
    ("fold", "fold_kernel", "start + BLOCK < numel"),
    ("images", "to_last_kernel", "start + BLOCK < total"),
    ("pointwise", "forward_kernel", "start + BLOCK < n"),
    ("pointwise", "backward_kernel", "start + BLOCK < n"),
    ("channelwise", "flat_forward_kernel", "start + BLOCK < n"),
    ("channelwise", "flat_backward_kernel", "start + BLOCK < n"),
):  # fmt: skip
    EQUIVALENT[f"{FOLDER}/{_file}.py", _function, f"whole = {_line}"] = _ENDS
# Functions in which nothing is made of the `other` of a load: its lanes are neither stored nor
# added up, or multiplied by a zero. _triton_mutants adds these to EQUIVALENT.
_NO_OTHER = {
    "what is beyond the data is not stored":
        "gated.gated_kernel gated.gated_backward_kernel scale_add.scale_kernel"
        " bias_act.bias_act_kernel fold.channel_of fold.fold_kernel pointwise.forward_kernel"
        " pointwise.backward_kernel images.to_planes_kernel images.to_last_kernel"
        " _batch_norm_kernels.normalise_kernel _batch_norm_kernels.restore_kernel"
        " _batch_norm_kernels.apply_kernel channelwise.flat_forward_kernel"
        " channelwise.tile_forward_kernel few_bit.backward_tile",
    "what is beyond the channels is not stored":
        "_batch_norm_kernels.move _batch_norm_kernels.invert_kernel",
    "what is beyond the data is neither stored nor added":
        "_batch_norm_tiles.of_channels _batch_norm_tiles.of_samples",
    "what is beyond the data is not stored, and has code 0": "few_bit.load",
    "sums take a zero where there is no element":
        "bias_act.bias_act_backward_kernel _batch_norm_kernels.reduce_kernel",
    "sums are of products: the other factor is 0":
        "fold.fold_backward_kernel scale_add.scale_backward_kernel",
    "weights without a source are multiplied by a zero, what is beyond the data is not stored":
        "depthwise.depthwise_kernel",
    "outputs that are not valid are not added": "pool.max_pool2d_backward_kernel",
    "what was not loaded is not chosen": "_optimizer_tail.learning_rate",
}  # fmt: skip
NO_OTHER = {
    (f"{FOLDER}/{file}.py", function): why
    for why, places in _NO_OTHER.items()
    for file, function in (place.split(".") for place in places.split())
}
