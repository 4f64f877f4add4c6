// normalize_images, the same for every backend: check, lay out, allocate, run.
#pragma once

#include "../ops/images.h"
#include "checks.h"

namespace fusedtrain {
namespace {

template <class Backend>
struct Images {
  using ScalarType = torch::headeronly::ScalarType;
  using MemoryFormat = torch::headeronly::MemoryFormat;

  struct Strides {
    int64_t of[4];
  };
  static Strides planes(const Tensor& t) {
    const auto n = t.sizes();
    return {{n[1] * n[2] * n[3], n[2] * n[3], n[3], 1}};
  }
  static Strides last(const Tensor& t) {
    const auto n = t.sizes();
    return {{n[1] * n[2] * n[3], 1, n[1] * n[3], n[1]}};
  }
  static bool has(const Tensor& t, const Strides& strides) {
    for (int d = 0; d < 4; ++d)
      if (t.sizes()[d] != 1 && t.strides()[d] != strides.of[d]) return false;
    return true;
  }

  // How a call goes through memory; x is copied where its layout and that of y are not walked
  // together. Neither is empty.
  static void lay_out(NormalizeImages& call, Tensor& x, const Tensor& y) {
    const int64_t channels = x.sizes()[1];
    const bool to_planes = has(x, last(x)) && has(y, planes(x));
    const bool to_last = has(x, planes(x)) && has(y, last(x));
    if (!same_layout(x, y) && (to_planes || to_last) && channels <= kMostChannelsMoved) {
      call.samples = x.sizes()[0];
      call.channels = channels;
      call.pixels = x.sizes()[2] * x.sizes()[3];
      call.x_last = to_planes;
      call.y_last = to_last;
      return;
    }
    if (!same_layout(x, y)) {
      Tensor copy = empty_strided(x, y.strides().data(), ScalarType::Byte);
      torch::stable::copy_(copy, x);
      x = copy;
    }
    const ChannelView view = channel_view(x, false);
    call.channels = view.channels;
    call.x_last = call.y_last = view.inner == 1 && view.channels > 1;
    call.samples = call.x_last ? 1 : view.rows;
    call.pixels = call.x_last ? view.rows : view.inner;
  }

  static Tensor normalize(Tensor input, Tensor coefficients, ScalarType dtype,
                          MemoryFormat memory_format) {
    STD_TORCH_CHECK(input.scalar_type() == ScalarType::Byte,
                    "fusedtrain::normalize_images: input must be uint8");
    STD_TORCH_CHECK(input.dim() == 4, "fusedtrain::normalize_images: input must have 4 dimensions");
    STD_TORCH_CHECK(Backend::on_device(coefficients) && same_device(coefficients, input),
                    "fusedtrain::normalize_images: coefficients are on another device");
    STD_TORCH_CHECK(coefficients.scalar_type() == ScalarType::Float && coefficients.dim() == 2 &&
                        coefficients.sizes()[0] == 3 && coefficients.sizes()[1] == input.sizes()[1],
                    "fusedtrain::normalize_images: coefficients must be float32 [3, ",
                    input.sizes()[1], "]");
    const Backend backend(input);
    Tensor x = dense(input);
    Strides strides;
    switch (memory_format) {
      case MemoryFormat::Contiguous:
        strides = planes(x);
        break;
      case MemoryFormat::ChannelsLast:
        strides = last(x);
        break;
      case MemoryFormat::Preserve:
        for (int d = 0; d < 4; ++d) strides.of[d] = x.strides()[d];
        break;
      default:
        STD_TORCH_CHECK(false,
                        "fusedtrain::normalize_images: memory_format must be preserve_format, "
                        "contiguous_format or channels_last");
    }
    Tensor y = Backend::prepared(empty_strided(x, strides.of, dtype));
    NormalizeImages call = {};
    call.dtype = dtype_of(y, "normalize_images", "dtype");
    STD_TORCH_CHECK(call.dtype != Dtype::kFloat64,
                    "fusedtrain::normalize_images: dtype must be float32, float16 or bfloat16");
    if (y.numel() == 0) return y;
    lay_out(call, x, y);
    const Tensor c = torch::stable::contiguous(coefficients);
    call.x = static_cast<const uint8_t*>(read_data(x));
    call.coefficients = static_cast<const float*>(read_data(c));
    call.y = write_data(y);
    backend.run(call);
    return y;
  }
};

FT_REGISTER(m) { m.impl("normalize_images", TORCH_BOX(&Images<Backend>::normalize)); }

}  // namespace
}  // namespace fusedtrain
