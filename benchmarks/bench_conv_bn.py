"""Whole networks: a training step with convert, folded inference, a step with frozen batch norms.

Against eager torch, and in inference against torch.compile with freezing. Rivals take turns within
one test, each with a copy of the same network.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.harness import networks
from benchmarks.harness.cases import LAYOUTS, Options
from benchmarks.harness.networks import Contestant, NetworkCase as Case, Setup
from benchmarks.harness.race import Race, admit, in_graph, refuse_the_reference

FAMILY = "conv_bn"
# Networks of which depthwise convolutions are a large part.
DEPTHWISE = ("efficientnet_b0", "mobilenet_v3_large", "mobilenetv4_conv_small", "convnext_tiny")
BF16 = "bfloat16 AMP"
CPU: tuple[Setup, ...] = (
    *(
        Setup("train", model, 16, 128, layout, optimizer="AdamW")
        for model in DEPTHWISE
        for layout in LAYOUTS
    ),
    Setup("train", "resnet18", 32, 96, "contiguous"),
    Setup("tune", "efficientnet_b0", 32, 96, "channels_last", optimizer="AdamW"),
    Setup("tune", "resnet50", 8, 224, "channels_last"),
    Setup("inference", "resnet50", 1, 224, "channels_last"),
    Setup("inference", "resnet50", 8, 224, "channels_last"),
)
CUDA: tuple[Setup, ...] = (
    *(Setup("train", model, 128, 224, "channels_last", BF16, "AdamW") for model in DEPTHWISE),
    # At small batches the host's part of a step shows.
    *(Setup("train", "resnet50", n, 224, "channels_last", BF16) for n in (8, 32, 128)),
    Setup("train", "resnet50", 128, 224, "channels_last", "float16 AMP"),
    Setup("tune", "resnet50", 64, 224, "channels_last", BF16),
    Setup("inference", "resnet50", 1, 224, "channels_last", "bfloat16"),
    Setup("inference", "resnet50", 64, 224, "channels_last", "bfloat16"),
)
QUICK: tuple[Setup, ...] = (
    Setup("train", "resnet18", 4, 64),
    Setup("tune", "resnet18", 4, 64),
    Setup("inference", "resnet18", 1, 64),
)


# A step of a network whose norms weigh much, one of convolutions, and a folded network.
FIRST = [
    Case(setup)
    for setup in CUDA
    if (setup.job, setup.model, setup.batch, setup.dtype)
    in (("train", "efficientnet_b0", 128, BF16), ("train", "resnet50", 128, BF16),
        ("inference", "resnet50", 64, "bfloat16"))
]  # fmt: skip


def select(options: Options) -> list[Case]:
    """The cases of a run."""
    setups = {"cpu": CPU, "cuda": CUDA}[options.device]
    if options.full:
        other = {"contiguous": "channels_last", "channels_last": "contiguous"}
        both = (*setups, *(replace(setup, layout=other[setup.layout]) for setup in setups))
        setups = tuple(dict.fromkeys(both))
    if options.quick:
        setups = QUICK
    compiled = options.compiled and not options.quick
    return [
        Case(setup, compiled and (options.full or setup.job != "tune"))
        for setup in setups
        if options.wants(setup.job, setup.model)
    ]


def _entrants(case: Case, device: str) -> tuple[dict[str, Contestant], dict[str, float]]:
    """Contestants to be timed, and the errors of ours, which must pass the gate."""
    setup, stock = case.setup, networks.stock_of(case.setup, device)
    gate = networks.Gate(stock, setup, device, whole=case.compiled)
    names = ("eager", "fusedtrain", *["compile"] * case.compiled)
    contestants = {who: networks.contestant(who, setup, stock) for who in names}
    where = f"{case} on {device}"
    admitted = admit(contestants, lambda who, entrant: gate.check(who, entrant.model), where)
    return admitted, gate.errors["fusedtrain"]


def _saved(contestant: Contestant, setup: Setup, batch: tuple[Tensor, Tensor]) -> int:
    return 0 if setup.job == "inference" else networks.saved_bytes(contestant.model, setup, *batch)


def test_conv_bn(race: Race, case: Case) -> None:
    """One row of the results."""
    setup = case.setup
    if setup.job == "train":
        refuse_the_reference("batch_norm_act", race.device)
    # Read by torch.compile while it compiles, which is at the first call.
    with torch._inductor.config.patch(freezing=setup.job == "inference"):
        try:
            entrants, errors = _entrants(case, race.device)
        except ImportError as error:
            pytest.skip(f"{case}: {error}")
    if race.is_off:
        return
    batch = networks.batch_of(setup, race.device)
    saved = {who: _saved(c, setup, batch) for who, c in entrants.items() if who != "compile"}
    calls = {
        who: networks.call(c.model, setup, *batch, ours=who == "fusedtrain")
        for who, c in entrants.items()
    }
    samples = race.samples(calls)
    graphs = {}
    if race.device == "cuda":  # scalers wait for the GPU, and what is compiled has its own graphs
        able = {} if setup.dtype == "float16 AMP" else {**calls}
        times = {who: in_graph(call, 1) for who, call in able.items() if who != "compile"}
        graphs = {who: ns for who, ns in times.items() if ns == ns}  # NaN is no JSON
    race.finish(
        FAMILY,
        samples,
        **({"graph_ns": graphs} if graphs else {}),
        **vars(setup),
        saved=saved,
        note=entrants["fusedtrain"].note,
        errors=errors,
    )
