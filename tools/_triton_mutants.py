"""Mutants of the Triton kernels: all functions that Triton compiles, judged by tests that run in
Triton's interpreter."""

from __future__ import annotations

import ast
from contextlib import ExitStack
from pathlib import Path

from _collected import Collected
from _mutant import Judge, Mutant, named
from _python_mutants import mutants_of

FOLDER = "fusedtrain/triton"
_NORMS = """
batch_norm_kernels: options[triton
batch_norm_numbers: a_sum_without_what_lies_beyond_the_data[triton constants_have_no_variance[triton
batch_norm_numbers: mean_far_from_zero[triton running_statistics[triton
batch_norm_numbers: statistics_of_badly_placed_numbers[triton
batch_norm_in_place: kernels[triton
triton_batch_norm: every_cut outlier
batch_norm_numbers: what_is_not_finite_stays_in_its_channel[triton
batch_norm_numbers: infinite_input_of_fixed_statistics[triton
batch_norm_kernels: split_ops_equal_the_whole_ones[triton backward_without_an_input[triton
batch_norm_kernels: every_layout[triton
batch_norm_numbers: bounds_are_rounded_as_the_output[triton
"""
_OF_RULE = """
optimizer_kernels: options_of_a_group[triton-{}]
triton_optimizers: states[{}-
optimizer_kernels: zeros[triton-{}] nobody_looks_for_infinities[triton-{}]
optimizer_kernels: variance_below_zero[triton-{}- units_at_their_bound[triton
optimizer_kernels: a_step_count_of_32_bits[triton kernels[triton-{}-trial
"""
_OF_FORMULA = """
activation_kernels: special_values[triton-{}-torch.float32
activation_kernels: every_16_bit_number[triton-{}-torch.float16 other_parameters[triton-{}-
activation_kernels: numbers[triton-{}-torch.float64
activation_kernels: zero_is_on_the_side_of_negative_numbers[triton-{} {}_at {}_without
activation_kernels: infinite_gradients_where_the_slope_is_zero[triton-{}
activation_kernels: bounds_that_16_bits_cannot_hold[triton-{}- numbers[triton-{}-torch.float32
"""
_STEPS = """
optimizer_kernels: options_of_a_group[triton-lamb] zeros[triton-lamb] units_at_their_bound[triton
optimizer_kernels: rates_on_the_device[triton nothing_is_measured[triton
triton_optimizers: more_tensors_than_a_program_prepares[lamb]
optimizer_kernels: kernels[triton-sgd
triton_optimizers: units_of_layouts sizes_and
optimizer_kernels: skipped_first_step[triton
triton_optimizers: states[adam-
optimizer_kernels: gradients_are_measured_without_states[triton-sgd] parts_of_a_step[triton-lamb]
optimizer_kernels: stochastic_rounding[triton kernels[triton-adam-trial
optimizer_kernels: nobody_looks_for_infinities[triton-sgd]
"""
_SPLIT = """
split_master_kernels: a_step_of_zero_changes_no_bit[triton steps_beside_float32_masters[triton
split_master_kernels: stochastic_rounding_of_24_bits[triton a_skipped_step_changes_no_bit[triton
"""
_CODES = """
state_code_kernels: bits_of_codes[triton steps_beside_the_reference[triton-lamb
state_code_kernels: steps_beside_the_reference[triton-adam a_skipped_step_changes_no_bit[triton
triton_tables: scales_elsewhere
"""
_CHAINS = "chain_kernels"
_WRITES = (
    "split_master_writes: kernels_join_every_weight\nmaster_writes: kernels_follow_every_write"
)
# The tests of a file, the narrowest first: the first that fails ends the trial. {} is what the
# function is part of: see part_of.
TESTS = {
    **dict.fromkeys(("_batch_norm_kernels", "_batch_norm_tiles"), _NORMS),
    **dict.fromkeys(("_channels", "bias_act", "gated", "scale_add"), _CHAINS),
    "channelwise": """
triton: every_cut[star_relu-torch.float32
activation_kernels: numbers[triton-prelu-torch.float32 numbers[triton-star_relu-torch.float32
triton: every_cut[prelu
activation_kernels: two_parameters
""",
    "depthwise": """
depthwise_kernels: every_case[triton only_what_is_asked_for[triton other_layouts[triton
depthwise_kernels: infinities_reach_what_sees_them[triton several_blocks[triton
triton_depthwise
""",
    "few_bit": """
few_bit: kernels[triton-a
few_bit: kernels[triton-sliced-torch.float32 kernels[triton-many-torch.float32
few_bit: special_inputs[triton
""",
    "fold": "fold_kernels",
    "formulas": _OF_FORMULA,
    "group_norm": "group_norm: kernels[triton",
    "images": "image_kernels",
    "_optimizer_measure": _STEPS + _SPLIT,
    "_optimizer_memory": _STEPS + _SPLIT + _CODES,
    "_optimizer_tail": _STEPS,
    "_optimizer_update": _STEPS + _SPLIT + _CODES,
    "optimizer_rules": _OF_RULE,
    "pointwise": f"activation_kernels: a_grid bounds backward_with\n{_CHAINS}",
    "pool": "triton_pool",
    "row_norm": "row_norm_kernels",
    "scaling": "optimizer_gpu_kernels: zero update_scale",
    "split_weights": f"{_SPLIT}{_WRITES}",
    "state_codes": _CODES,
    "stochastic_rounding": "optimizer_kernels: stochastic_rounding",
    "vecmath": _OF_FORMULA + _OF_RULE,
}
# Where the name of a function does not tell: a rule or an activation that calls it.
PARTS = {
    "unscale": "sgd", "clip_coefficient": "lamb", "adaptive_clip_coefficient": "sgd",
    "kept": "lion", "caution_after": "lion", "coupled": "sgd", "with_momentum": "sgd",
    "variance_of": "rmsprop",
    "squareplus_root": "squareplus", "squareplus_value": "squareplus",
    "at_most": "elu", "at_least": "relu", "clamp": "relu6", "reciprocal": "celu",
    "sqrt": "squareplus", "power": "adam", "expm1": "elu", "log1p_unit": "softplus",
    "sigmoid_and_slope": "silu", "normal_cdf": "gelu", "normal_cdf_and_density": "gelu",
    "widen": "silu",
}  # fmt: skip
# Not what compiles, or starts a process.
CHOSEN = [
    "-k",
    "triton and not (test_code or test_launches or compilations or test_import or registered)",
    "--cases=all",
]


