"""Edits of a model and ways to call it, each for one side of a pair."""

from __future__ import annotations

import copy
import pickle
import types
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from . import zoo
from .pairs import Side

# Hooks


def hook(side: Side, path: str, kind: str, effect: str = "") -> None:
    """`kind`: the name of the method that registers it, and its options."""
    name, *options = kind.split()
    tag = {"forward_pre": "pre"}.get(name, name)
    register = getattr(side.part(path), f"register_{name}_hook")
    tag = " ".join([tag, *(o for o in options if o == "with_kwargs")])
    side.handles.append(register(side.recorder(tag, effect), **dict.fromkeys(options, True)))


def hook_all(side: Side, kind: str, effect: str = "") -> None:
    tag = {"forward_pre": "pre"}.get(kind, kind)
    side.everywhere.append((kind, side.recorder(tag, effect)))


def unhook(side: Side) -> None:
    if side.handles:
        side.handles.pop().remove()
    elif side.everywhere:
        side.everywhere.pop()


# Structure


def replace(side: Side, path: str, made: str) -> None:
    above, name = side.place(path)
    setattr(above, name, new(made, side.part(path)))


def new(made: str, old: nn.Module) -> nn.Module:
    if made == "copy":
        return copy.deepcopy(old)
    if made == "wrapped":
        return nn.Sequential(old)
    if made == "wrapped and more":
        return nn.Sequential(old, nn.Tanh())
    if made == "same class":
        # Not type(old): `memory="recompute"` gives a norm a class with an activation.
        return nn.BatchNorm2d(4).double() if isinstance(old, nn.BatchNorm2d) else copy.deepcopy(old)
    module: nn.Module = eval(made, {"nn": nn, "zoo": zoo}).double()
    return module.train(old.training)


def patch_class(side: Side, path: str, cls: str) -> None:
    """The class of one module."""
    side.part(path).__class__ = eval(cls, {"nn": nn, "zoo": zoo})


def delete(side: Side, path: str, name: str) -> None:
    delattr(side.part(path), name)


def assign(side: Side, path: str, name: str, value: Any) -> None:
    value = eval(value, {"nn": nn, "torch": torch, "zoo": zoo}) if isinstance(value, str) else value
    setattr(side.part(path), name, value)


def run(side: Side, path: str, statement: str) -> None:
    """Any line about a part `m`."""
    exec(statement, {"m": side.part(path), "nn": nn, "torch": torch, "zoo": zoo})


def share(side: Side, path: str, other: str) -> None:
    above, name = side.place(path)
    setattr(above, name, side.part(other))


def swap(side: Side, path: str, other: str) -> None:
    one, two = side.part(path), side.part(other)
    (first, name), (second, label) = side.place(path), side.place(other)
    setattr(first, name, two)
    setattr(second, label, one)


def cut(side: Side, start: int, end: int) -> nn.Module:
    model: Any = side.model
    cut_out: nn.Module = model[start:end]
    return cut_out


def regroup(side: Side, end: int) -> nn.Module:
    return nn.Sequential(*list(side.model.children())[:end])


def move(side: Side, path: str) -> nn.Module:
    return nn.Sequential(side.part(path), nn.Tanh())


def deepcopied(side: Side) -> nn.Module:
    return copy.deepcopy(side.model)


def shallow(side: Side) -> nn.Module:
    return copy.copy(side.model)


def cloned(side: Side) -> nn.Module:
    """As meta-learning clones: copies of each `__dict__`, with other parameters and buffers."""

    def of(module: nn.Module) -> nn.Module:
        new = module.__new__(type(module))
        vars(new).update(vars(module))
        for table in ("_parameters", "_buffers"):
            items = getattr(module, table).items()
            vars(new)[table] = {k: None if v is None else v.detach().clone() for k, v in items}
        for key, parameter in new._parameters.items():
            new._parameters[key] = None if parameter is None else nn.Parameter(parameter * 0.9)
        vars(new)["_modules"] = {k: m and clones[id(m)] for k, m in module._modules.items()}
        return new

    clones: dict[int, nn.Module] = {}
    for module in reversed(list(side.model.modules())):  # parts come before what has them
        clones[id(module)] = of(module)
    return clones[id(side.model)]


