"""timm's registries know ours; the steps of train.py, stock and fused, are equal in float64."""

from __future__ import annotations

import copy
import importlib
import itertools
import runpy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.integrations.timm import register, register_activations
from helpers import ROOT
from helpers.models import timm
from scripts.harness import saved

pytestmark = pytest.mark.usefixtures("one_thread")
VARIANTS = {  # names of timm beside those of tests/conversion/test_timm_factory.py
    "lambw", "lambcw", "lambcd", "nlars", "nlarc", "nadamc", "cnadamc", "sgdc", "csgdc", "lionc",
    "clionc", "rmsproptfc", "clamb", "clambw", "clion", "cnadamw", "crmsproptf", "csgdw",
}  # fmt: skip


def module(name: str) -> Any:
    timm()
    return importlib.import_module(name)


def test_every_optimizer_with_a_counterpart_is_registered() -> None:
    """Whatever timm calls it, with timm's defaults."""
    factory = module("timm.optim._optim_factory").default_registry
    names = register()
    assert {f"fusedtrain-{name}" for name in VARIANTS} <= set(names)
    for name in names:
        ours = factory.get_optimizer_info(name)
        theirs = factory.get_optimizer_info(name.removeprefix("fusedtrain-"))
        assert ours.defaults == theirs.defaults
        assert ours.opt_class.__module__.startswith("fusedtrain.optim")
    text = (ROOT / "docs" / "coming_from_timm.md").read_text()
    assert [n for n in names if f"`{n.removeprefix('fusedtrain')}`" not in text] == []


@pytest.mark.parametrize("name", [*sorted(VARIANTS), "lookahead_adamw"])
def test_steps_of_the_variants(name: str) -> None:
    """With layer decay, in float64. A prefix of timm's, lookahead_, goes before ours."""
    factory = module("timm.optim")
    register()
    head, _, last = name.rpartition("_")
    results = []
    for opt in (name, f"{head}_fusedtrain-{last}" if head else f"fusedtrain-{last}"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)).double()
        optimizer = factory.create_optimizer_v2(
            model, opt=opt, lr=0.01, weight_decay=0.05, layer_decay=0.7
        )
        x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
        for number in range(7):  # Lookahead looks back after 6
            optimizer.zero_grad()
            model(x * (number + 1)).square().mean().backward()
            optimizer.step()
        results.append(model.state_dict())
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_activation_by_name(dtype: torch.dtype) -> None:
    layers = module("timm.layers")
    x = torch.linspace(-4, 4, 48, dtype=dtype).view(2, 4, 6)
    seen = 0
    for name in register_activations():
        theirs = name.removeprefix("fusedtrain-")
        ours = layers.create_act_layer(name, inplace=False)
        assert type(ours).__module__ == "fusedtrain.nn.activation"
        layers.get_act_layer(name)(inplace=True)  # as models call the class
        if theirs not in ("star_relu", "relu_squared"):  # of models alone
            seen += 1
            stock = layers.create_act_layer(theirs).to(dtype)
            torch.testing.assert_close(ours.to(dtype)(x), stock(x))
            if theirs != "prelu":
                torch.testing.assert_close(layers.get_act_fn(name)(x), stock(x))
    create_act = module("timm.layers.create_act")
    known = {n for n in create_act._ACT_LAYER_DEFAULT if not n.startswith("fusedtrain-")}
    assert seen == len(known - {"identity"})


@pytest.mark.parametrize(
    "act_layer", ["fusedtrain-mish", fusedtrain.nn.Mish], ids=["name", "class"]
)
def test_models_take_our_activations(act_layer: Any) -> None:
    """And `convert` makes them part of the norms."""
    create_model = module("timm").create_model
    register()
    models = []
    for layer in (act_layer, "mish"):
        torch.manual_seed(0)
        model = create_model("test_resnet", num_classes=4, act_layer=layer)
        models.append(model.double().train())
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    ours, stock = models
    assert any(isinstance(m, fusedtrain.nn.Mish) for m in ours.modules())
    report = fusedtrain.convert(ours, lambda: torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert any("Mish" in str(norm.parts) for norm in report.norms)
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-9, atol=1e-9)


