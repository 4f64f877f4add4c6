"""Rules of the way of the data: loaders and copies."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..._text import memory_text
from ._facts import Loader, RunFacts
from ._rule import Change, Cost, Seen, change, not_measured, of_a_step, rule, share

# A worker hands over a small batch in 0.3 to 1 ms: waits that are not much longer stay.
_SHORT = 2e-3
_SHARE = 0.1
_SMALL = 64 << 10  # bytes a step


def _waiting(facts: RunFacts) -> Loader | None:
    """The loader that the loop waits for longest."""
    used = [loader for loader in facts.loaders if loader.batches]
    longest = max(used, key=lambda loader: loader.wait, default=None)
    if longest is None or longest.wait < _SHORT or facts.wait < _SHARE * facts.step:
        return None
    return longest


def _workers(facts: RunFacts) -> int:
    """The number of workers that load a batch while one is computed; at most one a core."""
    rest = max(facts.step - facts.wait, 1e-9)
    return max(1, min(facts.cores, math.ceil(facts.wait / rest)))


def _gain(facts: RunFacts) -> float:
    """The seconds that workers can save, if nothing else is in the way."""
    rest, loads = facts.step - facts.wait, facts.wait / _workers(facts)
    if facts.on_gpu:
        return facts.step - max(rest, loads)
    busy = rest * min(facts.threads, facts.cores) + facts.loading  # of the cores together
    return facts.step - max(rest, loads, busy / facts.cores)


@rule(
    "loader-without-workers",
    "the loop waits for a loader without workers",
    "Load in worker processes: num_workers=..., persistent_workers=True.",
    "timing",
)
def no_workers(facts: RunFacts) -> Iterator[Seen]:
    loader = _waiting(facts)
    if loader is None or loader.workers:
        return
    gain = _gain(facts)
    if gain < _SHARE * facts.step:
        return
    workers = str(_workers(facts))
    changes = change("keywords", loader.site, "DataLoader", num_workers=workers,
                     persistent_workers="True")  # fmt: skip
    remedy = f"Load in {workers} worker process{'es' * (workers != '1')}: num_workers={workers}, "
    remedy += "persistent_workers=True."
    if loader.iterable:
        remedy += " Each worker must then read its part alone (torch.utils.data.get_worker_info)."
        changes = ()
    yield Seen(
        loader.site,
        f"num_workers=0, and the loop waits for batches for {share(facts.wait, facts.step)} of a "
        f"step ({of_a_step(facts.wait, facts)})",
        facts.wait / facts.step,
        Cost("at most", of_a_step(gain, facts), gain),
        remedy,
        changes,
    )


@rule(
    "loader-too-slow",
    "the loop waits for a loader in spite of its workers",
    "Take more workers, or make the data set cheaper.",
    "timing",
)
def few_workers(facts: RunFacts) -> Iterator[Seen]:
    loader = _waiting(facts)
    if loader is None or not loader.workers:
        return
    remedy = "Make the data set cheaper: decode once, store smaller images, augment on the device."
    changes: tuple[Change, ...] = ()
    if loader.workers < facts.cores:
        more = str(min(2 * loader.workers, facts.cores))
        remedy = f"Take more workers, num_workers={more} ({facts.cores} cores)."
        changes = change("keywords", loader.site, "DataLoader", num_workers=more)
    yield Seen(
        loader.site,
        f"num_workers={loader.workers}, and the loop still waits for batches for "
        f"{share(facts.wait, facts.step)} of a step ({of_a_step(facts.wait, facts)})",
        facts.wait / facts.step,
        Cost("at most", of_a_step(facts.wait, facts), facts.wait),
        remedy,
        changes,
    )


@rule(
    "loader-not-pinned",
    "batches are copied to the GPU from memory that is not pinned",
    "Set pin_memory=True in the loader, and copy with non_blocking=True.",
    "gpu",
)
def not_pinned(facts: RunFacts) -> Iterator[Seen]:
    size = sum(copy.bytes for copy in facts.copies if not copy.pinned)
    loader = next((x for x in facts.loaders if x.batches and not x.pinned), None)
    if loader is None or size < _SMALL:
        return
    yield Seen(
        loader.site,
        f"{memory_text(size)} a step are copied to the GPU from memory that is not pinned",
        size,
        not_measured(
            "the copy passes through a pinned buffer, and the host waits for it",
        ),
        changes=change("keywords", loader.site, "DataLoader", pin_memory="True"),
    )


@rule(
    "blocking-copy",
    "the host waits for copies to the GPU",
    "Copy with non_blocking=True: the source is pinned.",
    "gpu",
)
def blocking_copies(facts: RunFacts) -> Iterator[Seen]:
    for copy in facts.copies:
        if copy.pinned and not copy.non_blocking and copy.bytes >= _SMALL:
            yield Seen(
                copy.site,
                f"{copy.count:.3g} copies a step, {memory_text(copy.bytes)} of pinned memory, each "
                "of which the host waits for",
                copy.count,
                not_measured("the host enqueues nothing while the copy runs"),
                changes=change("keywords", copy.site, "to", "cuda", non_blocking="True"),
            )
