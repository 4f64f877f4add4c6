"""The facts of a watched run."""

from __future__ import annotations

import inspect
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn

from ..._backends import local_ranks
from ..._graph.compiled import original_of
from ..._text import shape_text
from ..._torch_private import BatchNormBase
from ...ops.depthwise import is_measured
from .._memory import machine_memory, peak_of_process
from .._views import Site, parameters_of, without_parts
from . import _trials
from ._depthwise import slow_layers
from ._facts import Evaluation, Fusable, Layer, Loader, Optimizer, RunFacts, Scaler
from ._modules import Root
from ._operators import Account
from ._watch import OBSERVED, LoaderRecord, OptimizerRecord, Watch

_ASSUMED = (9, 0)  # the capability of a GPU that is assumed
_SLOW = 5.0  # seconds a step: a model is not run again, which takes about 50 steps
_IN_PLACE = {
    "SiLU": "silu_", "Mish": "mish_", "Hardswish": "hardswish_", "Hardsigmoid": "hardsigmoid_",
    "Hardtanh": "hardtanh_", "ReLU6": "hardtanh_", "Threshold": "threshold_",
}  # fmt: skip
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
                 nn.ConvTranspose3d, nn.Linear)  # fmt: skip
_Value = TypeVar("_Value")


def collect(watch: Watch, script: str, *, trials: bool, model: nn.Module | None = None) -> RunFacts:
    """The facts for the rules. `watch` was stopped. `model`: the only one of interest."""
    facts = RunFacts(script=script, steps=watch.taken, assumed=watch.assumed, ignored=watch.ignored)
    _machine(facts, watch)
    with _neutral():
        _times(facts, watch, trials)
        _operators(facts, watch)
        _script(facts, watch, trials)
        parts = None if model is None else {id(m) for m in model.modules()}
        seen = [_Model(root, watch) for root in _outermost(watch)]
        seen = [one for one in seen if parts is None or id(one.module) in parts]
        if seen:
            facts.model_site = max(seen, key=lambda one: one.size).site
        facts.tried = trials and facts.step < _SLOW
        facts.compiled = any(one.compiled for one in seen)
        for one in seen:
            one.tell(facts, facts.tried)
    return facts


@contextmanager
def _neutral() -> Iterator[None]:
    """Keeps the script's autocast and no_grad away from the trials."""
    with (
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def attempt(call: Callable[[], _Value], otherwise: _Value) -> _Value:
    """The value of a trial; a model that cannot be copied or run again has no trial."""
    try:
        return call()
    except Exception:
        return otherwise


def _machine(facts: RunFacts, watch: Watch) -> None:
    on_gpu = watch.calls.devices.get("cuda", 0) > 0
    facts.device = "cuda" if on_gpu or watch.assumed else "cpu"
    facts.assumed = watch.assumed and not on_gpu
    if on_gpu:
        facts.capability = torch.cuda.get_device_capability()
        facts.peak, facts.memory = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]
    elif watch.assumed:
        facts.capability = _ASSUMED
    if not on_gpu:
        facts.peak, facts.memory = peak_of_process(), machine_memory()
    facts.gpus = torch.cuda.device_count()
    affinity = getattr(os, "sched_getaffinity", None)
    facts.cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    facts.threads, facts.threads_site = torch.get_num_threads(), watch.threads_site
    facts.ranks = local_ranks()
    facts.autotuner = torch.backends.cudnn.benchmark
    facts.deterministic = (
        torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    )
    facts.tf32_matmul = torch.get_float32_matmul_precision() != "highest"
    facts.tf32_conv = torch.backends.cudnn.allow_tf32


def _times(facts: RunFacts, watch: Watch, trials: bool) -> None:
    usual = [step for step in watch.timed if step.usual]
    facts.timed = len(usual)
    if usual:
        facts.step = median(step.seconds for step in usual)
        facts.busy = median(step.busy for step in usual)
        # A loader without workers takes about as long each time, but for other processes; workers
        # hand over several batches at once.
        usually = median if any(record.workers for record in watch.loaders) else _lower_quartile
        facts.wait = usually([step.wait for step in usual])
        facts.loading = usually([step.loading for step in usual])
        facts.faults = median(step.faults for step in usual)
        drains = [step.drain for step in usual if step.drain is not None]
        facts.drain = median(drains) if drains else None
    if trials:
        facts.operator = _trials.operator_seconds()
        facts.fault = _trials.fault_seconds() if facts.faults else 0.0
        if facts.threads > facts.cores and facts.ranks == 1:
            facts.oversubscribed = _trials.oversubscription(facts.threads, facts.cores)


