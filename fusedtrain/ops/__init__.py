"""The ops, a file for each family: schema, fake kernel, autograd, public function.

`fusedtrain.reference` has their formulas in plain torch, which run where no kernel is registered.
"""

from .. import _backends
from . import (  # each defines its ops
    activations as activations,
    batch_norm as batch_norm,
    bias_act as bias_act,
    channelwise as channelwise,
    depthwise as depthwise,
    few_bit as few_bit,
    fold as fold,
    gated as gated,
    group_norm as group_norm,
    images as images,
    optimizers as optimizers,
    pool as pool,
    row_norm as row_norm,
    scale_add as scale_add,
)
from ._library import library

_backends.load(library)
