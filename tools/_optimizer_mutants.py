"""Mutants of the optimizers: a table of places in their engine and rules, judged by tests of a copy
that is built without optimisation, anew for each mutant in C++."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

from _collected import Collected
from _mutant import Judge, Key, Mutant, mutant
from _test_files import all_located

ENGINE, PLAN = "fusedtrain/optim/_engine.py", "fusedtrain/optim/_plan.py"
SAVED, REPORTS = "fusedtrain/optim/_checkpoints.py", "fusedtrain/optim/_reports.py"
RULES, STEP = "csrc/optimizer_rules.h", "csrc/optimizer_step.h"
CODES, OF_CODES = "csrc/state_codes.h", "fusedtrain/optim/_codes.py"
LOOPS, BLOCKS = "csrc/cpu/optimizers.cpp", "csrc/cpu/optimizer_blocks.h"
IN_LANES = "csrc/cpu/isa/optimizers.h"
BINDING, CHECKS = "csrc/bindings/optimizers.h", "csrc/bindings/checks.h"
APEX, LAYERWISE = "fusedtrain/apex/optimizers.py", "fusedtrain/apex/_apex_layerwise.py"

TESTS = all_located([
    "test_optimizer_numbers", "test_apex_optimizers",
    "test_optimizer_counterparts", "test_optimizer_state",
    "test_optimizer_scaler", "test_split_master_kernels", "test_eight_bit_states",
    "test_state_code_kernels", "test_newer_timm", "test_optimizer_skips",
    "test_small_states",
])  # fmt: skip
BUILD = {LOOPS: 1, BLOCKS: 1, IN_LANES: 1, BINDING: 2, CHECKS: 2, STEP: 3, RULES: 3, CODES: 3}
# name: file, what is there, what is put in its place.
MUTANTS: dict[str, tuple[str, str, str]] = {
    "codes: rounded to nearest": (
        CODES, "return static_cast<float>(static_cast<int32_t>(2 * bits + 1)) * 0x1p-14f;",
        "return bits == 0 ? 0.499f : 0.5f;"),
    "codes of momenta: by the distance of codes": (
        CODES, "chance * rest, (q - k) * (253.0f - k));", "chance, q - k);"),
    "codes of squares: by the distance of codes": (
        CODES, "chance * (k + k + one_at_most(k)) + k * k, square);",
        "chance, root(square) - k);"),
    "codes of squares: a root is lost": (
        CODES, "k + k + one_at_most(k)", "k + k + 1.0f"),
    "codes: the sign is lost": (CODES, "sign = sign_bits(x);", "sign = 0;"),
    "codes: the scale of the first group": (
        BLOCKS, "t.scales[k] + group, n,", "t.scales[k], n,"),
    "usual options: late decay": (
        IN_LANES, "k.cautious == 0 && k.late_decay == 0 &&", "k.cautious == 0 &&"),
    "usual options: cautious": (
        IN_LANES, "k.cautious == 0 && k.late_decay == 0 &&", "k.late_decay == 0 &&"),
    "usual options: centered": (
        IN_LANES, " && (Rule::kRare == 0 || k.c[Rule::kRare] == 0);", ";"),
    "usual options: decay": (IN_LANES, "if (k.c[0] != 0) return loop(usual, Usual());", ""),
    "threads: the first chunk": (
        LOOPS, "first_element[chunk.tensor] + chunk.begin < e;",
        "first_element[chunk.tensor] + chunk.begin <= e;"),
    "codes of squares for momenta": (
        OF_CODES, "return SQUARES if which in rule.squares else SIGNED", "return SQUARES"),
    "codes for amsgrad": (
        OF_CODES, "return None if compared and (dtype == SQUARES or which == 2) else dtype",
        "return dtype"),
    "codes: the stream is not saved": (
        SAVED, ' or self._fused_options["state_dtype"] == Q8:', ":"),
    "the step does nothing": (
        STEP, "return keep * p - size * u;", "return p;"),
    "ascends": (
        STEP, "return keep * p - size * u;", "return keep * p + size * u;"),
    "maximize ignored": (
        PLAN, "sign = -1.0 if self.maximize else 1.0", "sign = 1.0"),
    "Adam: betas swapped": (
        "fusedtrain/optim/adam.py", '(*two(group["betas"]), group["eps"], group["decoupled',
        '(*group["betas"][::-1], group["eps"], group["decoupled'),
    "NAdamW: betas swapped": (
        "fusedtrain/optim/adam.py", '(*two(group["betas"]), group["eps"], 1)',
        '(*group["betas"][::-1], group["eps"], 1)'),
    "Lion: betas swapped": (
        "fusedtrain/optim/lion.py", 'two(group["betas"])\n', 'group["betas"][::-1]\n'),
    "Adam: 1 - beta1 off": (
        RULES, "k.c[3] = 1 - option[0];\n    k.c[4] = 1 - option[1];\n    k.c[5] = corrects",
        "k.c[3] = option[0];\n    k.c[4] = 1 - option[1];\n    k.c[5] = corrects"),
    "LAMB: grad_averaging ignored": (
        RULES, "k.c[3] = option[4] != 0 ? 1 - option[0] : 1;", "k.c[3] = 1 - option[0];"),
    "NAdamW: does not look ahead": (
        RULES, "const T ahead = s[0] * beta1 + g * this->fresh1;", "const T ahead = s[0];"),
    "Lion: momentum before the update": (
        RULES, "const T ahead = beta1 * s[0] + fresh1 * g;\n    s[0] += (g - s[0]) * fresh2;",
        "s[0] += (g - s[0]) * fresh2;\n    const T ahead = beta1 * s[0] + fresh1 * g;"),
    "Lion: the sign of 0 is -1": (
        RULES, "(ahead < T(0) ? T(-1) : ahead)", "T(-1)"),
    "the step count stands still": (
        LOOPS, "*scalar_of(call, tensor, 0) += 1;", ""),
    "bias correction of the step before": (
        LOOPS, "double(*scalar_of(call, t, 0)) + 1,", "double(*scalar_of(call, t, 0)) + 1e-9,"),
    "bias correction of the step after": (
        LOOPS, "double(*scalar_of(call, t, 0)) + 1,", "double(*scalar_of(call, t, 0)) + 2,"),
    "Adagrad: rate of the step after": (
        RULES, "t.lr / (1 + (t.step - 1) * option[0])", "t.lr / (1 + t.step * option[0])"),
    "decoupled decay dropped": (
        RULES, "return (max_lr == 0 ? t.lr : t.lr * t.lr / max_lr) * t.group->weight_decay;",
        "return 0 * max_lr;"),
    "L2 decay dropped": (
        RULES, "return decays ? g + weight_decay * p : g;", "return g;"),
    "AdamW: decay coupled": (
        RULES, ": t.lr;\n    decay(option[3] != 0, t, k);", ": t.lr;\n    decay(false, t, k);"),
    "SGDW: decay coupled": (
        RULES, "= t.lr;\n    decay(option[3] != 0, t, k);", "= t.lr;\n    decay(false, t, k);"),
    "RMSpropTF: decay always coupled": (
        RULES, "decay(option[4] != 0, t, k);", "decay(false, t, k);"),
    "LAMB: decay always late": (
        RULES, "const bool decoupled = option[7] == 1, coupled",
        "const bool decoupled = false, coupled"),
    "LAMB: decay before the ratio, not in it": (
        RULES, "decoupled || coupled ? 0 : t.group->weight_decay;\n    k.c[0] = coupled",
        "0;\n    k.c[0] = !decoupled"),
    "Adam: eps inside the root": (
        RULES, "return s[0] / (math::sqrt(square) * root + eps);",
        "return s[0] / math::sqrt(square * root * root + eps);"),
    "Adam: eps before the correction": (
        RULES, "return s[0] / (math::sqrt(square) * root + eps);",
        "return s[0] / ((math::sqrt(square) + eps) * root);"),
    "RMSprop: eps inside the root": (
        RULES, "g / (math::sqrt(variance) + this->eps);",
        "g / math::sqrt(variance + this->eps);"),
    "RMSpropTF: eps outside the root": (
        RULES, "g / math::sqrt(variance + this->eps);",
        "g / (math::sqrt(variance) + this->eps);"),
    "RMSpropTF: squares start at 0": (
        "fusedtrain/optim/rmsprop.py", 'return 1.0 if name == "square_avg" else 0.0', "return 0.0"),
    "RMSpropTF: lr_in_momentum ignored": (
        RULES, "inside = option[5] != 0 && option[2] > 0;", "inside = false;"),
    "centered ignored": (
        RULES, "centered ? s[0] - s[2] * s[2] : s[0]", "s[0]"),
    "the average of a centered variance stands still": (
        RULES, "s[2] += (g - s[2]) * fresh;", ""),
    "Adagrad: initial value ignored": (
        "fusedtrain/optim/adagrad.py", 'return float(self.defaults["initial_accumulator_value"])',
        "return 0.0"),
    "nesterov ignored": (
        RULES, "return nesterov ? g + momentum * s[0] : s[0];", "return s[0];"),
    "amsgrad: the last, not the largest": (
        RULES, "s[2] = math::largest(s[1], s[2]);", "s[2] = s[1];"),
    "NovoGrad: amsgrad ignored": (
        RULES, "::sqrt(double(option[4] != 0 ? v[1] : v[0]))", "::sqrt(double(v[0]))"),
    "NovoGrad: first moment from 0": (
        RULES, "first ? squares : option[1] * v[0]", "option[1] * v[0]"),
    "the first step is dampened": (
        RULES, "return t.group->option[0] == 0 || t.step == 1;", "return t.group->option[0] == 0;"),
    "momentum switched on is dampened": (
        PLAN, "store.views[0][column].zero_()", "pass"),
    "FusedAdam: bias corrected without asking": (
        RULES, "corrects = option[4] == 0;", "corrects = true;"),
    "FusedAdam: adam_w_mode ignored": (
        APEX, 'group["eps"], self.adam_w_mode, uncorrected)', 'group["eps"], 1, uncorrected)'),
    "FusedAdam: states of the parameter's dtype": (APEX, "_wide_states = True", ""),
    "FusedSGD: decay before momentum": (
        APEX, "decoupled = self.wd_after_momentum", "decoupled = False"),
    "FusedLAMB: penalty neither in the gradient nor in the update": (
        RULES, "k.c[0] = coupled ? t.group->weight_decay : 0;", "k.c[0] = 0;"),
    "FusedLAMB: penalty after the averages": (
        LAYERWISE, "coupled = 0 if self.adam_w_mode else 2", "coupled = 0"),
    "FusedLAMB: use_nvlamb ignored": (LAYERWISE, "0, self.use_nvlamb,", "0, 0,"),
    "FusedAdagrad: decay coupled": (
        RULES, "decay(option[2] != 0, t, k);", "decay(false, t, k);"),
    "FusedNovoGrad: bias not corrected": (
        RULES, "const bool corrects = option[5] != 0,", "const bool corrects = false,"),
    "FusedNovoGrad: the norm not corrected": (
        RULES, "const double root = corrects ? ::sqrt(1 - pow(option[1], t.step)) : 1;",
        "const double root = 1;"),
    "FusedNovoGrad: decay always inside": (
        RULES, "outside = option[6] == 1, inside = option[6] == 0;",
        "outside = false, inside = true;"),
    "NovoGrad: decoupled decay also in the gradient": (
        RULES, "decay(!inside, t, k);", "decay(outside, t, k);"),
    "FusedNovoGrad: norms always start at 0": (
        RULES, "option[7] == 1 && t.step == 1;", "false;"),
    "FusedNovoGrad: init_zero ignored": (
        LAYERWISE, '2 if group["init_zero"] else 1', "1"),
    "FusedNovoGrad: Apex's norms taken for squares": (LAYERWISE, "norm.square()", "norm.clone()"),
    "found_inf: skipped, but applied": (
        LOOPS, "bool skip = call.found_inf != nullptr && !(*call.found_inf == 0);",
        "bool skip = false;"),
    "found_inf: only 1 skips": (
        LOOPS, "!(*call.found_inf == 0)", "*call.found_inf == 1"),
    "infinite gradients applied": (
        LOOPS, "skip |= call.sums[t * kTensorSums] != 0;", "skip |= false;"),
    "the last tensor is not looked at": (
        LOOPS, "for (int64_t t = 0; t < call.count; ++t) skip |=",
        "for (int64_t t = 0; t + 1 < call.count; ++t) skip |="),
    "gradients are not looked at": (
        ENGINE, "measures |= MEASURE_FINITE | MEASURE_GRADIENTS\n        if",
        "measures |= MEASURE_GRADIENTS\n        if"),
    "norm without the unscaling": (
        BLOCKS, "table(T()).measure(g.values, factor, n, sums);",
        "table(T()).measure(g.values, T(1), n, sums);"),
    "gradients not unscaled": (
        LOOPS, "k.gradient = unscaled * clip", "k.gradient = clip"),
    "clip coefficient inverted": (
        STEP, "return ratio < 1 || ratio != ratio ? ratio : 1;",
        "return ratio < 1 || ratio != ratio ? 1 / ratio : 1;"),
    "clip without its bound": (
        STEP, "return ratio < 1 || ratio != ratio ? ratio : 1;", "return ratio;"),
    "clip ignored": (
        LOOPS, "k.gradient = unscaled * clip", "k.gradient = unscaled"),
    "clip: eps ignored": (
        STEP, "const double ratio = max_norm / (norm + eps);",
        "const double ratio = max_norm / norm + 0 * eps;"),
    "average: weights swapped": (
        ENGINE, "0.0 if decay is None else 1.0 - decay", "0.0 if decay is None else decay"),
    "average of what has no gradient: weights swapped": (
        ENGINE, "weight = 1.0 - self.ema_decay", "weight = self.ema_decay"),
    "average goes on at a skipped step": (
        ENGINE, "(1 - skipped) * weight", "weight + 0 * skipped"),
    "average of what has no gradient stands still": (
        ENGINE, "if average is not None:\n", "if id(p) in stepped:\n"),
    "average of what has no gradient starts late": (
        ENGINE, "if fresh:", "if False:"),
    "no write-back": (
        BLOCKS, "if (write_back == 1) {", "if (write_back == 3) {"),
    "write-back keeps the sign of maximize": (
        BLOCKS, "static_cast<T>(fabs(k.gradient))", "static_cast<T>(k.gradient)"),
    "write-back does not zero": (
        BLOCKS, "} else if (write_back == 2) {", "} else if (write_back == 3) {"),
    "write-back does not reach other layouts": (
        BINDING, "for (Shadow& shadow : written) torch::stable::copy_(shadow.original",
        "for (Shadow& shadow : written)\n        if (false) torch::stable::copy_(shadow.original"),
    "zero not after a skipped step": (
        LOOPS, "else if (call.options->write_back == 2 ||",
        "else if (call.options->write_back == 3 ||"),
    "gradients stay scaled after a skipped step": (
        LOOPS, "(call.options->write_back == 1 && call", "(false && call"),
    "a skipped step multiplies by the scale": (
        BLOCKS, "const T factor = static_cast<T>(unscale(call));\n  Block<T> g;\n",
        "const T factor = static_cast<T>(1 / unscale(call));\n  Block<T> g;\n"),
    "Apex: gradients stay scaled": (
        "fusedtrain/apex/_apex_optimizer.py", '{"gradient_writeback": "unscaled", **options}',
        "options"),
    "LAMB: no step count for timm": (
        "fusedtrain/optim/lamb.py", "return torch.tensor(count)  # as timm's", "return None"),
    "Apex: a step too many for theirs": (
        "fusedtrain/apex/_apex_optimizer.py", "return int(count) if", "return int(count) + 1 if"),
    "steps of theirs are forgotten on the way back": (
        SAVED, "p_state[name] = p_state[name] + ahead", "pass"),
    "NovoGrad: norms of theirs are forgotten": (
        LAYERWISE, "if known and sorted(roots)", "if False and sorted(roots)"),
    "counts of float64 are cut": (
        SAVED, "if torch.get_default_dtype() is torch.float64 and not fused:", "if False:"),
    "states of the user are lost": (
        SAVED, 'self._without_a_step(), dict(state_dict["state"])', "self._without_a_step(), {}"),
    "SGD without momentum keeps empty states": (
        PLAN, "if p_state:  # torch's", "if True:  # torch's"),
    "master not written": (
        BLOCKS, "    p.open(t.master, Dtype::kFloat32, i, n);",
        "    p.open(t.master, Dtype::kFloat32, i, n, true), p.memory = nullptr;"),
    "parameter not written from its master": (
        BLOCKS, "if (t.master != nullptr) store(p.values", "if (false) store(p.values"),
    "norms of the parameter, not of its master": (
        BLOCKS, "      open_weights(p, t, i, n);", "      p.open(t.param, t.param_dtype, i, n);"),
    "split weights are rounded without their key": (
        BLOCKS, "static_cast<int64_t>(key));", "-1);"),
    "corrections are those of the chunk's first weights": (
        BLOCKS, "static_cast<const char*>(t.master) + bytes * i,",
        "static_cast<const char*>(t.master),"),
    "states not written": (
        BLOCKS, "close_state(b.state[s], t, s, i, n, k.state_key);", ";"),
    "strides ignored": (
        BINDING, "const Tensor grad = walkable(grads[i], param, writes_grads);",
        "const Tensor grad = is_dense(grads[i]) ? grads[i]\n"
        "                                        : walkable(grads[i], param, writes_grads);"),
    "states cast on load": (
        SAVED, "value.to(self._dtype_of(name, p), copy=True)", "value.to(p.dtype, copy=True)"),
    "plan: other dictionaries go unseen": (
        PLAN, "if not all(map(is_, map(state.get, self.params), self.dicts)):", "if False:"),
    "plan: other states go unseen": (
        PLAN, "if not all(map(is_, map(dict.get, self.owners, self.names), self.tensors)):",
        "if False:"),
    "plan: other memory goes unseen": (
        PLAN, 'facts = (Tensor.data_ptr, Tensor.stride, attrgetter("dtype"))',
        'facts = (Tensor.stride, attrgetter("dtype"))'),
    "plan: other strides go unseen": (
        PLAN, 'facts = (Tensor.data_ptr, Tensor.stride, attrgetter("dtype"))',
        'facts = (Tensor.data_ptr, attrgetter("dtype"))'),
    "plan: other groups go unseen": (
        ENGINE, "if known_groups != groups or not all(", "if not known_groups or not all("),
    "plan: other needs go unseen": (
        ENGINE, "plan.needs == needs and plan.fits", "plan.fits"),
    "max_lr ignored": (
        RULES, "(max_lr == 0 ? t.lr : t.lr * t.lr / max_lr)", "(max_lr == 0 ? t.lr : t.lr)"),
    "lr as a tensor ignored": (
        LOOPS, "if (i < 0) return group.lr;", "return group.lr;"),
    "caution inverted": (
        STEP, "return cautious && !agrees ? u * T(0) : u;",
        "return cautious && agrees ? u * T(0) : u;"),
    "caution not scaled up": (
        STEP, "k.caution = 1 / (share > 1e-3 ? share : 1e-3);", "k.caution = 1 + 0 * share;"),
    "LAMB: trust_clip ignored": (
        RULES, "if (option[5] != 0 && trust > 1) trust = 1;", ""),
    "LAMB: always_adapt ignored": (
        RULES, "if (t.group->weight_decay == 0 && option[6] == 0) return;",
        "if (t.group->weight_decay == 0) return;"),
    "LAMB: norm of the update without its decay": (
        RULES, "2 * caution * decay * trial.products +", "0 * trial.products +"),
    "LAMB: norm of the parameter before its decay": (
        RULES, "const double w = ::fabs(k.keep) * t.param_norm", "const double w = t.param_norm"),
    "LARS: ratio of the unclipped norm": (
        LOOPS, "return sqrt(squares) * clip;", "return sqrt(squares) + 0 * clip;"),
    "LARS: trust_clip ignored": (
        RULES, "if (option[5] != 0) trust = trust / t.lr < 1 ? trust / t.lr : 1;", ""),
    "LARS: decay missing in the ratio": (
        RULES, "(t.grad_norm + t.param_norm * decay + option[4])", "(t.grad_norm + option[4])"),
    "agc: units of the wrong stride": (
        BLOCKS, "unit = (i + k) / t.inner % t.units;", "unit = (i + k) / t.inner / t.units;"),
    "agc: unit of the block's start": (
        BLOCKS, "const int64_t in_unit = (i + k) % t.inner, unit = (i + k) / t.inner % t.units;",
        "const int64_t in_unit = (i + k) % t.inner, unit = i / t.inner % t.units;"),
    "agc: eps ignored": (
        STEP, "(param_norm > eps ? param_norm : eps) * factor", "(param_norm + 0 * eps) * factor"),
    "scale: backoff and growth swapped": (
        STEP, "scale = float(scale * u.backoff_factor);",
        "scale = float(scale * u.growth_factor);"),
    "scale: backs off without hysteresis": (
        STEP, "if (*u.hysteresis_tracker == 0) scale", "scale"),
    "scale: no bound": (
        STEP, "*u.scale = scale > u.max_scale ? float(u.max_scale) : scale;", "*u.scale = scale;"),
    "scale: growth one step late": (
        STEP, "if (*u.growth_tracker == u.growth_interval) {",
        "if (*u.growth_tracker > u.growth_interval) {"),
    "scaler: hears of no skipped step": (
        REPORTS, "{flag.device: flag.clone() for", "{flag.device: flag * 0 for"),
    "applied steps of the last plan only": (
        REPORTS, "for control in self._controls.values():", "for control in ():"),
    "empty tensors are not dense": (
        CHECKS, "return total == 0 || expected == total;", "return expected == total;"),
    "the tail of a block is lost": (
        BLOCKS, "f(i, smaller(length, end - i));", "f(i, smaller(length, end - i) / 2 * 2);"),
    "blocks of a chunk start anew": (
        BLOCKS, "b.average.open(t.average, t.average_dtype, i, n);",
        "b.average.open(t.average, t.average_dtype, i % 16384, n);"),
}  # fmt: skip
EQUIVALENT: dict[Key, str] = {}
# Another process for each instruction set would tell nothing new, nor would other kernels.
CHOSEN = ["-k", "not instruction_set and not triton and not emulated", "--cases=all"]


def mutants(root: Path) -> list[Mutant]:
    made = []
    for name, (file, old, new) in sorted(MUTANTS.items(), key=lambda m: BUILD.get(m[1][0], 0)):
        text = (root / file).read_text()
        assert text.count(old) == 1, f"{name}: {file} has {text.count(old)} times {old!r}"
        made.append(mutant(file, text, text.index(old), old, new, name, ""))
    return made


def _build(tree: Path) -> None:
    environment = {**os.environ, "FUSEDTRAIN_CUDA": "0", "PYTHONPATH": str(tree)}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    # Without FUSEDTRAIN_REQUIRE a compiler's error is a warning.
    if done.returncode != 0 or "_C.so is not built" in done.stdout + done.stderr:
        raise RuntimeError(f"does not compile: {done.stderr[-6000:]}")


def _build_fast(tree: Path) -> None:
    """Builds without optimisation."""
    for library in (tree / "fusedtrain").rglob("*.so"):
        library.unlink()
    # The kernels of one instruction set are mutated; the others need not be built again.
    shutil.copytree(tree / "csrc", tree / "frozen")
    (tree / "frozen").rename(tree / "csrc/frozen")
    setup = tree / "setup.py"
    text = setup.read_text()
    for before, after in (
        ("-O3 -std=c++17 -fPIC", "-O0 -std=c++17 -fPIC"),
        ('"default": "-O1 -ftree-vectorize"', '"default": ""'),
        ('CSRC / "cpu/isa"', 'CSRC / ("cpu/isa" if isa == "default" else "frozen/cpu/isa")'),
    ):
        assert before in text
        text = text.replace(before, after)
    setup.write_text(text)
    _build(tree)


def prepare(tree: Path, mutants: list[Mutant], seconds: float, ends: ExitStack) -> Judge:
    _build_fast(tree)
    sys.path.append(str(tree / "tests"))
    importlib.import_module("helpers.models").timm()  # once for all forks, and torch with it

    def first_failure(limit: float) -> str:
        """Tests of optimizers import the package as they are collected: anew for each mutant."""
        arguments = [*TESTS, *CHOSEN]
        with closing(Collected(tree, arguments, FUSEDTRAIN_CPU_CAPABILITY="default")) as tests:
            return tests.run(TESTS, limit)

    began = time.monotonic()
    if broken := first_failure(20 * seconds):
        raise RuntimeError(broken)
    limit = max(seconds, 4 * (time.monotonic() - began))

    def judge(mutant: Mutant) -> str:
        if not mutant.file.endswith(".py"):
            _build(tree)
        try:
            return first_failure(limit)
        except RuntimeError as error:
            return str(error).splitlines()[0]

    return judge
