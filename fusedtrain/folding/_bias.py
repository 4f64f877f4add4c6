"""The bias of a convolution whose output a batch norm in training mode centres again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._graph.example import example_for
from .._graph.forward import install, replacement_of
from .._graph.modules import FORWARD
from .._graph.report import Unchanged
from ._frozen import Convolving, pairs
from ._kinds import check_module, is_frozen, spatial
from ._links import Link
from ._report import Folded, FoldReport
from ._sharing import Sharing
from ._verify import ranks


class WithoutBias(Convolving):
    """The forward without the bias, which the norm's running mean has taken over."""

    __module__ = "fusedtrain.folding"  # the name in pickles
    obstacle = "fusedtrain.drop_redundant_bias has changed its forward: fusedtrain.revert first"

    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__(conv, norm)
        self.bias = self.conv.bias.detach().clone()
        mean = self.norm.running_mean
        self.mean = None if mean is None else mean.clone()
        self.requires_grad = self.conv.bias.requires_grad
        self.seen: tuple[int, int] | None = None
        # If another tensor is the bias, as in functional_call, the convolution adds that one.
        self.own = self.conv.bias
        self.own.requires_grad_(False)
        self.own.grad = None
        self.absorb()

    @torch.no_grad()
    def absorb(self) -> None:
        """Moves a bias that somebody wrote since, as load_state_dict does, to the running mean.

        Until then bias and running mean together are what they are in a plain model.
        """
        bias, mean = self.conv.bias, self.norm.running_mean
        if mean is None or bias is not self.own:
            return
        if self.seen != (bias._version, bias.data_ptr()):
            mean.sub_(bias.to(mean))
            bias.zero_()
            self.seen = (bias._version, bias.data_ptr())

    @torch.no_grad()
    def adopt(self) -> None:
        """After load_state_dict; with assign=True, tensors of others have become the model's."""
        bias, mean = self.conv.bias, self.norm.running_mean
        if bias is self.own:
            return self.absorb()
        value = bias.detach().clone()
        if mean is not None:
            self.norm.running_mean = mean - value.to(mean)
            value.zero_()
        self.own = nn.Parameter(value, requires_grad=False)
        self.conv.bias, self.seen = self.own, (self.own._version, self.own.data_ptr())
        return None

    @torch.no_grad()
    def restore(self) -> None:
        bias, mean = self.conv.bias, self.norm.running_mean
        if bias is not self.own:
            return
        self.absorb()
        if mean is not None and self.mean is not None:
            first = self.mean.to(mean)
            untouched = torch.equal(mean, first - self.bias.to(mean))
            mean.copy_(first if untouched else mean + self.bias.to(mean))
        if mean is not None:
            bias.copy_(self.bias)
        bias.requires_grad_(self.requires_grad)

    def run(self, input: Tensor, *rest: Any, **options: Any) -> Tensor:
        if input.dim() != self.rank:
            raise RuntimeError(
                f"drop_redundant_bias: made for inputs of {self.rank} dimensions, not {input.dim()}"
            )
        if self.conv.bias is not self.own:
            output: Tensor = self.stock(self.conv, input, *rest, **options)
            return output
        if not torch.compiler.is_compiling():
            self.absorb()
        return self.convolve(self.conv.weight, None, input, *rest, **options)


class AfterLoading:
    """A hook of the later one of convolution and norm: both are loaded when it runs."""

    __module__ = "fusedtrain.folding"  # the name in pickles

    def __init__(self, forward: WithoutBias) -> None:
        self.forward = forward

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.forward.adopt()


