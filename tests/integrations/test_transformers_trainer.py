"""The Trainer of transformers with our optimizers and converted models, against torch's AdamW."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from helpers import ROOT
from helpers.models import accelerate, transformers
from scripts import transformers_loop

pytestmark = pytest.mark.usefixtures("one_thread")
CLIP = 0.3
# A large eps: what is rounding in a gradient must not become a step of Adam.
KEYWORDS: dict[str, Any] = {"lr": 5e-3, "eps": 1e-3}


def build(name: str) -> nn.Module:
    """A small model of transformers without dropout, as transformers_loop has it."""
    package: Any = transformers()
    kind, options = transformers_loop.MODELS[name]
    options = {key: value for key, value in options.items() if key != "drop_path_rate"}
    torch.manual_seed(1)
    model = getattr(package, kind)(getattr(package, f"{name}Config")(**options))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def train(name: str, folder: Path, way: str, clip: float = CLIP, **arguments: Any) -> Any:
    """A Trainer after its run; `way` says how it gets its optimizer, "stock" is torch's AdamW."""
    accelerate()
    package: Any = transformers()
    model = build(name)
    rows: Any = transformers_loop.batches(name)
    settings = package.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=clip,
        weight_decay=0.01, **{"save_strategy": "no", "num_train_epochs": 3, **arguments},
    )  # fmt: skip
    options: dict[str, Any] = {}
    if way == "stock":
        options["optimizer_cls_and_kwargs"] = (torch.optim.AdamW, KEYWORDS)
    else:
        batch = next(iter(torch.utils.data.DataLoader(rows, batch_size=4)))
        assert fusedtrain.convert(model, batch)
        own: dict[str, Any] = {"max_grad_norm": CLIP} if clip == 0 else {}
        if way == "class":
            options["optimizer_cls_and_kwargs"] = (fusedtrain.optim.AdamW, KEYWORDS | own)
        else:
            decay = package.Trainer.get_decay_parameter_names(None, model)
            named = list(model.named_parameters())
            groups = [
                {"params": [p for n, p in named if (n in decay) == decays], "weight_decay": rate}
                for decays, rate in ((True, 0.01), (False, 0.0))
            ]
            optimizer = fusedtrain.optim.AdamW(groups, **KEYWORDS, **own)
            options["optimizers"] = (optimizer, None)
    trainer = package.Trainer(model=model, args=settings, train_dataset=rows, **options)
    return trainer


def assert_equal_runs(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        for key in {"loss", "grad_norm", "learning_rate"} & other.keys():
            assert one[key] == pytest.approx(other[key], rel=1e-3), key
    expected = dict(theirs.model.named_parameters())
    for name, value in ours.model.named_parameters():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", transformers_loop.MODELS)
def test_trains_converted_models_as_torch_does(name: str, tmp_path: Path) -> None:
    ours, theirs = (train(name, tmp_path, way) for way in ("class", "stock"))
    for trainer in (ours, theirs):
        trainer.train()
    assert isinstance(ours.optimizer.optimizer, fusedtrain.optim.AdamW)
    assert_equal_runs(ours, theirs)
    moved = zip(build(name).parameters(), theirs.model.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in moved) > 1e-3


def test_trains_a_converted_model_in_bfloat16(tmp_path: Path) -> None:
    """The Trainer hands the forward to accelerate, which runs it within autocast."""
    ours, theirs = (train("GPT2", tmp_path, way, bf16=True) for way in ("class", "stock"))
    for trainer in (ours, theirs):
        trainer.train()
    for one, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        if "loss" in other:
            assert one["loss"] == pytest.approx(other["loss"], rel=3e-2)


@pytest.mark.parametrize("clip", [CLIP, 0.0], ids=["Trainer clips", "the update clips"])
def test_an_optimizer_of_ones_own(clip: float, tmp_path: Path) -> None:
    ours, theirs = train("GPT2", tmp_path, "object", clip), train("GPT2", tmp_path, "stock")
    unclipped = train("GPT2", tmp_path, "stock", 0.0)
    for trainer in (ours, theirs, unclipped):
        trainer.train()
    assert_equal_runs(ours, theirs)
    with pytest.raises(AssertionError):  # the limit matters
        assert_equal_runs(ours, unclipped)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    options: Any = {"save_strategy": "epoch", "num_train_epochs": 2}
    whole = train("Llama", tmp_path, "class", **options)
    whole.train()
    (first, _) = sorted(tmp_path.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    resumed = train("Llama", tmp_path, "class", **options)
    resumed.train(resume_from_checkpoint=str(first))
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_trainers_steps_that_are_skipped(tmp_path: Path) -> None:
    """A skipped step leaves the learning rate, which the Trainer asks the optimizer about."""
    accelerate()
    integration: Any = importlib.import_module("fusedtrain.integrations.accelerate")
    rates = []
    for way in ("class", "stock"):
        trainer = train("GPT2", tmp_path, way, 0.0)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        if way == "class":
            integration.use_fused_scaler(trainer.accelerator)
        trainer.train()
        logged = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
        rates.append((logged, trainer.accelerator.scaler.get_scale()))
    assert rates[0] == rates[1]
    assert len(set(rates[0][0])) < len(rates[0][0])  # a step was skipped


def test_the_example_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate(), transformers()
    path = ROOT / "examples" / "integrations" / "transformers_trainer.py"
    assert len(path.read_text().splitlines()) < 40
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert "loss" in capsys.readouterr().out
