"""The memory that autograd keeps for backward: storages, each counted once, by owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .._recompute import Recipe, observed
from .._torch_private import pytree

# The owner of the storage at an address, by its owner so far, which is None at first, and by the
# recipe that keeps the storage.
Owner = Callable[[int, Any, Recipe | None], Any]


def address_of(tensor: Tensor) -> int:
    """Storage address; 0 if unknown."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass, or of another layout
        return 0


def bytes_of(tree: Any) -> int:
    """Bytes of the storages of the tree's tensors, each once."""
    tensors = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    sizes = {address: t.untyped_storage().nbytes() for t in tensors if (address := address_of(t))}
    return sum(sizes.values())


@contextmanager
def counted_bytes(besides: Iterable[Tensor], owner: Owner) -> Iterator[Counter[Any]]:
    """Counts by owner, when the context ends, the bytes that calls within keep for backward. Those
    of the tensors `besides` do not count: parameters, buffers, inputs."""
    excluded = {0, *map(address_of, besides)}
    storages: dict[int, tuple[Any, int]] = {}
    sizes: Counter[Any] = Counter()

    def observe(tensor: Tensor, recipe: Recipe | None) -> None:
        for one in (tensor,) if recipe is None else recipe.kept():
            address = address_of(one)
            if address not in excluded:
                before = storages[address][0] if address in storages else None
                storages[address] = (owner(address, before, recipe), one.untyped_storage().nbytes())

    with observed(observe):
        yield sizes
    for key, size in storages.values():
        sizes[key] += size


def kept_bytes(call: Callable[[], object], besides: Iterable[Tensor] = ()) -> int:
    """Bytes that a call keeps for backward, but for those of the tensors `besides`."""
    with counted_bytes(besides, lambda *_: None) as sizes:
        call()
    return sizes.total()
