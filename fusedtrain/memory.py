"""The memory that a model keeps for backward, by layer and mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._graph.compiled import original_of, without_compiled_code
from ._graph.example import arguments_of, example_for
from ._graph.hooks import observing
from ._graph.kept import address_of, counted_bytes
from ._graph.report import shown, title
from ._graph.state import duplicate, restored
from ._graph.tracer import same_generators
from ._text import column_lines
from ._torch_private import pytree
from .conversion import MEMORY, convert, revert
from .optim._distributed import local

__all__ = ["LayerMemory", "MemoryReport", "memory_report"]

_MODES = ("eager", *MEMORY)
_ROWS = 12  # of the table, and of the chart
_SMALL = 10_000_000  # bytes: models that keep less are shown in kB
# Colours of the chart differ in lightness, too.
_COLOURS = {
    "eager": "#9aa5b1", "store": "#3b6fb6", "recompute": "#e08a1e", "inplace": "#8c3b63",
    "q8": "#2f7d5b",
}  # fmt: skip


class LayerMemory(NamedTuple):
    """The bytes by mode that are kept of one module's tensors. `savers`: the modules whose ops keep
    these tensors in eager PyTorch."""

    name: str
    type: str
    bytes: dict[str, int]
    savers: tuple[str, ...]


@dataclass(repr=False)
class MemoryReport:
    """Prints as a table. `layers` are in the order of the forward, `totals` are bytes by mode.
    Storages count once; parameters, buffers and the model's inputs do not count there."""

    layers: list[LayerMemory] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)
    # Bytes of the optimizer's parameters and of each of its states, by the state's name.
    optimizer: dict[str, int] = field(default_factory=dict)
    parameters: int = 0  # elements of the optimizer's parameters

    def __repr__(self) -> str:
        totals = ", ".join(f"{mode}={size}" for mode, size in self.totals.items())
        return f"MemoryReport({totals})"

    def __str__(self) -> str:
        modes = list(self.totals)
        rows = [("", *modes), self._row("kept for backward", self.totals)]
        first = self.totals[modes[0]]
        shares = [f"{size / first:.2f}x" if first else "" for size in self.totals.values()]
        rows.append(("", *shares))
        kinds: dict[str, Counter[str]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.type, Counter()).update(layer.bytes)
        for kind, sizes in sorted(kinds.items(), key=lambda item: -item[1][modes[0]]):
            rows.append(self._row(f"  of {kind}", sizes))
        largest = self._largest()
        if largest:
            rows.append(("largest layers", *[""] * len(modes)))
        for layer in largest:
            savers = ", ".join(map(shown, layer.savers[:3]))
            rows.append(self._row(f"  {shown(layer.name)} (for {savers})", layer.bytes))
        rows += self._optimizer_rows(len(modes))
        return "\n".join(column_lines(rows, words=(0,)))

    def _row(self, label: str, sizes: Any) -> tuple[str, ...]:
        scale, unit = self._unit()
        return (label, *(f"{sizes[mode] / scale:.1f} {unit}" for mode in self.totals))

    def _optimizer_rows(self, columns: int) -> list[tuple[str, ...]]:
        """The states do not depend on the mode: one column has them, with bytes a parameter."""
        if not self.optimizer:
            return []
        scale, unit = self._unit()
        sizes = {"parameters and optimizer": sum(self.optimizer.values())}
        sizes |= {f"  {name}": size for name, size in self.optimizer.items()}
        each = max(self.parameters, 1)
        return [
            (name, f"{size / scale:.1f} {unit}", f"{size / each:.2f} B", *[""] * (columns - 2))
            for name, size in sizes.items()
        ]

    def _unit(self) -> tuple[float, str]:
        """One unit for the whole report, so that its numbers compare."""
        return (1e3, "kB") if max(self.totals.values(), default=0) < _SMALL else (1e6, "MB")

    def _largest(self) -> list[LayerMemory]:
        first = next(iter(self.totals))
        ordered = sorted(self.layers, key=lambda layer: -layer.bytes[first])
        return [layer for layer in ordered if layer.bytes[first]][:_ROWS]

    def plot(self, path: str | Path) -> None:
        """Writes a bar chart with matplotlib; the suffix of `path` is the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "MemoryReport.plot needs matplotlib: pip install matplotlib"
            ) from error
        largest = self._largest()
        scale, unit = self._unit()
        figure = Figure(figsize=(10, 3 + 0.32 * len(largest)), layout="constrained")
        top, bottom = figure.subplots(2, 1, height_ratios=[1, max(len(largest) / 3.5, 1)])
        for i, (mode, size) in enumerate(self.totals.items()):
            top.barh(i, size / scale, color=_COLOURS[mode], label=mode)
            text = f" {mode} {size / scale:.1f} {unit}"
            top.text(size / scale, i, text, va="center", fontsize=9)
        top.set_yticks([])
        top.invert_yaxis()
        top.margins(x=0.2)
        top.set_title("kept for backward", loc="left")
        height = 0.8 / len(self.totals)
        for k, mode in enumerate(self.totals):
            places = [i + (k - (len(self.totals) - 1) / 2) * height for i in range(len(largest))]
            sizes = [layer.bytes[mode] / scale for layer in largest]
            bottom.barh(places, sizes, height, color=_COLOURS[mode], label=mode)
        bottom.set_yticks(range(len(largest)), [shown(layer.name) for layer in largest], fontsize=8)
        bottom.invert_yaxis()
        bottom.set_xlabel(unit)
        bottom.set_title("the layers whose tensors are largest", loc="left")
        bottom.legend(frameon=False)
        for axes in (top, bottom):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=120)


def memory_report(
    model: nn.Module, example_inputs: Any, optimizer: torch.optim.Optimizer | None = None
) -> MemoryReport:
    """The memory that a forward pass of the model keeps for backward, layer by layer: in eager
    PyTorch, and after :func:`fusedtrain.convert` with each value of `memory`. Of an optimizer, the
    memory of its parameters and of each of its states, also in bytes a parameter.

    Runs copies of the model, in its training mode, on the example. The model itself, converted or
    not, and the random number generators do not change.

    Args:
        model: any module.
        example_inputs: a tensor, a shape, arguments or a function, as for
            :func:`fusedtrain.convert`.
        optimizer: any optimizer of torch's kind. Most have their states after the first step.

    Raises:
        TypeError: `example_inputs` or `optimizer` has another type.
        ValueError: `example_inputs` are several shapes, or a shape that does not suit the model.

    The model's errors are passed on.

    Example:
        >>> import fusedtrain, torch
        >>> norm, act, last = torch.nn.BatchNorm2d(8), torch.nn.SiLU(), torch.nn.Conv2d(8, 1, 1)
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), norm, act, last)
        >>> fusedtrain.memory_report(model, torch.randn(1, 3, 10, 10)).totals
        {'eager': 9664, 'store': 6464, 'recompute': 3264, 'inplace': 6464, 'q8': 6464}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    model = original_of(model, "memory_report")
    example = example_for(model, example_inputs)
    runs: dict[str, _Kept] = {}
    for mode in _MODES:
        twin = duplicate(model)
        revert(twin)
        if mode != "eager":
            convert(twin, memory=mode)
        with restored(model), same_generators(), without_compiled_code(twin):
            runs[mode] = _run(twin, example)
        del twin
    report = _report(runs)
    if optimizer is not None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        report.parameters = sum(p.numel() for p in params)
        report.optimizer = _bytes_of_states(optimizer, params)
    return report


