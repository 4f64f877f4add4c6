// Vectors of group norm. They are small beside activations: the loops are plain.
#include "../ops/group_norm.h"

#include <math.h>

#include <limits>

#include "dispatch.h"
#include "stored.h"

namespace fusedtrain {
namespace cpu {
namespace {

template <class S, class T>
struct Vectors {
  // Calls f(place of its first channel, that channel) for groups [first, last) of all samples.
  template <class F>
  static void each_group(const GroupNorm& call, int64_t first, int64_t last, const F& f) {
    const int64_t size = call.channels / call.groups;
    for (int64_t i = first; i < last; ++i) f(i * size, i % call.groups * size);
  }
  static T affine(const GroupNorm& call, const void* p, int64_t i, T otherwise) {
    if (p == nullptr) return otherwise;
    return call.wide_affine ? *at<T>(p, i) : load(*at<S>(p, i));
  }
  static T modulation(const void* p, int64_t i) { return p == nullptr ? T(0) : load(*at<S>(p, i)); }

  static void vectors(const GroupNormVectors& call, int64_t first, int64_t last) {
    const int64_t size = call.channels / call.groups;
    each_group(call, first, last, [&](int64_t place, int64_t channel) {
      const double *average = call.average + place, *variance = call.variance + place;
      double mean = 0, within = 0, between = 0;
      for (int64_t i = 0; i < size; ++i) {
        mean += average[i];
        within += variance[i];
      }
      mean /= double(size);
      for (int64_t i = 0; i < size; ++i) between += (average[i] - mean) * (average[i] - mean);
      const double invstd = 1 / sqrt((within + between) / double(size) + call.eps);
      for (int64_t i = 0; i < size; ++i) {
        const T scale = T(1) + modulation(call.scale, place + i);
        *at<T>(call.mean, place + i) = T(mean);
        *at<T>(call.invstd, place + i) = T(invstd);
        *at<T>(call.factor, place + i) = affine(call, call.weight, channel + i, T(1)) * scale;
        *at<T>(call.offset, place + i) =
            affine(call, call.bias, channel + i, T(0)) * scale + modulation(call.shift, place + i);
      }
    });
  }

  static void averages(const GroupNormAverages& call, int64_t first, int64_t last) {
    const int64_t size = call.channels / call.groups, all = call.samples * call.channels;
    each_group(call, first, last, [&](int64_t place, int64_t) {
      const T* factor = at<T>(call.factor, place);
      const double *sums = call.sums + place, *slopes = sums + all;
      double sum = 0, slope = 0, most = 0;
      for (int64_t i = 0; i < size; ++i) {
        sum += sums[i] * double(factor[i]);
        slope += slopes[i] * double(factor[i]);
        most = fmax(most, fabs(double(factor[i])));
      }
      const double tiny = std::numeric_limits<T>::min();
      const double least = fmin(most, fmax(most * kLeastFactor, tiny));
      for (int64_t i = 0; i < size; ++i) {
        const bool small = fabs(double(factor[i])) < least;
        const T used = small ? T(copysign(least, double(factor[i]))) : factor[i];
        const double divisor = most > 0 ? double(used) * double(size) : 1;
        *at<T>(call.factors, place + i) = used;
        call.averages[place + i] = sum / divisor;
        call.averages[all + place + i] = slope / divisor;
      }
    });
  }

  static void put(const GroupNorm& call, void* p, int64_t i, double value) {
    if (call.wide_affine)
      *at<T>(p, i) = T(value);
    else
      store(at<S>(p, i), T(value));
  }
  static void gradients(const GroupNormGradients& call, int64_t first, int64_t last) {
    const int64_t part = call.samples_a_part * call.channels;
    for (int64_t c = first; c < last; ++c) {
      const double weight = affine(call, call.weight, c, T(1)),
                   bias = affine(call, call.bias, c, T(0));
      double of_weight = 0, of_bias = 0;
      for (int64_t n = 0; n < call.samples; ++n) {
        const int64_t place = n * call.channels + c;
        const double* sums = call.sums + place + place / part * part;
        const double sum = sums[0], slope = sums[part];
        const double scale = 1 + double(modulation(call.scale, place));
        of_weight += slope * scale;
        of_bias += sum * scale;
        if (call.grad_scale != nullptr)
          store(at<S>(call.grad_scale, place), T(slope * weight + sum * bias));
        if (call.grad_shift != nullptr) store(at<S>(call.grad_shift, place), T(sum));
      }
      if (call.grad_weight != nullptr) put(call, call.grad_weight, c, of_weight);
      if (call.grad_bias != nullptr) put(call, call.grad_bias, c, of_bias);
    }
  }
};

// Calls run(kernels, first, last) for parts of n units of so many numbers.
template <class Run>
void in_units(const GroupNorm& call, int64_t n, int64_t size, Parallel parallel, const Run& run) {
  by_stored(call.dtype, [&](auto stored) {
    in_parts(parallel, n, kGrain / size + 1, [&](int64_t first, int64_t last) {
      run(Vectors<decltype(stored), decltype(load(stored))>(), first, last);
    });
  });
}
template <class Run>
void in_groups(const GroupNorm& call, Parallel parallel, const Run& run) {
  in_units(call, call.samples * call.groups, call.channels / call.groups, parallel, run);
}

}  // namespace

void compute(const GroupNormVectors& call, Parallel parallel) {
  in_groups(call, parallel,
            [&](auto k, int64_t first, int64_t last) { k.vectors(call, first, last); });
}

void compute(const GroupNormAverages& call, Parallel parallel) {
  in_groups(call, parallel,
            [&](auto k, int64_t first, int64_t last) { k.averages(call, first, last); });
}

void compute(const GroupNormGradients& call, Parallel parallel) {
  in_units(call, call.channels, call.samples, parallel,
           [&](auto k, int64_t first, int64_t last) { k.gradients(call, first, last); });
}

}  // namespace cpu
}  // namespace fusedtrain
