"""Reports of `convert` where nothing changes or nothing is compared, and its switches."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.modules import FORWARD, has_own_forward
from helpers.conversion import image, small, small_linear, snapshot
from helpers.models import model_of


def test_nothing_to_convert_says_what_was_looked_at() -> None:
    lines = str(fusedtrain.convert(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))).splitlines()
    assert lines[0] == "converted 0 modules"
    assert "looked at 3 modules" in lines[1]
    assert "no activation modules found" in lines[1]
    assert "what would help" in lines[2]


@pytest.mark.parametrize("example", [None, torch.randn(2, 3)])
def test_what_is_left_is_listed_with_and_without_an_example(example: Any) -> None:
    model = nn.Sequential(
        nn.Linear(3, 3), model_of(lambda self, x: F.gelu(x) * float(len(x))), nn.RReLU()
    )
    text = str(fusedtrain.convert(model.eval(), example))
    assert "converted 0 modules" in text
    assert "1 x torch.nn.RReLU: no fused version (2)" in text
    assert "1 x gelu: torch.fx cannot trace its forward" in text
    assert "torch.fx cannot trace 1 more" in text
    assert "what would help" in text


def test_converted_before_needs_no_help() -> None:
    model = small_linear()
    fusedtrain.convert(model)
    text = str(fusedtrain.convert(model))
    assert "already fused: 1 module" in text
    assert "what would help" not in text


def test_the_report_is_not_the_model() -> None:
    report = fusedtrain.convert(small_linear())
    words = dict.fromkeys(("parameters", "train", "to"), "in place and returns its report")
    for name, text in (words | {"lefts": "no attribute 'lefts'$"}).items():
        with pytest.raises(AttributeError, match=text):
            getattr(report, name)
    assert copy.deepcopy(report) == report
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.skipif(
    not hasattr(Exception, "add_note"), reason="needs Python 3.11, whose exceptions have notes"
)
def test_what_the_model_raises_for_the_example_names_its_arguments() -> None:
    batch = (torch.randn(2, 5), torch.zeros(2, dtype=torch.long))
    with pytest.raises(TypeError, match="positional arguments") as raised:
        fusedtrain.convert(small_linear(), batch)
    assert raised.value.__notes__ == [
        "with example_inputs the model was called as model(float32[2, 5], int64[2]), below a "
        "TorchDispatchMode; without them convert calls no model"
    ]
    with pytest.raises(TypeError) as raised:
        fusedtrain.convert(small_linear(), {"x": batch[0]})
    assert "model(x=float32[2, 5])" in raised.value.__notes__[0]


@pytest.mark.parametrize("memory", ["store", "recompute", "q8"])
@pytest.mark.parametrize("example", [None, torch.randn(2, 3, 8, 8)])
def test_dry_run_changes_nothing(memory: str, example: Any) -> None:
    model = small()
    before, forwards = snapshot(model), [vars(m).get(FORWARD) for m in model.modules()]
    report = fusedtrain.convert(model, example, memory=memory, dry_run=True)
    assert snapshot(model) == before
    assert [vars(m).get(FORWARD) for m in model.modules()] == forwards
    assert len(report.norms) == 1
    assert str(report).startswith("dry run: the model is as it was")
    assert (report.proof is None) == (example is None)
    assert fusedtrain.revert(model) == 0
    real = fusedtrain.convert(model, example, memory=memory)
    assert (real.norms, real.converted, real.left) == (report.norms, report.converted, report.left)


def test_verify_false_runs_nothing() -> None:
    class Raising(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the model was run")

    model = nn.Sequential(small(), Raising())
    report = fusedtrain.convert(model, image(), verify=False)
    assert len(report.norms) == 1
    assert report.proof is None
    assert "not run on an example (verify=False)" in str(report)
    with pytest.raises(AssertionError, match="was run"):
        fusedtrain.convert(copy.deepcopy(nn.Sequential(small(), Raising())), image())


def test_an_example_from_a_function_moves_no_random_numbers() -> None:
    states = torch.get_rng_state(), random.getstate()
    report = fusedtrain.convert(small(), lambda: (torch.randn(2, 3, 8, 8),))
    assert report.proof is not None
    torch.manual_seed(0)  # `small` seeds
    small()
    expected = torch.randn(3)
    model = small()
    fusedtrain.convert(model, lambda: torch.rand(2, 3, 8, 8) * random.random())
    assert torch.equal(torch.randn(3), expected)
    assert random.getstate() == states[1]


def test_an_example_from_a_function_must_be_one() -> None:
    with pytest.raises(TypeError, match="example_inputs: expected a tensor"):
        fusedtrain.convert(small(), lambda: "words")


def test_the_proof_says_what_it_did_not_compare() -> None:
    frozen = small().requires_grad_(False)
    report = fusedtrain.convert(frozen, image())
    assert report.proof is not None
    assert (report.proof.outputs, report.proof.gradients) == (1, 0)
    assert "of gradients unknown (nothing compared" in str(report)
    with torch.inference_mode():
        assert "of gradients unknown" in str(fusedtrain.convert(small(), image()))
    whole = fusedtrain.convert(small(), image())
    assert whole.proof is not None
    assert whole.proof.gradients == len(list(small().parameters()))
    assert "unknown" not in str(whole)


def test_the_proof_of_a_model_that_returns_no_tensor() -> None:
    report = fusedtrain.convert(
        model_of(lambda self, x: frozenset([self.net(x)]), net=small()), image()
    )
    assert "of outputs unknown (nothing compared: the model returns no tensors)" in str(report)


def test_the_last_lines_are_the_verdict() -> None:
    """In words: whether the numbers agree, what is saved, and what else helps."""
    net = small()
    report = fusedtrain.convert(net, image())
    proof = report.proof
    assert proof is not None
    rounding, saved, *biases = str(report).splitlines()[-3:]
    error, noise = max(
        (proof.output_error, proof.output_noise), (proof.gradient_error, proof.gradient_noise)
    )
    assert rounding == f"within rounding: yes (largest {error:.1e}, rounding alone {noise:.1e})"
    assert saved.startswith(f"saved: backward keeps {proof.saved_after / proof.saved_before:.2f}x")
    assert biases == ["1 bias before a norm does nothing: drop_redundant_bias before convert"]


def test_the_verdict_says_what_saves_memory() -> None:
    norm = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    net = norm.append(nn.Conv2d(4, 4, 1))
    text = str(fusedtrain.convert(net, image()))
    assert text.splitlines()[-1] == "nothing saved: try memory='recompute'"
    again = str(fusedtrain.convert(net, image(), memory="recompute"))
    assert "saved: backward keeps 0." in again.splitlines()[-1]
    without = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.GELU())
    assert str(fusedtrain.convert(without, image())).splitlines()[-1] == "nothing saved"
    assert "approximation" in str(fusedtrain.convert(without, image(), memory="q8"))
    assert "within rounding" not in str(fusedtrain.convert(nn.Linear(2, 2), torch.ones(1, 2)))


def test_idle_biases_are_those_that_drop_redundant_bias_takes() -> None:
    def block(**options: Any) -> list[nn.Module]:
        return [nn.Conv2d(3, 3, 1, **options), nn.BatchNorm2d(3), nn.ReLU()]

    net = nn.Sequential(*block(), *block(bias=False), *block(), nn.Conv2d(3, 3, 1), *block())
    net[7].eval()  # the bias before a frozen norm is trained
    net[10].bias.requires_grad_(False)
    twin = copy.deepcopy(net)
    report = fusedtrain.convert(net)
    taken = [pair.conv for pair in fusedtrain.drop_redundant_bias(twin).folded]
    assert report.idle_biases == [name for name in taken if name != "10"] == ["0"]


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), [2, 3, 8, 8], torch.Size([2, 3, 8, 8])])
def test_a_shape_stands_for_random_numbers(shape: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2)).bfloat16()
    # `convert` takes back what a hook stores in a list.
    note = Mock(return_value=None)
    model.register_forward_pre_hook(note)
    state = torch.get_rng_state()
    report = fusedtrain.convert(model, shape)
    seen = [call.args[1][0] for call in note.call_args_list]
    assert report.proof is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert {tuple(x.shape) for x in seen} == {(2, 3, 8, 8)}
    assert seen[0].dtype is torch.bfloat16
    assert all(x.float().std() > 0.5 for x in seen)


@pytest.mark.parametrize("example", [
    ((2, 3, 8, 8), (2, 5)), [torch.Size([2, 3]), (2, 5)], (2, -3, 8, 8), lambda: ((2, 3), (4, 5)),
])  # fmt: skip
def test_what_may_be_shapes_or_arguments_is_refused(example: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU())
    with pytest.raises(ValueError, match="example_inputs: "):
        fusedtrain.convert(model, example)
    assert not any(map(has_own_forward, model.modules()))


def test_a_shape_is_no_token_ids() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.SiLU())
    with pytest.raises(ValueError, match=r"example_inputs: the shape \(2, 7\).*look-up"):
        fusedtrain.convert(model, (2, 7))
    assert fusedtrain.convert(model, lambda: torch.randint(9, (2, 7))).proof is not None
