"""Behaviour of Apex's calls that only a GPU shows: nothing waits; losses on another device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain.apex import amp
from helpers.amp_runs import backward, gradients_alike, images, network, overflowing
from helpers.gpu import NEEDS_GPU, no_sync

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("verbosity", [0, 1])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_waits_for_nothing(
    level: str, verbosity: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = network().cuda()
    optimizer = fusedtrain.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=verbosity)
    x, y = (part.cuda() for part in images())

    def step(overflows: bool) -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).float(), y)
        backward(overflowing(loss) if overflows else loss, optimizer)
        optimizer.step()

    for _ in range(3):
        step(overflows=False)
    with no_sync():
        step(overflows=True)
        step(overflows=False)
    torch.cuda.synchronize()
    step(overflows=False)
    assert ("reducing loss scale to 32768.0" in capsys.readouterr().out) == (verbosity == 1)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 2}}


@pytest.mark.parametrize("maker", [torch.optim.SGD, fusedtrain.optim.SGD])
def test_a_loss_on_the_cpu(maker: type[torch.optim.SGD]) -> None:
    model = network().cuda()
    model, optimizer = amp.initialize(
        model, maker(model.parameters(), lr=0.1), opt_level="O2", verbosity=0
    )
    x, y = images()
    before = [p.detach().clone() for p in model.parameters()]
    backward(overflowing(nn.functional.cross_entropy(model(x.cuda()).cpu(), y)), optimizer)
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    backward(nn.functional.cross_entropy(model(x.cuda()).cpu(), y), optimizer)
    reference = network().cuda()
    nn.functional.cross_entropy(reference(x.cuda()), y.cuda()).backward()
    gradients_alike(amp.master_params(optimizer), reference)
