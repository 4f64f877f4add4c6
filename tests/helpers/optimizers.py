"""The one table of the optimizers: classes, counterparts and options; and the options of the rules.

A new optimizer is a row of CLASSES, and a row of RULES where its rule is new. All tests of
optimizers read both tables.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

import fusedtrain.apex.optimizers
import fusedtrain.optim
from fusedtrain.optim import FusedOptimizer
from helpers.apex_truth import TRUTHS
from helpers.models import timm

Options = dict[str, Any]


class Row(NamedTuple):
    """Test data of an optimizer class."""

    theirs: str  # the counterpart's module and class; "apex": of helpers/apex_truth.py
    busy: Options  # with them every state exists
    values: dict[str, list[Any]]  # of each option: those that may be drawn; the last does most
    sets: list[Options]  # compared one by one with the counterpart; lr is 0.1
    switches: tuple[str, ...] = ()  # Apex's options of the whole optimizer


_L2 = {"weight_decay": [0.0, 0.1]}
_BETAS = {"betas": [(0.9, 0.99), (0.6, 0.95), (0.0, 0.5)]}
_EPS = {"eps": [1e-8, 1e-2]}
_SGD = {"momentum": [0.9, 0.5, 0.0], "dampening": [0.0, 0.3], "nesterov": [False, True], **_L2}
_CAUTION = {"caution": [False, True], "corrected_weight_decay": [False, True]}
_CORRECTION = {"bias_correction": [True, False]}
_AVERAGING = {"grad_averaging": [True, False]}
_ASCENT = {"maximize": [False, True]}
_ADAM = {**_BETAS, **_EPS, **_L2, "amsgrad": [False, True], **_ASCENT}
_SQUARES = {"alpha": [0.9, 0.5], **_EPS, **_L2, "momentum": [0.9, 0.0], "centered": [False, True]}
_TRUST = {"trust_clip": [False, True], "always_adapt": [False, True]}

WD: Options = {"weight_decay": 0.05}
DECAYS: Options = {"lr": 0.1, "weight_decay": 0.1}
MOMENTUM: Options = {"momentum": 0.9}
CAUTION: Options = {"caution": True, **WD}
CORRECTED: Options = {"corrected_weight_decay": True, **WD}
UP: Options = {"maximize": True}
OTHER_BETAS: Options = {"betas": (0.5, 0.7), "eps": 1e-2}
_CENTERED: Options = {**MOMENTUM, "centered": True}
_NESTEROV: Options = {**MOMENTUM, "nesterov": True}
_DAMPED: Options = {**MOMENTUM, "dampening": 0.3, **WD}
_ADAM_SETS: list[Options] = [
    {}, WD, {"amsgrad": True, **WD}, {**UP, **WD}, OTHER_BETAS, {"betas": (0.0, 0.9), **WD},
    {"amsgrad": True, **UP},
]  # fmt: skip
_COUPLED: Options = {"adam_w_mode": False, **WD}
_MOMENTS: list[Options] = [
    {"weight_decay": 0.0}, WD, {"bias_correction": False, **WD}, _COUPLED,
    {**_COUPLED, "bias_correction": False, **OTHER_BETAS},
]  # fmt: skip

CLASSES: dict[str, Row] = {
    "SGD": Row(
        "torch.optim.SGD",
        {**DECAYS, **MOMENTUM, "dampening": 0.5},
        {**_SGD, **_ASCENT},
        [
            {}, WD, MOMENTUM, _DAMPED, {**_NESTEROV, **WD}, {**UP, **WD},
            {"momentum": 0.8, **UP},
        ],
    ),
    "SGDW": Row(
        "timm.optim.sgdw.SGDW",
        {**DECAYS, **_NESTEROV, "caution": True},
        {**_SGD, **_CAUTION, **_ASCENT},
        [
            {}, WD, CAUTION, CORRECTED, _DAMPED, {**MOMENTUM, **CAUTION}, {**_NESTEROV, **WD},
            {**_NESTEROV, **CAUTION}, {**MOMENTUM, **UP, **CORRECTED, **CAUTION},
        ],
    ),
    "Adam": Row(
        "torch.optim.Adam", {"lr": 0.1, "amsgrad": True}, _ADAM,
        [*_ADAM_SETS, {"decoupled_weight_decay": True, **WD}],
    ),
    "AdamW": Row(
        "torch.optim.AdamW", DECAYS, _ADAM, [*_ADAM_SETS, {"weight_decay": 0.0}],
    ),
    "NAdamW": Row(
        "timm.optim.nadamw.NAdamW",
        {"lr": 0.1, "caution": True, "corrected_weight_decay": True},
        {**_BETAS, **_EPS, **_L2, **_CAUTION, **_ASCENT},
        [WD, CAUTION, CORRECTED, {**UP, **CAUTION}, OTHER_BETAS],
    ),
    "Lion": Row(
        "timm.optim.lion.Lion",
        {**DECAYS, "caution": True},
        {**_BETAS, **_L2, **_CAUTION, **_ASCENT},
        [{}, WD, CAUTION, CORRECTED, {**UP, "betas": (0.5, 0.7), **CAUTION}],
    ),
    "RMSprop": Row(
        "torch.optim.RMSprop",
        {"lr": 0.1, **_CENTERED},
        {**_SQUARES, **_ASCENT},
        [
            {}, WD, {"centered": True}, {**MOMENTUM, **WD}, {**_CENTERED, **WD},
            {"alpha": 0.7, "eps": 1e-3, **UP, **WD},
        ],
    ),
    "RMSpropTF": Row(
        "timm.optim.rmsprop_tf.RMSpropTF",
        {**DECAYS, **_CENTERED},
        {**_SQUARES, **_CAUTION, "decoupled_decay": [False, True], "lr_in_momentum": [True, False]},
        [
            {}, WD, CAUTION, {"centered": True, **WD}, {**MOMENTUM, **WD},
            {**MOMENTUM, **CAUTION}, {**MOMENTUM, "lr_in_momentum": False, **CAUTION},
            {"decoupled_decay": True, **WD},
            {**_CENTERED, "decoupled_decay": True, "eps": 1e-3, **CORRECTED},
        ],
    ),
    "Adagrad": Row(
        "torch.optim.Adagrad",
        {"lr": 0.1, "lr_decay": 0.1},
        {"lr_decay": [0.0, 0.5], **_EPS, **_L2, **_ASCENT},
        [
            {}, WD, {"lr_decay": 0.3, **WD}, {"initial_accumulator_value": 0.4, "eps": 1e-3},
            {**UP, **WD},
        ],
    ),
    "LARS": Row(
        "timm.optim.lars.Lars",
        {**DECAYS, **MOMENTUM, "trust_coeff": 0.1},
        {**_SGD, "trust_coeff": [0.02, 0.5], "eps": [1e-8, 0.1], **_TRUST},
        [
            {}, WD, {"always_adapt": True}, {**MOMENTUM, **WD}, {"trust_clip": True, **WD},
            {**_NESTEROV, "trust_clip": True, "trust_coeff": 3.0, **WD},
            {**_DAMPED, "always_adapt": True, "eps": 1e-2},
        ],
    ),
    "LAMB": Row(
        "timm.optim.lamb.Lamb",
        {"lr": 0.1, "caution": True, "max_grad_norm": None},
        {
            **_BETAS, **_EPS, **_L2, **_CAUTION, **_CORRECTION, **_AVERAGING, **_TRUST,
            "decoupled_decay": [False, True],
        },
        [
            {"weight_decay": 0.0}, WD, CAUTION, {"always_adapt": True, "weight_decay": 0.0},
            {"trust_clip": True, **WD}, {"bias_correction": False, **WD},
            {"grad_averaging": False, "betas": (0.5, 0.7), **WD}, {"decoupled_decay": True, **WD},
            {"decoupled_decay": True, **CORRECTED, **CAUTION},
            {"decoupled_decay": True, "weight_decay": 30.0}, {"max_grad_norm": None, **WD},
        ],
    ),
    "NovoGrad": Row(
        "timm.optim.nvnovograd.NvNovoGrad",
        {**DECAYS, "amsgrad": True},
        {**_BETAS, **_EPS, **_L2, "grad_averaging": [False, True], "amsgrad": [False, True]},
        [
            {}, WD, {"grad_averaging": True, **WD}, {"amsgrad": True, **WD},
            {"betas": (0.5, 0.6), "eps": 0.1},
        ],
    ),
    "FusedAdam": Row(
        "apex", DECAYS, {**_BETAS, **_EPS, **_L2, **_CORRECTION}, _MOMENTS, ("adam_w_mode",),
    ),
    "FusedSGD": Row(
        "apex", {**DECAYS, **MOMENTUM, "dampening": 0.3}, _SGD,
        [
            {}, {"wd_after_momentum": True, **WD}, {**MOMENTUM, "wd_after_momentum": True, **WD},
            {**_NESTEROV, "wd_after_momentum": True, **WD}, _DAMPED,
        ],
        ("wd_after_momentum",),
    ),
    "FusedLAMB": Row(
        "apex", DECAYS, {**_BETAS, **_EPS, **_L2, **_CORRECTION, **_AVERAGING},
        [
            *_MOMENTS, {"use_nvlamb": True, "weight_decay": 0.0},
            {**_COUPLED, "use_nvlamb": True, "grad_averaging": False},
        ],
        ("adam_w_mode", "use_nvlamb"),
    ),
    "FusedAdagrad": Row(
        "apex", DECAYS, {**_EPS, **_L2},
        [{}, WD, {"adagrad_w_mode": True, **WD}, {"adagrad_w_mode": True, "eps": 1e-2}],
        ("adagrad_w_mode",),
    ),
    "FusedNovoGrad": Row(
        "apex", DECAYS,
        {**_BETAS, **_EPS, **_L2, **_CORRECTION, **_AVERAGING, "init_zero": [False, True]},
        [
            {"reg_inside_moment": inside, **options}
            for inside in (True, False)
            for options in (
                {}, WD, {"bias_correction": False, **WD}, {"init_zero": True, **WD},
                {"grad_averaging": False, "betas": (0.5, 0.6), "eps": 0.1, **WD},
            )
        ],
        ("reg_inside_moment",),
    ),
}  # fmt: skip
APEX = [name for name, row in CLASSES.items() if row.theirs == "apex"]
NAMES = [name for name in CLASSES if name not in APEX]  # of fusedtrain.optim
OF_TORCH = [name for name, row in CLASSES.items() if row.theirs.startswith("torch.")]
SETS = [(name, options) for name, row in CLASSES.items() for options in row.sets]


# Group keys of timm 1.0.31 that 1.0.28 lacks, of some optimizers.
NEWER = {
    "decoupled_decay", "corrected_weight_decay", "foreach", "max_lr_snapshot", "clipping_threshold",
}  # fmt: skip


def set_id(value: Any) -> str:
    """The id of a part of a row of SETS."""
    return value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items())


def class_of(name: str) -> type[FusedOptimizer]:
    module = fusedtrain.apex.optimizers if name in APEX else fusedtrain.optim
    kind: type[FusedOptimizer] = getattr(module, name)
    return kind


def make(name: str, params: Iterable[Any], **options: Any) -> FusedOptimizer:
    """The optimizer with all its states, and with these options besides."""
    kind: Any = class_of(name)
    optimizer = kind(params, **{**CLASSES[name].busy, **options})
    assert isinstance(optimizer, FusedOptimizer)
    return optimizer


def ours(name: str, params: Iterable[Any], options: Options) -> FusedOptimizer:
    """The optimizer with these options alone."""
    kind: Any = class_of(name)
    optimizer: FusedOptimizer = kind(params, **{"lr": 0.1, **options})
    return optimizer


def counterpart(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The class of torch, timm or `helpers/apex_truth.py` that does the same."""
    if name in APEX:
        return TRUTHS[name]
    module, _, theirs = CLASSES[name].theirs.rpartition(".")
    if module.startswith("timm"):
        timm()
    kind: Callable[..., torch.optim.Optimizer] = getattr(importlib.import_module(module), theirs)
    return kind


