"""Recipes of outputs, and the scope that hands them to autograd in the place of saved tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch_private import (
    after_backward,
    backward_number,
    disable_dynamo,
    gather_again,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
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
            after_backward(_Forget(self, task))
        return output

    def asked(self) -> Tensor:
        """The value, for a use that asks for the first time in this backward."""
        output = self.value()
        self._left -= 1
        if self._left <= 0:
            self._value = None
        return output

    def forget(self, task: int) -> None:
        """Drops the value that was computed in this backward."""
        if task == self._task:
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


class _Forget:
    """Drops the value of a recipe if some consumer never asks. Only a backward holds this object,
    and frees it at its end, even if it raises and makes no callback."""

    def __init__(self, recipe: Recipe, task: int) -> None:
        self._recipe, self._task = weakref.ref(recipe), task

    def __call__(self) -> None:
        recipe = self._recipe()
        if recipe is not None:
            recipe.forget(self._task)

    __del__ = __call__


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

    def source(self, output: Tensor, tensor: Tensor) -> Recipe | _View:
        """The recipe of a tensor that is the output or a view of it."""
        assert self.recipe is not None
        return self.recipe if tensor is output else _View(self.recipe, tensor)

    def __reduce__(self) -> Any:
        return type(None), ()


class Use:
    """A recipe in place of a saved tensor: the output, or a view of it."""

    __slots__ = ("_shape", "_source", "_task", "_version", "_witness")

    def __init__(self, tag: Tag, output: Tensor, saved: Tensor) -> None:
        self._source = tag.source(output, saved)
        self._witness, self._version = tag.witness(output), tag.version
        self._shape = output.shape
        self._task = -1
        self._source.use()

    def take(self) -> Tensor:
        now = self._witness._version
        if now != self._version:
            output = self._witness.new_empty(self._shape, device="meta")
            _refuse_modified(output, now, self._version, "the output of a fused op")
        task = backward_number()
        first = task != -1 and task != self._task
        self._task = task
        return self._source.asked() if first else self._source.value()


# Compiled autograd traces this hook; there, no backward has a number, and no value is kept.
_take_outside_of_graphs = disable_dynamo(lambda packed: packed.take())


def unpack(packed: Saved | Use) -> Tensor:
    if torch.compiler.is_compiling():
        value: Tensor = _take_outside_of_graphs(packed)
        return value
    return packed.take()


Observer = Callable[[Tensor, Recipe | None], None]


class Scope:
    """The state of one entered `recompute`: entered, autograd hands over the tensors it saves."""

    longest = LONGEST
    sees_torch = False  # whether it is handed calls of torch's functions, too
    unpack: Callable[..., Tensor] = staticmethod(unpack)

    def __init__(self, observer: Observer | None = None) -> None:
        self._tags: list[tuple[weakref.ref[Tag], weakref.ref[Tensor]]] = []
        self._plain: set[int] = set()  # addresses of tensors that are kept without a recipe
        self._observer = observer

    def __enter__(self) -> None:
        push_saved_tensors_hooks(self.pack, self.unpack)

    def __exit__(self, *error: Any) -> None:
        """Drops the recipes of living outputs: after the scope nothing is packed."""
        pop_saved_tensors_hooks()
        for tag_ref, output_ref in self._tags:
            tag, output = tag_ref(), output_ref()
            if tag is not None:
                tag.recipe = None
            if output is not None and getattr(output, _TAG, None) is tag:
                vars(output).pop(_TAG, None)

    def pack(self, tensor: Tensor) -> Saved | Use:
        source = tagged(tensor)
        if source is not None:
            if self._observer is not None:
                self._observer(tensor, source[0].recipe)
            return Use(*source, tensor)
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
                ingredients.append(source[0].source(source[1], tensor))
            elif id(tensor) not in lost or tensor.data_ptr() in self._plain:
                ingredients.append(Saved.of(tensor))
            else:
                return
        made = Recipe(function, ingredients, constants)
        if made.depth > self.longest:
            return
        self._mark(output, made)

    def _mark(self, output: Tensor, recipe: Any) -> None:
        """Tags an output with its recipe."""
        tag = Tag(recipe, output._version)
        setattr(output, _TAG, tag)
        self._tags.append((weakref.ref(tag), weakref.ref(output)))


def scope() -> Scope | None:
    """The scope that receives saved tensors now; None without a scope, while Dynamo traces, or if
    other hooks (torch.utils.checkpoint, save_on_cpu) come first."""
    if torch.compiler.is_dynamo_compiling():
        return None
    top = top_saved_tensors_hooks(True)
    if top is None:
        return None
    owner = getattr(top[0], "__self__", None)
    return owner if isinstance(owner, Scope) else None


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
