"""Outputs that backward recomputes instead of keeping them: recorded, planned, replayed.

- Record: `record.py` notes the outputs of one forward and all that its backward needs.
- Plan: `simulate.py` predicts time and peak of a choice of outputs, `search.py` looks for the
  fastest choice within a budget, `plan.py` holds the result. `fusedtrain.planning` runs the model.
- Replay: `recipes.py` and `torch_calls.py` recompute outputs of fused ops and of torch's functions.

While :class:`recompute` is entered, every tensor that autograd saves passes `Scope.pack`. Ops of
this package tag each output with a :class:`Recipe`: the op and its input tensors. If a consumer (a
convolution, say) saves a tagged output, the recipe is kept in its place. All inputs of the op must
be kept anyway: by the op itself, by another consumer, or as recipes. The first consumer whose
backward asks for the output recomputes it with the same kernel; the last consumer drops it.

docs/decisions/0008-recompute.md lists the alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._calls import traced
from .._torch_private import saved_tensors_hooks_allowed, top_saved_tensors_hooks
from .plan import OP_NAMES as OP_NAMES, MemoryPlan as MemoryPlan, fingerprint as fingerprint
from .recipes import (
    LONGEST as LONGEST,
    Observer,
    Recipe as Recipe,
    Saved,
    Scope,
    scope as scope,
    tagged as tagged,
    unpack,
)
from .torch_calls import Planned, planned as planned


class recompute:
    """Context in which backward recomputes outputs of fusedtrain's ops instead of keeping them.

    Eager PyTorch keeps the input of a batch norm for its backward, and the output for the next
    convolution's. The output follows from the input. Within this context the convolution keeps a
    recipe of the output, and backward recomputes the output once with the same kernel: bit for bit
    the same gradients, in less memory. The recipes cover batch norms with their activations,
    activations, gated products, depthwise convolutions and all other ops of this package that keep
    their input. Any number of consumers may save an output or a view of it; higher derivatives and
    accumulated gradients work. If none of an output's inputs is kept, the output is.

    Enter the context around the forward pass; backward may run inside or outside. The context is
    reusable and may be nested. It does nothing under torch.compile and torch.func transforms, or
    if other saved-tensor hooks are installed (torch.utils.checkpoint,
    torch.autograd.graph.save_on_cpu). Under compiled autograd each consumer recomputes for itself.
    `fusedtrain.convert(model, memory="recompute")` enters the context in the model's forward.

    Backward raises RuntimeError, as in eager PyTorch, if a tensor that it needs has been modified
    in place; inputs of a recipe count as needed. Changes by way of `.data` go unnoticed, as
    anywhere. torch refuses torch.func transforms that begin within the context.

    Args:
        plan: of :func:`fusedtrain.plan_memory`, for the forward of the model that it was made for:
            decides for each output, and covers functions of torch, too.

    >>> import fusedtrain, torch
    >>> norm, conv = fusedtrain.nn.BatchNormAct2d(4), torch.nn.Conv2d(4, 4, 3)
    >>> with fusedtrain.recompute():
    ...     y = conv(norm(torch.randn(2, 4, 8, 8)))
    >>> y.sum().backward()
    """

    def __init__(self, plan: MemoryPlan | None = None) -> None:
        if plan is not None and not isinstance(plan, MemoryPlan):
            raise TypeError(f"plan: expected a MemoryPlan, got {type(plan).__name__}")
        self._plan = plan
        self._entered: list[Scope | None] = []

    def __enter__(self) -> recompute:
        entered = _scope_of(self._plan)
        self._entered.append(entered)
        if entered is not None:
            entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        entered = self._entered.pop()
        if entered is not None:
            entered.__exit__(*error)


def _scope_of(plan: MemoryPlan | None) -> Scope | None:
    """A scope for a forward that begins now; None if nothing can be recomputed in it."""
    if traced() or not saved_tensors_hooks_allowed():
        return None
    if plan is not None and not torch.is_grad_enabled():
        return None  # torch's own shortcuts of inference ask for modes
    top, observer = top_saved_tensors_hooks(True), None
    if top is not None:
        account = getattr(top[0], "__self__", None)
        if type(account) is not _Account:
            return None
        observer = account.observer
    return Scope(observer) if plan is None else Planned(plan, observer)


class _Account:
    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def pack(self, tensor: Tensor) -> Saved:
        self.observer(tensor, None)
        return Saved.of(tensor)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Calls `observer(tensor, recipe)` for each tensor that autograd saves; `recipe` is None if the
    tensor itself is kept. Unlike other saved-tensor hooks, it does not disable `recompute`."""
    with torch.autograd.graph.saved_tensors_hooks(_Account(observer).pack, unpack):
        yield
