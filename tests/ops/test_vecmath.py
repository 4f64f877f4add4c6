"""csrc/vecmath.h: every function keeps its contract, in every instruction set."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from helpers import ROOT

CSRC = ROOT / "csrc"
COMPILER = os.environ.get("CXX") or shutil.which("c++")
FLAGS = {
    "default": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mfma"],
}

SOURCE = """
#include "vecmath.h"
using namespace fusedtrain::formulas;
#define WRAP_FOR(T, name, call)                           \\
  extern "C" void name##_##T(const T* x, T* y, long n) {  \\
    for (long i = 0; i < n; ++i) y[i] = call;             \\
  }
#define WRAP(name, call) WRAP_FOR(float, name, call) WRAP_FOR(double, name, call)
template <class T> static inline T cdf(T x) { T d; return math::normal_cdf(x, d); }
template <class T> static inline T pdf(T x) { T d; math::normal_cdf(x, d); return d; }
WRAP(exp, math::exp(x[i]))
WRAP(expm1, math::expm1(x[i]))
WRAP(log1p_unit, math::log1p_unit(x[i]))
WRAP(sigmoid, math::sigmoid(x[i]))
WRAP(tanh, math::tanh(x[i]))
WRAP(normal_cdf, math::normal_cdf(x[i]))
WRAP(normal_cdf_with_density, cdf(x[i]))
WRAP(normal_pdf, pdf(x[i]))

#include "cpu/isa/lanes.h"
#ifdef FT_LANES
#define WRAP_LANES(name, call)                                         \\
  extern "C" void name##_float(const float* from, float* y, long n) {  \\
    for (long i = 0; i < n; i += FT_LANES) {                           \\
      const Lanes x = Lanes::load(from + i);                           \\
      (call).store(y + i);                                             \\
    }                                                                  \\
  }
