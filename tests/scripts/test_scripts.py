"""Training scripts as they were, and with the changes that README and docs/ ask for."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from scripts import (
    apex_loop,
    bert_trainer,
    cifar_efficientnet,
    dcgan,
    deeplab,
    diffusion,
    imagenet,
    mnist,
    nanogpt,
    timm_loop,
    torchvision_reference,
    transformers_loop,
    vae,
    wgan_gp,
)
from scripts.harness import (
    Run,
    State,
    assert_close,
    assert_equal,
    continued,
    evaluated,
    load,
    saved,
    saved_whole,
    state_of,
    trained,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# Kinds of entries in the report of `convert`.
KINDS = ("converted", "norms", "group_norms", "calls", "products", "branches")


@dataclass(frozen=True)
class Expected:
    """`coverage`: for each model the least number of each kind of entries in the report. `left`:
    why something stays, and how often at most. `tolerance`: of losses, weights and averages in
    float64. `narrow`: of losses in float32."""

    coverage: tuple[dict[str, int], ...]
    left: dict[str, int] = field(default_factory=dict)
    tolerance: float = 1e-11
    narrow: float = 1e-5


# Measured in float64: 4e-13 at most. Two things enlarge it: Adam's first steps make up to 5e-9 of
# gradients that are rounding (biases before a norm, of keys in attention), and torch's Hardsigmoid
# has a 1/6 of float32. Measured in float32: 2e-6 at most. Under autocast 1.9e-2 (timm's
# EfficientNet), 3.7e-3 (its ResNet) and below 1e-3: the stock scripts differ as much if their
# weights are off by bfloat16's rounding.
SCRIPTS: dict[str, tuple[Callable[..., Run], Expected]] = {
    "mnist": (mnist.main, Expected(({"calls": 1},))),
    "vae": (vae.main, Expected(({"calls": 1},))),
    "dcgan": (dcgan.main, Expected(({"converted": 3, "norms": 2}, {"converted": 2, "norms": 1}))),
    "imagenet": (imagenet.main, Expected(({"converted": 5, "norms": 7},), narrow=1e-4)),
    "cifar_efficientnet": (
        cifar_efficientnet.main,
        Expected(
            ({"norms": 32, "products": 16, "calls": 16},),
            {"div_ writes over its output": 9},
        ),
    ),
    "nanogpt": (nanogpt.main, Expected(({"calls": 2},), narrow=1e-2)),
    "timm_efficientnet": (
        functools.partial(timm_loop.main, name="test_efficientnet"),
        Expected(({"converted": 13, "norms": 9, "products": 2},), tolerance=1e-7, narrow=1e-1),
    ),
    "timm_resnet": (
        functools.partial(timm_loop.main, name="test_resnet"),
        Expected(({"converted": 13, "norms": 12},), tolerance=1e-7, narrow=2e-2),
    ),
    "timm_convnext": (
        functools.partial(timm_loop.main, name="test_convnext"),
        Expected(({"converted": 9, "branches": 9},), tolerance=1e-7, narrow=1e-2),
    ),
    "torchvision_reference": (
        torchvision_reference.main,
        Expected(({"converted": 18, "norms": 16, "products": 4},), tolerance=1e-6, narrow=1e-2),
    ),
    **{
        f"transformers_{name}": (functools.partial(transformers_loop.main, name=name), expected)
        for name, expected in {
            "Llama": Expected(({"calls": 5, "converted": 2, "products": 2},)),
            "GPT2": Expected(({"calls": 2},), tolerance=1e-8),
            "Bert": Expected(({"converted": 3},), tolerance=1e-8),
            "ViT": Expected(({"converted": 2},), tolerance=1e-8),
            "ConvNext": Expected(({"converted": 5},)),
        }.items()
    },
    "diffusion": (
        diffusion.main,
        Expected(
            ({"calls": 1, "group_norms": 4},), {"its forward stores something": 2}, narrow=1e-2
        ),
    ),
    "bert_trainer": (bert_trainer.main, Expected(({"converted": 3},), tolerance=1e-8)),
    "deeplab": (deeplab.main, Expected(({"norms": 1},), narrow=1e-2)),
    "wgan_gp": (wgan_gp.main, Expected(({"norms": 2}, {"converted": 3}))),
    "apex_loop": (apex_loop.main, Expected(({"norms": 5},), narrow=1e-2)),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str) -> None:
    """In float64, where little can hide behind rounding."""
    main, expected = SCRIPTS[name]
    with default_dtype(torch.float64):
        stock, store, recompute = main(), main("store"), main("recompute")
        states = [saved(state_of(run)) for run in (stock, store, recompute)]
        check_training(stock, store, recompute, states, expected.tolerance)
        check_coverage(store, expected)
        check_files_and_revert(stock, recompute, states[0])
        check_checkpoints(stock, store, states, expected.tolerance)


def check_training(
    stock: Run, store: Run, recompute: Run, states: list[State], tolerance: float
) -> None:
    assert store.losses == pytest.approx(stock.losses, rel=tolerance)
    assert recompute.losses == store.losses
    for part in stock.parts:
        weights, fused, again = (state[part]["model"] for state in states)
        assert_close(fused, weights, tolerance)
        assert_equal(again, fused)
    assert_close(store.averages, stock.averages, tolerance)
    assert_equal(recompute.averages, store.averages)


def check_coverage(run: Run, expected: Expected) -> None:
    reasons: dict[str, int] = {}
    for part, least in zip(run.parts.values(), expected.coverage, strict=True):
        report = part.report
        assert report is not None
        counts = {kind: len(getattr(report, kind)) for kind in KINDS}
        assert all(counts[kind] >= count for kind, count in least.items()), counts
        for left in (*report.left, *report.left_calls):
            assert left.reason, left
            if not left.reason.startswith("gains nothing: "):
                reasons[left.reason] = reasons.get(left.reason, 0) + 1
    assert all(count <= expected.left.get(reason, 0) for reason, count in reasons.items()), reasons


def check_files_and_revert(stock: Run, fused: Run, state: State) -> None:
    load(stock, state)
    load(fused, state)
    for name, part in fused.parts.items():
        expected = evaluated(stock.parts[name].model, part.example)
        outputs = evaluated(part.model, part.example)
        assert_close(outputs, expected, 1e-11)
        assert_equal(evaluated(saved_whole(part.model), part.example), outputs)
        reverted = copy.deepcopy(part.model)
        assert fusedtrain.revert(reverted) > 0
        modules, stock_modules = list(reverted.modules()), list(stock.parts[name].model.modules())
        assert [type(module) for module in modules] == [type(module) for module in stock_modules]
        assert not any(has_own_forward(module) for module in modules)
        assert_equal(evaluated(reverted, part.example), expected)
        results = trained(copy.deepcopy(stock.parts[name].model), part.example)
        assert_equal(trained(reverted, part.example), results)


def check_checkpoints(stock: Run, fused: Run, states: list[State], tolerance: float) -> None:
    """Either script goes on from the checkpoint of the other as from its own."""
    for name in stock.parts:
        assert list(states[0][name]["model"]) == list(states[1][name]["model"])
    from_stock = [continued(run, states[0]) for run in (stock, fused)]
    assert from_stock[1] == pytest.approx(from_stock[0], rel=tolerance)
    from_fused = [continued(run, states[1]) for run in (stock, fused)]
    assert from_fused[1] == pytest.approx(from_fused[0], rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_in_float32(name: str) -> None:
    main, expected = SCRIPTS[name]
    stock, fused = main(), main("recompute")
    assert fused.losses == pytest.approx(stock.losses, rel=expected.narrow)
    assert len(set(stock.losses)) > 1


def test_all_norms_are_fused_where_stochastic_depth_is_a_module() -> None:
    """41 norms are followed by swish or a sum; of the 8 others one is never called."""
    efficientnet, x = cifar_efficientnet.EfficientNet, torch.rand(4, 3, 32, 32, dtype=torch.float64)
    stock = efficientnet().double()
    model = efficientnet(block=cifar_efficientnet.BlockWithDropPath).double()
    model.load_state_dict(stock.state_dict())
    report = fusedtrain.convert(model, memory="recompute")
    assert sum(bool(norm.parts) for norm in report.norms) == 41
    assert not report.left
    assert_close(trained(model, x), trained(stock, x), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "tolerance"), [(imagenet, 1e-11), (torchvision_reference, 1e-6)],
    ids=["imagenet", "torchvision_reference"],
)  # fmt: skip
def test_whole_checkpoints_resume_in_either_script(script: Any, tolerance: float) -> None:
    """With schedules, averages and scalers where the script has them."""
    with default_dtype(torch.float64):
        stock = script.main()
        fused = script.main("store")
        half = len(stock.losses) // 2
        for resumed in (
            script.main("store", resume=stock.checkpoint),
            script.main(resume=fused.checkpoint),
            script.main("recompute", resume=fused.checkpoint),
        ):
            assert resumed.losses == pytest.approx(stock.losses[half:], rel=tolerance)
