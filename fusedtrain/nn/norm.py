"""Batch norm, add and activation as subclasses of torch's batch norm: checkpoints load unchanged.

Numerics, layouts and saved tensors: :func:`fusedtrain.functional.batch_norm_act`.
"""

import sys
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.compiler import is_dynamo_compiling as _is_dynamo_compiling
from torch.jit import is_scripting as _scripting  # type: ignore[attr-defined]
from torch.overrides import has_torch_function_unary as _has

from .._graph.fx import handle as _handle, path_of
from .._torch_private import BatchNormBase, backward_number
from ..ops import batch_norm as _batch_norm
from ..ops.batch_norm_autograd import recomputed_as_torch
from ..reference.pointwise import Pointwise
from .act_layer import create_activation
from .drop_path import DropPath as DropPath  # pickles of earlier versions name it here
from .parts import activation_of, branch_scale_of, hands_on, is_stochastic_depth

_NOTHING = Pointwise()
_IDENTITY = nn.Identity()


def _plus(z: Tensor, residual: Any) -> Tensor:
    if _has(z):  # torch.fx: one call in the graph
        return _handle(_plus, (z,), z, residual)
    return z if residual is None else z + residual


def _is_nothing(part: nn.Module) -> bool:
    return type(part) is nn.Identity and hands_on(part)


def _fits_in(tensor: Tensor, other: Tensor) -> bool:
    """Whether torch adds a tensor to another one in place."""
    if tensor.shape == other.shape:
        return True
    sizes = zip(reversed(tensor.shape), reversed(other.shape))
    return tensor.dim() <= other.dim() and all(a in (1, b) for a, b in sizes)


class _NoQconfig:
    """Raises when torch.nn.SyncBatchNorm.convert_sync_batchnorm reads `qconfig`: it has then made a
    module without the activation, with which it would replace this one."""

    def __get__(self, module: Any, owner: type) -> Any:
        name, state = owner.__name__, {} if module is None else vars(module)
        parts = [state.get(kind) or state.get("_modules", {}).get(kind) for kind in ("act", "drop")]
        alone = module is not None and all(p is None or type(p) is nn.Identity for p in parts)
        caller = sys._getframe(1)
        file = caller.f_globals["__name__"]  # timm's function keeps the activation of timm's norms
        alone = alone or (
            file.startswith("timm.") and file in {c.__module__ for c in owner.__mro__}
        )
        if not alone and caller.f_code.co_name == "convert_sync_batchnorm":
            raise RuntimeError(
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm would drop the activation of "
                f"{name}: use fusedtrain.nn.convert_sync_batchnorm"
            )
        raise AttributeError(f"{name!r} object has no attribute 'qconfig'")


_GETATTR = nn.Module.__getattr__
_FORWARD = BatchNormBase.forward


def _state_of(norm: Any) -> tuple[Any, ...]:
    """The op's arguments from `weight` to `eps`, and the counter of batches if the call is one more
    batch, else None.

    Decides, for every class and mode, which statistics normalise, which of them move and how far:
    backward that recomputes a forward moves nothing again. All state is read at each call, so a
    change of the module acts at the next one. Dictionaries are read: an attribute that
    nn.Module.__getattr__ finds takes 0.6 us, and a call needs eight.
    """
    state = norm.__dict__ if type(norm).__getattr__ is _GETATTR else {}
    try:
        parameters, buffers = state["_parameters"], state["_buffers"]
        weight, bias = parameters["weight"], parameters["bias"]
        mean, var = buffers["running_mean"], buffers["running_var"]
        training, tracks = state["training"], state["track_running_stats"]
        momentum, eps = state["momentum"], state["eps"]
    except KeyError:  # weight_norm, a pickle of another version, or a class that answers itself
        weight, bias, mean, var = norm.weight, norm.bias, norm.running_mean, norm.running_var
        training, tracks = norm.training, norm.track_running_stats
        momentum, eps = norm.momentum, norm.eps
    batches = None
    if training and tracks and (_is_dynamo_compiling() or backward_number() == -1):
        counter = state.get("_buffers", {})
        known = "num_batches_tracked" in counter
        batches = counter["num_batches_tracked"] if known else norm.num_batches_tracked
    elif training:
        mean = var = None
    if momentum is None:  # the average of all batches
        momentum = 0.0 if batches is None else 1.0 / (float(batches) + 1.0)
    by_batch = training or (mean is None and var is None)
    return weight, bias, mean, var, by_batch, momentum, eps, batches