#if FT_LANES == 16
WRAP_LANES(lanes_sqrt, math::sqrt(x))
WRAP_LANES(lanes_at_least, math::at_least(x, Lanes(0.0f)))
WRAP_LANES(lanes_largest, math::largest(x, Lanes(1.0f)))
WRAP_LANES(lanes_largest_of_one, math::largest(Lanes(1.0f), x))
#endif
WRAP_LANES(lanes_code, quotient_of_code(x, Lanes(254.0f) - magnitude(x)))
#endif
"""

HUGE = 3.0e38
# function: (truth in extended precision, range, largest error in ULP)
CONTRACTS = {
    "exp": (np.exp, (-HUGE, HUGE), 2),
    "expm1": (np.expm1, (-HUGE, HUGE), 3),
    "log1p_unit": (np.log1p, (0.0, 1.0), 2),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), (-87.0, HUGE), 4),
    "tanh": (np.tanh, (-HUGE, HUGE), 4),
}


@functools.cache
def built(isa: str) -> ctypes.CDLL | str:
    """The functions for an instruction set, or why there are none."""
    if COMPILER is None:
        return "needs a C++ compiler"
    if isa != "default":
        if platform.machine() != "x86_64":
            return f"{isa} is of x86-64"
        flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        if {"avx2": " avx2 ", "avx512": " avx512dq "}[isa] not in flags:
            return f"this processor has no {isa}"
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "wrap.cpp"), Path(folder, "wrap.so")
        source.write_text(SOURCE)
        subprocess.run(
            [COMPILER, "-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared",
             "-fPIC", *FLAGS[isa], f"-I{CSRC}", str(source), "-o", str(out)],
            check=True,
        )  # fmt: skip
        return ctypes.CDLL(str(out))


@pytest.fixture(params=list(FLAGS))
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    result = built(request.param)
    if isinstance(result, str):
        pytest.skip(result)
    return result


def call(library: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    kind = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}[x.dtype]
    y = np.full_like(x, np.nan)
    function = getattr(library, f"{name}_{kind}")
    function(
        x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(len(x))
    )
    return y


def arguments(dtype: type, low: float, high: float) -> np.ndarray:
    """A stride over all bit patterns in the range, and a dense band around zero."""
    if dtype is np.float32:
        bits = np.arange(0, 2**32, 1021, dtype=np.uint64).astype(np.uint32)
        x = bits.view(np.float32)
    else:
        rng = np.random.default_rng(0)
        x = rng.integers(0, 2**64, 2_000_000, dtype=np.uint64).view(np.float64)
    with np.errstate(invalid="ignore"):
        x = x[(x >= low) & (x <= high)]
    band = np.linspace(max(low, -110), min(high, 110), 400_001)
    return np.concatenate([x, band.astype(dtype)])


def ulps(truth: np.ndarray, dtype: type) -> np.ndarray:
    """A unit of the last place of each number (of the denormals below those)."""
    info = np.finfo(dtype)
    with np.errstate(all="ignore"):
        limited = np.clip(truth, -float(info.max), float(info.max))
        unit = np.maximum(
            np.exp2(np.floor(np.log2(np.abs(limited))) - info.nmant), float(info.smallest_subnormal)
        )
        unit[limited == 0] = float(info.smallest_subnormal)
    return unit


def ulp_error(actual: np.ndarray, truth: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """|actual - truth| in these units."""
    with np.errstate(all="ignore"):
        error = np.abs(actual.astype(np.longdouble) - truth) / unit
    both_infinite = np.isinf(actual) & (np.abs(truth) >= float(np.finfo(actual.dtype).max))
    return np.where(both_infinite, 0, error)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", list(CONTRACTS))
def test_contract(name: str, dtype: type) -> None:
    """In every instruction set beside one truth, which takes most of the time."""
    libraries = {isa: result for isa in FLAGS if not isinstance(result := built(isa), str)}
    if not libraries:
        pytest.skip(str(built("default")))
    truth, (low, high), limit = CONTRACTS[name]
    x = arguments(dtype, low, high)
    wide = x.astype(np.float64 if dtype is np.float32 else np.longdouble)
    with np.errstate(all="ignore"):
        expected = truth(wide)
    unit = ulps(expected, dtype)
    for isa, library in libraries.items():
        error = ulp_error(call(library, name, x), expected, unit)
        worst = int(np.argmax(error))
        assert error[worst] <= limit, f"{name}({x[worst]}), {isa}: {error[worst]:.2f} ULP"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_normal_distribution(library: ctypes.CDLL, dtype: type) -> None:
    x = np.linspace(-13, 13, 1_000_001).astype(dtype)
    expected = special.ndtr(x.astype(np.float64))
    forward = call(library, "normal_cdf", x)
    assert np.max(np.abs(forward - expected)) <= 2.5e-7
    tail = (x > -10) & (x < 0)
    assert np.max(np.abs(forward[tail] / expected[tail] - 1)) < 1e-3
    actual = call(library, "normal_cdf_with_density", x)
    eps = np.finfo(dtype).eps
    assert np.max(np.abs(actual - expected)) <= (2.5e-7 if dtype is np.float32 else 4 * eps)
    relative = np.abs(actual - expected) / expected / eps
    assert np.max(relative - x.astype(np.float64) ** 2 * (x < 0)) <= (
        4 if dtype is np.float32 else 8
    )
    density = np.exp(-0.5 * x.astype(np.float64) ** 2) / np.sqrt(2 * np.pi)
    error = np.abs(call(library, "normal_pdf", x) - density) / density / eps
    assert np.max(error - x.astype(np.float64) ** 2) <= 4


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_values(library: ctypes.CDLL, dtype: type) -> None:
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0] * 9, dtype=dtype)
    nan, inf = float("nan"), float("inf")
    expected = {
        "exp": [nan, inf, 0, 1, 1], "expm1": [nan, inf, -1, -0.0, 0.0],
        "sigmoid": [nan, 1, 0, 0.5, 0.5], "tanh": [nan, 1, -1, -0.0, 0.0],
        "normal_cdf": [nan, 1, 0, 0.5, 0.5], "normal_cdf_with_density": [nan, 1, 0, 0.5, 0.5],
    }  # fmt: skip
    for name, want in expected.items():
        y = call(library, name, x)
        np.testing.assert_allclose(y, np.array(want * 9, dtype=dtype), rtol=3e-7, err_msg=name)
        zeros = y == 0
        assert np.array_equal(np.signbit(y[zeros]), np.signbit(np.array(want * 9)[zeros])), name


def in_lanes(isa: str, name: str, x: np.ndarray) -> np.ndarray:
    result = built(isa)
    if isinstance(result, str):
        pytest.skip(result)
    return call(result, f"lanes_{name}", x.astype(np.float32))


def test_roots_of_registers() -> None:
    """csrc/cpu/isa/lanes.h: within 1 ULP of all magnitudes, and the special values."""
    x = np.arange(0, 0x7F800000, 1021, dtype=np.uint32).view(np.float32)
    x = np.concatenate([x, np.arange(len(x) % 16 * -1 % 16, dtype=np.float32)])
    truth = np.sqrt(x.astype(np.longdouble))
    assert ulp_error(in_lanes("avx512", "sqrt", x), truth, ulps(truth, np.float32)).max() <= 1
    special = np.array([0.0, -0.0, np.inf, np.nan, -1.0, -np.inf, 1e-45, 4.0] * 2, np.float32)
    with np.errstate(invalid="ignore"):
        expected = np.sqrt(special)
    actual = in_lanes("avx512", "sqrt", special)
    np.testing.assert_array_equal(np.signbit(actual[:2]), [False, True])
    np.testing.assert_array_max_ulp(actual[[0, 1, 2, 6, 7]], expected[[0, 1, 2, 6, 7]], 1)
    assert np.isnan(actual[3:6]).all()


def test_comparisons_of_registers() -> None:
    """NaN passes: of the first argument, and of both where the largest is asked for."""
    x = np.array([-2.0, -0.0, 0.5, 1.0, 3.0, np.inf, -np.inf, np.nan] * 2, np.float32)
    expected = {
        "at_least": np.maximum(x, 0), "largest": np.maximum(x, 1),
        "largest_of_one": np.maximum(1, x),
    }  # fmt: skip
    for name, numbers in expected.items():
        np.testing.assert_array_equal(in_lanes("avx512", name, x), numbers)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_numbers_of_codes(isa: str) -> None:
    """Every quotient of a code is the nearest one."""
    k = np.arange(-128.0, 128.0, dtype=np.float32)
    np.testing.assert_array_equal(in_lanes(isa, "code", k), k / (254 - np.abs(k)))
