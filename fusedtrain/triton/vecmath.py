"""Math of blocks that Triton lacks, or has only for one backend; float32 and float64.

The polynomials are those of csrc/vecmath.h. The exponential is one instruction on a GPU, so
tl.exp serves wherever its relative error of 2^-22 does not show; expm1 and log1p have their own.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl

# --- helpers. The first three pass NaN, since comparisons with NaN are false, and keep -0.0;
# --- tl.maximum does neither on every GPU.


@triton.jit
def at_most(x, high):
    return tl.where(x > high, high, x)


@triton.jit
def at_least(x, low):
    return tl.where(x < low, low, x)


@triton.jit
def clamp(x, low, high):
    return at_most(at_least(x, low), high)


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded; a float32 division by `/` may be 2 ULP off."""
    # equal (branch turned, != for ==): interpreted alike; test_code reads the compiled code
    if x.dtype == tl.float64:
        return 1.0 / x
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def sqrt(x):
    """The square root. In float32, tl.sqrt flushes denormals to zero on NVIDIA GPUs."""
    # equal (branch turned, != for ==): interpreted alike; test_code reads the compiled code
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def power(base, exponent):
    """float64 to a whole exponent n below 2^32, off by n / 2 eps: Triton has no pow for all GPUs.

    Bias corrections divide by 1 - base^n, whose error is then below eps / (1 - base). A correctly
    rounded pow comes near that, too: at 0.999 its error is 1.4e-14, this function's 1.9e-14.
    """
    bits = exponent.to(tl.int64)
    result = tl.full(base.shape, 1.0, tl.float64)
    for _ in range(32):
        result = tl.where(bits & 1 != 0, result * base, result)
        base *= base
        bits >>= 1
    return result


@triton.jit
def expm1(x):
    """3 ULP; keeps the sign of zero. Polynomials and range as in vecmath.h."""
    if x.dtype == tl.float64:
        z = clamp(x, -40.0, 710.0)  # equal (constant #1): it is -1 from -40 on
        shifted = z * 1.44269504088896340736 + 6755399441055744.0  # the low bits are round(z / ln2)
        n = shifted - 6755399441055744.0
        r = (z - n * 6.93147180369123816490e-1) - n * 1.90821492927058770002e-10
        t = 2.092162527661532348e-9 * r + 2.510526092259006226e-8
        t = t * r + 2.755725280625021098e-7
        t = t * r + 2.755725529422523941e-6
        t = t * r + 2.480158734744942001e-5
        t = t * r + 1.98412698749046357e-4
        t = t * r + 1.388888888887435206e-3
        t = t * r + 8.333333333326110925e-3
        t = t * r + 4.166666666666668386e-2
        t = t * r + 1.666666666666667101e-1
        t = t * r + 0.5
        bits = (shifted - 1.0).to(tl.int64, bitcast=True) << 52
        half = (bits + 4607182418800017408).to(tl.float64, bitcast=True)  # 2^(n - 1)
    else:
        z = clamp(x, -40.0, 89.0)
        shifted = z * 1.44269504 + 12582912.0
        n = shifted - 12582912.0
        r = (z - n * 0.693359375) - n * -2.12194440054690581e-4
        t = 0.001394116325 * r + 0.008363207963
        t = t * r + 0.04166637471
        t = t * r + 0.166665768
        t = t * r + 0.5000000027
        bits = (shifted - 1.0).to(tl.int32, bitcast=True) << 23
        half = (bits + 1065353216).to(tl.float32, bitcast=True)
    p = r + r * r * t
    return tl.where(x == 0.0, x, 2.0 * (half * p + (half - 0.5)))


@triton.jit
def log1p_unit(x):
    """log(1 + x) for 0 <= x <= 1. 4 ULP."""
    upper = x > 0.41421356237309504880  # equal (>= for >): both forms hold at the border
    f = tl.where(upper, 0.5 * x - 0.5, x)  # 1 + x = (upper ? 2 : 1) (1 + f), exactly
    s = f / (2.0 + f)
    z = s * s
    if x.dtype == tl.float64:
        t = 0.1461909699201227853 * z + 0.1533149776450681842
        t = t * z + 0.18182896207631686
        t = t * z + 0.2222221103174932446
        t = t * z + 0.2857142862665140686
        t = t * z + 0.3999999999989788784
        t = t * z + 0.6666666666666669749
    else:
        t = (0.2958308769 * z + 0.3998869588) * z + 0.6666668532
    y = f - s * (f - z * t)
    return tl.where(upper, y + 0.69314718055994530942, y)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid_and_slope(x):
    """Both from e = exp(-|x|): 1 - sigmoid(x) would cancel for large x."""
    e = tl.exp(-tl.abs(x))
    r = 1.0 / (1.0 + e)
    return tl.where(x < 0.0, e * r, r), e * r * r  # equal (<= for <): e is 1 at 0


@triton.jit
def tanh(x):
    e = expm1(-2.0 * tl.abs(x))
    t = e / (e + 2.0)
    return tl.where(x == 0.0, x, tl.where(x < 0.0, t, -t))  # equal (<= for <): 0 was taken before


@triton.jit
def normal_cdf(x):
    """The standard normal distribution's cumulative probability. 3e-7 absolute in float32."""
    if x.dtype == tl.float64:
        return 0.5 + 0.5 * tl.erf(x * 0.70710678118654752440)
    else:
        a = at_most(tl.abs(x), 20.0)
        # log2 of the upper tail on 0 <= a <= 10, as in vecmath.h
        p = -5.8895417827e-9 * a + 2.5086100376e-7
        p = p * a - 4.35611387e-6
        p = p * a + 3.8443774725e-5
        p = p * a - 0.00015471866771
        p = p * a - 0.00023943645216
        p = p * a + 0.0072099724866
        p = p * a - 0.052597931962
        p = p * a - 0.45917600573
        p = p * a - 1.1511089035
        upper_tail = tl.exp2(p * a - 0.99999992477)
        # equal (>= for >): at 0 both are a half within the error of the polynomial
        return tl.where(x > 0.0, 1.0 - upper_tail, upper_tail)


@triton.jit
def normal_cdf_and_density(x):
    e = tl.exp(-0.5 * x * x)
    density = 0.39894228040143267794 * e
    if x.dtype == tl.float64:
        return normal_cdf(x), density
    else:
        a = tl.abs(x)
        t = 1.0 / (1.0 + 0.3 * a)
        # erfc(a / sqrt(2)) e^(a^2 / 2) / (2 t), as in vecmath.h
        p = 0.03619496891 * t - 0.159378694
        p = p * t + 0.2101188753
        p = p * t - 0.05716761696
        p = p * t + 0.1304164697
        p = p * t + 0.09934715908
        p = p * t + 0.1208455179
        p = p * t + 0.1196232639
        upper_tail = e * (t * p)
        # equal (>= for >): at 0 both are a half within the error of the polynomial
        return tl.where(x > 0.0, 1.0 - upper_tail, upper_tail), density


@triton.jit
def widen(x):
    """The block in the dtype of the math."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)
