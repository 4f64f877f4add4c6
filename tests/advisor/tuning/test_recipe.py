"""The code of a configuration: every value of every switch runs, and so does the whole recipe."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch
import tuned_models as models

from fusedtrain._graph.kept import bytes_of, kept_bytes
from fusedtrain.advisor.tuning._job import Job, load_function, place_of
from fusedtrain.advisor.tuning._recipe import recipe, scaled_rate, trial
from fusedtrain.advisor.tuning._switches import BATCH, SWITCHES, Conditions, code_of, plain

HERE = Path(models.__file__)
JOB = Job(f"{HERE}:build_model", (3, 8, 8), batch=4, lr=0.01)
ON_CPU = Conditions(convolutions=True, loader=True, cores=8)
PAIRS = [(switch, value) for switch in SWITCHES for value in switch.values]


def run(code):
    names = {"build_model": models.build_model}
    exec(compile(code, "<recipe>", "exec"), names)
    return names


@pytest.mark.parametrize(("switch", "value"), PAIRS, ids=lambda one: one.name)
def test_each_value_is_code_that_trains(switch, value):
    config = {**plain(4), switch.name: value.name}
    if switch.name == "torch.compile" or not value.applies(ON_CPU):
        code = trial(Job(JOB.model, (3, 8, 8), device="cuda"), config, 0.01)
        compile(code, "<recipe>", "exec")
        changed = code != trial(Job(JOB.model, (3, 8, 8), device="cuda"), plain(4), 0.01)
        assert changed == (value != switch.values[0])
        return
    names = run(trial(JOB, config, 0.01))
    before = [p.clone() for p in names["model"].parameters()]
    loss = names["step"](torch.randn(4, 3, 8, 8), torch.arange(4))
    assert math.isfinite(float(loss))
    assert not loss.requires_grad
    after = list(names["model"].parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_settings_of_cuda_are_names_of_torch(monkeypatch):
    conv, matmul = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    was = conv.fp32_precision, matmul.fp32_precision
    try:
        for precision, expected in (("tf32", "tf32"), ("fp32", "ieee")):
            config = {**plain(4), "precision": precision, "cudnn autotune": "on"}
            exec("\n".join(code_of(config, "cuda")["settings"]), {"torch": torch})
            assert conv.fp32_precision == matmul.fp32_precision == expected
        assert torch.backends.cudnn.benchmark is True
    finally:
        conv.fp32_precision, matmul.fp32_precision = was
    assert "settings" not in code_of(plain(4), "cpu")


def test_fp16_scales_the_loss_with_the_scaler_of_the_optimizer():
    config = {**plain(4), "precision": "fp16"}
    names = run(trial(JOB, config, 0.01))
    assert type(names["scaler"]) is torch.amp.GradScaler
    names["step"](torch.randn(4, 3, 8, 8), torch.arange(4))
    names = run(trial(JOB, {**config, "optimizer": "fusedtrain"}, 0.01))
    assert type(names["scaler"]).__module__.startswith("fusedtrain.")
    names["step"](torch.randn(4, 3, 8, 8), torch.arange(4))


@pytest.mark.parametrize(
    ("optimizer", "factor", "words", "memory"),
    [("sgd", 4, "linear, with warm-up (Goyal", "recompute"),
     ("adamw", 2, "the square root (Malladi", "plan")],
)  # fmt: skip
def test_the_whole_recipe_runs_and_has_the_rule_for_the_batch(
    optimizer, factor, words, memory, tmp_path, monkeypatch
):
    job = Job("tuned_models.py:build_model", (3, 8, 8), 4, optimizer=optimizer, lr=0.01)
    config = {**plain(16), "precision": "bf16", "channels_last": "on", "optimizer": "fusedtrain"}
    config["fusedtrain"] = f"convert + {memory}"
    text = recipe(job, config, [], 5)
    assert words in text
    if memory == "plan":
        assert ":\n    plan = fusedtrain.plan_memory(model, example, " in text  # within autocast
        text = recipe(job, {**config, "precision": "fp32"}, [], 5)
    (tmp_path / "recipe.py").write_text(text)
    monkeypatch.syspath_prepend(str(HERE.parent))
    names = runpy.run_path(str(tmp_path / "recipe.py"))
    assert math.isfinite(float(names["loss"]))
    group = names["optimizer"].param_groups[0]
    assert scaled_rate(job, 16) == pytest.approx(0.01 * factor)
    # It begins at the rate of the first batch size, and has taken 3 of 500 steps.
    assert group["lr"] == pytest.approx(0.01 + 0.01 * (factor - 1) * 3 / 500)
    assert len(next(iter(names["loader"]))[0]) == 16


def test_a_recipe_with_a_loader_calls_it(monkeypatch, tmp_path):
    job = Job(
        "tuned_models.py:build_model", (3, 8, 8), 4, loader="tuned_models.py:build_loader", lr=0.01
    )
    text = recipe(job, plain(4), [], 5)
    (tmp_path / "recipe.py").write_text(text)
    monkeypatch.syspath_prepend(str(HERE.parent))
    names = runpy.run_path(str(tmp_path / "recipe.py"))
    assert names["loader"].batch_size == 4
    assert "warmup" not in text


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        ("torchvision:resnet50", 'torchvision.models.get_model("resnet50", weights=None, num_cl'),
        ("timm:efficientnet_b0", 'timm.create_model("efficientnet_b0", num_classes=1000)'),
        ("transformers:BertConfig", "transformers.BertConfig(num_labels=1000, hidden_size=64)"),
        ("package.models:Nets.small", "from package.models import Nets\n\nbuild_model = Nets.sm"),
    ],
)
def test_models_of_libraries_have_their_line(model, lines):
    text = recipe(Job(model, (3, 8, 8), config={"hidden_size": 64}), plain(32), [], 1000)
    assert lines in text
    compile(text, "<recipe>", "exec")
    assert (".logits" in text) == model.startswith("transformers")


def test_a_function_must_be_importable_elsewhere():
    assert place_of(models.build_model, "build_model") == "tuned_models:build_model"
    assert place_of("model.py:build", "build_model") == "model.py:build"
    assert place_of(torch.nn.Identity, "build_model") == "torch.nn.modules.linear:Identity"
    for wrong in (lambda: None, 3, models.build_model()):
        with pytest.raises(TypeError, match="build_model: expected a function at the top"):
            place_of(wrong, "build_model")
    with pytest.raises(ValueError, match="resnet50: expected torchvision:NAME"):
        place_of("resnet50", "build_model")


def test_what_is_no_function_is_no_model():
    with pytest.raises(TypeError, match="expected a function, got module"):
        load_function(f"{HERE}:torch")


def test_memory_is_counted_by_storage():
    x = torch.randn(100, requires_grad=True)
    kept = []
    # exp keeps its output, and the product its two factors: one of them is that output.
    assert kept_bytes(lambda: kept.append((x.exp() * x).sum()), [x]) == 400
    assert kept_bytes(lambda: kept.append((x.exp() * x).sum()), []) == 800
    layer = torch.nn.Linear(10, 10, bias=False)
    layer.tied = layer.weight
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    assert bytes_of(list(layer.parameters())) == 400
    layer(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert bytes_of([[layer.weight, layer.tied], list(optimizer.state.values())]) == 800


def test_a_batch_is_part_of_the_plain_configuration():
    assert plain(7)[BATCH] == 7
