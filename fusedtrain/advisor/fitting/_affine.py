"""Bytes of a step as a function of the batch: a line through two measured batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...planning._batches import largest

PROBES = (2, 4)  # samples, of which memory is extrapolated: batch norm cannot train with one
MOST = 1 << 16  # samples in a batch
_GROWTH = 32  # times the largest measured batch, at most, is the next one
_TRIES = 5  # of steps that are measured
_CLOSE = 0.02  # a larger batch by less is not worth another step


def predicted(peaks: Mapping[int, int], batch: int) -> float:
    """Bytes of the batch, on the line through the two largest measured batches."""
    (one, low), (other, high) = sorted(peaks.items())[-2:]
    return low + (high - low) / (other - one) * (batch - one)


def largest_fitting(
    measure: Callable[[int], int | None], peaks: dict[int, int], limit: int, most: int = MOST
) -> int:
    """The largest batch with a measured peak of at most `limit`; 0 without one.

    Args:
        measure: the peak of a batch in bytes; None where memory was not enough.
        peaks: by batch, of two at least; measured ones are added.
    """
    low = max((batch for batch, peak in peaks.items() if peak <= limit), default=0)
    if low < max(peaks):
        return low
    refused = False

    def fits(batch: int) -> bool:
        nonlocal refused
        peak = measure(batch)
        refused = peak is None
        if peak is None:
            return False
        peaks[batch] = peak
        return peak <= limit

    def propose(low: int, high: int) -> int:
        return (low + high) // 2 if refused else min(_reached(peaks, limit), _GROWTH * low)

    return largest(fits, most, propose, low, _TRIES, _CLOSE)


def _reached(peaks: Mapping[int, int], limit: int) -> int:
    """The batch at which the line reaches the limit."""
    (one, low), (other, high) = sorted(peaks.items())[-2:]
    slope = max((high - low) / (other - one), 1.0)
    return other + int((limit - high) // slope)