def _bytes_of_states(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> dict[str, int]:
    """Bytes of this process, by the name of a state; step counts share one storage."""
    sizes: Counter[str] = Counter()
    counted: set[int] = set()
    states = [{"parameters": p, **optimizer.state.get(p, {})} for p in params]
    for name, value in (item for state in states for item in state.items()):
        if not isinstance(value, Tensor):
            continue
        storage = local(value).untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            sizes[name] += storage.nbytes()
    return dict(sizes)


@dataclass
class _Kept:
    """One run: by layer the bytes of its tensors, its type, and the layers that saved them."""

    bytes: Counter[str] = field(default_factory=Counter)
    types: dict[str, str] = field(default_factory=dict)
    savers: dict[str, dict[str, None]] = field(default_factory=dict)


def _report(runs: dict[str, _Kept]) -> MemoryReport:
    report = MemoryReport(totals={mode: kept.bytes.total() for mode, kept in runs.items()})
    names: dict[str, str] = {}
    for kept in runs.values():
        for name, kind in kept.types.items():
            names.setdefault(name, kind)
    for name, kind in names.items():
        sizes = {mode: kept.bytes[name] for mode, kept in runs.items()}
        savers = next((kept.savers[name] for kept in runs.values() if name in kept.savers), {})
        report.layers.append(LayerMemory(name, kind, sizes, tuple(savers)))
    return report


def _run(model: nn.Module, example: Any) -> _Kept:
    arguments, named = arguments_of(example)
    kept = _Kept()
    inputs = [t for t in pytree.tree_leaves((arguments, named)) if isinstance(t, Tensor)]
    ours = (*model.parameters(), *model.buffers(), *inputs)
    with _following(model) as (makers, current), torch.enable_grad():

        def maker(address: int, *_: Any) -> str:
            # A tensor saved inside its module's forward has no maker yet: the running module.
            name, kind = makers.get(address, current())
            kept.types.setdefault(name, kind)
            kept.savers.setdefault(name, {})[current()[0]] = None
            return str(name)

        with counted_bytes(ours, maker) as kept.bytes:
            model(*arguments, **named)
    return kept


@contextmanager
def _following(model: nn.Module) -> Iterator[Any]:
    """The makers of tensors by address, and a function that names the running module."""
    names = {id(module): name for name, module in model.named_modules()}
    makers: dict[int, tuple[str, str]] = {}
    running: list[nn.Module] = [model]
    alive: list[Tensor] = []  # keeps addresses from being reused

    def label(module: nn.Module) -> tuple[str, str]:
        return names.get(id(module), ""), title(type(module))

    def enter(module: nn.Module, _: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, args: Any, _: Any, output: Any) -> None:
        if running[-1] is module:
            running.pop()
        before = {address_of(t) for t in pytree.tree_leaves(args) if isinstance(t, Tensor)}
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                # The maker is the first module that returned the tensor. If that module only handed
                # its input on, or changed it in place, the forward around made the tensor.
                handed_on = address_of(leaf) in before
                makers.setdefault(address_of(leaf), label(running[-1] if handed_on else module))
                alive.append(leaf.detach())

    with observing(enter, leave):
        yield makers, lambda: label(running[-1])
