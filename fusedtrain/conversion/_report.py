"""The report of `fusedtrain.convert` on a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from .._graph.report import Unchanged, shown, unchanged_lines
from .._recompute import MemoryPlan
from .._text import counted, memory_text

_CLASS = "fusedtrain.nn."  # of targets that are classes, which a module was given
_NO_OUTPUTS = "unknown (nothing compared: the model returns no tensors)"
_NO_GRADIENTS = (
    "unknown (nothing compared: no parameter has one; is this inference mode, or is all frozen?)"
)
_SAVES = 0.995  # of the bytes kept before: below it, convert has saved memory
_MASKS = 0.01  # of the bytes kept: from there on the report names dropout
_HELP = """\
  what would help: activations as modules or as calls of torch.nn.functional, in forwards that
  torch.fx can trace; batch norms with an activation after them; see docs/convert.md"""

# Words of a reason -> what helps; docs/convert.md has the same.
HELP: dict[str, str] = {
    "torch.fx cannot trace": "move the activations into a module of its own, or into a forward "
    "without `len(x)`, `float(x)`, numpy",
    "depends on its input": "put what follows a decision into modules, and assertions around the "
    "call of the module",
    "depends on the mode of training": "one `if self.training:` is understood; asking a part for "
    "its mode is not",
    "has optional arguments": "call the activation in a module of its own",
    "under no_grad": "put the `with` around the call of the module",
    "under another no_grad": "put the `with` around the call of the module",
    "has a with statement": "put the `with` around the call of the module",
    "has a try statement": "put the `try` around the call of the module",
    "arguments are not numbers": "pass numbers, not tensors or parameters",
    "writes over its output": "the same out of place; stochastic depth becomes part of a norm as a "
    "module: `fusedtrain.nn.DropPath`, timm's, torchvision's",
    "torch.autograd.Function": "the plain module: `torch.nn.SiLU`, `model.set_swish(False)` of "
    "efficientnet_pytorch",
    "overwritten": "write `y = y + z`, not `y += z`",
    "no fused version": "`fusedtrain.functional` has what there is",
    "slope at 0": "write `torch.nn.functional.relu(x)` or `relu6(x)`, where x = 0 does not matter",
    "subclass of": "use the class itself, if its forward is all that is needed",
    "hooks": "put the hook on the module around it",
    "is patched": "convert before the forward is replaced",
    "works in place": "set `inplace=False`",
    "used elsewhere": "multiply by that value once; a fused product does not keep it",
    "is stored": "store the input of the gate instead",
    "called with more": "call the gate with its input alone, `act(x)`",
    "gains nothing": 'nothing to do; `memory="recompute"` converts such ones, too',
}


class Converted(NamedTuple):
    """One module which `convert` changed; a shared one goes by its first name."""

    name: str
    source: str
    target: str


class FusedNorm(NamedTuple):
    """One batch, group or instance norm that is one op with `parts`, in the order of calls, in the
    forwards around it; or that has a fused class, the `target`."""

    name: str
    source: str
    target: str
    parts: tuple[str, ...]


class Applied(NamedTuple):
    """An activation that one op computes in the forward of the module `name`: a call or a formula,
    or the gate of a product."""

    name: str
    type: str
    activation: str


class Branched(NamedTuple):
    """A residual branch that is added by one op, in the forward of the module `name`; `parts` are
    what becomes part of the sum: layer scale, a module of stochastic depth."""

    name: str
    type: str
    parts: tuple[str, ...]


class Layer(NamedTuple):
    """Results of the example for one converted module, with all that it took over.

    Bytes count for the module that saved a storage last: an activation's output for the next layer.
    `error`: of the outputs of it or, where it has none of its own, the module around it.
    """

    name: str
    saved_before: int
    saved_after: int
    error: float


class LookedAt(NamedTuple):
    """Extent of `convert`'s search: modules, forwards that torch.fx traced, and those it cannot."""

    modules: int = 0
    forwards: int = 0
    untraced: int = 0


