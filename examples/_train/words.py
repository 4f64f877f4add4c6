"""A run in words: what will happen, what each mode has won, and the result in three lines."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from _train.checks import curve_difference
from _train.modes import Mode

# Share of memory kept for backward: above it little was won, and the reader is told why.
LITTLE = 0.9
# Parameters with fewer elements have float32 states, also with state_dtype="q8".
LEAST_CODED = 4096


def what_will_happen(model: str, data: str, steps: int, modes: Sequence[str]) -> str:
    """The first lines of a run."""
    return (
        f"Training {model} on {data}: {steps} steps in each of {len(modes)} modes, in turns on the "
        f"same batches.\nModes: {', '.join(modes)}.\nThen a table, checks, a picture, and the "
        "result in three lines. How long: see the line after step 2."
    )


def how_long(seconds: float, steps: int) -> str:
    """The time that is left, by one step of all modes."""
    left = seconds * steps
    about = f"{left / 60:.0f} minutes" if left >= 90 else f"{left:.0f} seconds"
    return f"A step of all modes took {seconds:.1f} s: about {about} of training to go."


def result(
    plain: Mode, again: Mode, eager: Mode, batch: int, times: tuple[float, float], passed: bool
) -> list[str]:
    """The last three lines of a run: losses, memory, time.

    Args:
        plain: the fused mode that stores outputs.
        again: the one that recomputes them.
        eager: the mode that both are compared with.
        batch: images of a micro-batch.
        times: of a step of the two, as ratios to the eager one's.
        passed: whether all checks of the run passed.
    """
    distance = max(curve_difference(mode, eager) for mode in (plain, again))
    losses = (
        f"checks passed; single steps are up to {distance:.2g} from eager's, as rounding "
        "grows in training"
    )
    kept = again.saved_bytes / eager.saved_bytes
    images = fitting_batch(again, eager, batch)
    return [
        f"Losses: {losses if passed else 'NOT shown to be the same; see FAILED above'}.",
        f"Memory: with recompute backward keeps {kept:.2f}x of eager's bytes; {images} images fit "
        f"where {batch} did.",
        f"Time: a step takes {times[0]:.2f}x of eager's time, with recompute {times[1]:.2f}x.",
    ]


def what_was_won(
    mode: Mode, eager: Mode, exact: Mode | None, batch: int, time: float, passed: bool
) -> str:
    """A sentence: losses, memory kept for backward, time, and the batch that fits this memory.

    Args:
        mode: the fused one.
        eager: its reference.
        exact: the reference of that, whose losses differ from it by rounding, too.
        batch: images of a micro-batch.
        time: of a step, as a ratio to the eager one's.
        passed: whether all checks of the run passed.
    """
    difference = f"largest difference at any step {curve_difference(mode, eager):.2g}"
    if exact is not None:
        difference += f", {eager.name} from {exact.name} {curve_difference(eager, exact):.2g}"
    losses = f"{'same losses' if passed else 'losses NOT shown to be the same'} ({difference})"
    kept = mode.saved_bytes / eager.saved_bytes
    images = fitting_batch(mode, eager, batch)
    text = (
        f"{mode.name} beside {eager.name}: {losses}, memory kept for backward {kept:.2f}x, "
        f"step {time:.2f}x, largest batch in this memory {images / batch:.1f}x "
        f"({images} images instead of {batch})."
    )
    if mode.stepper.settings.rounds:
        text += f" {bytes_of_parameters(mode, eager)}"
    reason = why_little(eager.net) if kept > LITTLE else ""
    return f"{text} {reason}".rstrip()


def bytes_of_parameters(mode: Mode, eager: Mode) -> str:
    """Memory of weights and optimizer in the two modes, in words."""
    ours, theirs = mode.stepper, eager.stepper
    count = sum(p.numel() for p in ours.params)
    mine, stock = ((s.weight_bytes() + s.state_bytes()) / count for s in (ours, theirs))
    states, of_stock = (s.state_bytes() / 1e6 for s in (ours, theirs))
    text = (
        f"Weights and optimizer: {mine:.1f} bytes a parameter instead of {stock:.1f} "
        f"(optimizer {states:.2f} MB instead of {of_stock:.2f})."
    )
    if ours.settings.states == "q8":
        small = sum(p.numel() for p in ours.params if p.numel() < LEAST_CODED) / count
        text += (
            f" Parameters with fewer than {LEAST_CODED} elements, {small:.0%} of all elements, "
            "have float32 states."
        )
    return text


def fitting_batch(mode: Mode, eager: Mode, batch: int) -> int:
    """The largest batch for which ``mode`` keeps no more than ``eager`` does for ``batch``."""
    room = eager.saved_bytes - mode.saved_bytes
    return batch + int(room // mode.saved_bytes_of_an_image)


def why_little(net: nn.Module) -> str:
    """Why this network keeps as much for backward as before."""
    activations = [m for m in net.modules() if type(m).__module__ == nn.ReLU.__module__]
    if activations and all(isinstance(m, nn.ReLU) for m in activations):
        return (
            "Little changes while outputs are stored: torch keeps one tensor for a ReLU and the "
            "next convolution. For SiLU, Hardswish or GELU torch keeps two: "
            "--model efficientnet_b0."
        )
    return ""
