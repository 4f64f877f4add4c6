"""Weights that are moved for one backward pass and put back: sharpness-aware minimisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch_private import disable_dynamo
from ._checks import check_not_negative
from ._distributed import is_distributed
from ._masters import MASTER, is_correction, joined
from ._options import of_itself
from ._reports import Reports

_RESTORE = "the parameters are perturbed. Call optimizer.restore() first, after the second backward"


def _refuse_step() -> None:
    raise RuntimeError(f"step: {_RESTORE}")


class Perturbs(Reports):
    """The part of `FusedOptimizer` that moves weights and puts them back."""

    # While the parameters are perturbed: each with its value before, and its known versions.
    _perturbed: list[tuple[Tensor, Tensor, list[Any]]] | None = None

    @of_itself
    @disable_dynamo
    @torch.no_grad()
    def perturb(self, rho: float = 0.05, eps: float = 1e-12) -> None:
        """Adds ``rho * grad / (norm + eps)`` to the weights, the first half of a SAM step.

        The norm is that of all gradients together, so that a loss scale makes no difference. With
        masters the perturbed parameter is the rounded sum of master and perturbation. Gradients
        that are not finite perturb nothing. `restore` puts every bit back, in the place of
        ``p.sub_(e)``, which rounds and would drop the corrections of split masters. Until then
        a copy of the parameters is kept.

        Source: Foret et al., arXiv 2010.01412.

        Args:
            rho: length of the perturbation; with ``maximize=True`` it goes against the gradient.
            eps: added to the norm.

        Raises:
            RuntimeError: the parameters are perturbed already, or hold their averages; no parameter
                has a gradient; sparse gradients, sharded parameters (DTensor), released gradients,
                parameters of ``apex.amp``. Nothing is modified.
            ValueError: `rho` or `eps` is negative.

        Example:
            >>> import torch, fusedtrain
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = fusedtrain.optim.SGD([weight], lr=0.5)
            >>> (weight * torch.tensor([3.0, 4.0])).sum().backward()
            >>> optimizer.perturb(rho=1.0)
            >>> weight.data
            tensor([1.6000, 1.8000])
            >>> optimizer.zero_grad()
            >>> weight.square().sum().backward()
            >>> optimizer.restore()
            >>> optimizer.step()  # the gradient of the perturbed weight moves the weight
            >>> weight.data
            tensor([-0.6000, -0.8000])
        """
        self._check_restored("perturb")
        check_not_negative(rho=rho, eps=eps)
        name = type(self).__name__
        if self._swapped:
            raise RuntimeError("perturb within swap_averages(): leave the context first")
        if self._release is not None or self._low_precision:
            raise RuntimeError(
                f"perturb: {name}'s gradients are freed in backward (release_gradients), or belong "
                "to the parameters of amp.initialize. Take ordinary steps, and master_weights"
            )
        self._follow_parameters()
        params, signs = [], []
        for group in self.param_groups:
            sign = -1.0 if self._numbers(group).maximize else 1.0
            some = [p for p in group["params"] if p.grad is not None]
            params += some
            signs += [sign] * len(some)
        grads = [p.grad for p in params]
        if not params:
            raise RuntimeError("perturb: no parameter has a gradient. Call loss.backward() first")
        if any(map(is_distributed, params)) or any(g.layout != torch.strided for g in grads):
            raise RuntimeError(
                f"perturb: {name} does not perturb DTensors, nor by sparse gradients"
            )
        wide = [torch.promote_types(g.dtype, torch.float32) for g in grads]
        norms = [torch.linalg.vector_norm(g, dtype=t) for g, t in zip(grads, wide)]
        norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
        factor = torch.where(norm.isfinite(), rho / (norm + eps), 0.0)
        self._perturbed = []
        vars(self)["_step"] = _refuse_step
        for p, grad, sign in zip(params, grads, signs, strict=True):
            known = [s.versions for s in self._stores.values() if s.versions.forget(p)]
            self._perturbed.append((p, p.detach().clone(), known))
            weight, by = self._weight(p), factor.to(p.device)
            moved = weight + grad.to(weight.dtype) * (sign * by).to(weight.dtype)
            p.copy_(torch.where(by > 0, moved, weight))

    @of_itself
    @disable_dynamo
    @torch.no_grad()
    def restore(self) -> None:
        """Puts the weights back as they were before `perturb`, bit for bit, masters included.

        Raises:
            RuntimeError: the parameters are not perturbed.
        """
        if self._perturbed is None:
            raise RuntimeError(
                "restore: the parameters are not perturbed. Call optimizer.perturb() after the "
                "first backward, and restore() once after the second"
            )
        for p, value, known in self._perturbed:
            p.copy_(value)
            for versions in known:  # corrections belong to these values
                versions.note(p, p)
        self._perturbed = None
        del vars(self)["_step"]

    def _weight(self, p: Tensor) -> Tensor:
        """The weight that steps update, or a copy of it."""
        master = self.state.get(p, {}).get(MASTER)
        if is_correction(master):
            return joined(p, master)
        return p.to(torch.promote_types(p.dtype, torch.float32)) if master is None else master

    def _check_restored(self, what: str) -> None:
        if self._perturbed is not None:
            raise RuntimeError(f"{what}: {_RESTORE}")

    def _follow_parameters(self) -> None:
        self._check_restored("masters, averages, state dicts, copies")
        super()._follow_parameters()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._check_restored("load_state_dict")
        super().load_state_dict(state_dict)