def _is_compiled(node: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(d) for d in node.decorator_list)


def mutants(root: Path) -> list[Mutant]:
    files = sorted(p.relative_to(root).as_posix() for p in (root / FOLDER).glob("*.py"))
    return [m for file in files for m in mutants_of(root, file, _is_compiled)]


# Modules that a run would import again and again; no kernels.
_MODULES = ("triton.language", "triton.runtime.interpreter", "torch._dynamo", "numpy")


def part_of(function: str) -> str:
    """The rule or the activation of a function: adam of prepare_adam, mish of mish_backward."""
    name = function.removeprefix("prepare_").removeprefix("finish_")
    return PARTS.get(name, name.removesuffix("_forward").removesuffix("_backward"))


def tests_of(mutant: Mutant) -> tuple[str, ...]:
    rows = named(TESTS[Path(mutant.file).stem])
    return tuple(row.format(part_of(mutant.function)) for row in rows)


def prepare(tree: Path, mutants: list[Mutant], seconds: float, ends: ExitStack) -> Judge:
    tests = sorted({test for m in mutants for test in tests_of(m)})
    paths = sorted({test.split("::")[0] for test in tests})
    collected = Collected(tree, [*paths, *CHOSEN], _MODULES, TRITON_INTERPRET="1")
    ends.callback(collected.close)
    judge: Judge = collected.judge(tests_of, mutants, seconds)
    return judge
