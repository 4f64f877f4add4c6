"""Functions that run in float16 or float32 under opt_level O1, and contexts without casts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._casts import cast
from ._state import _amp_state

F = TypeVar("F", bound=Callable[..., Any])

_registered: list[tuple[Any, str, Callable[[Any], Any]]] = []


def switch_autocast(devices: frozenset[str]) -> None:
    """Switches autocast to float16 on for these device types, as O1 does, and off for others.

    Without the cache of cast weights: cached weights would outlive steps, and weights cached under
    no_grad have no gradient.
    """
    for device in _amp_state.devices - devices:
        torch.set_autocast_enabled(device, False)
    if _amp_state.devices and not devices:
        torch.set_autocast_cache_enabled(True)
    for device in devices:
        torch.set_autocast_dtype(device, torch.float16)
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_cache_enabled(False)
    _amp_state.devices = devices


@contextmanager
def without_autocast() -> Iterator[None]:
    """Context in which functions run in the dtypes of their arguments."""
    with ExitStack() as stack:
        for device in _amp_state.devices:
            stack.enter_context(torch.autocast(device, enabled=False, cache_enabled=False))
        yield


@contextmanager
def disable_casts() -> Iterator[None]:
    """Context in which O1 casts nothing.

    Example:
        >>> import torch
        >>> from fusedtrain.apex import amp
        >>> model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
        >>> model(torch.ones(1, 2)).dtype
        torch.float16
        >>> with amp.disable_casts():
        ...     model(torch.ones(1, 2)).dtype
        torch.float32
        >>> model = amp.initialize(model, enabled=False)  # no casts from here on
    """
    _amp_state.casts_disabled += 1
    try:
        with without_autocast():
            yield
    finally:
        _amp_state.casts_disabled -= 1


def _wrapped(fn: F, dtype: torch.dtype | None, autocasts: bool = True) -> F:
    """The function with arguments cast to `dtype` (None: the widest among them), under O1."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _amp_state.devices or _amp_state.casts_disabled:
            return fn(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        if dtype is None and not dtypes:
            return fn(*args, **kwargs)
        target = dtype or functools.reduce(torch.promote_types, dtypes)
        with nullcontext() if autocasts else without_autocast():
            return fn(*cast(args, target), **cast(kwargs, target))

    return wrapper  # type: ignore[return-value]


def half_function(fn: F) -> F:
    """Wraps a function: under O1 its tensors are cast to float16.

    Args:
        fn: any function; also as a decorator. Tensors in containers are cast too.

    Example:
        >>> import torch
        >>> from fusedtrain.apex import amp
        >>> product = amp.half_function(lambda a, b: a * b)
        >>> product(torch.ones(2), torch.ones(2)).dtype  # before amp.initialize, or under O2
        torch.float32
    """
    return _wrapped(fn, torch.float16)


def float_function(fn: F) -> F:
    """Wraps a function: under O1 its tensors are cast to float32, and autocast is off.

    Args:
        fn: any function; also as a decorator. Tensors in containers are cast too.

    Example:
        >>> import torch
        >>> from fusedtrain.apex import amp
        >>> model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
        >>> norm = amp.float_function(lambda x: (x @ x.T).diagonal().sum())
        >>> norm(model(torch.ones(1, 2))).dtype
        torch.float32
        >>> model = amp.initialize(model, enabled=False)  # no casts from here on
    """
    return _wrapped(fn, torch.float32, autocasts=False)


def promote_function(fn: F) -> F:
    """Wraps a function: under O1 its tensors are cast to the widest dtype among them.

    Args:
        fn: any function; also as a decorator.

    Example:
        >>> import torch
        >>> from fusedtrain.apex import amp
        >>> model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
        >>> stack = amp.promote_function(lambda a, b: (a.dtype, b.dtype))
        >>> stack(torch.ones(2), torch.ones(2, dtype=torch.float16))
        (torch.float32, torch.float32)
        >>> model = amp.initialize(model, enabled=False)  # no casts from here on
    """
    return _wrapped(fn, None)


def _register(module: Any, name: str, decorator: Callable[[Any], Any]) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    _registered.append((module, name, decorator))


def register_half_function(module: Any, name: str) -> None:
    """Applies `half_function` to ``module.name`` at the next `initialize` with O1.

    Args:
        module: a module, class or other object that holds the function.
        name: the function's name in `module`.

    Raises:
        ValueError: if `module` has no such attribute.
    """
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """As `register_half_function`, with `float_function`."""
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """As `register_half_function`, with `promote_function`."""
    _register(module, name, promote_function)


def wrap_registered() -> None:
    """Replaces the registered functions by wrapped ones."""
    for module, name, decorator in _registered:
        kept = inspect.getattr_static(module, name, None)
        if isinstance(kept, (staticmethod, classmethod)):
            setattr(module, name, type(kept)(decorator(kept.__func__)))
        else:
            setattr(module, name, decorator(getattr(module, name)))
    _registered.clear()
