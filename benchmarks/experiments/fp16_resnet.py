"""ResNets for CIFAR in half precision with float32 batch norms and masters, against float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.gains import SPEED, triple
from benchmarks.experiments.measure import gain_text, peak_megabytes, timed
from benchmarks.experiments.training import (
    EPOCH,
    Job,
    Maker,
    fresh_step,
    full,
    fused_masters,
    masters,
    whole_training,
)

MAKERS: Mapping[str, Maker] = {"float32": full, "half": masters, "half, fusedtrain": fused_masters}
NETWORKS = {"resnet18": "ResNet-18", "resnet50": "ResNet-50"}


def jobs(settings: Settings) -> dict[str, Job]:
    """Label of the network -> job. The CPU has a tenth of a GPU's memory, a hundredth of its
    speed."""
    if settings.quick:
        sizes = {"resnet18": (8, 2)}
    elif settings.device == "cuda":
        sizes = {"resnet18": (64, 128), "resnet50": (64, 512)}
    else:
        sizes = {"resnet18": (16, 16), "resnet50": (16, 4)}
    return {NETWORKS[name]: Job(name, *size) for name, size in sizes.items()}


def setup(settings: Settings) -> str:
    parts = [
        f"{label} (width {job.width}, batch {job.batch})" for label, job in jobs(settings).items()
    ]
    text = f"{' and '.join(parts)} on random images of 32 px, channels_last, SGD with momentum."
    text += (
        f" Seconds of an epoch are extrapolated from the median step to {EPOCH:,} images;"
        " memory is the most that building the network and two steps allocate."
    )
    if settings.device == "cuda":
        text += " float32 convolutions use TF32 where the GPU has it, which is torch's default."
    else:
        text += (
            " Half is bfloat16, because a CPU has no fast float16; width and batch are smaller than"
            " the published ones (64; 128 and 512)."
        )
    return text


def runs(settings: Settings) -> Iterator[Run]:
    for network, job in jobs(settings).items():
        peaks = {
            name: peak_megabytes(whole_training(job, make, settings), settings)
            for name, make in MAKERS.items()
        }
        steps = {name: fresh_step(job, make, settings) for name, make in MAKERS.items()}
        times = timed(steps, settings)
        for name in MAKERS:
            seconds = times.seconds(name)
            numbers = {"epoch": seconds * EPOCH / job.batch, "mb": peaks[name], "ms": seconds * 1e3}
            note = ""
            if name != "float32":
                gain = times.gain("float32", name)
                numbers |= dict(zip(SPEED, gain, strict=True))
                note = f"{gain_text(gain)} as fast as float32"
            yield Run(f"{network}, {name}", numbers, note)


def judge(measured: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    return [_judge(measured, network) for network in NETWORKS.values()]


def _judge(measured: Mapping[str, Run], network: str) -> Verdict:
    """Faster with certainty, and with less memory."""
    full_run, half_run = (measured.get(f"{network}, {name}") for name in ("float32", "half"))
    if full_run is None or half_run is None:
        return Verdict(None, f"{network} was not measured.")
    speed, memory = half_run.numbers, half_run.numbers["mb"] / full_run.numbers["mb"]
    interval = gain_text(triple(half_run, SPEED))
    words = f"Half precision has {interval} the speed of float32 and {memory:.2f}x the memory"
    saves = memory < 1
    if speed["least"] > 1 and saves:
        return Verdict(True, f"{words}.")
    if speed["most"] < 1:
        reason = "the 16-bit convolutions of this device are slower than those of float32"
        return Verdict(False, f"{words}; {reason}.")
    if not saves:
        return Verdict(False, f"{words}: the masters cost more than the activations save.")
    return Verdict(None, f"{words}: the interval of the speed includes 1.")


_WHERE = "RTX 2080 Ti for ResNet-18, Titan RTX for ResNet-50"
EXPERIMENT = Experiment(
    name="fp16_resnet",
    title="ResNets in half precision with float32 masters",
    question="How much time and memory does a 16-bit network with float32 batch norms and float32 "
    "master weights save?",
    setup=setup,
    columns={
        "epoch": Column("s/epoch"),
        "mb": Column("MB", 0),
        "ms": Column("ms/step", 2),
    },
    claims=[
        Claim(
            "ResNet-18, batch 128, half precision: 10 s an epoch instead of 15 s, 1,500 MB "
            "instead of 2,000.",
            _WHERE,
            {
                "ResNet-18, float32": {"epoch": 15, "mb": 2000},
                "ResNet-18, half": {"epoch": 10, "mb": 1500},
            },
        ),
        Claim(
            "ResNet-50, batch 512, half precision: 27 s an epoch instead of 57 s, 11,727 MB "
            "instead of 21,000.",
            _WHERE,
            {
                "ResNet-50, float32": {"epoch": 57, "mb": 21000},
                "ResNet-50, half": {"epoch": 27, "mb": 11727},
            },
        ),
    ],
    runs=runs,
    judge=judge,
)
