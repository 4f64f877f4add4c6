"""ResNets in half precision with float32 masters: how much time and memory does that save?

Source: RTX 2080 Ti, ResNet-18, batch 128: 10 s an epoch instead of 15 s, 1,500 MB instead of 2,000;
Titan RTX, ResNet-50, batch 512: 27 s instead of 57 s, 11,727 MB instead of 21,000.
Found 2026-11-23 on an AMD EPYC (2 threads), with bfloat16 and smaller networks: 0.12 and 0.21 times
the speed, 0.81 and 0.85 times the memory. An epoch of 50,000 images is extrapolated from the median
step; memory is the most that building the network and two steps allocate.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.experiments.experiment import Row, Settings, peak_mb, timed
from benchmarks.experiments.training import (
    EPOCH,
    Job,
    fresh_step,
    full,
    fused_masters,
    masters,
    whole_training,
)

MAKERS = {"float32": full, "half": masters, "half, fusedtrain": fused_masters}


def jobs(settings: Settings) -> dict[str, Job]:
    """The CPU has a tenth of a GPU's memory, a hundredth of its speed."""
    width, *batches = settings.pick((8, 2, 2), (16, 16, 4), (64, 128, 512))
    made = {n: Job(f"resnet{n}", width, b) for n, b in zip((18, 50), batches, strict=True)}
    return {f"ResNet-{n}": job for n, job in made.items() if n == 18 or not settings.quick}


def rows(settings: Settings) -> Iterator[Row]:
    for network, job in jobs(settings).items():
        peaks = {
            who: peak_mb(whole_training(job, make, settings), settings)
            for who, make in MAKERS.items()
        }
        steps = {who: fresh_step(job, make, settings) for who, make in MAKERS.items()}
        times = timed(steps, settings)
        for who in MAKERS:
            seconds = times.seconds(who)
            numbers = {"s/epoch": seconds * EPOCH / job.batch, "MB": peaks[who]}
            more = {"ms/step": seconds * 1e3, **times.over("float32", who)}
            yield Row(f"{network}, {who}", {**numbers, **more})