@dataclass(frozen=True)
class Proof:
    """Errors are relative: norm of the difference by norm of what the stock model gives; those of
    gradients are the largest of all parameters. `noise`: what rounding does to the stock model.
    `outputs` and `gradients` count the tensors that were compared. `precision`: "float32" or
    "float64" if they were compared in another dtype than that of training, since 16 bits decide
    nothing; else "". With dropout="fused" both models ran without dropout, but for the bytes."""

    output_error: float
    gradient_error: float
    output_noise: float
    gradient_noise: float
    saved_before: int
    saved_after: int
    layers: list[Layer]
    outputs: int = 1
    gradients: int = 1
    plan: MemoryPlan | None = None  # that the model was converted with
    precision: str = ""
    masks: int = 0  # bytes that dropout keeps, as far as dropout="fused" would not

    def verdict(self, memory: str, norms: bool) -> list[str]:
        """The result in words, for somebody who reads the last lines alone.

        Args:
            memory: of `convert`.
            norms: whether batch norms were fused, whose outputs can be recomputed.
        """
        error, noise = max(
            (self.output_error, self.output_noise), (self.gradient_error, self.gradient_noise)
        )
        if not (self.outputs or self.gradients):
            rounding = "unknown (nothing compared)"
        elif error:
            where = f"in {self.precision}: " if self.precision else ""
            rounding = f"yes ({where}largest {error:.1e}, rounding alone {noise:.1e})"
        else:
            rounding = "yes (no difference)"
        ratio = self.saved_after / self.saved_before if self.saved_before else 1.0
        if memory == "q8":
            rounding += "; 8-bit derivatives, an approximation, come on top"
            saved = "saved: fusedtrain.memory_report(model, example) counts the 8 bits"
        elif self.plan is not None:
            peak = self.plan.peak / max(self.plan.eager_peak, 1)
            saved = f"saved: the peak of the plan's step is {peak:.2f}x of eager's"
        elif ratio < _SAVES:
            saved = f"saved: backward keeps {ratio:.2f}x of the bytes"
        else:
            advice = ": try memory='recompute'" if memory == "store" and norms else ""
            saved = f"nothing saved{advice}"
        lines = [f"within rounding: {rounding}", saved]
        if self.masks > _MASKS * self.saved_after:
            lines.append(
                f"dropout keeps {memory_text(self.masks)} of masks: dropout='fused' keeps 16 bytes "
                "a call and is faster, with other random numbers"
            )
        return lines

    def __str__(self) -> str:
        saved = f"saved for backward {_megabytes(self.saved_before, self.saved_after)}"
        if self.plan is not None:
            saved = f"peak of a step {_megabytes(self.plan.eager_peak, self.plan.peak)}"
        errors = (
            f"{self.output_error:.1e} (rounding alone: {self.output_noise:.1e})",
            f"{self.gradient_error:.1e} ({self.gradient_noise:.1e})",
        )
        return (
            f"on the example: {saved}; largest relative error "
            f"{f'in {self.precision} ' if self.precision else ''}of outputs "
            f"{errors[0] if self.outputs else _NO_OUTPUTS}, of gradients "
            f"{errors[1] if self.gradients else _NO_GRADIENTS}"
        )


