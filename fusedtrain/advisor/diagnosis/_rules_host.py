"""Rules of the host: waits for the device, small tensors, threads, pages, DataParallel."""

from __future__ import annotations

from collections.abc import Iterator

from ..._text import memory_text, time_text
from ._facts import RunFacts
from ._rule import Cost, Seen, change, not_measured, of_a_step, rule, share, times

_FAULTS = 0.05  # of a step
_HOST = 0.4  # of a step
_DRAINED = 0.05  # of a step
_SMALL = 1 << 14  # elements: an operator on these takes about as long as its call
_SLOWER = 1.15


@rule(
    "host-waits",
    "the host waits for the device",
    "Keep numbers on the device and read them every 100 steps; torch.where takes masks.",
    "gpu",
)
def syncs(facts: RunFacts) -> Iterator[Seen]:
    for event in facts.syncs:
        if facts.assumed:
            cost = not_measured("on a GPU the host waits until all enqueued work is done")
        else:
            seconds = min(event.seconds, facts.step)
            cost = Cost("at most", f"{of_a_step(seconds, facts)} (the wait, observed)", seconds)
        yield Seen(event.site, f"{event.what}, {times(event.count)} a step", event.count, cost)


@rule(
    "small-tensors",
    "the host is the bottleneck: tensors are small",
    "Make fewer and larger calls: a larger batch, torch.compile, CUDA graphs on a GPU.",
    "timing",
    "eager",
)
def small_tensors(facts: RunFacts) -> Iterator[Seen]:
    if facts.on_gpu and not facts.assumed:
        if facts.drain is None or facts.syncs or facts.drain > _DRAINED * facts.step:
            return
        if facts.wait > 0.1 * facts.step:  # the loader is the bottleneck
            return
        yield Seen(
            facts.model_site,
            f"when the host had enqueued {facts.operators:.0f} operators, a step, the GPU had "
            f"{time_text(facts.drain)} of work left: the GPU waits for the host",
            facts.operators,
            not_measured("the share of the step in which the GPU idles"),
        )
        return
    calls = facts.operators * facts.operator
    if facts.elements > _SMALL or calls < _HOST * facts.busy:
        return
    yield Seen(
        facts.model_site,
        f"{facts.operators:.0f} operators a step, half of them with at most {facts.elements:.0f} "
        f"elements; as many calls of the smallest operator take {time_text(calls)}, "
        f"{share(min(calls, facts.busy), facts.busy)} of the processor's time in a step",
        facts.operators,
        Cost("at most", of_a_step(min(calls, facts.step), facts), min(calls, facts.step)),
    )


@rule(
    "data-parallel",
    "nn.DataParallel",
    "Use torch.nn.parallel.DistributedDataParallel, one process a GPU, started by torchrun.",
)
def data_parallel(facts: RunFacts) -> Iterator[Seen]:
    for layer in facts.parallel:
        copies = max(facts.gpus - 1, 0)
        if copies:
            cost = Cost(
                "at most",
                f"{memory_text(layer.bytes * copies)} of parameters are sent to the other GPUs in "
                "each forward",
                bytes=layer.bytes * copies,
            )
        else:
            cost = not_measured("on several GPUs the parameters are sent in each forward")
        yield Seen(
            layer.site,
            f"nn.DataParallel around {layer.type}, {memory_text(layer.bytes)} of parameters, "
            f"{facts.gpus} GPUs",
            facts.gpus,
            cost,
        )


@rule(
    "page-faults",
    "large buffers are fresh memory in each step",
    "Set THP_MEM_ALLOC_ENABLE=1 in the environment: torch then asks for huge pages.",
    "timing",
)
def page_faults(facts: RunFacts) -> Iterator[Seen]:
    seconds = facts.faults * facts.fault
    without_others = min(
        facts.step, facts.busy or facts.step
    )  # other processes may take the rest of a step
    if facts.on_gpu or seconds < _FAULTS * without_others or not facts.large:
        return
    yield Seen(
        facts.model_site,
        f"{facts.faults:.0f} page faults a step, {facts.fault * 1e6:.2g} us each here; "
        f"{memory_text(facts.large)} a step are in new tensors of 1 MB or more",
        facts.faults,
        Cost("at most", of_a_step(min(seconds, facts.step), facts), min(seconds, facts.step)),
    )


@rule("too-many-threads", "more threads than cores", "Take as many threads as there are cores.")
def threads(facts: RunFacts) -> Iterator[Seen]:
    every = facts.threads * facts.ranks
    if every <= facts.cores:
        return
    cost = not_measured("threads that spin for each other")
    if facts.oversubscribed:
        if facts.ranks == 1 and facts.oversubscribed < _SLOWER:
            return
        text = f"a parallel operator takes {facts.oversubscribed:.2f}x of its time with"
        cost = Cost("measured", f"{text} {facts.cores} threads")
    each = max(facts.cores // facts.ranks, 1)
    yield Seen(
        facts.threads_site,
        f"{facts.threads} threads in each of {facts.ranks} processes on {facts.cores} cores",
        every / facts.cores,
        cost,
        f"Take {each} thread{'s' * (each > 1)} a process: torch.set_num_threads({each}), or "
        f"OMP_NUM_THREADS={each}.",
        change("argument", facts.threads_site, "set_num_threads", value=str(each)),
    )
