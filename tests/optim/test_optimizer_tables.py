"""Names and order of the numbers of an optimizer step, in Python and C++."""

from __future__ import annotations

import re

import pytest
import torch

from fusedtrain.optim._plan import Numbers
from fusedtrain.reference import optimizers
from helpers import ROOT

HEADER = (ROOT / "csrc/ops/optimizers.h").read_text()
# As the comment of kControls has them.
CONTROL = {
    "skipped?": "skipped",
    "skipped steps": "skipped_steps",
    "norm of all gradients": "grad_norm",
    "clip coefficient": "clip",
    "number of non-finite gradients": "nonfinite",
    "applied steps": "applied_steps",
}


def fields_of(struct: str) -> dict[str, int]:
    """The doubles of a struct, with how many each is."""
    (body,) = re.findall(rf"^struct {struct} {{\n(.*?)^}};", HEADER, re.MULTILINE | re.DOTALL)
    code = re.sub(r"//.*", "", body)
    declared = re.findall(r"double (\w+)(?:\[(\d+)\])?;", code)
    assert len(declared) == code.count(";"), f"{struct} has fields of another form"
    return {name: int(size or 1) for name, size in declared}


def constant(name: str) -> int:
    (value,) = re.findall(rf"\b{name} = (\d+)[,;]", HEADER)
    return int(value)


def test_options_of_a_step() -> None:
    fields = fields_of("StepOptions")
    unused = fields.pop("unused")
    assert list(fields) == list(optimizers.StepOptions._fields)
    assert set(fields.values()) == {1}
    options = optimizers.StepOptions(*range(1, 1 + len(fields)))
    row = options.row()
    assert row == (*options, *[0.0] * unused)
    assert len(row) == optimizers.WIDTH
    assert optimizers.StepOptions.of([*row, -1.0, -2.0]) == options


def test_options_of_a_group() -> None:
    fields = fields_of("OptionGroup")
    assert list(fields) == list(optimizers.GroupOptions._fields)
    assert fields.pop("option") == optimizers.RULE_OPTIONS
    assert set(fields.values()) == {1}
    shared = [float(i) for i in range(1, 1 + len(fields))]
    for count in (0, 3, optimizers.RULE_OPTIONS):
        option = tuple(float(i) for i in range(10, 10 + count))
        row = optimizers.GroupOptions(*shared, option=option).row()
        assert row == (*shared, *option, *[0.0] * (optimizers.RULE_OPTIONS - count))
        assert len(row) == optimizers.WIDTH
    for place, name in enumerate(fields):
        assert row[optimizers.GroupOptions.column(name)] == shared[place]
    assert row[optimizers.GroupOptions.column("option")] == option[0]


def test_a_group_of_an_optimizer() -> None:
    """Each number under its name, and rates that are tensors by their places."""
    rates: list[torch.Tensor] = []
    numbers = Numbers(0.5, 0.25, (3, True), maximize=True, max_lr=2.0, cautious=True)
    expected = optimizers.GroupOptions(
        lr=0.5, lr_index=-1.0, weight_decay=0.25, sign=-1.0, max_lr=2.0, cautious=1.0,
        option=(3.0, 1.0),
    )  # fmt: skip
    assert numbers.row(rates) == expected.row()
    assert not rates
    for place in range(2):
        rate = torch.tensor(0.1)
        row = numbers._replace(lr=rate, maximize=False).row(rates)
        assert row == expected._replace(lr=0.0, lr_index=float(place), sign=1.0).row()
        assert rates[place] is rate


def test_options_that_are_too_many() -> None:
    option = (1.0,) * (optimizers.RULE_OPTIONS + 1)
    rows = [Numbers(0.1, 0.0, ()).row([]), Numbers(0.1, 0.0, option).row([])]
    with pytest.raises(ValueError, match="expected sequence of length"):
        torch.tensor(rows)


def test_what_a_step_tells() -> None:
    pattern = r"// Report of the last step: ((?:.*\n//)*.*)\.\nconstexpr int kC"
    (comment,) = re.findall(pattern, HEADER)
    words = re.sub(r"\n// *", " ", comment).split(", ")
    assert [CONTROL[word] for word in words] == list(optimizers.Control._fields)
    memory = torch.arange(1.0, 1 + optimizers.CONTROLS)
    control = optimizers.Control.of(memory)
    assert [float(value) for value in control] == list(range(1, 1 + len(words)))
    control.clip.fill_(-1.0)
    assert memory[words.index("clip coefficient")] == -1.0


def test_constants() -> None:
    pairs = {
        "kMeasureFinite": optimizers.MEASURE_FINITE,
        "kMeasureGradients": optimizers.MEASURE_GRADIENTS,
        "kMeasureParameters": optimizers.MEASURE_PARAMETERS,
        "kMaxStates": optimizers.MAX_STATES,
        "kTensorScalars": optimizers.SCALARS,
        "kControls": optimizers.CONTROLS,
    }
    assert {name: constant(name) for name in pairs} == pairs
