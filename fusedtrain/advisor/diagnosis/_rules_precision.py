"""Rules of precision and of cuDNN's choices."""

from __future__ import annotations

from collections.abc import Iterator

from ..._text import memory_text
from .._watch import Site
from ._facts import Facts
from ._rule import (
    MEASURED,
    NOT_MEASURED,
    Cost,
    Finding,
    Rule,
    change,
    share,
    times,
)

_TENSOR_CORES, _TF32 = (7, 0), (8, 0)
_FEW = 4  # calls a step
_SLOWER = 1.5  # times, of a convolution


def _top(facts: Facts) -> Site | None:
    """The file whose top has the settings: the script, or the file that makes the model."""
    if facts.script:
        return Site(facts.script, 1)
    return Site(facts.model_site.file, 1) if facts.model_site else None


def _single(facts: Facts) -> float:
    return facts.matmuls.get("float32", 0)


def amp_off(rule: Rule, facts: Facts) -> Iterator[Finding]:
    total = sum(facts.matmuls.values())
    if facts.capability < _TENSOR_CORES or facts.autocast or total < _FEW:
        return
    if _single(facts) < 0.5 * total:  # the model itself has 16 bits
        return
    dtype = "bfloat16" if facts.capability >= _TF32 else "float16, with a GradScaler"
    yield rule.finding(
        facts.model_site,
        f"{_single(facts):.0f} of {total:.0f} matrix products and convolutions a step are in "
        "float32",
        _single(facts),
        Cost(NOT_MEASURED, "on a GPU with tensor cores 16 bits halve the memory of activations"),
        f"Run the forward and the loss under torch.autocast(device_type, torch.{dtype}).",
    )


def half_without_scaler(rule: Rule, facts: Facts) -> Iterator[Finding]:
    if not facts.autocast.get("float16") or any(scaler.used for scaler in facts.scalers):
        return
    yield rule.finding(
        facts.autocast_site,
        f"autocast to float16 and no loss scale in {facts.steps} steps; "
        f"{100 * facts.zeros:.1f} % of the gradients are exactly 0",
        facts.zeros,
        Cost(NOT_MEASURED, "no time: gradients below 6e-8 become 0, and training suffers"),
    )


def scaler_with_bfloat16(rule: Rule, facts: Facts) -> Iterator[Finding]:
    if not facts.autocast.get("bfloat16") or facts.autocast.get("float16"):
        return
    for scaler in facts.scalers:
        if scaler.used:
            yield rule.finding(
                scaler.site,
                f"{scaler.used} losses were scaled, and every autocast is to bfloat16, whose range "
                "is that of float32",
                scaler.used,
                Cost(NOT_MEASURED, "a pass over all gradients and a wait for the device each step"),
                changes=change("keywords", scaler.site, "GradScaler", enabled="False"),
            )


def clipped_before_unscaling(rule: Rule, facts: Facts) -> Iterator[Finding]:
    for event in facts.clips:
        yield rule.finding(
            event.site,
            f"{memory_text(event.bytes)} of gradients are clipped ({event.what}) "
            f"{times(event.count)} a step while they are multiplied by the loss scale",
            event.bytes,
            Cost(NOT_MEASURED, "no time: the limit is divided by the scale, and training suffers"),
        )


def steps_beside_scaler(rule: Rule, facts: Facts) -> Iterator[Finding]:
    for event in facts.direct_steps:
        how = "beside scaler.step(optimizer)" if event.what else "and scaler.step(optimizer) never"
        yield rule.finding(
            event.site,
            f"optimizer.step() is called {times(event.count)} a step, {how}, after losses were "
            "scaled",
            event.count,
            Cost(NOT_MEASURED, "no time: an update too many, with infs or the loss scale in it"),
        )


def slow_half_convolutions(rule: Rule, facts: Facts) -> Iterator[Finding]:
    if facts.on_gpu or facts.half_ratio < _SLOWER or facts.half_convolutions < 1:
        return
    dtype = next(d for d in ("bfloat16", "float16") if facts.autocast.get(d))
    yield rule.finding(
        facts.autocast_site,
        f"{facts.half_convolutions:.0f} convolutions a step run in {dtype}",
        facts.half_ratio,
        Cost(
            MEASURED,
            f"{facts.half_convolution} takes {facts.half_ratio:.2g} times as long as in float32",
        ),
    )


