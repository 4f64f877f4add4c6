"""The precision plugin for Lightning's Trainer: runs equal those of torch's optimizers."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.lightning_runs import (
    BATCHES,
    OPTIMIZERS,
    assert_equal_parameters,
    callback,
    data,
    module,
    network,
    plugin,
    trainer,
)
from helpers.models import lightning
from helpers.processes import python

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on loaders and devices
]
PACKAGES = ["lightning", "pytorch_lightning"]


def fit(whose: str, loader: Any = None, base: Any = None, **options: Any) -> Any:
    """A module after `fit`; `gradient_clip_val` and so on are Trainer's."""
    torch.manual_seed(0)
    model = module(whose, base=base)
    trainer(**options).fit(model, data() if loader is None else loader)
    return model


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("batches", [1, 3])
def test_clips_as_torch_does(precision: str, algorithm: str, batches: int) -> None:
    limit = {"norm": 0.4, "value": 0.05}[algorithm]
    options: dict[str, Any] = {"accumulate_grad_batches": batches, "gradient_clip_val": limit}
    options["gradient_clip_algorithm"] = algorithm
    lightning()
    ours = fit("ours", plugins=plugin(precision), benchmark=True, **options)
    assert_equal_parameters(ours, fit("torch", **options))
    del options["gradient_clip_val"]
    with pytest.raises(AssertionError):  # the limit matters
        assert_equal_parameters(ours, fit("torch", **options))


@pytest.mark.parametrize("package", PACKAGES)
def test_both_packages(package: str) -> None:
    models = []
    for whose in OPTIMIZERS:
        model = module(whose, package)
        options = {"plugins": plugin(package=package)} if whose == "ours" else {}
        trainer(package, gradient_clip_val=0.4, **options).fit(model, data())
        models.append(model)
    assert_equal_parameters(*models)


def test_the_plugin_of_lightning_refuses_to_clip() -> None:
    """When Lightning no longer refuses, docs/lightning.md is wrong."""
    stock = lightning().plugins.MixedPrecision("16-mixed", "cpu")
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit("ours", plugins=stock, gradient_clip_val=0.4)


def test_other_optimizers_get_lightnings_code() -> None:
    stock = lightning().plugins.MixedPrecision("16-mixed", "cpu")
    options = {"gradient_clip_val": 0.4, "loader": data(overflow=1)}
    ours, theirs = (fit("torch", plugins=p, **options) for p in (plugin(), stock))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_skips_and_scales_as_lightnings_plugin_with_torchs_optimizer() -> None:
    stock, ours = lightning().plugins.MixedPrecision("16-mixed", "cpu"), plugin()
    # The running statistics of the norm see the same batches.
    options = {"gradient_clip_val": 0.4, "loader": data(overflow=1)}
    fused = trainer(plugins=ours, gradient_clip_val=0.4, callbacks=callback())
    model = module("ours")
    fused.fit(model, data(overflow=1))
    assert_equal_parameters(model, fit("torch", plugins=stock, **options))
    assert ours.scaler.state_dict() == stock.scaler.state_dict()
    assert ours.scaler.get_scale() == 2.0**14  # two epochs, of one overflow each
    logged = fused.logged_metrics
    assert logged["skipped_steps"] == 2
    assert logged["loss_scale"] == 2.0**14
    assert torch.isfinite(logged["grad_norm"])


def test_the_norm_that_is_logged_is_unscaled_and_unclipped() -> None:
    model, stock = module("ours"), network()
    run = trainer(plugins=plugin(), gradient_clip_val=0.01, callbacks=callback(), max_steps=1)
    run.fit(model, data())
    x, y = next(iter(data()))
    (stock(x) - y).square().mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in stock.parameters()])
    torch.testing.assert_close(run.logged_metrics["grad_norm"].double(), norm, rtol=1e-6, atol=0)
    assert norm > 0.1


def test_the_smaller_of_two_limits_counts_and_the_optimizer_keeps_its_own() -> None:
    expected = fit("torch", gradient_clip_val=0.3)
    for own, limit in ((0.3, 5.0), (5.0, 0.3)):
        model = module("ours", max_grad_norm=own)
        run = trainer(plugins=plugin(), gradient_clip_val=limit)
        run.fit(model, data())
        assert_equal_parameters(model, expected)
        assert run.optimizers[0].max_grad_norm == own


def test_agc_and_clipping_by_norm_exclude_each_other() -> None:
    model = module("ours", agc=0.1)
    with pytest.raises(ValueError, match="max_grad_norm and agc cannot be used together"):
        trainer(plugins=plugin(), gradient_clip_val=0.3).fit(model, data())