def theirs(name: str, params: Iterable[Any], options: Options) -> torch.optim.Optimizer:
    """The counterpart with the same options."""
    options = {"lr": 0.1, **options}
    if name in APEX:
        example = ours(name, [torch.nn.Parameter(torch.zeros(1))], options)
        options |= {a: getattr(example, a) for a in TRUTHS[name].attributes}
        options.pop("reg_inside_moment", None)  # Apex's moment_mode
    if name == "FusedLAMB":
        options["max_grad_norm"] = 1.0
    return counterpart(name)(params, **options)


class Rule(NamedTuple):
    """Test data of a rule of csrc/optimizer_rules.h."""

    options: tuple[str, ...]  # names, in the order of the rule
    busy: dict[str, float]  # a group in which much goes on


# The large eps keeps gradients that cancel with weight decay from being blown up to 1, rounding
# and all.
_MEANS = {"beta1": 0.9, "beta2": 0.98, "eps": 1e-2, "weight_decay": 0.02}
_RMS = {"alpha": 0.95, "eps": 1e-2, "momentum": 0.9, "weight_decay": 0.02}
RULES: dict[str, Rule] = {
    "sgd": Rule(
        ("momentum", "dampening", "nesterov", "decoupled"),
        {"momentum": 0.9, "dampening": 0.25, "weight_decay": 0.02},
    ),
    "lars": Rule(
        ("momentum", "dampening", "nesterov", "trust_coeff", "eps", "trust_clip", "always_adapt"),
        {
            "momentum": 0.9, "nesterov": 1, "trust_coeff": 0.02, "eps": 1e-2, "always_adapt": 1,
            "weight_decay": 0.02,
        },
    ),
    "adam": Rule(("beta1", "beta2", "eps", "decoupled", "uncorrected"), _MEANS),
    "nadamw": Rule(
        ("beta1", "beta2", "eps", "decoupled"),
        {**_MEANS, "decoupled": 1, "max_lr": 0.2, "cautious": 1},
    ),
    "lamb": Rule(
        (
            "beta1", "beta2", "eps", "bias_correction", "grad_averaging", "trust_clip",
            "always_adapt", "decoupled_decay",
        ),
        {**_MEANS, "bias_correction": 1, "grad_averaging": 1},
    ),
    "lion": Rule(
        ("beta1", "beta2"), {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.02, "cautious": 1}
    ),
    "rmsprop": Rule(("alpha", "eps", "momentum", "centered"), {**_RMS, "centered": 1}),
    "rmsprop_tf": Rule(
        ("alpha", "eps", "momentum", "centered", "decoupled_decay", "lr_in_momentum"),
        {**_RMS, "lr_in_momentum": 1, "decoupled_decay": 1, "cautious": 1},
    ),
    "adagrad": Rule(
        ("lr_decay", "eps", "decoupled"), {"lr_decay": 0.1, "eps": 1e-2, "weight_decay": 0.02}
    ),
    "novograd": Rule(
        (
            "beta1", "beta2", "eps", "grad_averaging", "amsgrad", "bias_correction", "outside",
            "start",
        ),
        {**_MEANS, "beta1": 0.95, "grad_averaging": 1, "amsgrad": 1},
    ),
}  # fmt: skip


def busy(rule: str, **options: float) -> dict[str, float]:
    """A group of the rule in which much goes on, with some options changed."""
    return {"lr": 0.05, **RULES[rule].busy, **options}
