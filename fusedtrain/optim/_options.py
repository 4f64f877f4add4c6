"""The options of the optimizers: arguments of a constructor, of a group and of all groups."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from ..reference.split_weights import CORRECTIONS
from ._checks import check_arguments, check_keywords, warn_of_rounding
from ._codes import Q8
from ._distributed import check_sharding, first_seed
from ._plan import Needs, Numbers, Store
from ._release_checks import check_options as check_released

WRITE_BACK = {"none": 0.0, "unscaled": 1.0, "zero": 2.0}  # as csrc/ops/optimizers.h numbers them


class SharedOptions(TypedDict, total=False):
    """Options of `FusedOptions` that no optimizer has as an argument of its own."""

    agc: float | None
    agc_eps: float
    ema_decay: float | None
    gradient_writeback: str
    state_dtype: torch.dtype | Literal["q8"] | None
    stochastic_rounding: bool


class OtherOptions(SharedOptions, total=False):
    """`FusedOptions` of an optimizer that has a ``max_grad_norm`` of its own."""

    master_weights: bool | Literal["split24", "split32"]


class FusedOptions(OtherOptions, total=False):
    """Keyword arguments of every optimizer of fusedtrain, besides its own.

    max_grad_norm: clips the norm of all gradients together, as ``clip_grad_norm_`` does.
    agc: clips unit by unit (adaptive gradient clipping), to this fraction of the weights' norm.
    agc_eps: least norm that a unit's weights count with.
    ema_decay: keeps an exponential moving average of the weights, with this decay.
    gradient_writeback: the values that a step, also a skipped one, leaves in ``.grad``: "none"
        (unchanged), "unscaled" (divided by the loss scale, and clipped unless the step is skipped;
        the default of `fusedtrain.apex.optimizers`) or "zero".
    state_dtype: dtype of the states that are as large as the parameter; None: the parameter's.
        "q8": codes of 8 bits with a float32 scale for each 32 of them, 1.125 bytes an element. A
        step computes with the numbers of the codes, and rounds at random, without bias, those that
        it stores: a momentum m, in a group with the largest magnitude s, to within
        (s + |m|)^2 / (250 s), and the root of an average of squares to within 1/255 of its group's
        largest root. Where 31 of 32 neighbours have gradients 1e5 times smaller than the 32nd,
        AdamW moves them 0.013 times as far, and LAMB, whose trust ratio makes up for them, the 32nd
        5 to 17 times as far: take float32 states there. Parameters of fewer than 4096 elements,
        float64 parameters, and the squares of ``amsgrad`` and ``centered`` keep states of float32
        or float64.
    master_weights: keeps float32 weights of float16 and bfloat16 parameters. "split32" keeps, in
        their place, corrections of 16 bits to the parameters: with bfloat16 the same weights bit
        for bit. "split24" keeps corrections of 8 bits.
    stochastic_rounding: rounds bfloat16 parameters up or down at random, without bias; with
        "split24" the 24 bits of their weights.
    """

    max_grad_norm: float | None


DEFAULTS: FusedOptions = {
    "max_grad_norm": None,
    "agc": None,
    "agc_eps": 1e-3,
    "ema_decay": None,
    "gradient_writeback": "none",
    "state_dtype": None,
    "master_weights": False,
    "stochastic_rounding": False,
}
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_grad_norm": (lambda value: value > 0, "above 0"),
    "agc": (lambda value: value > 0, "above 0"),
    "agc_eps": (lambda value: value >= 0, "0 or above"),
    "ema_decay": (lambda value: 0 <= value < 1, "from 0 to below 1"),
}
# The option without which a group has no such state.
_NEEDS = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}
_MOMENTA = {"exp_avg", "momentum_buffer"}


def check_options(options: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError, which names the first wrong option."""
    for name, (in_range, words) in _RANGES.items():
        value = options[name]
        if value is None and name != "agc_eps":
            continue
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not in_range(float(value)):
            raise ValueError(f"Invalid {name} value: {value}; it must be {words}")
    if options["max_grad_norm"] is not None and options["agc"] is not None:
        raise ValueError("max_grad_norm and agc cannot be used together")
    if not isinstance(options["stochastic_rounding"], bool):
        raise TypeError(
            f"stochastic_rounding must be True or False, got {options['stochastic_rounding']!r}"
        )
    masters = options["master_weights"]
    if not isinstance(masters, bool) and not (isinstance(masters, str) and masters in CORRECTIONS):
        raise ValueError(
            f"master_weights must be True, False, 'split24' or 'split32', got {masters!r}"
        )
    if options["gradient_writeback"] not in WRITE_BACK:
        raise ValueError(
            f"gradient_writeback must be one of {', '.join(map(repr, WRITE_BACK))}, got "
            f"{options['gradient_writeback']!r}"
        )
    if options["state_dtype"] not in (None, torch.float32, torch.bfloat16, Q8):
        raise ValueError(
            "state_dtype must be torch.float32, torch.bfloat16 or 'q8', got "
            f"{options['state_dtype']}"
        )
    if options["stochastic_rounding"] and masters not in (False, "split24"):
        raise ValueError("master_weights and stochastic_rounding cannot be used together")


