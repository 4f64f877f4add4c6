// Every activation with parameters for each channel as one small struct, for the CPU and the GPU
// alike.
//
// forward(x, a, b) is the function with the parameters of a channel, of which b may be unused.
// backward(g, x, a, b, a_grad, b_grad) is g times the derivative by x, and sets what the element
// adds to the gradients of the parameters. T is float or double, as in formulas.h.
#pragma once

#include "host_device.h"
#include "vecmath.h"

// name of the op, struct, number of parameter tensors (one value a channel, or one in all)
#define FT_CHANNELWISE(X)   \
  X(prelu, Prelu, 1)        \
  X(star_relu, StarRelu, 2)

FT_BEGIN_NAMESPACE

template <class T>
struct Prelu {
  static FT_METHOD T forward(T x, T weight, T) { return x > T(0) ? x : weight * x; }
  static FT_METHOD T backward(T g, T x, T weight, T, T& weight_grad, T&) {
    weight_grad = x > T(0) ? T(0) : g * x;
    return x > T(0) ? g : weight * g;
  }
};

template <class T>
struct StarRelu {
  static FT_METHOD T forward(T x, T scale, T bias) {
    const T r = math::at_least(x, T(0));
    return scale * r * r + bias;
  }
  static FT_METHOD T backward(T g, T x, T scale, T, T& scale_grad, T& bias_grad) {
    const T r = math::at_least(x, T(0));
    scale_grad = g * (r * r);
    bias_grad = g;
    return x <= T(0) ? T(0) : g * (T(2) * scale * r);
  }
};

FT_END_NAMESPACE
