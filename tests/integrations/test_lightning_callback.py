"""The callback for Lightning's Trainer: when it converts and reverts, averages, two processes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from helpers import ROOT
from helpers.commands import environment
from helpers.lightning_runs import (
    assert_equal_parameters,
    callback,
    data,
    module,
    network,
    trainer,
)
from helpers.models import lightning
from helpers.processes import run_python

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on loaders and devices
]
STOCK = [nn.Conv2d, nn.BatchNorm2d, nn.SiLU, nn.Flatten, nn.Linear]


def kinds(model: Any) -> list[type]:
    return [type(layer) for layer in model.model]


class Watches:
    """Notes the classes of the layers at hooks, and may fail. `self` is a LightningModule."""

    fails = False

    def configure_optimizers(self: Any) -> Any:
        self.at_optimizers = kinds(self)
        return super().configure_optimizers()

    def training_step(self: Any, batch: list[Tensor], number: int) -> Tensor:
        self.at_step = kinds(self)
        self.fused_at_step = any(has_own_forward(part) for part in self.modules())
        if self.fails:
            raise KeyError("planted")
        return super().training_step(batch, number)


@pytest.mark.parametrize("options", [{}, {"submodule": "model"}, {"memory": "recompute"}], ids=str)
@pytest.mark.parametrize("proves", [False, True])
def test_converts_before_the_optimizer_and_reverts(options: dict[str, Any], proves: bool) -> None:
    model = module("torch", base=Watches)
    example = torch.randn(2, 2, 4, 4, dtype=torch.float64) if proves else None
    one = callback(example_inputs=example, **options)
    trainer(callbacks=one).fit(model, data())
    assert model.at_optimizers == model.at_step
    assert model.fused_at_step
    assert kinds(model) == STOCK
    assert one.report.proof is not None if proves else one.report.proof is None
    stock = module("torch")
    trainer().fit(stock, data())
    assert_equal_parameters(model, stock)


def test_an_exception_reverts() -> None:
    model = module("torch", base=Watches)
    model.fails = True
    with pytest.raises(KeyError, match="planted"):
        trainer(callbacks=callback()).fit(model, data())
    assert model.fused_at_step
    assert kinds(model) == STOCK


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_layers_that_hooks_of_the_module_make(hook: str) -> None:
    def make(self: Any, stage: str | None = None) -> None:
        self.model = network()

    base = type("Late", (Watches,), {hook: make})
    model = module("torch", base=base)
    del model.model
    one = callback(example_inputs=torch.randn(2, 2, 4, 4, dtype=torch.float64))
    trainer(callbacks=one).fit(model, data())
    assert model.fused_at_step
    assert kinds(model) == STOCK


def test_a_model_that_the_user_converted_stays() -> None:
    model = module("torch", base=Watches)
    fusedtrain.convert(model.model)
    before = kinds(model)
    trainer(callbacks=callback()).fit(model, data())
    assert kinds(model) == model.at_step == before
    assert before != STOCK


def test_evaluation_alone_converts_nothing() -> None:
    one = callback()
    trainer(callbacks=one).validate(module("torch"), data(), verbose=False)
    assert one.report is None


def test_validates_on_the_averages_and_trains_on_with_the_weights() -> None:
    model, plain = module("ours", ema_decay=0.7), network()
    trainer(callbacks=callback(averages=True), num_sanity_val_steps=0).fit(model, data(), data())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02)
    averages = [p.detach().clone() for p in plain.parameters()]
    losses = []
    for _ in range(2):
        for x, y in data():
            optimizer.zero_grad()
            (plain(x) - y).square().mean().backward()
            optimizer.step()
            for p, average in zip(plain.parameters(), averages, strict=True):
                average.lerp_(p.detach(), 1 - 0.7)
        averaged = network().eval()
        averaged.load_state_dict(plain.state_dict())  # the norm's statistics
        with torch.no_grad():
            for p, average in zip(averaged.parameters(), averages, strict=True):
                p.copy_(average)
            losses += [(averaged(x) - y).square().mean().item() for x, y in data()]
    assert model.val_losses == pytest.approx(losses, rel=1e-9)
    assert_equal_parameters(model.model, plain)


def test_a_checkpoint_within_validation_holds_the_weights(tmp_path: Path) -> None:
    """Saved by the module while the parameters hold their averages; a resumed run goes on alike."""

    class Saves:
        def on_validation_epoch_end(self: Any) -> None:
            self.trainer.save_checkpoint(tmp_path / f"{self.trainer.current_epoch}.ckpt")

    options: Any = {"callbacks": callback(averages=True), "num_sanity_val_steps": 0}
    model, resumed = (module("ours", base=Saves, ema_decay=0.7) for _ in range(2))
    trainer(**options, max_epochs=2).fit(model, data(), data())
    options["callbacks"] = callback(averages=True)
    checkpoint = tmp_path / "0.ckpt"
    trainer(**options, max_epochs=2).fit(resumed, data(), data(), ckpt_path=checkpoint)
    assert_equal_parameters(model, resumed)


def test_lightnings_averages_of_a_converted_model() -> None:
    models = []
    for callbacks in ([callback()], []):
        averaging = lightning().callbacks.EMAWeightAveraging(decay=0.7)
        model = module("ours" if callbacks else "torch")
        trainer(callbacks=[*callbacks, averaging]).fit(model, data(), data())
        models.append(model)
    assert_equal_parameters(*models)
    assert models[0].val_losses == pytest.approx(models[1].val_losses, rel=1e-9)


def test_averages_need_an_optimizer_that_has_them() -> None:
    model = module("ours")
    with pytest.raises(ValueError, match=r"averages=True needs an optimizer.*ema_decay"):
        trainer(callbacks=callback(averages=True)).fit(model, data())
    assert kinds(model) == STOCK


def test_an_exception_in_validation_leaves_the_weights() -> None:
    class Fails:
        def validation_step(self: Any, batch: list[Tensor], number: int) -> None:
            self.seen = [p.clone() for p in self.parameters()]
            raise KeyError("planted")

    model, plain = module("ours", base=Fails, ema_decay=0.7), module("ours")
    run = trainer(callbacks=callback(averages=True), num_sanity_val_steps=0, max_epochs=1)
    with pytest.raises(KeyError, match="planted"):
        run.fit(model, data(), data())
    trainer(max_epochs=1).fit(plain, data())
    assert_equal_parameters(model, plain)
    average = model.seen[0]
    assert not torch.allclose(average, next(plain.parameters()))


def test_logs_nothing_where_gradients_are_accumulated_or_log_is_false() -> None:
    logged: list[set[str]] = []

    class Hooks:
        def on_train_batch_end(self: Any, *_: Any) -> None:
            results = self.trainer.fit_loop._results
            logged.append({key.split(".")[-1] for key in results})

    cases: Any = (({}, {"skipped_steps", "grad_norm"}), ({"log": False}, set()))
    for options, expected in cases:
        logged.clear()
        model = module("ours", base=Hooks, max_grad_norm=1.0)
        one = callback(**options)
        trainer(callbacks=one, accumulate_grad_batches=2, max_epochs=1).fit(model, data())
        assert logged[0] == set()
        assert logged[1] == expected


RANKS = """
import sys, torch
torch.set_num_threads(1)
from helpers.lightning_runs import callback, data, module, plugin, trainer
class Shard:
    def train_dataloader(self):
        dataset = data().dataset
        sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False)
        return torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