def pickled(side: Side) -> nn.Module:
    model: nn.Module = pickle.loads(pickle.dumps(side.model))
    return model


def reloaded(side: Side) -> None:
    state = {key: value * 0.75 if value.is_floating_point() else value
             for key, value in side.model.state_dict().items()}  # fmt: skip
    side.model.load_state_dict(state)


# Forwards


def rebind(side: Side, path: str, kind: str) -> None:
    part: Any = side.part(path)
    own = part.forward if kind == "around" else types.MethodType(type(part).forward, part)
    if kind == "function" and hasattr(part.forward, "__func__"):  # as accelerate
        part.forward = types.MethodType(part.forward.__func__, part)
    elif kind in ("same", "function"):
        part.forward = own
    else:
        part.forward = lambda *args, **kwargs: own(*args, **kwargs) * 0.5


def compiled(side: Side, path: str, how: str) -> None:
    part = side.part(path)
    if how == "method":
        part.compile(backend="eager")
    else:
        above, name = side.place(path)
        setattr(above, name, torch.compile(part, backend="eager"))


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


def reparametrised(side: Side, path: str, kind: str) -> None:
    part = side.part(path)
    if kind == "parametrize":
        parametrize.register_parametrization(part, "weight", Halved())
    elif kind == "weight_norm":
        parametrizations.weight_norm(part)
    elif kind == "old weight_norm":
        nn.utils.weight_norm(part)
    elif kind == "spectral_norm":
        nn.utils.spectral_norm(part)
    elif kind == "prune":
        prune.l1_unstructured(part, "weight", amount=0.3)
    elif kind == "unprune":
        prune.remove(part, "weight")


def folded(side: Side, conv: str, norm: str) -> None:
    fused = fuse_conv_bn_eval(side.part(conv).eval(), side.part(norm).eval())
    above, name = side.place(conv)
    setattr(above, name, fused)
    above, name = side.place(norm)
    setattr(above, name, nn.Identity())


# Calls: each takes an input and returns an output.


def whole(side: Side, x: Tensor) -> Any:
    return side.model(x)


def part(side: Side, x: Tensor, path: str) -> Any:
    return side.part(path)(x)


def forward_of(side: Side, x: Tensor, path: str) -> Any:
    return side.part(path).forward(x)


def of_class(side: Side, x: Tensor, path: str) -> Any:
    module = side.part(path)
    return type(module).forward(module, x)


def without_gradient(side: Side, x: Tensor) -> Any:
    with torch.no_grad():
        return side.model(x)


def functional(side: Side, x: Tensor, factor: float) -> Any:
    state = {name: p * factor for name, p in side.model.named_parameters()}
    return torch.func.functional_call(side.model, state, (x,))


def checkpointed(side: Side, x: Tensor, reentrant: bool) -> Any:
    return checkpoint(side.model, x, use_reentrant=reentrant)


def in_segments(side: Side, x: Tensor, segments: int) -> Any:
    return checkpoint_sequential(list(side.model.children()), segments, x, use_reentrant=False)


def traced(side: Side, x: Tensor) -> Any:
    if side.handles or side.everywhere:  # they run where torch.fx looks into a module
        raise SystemExit
    return fx.symbolic_trace(side.model)(x)


def one_by_one(side: Side, x: Tensor) -> Any:
    for child in side.model.children():
        x = child(x)
    return x


def replica(side: Side, x: Tensor) -> Any:
    """As torch.nn.parallel.replicate makes one."""
    modules = list(side.model.modules())
    copies: dict[nn.Module, Any] = {m: m._replicate_for_data_parallel() for m in modules}
    for module, twin in copies.items():
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else copies[child]
        for name, parameter in module._parameters.items():
            twin._parameters[name] = parameter
        for name, buffer in module._buffers.items():
            twin._buffers[name] = buffer
    return copies[side.model](x)


def odd(side: Side, x: Tensor, kind: str) -> Any:
    """Another input than usual."""
    made = {
        "flat": lambda: x[0], "narrow": lambda: x[:, :3], "single": lambda: x[:1],
        "none": lambda: x[:0],
        "channels_last": lambda: x.contiguous(memory_format=torch.channels_last),
        "float": lambda: x.float(), "no gradient": lambda: x.detach(),
    }[kind]()  # fmt: skip
    return side.model(made)
