"""The private names of torch that fusedtrain uses: look here when a new torch breaks the package.

Each name is in torch 2.10, the oldest supported release, and in 2.13. No other module uses private
names (tools/laws.py). Private attributes of objects are not listed: hooks of modules
(`_forward_hooks` and the like, `_graph/modules.py`), `Tensor._version`, optimizers' hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._compile
import torch._jit_internal
import torch._utils
import torch.multiprocessing.reductions
import torch.utils._foreach_utils
import torch.utils._python_dispatch
import torch.utils._pytree
import torch.utils.data.dataloader
from torch import Tensor, nn
from torch.ao.quantization import fuser_method_mappings
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.optim import optimizer

# Flattens and rebuilds nested arguments.
pytree = torch.utils._pytree

# A compiled function calls a decorated one in Python. torch.compiler.disable does the same, but
# imports torch._dynamo at once.
disable_dynamo = torch._compile._disable_dynamo


# Hooks before the step of every optimizer.
global_step_pre_hooks = optimizer._global_optimizer_pre_hooks

# A reshaped tensor that is no view for autograd: a Function may return it, and whoever gets it may
# modify it in place.
unsafe_view = torch.ops.aten._unsafe_view.default
# The gradient of softmax's input: of its output's gradient, output, dimension and input's dtype.
softmax_backward = torch.ops.aten._softmax_backward_data.default
# The kernel that torch's attention would run, as the number of an SDPBackend.
attention_kernel = torch._fused_sdp_choice


def skip_frame(function: Any) -> None:
    """Lets Dynamo run a function as it is, where code that Dynamo does not trace calls it: what
    `torch._dynamo.eval_frame.skip_code` does, without its import."""
    frames: Any = torch._C._dynamo.eval_frame
    actions = frames._FrameAction
    strategy = frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)


# TorchScript's type of an argument that is one number or two.
BroadcastingList1 = torch._jit_internal.BroadcastingList1
BroadcastingList2 = torch._jit_internal.BroadcastingList2  # type: ignore[attr-defined]
BroadcastingList3 = torch._jit_internal.BroadcastingList3  # type: ignore[attr-defined]


def mkldnn_is_on() -> bool:
    """Whether oneDNN computes torch's convolutions on the CPU."""
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()


