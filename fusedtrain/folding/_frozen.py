"""Training with frozen statistics, the norm folded into the convolution at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .._graph.example import example_for
from .._graph.forward import Replacement, install, is_changed, replacement_of
from .._graph.modules import FORWARD
from .._graph.report import Unchanged
from .._graph.state import duplicate
from ..ops.fold import fold_weight
from ._kinds import (
    check_module,
    conv_kind,
    conv_obstacle,
    fits,
    followers,
    is_frozen,
    is_transposed,
    norm_obstacle,
    spatial,
    statistics,
    writer_of,
)
from ._links import Link, Links, flow_of
from ._report import Folded, FoldReport, list_scripted
from ._sharing import Sharing
from ._verify import call, compare

_CONVERTED = "fusedtrain.convert has changed it, or a module around it: fusedtrain.revert first"
_FOLDED = "fusedtrain.fold_frozen_norms has changed its forward: fusedtrain.revert first"


class Convolving(Replacement):
    """Replacement of the forward of `conv`, which `norm` follows."""

    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        self.conv: Any = conv
        self.norm: Any = norm
        self.rank = spatial(conv) + 2
        self.transposed = is_transposed(conv)

    def _module(self) -> nn.Module | None:
        return vars(self).get("conv")

    def convolve(
        self, weight: Tensor, bias: Tensor | None, input: Tensor, output_size: Any = None
    ) -> Tensor:
        """The computation of the convolution's class, with another weight and bias."""
        conv, dims = self.conv, self.rank - 2
        if not self.transposed:
            output: Tensor = (
                conv._conv_forward(input, weight, bias) if dims else F.linear(input, weight, bias)
            )
            return output
        padding = conv._output_padding(
            input, output_size, conv.stride, conv.padding, conv.kernel_size, dims, conv.dilation
        )
        output = getattr(F, f"conv_transpose{dims}d")(
            input, weight, bias, conv.stride, conv.padding, padding, conv.groups, conv.dilation
        )
        return output


class FoldingConv(Convolving):
    """The forward of a convolution that is folded with the norm after it while that is frozen."""

    __module__ = "fusedtrain.folding"  # the name in pickles
    obstacle = _FOLDED

    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__(conv, norm)
        self.always = is_frozen(norm)

    def folds(self, input: Tensor) -> bool:
        frozen = self.always or not self.norm.training
        return frozen and input.dim() == self.rank and self.norm.running_mean is not None

    def run(self, input: Tensor, *rest: Any, **options: Any) -> Tensor:
        conv = self.conv
        if not self.folds(input):
            output: Tensor = self.stock(conv, input, *rest, **options)
            return output
        return self.convolve(*self.folded(), input, *rest, **options)

    def folded(self) -> tuple[Tensor, Tensor]:
        conv = self.conv
        groups = 1 if self.rank == 2 else conv.groups
        gamma, beta, mean, var, eps = statistics(self.norm)
        return fold_weight(
            conv.weight, conv.bias, gamma, beta, mean, var, eps, self.transposed, groups
        )


class FoldedNorm(Replacement):
    """The forward of the norm: nothing is left to do but its activation."""

    __module__ = "fusedtrain.folding"  # the name in pickles
    obstacle = _FOLDED

    def __init__(self, folding: FoldingConv) -> None:
        self.folding = folding

    def _module(self) -> nn.Module | None:
        folding = vars(self).get("folding")
        return None if folding is None else vars(folding).get("norm")

    def run(self, input: Tensor) -> Tensor:
        norm = self.folding.norm
        if not self.folding.folds(input):
            output: Tensor = self.stock(norm, input)
            return output
        for part in followers(norm):
            input = part(input)
        return input


