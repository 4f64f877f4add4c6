"""Work of a trial's process, done in this process."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tuned_models as models

import fusedtrain
from fusedtrain.advisor.tuning._budget import Budget
from fusedtrain.advisor.tuning._job import Job, place_of
from fusedtrain.advisor.tuning._process import TrialFailed
from fusedtrain.advisor.tuning._report import TunedTrial, sentences
from fusedtrain.advisor.tuning._switches import NAMES, Conditions, plain
from fusedtrain.advisor.tuning._tuner import Tuner
from fusedtrain.advisor.tuning._worker import Trial

HERE = Path(models.__file__)
FACTS = {"target_shape": [], "classes": 5}


@pytest.fixture(autouse=True)
def _generators_stay():
    state = random.getstate()
    with torch.random.fork_rng():
        yield
    random.setstate(state)


def trial(batch=4, facts=FACTS, **options):
    job = Job(options.pop("model", f"{HERE}:build_model"), (3, 8, 8), 4, lr=0.1, **options)
    return Trial(job, plain(batch), facts)


def test_initial_weights_and_samples_are_the_same_in_every_trial():
    first, second = trial(), trial()
    losses = first.losses(3)["losses"]
    assert len(set(losses)) == 3
    assert second.losses(3)["losses"] == losses
    assert first.losses(3)["losses"] == losses
    dropped = second.losses(3, seed=1)["losses"]
    assert dropped != losses
    assert dropped[0] == pytest.approx(losses[0], rel=0.3)


def test_rounding_moves_the_losses_by_about_its_size():
    exact = trial().losses(2)["losses"]
    for eps in (2.0**-8, 2.0**-16):
        moved = trial().losses(2, rounding=eps)["losses"]
        off = max(abs(a - b) for a, b in zip(exact, moved))
        assert eps / 1000 < off < 30 * eps


def test_the_probe_sees_convolutions_classes_and_memory():
    seen = trial(facts={}).probe()
    assert seen["convolutions"] is True
    assert (seen["classes"], seen["target_shape"]) == (5, [])
    parameters = sum(p.numel() for p in models.build_model().parameters())
    # The statistics of two norms, and their counters.
    assert seen["fixed"] == 4 * (parameters + 4 * 8) + 2 * 8
    # The images, what convolutions, norms, SiLUs and dropout keep: 8 x 8 x 8 floats each.
    assert 6 * 2048 < seen["kept_per_sample"] < 9 * 2048


def test_a_model_that_classifies_nothing_is_refused():
    with pytest.raises(TypeError, match=r"for 2 samples the model returns \(2,\); cross-entropy"):
        trial(facts={}, model=f"{HERE}:Summing").probe()
    with pytest.raises(TypeError, match="time_of_day returned float, not a module"):
        trial(facts={}, model=f"{HERE}:time_of_day").probe()


def test_memory_grows_with_the_batch():
    small, large = trial(4), trial(16)
    for one in (small, large):
        one.losses(1)
    first, second = small.memory(), large.memory()
    assert second["kept"] == pytest.approx(4 * first["kept"], rel=0.05)
    assert second["memory"] - second["kept"] == first["memory"] - first["kept"]


def test_a_turn_takes_batches_of_the_loader_which_begins_again():
    made = trial(loader=f"{HERE}:build_loader")
    made.losses(1)
    seen = []
    step = made.names["step"]

    def watched(inputs, targets):
        seen.append(targets.tolist())
        return step(inputs, targets)

    made.names["step"] = watched
    assert made.turn(6)["seconds"] > 0
    assert seen == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1], [2, 3, 4, 0]] + seen[:2]


def test_a_loader_without_such_a_batch_is_an_error():
    made = trial(32, loader=f"{HERE}:build_loader")
    made.build()
    with pytest.raises(ValueError, match="build_loader: it has no batch of 32 samples"):
        made.turn(1)


def test_a_function_of_the_script_is_found_by_its_file(monkeypatch):
    monkeypatch.setattr(models.build_model, "__module__", "__main__")
    assert place_of(models.build_model, "build_model") == f"{HERE}:build_model"


def test_a_failure_shows_the_traceback_of_the_user_in_python_too():
    failure = TrialFailed("ValueError: no", "Traceback (most recent call last):\n")
    assert str(failure) == "ValueError: no\n\nTraceback (most recent call last):\n"
    assert str(TrialFailed("its process died")) == "its process died"


def test_a_script_that_tunes_while_it_is_imported_by_a_trial_is_told(monkeypatch):
    spec = SimpleNamespace(name="fusedtrain.advisor.tuning.__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec, raising=False)
    with pytest.raises(RuntimeError, match="put the call behind if __name__"):
        fusedtrain.tune("m.py:f", (3, 8, 8))


def test_the_summary_says_what_was_won_and_how_that_is_known():
    first = TunedTrial("plain fp32", plain(4), True, "", 100.0, memory=8e6)
    config = {**plain(8), "precision": "bf16"}
    best = TunedTrial("batch 8", config, True, "faster", 250.0, 1.2, (1.1, 1.3), memory=8e6)
    whole = TunedTrial("", config, True, "", 240.0, 2.4, (2.2, 2.5))
    trials = [first, TunedTrial("bf16", config, True, "faster", 200.0, 2.0), best]
    text = sentences(trials, best, whole)[0]
    assert text == (
        "Best: precision bf16, batch 8. It trains 2.40x as many images per second as the plain "
        "configuration (2.20-2.50, in turns); memory for an image: 0.50x."
    )
    unsure = TunedTrial("", config, True, "", 240.0, 1.05, (0.96, 1.28))
    assert "(0.96-1.28, in turns; not surely more)" in sentences(trials, best, unsure)[0]
    # Images per second of two trials are of different moments: their ratio is no gain.
    assert sentences(trials, best, None)[0] == (
        "Best: precision bf16, batch 8. Its gain over the plain configuration was not measured; "
        "memory for an image: 0.50x."
    )


def test_the_gain_of_the_only_accepted_trial_is_that_of_its_row():
    """It was raced against the plain configuration."""
    first = TunedTrial("plain fp32", plain(4), True, "", 100.0)
    refused = TunedTrial("bf16", plain(4), False, "slower", 50.0, 0.5, (0.4, 0.6))
    config = {**plain(4), "channels_last": "on"}
    best = TunedTrial("channels_last on", config, True, "less memory, no loss of time", 167.0, 1.19,
                      (0.87, 1.63))  # fmt: skip
    assert sentences([first, refused, best], best, None) == [
        "Best: channels_last on. It trains 1.19x as many images per second as the plain "
        "configuration (0.87-1.63, in turns; not surely more)."
    ]


def test_switches_that_the_budget_left_out_are_named():
    job = Job("m.py:f", (3, 8, 8), batch=4)
    tuner = Tuner(job, Budget(60), lambda stage: None, False, 2)
    tuner.facts = Conditions("cpu", convolutions=True)
    assert tuner.untried(NAMES, False) == "no switch was tried"
    tuner.trials = [TunedTrial("plain fp32", plain(4), True, "")]
    tuner.trials += [
        TunedTrial(name, {**plain(4), name: value}, False, "slower")
        for name, value in (("precision", "bf16"), ("fusedtrain", "convert"))
    ]
    assert tuner.untried(NAMES, False) == (
        "not tried: channels_last on, fusedtrain convert + plan, fusedtrain convert + recompute, "
        "optimizer torch, fused=True, optimizer fusedtrain, a larger batch"
    )
    assert tuner.untried(["precision"], False) == ""
    # precision 2 x channels_last 2 x fusedtrain 4 x optimizer 3, without the plain one
    assert tuner.untried(NAMES, True) == "not tried: 45 of 47 combinations, a larger batch"
