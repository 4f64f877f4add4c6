"""The watch follows the thread that trains, and leaves nothing of itself behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.flop_counter import FlopCounterMode

from fusedtrain.advisor.diagnosis import doctor
from fusedtrain.advisor.diagnosis._modules import Calls
from helpers.diagnosis import Network, images, rules, training

pytestmark = pytest.mark.usefixtures("one_thread")


def state() -> dict[str, Any]:
    """Whatever the watch replaces or registers."""
    return {
        "hooks": [dict(hooks._global_forward_hooks), dict(hooks._global_forward_pre_hooks)],
        "steps": [dict(optimizers._global_optimizer_pre_hooks),
                  dict(optimizers._global_optimizer_post_hooks)],
        "modes": list(_get_current_dispatch_mode_stack()),
        "vars": [dict(vars(owner)) for owner in (
            nn.Module, torch.optim.Optimizer, DataLoader, _BaseDataLoaderIter, torch.Tensor,
            torch.amp.GradScaler)],
        "functions": [torch.set_num_threads, torch.cuda.empty_cache, torch.cuda.synchronize],
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


@pytest.fixture
def step() -> Callable[[], None]:
    return training(Network(), images())


def test_nothing_stays(step: Any) -> None:
    doctor(step, steps=5)


def test_nothing_stays_when_the_function_raises(step: Any) -> None:
    calls = iter((True, True, False))

    def fails() -> None:
        step()
        if not next(calls):
            raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        doctor(fails, steps=5)


def test_nothing_stays_when_a_cleanup_raises(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = Calls.rest

    def fails(calls: Calls) -> None:
        rest(calls)
        raise OSError("no memory")

    monkeypatch.setattr(Calls, "rest", fails)
    with pytest.raises(OSError, match="no memory"):
        doctor(step, steps=5)


def _in_threads(step: Any, steps: int) -> Any:
    """A function that takes some steps in a thread of its own."""

    def function() -> None:
        thread = threading.Thread(target=lambda: [step() for _ in range(steps)])
        thread.start()
        thread.join()

    return function


@pytest.mark.parametrize(
    ("steps", "trials", "speak"),
    [
        (7, True, {"bias-before-norm", "in-place-clone", "convert-fuses"}),
        (3, False, {"in-place-clone"}),
    ],
)
def test_training_in_another_thread_is_followed_from_its_second_step_on(
    step: Any, steps: int, trials: bool, speak: set[str]
) -> None:
    """One thread, or one for some steps each."""
    diagnosis = doctor(_in_threads(step, steps), steps=6, trials=trials)
    assert diagnosis.facts.steps == 6
    assert not diagnosis.partial
    assert diagnosis.facts.operators > 10  # as many as are in a step
    assert speak <= rules(diagnosis)


def test_a_thread_for_each_step_is_an_error(step: Any) -> None:
    with pytest.raises(RuntimeError, match="call doctor in the thread that trains"):
        doctor(_in_threads(step, 1), steps=6)


def test_a_mode_of_the_script_stays_on_its_stack(step: Any) -> None:
    """The watch leaves its own mode, and no other one, wherever the observed steps end."""
    counts = []

    def steps() -> None:
        with FlopCounterMode(display=False) as mode:
            for _ in range(4):
                step()
        counts.append(mode.get_total_flops())

    steps()
    diagnosis = doctor(steps, steps=4, trials=False)
    assert counts[0] == counts[1]
    assert "in-place-clone" in rules(diagnosis)
