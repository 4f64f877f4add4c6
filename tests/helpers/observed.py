"""Tensors that a call saves for backward, and operators that compilers see of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def saved_by(run: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
    """The output, and the saved tensors in the order in which they are saved."""
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = run()
    return output, saved


def saved_bytes(run: Callable[[], Any], but: tuple[Tensor, ...] = ()) -> dict[int, int]:
    """Bytes of the saved storages by address, without those of some tensors."""
    alive, saved = saved_by(run)  # an output that is freed would leave its address to another
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    for t in but:
        storages.pop(t.untyped_storage().data_ptr(), None)
    del alive
    return storages


READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")


class Counted(TorchDispatchMode):
    """The names of all operators that torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        """How often the host waits for the device."""
        return sum(name.split(".")[1] in READS for name in self.calls)


class _Model(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def compiled_plainly(function: Callable[..., Any], *arguments: Any, export: bool = True) -> Any:
    """The output of the compiled function, of which torch.compile and torch.export have seen
    operators of torch alone, in one graph."""
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    output = torch.compile(function, fullgraph=True, backend=backend)(*arguments)
    if export:
        values = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
        program = torch.export.export(_Model(function), values, strict=False)
        targets += [str(node.target) for node in program.graph.nodes]
        torch.testing.assert_close(program.module()(*values), function(*values))
    assert targets
    assert not any("fusedtrain" in target for target in targets), targets
    return output