def tf32_off(rule: Rule, facts: Facts) -> Iterator[Finding]:
    if facts.capability < _TF32 or facts.tf32_matmul or _single(facts) < _FEW:
        return
    products = _single(facts) - facts.single_convolutions
    if facts.tf32_conv and products < _FEW:  # convolutions use TF32 by default
        return
    top = _top(facts)
    yield rule.finding(
        top,
        f"{products:.0f} matrix products a step are in float32, and TF32 is off",
        products,
        Cost(NOT_MEASURED, "the units for float32 do an eighth of the work of TF32's at most"),
        changes=change("top", top, 'torch.set_float32_matmul_precision("high")'),
    )


def autotuner_off(rule: Rule, facts: Facts) -> Iterator[Finding]:
    if facts.autotuner or facts.deterministic or facts.shapes_vary or facts.convolutions < 1:
        return
    top = _top(facts)
    yield rule.finding(
        top,
        f"{facts.convolutions:.0f} convolutions a step, each with one shape of input, and "
        "torch.backends.cudnn.benchmark is False",
        facts.convolutions,
        Cost(NOT_MEASURED, "cuDNN chooses by a rule, not by measuring; tuning needs more memory"),
        changes=change("top", top, "torch.backends.cudnn.benchmark = True"),
    )


def not_channels_last(rule: Rule, facts: Facts) -> Iterator[Finding]:
    if facts.capability < _TENSOR_CORES or facts.half_convolutions < 1:
        return
    if facts.contiguous < 0.5 * facts.convolutions:
        return
    yield rule.finding(
        facts.model_site,
        f"{facts.contiguous:.0f} of {facts.convolutions:.0f} convolutions a step have an input "
        f"that is not channels_last ({share(facts.half_convolutions, facts.convolutions)} in 16 "
        "bits)",
        facts.contiguous,
        Cost(NOT_MEASURED, "tensor cores work channels_last: cuDNN transposes around each call"),
    )


RULES = (
    Rule(
        "amp-off",
        "matrix products in float32",
        "the dtype of each matrix product and convolution; on tensor cores (sm_70 or newer)",
        "Run the forward and the loss under torch.autocast.",
        amp_off,
        ("gpu",),
    ),
    Rule(
        "fp16-without-scaler",
        "float16 without a GradScaler",
        "autocast to float16, and no GradScaler.scale",
        "Scale the loss with fusedtrain.amp.GradScaler, or autocast to bfloat16.",
        half_without_scaler,
    ),
    Rule(
        "scaler-with-bf16",
        "a GradScaler with bfloat16",
        "GradScaler.scale, and autocast to bfloat16 alone",
        "Leave the GradScaler out: GradScaler(..., enabled=False).",
        scaler_with_bfloat16,
    ),
    Rule(
        "clip-before-unscale",
        "gradients are clipped before they are unscaled",
        "clip_grad_norm_, clip_grad_value_ or a clamp of gradients between GradScaler.scale and "
        "unscale_",
        "Call scaler.unscale_(optimizer) before the gradients are clipped, or let "
        "fusedtrain.optim clip: max_grad_norm=...",
        clipped_before_unscaling,
    ),
    Rule(
        "step-beside-scaler",
        "an optimizer steps without its GradScaler",
        "optimizer.step() outside of GradScaler.step, after a loss was scaled",
        "Call scaler.step(optimizer) and scaler.update() alone.",
        steps_beside_scaler,
    ),
    Rule(
        "slow-16-bit-convolutions",
        "convolutions are slower in 16 bits on this CPU",
        "convolutions in 16 bits under autocast on the CPU; the one with the most work is timed in "
        "both dtypes on a copy",
        'Leave convolutions in float32: torch.autocast("cpu", enabled=False) around them, or train '
        "without autocast. CPUs with AVX512_BF16 or AMX compute bfloat16 fast.",
        slow_half_convolutions,
        ("eager", "trials"),
    ),
    Rule(
        "tf32-off",
        "TF32 is off",
        "matrix products in float32 on sm_80 or newer, and torch's setting",
        'Call torch.set_float32_matmul_precision("high"), if 10 bits of mantissa are enough.',
        tf32_off,
        ("gpu",),
    ),
    Rule(
        "autotuner-off",
        "cuDNN's autotuner is off",
        "convolutions whose inputs keep their shape, and torch's setting",
        "Set torch.backends.cudnn.benchmark = True.",
        autotuner_off,
        ("gpu",),
    ),
    Rule(
        "not-channels-last",
        "convolutions in 16 bits that are not channels_last",
        "the layout of each convolution's input",
        "Move model and images: .to(memory_format=torch.channels_last).",
        not_channels_last,
        ("gpu",),
    ),
)
