"""The training scripts of tests/scripts, stock and with fusedtrain: every finding there is true.

TRUE has, for each script, the findings that a reader of the script would agree with. Six
depend on the clock and are not compared: an optimizer that is not fused, small tensors, 16-bit
convolutions that the processor computes slowly, depthwise ones that torch does, a loader that a
busy machine keeps waiting, and page faults, which depend on the memory that the process had before,
too.
"""

from __future__ import annotations

import pytest

from fusedtrain.advisor.diagnosis import doctor
from helpers.diagnosis import as_before, rules
from scripts.test_scripts import SCRIPTS

pytestmark = pytest.mark.usefixtures("one_thread")

_CLOCK = {"slow-optimizer", "small-tensors", "page-faults", "slow-16-bit-convolutions",
          "slow-depthwise", "loader-without-workers"}  # fmt: skip
_SCALED = {"scaler-with-bf16"}  # a GradScaler, and autocast to bfloat16
_CLONES = {"in-place-clone"}  # SiLU and Hardswish of squeeze-and-excitation, in place
_FUSES = {"convert-fuses"}  # a quarter of the kept bytes; no test here looks at time
_CLEARS = {"zero-by-memset"}  # Apex's FusedSGD, unless it is given set_grad_none=True

# Script: what is true of the stock script, and what is still true after README's changes.
TRUE: dict[str, tuple[set[str], set[str]]] = {
    "mnist": (_FUSES, set()),
    "vae": (set(), set()),  # ReLU keeps its output either way: nothing is saved
    "dcgan": (set(), set()),  # a quarter at most
    "imagenet": (_FUSES, set()),
    "cifar_efficientnet": (_FUSES, set()),
    "nanogpt": (_FUSES | _SCALED, _SCALED),
    "timm_efficientnet": (_FUSES | _SCALED | _CLONES, _SCALED | _CLONES),
    "timm_resnet": (_FUSES | _SCALED, _SCALED),
    "timm_convnext": (_FUSES | _SCALED, _SCALED),
    "torchvision_reference": (_FUSES | _SCALED | _CLONES, _SCALED | _CLONES),
    "transformers_Llama": (_FUSES, set()),
    "transformers_GPT2": (_FUSES, set()),
    "transformers_Bert": (_FUSES, set()),
    "transformers_ViT": (set(), set()),
    "transformers_ConvNext": (set(), set()),
    "diffusion": (set(), set()),
    "bert_trainer": (set(), set()),
    "deeplab": (_FUSES, set()),
    "wgan_gp": (_FUSES, set()),
    "apex_loop": (_FUSES | _CLEARS, _CLEARS),
}


def findings(name: str, mode: str, assume_gpu: bool, trials: bool) -> set[str]:
    main, losses = SCRIPTS[name][0], list[list[float]]()
    with as_before():
        # The scripts take two to eight steps each time.
        diagnosis = doctor(
            lambda: losses.append(main(mode).losses), steps=6, assume_gpu=assume_gpu, trials=trials
        )
    assert diagnosis.facts.steps == 6
    assert not diagnosis.partial
    # Bit for bit; converted depthwise convolutions run torch's kernels while somebody watches them.
    assert losses[0] == pytest.approx(main(mode).losses, rel=0.02 if mode else 0.0, abs=0.0)
    return rules(diagnosis)


def test_every_script_is_listed() -> None:
    assert set(TRUE) == set(SCRIPTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUE)
def test_stock_script(name: str) -> None:
    assert findings(name, "", False, True) - _CLOCK == TRUE[name][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "dcgan", "timm_efficientnet"])
def test_script_with_fusedtrain(name: str) -> None:
    """Nothing is left to convert, and no optimizer to fuse."""
    assert findings(name, "store", False, True) - (_CLOCK - {"slow-optimizer"}) == TRUE[name][1]


def test_scripts_if_they_ran_on_a_gpu() -> None:
    """Nothing of copies, whose devices are not there. Autocast is not asked for twice."""
    every = findings("mnist", "", True, False)
    assert every - _CLOCK == {"amp-off", "tf32-off", "autotuner-off", "host-waits"}
    autocast = findings("timm_resnet", "", True, False) - _CLOCK
    assert autocast == _SCALED | {"autotuner-off", "host-waits"}  # it is channels_last