def _operators(facts: RunFacts, watch: Watch) -> None:
    """Facts of the whole steps observed; the first has the construction of the model in it."""
    whole = watch.operators.steps[: min(watch.taken, OBSERVED)]
    steps = [step for i, step in enumerate(whole) if i not in watch.unusual]
    account = Account(steps[1:] or steps)
    for name in (
        "operators", "large", "convolutions", "half_convolutions", "single_convolutions",
        "contiguous",
    ):  # fmt: skip
        setattr(facts, name, account.mean(name))
    facts.elements, facts.matmuls = account.elements(), account.matmuls()
    facts.copies, facts.memsets = account.copies(), account.events("memset")
    facts.clones, facts.clips = account.events("clone"), account.events("clip")
    waits = [e for e in account.events("sync") if facts.assumed or e.device == "cuda"]
    facts.syncs = waits if facts.on_gpu else []
    facts.shapes_vary = any(len(shapes) > 1 for shapes in watch.calls.shapes.values())
    if facts.memsets:
        size, device = max(e.bytes for e in facts.memsets), facts.memsets[0].device
        facts.clearing = attempt(lambda: _trials.clearing_seconds(size, device), 0.0)


def _script(facts: RunFacts, watch: Watch, trials: bool) -> None:
    facts.autocast, facts.autocast_site = dict(watch.calls.autocast), watch.calls.autocast_site
    facts.zeros = median(watch.zeros) if watch.zeros else 0.0
    used: Counter[Site | None] = Counter()
    for scaler in watch.scalers.values():
        used[scaler.site] += scaler.used
    facts.scalers = [Scaler(site, count) for site, count in used.items()]
    if facts.autocast.get("float16") and watch.scaling.by_apex:
        facts.scalers.append(Scaler(None, watch.taken))
    facts.direct_steps = watch.scaling.direct_steps(watch.taken)
    records = {record.site: record for record in watch.optimizers.values() if record.seconds}
    facts.optimizers = [_optimizer(record, trials) for record in records.values()]
    facts.loaders = [
        Loader(r.site, r.workers, r.pinned, len(r.waits), _usual_wait(r), r.iterable)
        for r in watch.loaders
    ]
    facts.kept = [watch.kept] if watch.kept else []
    for site, module in {site: (site, module) for site, module in watch.parallel}.values():
        inner = next(module.children(), module)
        size = sum(p.nbytes for p in module.parameters())
        facts.parallel.append(Layer("", type(inner).__name__, site, size))
    groups: dict[tuple[Site | None, str], Evaluation] = {}
    for call in watch.calls.unused:
        if not call.mark.used:
            key = (call.site, call.type)
            one = groups.setdefault(key, Evaluation(call.site, call.type, 0, 0))
            one.calls, one.bytes = one.calls + 1, max(one.bytes, call.bytes)
    facts.evaluations = list(groups.values())


def _usual_wait(record: LoaderRecord) -> float:
    waits = record.waits or [0.0]
    return median(waits) if record.workers else _lower_quartile(waits)


def _lower_quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


def _optimizer(record: OptimizerRecord, trials: bool) -> Optimizer:
    optimizer = record.optimizer
    tensors = parameters_of(optimizer)
    first = optimizer.param_groups[0]
    exact = getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)
    made = Optimizer(
        record.site, type(optimizer).__name__, exact, first.get("foreach"), first.get("fused"),
        len(tensors), sum(p.nbytes for p in tensors), median(record.seconds),
    )  # fmt: skip
    if exact and trials and not made.fused:
        made.timing = attempt(lambda: _trials.optimizer_timing(optimizer), None)
    return made


def _outermost(watch: Watch) -> list[Root]:
    """The models that the script calls, without those that are parts of another one."""
    by_site: dict[Any, Root] = {}
    for root in watch.calls.roots.values():
        site = watch.sites.get(root.module)
        # A line that runs again, for each fold of the data, makes the same model again.
        by_site[id(root) if site is None else (site, type(root.module))] = root
    outermost = set(map(id, without_parts(root.module for root in by_site.values())))
    return [root for root in by_site.values() if id(root.module) in outermost]