model = module("ours", base=Shard)
run = trainer(devices=2, strategy="ddp", plugins=plugin(sys.argv[1]), gradient_clip_val=0.4,
              callbacks=callback(), max_epochs=1, use_distributed_sampler=False)
run.fit(model)
assert run.world_size == 2
state = model.state_dict(), run.precision_plugin.state_dict()
torch.save(state, f"{sys.argv[2]}/{run.global_rank}.pt")
"""


class Shards:
    """One process whose batch is what two ranks have together. `self` is a LightningModule."""

    def training_step(self: Any, batch: list[Tensor], number: int) -> Tensor:
        # A distributed sampler deals the samples to ranks in turn; a norm sees a rank's alone.
        losses = []
        x, y = batch
        for rank in (0, 1):
            losses.append((self(x[rank::2]) - y[rank::2]).square().mean())
        return torch.stack(losses).mean()


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    lightning()
    path = tmp_path / "ranks.py"
    path.write_text(RANKS)
    paths = [str(ROOT), str(ROOT / "tests")]
    surroundings = environment() | {"PYTHONPATH": ":".join(paths)}
    run = run_python(path, "16-mixed", tmp_path, env=surroundings, timeout=600, trains=True)
    assert run.returncode == 0, run.stderr
    (first, scale), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    one = module("torch", base=Shards)
    loader = torch.utils.data.DataLoader(data().dataset, batch_size=8)
    trainer(gradient_clip_val=0.4, max_epochs=1).fit(one, loader)
    for name, value in one.state_dict().items():
        if "running" not in name and "num_batches" not in name:  # these are a rank's own
            torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-9)
            assert torch.equal(first[name], second[name])
    assert scale["scale"] == 2.0**16


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    lightning()
    path = ROOT / "examples" / "integrations" / "lightning_amp.py"
    assert len(path.read_text().splitlines()) < 40
    runpy.run_path(str(path), run_name="__main__")
    assert "accuracy" in capsys.readouterr().out
