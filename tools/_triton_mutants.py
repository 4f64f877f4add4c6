"""Mutants of the Triton kernels: made of the syntax trees of all functions that Triton compiles,
judged by tests that run in Triton's interpreter."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from _collected import Collected
from _mutant import Judge, Mutant, mutant
from _test_files import all_located
from _triton_equivalents import EQUIVALENT, FOLDER, NO_OTHER

_NUMBERS = "test_activation_kernels"
_NORMS = [
    f"test_{test}"
    for test in (
        "batch_norm_kernels::test_options[triton",
        "batch_norm_numbers::test_a_sum_without_what_lies_beyond_the_data[triton",
        "batch_norm_numbers::test_constants_have_no_variance[triton",
        "batch_norm_numbers::test_mean_far_from_zero[triton",
        "batch_norm_numbers::test_running_statistics[triton",
        "batch_norm_numbers::test_statistics_of_badly_placed_numbers[triton",
        "batch_norm_in_place::test_kernels[triton",
        "triton_batch_norm::test_every_cut",
        "triton_batch_norm::test_outlier",
        "batch_norm_numbers::test_what_is_not_finite_stays_in_its_channel[triton",
        "batch_norm_numbers::test_infinite_input_of_fixed_statistics[triton",
        "batch_norm_kernels::test_split_ops_equal_the_whole_ones[triton",
        "batch_norm_kernels::test_backward_without_an_input[triton",
        "batch_norm_kernels::test_every_layout[triton",
        "batch_norm_numbers::test_bounds_are_rounded_as_the_output[triton",
    )
]
_OPTIMIZERS, _SHARED = "test_triton_optimizers", "test_optimizer_kernels"
_GPU = "test_optimizer_gpu_kernels"
_OF_RULE = [
    f"{_SHARED}::test_options_of_a_group[triton-{{}}]", f"{_OPTIMIZERS}::test_states[{{}}-",
    *(
        f"{_SHARED}::test_{test}"
        for test in (
            "zeros[triton-{}]", "nobody_looks_for_infinities[triton-{}]",
            "variance_below_zero[triton-{}-", "units_at_their_bound[triton",
            "a_step_count_of_32_bits[triton", "kernels[triton-{}-trial",
        )
    ),
]  # fmt: skip
_OF_FORMULA = [
    f"{_NUMBERS}::test_{test}"
    for test in (
        "special_values[triton-{}-torch.float32", "every_16_bit_number[triton-{}-torch.float16",
        "other_parameters[triton-{}-", "numbers[triton-{}-torch.float64",
        "zero_is_on_the_side_of_negative_numbers[triton-{}", "{}_at", "{}_without",
        "infinite_gradients_where_the_slope_is_zero[triton-{}",
        "bounds_that_16_bits_cannot_hold[triton-{}-", "numbers[triton-{}-torch.float32",
    )
]  # fmt: skip
_STEPS = [
    *(
        f"{_SHARED}::test_{test}"
        for test in (
            "options_of_a_group[triton-lamb]", "zeros[triton-lamb]", "units_at_their_bound[triton",
            "rates_on_the_device[triton", "nothing_is_measured[triton",
        )
    ),
    f"{_OPTIMIZERS}::test_more_tensors_than_a_program_prepares[lamb]",
    f"{_SHARED}::test_kernels[triton-sgd", f"{_OPTIMIZERS}::test_units_of_layouts",
    f"{_OPTIMIZERS}::test_sizes_and", f"{_SHARED}::test_skipped_first_step[triton",
    f"{_OPTIMIZERS}::test_states[adam-",
    f"{_SHARED}::test_gradients_are_measured_without_states[triton-sgd]",
    f"{_SHARED}::test_parts_of_a_step[triton-lamb]", f"{_OPTIMIZERS}::test_stochastic",
    f"{_SHARED}::test_kernels[triton-adam-trial",
    f"{_SHARED}::test_nobody_looks_for_infinities[triton-sgd]",
]  # fmt: skip
_SPLIT = [
    f"test_split_master_kernels::test_{what}[triton"
    for what in (
        "a_step_of_zero_changes_no_bit",
        "steps_beside_float32_masters",
        "stochastic_rounding_of_24_bits",
        "a_skipped_step_changes_no_bit",
    )
]
_CODES = [
    f"test_triton_state_codes::test_{what}"
    for what in ("quantised", "dequantised", "steps[lamb]", "steps[adam]", "skipped", "scales")
]
_CHAINS = ["test_triton_chains", "test_chain_kernels"]
# The tests of a file, the narrowest first: the first that fails ends the trial. {} is what the
# function is part of: see part_of.
_TESTS: dict[str, list[str]] = {
    "_batch_norm_kernels.py": _NORMS,
    "_batch_norm_tiles.py": _NORMS,
    "_channels.py": _CHAINS,
    "bias_act.py": _CHAINS,
    "gated.py": _CHAINS,
    "scale_add.py": _CHAINS,
    "channelwise.py": [
        "test_triton::test_every_cut[star_relu-torch.float32",
        f"{_NUMBERS}::test_numbers[triton-prelu-torch.float32",
        f"{_NUMBERS}::test_numbers[triton-star_relu-torch.float32",
        "test_triton::test_every_cut[prelu",
        f"{_NUMBERS}::test_two_parameters",
    ],
    "depthwise.py": [
        f"test_depthwise_kernels::test_{test}"
        for test in (
            "every_case[triton",
            "only_what_is_asked_for[triton",
            "other_layouts[triton",
            "infinities_reach_what_sees_them[triton",
            "several_blocks[triton",
        )
    ]
    + ["test_triton_depthwise"],
    "few_bit.py": [
        "test_few_bit::test_kernels[triton-a block-torch.float32",
        "test_triton_few_bit",
        "test_few_bit::test_kernels[triton-sliced-torch.float32",
        "test_few_bit::test_kernels[triton-many-torch.float32",
        "test_few_bit::test_special_inputs[triton",
    ],
    "fold.py": ["test_fold_kernels"],
    "formulas.py": _OF_FORMULA,
    "images.py": ["test_image_kernels"],
    "_optimizer_measure.py": [*_STEPS, *_SPLIT],
    "_optimizer_memory.py": [*_STEPS, *_SPLIT, *_CODES],
    "_optimizer_tail.py": _STEPS,
    "_optimizer_update.py": [*_STEPS, *_SPLIT, *_CODES],
    "optimizer_rules.py": _OF_RULE,
    "pointwise.py": [
        f"{_NUMBERS}::test_a_grid",
        f"{_NUMBERS}::test_bounds",
        f"{_NUMBERS}::test_backward_with",
        *_CHAINS,
    ],
    "pool.py": ["test_triton_pool"],
    "scaling.py": [f"{_GPU}::test_zero", f"{_GPU}::test_update_scale"],
    "split_weights.py": [*_SPLIT, "test_triton_split_weights"],
    "state_codes.py": _CODES,
    "stochastic_rounding.py": [
        f"{_OPTIMIZERS}::test_stochastic",
        "test_triton_rounding",
    ],
    "vecmath.py": [*_OF_FORMULA, *_OF_RULE],
}
TESTS = {file: all_located(tests) for file, tests in _TESTS.items()}
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

_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_OPERATORS = {
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "&": "|", "|": "&", "^": "|",
    ">>": "<<", "<<": ">>",
}  # fmt: skip
_SYMBOLS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.RShift: ">>", ast.LShift: "<<",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_OTHERS = {
    "minimum": "maximum", "maximum": "minimum", "at_least": "at_most", "at_most": "at_least",
}  # fmt: skip
Change = tuple[int, str, str, str]  # offset, old, new, what


class _Source:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        keywords = [k for n in ast.walk(self.tree) if isinstance(n, ast.Call) for k in n.keywords]
        self.others = {id(k.value) for k in keywords if k.arg == "other"}
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            assert line.isascii()  # columns of ast are bytes
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return start, end

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def replaced(self, node: ast.AST, new: str, what: str) -> Change:
        return self.span(node)[0], self.of(node), new, what

    def symbol(self, left: ast.AST, right: ast.AST, old: str, new: str, what: str) -> Change:
        """A change of the operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        at = self.text.index(old, start, end)
        return at, old, new, what


