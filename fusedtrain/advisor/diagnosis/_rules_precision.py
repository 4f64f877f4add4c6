"""Rules of precision and of cuDNN's choices."""

from __future__ import annotations

from collections.abc import Iterator

from ..._text import memory_text
from .._views import Site
from ._facts import RunFacts
from ._rule import Cost, Seen, change, not_measured, rule, share, times

_TENSOR_CORES, _TF32 = (7, 0), (8, 0)
_FEW = 4  # calls a step
_SLOWER = 1.5  # times, of a convolution


def _top(facts: RunFacts) -> Site | None:
    """The file whose top has the settings: the script, or the file that makes the model."""
    if facts.script:
        return Site(facts.script, 1)
    return Site(facts.model_site.file, 1) if facts.model_site else None


def _single(facts: RunFacts) -> float:
    return facts.matmuls.get("float32", 0)


@rule(
    "amp-off",
    "matrix products in float32",
    "Run the forward and the loss under torch.autocast.",
    "gpu",
)
def amp_off(facts: RunFacts) -> Iterator[Seen]:
    total = sum(facts.matmuls.values())
    if facts.capability < _TENSOR_CORES or facts.autocast or total < _FEW:
        return
    if _single(facts) < 0.5 * total:  # the model itself has 16 bits
        return
    dtype = "bfloat16" if facts.capability >= _TF32 else "float16, with a GradScaler"
    yield Seen(
        facts.model_site,
        f"{_single(facts):.0f} of {total:.0f} matrix products and convolutions a step are in "
        "float32",
        _single(facts),
        not_measured(
            "on a GPU with tensor cores 16 bits halve the memory of activations",
        ),
        f"Run the forward and the loss under torch.autocast(device_type, torch.{dtype}).",
    )


@rule(
    "fp16-without-scaler",
    "float16 without a GradScaler",
    "Scale the loss with fusedtrain.amp.GradScaler, or autocast to bfloat16.",
)
def half_without_scaler(facts: RunFacts) -> Iterator[Seen]:
    if not facts.autocast.get("float16") or any(scaler.used for scaler in facts.scalers):
        return
    yield Seen(
        facts.autocast_site,
        f"autocast to float16 and no loss scale in {facts.steps} steps; "
        f"{100 * facts.zeros:.1f} % of the gradients are exactly 0",
        facts.zeros,
        not_measured("no time: gradients below 6e-8 become 0, and training suffers"),
    )


@rule(
    "scaler-with-bf16",
    "a GradScaler with bfloat16",
    "Leave the GradScaler out: GradScaler(..., enabled=False).",
)
def scaler_with_bfloat16(facts: RunFacts) -> Iterator[Seen]:
    if not facts.autocast.get("bfloat16") or facts.autocast.get("float16"):
        return
    for scaler in facts.scalers:
        if scaler.used:
            yield Seen(
                scaler.site,
                f"{scaler.used} losses were scaled, and every autocast is to bfloat16, whose range "
                "is that of float32",
                scaler.used,
                not_measured(
                    "a pass over all gradients and a wait for the device each step",
                ),
                changes=change("keywords", scaler.site, "GradScaler", enabled="False"),
            )


@rule(
    "clip-before-unscale",
    "gradients are clipped before they are unscaled",
    "Call scaler.unscale_(optimizer) before the gradients are clipped, or let "
    "fusedtrain.optim clip: max_grad_norm=...",
)
def clipped_before_unscaling(facts: RunFacts) -> Iterator[Seen]:
    for event in facts.clips:
        yield Seen(
            event.site,
            f"{memory_text(event.bytes)} of gradients are clipped ({event.what}) "
            f"{times(event.count)} a step while they are multiplied by the loss scale",
            event.bytes,
            not_measured(
                "no time: the limit is divided by the scale, and training suffers",
            ),
        )


@rule(
    "step-beside-scaler",
    "an optimizer steps without its GradScaler",
    "Call scaler.step(optimizer) and scaler.update() alone.",
)
def steps_beside_scaler(facts: RunFacts) -> Iterator[Seen]:
    for event in facts.direct_steps:
        how = "beside scaler.step(optimizer)" if event.what else "and scaler.step(optimizer) never"
        yield Seen(
            event.site,
            f"optimizer.step() is called {times(event.count)} a step, {how}, after losses were "
            "scaled",
            event.count,
            not_measured(
                "no time: an update too many, with infs or the loss scale in it",
            ),
        )


@rule(
    "slow-16-bit-convolutions",
    "convolutions are slower in 16 bits on this CPU",
    'Leave convolutions in float32: torch.autocast("cpu", enabled=False) around them, or train '
    "without autocast. CPUs with AVX512_BF16 or AMX compute bfloat16 fast.",
    "eager",
    "trials",
)
def slow_half_convolutions(facts: RunFacts) -> Iterator[Seen]:
    if facts.on_gpu or facts.half_ratio < _SLOWER or facts.half_convolutions < 1:
        return
    dtype = next(d for d in ("bfloat16", "float16") if facts.autocast.get(d))
    yield Seen(
        facts.autocast_site,
        f"{facts.half_convolutions:.0f} convolutions a step run in {dtype}",
        facts.half_ratio,
        Cost(
            "measured",
            f"{facts.half_convolution} takes {facts.half_ratio:.2g} times as long as in float32",
        ),
    )


@rule(
    "tf32-off",
    "TF32 is off",
    'Call torch.set_float32_matmul_precision("high"), if 10 bits of mantissa are enough.',
    "gpu",
)
def tf32_off(facts: RunFacts) -> Iterator[Seen]:
    if facts.capability < _TF32 or facts.tf32_matmul or _single(facts) < _FEW:
        return
    products = _single(facts) - facts.single_convolutions
    if facts.tf32_conv and products < _FEW:  # convolutions use TF32 by default
        return
    top = _top(facts)
    yield Seen(
        top,
        f"{products:.0f} matrix products a step are in float32, and TF32 is off",
        products,
        not_measured("the units for float32 do an eighth of the work of TF32's at most"),
        changes=change("top", top, 'torch.set_float32_matmul_precision("high")'),
    )


@rule(
    "autotuner-off",
    "cuDNN's autotuner is off",
    "Set torch.backends.cudnn.benchmark = True.",
    "gpu",
)
def autotuner_off(facts: RunFacts) -> Iterator[Seen]:
    if facts.autotuner or facts.deterministic or facts.shapes_vary or facts.convolutions < 1:
        return
    top = _top(facts)
    yield Seen(
        top,
        f"{facts.convolutions:.0f} convolutions a step, each with one shape of input, and "
        "torch.backends.cudnn.benchmark is False",
        facts.convolutions,
        not_measured(
            "cuDNN chooses by a rule, not by measuring; tuning needs more memory",
        ),
        changes=change("top", top, "torch.backends.cudnn.benchmark = True"),
    )


@rule(
    "not-channels-last",
    "convolutions in 16 bits that are not channels_last",
    "Move model and images: .to(memory_format=torch.channels_last).",
    "gpu",
)
def not_channels_last(facts: RunFacts) -> Iterator[Seen]:
    if facts.capability < _TENSOR_CORES or facts.half_convolutions < 1:
        return
    if facts.contiguous < 0.5 * facts.convolutions:
        return
    yield Seen(
        facts.model_site,
        f"{facts.contiguous:.0f} of {facts.convolutions:.0f} convolutions a step have an input "
        f"that is not channels_last ({share(facts.half_convolutions, facts.convolutions)} in 16 "
        "bits)",
        facts.contiguous,
        not_measured(
            "tensor cores work channels_last: cuDNN transposes around each call",
        ),
    )
