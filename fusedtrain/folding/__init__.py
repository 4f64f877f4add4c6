"""Convolutions that do the work of the batch norms beside them.

`_links` follows values through the graphs and finds pairs; `_sharing` and `_code` say who else sees
a bias, a statistic or a call; `_rewrite` installs, `_verify` proves. `fold_conv_bn` makes inference
convolutions (`_conv_act`), `fold_frozen_norms` is `_frozen`, `drop_redundant_bias` `_bias`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .._graph.effects import Effects
from .._graph.example import example_for
from .._graph.flow import Flow
from .._graph.modules import is_scripted
from .._graph.report import Unchanged
from .._torch_private import DropoutBase
from . import _activations
from ._bias import AfterLoading as AfterLoading, WithoutBias as WithoutBias, drop_redundant_bias
from ._conv_act import Act as Act, ConvAct2d as ConvAct2d, ConvAct3d as ConvAct3d
from ._frozen import FoldedNorm as FoldedNorm, FoldingConv as FoldingConv, fold_frozen_norms
from ._kinds import (
    check_module,
    conv_obstacle,
    fits,
    followers,
    is_transposed,
    norm_obstacle,
    norm_trains,
    spatial,
    statistics,
)
from ._links import Link, Links, flow_of
from ._numbers import apply, fold_calls
from ._report import Folded, FoldReport, list_scripted
from ._rewrite import GraphTracer as GraphTracer, replace
from ._sharing import Sharing
from ._verify import compare, ranks, stock_copy

# The classes are not public: pickles of folded models name them here.
__all__ = ["FoldReport", "drop_redundant_bias", "fold_conv_bn", "fold_frozen_norms"]

_TRAINING = "it is in training mode (model.eval() first)"


class OfRank(nn.Identity):
    """Stand-in for a norm that treats other dimensions differently: refuses these."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() != self.rank:
            raise RuntimeError(
                f"folded batch norm: made for inputs of {self.rank} dimensions, not {input.dim()}; "
                "the norm would have taken dimension 1 for its channels"
            )
        return input

    def extra_repr(self) -> str:
        return f"rank={self.rank}"


def fold_conv_bn(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    verify: Any = None,
    tolerance: float | None = None,
    inplace: bool = False,
    fuse_activation: bool = True,
) -> tuple[nn.Module, FoldReport]:
    """Fold the batch norms of a model in eval mode into its convolutions, for inference.

    A norm is folded into a convolution (1-, 2- or 3-d, transposed or not, any groups) or linear
    layer whose output goes to this norm and nowhere else; or else into one that follows it, where
    that is exact: not if it is transposed or pads with zeros. What goes where is seen by torch.fx;
    the order in which modules were declared tells nothing. Calls of `F.batch_norm` count, too.
    Whatever `convert`, `fold_frozen_norms` and `drop_redundant_bias` did to the model is undone in
    the copy that is folded. Shared, hooked and parametrized modules, subclasses with a forward of
    their own, norms in training mode or without running statistics are left, with the reason in the
    report. A BatchNorm1d after Linear is folded only if its input is known to have two dimensions:
    by the example, or because `torch.flatten(x, 1)` comes before.

    A folded norm becomes `nn.Identity`, or its activation where it had one (timm's BatchNormAct2d).
    Convolutions keep class and name; their bias, if new, requires a gradient as the weight does.
    If `fuse_activation`, convolutions of two and three dimensions then take over the activation
    that follows, and the addition of a residual before it, where the platform has an op for that
    (mkldnn on the CPU, cuDNN). They become a subclass of their class; and a module whose forward
    has to change for it becomes a `torch.fx.GraphModule` with the same attribute names. The packed
    weights of these follow load_state_dict and updates in place, but not writes through `.data`.

    Args:
        model: in eval mode, at least the norms that are to be folded; else a warning says so.
        example_inputs: a tensor, a shape, arguments or a function, as for
            :func:`fusedtrain.convert`. Both models are run on it and compared.
        verify: False: do not compare; or the inputs to compare with, instead of `example_inputs`.
        tolerance: the largest difference of an output, relative to the output's largest magnitude.
            By default 1e-9 in float64, 1e-4 in float32, 2e-2 in float16, 1e-1 in bfloat16.
        inplace: give `model` itself the folded modules. By default it stays as it is.
        fuse_activation: see above.

    Returns:
        The folded model, a deep copy unless `inplace`, and a :class:`FoldReport`.

    Raises:
        TypeError: `model` is not a module, or `example_inputs` has another type.
        ValueError: `tolerance` is negative, `inplace` is asked for a scripted model, or
            `example_inputs` are several shapes, or a shape that does not suit the model.
        RuntimeError: the outputs differ by more than the tolerance, or :func:`fusedtrain.revert`
            cannot undo the conversion of the model; nothing was changed.

    >>> import fusedtrain, torch
    >>> conv, norm = torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8)
    >>> model = torch.nn.Sequential(conv, norm, torch.nn.ReLU()).eval()
    >>> folded, report = fusedtrain.fold_conv_bn(model, torch.randn(2, 3, 8, 8))
    >>> len(report), type(folded[1]).__name__, folded[0].bias.requires_grad
    (1, 'Identity', True)
    """
    check_module(model)
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative, but is {tolerance}")
    if inplace and is_scripted(model):
        raise ValueError("inplace: a scripted model cannot be changed")
    example = example_inputs if verify is None or isinstance(verify, bool) else verify
    example = None if example is None else example_for(model, example)
    expected, dims = (None, {}) if example is None else ranks(model, example)

    folded = stock_copy(model)
    report = FoldReport()
    with torch.no_grad():
        folded = _fold(folded, dims, report)
    if not report.folded and any(norm.reason == _TRAINING for norm in report.left):
        warnings.warn(
            "fold_conv_bn folded no norm: they are in training mode. Call model.eval() first",
            stacklevel=2,
        )
    if fuse_activation:
        folded = _activations.fuse(folded, report)
        _activations.pack(folded, report)
    if example is not None and verify is not False:
        report.error = compare("fold_conv_bn", folded, example, expected, tolerance)
    if inplace:
        model.__class__ = type(folded)
        vars(model).clear()
        vars(model).update(vars(folded))
        folded = model
    return folded, report


