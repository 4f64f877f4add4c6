"""Recipes of outputs, and the scope that hands them to autograd in the place of saved tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch_private import after_backward, backward_number, disable_dynamo, gather_again

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
        "__weakref__", "_computed", "_constants", "_function", "_ingredients", "_left", "_stream",
        "_task", "_value", "depth", "uses",
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
        # Consumers that saved the output, and recipes with consumers that compute from the output.
        self.uses = 0
        self._task, self._left = -1, 0  # the running backward, and its uses yet to come
        self._computed = -1  # the backward that computed the output last
        self._value: Tensor | None = None
        self._stream: Any = None  # the stream that computed the value

    def use(self) -> None:
        """Notes one more use."""
        self.uses += 1
        if self.uses == 1:
            for ingredient in self._ingredients:
                if isinstance(ingredient, Recipe | _View):
                    ingredient.use()

    def value(self) -> Tensor:
        """The output, computed at most once in a backward while some uses have yet to come."""
        task = backward_number()
        if task != self._task:
            self._task, self._left, self._value = task, self.uses, None
        if self._value is not None and self._stream == _stream_of(self._value):
            return self._value
        output = self._compute()
        # A consumer on another stream would have to wait: it recomputes the output for itself.
        if task != -1 and self._left > 0 and self._value is None:
            self._value, self._stream = output, _stream_of(output)
            _forget_after(task, self)
        return output

    def asked(self) -> Tensor:
        """The value, for a use that asks for the first time in this backward."""
        output = self.value()
        self._left -= 1
        if self._left <= 0:
            self._value = None
        return output

    def forget(self) -> None:
        self._value, self._task = None, -1

    def _compute(self) -> Tensor:
        task = backward_number()
        first = task != -1 and task != self._computed
        self._computed = task
        tensors = [
            i.take("an input of a recomputed output") if isinstance(i, Saved)
            else i if i is None else i.asked() if first else i.value()
            for i in self._ingredients
        ]  # fmt: skip
        for tensor in tensors:
            if tensor is not None and not tensor.data_ptr() and tensor.numel():
                gather_again(tensor)
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

    def use(self) -> None:
        self._recipe.use()

    def value(self) -> Tensor:
        return self._recipe.value().as_strided(*self._geometry)

    def asked(self) -> Tensor:
        return self._recipe.asked().as_strided(*self._geometry)

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


class Tag:
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


class Use:
    """A recipe in place of a saved tensor; `_view` is the geometry if that is a view."""

    __slots__ = ("_shape", "_task", "_version", "_view", "_witness", "recipe")

    def __init__(self, recipe: Recipe, tag: Tag, output: Tensor, saved: Tensor) -> None:
        self.recipe = recipe
        self._witness, self._version = tag.witness(output), tag.version
        self._shape = output.shape
        self._view = None
        if saved is not output:
            self._view = (saved.shape, saved.stride(), saved.storage_offset())
        self._task = -1
        recipe.use()

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


def unpack(packed: Saved | Use) -> Tensor:
    if torch.compiler.is_compiling():
        value: Tensor = _take_outside_of_graphs(packed)
        return value
    return packed.take()


Observer = Callable[[Tensor, "Recipe | None"], None]


Marked = tuple["weakref.ref[Tag]", "weakref.ref[Tensor]"]


class Scope:
    """The state of one entered `recompute`."""

    longest = LONGEST
    sees_torch = False  # whether it is handed calls of torch's functions, too

    def __init__(self, observer: Observer | None = None) -> None:
        self._tags: list[Marked] = []
        self._plain: set[int] = set()  # addresses of tensors that are kept without a recipe
        self._observer = observer

    def pack(self, tensor: Tensor) -> Saved | Use:
        source = tagged(tensor)
        if source is not None:
            tag, output = source
            assert tag.recipe is not None
            if self._observer is not None:
                self._observer(tensor, tag.recipe)
            return Use(tag.recipe, tag, output, tensor)
        self._note_saved(tensor)
        if self._observer is not None:
            self._observer(tensor, None)
        return Saved.of(tensor)

    def _note_saved(self, tensor: Tensor) -> None:
        if type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided:
            self._plain.add(tensor.data_ptr())

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
        if made.depth > self.longest:
            return
        self._tags.append(mark(output, made))

    def close(self) -> None:
        """Drops the recipes of living outputs: after the scope nothing is packed."""
        for tag_ref, output_ref in self._tags:
            tag, output = tag_ref(), output_ref()
            if tag is not None:
                tag.recipe = None
            if output is not None and getattr(output, _TAG, None) is tag:
                vars(output).pop(_TAG, None)


# A copy of so small a part of the output costs next to nothing: a bias, a mask, an embedding.
_SMALL = 1 / 8


def lasting(
    tensors: Sequence[Tensor | None], output: Tensor, saved: Container[int]
) -> list[Tensor | None] | None:
    """The inputs of a function of torch, for a recipe. Autograd watches those that it has saved (by
    address) and raises if they are modified. Modifying the others is no mistake: small ones are
    copied; None if there is a large one, such as a buffer that is added."""
    kept: list[Tensor | None] = []
    for t in tensors:
        if t is not None and t.grad_fn is None and t.data_ptr() not in saved and tagged(t) is None:
            if t.nbytes <= _SMALL * output.nbytes:
                t = t.detach().clone()
            elif not t.requires_grad:
                return None
        kept.append(t)
    return kept


def mark(output: Tensor, recipe: Any) -> Marked:
    """Tags an output with its recipe."""
    tag = Tag(recipe, output._version)
    setattr(output, _TAG, tag)
    return weakref.ref(tag), weakref.ref(output)


def tagged(tensor: Tensor) -> tuple[Tag, Tensor] | None:
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
