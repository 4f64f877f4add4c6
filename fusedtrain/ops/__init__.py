"""The ops, a file for each family: schema, fake kernel, autograd, public function.

`fusedtrain.reference` has their formulas in plain torch, which run where no kernel is registered.
"""

from .. import _backends
from . import (  # each defines its ops
    activations as activations,
)
from . import (
    batch_norm as batch_norm,
)
from . import (
    bias_act as bias_act,
)
from . import (
    channelwise as channelwise,
)
from . import (
    few_bit as few_bit,
)
from . import (
    fold as fold,
)
from . import (
    gated as gated,
)
from . import (
    images as images,
)
from . import (
    optimizers as optimizers,
)
from . import (
    pool as pool,
)
from . import (
    scale_add as scale_add,
)
from ._library import library

_backends.load(library)