def _example(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments as `convert` takes them: by place or by name."""
    if not kwargs:
        return args if len(args) != 1 else args[0]
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    named = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL and name in named:
            return None
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


class _Model:
    """One model of the script, without the wrappers around it."""

    def __init__(self, root: Root, watch: Watch) -> None:
        module = root.module
        while isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        self.module = original_of(module, "doctor")
        parts = self.module.modules()
        self.compiled = self.module is not module or any(
            getattr(part, "_compiled_call_impl", None) is not None for part in parts
        )
        self.watch, self.example = watch, root.example
        self.site = watch.sites.get(self.module)
        self.names = {id(m): name for name, m in self.module.named_modules()}
        self.size = sum(p.numel() for p in self.module.parameters())

    def _layers(
        self, chosen: dict[int, int], counts: dict[int, float] | None = None
    ) -> list[Layer]:
        """Layers of this model by identity, with their bytes."""
        built = Counter(self.watch.sites.values())
        faulty = Counter(
            self.watch.sites[m] for m in self.module.modules()
            if id(m) in chosen and m in self.watch.sites
        )  # fmt: skip
        layers = []
        for module in self.module.modules():
            if id(module) in chosen:
                site = self.watch.sites.get(module)
                alone = site is not None and built[site] == faulty[site]
                layer = Layer(self.names[id(module)], type(module).__name__, site,
                              chosen[id(module)], alone=alone)  # fmt: skip
                layer.count = (counts or {}).get(id(module), 1.0)
                layers.append(layer)
        return layers

    def tell(self, facts: RunFacts, trials: bool) -> None:
        norms = self.watch.calls.norms
        moved = {key: 0 for key, count in norms.moved.items() if norms.forward[key]}
        counts = {key: norms.moved[key] / norms.forward[key] for key in moved}
        facts.twice += self._layers(moved, counts)
        self._frozen(facts, trials)
        for kind, operator in _IN_PLACE.items():
            modules = {id(m): 0 for m in self.module.modules()
                       if type(m).__name__ == kind and getattr(m, "inplace", False)}  # fmt: skip
            for layer in self._layers(modules):
                layer.note = operator
                facts.in_place.append(layer)
        if trials:
            self._half(facts)
            self._biases(facts)
            self._fusable(facts)
            self._depthwise(facts)

    def _frozen(self, facts: RunFacts, trials: bool) -> None:
        chosen = {k: size for k, size in self.watch.calls.norms.frozen.items() if k in self.names}
        if not chosen:
            return
        nothing: set[str] = set()
        taken = attempt(lambda: _trials.tuned_norms(self.module), nothing) if trials else nothing
        for layer in self._layers(chosen):
            norm = self.module.get_submodule(layer.name)
            trains = any(p.requires_grad for p in norm.parameters())
            layer.note = "fold_frozen_norms" if layer.name in taken or not trials else ""
            if layer.note or not trains:  # a weight that trains needs the input
                facts.frozen.append(layer)

    def _half(self, facts: RunFacts) -> None:
        """Times the convolution with the most work in the dtype of autocast."""
        dtype = next((d for d in ("bfloat16", "float16") if facts.autocast.get(d)), "")
        shapes = self.watch.calls.shapes
        layers = {m: max(shapes[id(m)]) for m in self.module.modules() if id(m) in shapes}
        if facts.device != "cpu" or not dtype or not facts.half_convolutions or not layers:
            return
        layer: Any = max(layers, key=lambda m: prod(layers[m]) * m.weight.numel())  # type: ignore[operator]
        ratio = attempt(
            lambda: _trials.half_ratio(layer, layers[layer], getattr(torch, dtype)), 0.0
        )
        if ratio > facts.half_ratio:
            shape = shape_text(layers[layer])
            facts.half_ratio = ratio
            facts.half_convolution = f"{self.names[id(layer)] or type(layer).__name__} ({shape})"

    def _biases(self, facts: RunFacts) -> None:
        layers = [m for m in self.module.modules() if isinstance(m, _CONVOLUTIONS)]
        norms = (m for m in self.module.modules() if isinstance(m, BatchNormBase))
        trains = any(norm.training for norm in norms)
        if not trains or all(layer.bias is None for layer in layers):
            return
        nothing: set[str] = set()
        names = attempt(lambda: _trials.redundant_biases(self.module), nothing)
        shapes = self.watch.calls.outputs
        chosen = {}
        for module in layers:
            if self.names[id(module)] in names and id(module) in shapes:
                shape, itemsize = shapes[id(module)]
                chosen[id(module)] = torch.Size(shape).numel() * itemsize
        for layer in self._layers(chosen):
            one = self.module.get_submodule(layer.name)
            layer.seconds = _trials.bias_seconds(shapes[id(one)][0], next(one.parameters()))
            facts.biases.append(layer)

    def _fusable(self, facts: RunFacts) -> None:
        arguments = self.example
        if arguments is None or self.compiled:
            return
        example = attempt(lambda: _example(self.module, *arguments), None)
        if example is None:
            return
        counts = attempt(lambda: _trials.fusable(self.module, example), ("", 0, 0, 0, 0))
        if any(counts):
            model = Fusable(type(self.module).__name__, self.site, *counts)
            autocast = self.watch.calls.autocast.most_common(1)
            dtype = getattr(torch, autocast[0][0]) if autocast else None
            modes = dict.fromkeys(["store", model.saves_most, *["dropout"] * bool(model.masks)])
            model.passes = attempt(
                lambda: _trials.pass_seconds(self.module, example, modes, dtype), {}
            )
            facts.fusable.append(model)

    def _depthwise(self, facts: RunFacts) -> None:
        if self.compiled or not is_measured(facts.device):
            return
        observed = range(min(self.watch.taken, OBSERVED))
        steps = observed[1:] or observed  # before the first one a script may try its model
        calls = self.watch.calls.depthwise
        slow = attempt(lambda: slow_layers(self.module, calls, steps), None)
        if slow is not None:
            facts.depthwise.append(replace(slow, site=self.site))
