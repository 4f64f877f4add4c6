"""Each rule sees the fault of a script, at its line, and nothing in a script without it."""

from __future__ import annotations

import pytest

from fusedtrain.advisor.diagnosis import RULES
from helpers import ROOT
from helpers.diagnosis import examined, lines, rules

# Rule: the script with the fault, whether a GPU is assumed, and the lines.
FAULTS: dict[str, tuple[str, bool, list[str]]] = {
    "bias-before-norm": (
        "faults", True,
        ["self.conv = nn.Conv2d(3, 8, 3)", "nn.Conv2d(8, 8, 3, padding=1, bias=True),"],
    ),
    "in-place-clone": ("faults", True, ["self.act = nn.SiLU(inplace=True)", "nn.Mish(True),"]),
    "norm-moves-twice": ("norms", True, ["nn.BatchNorm2d(8),"]),
    "frozen-norm-keeps": (
        "norms", True,
        ["self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))"],
    ),
    "convert-fuses": ("faults", True, ["model = Net()"]),
    "slow-depthwise": ("depthwise", False, ["model = Net()"]),
    "graph-kept": ("faults", True, ["total += loss * len(x)"]),
    "eval-with-grad": ("faults", True, ["right += (model(x).argmax(1) == y).sum()"]),
    "loader-without-workers": ("faults", True, ["loader = DataLoader(Slow(), batch_size=8)"]),
    "amp-off": ("faults", True, ["model = Net()"]),
    "fp16-without-scaler": (
        "norms", True, ["loss = model(torch.randn(4, 3, 10, 10)).float().square().mean()"]
    ),
    "scaler-with-bf16": (
        "tiny", True, ['scaler = torch.amp.GradScaler("cpu", init_scale=2.0)']
    ),
    "clip-before-unscale": ("scaled", False, [
        "clip_grad_norm_(model.parameters(), 1.0)", "clip_grad_value_(other.parameters(), 0.5)"
    ]),
    "step-beside-scaler": ("scaled", False, ["second.step()"]),
    "tf32-off": ("single", True, ['"""Matrix products in float32, and nothing but them."""']),
    "autotuner-off": ("norms", True, [
        '"""Batch norms under a checkpoint, frozen batch norms, DataParallel, and float16 without '
        'a scale."""'
    ]),
    "not-channels-last": ("norms", True, ["model = nn.DataParallel(Net().train())"]),
    "slow-optimizer": (
        "tiny", True,
        ["optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)"],
    ),
    "zero-by-memset": ("faults", True, ["optimizer.zero_grad(set_to_none=False)"]),
    "host-waits": ("faults", True, [
        "hard = output.detach()[~right]",
        "history[step] = (loss.item(), len(hard), right.nonzero().shape)",
        "history[step] = (loss.item(), len(hard), right.nonzero().shape)",
        "print(loss)",
    ]),
    "small-tensors": (
        "tiny", True, ["model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), *layers)"]
    ),
    "data-parallel": ("norms", True, ["model = nn.DataParallel(Net().train())"]),
    "page-faults": ("large", False, ["model = Scale()"]),
}  # fmt: skip

# Rules whose fault no run on a CPU has, or whose fault is a matter of the clock: test_facts.py.
BY_FACTS = {"loader-too-slow", "loader-not-pinned", "blocking-copy", "too-many-threads",
            "slow-16-bit-convolutions", "memory-nearly-full"}  # fmt: skip

# Rule: a script without the fault, where that is not healthy.py.
WITHOUT = {
    "norm-moves-twice": "norms_healthy",
    "frozen-norm-keeps": "norms_healthy",
    "fp16-without-scaler": "norms_healthy",
    "data-parallel": "norms_healthy",
    "clip-before-unscale": "scaled_healthy",
    "step-beside-scaler": "scaled_healthy",
    "slow-depthwise": "depthwise_healthy",
    "graph-kept": "norms_healthy",
}

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_rule_has_a_script_or_facts() -> None:
    assert set(FAULTS) | BY_FACTS == {rule.id for rule in RULES}


def test_every_rule_is_in_the_guide() -> None:
    """And those for GPUs say so there."""
    page = (ROOT / "docs" / "doctor.md").read_text()
    for rule in RULES:
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{rule.id}`"))
        assert (", GPU" in row.split("|")[1]) == ("gpu" in rule.needs), row
    assert page.count("\n| `") == len(RULES)


@pytest.mark.parametrize("rule", FAULTS)
def test_the_fault_is_seen_at_its_line(rule: str) -> None:
    name, assume_gpu, expected = FAULTS[rule]
    diagnosis = examined(name, assume_gpu)
    assert sorted(lines(diagnosis, rule)) == sorted(expected), str(diagnosis)
    for finding in diagnosis.findings:
        if finding.rule == rule:
            assert finding.number >= 0
            assert finding.evidence
            assert finding.remedy
            assert finding.cost.kind in ("measured", "at most", "not measured here")


@pytest.mark.parametrize("rule", FAULTS)
def test_nothing_is_seen_where_the_fault_is_not(rule: str) -> None:
    name = WITHOUT.get(rule, "healthy")
    assert not lines(examined(name, FAULTS[rule][1]), rule)


def test_threads_that_the_script_has_chosen() -> None:
    """Whether they cost time is a matter of the clock: test_facts.py."""
    facts = examined("norms", True).facts
    assert facts.threads == 64
    assert facts.threads_site is not None
    assert facts.threads_site.code == "torch.set_num_threads(64)"


def test_a_healthy_script_has_no_findings() -> None:
    assert not rules(examined("healthy", True)), str(examined("healthy", True))


@pytest.mark.slow
def test_rules_for_gpus_say_nothing_on_a_cpu() -> None:
    diagnosis = examined("large")
    for rule in RULES:
        if "gpu" in rule.needs:
            assert "GPU" in diagnosis.not_checked[rule.id]
    assert not lines(diagnosis, "host-waits")


def test_a_slow_layer_of_one_line_is_named_with_its_name() -> None:
    (first, second) = (f for f in examined("faults", True).findings if f.rule == "bias-before-norm")
    assert {"conv;", "body.0;"} == {f.evidence.split()[3] for f in (first, second)}


def test_bytes_of_clones_and_gradients() -> None:
    """8 images of 8 x 14 x 14 float32; and all parameters."""
    diagnosis = examined("faults", True)
    clones = {f.number for f in diagnosis.findings if f.rule == "in-place-clone"}
    assert clones == {8 * 8 * 14 * 14 * 4}
    (memset,) = (f for f in diagnosis.findings if f.rule == "zero-by-memset")
    count = (3 * 8 * 9 + 8) + (8 * 8 * 9 + 8) + 2 * 16 + (8 * 4 + 4)
    assert memset.number == pytest.approx(4 * count)