class BatchNormActBase(BatchNormBase):
    """The forward of all classes: norm, drop, add, activation."""

    qconfig = _NoQconfig()
    # Set by convert: a lone norm that overwrites nothing has torch's bits, and backward can
    # recompute its output.
    _as_torch = False
    overwrite_input = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        apply_act: bool = True,
        act_layer: Any = nn.ReLU,
        act_kwargs: Mapping[str, Any] | None = None,
        inplace: bool = True,
        drop_layer: Callable[[], nn.Module] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        overwrite_input: bool = False,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:  # torch has this keyword from 2.13 on
            self.register_parameter("bias", None)
        self.overwrite_input = overwrite_input
        self.drop = nn.Identity() if drop_layer is None else drop_layer()
        self.act = create_activation(act_layer, act_kwargs, inplace) if apply_act else nn.Identity()

    def reset_parameters(self) -> None:
        """As in torch 2.13, the first that knows norms without a bias."""
        self.reset_running_stats()
        for parameter, value in ((self.weight, 1.0), (self.bias, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)

    def extra_repr(self) -> str:
        shown = [super().extra_repr()]
        if self.overwrite_input:
            shown.append("overwrite_input=True")
        return ", ".join(shown)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        if _scripting():
            return self._scripted(input, residual)
        return self._fused(input, residual)

    def _scripted(self, input: Tensor, residual: Tensor | None) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        kept = not self.training or self.track_running_stats
        z = nn.functional.batch_norm(
            input,
            self.running_mean if kept else None,
            self.running_var if kept else None,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            factor,
            self.eps,
        )
        # After convert, or convert_sync_batchnorm, a norm may have neither.
        if hasattr(self, "drop"):
            z = self.drop(z)
        if residual is not None:
            z = z + residual
        if hasattr(self, "act"):
            z = self.act(z)
        return z

    @torch.jit.unused
    def _fused(self, input: Tensor, residual: Tensor | None) -> Tensor:
        if isinstance(input, fx.Proxy):
            return self._traced(input, residual)
        state, children = self.__dict__, self.__dict__["_modules"]
        drop: Any = state["drop"] if "drop" in state else children.get("drop", _IDENTITY)
        act: Any = state["act"] if "act" in state else children.get("act", _IDENTITY)
        if residual is None and self._as_torch and all(map(hands_on, children.values())):
            # Dynamo cannot call what stands for the forward of a class that was converted, too.
            forward = _FORWARD if _is_dynamo_compiling() else BatchNormBase.forward
            output = forward(self, input)
            recomputed_as_torch(self, input, output)
            return output
        return norm_act(self, input, residual, drop, act, overwrite_input=self.overwrite_input)

    def _traced(self, input: Any, residual: Any) -> Any:
        """In a graph of torch.fx: one call of the module, as for torch's batch norms."""
        path = path_of(input.tracer, self)
        if path is not None:
            args = (input,) if residual is None else (input, residual)
            return input.tracer.create_proxy("call_module", path, args, {})
        act, drop = self.act, self.drop
        z = self._as_function(input)
        if not _is_nothing(drop):  # the one of `convert` is no child, which torch.fx cannot call
            z = drop(z)
        if isinstance(residual, fx.Proxy):  # an argument of the graph may be None
            z = _plus(z, residual)
        return z if _is_nothing(act) else act(z)

    def _as_function(self, input: Any) -> Any:
        """The norm in the module's mode, for a graph that cannot call the module."""
        weight, bias, mean, var, *settings, batches = _state_of(self)
        if batches is not None:
            if self.momentum is None:
                raise RuntimeError(
                    "torch.fx cannot trace a batch norm with momentum=None in training mode by "
                    "itself, or with hooks: trace the module around it, and remove its hooks"
                )
            counter = (batches, 1)
            input.tracer.create_proxy("call_function", torch.ops.aten.add_.Tensor, counter, {})
        return _batch_norm.batch_norm_act(
            input, mean, var, weight, bias, *settings, activation="identity"
        )

    def _run(self, *arguments: Any) -> Tensor:
        """The op, with the arguments of its `run`."""
        return _batch_norm.run(*arguments)


def norm_act(
    norm: Any,
    input: Tensor,
    residual: Any,
    drop: nn.Module,
    act: nn.Module | Pointwise,
    in_place: bool = False,
    overwrite_input: bool = False,
    residual_first: bool = False,
) -> Tensor:
    """``act(drop(norm(input)) + residual)`` as one op, for a batch norm of this package or torch.

    Args:
        residual: None, a tensor, or a number that a tensor is added to.
        act: a module, or an activation as the op takes it.
        in_place: whether the sum is written as ``z += residual``, which a residual that does not
            fit into z must not pass.
        residual_first: whether it is written as ``residual + z``: the first operand decides the
            layout of a sum.
    """
    ranks = _RANKS.get(type(norm))  # None: a subclass, or a synchronised norm
    if ranks is None or type(input) is not Tensor or input.dim() not in ranks:
        norm._check_input_dim(input)
    activation = act if isinstance(act, Pointwise) else activation_of(act)
    # A number, or a tensor that torch would not add in place.
    odd = residual is not None and not isinstance(residual, Tensor)
    if in_place and isinstance(residual, Tensor):
        same = residual.dtype is input.dtype
        odd = not (same and residual.shape == input.shape) and (
            residual.is_complex() or not _fits_in(residual, input)
        )
        if not (odd or same):  # else a graph shows an idle cast
            residual = residual.to(input.dtype)
    branch_scale = dropping = None
    if not hands_on(drop):
        if is_stochastic_depth(drop):
            branch_scale = branch_scale_of(drop, input)
        else:
            dropping = drop
    unfused = odd or dropping is not None or activation is None
    if residual_first and isinstance(residual, Tensor):
        unfused = unfused or not _batch_norm.adds_alike(input, residual)
    run: Any = _batch_norm.run
    if ranks is None:
        run = partial(OURS.get(type(norm), type(norm))._run, norm)
    weight, bias, mean, var, by_batch, momentum, eps, batches = _state_of(norm)
    z: Tensor = run(
        input, None if unfused else residual, branch_scale, weight, bias, mean, var, by_batch,
        momentum, eps, _NOTHING if unfused else activation, overwrite_input,
    )  # fmt: skip
    if batches is not None:
        batches.add_(1)
    if not unfused:
        return z
    if dropping is not None:
        z = dropping(z)
    if residual is not None:
        if residual_first:
            z = residual + z
        else:
            z = z.add_(residual) if in_place else z + residual
    return _batch_norm.activated(z, act) if isinstance(act, Pointwise) else act(z)


class BatchNormAct1d(BatchNormActBase, nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` and an activation in one op; see :class:`BatchNormAct2d`.

    Example:
        >>> BatchNormAct1d(1)(torch.tensor([[1.0], [3.0]]))
        tensor([[0.0000],
                [1.0000]], grad_fn=<BatchNormActBackward>)
    """


class BatchNormAct2d(BatchNormActBase, nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` and an activation in one op, with timm's name and arguments.

    ``forward(input, residual=None)`` normalises the input [N, C, H, W], adds the residual of the
    same shape, and applies the activation. See :func:`fusedtrain.functional.batch_norm_act` for
    dtypes, layouts and saved tensors. When backward recomputes a forward, as torch.utils.checkpoint
    does, running statistics and `num_batches_tracked` do not move a second time.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in
            :class:`torch.nn.BatchNorm2d`, where torch has `bias` only from 2.13 on.
        apply_act: False is no activation.
        act_layer: class or name of an activation module, not a module. Activations of torch.nn and
            fusedtrain.nn without trained parameters are part of the op; any other module is called
            after it.
        act_kwargs: arguments of `act_layer`.
        inplace: argument of `act_layer`; without effect if the activation is part of the op.
        drop_layer: makes a module that is called between norm and activation. Stochastic depth
            (timm's DropPath, torchvision's StochasticDepth in mode "row") is part of the op.
        overwrite_input: as in :func:`fusedtrain.functional.batch_norm_act`.

    Raises:
        ValueError: an input of another rank, one value a channel in training, or an unknown name.
        TypeError: `act_layer` is a module and not its class, or makes none.
        RuntimeError: torch's errors for the same mistakes. Nothing is modified then.

    Example:
        >>> norm = BatchNormAct2d(2, act_layer=torch.nn.SiLU)
        >>> norm.load_state_dict(torch.nn.BatchNorm2d(2).state_dict())
        <All keys matched successfully>
        >>> norm(torch.randn(4, 2, 3, 3)).shape
        torch.Size([4, 2, 3, 3])
    """


class BatchNormAct3d(BatchNormActBase, nn.BatchNorm3d):
    """:class:`torch.nn.BatchNorm3d` and an activation in one op; see :class:`BatchNormAct2d`.

    Example:
        >>> BatchNormAct3d(2)(torch.ones(2, 2, 1, 1, 1)).sum().item()
        0.0
    """


class BatchNormAddAct(BatchNormActBase):
    """Batch norm, residual add and activation in one op: ``forward(input, residual)``.

    The input has any rank from [N, C]. As :class:`BatchNormAct2d`, with two more arguments:

    Args:
        drop_path: probability that a sample's branch is dropped in training (stochastic depth,
            arXiv:1603.09382). The other branches are multiplied by ``1 / (1 - drop_path)``.
        scale_by_keep: False leaves the other branches unscaled.

    Example:
        >>> norm = BatchNormAddAct(1)
        >>> norm(torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [-5.0]]))
        tensor([[4.0000],
                [0.0000]], grad_fn=<BatchNormActBackward>)
    """

    def __init__(
        self, num_features: int, *args: Any, drop_path: float = 0.0, scale_by_keep: bool = True,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_features, *args, **kwargs)
        if not 0.0 <= drop_path <= 1.0:
            raise ValueError(f"drop_path: must be from 0 to 1, not {drop_path}")
        if drop_path:
            self.drop = DropPath(drop_path, scale_by_keep)

    def forward(self, input: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        if _scripting():
            return self._scripted(input, residual)
        return self._fused(input, residual)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


# Ranks of the inputs. No subclasses: they may change any part of the forward.
_RANKS: dict[type, Container[int]] = {
    BatchNormAct1d: (2, 3), BatchNormAct2d: (4,), BatchNormAct3d: (5,),
    BatchNormAddAct: range(2, 65), nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
}  # fmt: skip
# torch's norms, and the classes that do their work with an activation.
OURS: dict[type, type[BatchNormActBase]] = {
    nn.BatchNorm1d: BatchNormAct1d, nn.BatchNorm2d: BatchNormAct2d, nn.BatchNorm3d: BatchNormAct3d,
}  # fmt: skip