@functools.cache
def mkldnn_takes(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels of a 16-bit dtype for this CPU."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return bool(getattr(torch.ops.mkldnn, name[dtype])())


# Base classes, for `isinstance`; and the check that training has more than one value a channel.
BatchNormBase = nn.modules.batchnorm._BatchNorm
NormBase = nn.modules.batchnorm._NormBase
DropoutBase = nn.modules.dropout._DropoutNd
verify_batch_size: Callable[[torch.Size], None] = nn.functional._verify_batch_size  # type: ignore[attr-defined]

# Sees the operators that a call runs; and how many of these modes follow this thread.
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The mode of this thread that sees the operators first, or None.
current_dispatch_mode: Callable[[], Any] = torch.utils._python_dispatch._get_current_dispatch_mode

# The part of `clip_grad_norm_` that clips, in the module torch.nn.utils.clip_grad.
CLIP_GRADS = torch.nn.utils.clip_grad._clip_grads_with_norm_.__name__

# The iterators of DataLoader.
DataLoaderIter = torch.utils.data.dataloader._BaseDataLoaderIter

# Many tensors as one, for one all-reduce; and one launch for many tensors.
flatten_dense_tensors = torch._utils._flatten_dense_tensors
unflatten_dense_tensors = torch._utils._unflatten_dense_tensors
group_tensors_by_device_and_dtype = torch.utils._foreach_utils._group_tensors_by_device_and_dtype
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_
# Unscales many tensors and looks for infinities, as torch.amp.GradScaler does.
unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

# The mark of parameters that FullyShardedDataParallel (FSDP1) has flattened.
FSDP1_MARK = "_fsdp_flattened"


def gather_again(parameter: Tensor) -> None:
    """Lets FSDP2 gather a parameter that it has freed between forward and backward: the unit's own
    backward then finds the parameter gathered, and frees it. A collective. Does nothing for a
    tensor that is no unit's parameter."""
    from torch.distributed import _composable_state
    from torch.distributed.fsdp import FSDPModule

    address = parameter.untyped_storage()._cdata
    for module in list(_composable_state._module_state_mapping):
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for one in (one for group in groups if group is not None for one in group.fsdp_params):
            gathered = getattr(one, "_unsharded_param", None)
            if gathered is not None and gathered.untyped_storage()._cdata == address:
                module.unshard()
                return


is_view: Callable[[Tensor], bool] = Tensor._is_view

# The number of this thread's running backward pass; -1 outside of backward. Under
# torch.utils.checkpoint, and in reversible networks, a forward runs inside of backward.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
profiler_is_running: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled")  # noqa: B009
# The node of backward that runs; and a mark of a storage that does not keep its memory.
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
StorageWeakRef = torch.multiprocessing.reductions.StorageWeakRef
# The parts of torch.autograd.graph.saved_tensors_hooks, to enter and leave at different places.
_hooks = torch._C._autograd
top_saved_tensors_hooks: Callable[[bool], Any] = _hooks._top_saved_tensors_default_hooks
push_saved_tensors_hooks = _hooks._push_saved_tensors_default_hooks
pop_saved_tensors_hooks = _hooks._pop_saved_tensors_default_hooks
saved_tensors_hooks_allowed: Callable[[], bool] = getattr(_hooks, "_saved_tensors_hooks_is_enabled")  # noqa: B009

# Gradients of torch.autograd.grad(is_grads_batched=True) hide a batch dimension from kernels.
# How many of the modes follow this thread, and one of them, from the outermost on.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
function_mode: Callable[[int], Any] = torch._C._get_function_stack_at
# Within it no TorchFunctionMode and no __torch_function__ is asked.
without_torch_function = torch._C.DisableTorchFunction
is_legacy_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

# Operators by name: their schemas list the tensors that they read, write and share.
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
has_kernel_for: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key

# The list of functions that torch.fx replaces while it traces.
FxPatcher: Any = _symbolic_trace._Patcher
is_fx_tracing: Callable[[], bool] = _symbolic_trace.is_fx_symbolic_tracing
# Functions that only check; torch.fx writes the second for `x is None`.
CHECKS = (torch._assert, _symbolic_trace._assert_is_none)


_modules = nn.modules.module
# Hooks of all modules: forward, forward pre, backward, backward pre.
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    _modules._global_forward_hooks, _modules._global_forward_pre_hooks,
    _modules._global_backward_hooks, _modules._global_backward_pre_hooks,
)  # fmt: skip
# Marks of hooks among them that take keyword arguments. Removing such a hook leaves its mark, and
# torch.compile warns of global hooks from then on (torch 2.13).
GLOBAL_HOOKS_WITH_KWARGS: dict[int, bool] = _modules._global_forward_hooks_with_kwargs
# Functions of torch.ao.quantization.fuse_modules, by the classes of the modules that they fuse.
FUSERS: dict[tuple[type, ...], Any] = fuser_method_mappings._DEFAULT_OP_LIST_TO_FUSER_METHOD
# Methods that the forwards of torch's convolutions call.
CONV_FORWARDS = (nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward)
# The code through which every call of a module goes.
CALL_CODES = (nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__)


def set_fx_patcher(patcher: Any) -> Any:
    """Lets torch.fx make this in the place of an FxPatcher; gives what it made before."""
    before = _symbolic_trace._Patcher
    _symbolic_trace._Patcher = patcher  # type: ignore[misc]
    return before


def transformed() -> bool:
    """Whether a functorch transform, forward-mode AD or torch.jit.trace follows the call."""
    return bool(
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def is_exporting() -> bool:
    """Whether torch.export follows the call.

    torch.compiler.is_exporting() is True in all that torch 2.10 and 2.11 compile; its flag is not.
    """
    return torch.compiler._is_exporting_flag


def autocast_is_available(device_type: str) -> bool:
    """Whether autocast knows the type of device. torch.is_autocast_enabled raises for others."""
    return torch.amp.is_autocast_available(device_type)


# torch.compile calls it once, as torch.compiler.assume_constant_result does, which imports
# torch._dynamo at once. torch 2.10 and 2.11 cannot compile it.
autocast_is_available._dynamo_marked_constant = True  # type: ignore[attr-defined]


def after_backward(callback: Callable[[], None]) -> None:
    """Calls back at the end of the running backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def visible_devices() -> list[int] | list[str]:
    """The devices of CUDA_VISIBLE_DEVICES, without starting CUDA."""
    return torch.cuda._parse_visible_devices()


def compiled_within(model: nn.Module, budget: float) -> Callable[..., Any]:
    """The model compiled by Inductor for an `activation_memory_budget`: 1 stores what backward
    needs, 0 recomputes all. A backend of its own: code of another budget is not taken. A code
    object of its own: Dynamo keeps 8 variants of one, and runs what more there are eagerly."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, backend=backend)