def drop_redundant_bias(model: nn.Module, example_inputs: Any = None) -> FoldReport:
    """Stop computing and training biases that a batch norm takes away again, in place.

    A batch norm in training mode subtracts the mean of each channel, and with it any constant that
    the convolution or linear layer before it has added: such a bias only shifts the running mean,
    and its gradient, for which backward reads the whole gradient once more, is rounding noise. This
    subtracts the bias from the running mean, sets it to zero, and leaves it out from then on: it
    gets no gradient and changes no more. The outputs in training mode and in eval mode stay what
    they were, up to rounding.

    The bias stays a parameter (`requires_grad=False`, so optimizers pass it over) and keeps its key
    in the state dict. The state dict suits the plain model, and that of a plain model the changed
    one: a bias that is loaded, or written in place, goes to the running mean at the next call.
    :func:`fusedtrain.revert` gives each bias its value back, bit by bit if the model was not
    trained in between.

    Pairs are found as by :func:`fusedtrain.fold_frozen_norms`; norms in eval mode are left, since
    there the bias is trained. So are biases that somebody else sees: tied ones, views of shared
    memory, those that a forward, a method or a hook reads, and those before a norm whose running
    mean is shared or read. Copies outside of the model are not seen: call this before weight
    averages or `amp.initialize` copy the parameters, and after layers were replaced
    (SyncBatchNorm). A norm that is frozen later on keeps its bias as it is.

    Args:
        model: with the norms in training mode.
        example_inputs: as for :func:`fusedtrain.fold_conv_bn`; shows that the input of a linear
            layer before a norm has two dimensions, where no `torch.flatten(x, 1)` does.

    Returns:
        A :class:`FoldReport`, with each norm that was left and why.

    Raises:
        TypeError: `model` is not a module, or `example_inputs` has another type.
        ValueError: `example_inputs` are several shapes, or a shape that does not suit the model.

    >>> import fusedtrain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> print(fusedtrain.drop_redundant_bias(model))
    dropped the bias before 1 norm
      1 x Conv2d + BatchNorm2d
    >>> model[0].bias.requires_grad, model[0].bias.abs().max().item()
    (False, 0.0)
    """
    check_module(model)
    dims = {} if example_inputs is None else ranks(model, example_for(model, example_inputs))[1]
    paired = FoldReport()
    report = FoldReport("dropped the bias before", left=paired.left)
    order = {id(m): i for i, m in enumerate(model.modules())}
    names = {id(m): name for name, m in model.named_modules()}
    for link, (conv, kind, name, norm_kind) in zip(
        pairs(model, paired, _shared, statistics=False), paired.folded, strict=True
    ):
        norm: Any = link.norm
        if getattr(link.conv, "bias", None) is None:
            continue
        reason = ""
        if is_frozen(norm) or not norm.training:
            reason = "it is in eval mode, where the bias is trained"
        elif spatial(link.conv) == 0:
            seen = dims.get(names[id(norm)], set())
            if seen - {2} or not (seen or link.flat):
                reason = "its input may have three dimensions"
        if reason:
            report.left.append(Unchanged(name, norm_kind, reason))
            continue
        forward = WithoutBias(link.conv, norm)
        install(forward)
        later = max(link.conv, norm, key=lambda m: order[id(m)])
        later.register_load_state_dict_post_hook(AfterLoading(forward))
        report.folded.append(Folded(conv, kind, name, norm_kind))
    return report


def _shared(sharing: Sharing, link: Link) -> str:
    """Another user of the bias, or of the running mean that takes it over; '' if there is none."""
    conv, norm = link.conv, link.norm
    assert norm is not None
    if getattr(conv, "bias", None) is None:
        return ""
    name = sharing.flows[0].name(conv)
    if reason := sharing.tied(conv, "bias") or sharing.read(conv, "bias"):
        return f"{name}: {reason}"
    return sharing.tied(norm, "running_mean") or sharing.read(norm, "running_mean")


def restore_bias(model: nn.Module) -> int:
    """Restores the biases; returns their number."""
    count = 0
    for module in model.modules():
        hooks = module._load_state_dict_post_hooks
        for key in [k for k, hook in hooks.items() if isinstance(hook, AfterLoading)]:
            del hooks[key]
        forward = replacement_of(module)
        if isinstance(forward, WithoutBias):
            forward.restore()
            del vars(module)[FORWARD]
            count += 1
    return count
