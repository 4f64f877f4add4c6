"""ResNets in half precision with float32 masters: how much time and memory does that save?

Memory is the most that building the network and two steps allocate.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.experiments.experiment import Row, Settings, peak_mb, timed
from benchmarks.experiments.training import (
    EPOCH,
    Job,
    Maker,
    fresh_step,
    full,
    fused_masters,
    masters,
)

MAKERS = {"float32": full, "half": masters, "half, fusedtrain": fused_masters}


def jobs(settings: Settings) -> dict[str, Job]:
    """The CPU has a tenth of a GPU's memory, a hundredth of its speed."""
    width, *batches = settings.pick((8, 2, 2), (16, 16, 4), (64, 128, 512))
    made = {n: Job(f"resnet{n}", width, b) for n, b in zip((18, 50), batches, strict=True)}
    return {f"ResNet-{n}": job for n, job in made.items() if n == 18 or not settings.quick}


def rows(settings: Settings) -> Iterator[Row]:
    for network, job in jobs(settings).items():
        peaks = {}
        for who, make in MAKERS.items():

            def train(make: Maker = make, job: Job = job) -> object:
                step = fresh_step(job, make, settings)
                return step(), step(), step

            peaks[who] = peak_mb(train, settings)
        steps = {who: fresh_step(job, make, settings) for who, make in MAKERS.items()}
        times = timed(steps, settings)
        for who in MAKERS:
            seconds = times.seconds(who)
            numbers = {"s/epoch": seconds * EPOCH / job.batch, "MB": peaks[who]}
            more = {"ms/step": seconds * 1e3, **times.over("float32", who)}
            yield Row(f"{network}, {who}", {**numbers, **more})
