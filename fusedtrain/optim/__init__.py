"""Optimizers whose whole step is one call: replacements for torch.optim's and timm's."""

from ._engine import FusedOptimizer
from ._masters import float32_state_dict
from ._options import FusedOptions
from .adagrad import Adagrad
from .adam import Adam, AdamW, NAdamW
from .lamb import LAMB
from .lars import LARS
from .lion import Lion
from .novograd import NovoGrad
from .rmsprop import RMSprop, RMSpropTF
from .scheduler import AppliedStepScheduler
from .sgd import SGD, SGDW
from .zero_grad import zero_grad

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "SGDW",
    "Adagrad",
    "Adam",
    "AdamW",
    "AppliedStepScheduler",
    "FusedOptimizer",
    "FusedOptions",
    "Lion",
    "NAdamW",
    "NovoGrad",
    "RMSprop",
    "RMSpropTF",
    "float32_state_dict",
    "zero_grad",
]
