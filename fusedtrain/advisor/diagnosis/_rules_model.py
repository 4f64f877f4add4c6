"""Rules of layers, and of graphs that nobody needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ..._text import counted, memory_text, time_text
from .._views import Site
from ._facts import Fusable, Layer, RunFacts
from ._rule import Cost, Seen, change, not_measured, of_a_step, rule, times

_CONVOLUTIONS = tuple(f"Conv{kind}{n}d" for kind in ("", "Transpose") for n in (1, 2, 3))
_SAVED = 0.25  # of the bytes kept
_GAIN = 0.05  # of a step, or of forward and backward
_FULL = 0.8  # of the memory
_CONVERTED = {"now": "now", "store": "converted", "recompute": 'with memory="recompute"',
              "dropout": 'with dropout="fused"'}  # fmt: skip
_SAME_CALL = "Nothing more: the fusedtrain.convert that `convert-fuses` asks for does this, too."


def _by_site(layers: Iterable[Layer]) -> Iterator[tuple[Site | None, list[Layer]]]:
    groups: dict[Site | None, list[Layer]] = defaultdict(list)
    for layer in layers:
        groups[layer.site].append(layer)
    yield from groups.items()


def _named(layers: list[Layer]) -> str:
    names = ", ".join(layer.name or "(the model itself)" for layer in layers[:3])
    more = len(layers) - 3
    return f"{len(layers)} x {layers[0].type}: {names}" + (f" and {more} more" if more > 0 else "")


@rule(
    "bias-before-norm",
    "a bias before a batch norm",
    "Construct the layer with bias=False, or call fusedtrain.drop_redundant_bias(model).",
    "trials",
)
def biases(facts: RunFacts) -> Iterator[Seen]:
    for site, layers in _by_site(facts.biases):
        seconds = sum(layer.seconds for layer in layers)
        alone = all(layer.alone for layer in layers)
        names = (*_CONVOLUTIONS, "Linear")
        yield Seen(
            site,
            f"{_named(layers)}; backward sums {memory_text(sum(x.bytes for x in layers))} of "
            "gradients for these biases",
            len(layers),
            Cost("at most", f"{of_a_step(seconds, facts)} (the sums alone, measured)", seconds)
            if facts.step
            else not_measured("a pass over the gradient of each output"),
            changes=change("keywords", site, *names, bias="False") if alone else (),
        )


@rule(
    "in-place-clone",
    "an activation in place that copies its input",
    "Leave inplace out: the derivative needs the input.",
    "eager",
)
def clones(facts: RunFacts) -> Iterator[Seen]:
    for what in dict.fromkeys(event.what for event in facts.clones):
        events = [event for event in facts.clones if event.what == what]
        layers = [layer for layer in facts.in_place if layer.note == what]
        sites = [layer.site for layer in layers] or [event.site for event in events]
        sites = list(dict.fromkeys(site for site in sites if site is not None))
        names = tuple({layer.type for layer in layers}) or (what.removesuffix("_"),)
        size, count = sum(e.bytes for e in events), sum(e.count for e in events)
        yield Seen(
            sites[0] if sites else None,
            f"{what} in place, {times(count)} a step: the input is copied first, "
            f"{memory_text(size)}",
            size,
            Cost(
                "measured",
                f"{memory_text(size)} copied a step for nothing: as much is kept as without "
                "inplace",
                bytes=size,
            ),
            changes=tuple(c for s in sites for c in change("keywords", s, *names, inplace="")),
        )


@rule(
    "norm-moves-twice",
    "a checkpointed batch norm moves its statistics twice",
    "Call fusedtrain.convert(model): its norms move nothing when a checkpoint repeats a "
    "forward; or take the norm out of the checkpoint.",
)
def moved_twice(facts: RunFacts) -> Iterator[Seen]:
    for site, layers in _by_site(facts.twice):
        count = layers[0].count
        yield Seen(
            site,
            f"{_named(layers)}: {count:.3g} calls in backward for each call in forward "
            "move the running statistics again",
            count,
            not_measured("no time: the averages follow the last batch too closely"),
        )


@rule(
    "frozen-norm-keeps",
    "a frozen batch norm keeps its input",
    "Call fusedtrain.fold_frozen_norms(model): the convolution does the work of the norm.",
    "eager",
)
def frozen(facts: RunFacts) -> Iterator[Seen]:
    for site, layers in _by_site(facts.frozen):
        size = sum(layer.bytes for layer in layers)
        taken = all(layer.note == "fold_frozen_norms" for layer in layers)
        remedy = "" if taken else "Put a fused one in its place, such as fusedtrain.nn."
        remedy += "" if taken else "BatchNormAct2d: with frozen weights it keeps nothing."
        yield Seen(
            site,
            f"{_named(layers)} in eval mode within a model that trains",
            len(layers),
            Cost("at most", f"{memory_text(size)} kept for backward", bytes=size),
            remedy,
        )


def _best(model: Fusable) -> str:
    """The `memory` to convert with: one that keeps a quarter less, or else one whose passes are
    surely faster, "dropout" among them; "" if there is none."""
    most, (now, _) = model.saves_most, model.passes.get("now", [0.0, 1.0])
    if model.before - min(model.store, model.recompute) >= _SAVED * model.before:
        return most
    faster = {
        memory: seconds for memory, (seconds, gain) in model.passes.items()
        if gain > 1 and now - seconds >= _GAIN * now
    }  # fmt: skip
    return min(faster, key=lambda memory: faster[memory], default="")


@rule(
    "convert-fuses",
    "layers that `convert` fuses",
    "Call fusedtrain.convert(model, example).",
    "eager",
    "trials",
)
def fusable(facts: RunFacts) -> Iterator[Seen]:
    for model in facts.fusable:
        memory = _best(model)
        if not memory:
            continue
        drops = memory == "dropout"
        left = model.store - model.masks if drops else getattr(model, memory)
        saved = max(model.before - left, 0)
        (now, _), (seconds, gain) = (model.passes.get(k, [0.0, 1.0]) for k in ("now", memory))
        times = [f"{time_text(s)} {_CONVERTED[name]}" for name, (s, _) in model.passes.items()]
        won = min(now - seconds, facts.step) if gain > 1 else 0.0
        texts = [f"{memory_text(saved)} kept for backward"]
        texts += [of_a_step(won, facts)] if won > 0 else []
        mode = {"recompute": ', memory="recompute"', "dropout": ', dropout="fused"'}.get(memory, "")
        draws = ": the same distribution of masks, from other random numbers" if drops else ""
        yield Seen(
            model.site,
            f"`convert` would fuse {model.changed or 'dropout'} in {model.type}; kept for "
            f"backward: {memory_text(model.before)}, converted {memory_text(model.store)}, with "
            f'memory="recompute" {memory_text(model.recompute)}; forward and backward take '
            f"{', '.join(times) or 'a time that was not measured'}",
            saved,
            Cost("measured", " and ".join(texts), won or None, saved),
            f"Call fusedtrain.convert(model, example{mode}) before the optimizer is made{draws}.",
            change("convert", model.site, arguments=mode),
        )


@rule(
    "memory-nearly-full",
    "memory is nearly full",
    "plan = fusedtrain.plan_memory(model, example, 0.6) finds the fastest step in 0.6 of its "
    "peak; fusedtrain.convert(model, example, memory=plan) follows it, with the same losses.",
)
def nearly_full(facts: RunFacts) -> Iterator[Seen]:
    if not facts.peak or not facts.memory or facts.peak < _FULL * facts.memory or facts.assumed:
        return
    where = "the GPU" if facts.on_gpu else "this machine"
    yield Seen(
        facts.model_site,
        f"{memory_text(facts.peak)} of {memory_text(facts.memory)} of {where} were in use at once",
        facts.peak / facts.memory,
        not_measured(
            "a larger batch, or a longer sequence, ends the run",
            bytes=facts.peak,
        ),
    )


@rule(
    "slow-depthwise",
    "depthwise convolutions that torch computes slowly",
    "Call fusedtrain.convert(model) before training: these layers get fusedtrain's kernels.",
    "eager",
    "trials",
    "timing",
)
def slow_depthwise(facts: RunFacts) -> Iterator[Seen]:
    for model in facts.depthwise:
        gain = min(model.now - model.converted, facts.step)
        # Other processes may take the rest of a step.
        if gain < _GAIN * min(facts.step, facts.busy or facts.step):
            continue
        one = (model.type, model.site)
        fuses = any((m.type, m.site) == one and _best(m) for m in facts.fusable)
        more = f" and {model.layers - 1} more" if model.layers > 1 else ""
        yield Seen(
            model.site,
            f"{counted(model.layers, 'depthwise convolution')} of {model.type}: "
            f"{model.name}{more}; forward and backward take {time_text(model.now)} a step in "
            f"torch's kernels, {time_text(model.converted)} in fusedtrain's",
            model.layers,
            Cost("measured", of_a_step(gain, facts), gain),
            _SAME_CALL if fuses else "",
            () if fuses else change("convert", model.site, arguments=""),
        )


@rule(
    "graph-kept",
    "a loss is kept with its graph",
    "Add the number: loss.detach(), or loss.item() every 100 steps.",
)
def kept(facts: RunFacts) -> Iterator[Seen]:
    for graph in facts.kept:
        what = f"`{graph.name}` keeps" if graph.name else "something keeps"
        if graph.backward:
            cost = Cost(
                "at most", f"{graph.nodes} nodes of autograd a step more, and their outputs"
            )
        else:
            text = f"{memory_text(graph.bytes)} a step more, until memory is full"
            cost = Cost("measured", text, bytes=graph.bytes)
        yield Seen(
            graph.site,
            f"{what} the graphs of {graph.steps} earlier steps alive",
            graph.steps,
            cost,
            changes=change("detach", graph.site, graph.name) if graph.local else (),
        )


@rule(
    "eval-with-grad",
    "evaluation without no_grad",
    "Put the evaluation under torch.no_grad() or torch.inference_mode().",
)
def evaluations(facts: RunFacts) -> Iterator[Seen]:
    for call in facts.evaluations:
        site = call.site
        yield Seen(
            site,
            f"{call.calls} calls of {call.type} in eval mode made graphs that no backward used",
            call.calls,
            Cost("measured", f"{memory_text(call.bytes)} kept during each call", bytes=call.bytes),
            changes=change("no_grad", site),
        )
