"""Outputs that backward recomputes instead of keeping them.

While :class:`recompute` is entered, every tensor that autograd saves passes `_Scope.pack`. Ops of
this package tag each output with a :class:`Recipe`: the op and its input tensors. If a consumer (a
convolution, say) saves a tagged output, the recipe is kept in its place. All inputs of the op must
be kept anyway: by the op itself, by another consumer, or as recipes. The first consumer whose
backward asks for the output recomputes it with the same kernel; the last consumer drops it.

docs/decisions/0008-recompute.md lists the alternatives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ._calls import traced
from ._torch_private import (
    after_backward,
    backward_number,
    disable_dynamo,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks_allowed,
    top_saved_tensors_hooks,
)

_TAG = "_fusedtrain_recipe"
# Longest chain of recipes: backward of the last of so many residual blocks recomputes the outputs
# of all of them. A length of 6 had the lowest peaks (docs/decisions/0008).
LONGEST = 6


def _refuse_modified(tensor: Tensor, now: int, then: int, what: str) -> NoReturn:
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    raise RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{kind}], {what}, is at version {now}; expected version {then} instead. "
        "If the tensor is used again, write `y = y + z` for `y += z`, or leave out inplace=True."
    )


class Saved(NamedTuple):
    """A tensor that autograd or a recipe keeps, and its version at that time."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Saved:
        # Detached: a node that keeps its own output would keep itself alive. Autograd attaches the
        # graph again when it unpacks.
        return cls(tensor.detach(), tensor._version)

    def take(self, what: str = "kept for backward") -> Tensor:
        tensor, version = self
        if tensor._version != version:
            _refuse_modified(tensor, tensor._version, version, what)
        return tensor


class Recipe:
    """How an output is recomputed: `function(*tensors, *constants)`."""

    __slots__ = (
        "__weakref__", "_constants", "_function", "_ingredients", "_left", "_stream", "_task",
        "_value", "depth", "saved",
    )  # fmt: skip

    def __init__(
        self,
        function: Callable[..., Tensor],
        ingredients: list[Saved | Recipe | _View | None],
        constants: tuple[Any, ...],
    ) -> None:
        self._function, self._ingredients, self._constants = function, ingredients, constants
        self.depth: int = 1 + max(
            (i.depth for i in ingredients if isinstance(i, Recipe | _View)), default=0
        )
        self.saved = 0  # number of consumers that saved the output
        self._task, self._left = -1, 0  # the running backward, and its consumers yet to ask
        self._value: Tensor | None = None
        self._stream: Any = None  # the stream that computed the value

    def value(self) -> Tensor:
        """The output, computed at most once in a backward while some consumers have not asked."""
        task = backward_number()
        if task != self._task:
            self._task, self._left, self._value = task, self.saved, None
        if self._value is not None and self._stream == _stream_of(self._value):
            return self._value
        output = self._compute()
        # A consumer on another stream would have to wait: it recomputes the output for itself.
        if task != -1 and self._left > 0 and self._value is None:
            self._value, self._stream = output, _stream_of(output)
            _forget_after(task, self)
        return output

    def asked(self) -> Tensor:
        """The value, for a consumer that asks for the first time in this backward."""
        output = self.value()
        self._left -= 1
        if self._left <= 0:
            self._value = None
        return output

    def forget(self) -> None:
        self._value, self._task = None, -1

    def _compute(self) -> Tensor:
        tensors = [
            i.take("an input of a recomputed output") if isinstance(i, Saved)
            else i if i is None else i.value()
            for i in self._ingredients
        ]  # fmt: skip
        with torch.no_grad():
            return self._function(*tensors, *self._constants)

    def kept(self) -> list[Tensor]:
        """The tensors that the recipe keeps alive."""
        tensors = []
        for ingredient in self._ingredients:
            if isinstance(ingredient, Recipe | _View):
                tensors += ingredient.kept()
            elif ingredient is not None:
                tensors.append(ingredient.tensor)
        return tensors