@dataclass(repr=False)
class ConversionReport:
    """Changes that `convert` made, and modules that it left: print it, or read its fields.

    `converted` (activations), `norms` and `left` have one entry a module, `products` one for each
    multiplication by a gate that is one op now, `branches` one for each sum of a residual branch
    that is one op with its layer scale and stochastic depth, `group_norms` one for each group or
    instance norm that is one op with its modulation and activation, `shared` maps the first
    name of a converted module that sits at several places to all of its names, `already` counts
    modules that were fused before. `rewritten` names the modules with another `forward`: those that
    call what is one op now. `overwriting` names the batch norms whose output takes the
    place of their input. `calls` has the activations that forwards compute with functions and that
    fused ones compute now, `left_calls` those that stay (`type` is the function), `left_products`
    the products with a gate that stay (`type` is the gate). `idle_biases` names convolutions whose
    bias a batch norm takes away again. `looked_at` counts what was searched.
    `memory` and `dry_run` are what was asked for. `proof` is None where the model was not run, and
    `unproven` says why. The length is the number of changed modules.

    >>> import fusedtrain, torch
    >>> print(fusedtrain.convert(torch.nn.Sequential(torch.nn.SiLU(), torch.nn.RReLU())))
    converted 1 module
      1 x torch.nn.SiLU -> fusedtrain.nn.SiLU
    left 1 module
      1 x torch.nn.RReLU: no fused version (1)
    what would help
      no fused version: `fusedtrain.functional` has what there is
    """

    converted: list[Converted] = field(default_factory=list)
    left: list[Unchanged] = field(default_factory=list)
    shared: dict[str, list[str]] = field(default_factory=dict)
    already: int = 0
    norms: list[FusedNorm] = field(default_factory=list)
    group_norms: list[FusedNorm] = field(default_factory=list)
    products: list[Applied] = field(default_factory=list)
    branches: list[Branched] = field(default_factory=list)
    calls: list[Applied] = field(default_factory=list)
    left_calls: list[Unchanged] = field(default_factory=list)
    left_products: list[Unchanged] = field(default_factory=list)
    overwriting: list[str] = field(default_factory=list)
    idle_biases: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    memory: str = "store"
    looked_at: LookedAt = field(default_factory=LookedAt)
    dry_run: bool = False
    unproven: str = "example_inputs=None"
    proof: Proof | None = None

    def __len__(self) -> int:
        norms = [norm.name for norm in self.norms if norm.target.startswith(_CLASS)]
        return len({*(entry.name for entry in self.converted), *norms, *self.rewritten})

    def __getattr__(self, name: str) -> Any:
        """Only for names that it lacks: `model = convert(model)` is an easy mistake."""
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if hasattr(nn.Module, name) and not name.startswith("__"):
            text += ": convert changes the model in place and returns its report, not the model"
        raise AttributeError(text, name=name, obj=self)

    def __repr__(self) -> str:
        counts = {"converted": len(self.converted)}
        if self.norms:
            counts["norms"] = len(self.norms)
        counts |= {"left": len(self.left), "already": self.already}
        return f"ConversionReport({', '.join(f'{name}={n}' for name, n in counts.items())})"

    def __str__(self) -> str:
        lines = ["dry run: the model is as it was; convert would have"] if self.dry_run else []
        lines.append(f"converted {_modules(len(self.converted))}")
        lines += self._table([(e.name, e.source, f" -> {e.target}") for e in self.converted])
        for names in self.shared.values():
            lines.append(f"  shared, counted once: {' = '.join(map(shown, names))}")
        instance = [norm for norm in self.group_norms if "InstanceNorm" in norm.source]
        of_groups = [norm for norm in self.group_norms if norm not in instance]
        fused: list[tuple[list[Any], str, Callable[[Any], str]]] = [
            (self.norms, "fused {} batch norm{s} with what follows", _summed),
            (of_groups, "fused {} group norm{s} with what follows", _summed),
            (instance, "fused {} instance norm{s} with what follows", _summed),
            (self.products, "fused {} product{s} with a gate", "{0.type} * {0.activation}".format),
            (self.branches, "fused {} residual branch{es} with the sum", _summed),
            (self.calls, "converted {} call{s} in forwards", "{0.activation} in {0.type}".format),
        ]
        for units, title, swap in fused:
            if units:
                many = len(units) > 1
                lines.append(title.format(len(units), s="s" * many, es="es" * many))
                lines += self._table([(unit.name, swap(unit), "") for unit in units])
        if self.proof is None and (self.norms or self.group_norms or self.calls):
            lines.append(f"  not run on an example ({self.unproven})")
        plan = None if self.proof is None else self.proof.plan
        if plan is not None:
            lines.append(f"backward computes {plan.recomputed} of {len(plan.steps)} outputs again")
        elif self.memory == "recompute":
            lines.append("outputs are computed again in backward")
        if self.memory == "inplace":
            norms = counted(len(self.overwriting), "batch norm")
            lines.append(f"the output takes the place of the input in {norms}")
        if self.memory == "q8":
            lines.append("derivatives of activations on their own are kept in 8 bits")
        if self.proof is not None:
            lines.append(str(self.proof))
        if self.already:
            lines.append(f"already fused: {_modules(self.already)}")
        for left, noun, place in self._left():
            if left:
                lines.append(f"left {counted(len(left), noun)}{place}")
                lines += unchanged_lines(left)
        helps = self._helps()
        if not (self or self.products or self.branches):
            lines += self._nothing(bool(helps))
        lines += helps
        return "\n".join([*lines, *self._verdict()])

    def _verdict(self) -> list[str]:
        """The last lines: what came of it, in words."""
        changed = self or self.already or self.products or self.branches
        lines = (
            self.proof.verdict(self.memory, bool(self.norms or self.group_norms or self.already))
            if self.proof is not None and changed
            else []
        )
        if self.idle_biases:
            count = len(self.idle_biases)
            biases = (
                "1 bias before a norm does" if count == 1 else f"{count} biases before norms do"
            )
            lines.append(f"{biases} nothing: drop_redundant_bias before convert")
        return lines

    def _left(self) -> tuple[tuple[list[Unchanged], str, str], ...]:
        return (
            (self.left, "module", ""),
            (self.left_calls, "call", " in forwards"),
            (self.left_products, "product", " with a gate"),
        )

    def _helps(self) -> list[str]:
        """For each sort of reason what would help."""
        reasons = {left.reason for lefts, *_ in self._left() for left in lefts}
        helps = {words: text for words, text in HELP.items() if any(words in r for r in reasons)}
        lines = dict.fromkeys(f"  {words}: {text}" for words, text in helps.items())
        return ["what would help", *lines] if lines else []

    def _nothing(self, helped: bool) -> list[str]:
        """Extent of a search that changed nothing. `helped`: the report tells what would help."""
        modules, forwards, untraced = self.looked_at
        text = f"  looked at {_modules(modules)} and into {counted(forwards, 'forward')}"
        if untraced:
            text += f"; torch.fx cannot trace {untraced} more"
        known = self.left or self.left_calls or self.already
        lines = [text if known else f"{text}: no activation modules found, and no calls of one"]
        return lines if helped or self.already else [*lines, _HELP]

    def _table(self, rows: list[tuple[str, str, str]]) -> list[str]:
        """A line for each kind of swap."""
        kinds: dict[tuple[str, str], list[str]] = {}
        for name, source, target in rows:
            kinds.setdefault((source, target), []).append(name)
        ordered = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
        digits = max((len(str(len(names))) for _, names in ordered), default=0)
        width = max((len(source) for (source, _), _ in ordered), default=0)
        wide = max((len(target) for (_, target), _ in ordered), default=0)
        lines = []
        for (source, target), names in ordered:
            swap = f"{len(names):>{digits}} x {source:<{width}}{target:<{wide}}"
            lines.append(f"  {swap}{self._proven(names)}".rstrip())
        return lines

    def _proven(self, names: list[str]) -> str:
        chosen = set(names)
        layers = [e for e in (self.proof.layers if self.proof else []) if e.name in chosen]
        if len(layers) < len(chosen):  # activations which are part of norms
            return ""
        before, after = (sum(sizes) for sizes in zip(*(layer[1:3] for layer in layers)))
        worst = max(layer.error for layer in layers)
        return f"  saved {_megabytes(before, after)}, error {worst:.1e}"


def _summed(unit: FusedNorm | Branched) -> str:
    return " + ".join((unit[1], *unit.parts))  # the class of the norm, or around the branch


def _megabytes(before: int, after: int) -> str:
    return f"{before / 1e6:.3g} -> {after / 1e6:.3g} MB"


def _modules(count: int) -> str:
    return counted(count, "module")