def _called(node: ast.AST) -> str:
    """The last name of what is called."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_compiled(node: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(d) for d in node.decorator_list)


def _of_call(source: _Source, node: ast.Call) -> Iterator[Change]:
    name = _called(node)
    keywords = {k.arg: k.value for k in node.keywords}
    if name in ("load", "store", "read", "write") and node.args:
        pointer = node.args[0]
        if isinstance(node.func, ast.Attribute):
            yield source.replaced(pointer, f"{source.of(pointer)} + 1", f"{name}: next element")
    mask = keywords.get("mask")
    if mask is not None:
        yield source.replaced(mask, f"({source.of(mask)}) | True", f"{name}: mask dropped")
    axis = keywords.get("axis")
    if isinstance(axis, ast.Constant) and isinstance(axis.value, int):
        yield source.replaced(axis, str(1 - axis.value), "the other axis")
    if name == "where" and len(node.args) == 3:
        _, a, b = node.args
        start, end = source.span(a)[0], source.span(b)[1]
        between = source.text[source.span(a)[1] : source.span(b)[0]]
        new = source.of(b) + between + source.of(a)
        yield start, source.text[start:end], new, "where: sides swapped"
    if name in _OTHERS:
        new = source.of(node.func).removesuffix(name) + _OTHERS[name]
        yield source.replaced(node.func, new, f"{_OTHERS[name]} for {name}")
    if name == "cdiv":
        a, b = node.args
        yield source.replaced(node, f"(({source.of(a)}) // ({source.of(b)}))", "cdiv: rounds down")
    if name == "range" and len(node.args) == 1:
        last = node.args[0]
        yield source.replaced(last, f"{source.of(last)} - 1", "range: one less")


def _of_node(source: _Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Call):
        yield from _of_call(source, node)
    elif isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:]):
            old = _SYMBOLS.get(type(op))
            if old is not None:
                new = _COMPARISONS[old]
                yield source.symbol(left, right, old, new, f"{new} for {old}")
    elif isinstance(node, ast.BinOp):
        old = _SYMBOLS[type(node.op)]
        new = _OPERATORS[old]
        yield source.symbol(node.left, node.right, old, new, f"{new} for {old}")
    elif isinstance(node, ast.AugAssign):
        old = _SYMBOLS[type(node.op)]
        new = _OPERATORS[old]
        change = source.symbol(node.target, node.value, f"{old}=", f"{new}=", f"{old}= turned")
        yield change
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield source.replaced(node, f"({source.of(node.operand)})", "sign flipped")
    elif (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    ):
        new = repr(node.value + 1) if node.value in (0, 1) else repr(node.value * 3)
        yield source.replaced(node, new, "other=" if id(node) in source.others else "constant")
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield source.replaced(node.test, f"not ({source.of(node.test)})", "branch turned")
    elif isinstance(node, ast.Expr) and _called(node.value) == "store":
        yield source.replaced(node, "pass", "store dropped")


def _walked(node: ast.AST) -> Iterator[ast.AST]:
    """In the order of the source; not annotations, constants of signatures or docstrings."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        yield from _walked(child)