class _View:
    """A view of an output with a recipe; the view is an input of another recipe."""

    __slots__ = ("_geometry", "_recipe", "depth")

    def __init__(self, recipe: Recipe, view: Tensor) -> None:
        self._recipe, self.depth = recipe, recipe.depth
        self._geometry = (view.shape, view.stride(), view.storage_offset())

    def value(self) -> Tensor:
        return self._recipe.value().as_strided(*self._geometry)

    def kept(self) -> list[Tensor]:
        return self._recipe.kept()


def _stream_of(tensor: Tensor) -> Any:
    """The current stream of a tensor's device; None on the CPU."""
    index = tensor.get_device()
    return None if index < 0 else torch.accelerator.current_stream(index)


class _Pending:
    """Recipes whose values a backward must drop if some consumer never asks. Only that backward
    holds this object, and frees it at its end, even if it raises and makes no callback."""

    def __init__(self) -> None:
        self.recipes: list[weakref.ref[Recipe]] = []

    def forget(self) -> None:
        for ref in self.recipes:
            one = ref()
            if one is not None:
                one.forget()
        self.recipes.clear()

    __del__ = forget


_pending: weakref.WeakValueDictionary[int, _Pending] = weakref.WeakValueDictionary()


def _forget_after(task: int, recipe: Recipe) -> None:
    pending = _pending.get(task)
    if pending is None:
        pending = _pending[task] = _Pending()
        after_backward(pending.forget)
    pending.recipes.append(weakref.ref(recipe))


class _Tag:
    """The mark on an output while the scope lasts. Pickle and deepcopy drop it."""

    __slots__ = ("__weakref__", "_witness", "recipe", "version")

    def __init__(self, recipe: Recipe, version: int) -> None:
        self.recipe: Recipe | None = recipe
        self.version = version
        self._witness: Tensor | None = None

    def witness(self, output: Tensor) -> Tensor:
        """A tensor without elements that shares the version counter of the output."""
        if self._witness is None:
            self._witness = output.detach()
            self._witness.data = output.new_empty(0)
        return self._witness

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    return None


class _Use:
    """A recipe in place of a saved tensor; `_view` is the geometry if that is a view."""

    __slots__ = ("_shape", "_task", "_version", "_view", "_witness", "recipe")

    def __init__(self, recipe: Recipe, tag: _Tag, output: Tensor, saved: Tensor) -> None:
        self.recipe = recipe
        self._witness, self._version = tag.witness(output), tag.version
        self._shape = output.shape
        self._view = None
        if saved is not output:
            self._view = (saved.shape, saved.stride(), saved.storage_offset())
        self._task = -1
        recipe.saved += 1

    def take(self) -> Tensor:
        now = self._witness._version
        if now != self._version:
            output = self._witness.new_empty(self._shape, device="meta")
            _refuse_modified(output, now, self._version, "the output of a fused op")
        task = backward_number()
        first = task != -1 and task != self._task
        self._task = task
        value = self.recipe.asked() if first else self.recipe.value()
        return value if self._view is None else value.as_strided(*self._view)


# Compiled autograd traces this hook; there, no backward has a number, and no value is kept.
_take_outside_of_graphs = disable_dynamo(lambda packed: packed.take())


def _unpack(packed: Saved | _Use) -> Tensor:
    if torch.compiler.is_compiling():
        value: Tensor = _take_outside_of_graphs(packed)
        return value
    return packed.take()


Observer = Callable[[Tensor, "Recipe | None"], None]


