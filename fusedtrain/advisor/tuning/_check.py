"""Whether a trial trains as fp32 does: the losses of its first steps, within rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ._switches import EPS

STEPS = 3  # whose losses are compared; the second and third have seen an update
# Factors on the effect of rounding the weights once. A step rounds many times: in fp32 each sum,
# whose order differs between kernels (convert allows as much; EfficientNet-B0 at 32 pixels,
# converted, needed 13); in the other precisions the results of layers alone.
FACTORS = {"fp32": 32.0, "tf32": 8.0, "bf16": 8.0, "fp16": 8.0}

# Factor on the largest of SEEDS differences; a layout or a kernel may draw other random numbers.
RANDOM = 3.0
SEEDS = 4


@dataclass(frozen=True)
class Reference:
    """The losses of the plain configuration in fp32, and how far rounding moves them.

    Args:
        losses: of the first steps.
        other_seeds: the same with other random numbers in dropout, several times.
        rounded: precision -> losses after each weight was moved by up to one rounding.
    """

    losses: Sequence[float]
    other_seeds: Sequence[Sequence[float]]
    rounded: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def allowed(self, precision: str) -> list[float]:
        """The difference that each step's loss may have."""
        moved = [abs(a - b) for a, b in zip(self.rounded[precision], self.losses, strict=True)]
        seeds = zip(*self.other_seeds, strict=True)
        drawn = [max(abs(a - b) for a in others) for b, others in zip(self.losses, seeds)]
        worst = [max(moved[: i + 1]) for i in range(len(moved))]
        return [
            FACTORS[precision] * (one + EPS[precision] * abs(loss)) + RANDOM * other
            for one, loss, other in zip(worst, self.losses, drawn, strict=True)
        ]

    def complaint(self, losses: Sequence[float], precision: str) -> str:
        """The first loss that differs by more than rounding, in words; "" if none does."""
        triples = zip(losses, self.losses, self.allowed(precision), strict=True)
        for number, (loss, exact, allowed) in enumerate(triples, 1):
            if not math.isfinite(exact):
                break  # plain fp32 has diverged: later steps say nothing
            if not abs(loss - exact) <= allowed:  # written so that NaN is wrong
                return (
                    f"wrong: loss of step {number} {loss:.7g}, fp32 {exact:.7g}, "
                    f"allowed ±{allowed:.1e}"
                )
        return ""
