"""DistributedDataParallel and Reducer with the arguments and arithmetic of ``apex.parallel``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch_private import flatten_dense_tensors, foreach_copy_, unflatten_dense_tensors


class _Reduction:
    """Reduces a bucket of gradients. It must not refer to the model: torch's reducer holds it, and
    Python's garbage collector cannot see through the reducer."""

    def __init__(self, in_float32: bool, average: bool, predivide: float) -> None:
        self.in_float32, self.average, self.predivide = in_float32, average, predivide
        self.enabled = True

    def __call__(self, buffer: Tensor) -> Any:
        """A future of the reduced buffer."""
        if not self.enabled:
            # A future synchronises the streams of its devices; the CPU has no streams.
            devices: list[Any] = list({buffer.device} - {torch.device("cpu")})
            future: Any = torch.futures.Future(devices=devices)
            future.set_result(buffer)
            return future
        narrow = buffer.dtype in (torch.float16, torch.bfloat16)
        sent = buffer.float() if self.in_float32 and narrow else buffer
        if self.predivide != 1.0:
            sent.mul_(1.0 / self.predivide)

        def finish(done: Any) -> Tensor:
            reduced: Tensor = done.value()[0]
            if self.average:
                reduced.mul_(self.predivide / dist.get_world_size())
            return reduced if reduced.dtype is buffer.dtype else buffer.copy_(reduced)

        work: Any = dist.all_reduce(sent, async_op=True)
        return work.get_future().then(finish)


# Not annotated: torch refuses annotations that are strings.
def _reduce_bucket(state, bucket):  # type: ignore[no-untyped-def]
    return state(bucket.buffer())


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """:class:`torch.nn.parallel.DistributedDataParallel` with Apex's arguments.

    The constructor broadcasts parameters from rank 0; buffers are never broadcast. Backward sums
    gradients over all ranks, as Apex documents it: they are multiplied by ``1 / predivide`` before
    the sum, and for an average by ``predivide / ranks`` after it.

    Args:
        module: the model, on its device already.
        message_size: elements of a communication bucket, in the widest dtype of the parameters.
        delay_allreduce: allows parameters without gradients, which may differ in every iteration
            (torch's ``find_unused_parameters``). If no rank has a parameter's gradient, it stays
            None.
        shared_param: not supported, as in Apex.
        allreduce_trigger_params, retain_allreduce_buffers, num_allreduce_streams,
            allreduce_communicators, gradient_average_split_factor, prof: accepted, and without
            effect.
        allreduce_always_fp32: float16 and bfloat16 gradients are summed in float32.
        gradient_average: False leaves the sum.
        gradient_predivide_factor: predivide of the formula above; also used without averaging.

    Raises:
        ValueError: for `shared_param`. RuntimeError: a model without a parameter that requires a
        gradient, which Apex accepted; a parameter without gradient if `delay_allreduce` is False;
        and torch's errors.

    Example:
        >>> import tempfile, torch
        >>> init = f"file://{tempfile.mkdtemp()}/rendezvous"
        >>> torch.distributed.init_process_group("gloo", init, rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1), gradient_predivide_factor=2.0)
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> model.module.weight.grad
        tensor([[3., 3.]])
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None,
        prof: bool = False,
    ) -> None:
        if shared_param is not None:
            raise ValueError(
                "shared_param is not supported: shared parameters need nothing special; "
                "delay_allreduce=True is for parameters without a gradient"
            )
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained:
            raise RuntimeError(
                "module: no parameter requires a gradient, so there is nothing to reduce; "
                "use the module itself"
            )
        ignored = {
            "allreduce_trigger_params": allreduce_trigger_params is not None,
            "retain_allreduce_buffers": retain_allreduce_buffers,
            "num_allreduce_streams": num_allreduce_streams != 1,
            "allreduce_communicators": allreduce_communicators is not None,
            "gradient_average_split_factor": gradient_average_split_factor is not None,
            "prof": prof,
        }
        names = ", ".join(name for name, is_set in ignored.items() if is_set)
        if names:
            warnings.warn(f"DistributedDataParallel: without effect here: {names}", stacklevel=2)
        widest = max(p.element_size() for p in trained)
        with warnings.catch_warnings():
            # torch 2.13's replacement of the argument broadcasts buffers once; Apex does not.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                module,
                broadcast_buffers=False,
                bucket_cap_mb=max(message_size, 1) * widest / 2**20,
                find_unused_parameters=delay_allreduce,
            )
        self._reduction = _Reduction(
            allreduce_always_fp32, gradient_average, gradient_predivide_factor
        )
        self._register()

    def _register(self) -> None:
        self.register_comm_hook(self._reduction, _reduce_bucket)
        # An attribute set after the reducer is freed after it. Freeing the group waits for Gloo's
        # thread, which may be about to free a Python function: the reducer would wait with Python's
        # lock held, for ever.
        self._group = self.process_group

    def disable_allreduce(self) -> None:
        """Backward passes do not reduce gradients until `enable_allreduce`."""
        self._reduction.enabled = False

    def enable_allreduce(self) -> None:
        """Backward passes reduce the accumulated gradients."""
        self._reduction.enabled = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            if "find_unused_parameters=True" not in str(error) or self.find_unused_parameters:
                raise
            raise RuntimeError(
                "a parameter got no gradient in the backward pass before this forward: make "
                "fusedtrain.apex.parallel.DistributedDataParallel with delay_allreduce=True"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        del state["_group"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._comm_hooks.clear()
        self._register()


def _by_kind(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return kinds.values()


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if value is None:  # the gradient of a parameter without one
        return []
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise TypeError(
            f"module_or_grads_list must be a module or gradients, got {type(value).__name__}"
        )
    return [tensor for part in value for tensor in _tensors_in(part)]


class Reducer:
    """Averages gradients over all ranks when `reduce` is called.

    Args:
        module_or_grads_list: a module, whose parameters are broadcast from rank 0 at once; or an
            iterable of gradients, which may be nested; the caller then keeps their parameters equal
            on all ranks.

    Raises:
        TypeError: for anything else.

    Example:
        >>> import tempfile, torch
        >>> init = f"file://{tempfile.mkdtemp()}/rendezvous"
        >>> torch.distributed.init_process_group("gloo", init, rank=0, world_size=1)
        >>> gradient = torch.ones(2)
        >>> Reducer([gradient]).reduce()
        >>> gradient
        tensor([1., 1.])
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if not isinstance(module_or_grads_list, nn.Module):
            self.grads = _tensors_in(module_or_grads_list)
            return
        self.module = module_or_grads_list
        for parameters in _by_kind(p.detach() for p in self.module.parameters()):
            flat = flatten_dense_tensors(parameters)
            dist.broadcast(flat, 0)
            foreach_copy_(parameters, list(unflatten_dense_tensors(flat, parameters)))

    @torch.no_grad()
    def reduce(self) -> None:
        """Replaces every gradient by its mean; all ranks must have the same gradients."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        for some in _by_kind(grads):
            flat = flatten_dense_tensors(some)
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            foreach_copy_(some, list(unflatten_dense_tensors(flat, some)))