def fold_frozen_norms(model: nn.Module, example_inputs: Any = None) -> FoldReport:
    """Train with frozen batch norm statistics as fast as without batch norm, in place.

    In fine-tuning and detection batch norms often run in eval mode while the model is trained.
    After this, a convolution or linear layer whose output goes to a batch norm and nowhere else
    computes, while that norm is in eval mode, with its weight and bias folded with the norm's, anew
    at every call; the norm passes its input on. What the norm would have saved for backward, a
    tensor of the size of the output, is not saved. Gradients to weight, bias, gamma and beta are
    those of the two layers, up to rounding. While the norm is in training mode, nothing differs
    from before: each call looks at `norm.training`.

    Parameters, buffers, state dict, classes and names stay; the modules get a forward of their own,
    which :func:`fusedtrain.revert` takes away. Pairs are found as by :func:`fold_conv_bn` (but
    calls of `F.batch_norm` are left), in training mode and in eval mode. Convert to SyncBatchNorm,
    and replace layers in other ways, before this: a convolution keeps to the norm it was given.

    The formula is that of You et al., "Efficient ConvBN Blocks for Transfer Learning and Beyond"
    (2023).

    Args:
        model: of any mode, dtype and device.
        example_inputs: as for :func:`fusedtrain.fold_conv_bn`. The outputs are compared before and
            after, in the mode that the model is in.

    Returns:
        A :class:`FoldReport`, with each norm that was left and why.

    Raises:
        TypeError: `model` is not a module, or `example_inputs` has another type.
        ValueError: `example_inputs` are several shapes, or a shape that does not suit the model.
        RuntimeError: the outputs differ by more than rounding; the model is as it was.

    >>> import fusedtrain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> print(fusedtrain.fold_frozen_norms(model))
    folds while frozen: 1 norm
      1 x Conv2d + BatchNorm2d
    >>> model[1].eval()(model[0](torch.ones(1, 3, 8, 8))).grad_fn.name()
    'ConvolutionBackward0'
    """
    check_module(model)
    example = None if example_inputs is None else example_for(model, example_inputs)
    restore(model)
    expected = None if example is None else call(duplicate(model), example)
    report = FoldReport("folds while frozen:")
    for link in pairs(model, report, _shared):
        assert link.norm is not None
        folding = FoldingConv(link.conv, link.norm)
        install(folding)
        install(FoldedNorm(folding))
    if example is not None:
        try:
            report.error = compare("fold_frozen_norms", model, example, expected)
        except BaseException:
            restore(model)
            raise
    return report


def _shared(sharing: Sharing, link: Link) -> str:
    """The other norm may write between the convolution's call, which now reads, and the norm's."""
    assert link.norm is not None
    for key in ("running_mean", "running_var"):
        for owner in sharing.other_norms(link.norm, key):
            return f"its {key} is shared with {sharing.flows[0].name(owner)}"
    return ""


def restore(model: nn.Module) -> int:
    """Takes the forwards away; how many convolutions had one."""
    ours = [m for m in model.modules() if isinstance(replacement_of(m), (FoldingConv, FoldedNorm))]
    count = sum(isinstance(replacement_of(module), FoldingConv) for module in ours)
    for module in ours:
        del vars(module)[FORWARD]
    return count


def pairs(
    model: nn.Module,
    report: FoldReport,
    shared: Callable[[Sharing, Link], str],
    statistics: bool = True,
) -> list[Link]:
    """Each convolution with the norm after it, in every mode; the report is filled in.

    `shared`: says why a pair's shared tensors or modules forbid it. `statistics`: only norms that
    keep running statistics.
    """
    views = [Links(flow_of(model, ((training, training, None),))) for training in (True, False)]
    first, links = views[0].flow, []
    sharing = Sharing(model, [view.flow for view in views])
    # A converted forward may do the work of any module inside of it.
    converted = {id(part) for m in model.modules() if is_changed(m) for part in m.modules()}
    for norm in views[0].norms():
        link = _CONVERTED if id(norm) in converted else _pair(views, norm, statistics)
        if isinstance(link, Link):
            link = sharing.called(link) or shared(sharing, link) or link
        name, kind = first.name(norm), type(norm).__name__
        if isinstance(link, str):
            report.left.append(Unchanged(name, kind, link))
            continue
        links.append(link)
        conv = link.conv
        report.folded.append(Folded(first.name(conv), type(conv).__name__, name, kind))
    for trace, _ in views[0].calls():
        reason = "a call, which keeps no mode"
        report.left.append(Unchanged(first.name(trace.module), "F.batch_norm", reason))
    list_scripted(model, report)
    return links


def _pair(views: list[Links], norm: nn.Module, statistics: bool) -> Link | str:
    if reason := norm_obstacle(norm, statistics):
        return reason
    links = []
    for view in views:
        if not view.is_called(norm):
            continue
        link = view.before(norm)
        if isinstance(link, str):
            return link
        links.append(link)
    if not links:
        return views[0].before(norm)
    conv, name = links[0].conv, views[0].flow.name
    if any(link.conv is not conv for link in links):
        return "it follows different convolutions in training and in eval mode"
    if any(view.flow.calls(conv) and not view.is_called(norm) for view in views):
        return f"{name(conv)} is called without it in one mode"
    if reason := conv_obstacle(conv):
        return f"{name(conv)}: {reason}"
    kind: Any = conv_kind(conv)
    if writer_of(conv) != f"{kind.__module__}:{kind.__qualname__}":
        return f"{name(conv)}: a {type(conv).__name__} has a forward of its own"
    levels = [level for link in links for level in link.levels]
    return fits(conv, norm, False) or links[0]._replace(levels=levels)
