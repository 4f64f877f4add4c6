"""Mixed precision: a GradScaler for the fused optimizers. Apex's amp is `fusedtrain.apex.amp`."""

from .grad_scaler import GradScaler

__all__ = ["GradScaler"]
