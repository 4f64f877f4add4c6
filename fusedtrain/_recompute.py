"""Outputs that backward computes again instead of keeping them.

While :class:`recompute` is entered, every tensor that autograd saves passes `_Scope.pack`. Ops of
this package tag their outputs with a :class:`Recipe`: which op made it of which tensors. Where a
consumer (a convolution, say) saves a tagged output, the recipe is kept in its place, as long as all
that the op read is kept anyway: by the op itself, by another consumer, or as a recipe in its turn.
The first consumer whose backward asks computes the output again with the same kernel, the last one
lets go of it.

docs/decisions/0008-recompute.md tells what else was considered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._calls import traced

_TAG = "_fusedtrain_recipe"
# Recipes in a row that need each other: when backward comes to the last of so many residual blocks,
# it computes the outputs of all of them. The lowest peaks were at 6 (docs/decisions/0008).
LONGEST = 6

_top: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_backward_number: Callable[[], int] = torch._C._current_graph_task_id
_hooks_allowed: Callable[[], bool] = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled")  # noqa: B009


def _modified(tensor: Tensor, now: int, then: int, what: str) -> RuntimeError:
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{kind}], {what}, is at version {now}; expected version {then} instead. "
        "Write `y = y + z` for `y += z`, or leave inplace=True out, where it is used again."
    )


class _Kept(NamedTuple):
    """A tensor that autograd or a recipe keeps, and its version when it was handed over."""

    tensor: Tensor
    version: int

    def take(self, what: str = "kept for backward") -> Tensor:
        tensor, version = self
        if tensor._version != version:
            raise _modified(tensor, tensor._version, version, what)
        return tensor


class Recipe:
    """How an output is computed again: `function(*tensors, *constants)`."""

    __slots__ = (
        "__weakref__", "_constants", "_function", "_ingredients", "_left", "_stream", "_task",
        "_value", "depth", "saved",
    )  # fmt: skip

    def __init__(
        self,
        function: Callable[..., Tensor],
        ingredients: list[_Kept | Recipe | _View | None],
        constants: tuple[Any, ...],
    ) -> None:
        self._function, self._ingredients, self._constants = function, ingredients, constants
        self.depth: int = 1 + max(
            (i.depth for i in ingredients if isinstance(i, Recipe | _View)), default=0
        )
        self.saved = 0  # by so many consumers
        self._task, self._left = -1, 0  # of which backward, and who has not asked in it
        self._value: Tensor | None = None
        self._stream: Any = None  # on which it was computed

    def value(self) -> Tensor:
        """Computed at most once in a backward, while there are consumers who have not asked."""
        task = _backward_number()
        if task != self._task:
            self._task, self._left, self._value = task, self.saved, None
        if self._value is not None and self._stream == _stream_of(self._value):
            return self._value
        found = self._compute()
        # Another stream would have to wait for this one: it computes the output for itself.
        if task != -1 and self._left > 0 and self._value is None:
            self._value, self._stream = found, _stream_of(found)
            _forget_after(task, self)
        return found

    def asked(self) -> Tensor:
        """The value for one of the consumers, which asks for the first time in this backward."""
        found = self.value()
        self._left -= 1
        if self._left <= 0:
            self._value = None
        return found

    def forget(self) -> None:
        self._value, self._task = None, -1

    def _compute(self) -> Tensor:
        tensors = [
            i.take("which an output is computed again from") if isinstance(i, _Kept)
            else i if i is None else i.value()
            for i in self._ingredients
        ]  # fmt: skip
        with torch.no_grad():
            return self._function(*tensors, *self._constants)

    def kept(self) -> list[Tensor]:
        """The tensors that it keeps alive."""
        found = []
        for ingredient in self._ingredients:
            if isinstance(ingredient, Recipe | _View):
                found += ingredient.kept()
            elif ingredient is not None:
                found.append(ingredient.tensor)
        return found


class _View:
    """A view of an output that has a recipe, where another output is made of it."""

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
    """Recipes with a value that a backward is to drop if consumers never ask for it. Only that
    backward holds it: it goes with it, also where that raises and calls nobody back."""

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
        torch.autograd.Variable._execution_engine.queue_callback(pending.forget)
    pending.recipes.append(weakref.ref(recipe))


class _Tag:
    """What hangs on an output while the scope lasts. It does not outlive pickle and deepcopy."""

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
    """A recipe in the place of a saved tensor; with sizes where that is a view of the output."""

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
            raise _modified(output, now, self._version, "the output of a fused op")
        task = _backward_number()
        first = task != -1 and task != self._task
        self._task = task
        value = self.recipe.asked() if first else self.recipe.value()
        return value if self._view is None else value.as_strided(*self._view)


def _unpack(packed: _Kept | _Use) -> Tensor:
    return packed.take()


Observer = Callable[[Tensor, "Recipe | None"], None]


class _Scope:
    """One stay inside of :class:`recompute`."""

    def __init__(self, observer: Observer | None = None) -> None:
        self._tags: list[weakref.ref[_Tag]] = []
        self._plain: set[int] = set()  # addresses of what is kept as it is
        self._observer = observer

    def pack(self, tensor: Tensor) -> _Kept | _Use:
        found = tagged(tensor)
        if found is not None:
            tag, output = found
            assert tag.recipe is not None
            if self._observer is not None:
                self._observer(tensor, tag.recipe)
            return _Use(tag.recipe, tag, output, tensor)
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            self._plain.add(tensor.data_ptr())
        if self._observer is not None:
            self._observer(tensor, None)
        # Not the tensor itself: as an output it would keep the node alive that keeps it.
        return _Kept(tensor.detach(), tensor._version)

    def tag(
        self,
        output: Tensor,
        function: Callable[..., Tensor],
        tensors: Sequence[Tensor | None],
        constants: tuple[Any, ...] = (),
        dropped: Sequence[Tensor | None] = (),
    ) -> None:
        """Notes that `output` is `function(*tensors, *constants)`.

        `dropped` are those among the tensors that are large and that the op does not save itself:
        these must be recipes or have been saved already, else nothing would be gained.
        """
        lost = {id(tensor) for tensor in dropped}
        ingredients: list[_Kept | Recipe | _View | None] = []
        for tensor in tensors:
            if tensor is None:
                ingredients.append(None)
                continue
            found = tagged(tensor)
            if found is not None:
                recipe, of = found[0].recipe, found[1]
                assert recipe is not None
                ingredients.append(recipe if of is tensor else _View(recipe, tensor))
            elif id(tensor) not in lost or tensor.data_ptr() in self._plain:
                ingredients.append(_Kept(tensor.detach(), tensor._version))
            else:
                return
        made = Recipe(function, ingredients, constants)
        if made.depth > LONGEST:
            return
        new = _Tag(made, output._version)
        setattr(output, _TAG, new)
        self._tags.append(weakref.ref(new))

    def close(self) -> None:
        """Nothing is packed from here on: outputs that live on need not keep their recipes."""
        for ref in self._tags:
            tag = ref()
            if tag is not None:
                tag.recipe = None


def tagged(tensor: Tensor) -> tuple[_Tag, Tensor] | None:
    """The tag of a tensor, or of the output that it is a view of, and that output; None where there
    is no recipe, or where the output has been modified since."""
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
    """The scope to which what is saved now goes; None where there is none, or where hooks of
    somebody else (torch.utils.checkpoint, save_on_cpu) come first."""
    top = _top(True)
    if top is None:
        return None
    owner = getattr(top[0], "__self__", None)
    return owner if type(owner) is _Scope else None


class recompute:
    """Context in which outputs of fusedtrain's ops are computed again in backward, not kept.

    Eager PyTorch keeps the input of a batch norm for its backward and the output for the next
    convolution's. The output follows from the input, so within this context the convolution keeps a
    note how to compute it, and backward does so, once, with the same kernel: bit for bit the same
    gradients, in less memory. This holds for batch norms with what they apply, activations, gated
    products and all other ops of this package that keep their input, for every consumer that saves
    an output or a view of it, for several consumers, higher derivatives and accumulated gradients.
    An output of which nothing that it was made of is kept is kept itself.

    Enter it around the forward pass; backward may run inside or outside. It is reusable, may be
    nested, and steps aside under torch.compile, torch.func transforms, and where other
    saved-tensor hooks are installed (torch.utils.checkpoint, torch.autograd.graph.save_on_cpu):
    these decide what becomes of a tensor then. `fusedtrain.convert(model, memory="recompute")`
    enters it in the model's forward.

    Backward raises RuntimeError, as without it, if a tensor that it needs has been modified in
    place; tensors that an output is computed from count among these. Changes by way of `.data` go
    unnoticed, as anywhere. torch refuses torch.func transforms that begin within it.

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
    if traced() or not _hooks_allowed():
        return None
    top, observer = _top(True), None
    if top is not None:
        account = getattr(top[0], "__self__", None)
        if type(account) is not _Account:
            return None
        observer = account.observer
    made = _Scope(observer)
    torch._C._autograd._push_saved_tensors_default_hooks(made.pack, _unpack)
    return made


def _leave(entered: _Scope) -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()
    entered.close()


class _Account:
    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def pack(self, tensor: Tensor) -> _Kept:
        self.observer(tensor, None)
        return _Kept(tensor.detach(), tensor._version)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Calls `observer(tensor, recipe)` for all that autograd saves; `recipe` is None where the
    tensor itself is kept. Other than saved-tensor hooks it does not keep `recompute` off."""
    account = _Account(observer)
    with torch.autograd.graph.saved_tensors_hooks(account.pack, _unpack):
        yield
