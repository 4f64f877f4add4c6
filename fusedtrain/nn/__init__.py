"""Drop-in modules: the names and arguments of ``torch.nn``, fused kernels."""

from .activation import (
    CELU as CELU,
    ELU as ELU,
    GELU as GELU,
    SELU as SELU,
    HardMish as HardMish,
    Hardshrink as Hardshrink,
    Hardsigmoid as Hardsigmoid,
    Hardswish as Hardswish,
    Hardtanh as Hardtanh,
    LeakyReLU as LeakyReLU,
    LogSigmoid as LogSigmoid,
    Mish as Mish,
    PReLU as PReLU,
    QuickGELU as QuickGELU,
    ReLU as ReLU,
    ReLU6 as ReLU6,
    ReLUSquared as ReLUSquared,
    Sigmoid as Sigmoid,
    SiLU as SiLU,
    Softplus as Softplus,
    Softshrink as Softshrink,
    Softsign as Softsign,
    SquarePlus as SquarePlus,
    StarReLU as StarReLU,
    Tanh as Tanh,
    Tanhshrink as Tanhshrink,
    Threshold as Threshold,
)
from .conv import ConvBnAct as ConvBnAct
from .depthwise import (
    DepthwiseConv1d as DepthwiseConv1d,
    DepthwiseConv2d as DepthwiseConv2d,
    DepthwiseConv3d as DepthwiseConv3d,
)
from .drop_path import DropPath as DropPath
from .dropout import BiasActDropout as BiasActDropout, Dropout as Dropout
from .glu import (
    GEGLU as GEGLU,
    GLU as GLU,
    BilinearGLU as BilinearGLU,
    ReGLU as ReGLU,
    SwiGLU as SwiGLU,
)
from .group_norm import (
    GroupNorm as GroupNorm,
    GroupNorm1Act as GroupNorm1Act,
    GroupNormAct as GroupNormAct,
)
from .images import NormalizeImages as NormalizeImages
from .layer_norm import (
    LayerNorm as LayerNorm,
    LayerNorm2d as LayerNorm2d,
    LayerNormAct2d as LayerNormAct2d,
    RMSNorm as RMSNorm,
    RmsNorm2d as RmsNorm2d,
)
from .norm import (
    BatchNormAct1d as BatchNormAct1d,
    BatchNormAct2d as BatchNormAct2d,
    BatchNormAct3d as BatchNormAct3d,
    BatchNormAddAct as BatchNormAddAct,
)
from .pool import MaxPool2d as MaxPool2d
from .sync_norm import (
    SyncBatchNormAct as SyncBatchNormAct,
    convert_sync_batchnorm as convert_sync_batchnorm,
)

__all__ = sorted(name for name, value in vars().items() if callable(value))