def _passes(module: nn.Module) -> bool:
    idle = isinstance(module, DropoutBase) and not module.training
    return type(module) is nn.Identity or idle


def _fold(model: nn.Module, dims: dict[str, set[int]], report: FoldReport) -> nn.Module:
    flow = flow_of(model)
    links, sharing = Links(flow, _passes), Sharing(model, [flow])
    chosen: list[Link] = []
    for norm in links.norms():
        choice = _choose(links, norm, dims)
        if isinstance(choice, Link):
            choice = sharing.called(choice) or _shared(sharing, choice) or choice
        if isinstance(choice, str):
            report.left.append(Unchanged(flow.name(norm), type(norm).__name__, choice))
        else:
            chosen.append(choice)
    swapped: dict[int, nn.Module] = {}
    for link in chosen:
        assert link.norm is not None
        apply(link, statistics(link.norm))
        swapped[id(link.norm)] = _stand_in(link)
        names = flow.name(link.conv), type(link.conv).__name__
        report.folded.append(Folded(*names, flow.name(link.norm), type(link.norm).__name__))
    model = fold_calls(links, sharing, model, report)
    list_scripted(model, report)
    return replace(model, swapped)


def _choose(links: Links, norm: nn.Module, dims: dict[str, set[int]]) -> Link | str:
    reason = norm_obstacle(norm) or (_TRAINING if norm_trains(norm) else "")
    if reason:
        return reason
    before = links.before(norm)
    if isinstance(before, Link):
        return _obstacle(links.flow, before, dims) or before
    if followers(norm):
        return before
    after = links.after(norm)
    if isinstance(after, Link):
        return _obstacle(links.flow, after, dims) or after
    return before


def _obstacle(flow: Flow, link: Link, dims: dict[str, set[int]]) -> str:
    conv, norm = link.conv, link.norm
    assert norm is not None
    if reason := conv_obstacle(conv):
        return f"{flow.name(conv)}: {reason}"
    if reason := fits(conv, norm, link.norm_first):
        return reason
    if link.norm_first and is_transposed(conv):
        return f"{flow.name(conv)} follows, but is transposed: its borders see less of the shift"
    if link.norm_first and _pads_with_zeros(conv):
        return (
            f"{flow.name(conv)} follows, but pads with zeros, which the norm would not leave zeros"
        )
    # Without the norm, the convolution reads the norm's input itself.
    effects = Effects(flow)
    if link.norm_first and any(effects.is_written_between(*hop) for hop in link.hops):
        return "something may be written in place between it and the convolution"
    if spatial(conv) == 0:
        seen = dims.get(flow.names[id(norm)], set())
        if seen - {2}:
            return f"its input has {max(seen - {2})} dimensions, of which it normalises the second"
        if not seen and not link.flat:
            return "its input may have three dimensions (example_inputs would show that it has not)"
    return ""


def _shared(sharing: Sharing, link: Link) -> str:
    """Another reader of numbers that change, or of a module that goes; '' if there is none."""
    conv, norm = link.conv, link.norm
    assert norm is not None
    statistics = ("running_mean", "running_var")
    for key in statistics:
        for owner in sharing.other_norms(norm, key):
            if norm_trains(owner):
                return f"its {key} is that of {sharing.flows[0].name(owner)}, which trains"
    if reason := sharing.read(norm, "weight", "bias", *statistics, running=True):
        return reason
    if reason := sharing.read(conv, "weight", "bias", running=True):
        return f"{sharing.flows[0].name(conv)}: {reason}"
    return ""


def _pads_with_zeros(conv: Any) -> bool:
    if getattr(conv, "padding_mode", "zeros") != "zeros" or conv.__class__ is nn.Linear:
        return False
    if type(conv).__name__ == "Conv2dSame":
        return True
    padding = getattr(conv, "padding", 0)
    if isinstance(padding, str):
        return padding == "same" and any(k > 1 for k in conv.kernel_size)
    return any(padding) if isinstance(padding, tuple) else bool(padding)


def _stand_in(link: Link) -> nn.Module:
    norm = link.norm
    assert norm is not None
    rest = followers(norm)
    module: nn.Module
    if isinstance(norm, nn.BatchNorm1d):
        module = OfRank(3 if spatial(link.conv) else 2)
    elif len(rest) == 1:
        return rest[0]
    else:
        module = nn.Sequential(*rest) if rest else nn.Identity()
    module.training = norm.training
    return module