class _Scope:
    """The state of one entered :class:`recompute`."""

    def __init__(self, observer: Observer | None = None) -> None:
        self._tags: list[weakref.ref[_Tag]] = []
        self._plain: set[int] = set()  # addresses of tensors that are kept without a recipe
        self._observer = observer

    def pack(self, tensor: Tensor) -> Saved | _Use:
        source = tagged(tensor)
        if source is not None:
            tag, output = source
            assert tag.recipe is not None
            if self._observer is not None:
                self._observer(tensor, tag.recipe)
            return _Use(tag.recipe, tag, output, tensor)
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            self._plain.add(tensor.data_ptr())
        if self._observer is not None:
            self._observer(tensor, None)
        return Saved.of(tensor)

    def tag(
        self,
        output: Tensor,
        function: Callable[..., Tensor],
        tensors: Sequence[Tensor | None],
        constants: tuple[Any, ...] = (),
        dropped: Sequence[Tensor | None] = (),
    ) -> None:
        """Notes that `output` is `function(*tensors, *constants)`.

        `dropped`: large tensors that the op does not save itself. Each must have a recipe or be
        saved already; otherwise a recipe would save no memory.
        """
        lost = {id(tensor) for tensor in dropped}
        ingredients: list[Saved | Recipe | _View | None] = []
        for tensor in tensors:
            if tensor is None:
                ingredients.append(None)
                continue
            source = tagged(tensor)
            if source is not None:
                recipe, of = source[0].recipe, source[1]
                assert recipe is not None
                ingredients.append(recipe if of is tensor else _View(recipe, tensor))
            elif id(tensor) not in lost or tensor.data_ptr() in self._plain:
                ingredients.append(Saved.of(tensor))
            else:
                return
        made = Recipe(function, ingredients, constants)
        if made.depth > LONGEST:
            return
        new = _Tag(made, output._version)
        setattr(output, _TAG, new)
        self._tags.append(weakref.ref(new))

    def close(self) -> None:
        """Drops the recipes of living outputs: after the scope nothing is packed."""
        for ref in self._tags:
            tag = ref()
            if tag is not None:
                tag.recipe = None


def tagged(tensor: Tensor) -> tuple[_Tag, Tensor] | None:
    """The tag of a tensor or of its base, and that tagged output; None without a recipe, or if the
    output has been modified since."""
    output, tag = tensor, getattr(tensor, _TAG, None)
    if tag is None:
        base = tensor._base
        if base is None or base.dtype != tensor.dtype or tensor.is_neg() or tensor.is_conj():
            return None
        output, tag = base, getattr(base, _TAG, None)
    if tag is None or tag.recipe is None or output._version != tag.version:
        return None
    return tag, output


def scope() -> _Scope | None:
    """The scope that receives saved tensors now; None without a scope, or if other hooks
    (torch.utils.checkpoint, save_on_cpu) come first."""
    top = top_saved_tensors_hooks(True)
    if top is None:
        return None
    owner = getattr(top[0], "__self__", None)
    return owner if type(owner) is _Scope else None


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

    >>> import fusedtrain, torch
    >>> norm, conv = fusedtrain.nn.BatchNormAct2d(4), torch.nn.Conv2d(4, 4, 3)
    >>> with fusedtrain.recompute():
    ...     y = conv(norm(torch.randn(2, 4, 8, 8)))
    >>> y.sum().backward()
    """

    def __init__(self) -> None:
        self._entered: list[_Scope | None] = []

    def __enter__(self) -> recompute:
        self._entered.append(_enter())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entered = self._entered.pop()
        if entered is not None:
            _leave(entered)


def _enter() -> _Scope | None:
    if traced() or not saved_tensors_hooks_allowed():
        return None
    top, observer = top_saved_tensors_hooks(True), None
    if top is not None:
        account = getattr(top[0], "__self__", None)
        if type(account) is not _Account:
            return None
        observer = account.observer
    made = _Scope(observer)
    push_saved_tensors_hooks(made.pack, _unpack)
    return made


def _leave(entered: _Scope) -> None:
    pop_saved_tensors_hooks()
    entered.close()


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
    account = _Account(observer)
    with torch.autograd.graph.saved_tensors_hooks(account.pack, _unpack):
        yield
