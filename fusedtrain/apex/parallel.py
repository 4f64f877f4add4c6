"""``apex.parallel`` over torch's DistributedDataParallel and this package's synchronised norms."""

from ._data_parallel import DistributedDataParallel, Reducer
from ._sync_batch_norm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