def test_a_training_step_without_a_loss_skips_the_step() -> None:
    class Hooks:
        def training_step(self, batch: list[Tensor], number: int) -> Any:
            return None if number == 2 else super().training_step(batch, number)

    options: dict[str, Any] = {"base": Hooks, "gradient_clip_val": 0.4, "max_epochs": 1}
    for precision in ("16-mixed", "bf16-mixed"):
        ours = fit("ours", plugins=plugin(precision), **options)
        assert_equal_parameters(ours, fit("torch", **options))


class Manual:
    """Two optimizers; the second steps at every other batch. `self` is a LightningModule."""

    automatic_optimization = False
    whose = "torch"
    model: Any

    def training_step(self: Any, batch: list[Tensor], number: int) -> None:
        x, y = batch
        for i, optimizer in enumerate(self.optimizers()):
            if i == 0 or number % 2:
                optimizer.zero_grad()
                self.manual_backward((self(x) - y).square().mean())
                self.clip_gradients(optimizer, 0.1, gradient_clip_algorithm="norm")
                optimizer.step()

    def configure_optimizers(self) -> Any:
        kind = OPTIMIZERS[self.whose]
        return [kind(self.model[0].parameters(), lr=0.1), kind(self.model[4].parameters(), lr=0.01)]


class OursManual(Manual):
    whose = "ours"


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_manual_optimization_of_two_optimizers(precision: str) -> None:
    """Lightning's plugin would clip scaled gradients here; ours clips what the user means."""
    ours = module("ours", base=OursManual)
    run = trainer(plugins=plugin(precision), callbacks=callback())
    run.fit(ours, data())
    assert_equal_parameters(ours, fit("torch", base=Manual))
    assert {"skipped_steps/0", "skipped_steps/1", "grad_norm/0"} <= run.logged_metrics.keys()


def test_a_hook_can_unscale() -> None:
    """on_before_optimizer_step sees scaled gradients, unless it unscales them."""
    norms = []

    class Hooks:
        def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
            self.trainer.precision_plugin.scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    ours = fit("ours", base=Hooks, plugins=plugin(), gradient_clip_val=0.4)
    assert_equal_parameters(ours, fit("torch", gradient_clip_val=0.4))
    assert len(norms) == 2 * BATCHES
    assert max(norms) < 1e3  # the loss scale is 65536


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(precision: str, tmp_path: Path) -> None:
    def run(epochs: int, checkpoint: Path | None = None) -> Any:
        model = module("ours", ema_decay=0.9, max_grad_norm=3.0)
        one = trainer(
            plugins=plugin(precision), gradient_clip_val=0.4, max_epochs=epochs,
            callbacks=callback(averages=True), accumulate_grad_batches=2,
        )  # fmt: skip
        overflow = 1 if precision == "16-mixed" else None
        one.fit(model, data(overflow), data(), ckpt_path=checkpoint, weights_only=False)
        return one, model

    whole, expected = run(4)
    half, _ = run(2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, model = run(4, tmp_path / "half.ckpt")
    assert_same_bits(model.state_dict(), expected.state_dict())
    assert_same_bits(resumed.optimizers[0].state_dict(), whole.optimizers[0].state_dict())
    assert resumed.precision_plugin.state_dict() == whole.precision_plugin.state_dict()
    # Before these come the batches of the sanity check.
    assert model.val_losses[-2 * BATCHES :] == expected.val_losses[-2 * BATCHES :]


def assert_same_bits(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    """The scale of Lightning's plugin is known to ours, and ours to Lightning's."""
    for first, second in (("ours", "torch"), ("torch", "ours")):
        scales = []
        for whose, path in ((first, None), (second, tmp_path / f"{first}.ckpt")):
            stock = lightning().plugins.MixedPrecision("16-mixed", "cpu")
            precision = plugin() if whose == "ours" else stock
            epochs = 1 if path is None else 2
            run = trainer(plugins=precision, max_epochs=epochs)
            run.fit(module(whose), data(overflow=0), ckpt_path=path, weights_only=False)
            if path is None:
                run.save_checkpoint(tmp_path / f"{first}.ckpt")
            scales.append(precision.scaler.get_scale())
        assert scales == [2.0**15, 2.0**14]


@pytest.mark.parametrize("package", PACKAGES)
def test_without_lightning_the_error_tells_the_remedy(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"fusedtrain.integrations.{package}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    top = "lightning" if package == "lightning" else "pytorch_lightning"
    for one in [m for m in sys.modules if m.split(".")[0] == top]:
        monkeypatch.delitem(sys.modules, one)
    monkeypatch.setitem(sys.modules, top, None)
    remedy = "pip install " + package.replace("_", "-")
    with pytest.raises(ImportError, match=re.escape(remedy)):
        importlib.import_module(name)


def test_importing_fusedtrain_imports_no_trainer() -> None:
    code = "import sys, fusedtrain; print({'lightning', 'pytorch_lightning'} & set(sys.modules))"
    run = python(code)
    assert run.stdout.split() == ["set()"], run.stderr
