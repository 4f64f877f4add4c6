"""Rules of the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator

from ..._text import memory_text, time_text
from ._facts import Optimizer, RunFacts
from ._rule import Change, Cost, Seen, change, not_measured, of_a_step, rule

_FASTER = 1.25  # on copies, where the clock is noisy
_SHARE = 0.02  # of a step
_ALONE = "the step alone: unscaling, clipping and zeroing are not timed"
HAVE_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # of torch.optim


@rule(
    "slow-optimizer",
    "an optimizer that is not fused",
    "Pass fused=True, or take the class of the same name of fusedtrain.optim.",
    "timing",
)
def slow_optimizer(facts: RunFacts) -> Iterator[Seen]:
    for optimizer in facts.optimizers:
        if optimizer.exact and not optimizer.fused:
            yield from _slow(facts, optimizer)


def _slow(facts: RunFacts, optimizer: Optimizer) -> Iterator[Seen]:
    timing = optimizer.timing
    way = {True: "foreach=True", False: "foreach=False", None: "torch's default"}[optimizer.foreach]
    what = f"{optimizer.type} with {way}, {optimizer.tensors} tensors"
    if timing is None:
        if optimizer.seconds >= _SHARE * facts.step and optimizer.type in HAVE_FUSED:
            yield Seen(
                optimizer.site,
                f"{what}, {memory_text(optimizer.bytes)} of parameters: "
                f"{of_a_step(optimizer.seconds, facts)}; {_ALONE}",
                optimizer.seconds,
                Cost("at most", of_a_step(optimizer.seconds, facts), optimizer.seconds),
                changes=_fused(optimizer),
            )
        return
    ways = {"torch's fused=True": timing.torch_fused, "fusedtrain.optim": timing.fusedtrain}
    times = {name: seconds for name, seconds in ways.items() if seconds is not None}
    if not times:
        return
    best = min(times, key=lambda name: times[name])
    gain = min(optimizer.seconds, timing.now) * (1 - times[best] / timing.now)
    if timing.now < _FASTER * times[best] or gain < _SHARE * facts.step:
        return
    listed = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in times.items())
    usable = timing.torch_fused is not None and timing.torch_fused * _FASTER <= timing.now
    remedy = f"Take fusedtrain.optim.{optimizer.type}, with the same arguments."
    changes = change(
        "replace", optimizer.site, optimizer.type, f"fusedtrain.optim.{optimizer.type}"
    )
    if usable:
        remedy, changes = "", _fused(optimizer)
    yield Seen(
        optimizer.site,
        f"{what}: {of_a_step(optimizer.seconds, facts)}; on copies of the parameters "
        f"{time_text(timing.now)}, {listed}; {_ALONE}",
        timing.now / times[best],
        Cost("measured", of_a_step(gain, facts), gain),
        remedy,
        changes,
    )


def _fused(optimizer: Optimizer) -> tuple[Change, ...]:
    options = {"fused": "True"}
    if optimizer.foreach is not None:
        options["foreach"] = ""
    return change("keywords", optimizer.site, optimizer.type, **options)


@rule(
    "zero-by-memset",
    "gradients are cleared by memset",
    "Leave set_to_none at its default, True: the next backward then writes, and adds nothing.",
)
def memset(facts: RunFacts) -> Iterator[Seen]:
    for event in facts.memsets:
        traffic = f"memory traffic of {memory_text(3 * event.bytes)}"
        yield Seen(
            event.site,
            f"{event.count:.0f} memsets a step, {memory_text(event.bytes)} of gradients",
            event.bytes,
            # The memset writes them; backward then reads and adds where it would only write.
            Cost("at most", f"{of_a_step(facts.clearing, facts)} ({traffic})", facts.clearing)
            if facts.clearing and facts.step
            else not_measured(f"{traffic} a step"),
            changes=change("keywords", event.site, "zero_grad", set_to_none=""),
        )