def _option(name: str, doc: str) -> Any:
    """A property that reads and sets an option of the optimizer."""
    return property(
        lambda o: o._fused_options[name], lambda o, new: o._itself._change(name, new), doc=doc
    )


_Method = TypeVar("_Method", bound=Callable[..., Any])


def of_itself(method: _Method) -> _Method:
    """Runs a method on the optimizer, also where a wrapper of it is called (see `_itself`)."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self._itself, *args, **kwargs)

    return cast("_Method", run)


class Options(torch.optim.Optimizer):
    """The part of `FusedOptimizer` that has the options, of groups and of all groups."""

    # Each optimizer defines:
    _keys: ClassVar[tuple[str, ...]] = ()  # of its groups, in their order; (): all arguments
    _not_negative: ClassVar[tuple[str, ...]] = ("lr", "alpha", "eps", "momentum", "weight_decay")
    _of_torch: ClassVar[bool] = False  # whether torch's class takes the arguments and checks them
    _maximizes: ClassVar[bool] = True  # whether a group's "maximize" counts
    _rule: ClassVar[str]
    _states: ClassVar[tuple[str, ...]]  # as large as a parameter, in the order of the rule
    _wide_states: ClassVar[bool] = False  # whether states of 16-bit parameters are float32
    _scalar_names: ClassVar[tuple[str | None, ...]] = ("step", None, None)  # in the state dict
    # Group keys that other or old checkpoints may lack, with the value that replaces them.
    _absent: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    _fused_options: dict[str, Any]
    _rounding_seed: int
    _controls: dict[torch.device, Tensor]
    _stores: dict[torch.device, Store]
    _low_precision: Mapping[int, Tensor]
    _release: Any
    _first_lr: tuple[Tensor, float] | None = None
    _reference: weakref.ref[Any]

    @property
    def _itself(self) -> Any:
        """The optimizer that steps. Wrappers of Lightning and Fabric are instances of its class,
        too, and take what they lack from it; what is set on them it does not see."""
        return self._reference() or self

    def _forget(self) -> None:
        self._reference = weakref.ref(self)

    def _name_copies(self) -> None:
        raise NotImplementedError

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    # --- of a group ---

    def _rule_options(self, group: dict[str, Any]) -> tuple[float, ...]:
        """The group's options of the rule, in the order of the rule."""
        raise NotImplementedError

    def _numbers(self, group: dict[str, Any]) -> Numbers:
        """The options of a group as numbers."""
        cautious = "caution" in self.defaults and group["caution"]
        return Numbers(
            group["lr"],
            group["weight_decay"],
            self._rule_options(group),
            maximize=self._maximizes and group.get("maximize", False),
            max_lr=self._max_lr(group),
            # Without a momentum an update has the gradient's sign.
            cautious=cautious and not _MOMENTA.isdisjoint(self._slots(group)),
        )

    def _slots(self, group: dict[str, Any]) -> tuple[str | None, ...]:
        """Names of the states of a group's parameters, in the order of the rule."""
        return tuple([s if s not in _NEEDS or group[_NEEDS[s]] else None for s in self._states])

    def _state_needs(self) -> Needs:
        options = self._fused_options
        return Needs(
            tuple(map(self._slots, self.param_groups)),
            self._scalar_names,
            self._initial,
            options["state_dtype"],
            self._wide_states,
            options["master_weights"],
            options["ema_decay"] is not None,
            self._rule,
        )

    def _initial(self, name: str) -> float:
        """The initial value of a state."""
        return 0.0

    def _max_lr(self, group: dict[str, Any]) -> float:
        """The optimizer's first learning rate, for "corrected" weight decay, or 0.

        Groups of timm's checkpoints have it from timm 1.0.31 on.

        Raises:
            ValueError: the rate is not positive.
        """
        if not ("corrected_weight_decay" in self.defaults and group["corrected_weight_decay"]):
            return 0.0
        lr = group.get("max_lr_snapshot", self.defaults["lr"])
        if isinstance(lr, Tensor):
            if self._first_lr is None or self._first_lr[0] is not lr:  # read once
                self._first_lr = (lr, float(lr))
            lr = self._first_lr[1]
        if not lr > 0:
            raise ValueError(
                "corrected_weight_decay divides by the first learning rate: make the optimizer "
                f"with the largest one, got {lr}"
            )
        return float(lr)

    # --- of all groups ---

    def _start(self, arguments: dict[str, Any]) -> None:
        """Checks the arguments of a constructor, its ``locals()``, and constructs torch's part."""
        options = arguments["options"]
        values = {k: v for k, v in arguments.items() if k not in ("self", "options")}
        check_keywords(type(self).__name__, options, list({**values, **DEFAULTS}))
        check_arguments(values, () if self._of_torch else self._not_negative)
        if self._of_torch:
            super().__init__(**values)
        else:
            params = values.pop("params")
            super().__init__(params, {name: values[name] for name in self._keys or values})
        self._set_options({**options, **{k: v for k, v in values.items() if k in DEFAULTS}})

    def _set_options(self, options: Mapping[str, Any]) -> None:
        merged = {**DEFAULTS, **options}
        check_options(merged)
        for group in self.param_groups:
            self._check_group(group)
            if group.get("corrected_weight_decay"):
                self._max_lr(group)  # a scheduler may write to a learning rate that is a tensor
        warn_of_rounding(merged, self._all_params())
        self._check_sharding(merged)
        self._fused_options = merged
        self._rounding_seed = first_seed()  # for `control` at 0 applied steps
        self._controls = {}  # they outlive the plans
        self._forget()
        self._name_copies()

    def _check_group(self, group: Mapping[str, Any]) -> None:
        for name in DEFAULTS:
            if name in group and name not in self.defaults:
                raise ValueError(f"{name} is an option of the whole optimizer, not of a group")

    def _check_sharding(self, options: Mapping[str, Any]) -> None:
        check_sharding(self._all_params(), options, type(self).__name__)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not hasattr(self, "_fused_options"):  # `_set_options` checks them
            return super().add_param_group(param_group)
        self._check_group(param_group)
        super().add_param_group(param_group)
        try:
            self._check_sharding(self._fused_options)
        except RuntimeError:
            self.param_groups.pop()
            raise

    def _change(self, name: str, value: Any) -> None:
        options = {**self._fused_options, name: value}
        check_options(options)
        if self._release is not None:
            check_released(options)
        if name == "agc":
            self._check_sharding(options)
        if name == "stochastic_rounding":
            warn_of_rounding(options, self._all_params())
        self._fused_options = options
        self._name_copies()

    # Options that may be set between steps.
    max_grad_norm = _option("max_grad_norm", "Norm that all gradients are clipped to, or None.")
    agc = _option("agc", "Fraction of the weights' norm that units are clipped to, or None.")
    agc_eps = _option("agc_eps", "Least norm that a unit's weights count with.")
    ema_decay = _option("ema_decay", "Decay of the averaged weights, or None.")
    gradient_writeback = _option("gradient_writeback", "What a step leaves in the gradients.")
    state_dtype = _option("state_dtype", 'Dtype of the large states, "q8" or None.')
    master_weights = _option("master_weights", "The kind of masters of 16-bit parameters.")
    stochastic_rounding = _option("stochastic_rounding", "Whether bfloat16 is rounded at random.")
