"""The state that `initialize` sets up for later calls: one per process, as in Apex."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._options import Options

if TYPE_CHECKING:
    from ._loss_scaler import LossScaler


class AmpState:
    """Options, loss scalers and verbosity."""

    def __init__(self) -> None:
        self.initialized = False
        self.opt_properties = Options()
        self.loss_scalers: list[LossScaler] = []
        self.verbosity = 1
        self.devices: frozenset[str] = frozenset()  # device types with autocast switched on
        self.casts_disabled = 0  # depth of disable_casts


_amp_state = AmpState()


def say(message: str, rank0: bool = False) -> None:
    """Prints, unless verbosity is 0; with `rank0` on the first rank only."""
    if _amp_state.verbosity <= 0:
        return
    ranks = torch.distributed
    if rank0 and ranks.is_available() and ranks.is_initialized() and ranks.get_rank() != 0:
        return
    print(message)
