"""Apex's entry to mixed precision: ``amp.initialize`` and its companions."""

from __future__ import annotations

from functools import partial
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ._casts import cast_model, convert_network, save_in_float32
from ._functions import disable_casts, switch_autocast, wrap_registered
from ._gradients import ScaledGradients
from ._loss_scaler import LossScaler
from ._masters import HALF_DTYPES
from ._options import BRIEFS, Options, choose
from ._scale_loss import tell_overflows
from ._state import _amp_state, say


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepares models and optimizers for mixed precision, as Apex's ``amp.initialize`` did.

    ========  ===============================================  ==========
    level     model                                            loss scale
    ========  ===============================================  ==========
    ``"O0"``  float32                                          1
    ``"O1"``  float32, functions autocast to float16           dynamic
    ``"O2"``  float16, float32 batch norms and masters          dynamic
    ``"O3"``  float16                                          1
    ========  ===============================================  ==========

    O1 switches torch.autocast on for the calling thread, for the device types of the models, and
    leaves it on. Under the other levels models cast their inputs and return float32. Under O2 the
    optimizers' ``param_groups`` hold the masters. The models' ``state_dict`` is float32 and holds
    the masters' values; loading one sets the masters.

    Args:
        models: a model with float32 parameters, not yet in DistributedDataParallel, or a list.
        optimizers: an optimizer of torch.optim, fusedtrain.optim or the like, a list, or None.
        enabled: False makes this function return its arguments, and `scale_loss` the loss.
        opt_level: see above. The options below override parts of the level, where not None.
        cast_model_type: dtype of the model, not under O1.
        patch_torch_functions: whether autocast is on; True under O1 only.
        keep_batchnorm_fp32: whether batch norms stay float32; also "True" or "False".
        master_weights: whether 16-bit parameters have float32 masters; not under O1.
        loss_scale: a number, or "dynamic"; also as a string.
        cast_model_outputs: dtype of the models' outputs.
        num_losses: number of loss scales; see `scale_loss`.
        verbosity: 0 for no output.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale.

    Returns:
        Models and optimizers, each in its form: one, or a list. Without optimizers the models.

    Raises:
        TypeError: for models and optimizers that are neither one nor a list of them.
        RuntimeError: for an unknown level, options that contradict it, models that are already
            wrapped or not float32, optimizers of an earlier call. Nothing is modified.

    Example:
        >>> import torch
        >>> from fusedtrain.apex import amp
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> [p.dtype for p in model.parameters()][1:3]
        [torch.float16, torch.float32]
        >>> {p.dtype for p in amp.master_params(optimizer)}
        {torch.float32}
    """
    if not enabled:
        _amp_state.opt_properties, _amp_state.loss_scalers = Options(), []
        _amp_state.initialized, _amp_state.verbosity = True, verbosity
        switch_autocast(frozenset())
        return models if optimizers is None else (models, optimizers)
    options = choose(
        opt_level,
        {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
        },
    )
    outputs = cast_model_outputs
    if outputs is not None and not (isinstance(outputs, torch.dtype) and outputs.is_floating_point):
        raise TypeError(f"cast_model_outputs must be a floating-point dtype, got {outputs!r}")
    if num_losses < 1:
        raise ValueError(f"num_losses must be at least 1, got {num_losses}")
    scalers = [
        LossScaler(options.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]
    some_models = models if isinstance(models, list) else [models]
    if not all(isinstance(model, nn.Module) for model in some_models):
        raise TypeError("models must be either a single model or a list of models.")
    some_optimizers = [] if optimizers is None else _optimizers(optimizers)
    _check_models(some_models)
    _check_optimizers(some_optimizers)

    _amp_state.verbosity = verbosity
    _tell(options)
    _amp_state.opt_properties, _amp_state.loss_scalers = options, scalers
    _amp_state.initialized = True
    # Masters start from the values before rounding. `p.data` copies nothing, and does not share
    # its version counter with p, as p.detach() would.
    values = {
        id(p): p.data
        for optimizer in some_optimizers
        for group in optimizer.param_groups
        for p in (group["params"] if options.master_weights else ())
    }
    for model in some_models:
        _prepare_model(model, options, cast_model_outputs)
    for optimizer in some_optimizers:
        _prepare_optimizer(optimizer, bool(options.master_weights), values)
    devices = {p.device.type for model in some_models for p in model.parameters()}
    switch_autocast(frozenset(devices) if options.patch_torch_functions else frozenset())
    if options.patch_torch_functions:
        wrap_registered()
    return models if optimizers is None else (models, optimizers)


def master_params(optimizer: Any) -> Any:
    """The parameters that an optimizer steps: float32 masters under O2, else the model's.

    Their gradients are unscaled: clip these.

    Args:
        optimizer: one that `initialize` has returned.

    Example:
        >>> import torch
        >>> from fusedtrain.apex import amp
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> with amp.scale_loss(model(torch.ones(1, 2)).mean(), optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm=1.0)
        tensor(1.2247)
    """
    gradients = getattr(optimizer, "_amp_stash", None)
    if gradients is not None:
        gradients.follow_parameters()
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The loss scales, and the backward passes since each overflowed, in Apex's format.

    Args:
        destination: a dictionary to write to.
    """
    destination = {} if destination is None else destination
    for i, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{i}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
    return destination


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Loads the result of `state_dict`, or of Apex's, after `initialize`.

    Args:
        state_dict: if the numbers of loss scales differ, the first ones are loaded.

    Raises:
        RuntimeError: for keys that are not loss scales. Nothing is modified.
    """
    unexpected = [key for key in state_dict if "loss_scaler" not in key]
    if unexpected:
        names = ", ".join(f'"{key}"' for key in unexpected)
        raise RuntimeError(
            f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {names}."
        )
    scalers = _amp_state.loss_scalers
    if len(state_dict) != len(scalers):
        say(
            f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} "
            "loss_scalers are used"
        )
    for scaler, saved in zip(scalers, state_dict.values()):
        scaler.restart(float(saved["loss_scale"]), int(saved["unskipped"]))


# --- checks of the arguments


def _optimizers(optimizers: Any) -> list[Any]:
    some = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in some:
        if getattr(type(optimizer), "_scales_losses", False):
            raise RuntimeError(
                "An incoming optimizer is an instance of FP16_Optimizer. The optimizer(s) passed "
                "to amp.initialize() must be ordinary PyTorch optimizers or fusedtrain's."
            )
        if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
            raise TypeError("optimizers must be either a single optimizer or a list of optimizers.")
    return some


def _check_models(models: list[nn.Module]) -> None:
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for model in models:
        if isinstance(model, wrappers):
            kind = type(model)
            raise RuntimeError(
                f"Incoming model is an instance of {kind.__module__}.{kind.__qualname__}. Parallel "
                "wrappers should only be applied to the model(s) AFTER the model(s) have been "
                "returned from amp.initialize."
            )
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dtype in HALF_DTYPES:
                raise RuntimeError(
                    f"Found {name} of dtype {tensor.dtype}, expected torch.float32. When using "
                    "amp.initialize, you do not need to call .half() on your model before passing "
                    "it, no matter what optimization level you choose."
                )


def _check_optimizers(optimizers: list[Any]) -> None:
    owner: dict[int, Any] = {}
    for i, optimizer in enumerate(optimizers):
        if hasattr(optimizer, "_amp_stash") or any(map(partial(is_, optimizer), optimizers[:i])):
            raise RuntimeError(
                "A given optimizer should only be passed through amp.initialize once: make a new "
                "one for the parameters as they are now."
            )
        if getattr(optimizer, "_release", None) is not None:
            raise RuntimeError(
                "amp.initialize: the optimizer releases gradients within backward, and amp reads "
                "all of them after it. remove() the handle of release_gradients first"
            )
        for group in optimizer.param_groups:
            for p in group["params"]:
                if owner.setdefault(id(p), optimizer) is not optimizer:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(p.shape)} is in two of the optimizers: its "
                        "gradient would be unscaled twice"
                    )


def _tell(options: Options) -> None:
    say(f"Selected optimization level {options.opt_level}: {BRIEFS[str(options.opt_level)]}", True)
    for name, value in options.options.items():
        say(f"{name:22} : {value}", True)


# --- changes to models and optimizers


def _prepare_model(model: nn.Module, options: Options, outputs: torch.dtype | None) -> None:
    dtype = options.cast_model_type
    if dtype is None:
        cast_model(model, None, outputs)
        return
    if options.keep_batchnorm_fp32:
        convert_network(model, dtype)
    else:
        model.to(dtype)
    cast_model(model, dtype, torch.float32 if outputs is None else outputs)
    if dtype in HALF_DTYPES:
        save_in_float32(model)


def _prepare_optimizer(optimizer: Any, with_masters: bool, values: dict[int, Tensor]) -> None:
    gradients = ScaledGradients(optimizer, with_masters, values=values)
    optimizer._amp_stash = gradients
    old_step, old_zero_grad = optimizer.step, optimizer.zero_grad
    old_add_param_group = optimizer.add_param_group

    def step(self: Any, closure: Any = None) -> Any:
        tell_overflows()
        with disable_casts():
            return gradients.step(old_step, closure)

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        with gradients.zeroing():
            old_zero_grad(*args, **kwargs)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        old_add_param_group(param_group)
        try:
            gradients.add(optimizer.param_groups[-1])
        except RuntimeError:
            del optimizer.param_groups[-1]
            raise

    optimizer.step = MethodType(step, optimizer)
    optimizer.zero_grad = MethodType(zero_grad, optimizer)
    optimizer.add_param_group = MethodType(add_param_group, optimizer)