def train(fused: bool, clip_mode: str, ema: str, amp: bool, resume: Any = None) -> Any:
    """train.py's loop: its factories, scaler, averages and schedule; a checkpoint in the middle."""
    utils, optim = module("timm.utils"), module("timm.optim")
    utils.random_seed(42)
    model = module("timm").create_model("test_resnet", num_classes=10, drop_path_rate=0.1)
    model = model.to(memory_format=torch.channels_last).double()
    clip: dict[str, Any] = {}
    if fused:

        def example() -> Tensor:
            x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
            return x.to(memory_format=torch.channels_last)

        assert len(fusedtrain.convert(model, example).norms) > 4
        register()
        limit = {"max_grad_norm": 1.0} if clip_mode == "norm" else {"agc": 0.02}
        clip = {"opt": "fusedtrain-sgd", **limit}
    optimizer = optim.create_optimizer_v2(
        model, **{"opt": "sgd", "lr": 0.05, "weight_decay": 0.05, **clip}
    )
    scaler = utils.NativeScaler(device="cpu") if amp else None
    if fused and scaler is not None:
        scaler._scaler = fusedtrain.amp.GradScaler("cpu")
    averages = getattr(utils, ema)(model, decay=0.9)
    schedule, epochs = module("timm.scheduler").create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=4, warmup_epochs=1, step_on_epochs=False,
        updates_per_epoch=3,
    )  # fmt: skip
    assert epochs == 4
    first = 0
    if resume is not None:
        model.load_state_dict(resume["model"])
        optimizer.load_state_dict(copy.deepcopy(resume["optimizer"]))
        averages.module.load_state_dict(resume["ema"])
        if scaler is not None:
            scaler.load_state_dict(resume["scaler"])
        first = 2
        schedule.step_update(num_updates=6)
    losses, checkpoint = [], {}
    for epoch in range(first, 4):
        utils.random_seed(epoch)
        for batch in range(3):
            x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                loss = nn.functional.cross_entropy(model(x), torch.arange(4), label_smoothing=0.1)
            optimizer.zero_grad()
            stock_clip = {} if fused else {"clip_grad": 1.0 if clip_mode == "norm" else 0.02}
            if scaler is not None:
                scaler(loss, optimizer, clip_mode=clip_mode, parameters=model.parameters(),
                       **stock_clip)  # fmt: skip
            else:
                loss.backward()
                if stock_clip:
                    utils.dispatch_clip_grad(model.parameters(), stock_clip["clip_grad"], clip_mode)
                optimizer.step()
            averages.update(model)
            schedule.step_update(num_updates=epoch * 3 + batch + 1)
            losses.append(loss.item())
        if epoch == 1:
            checkpoint = {
                "model": {k: v.clone() for k, v in model.state_dict().items()},
                "optimizer": saved(optimizer.state_dict()),
                "ema": {k: v.clone() for k, v in averages.module.state_dict().items()},
                "scaler": None if scaler is None else scaler.state_dict(),
            }
    return losses, model.state_dict(), averages.module.state_dict(), checkpoint


@pytest.mark.parametrize(
    ("clip_mode", "ema", "amp"),
    [("norm", "ModelEmaV3", True), ("agc", "ModelEmaV3", True), ("agc", "ModelEmaV2", False),
     ("norm", "ModelEmaV2", False)],
)  # fmt: skip
def test_the_steps_of_train_py(clip_mode: str, ema: str, amp: bool) -> None:
    stock, fused = (train(f, clip_mode, ema, amp) for f in (False, True))
    assert fused[0] == pytest.approx(stock[0], rel=1e-9)
    for ours, theirs in zip(fused[1:3], stock[1:3], strict=True):
        assert list(ours) == list(theirs)
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-8, atol=1e-9)
    # Either goes on from the other's checkpoint, as if nothing had been.
    for run, other in itertools.product((False, True), (stock, fused)):
        losses = train(run, clip_mode, ema, amp, resume=other[3])[0]
        assert losses == pytest.approx(stock[0][6:], rel=1e-9)


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "integrations" / "timm_training.py"
    assert len(path.read_text().splitlines()) < 40
    timm()
    runpy.run_path(str(path), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step ")]
    assert len(losses) == 16
    assert min(losses[-3:]) < losses[0]