def of_file(root: Path, file: str) -> Iterator[Mutant]:
    text = (root / file).read_text()
    source = _Source(text)
    for function in ast.walk(source.tree):
        if not isinstance(function, ast.FunctionDef) or not _is_compiled(function):
            continue
        for statement in function.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue
            for node in _walked(statement):
                for offset, old, new, what in _of_node(source, node):
                    made = mutant(file, text, offset, old, new, what, function.name)
                    if what == "other=" and (file, function.name) in NO_OTHER:
                        EQUIVALENT[made.key] = NO_OTHER[file, function.name]
                    yield made


def mutants(root: Path) -> list[Mutant]:
    files = sorted(p.relative_to(root).as_posix() for p in (root / FOLDER).glob("*.py"))
    return [m for file in files for m in of_file(root, file)]


# Modules that a run would import again and again; no kernels.
_MODULES = ("triton.language", "triton.runtime.interpreter", "torch._dynamo", "numpy")


def part_of(function: str) -> str:
    """The rule or the activation of a function: adam of prepare_adam, mish of mish_backward."""
    name = function.removeprefix("prepare_").removeprefix("finish_")
    return PARTS.get(name, name.removesuffix("_forward").removesuffix("_backward"))


def tests_of(mutant: Mutant) -> tuple[str, ...]:
    return tuple(t.format(part_of(mutant.function)) for t in TESTS[Path(mutant.file).name])


def prepare(tree: Path, mutants: list[Mutant], seconds: float, ends: ExitStack) -> Judge:
    tests = sorted({test for m in mutants for test in tests_of(m)})
    paths = sorted({test.split("::")[0] for test in tests})
    collected = Collected(tree, [*paths, *CHOSEN], _MODULES, TRITON_INTERPRET="1")
    ends.callback(collected.close)
    if broken := collected.run(tests, 20 * seconds):
        raise RuntimeError(broken)
    # A mutant that survives runs all of its tests; those of depthwise.py take over 120 s.
    usual = {chosen: collected.usual(chosen) for chosen in {tests_of(m) for m in mutants}}

    def judge(mutant: Mutant) -> str:
        chosen = tests_of(mutant)
        return collected.judge(" ".join(chosen), chosen, max(seconds, 2 * usual[chosen]))

    return judge
