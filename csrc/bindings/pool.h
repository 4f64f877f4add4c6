// max_pool2d and its backward, the same for every backend: check, lay out, allocate, run.
#pragma once

#include "../bits.h"
#include "../ops/pool.h"
#include "checks.h"

#include <tuple>
#include <vector>

namespace fusedtrain {
namespace {

template <class Backend>
struct Pooling {
  using Ints = std::vector<int64_t>;
  using ScalarType = torch::headeronly::ScalarType;

  // Everything of a call but pointers and the sizes of the output. `t` has all dimensions but the
  // last two of the input, which is height x width.
  static void describe(const char* op, MaxPool& call, const Tensor& t, int64_t height,
                       int64_t width, const Ints& kernel, const Ints& stride, const Ints& padding,
                       int64_t bits, bool channels_last) {
    STD_TORCH_CHECK(Backend::on_device(t), "fusedtrain::", op, ": a tensor is on another device");
    const size_t dims = t.sizes().size();
    STD_TORCH_CHECK(dims == 4 || (dims == 3 && !channels_last), "fusedtrain::", op,
                    ": expected [N, C, H, W], or [C, H, W] and not channels_last");
    STD_TORCH_CHECK(kernel.size() == 2 && stride.size() == 2 && padding.size() == 2,
                    "fusedtrain::", op, ": kernel_size, stride and padding must be two numbers");
    for (int d = 0; d < 2; ++d) {
      STD_TORCH_CHECK(kernel[d] >= 1 && kernel[d] <= 256 && stride[d] >= 1, "fusedtrain::", op,
                      ": kernel_size must be from 1 to 256, stride at least 1");
      STD_TORCH_CHECK(padding[d] >= 0 && 2 * padding[d] <= kernel[d], "fusedtrain::", op,
                      ": padding must be from 0 to half of kernel_size");
    }
    STD_TORCH_CHECK(bits == 0 || bits == 1 || bits == 2 || bits == 4 || bits == 8,
                    "fusedtrain::", op, ": bits must be 0, 1, 2, 4 or 8");
    STD_TORCH_CHECK(bits == 0 || kernel[0] * kernel[1] <= (1 << bits), "fusedtrain::", op, ": ",
                    bits, " bits are too few for the window");
    STD_TORCH_CHECK(height >= 1 && width >= 1, "fusedtrain::", op, ": the input has no pixels");
    call.dtype = dtype_of(t, op, "input");
    call.planes = t.sizes()[0];
    call.channels = 1;
    if (channels_last)
      call.channels = t.sizes()[1];
    else if (dims == 4)
      call.planes *= t.sizes()[1];
    call.height = height;
    call.width = width;
    call.kernel_h = kernel[0], call.kernel_w = kernel[1];
    call.stride_h = stride[0], call.stride_w = stride[1];
    call.pad_h = padding[0], call.pad_w = padding[1];
    call.bits = int(bits);
  }

  // A tensor with the sizes of `model` but for the last two.
  static Tensor new_image(const Tensor& model, int64_t height, int64_t width, bool channels_last) {
    const auto sizes = model.sizes();
    const size_t dims = sizes.size();
    if (!channels_last) {
      Ints wanted(sizes.begin(), sizes.end());
      wanted[dims - 2] = height;
      wanted[dims - 1] = width;
      return Backend::prepared(new_contiguous(model, wanted, model.scalar_type()));
    }
    Tensor t = new_contiguous(model, {sizes[0], height, width, sizes[1]}, model.scalar_type());
    t = torch::stable::transpose(Backend::prepared(t), 1, 3);
    return torch::stable::transpose(t, 2, 3);
  }

  static Tensor in_layout(const Tensor& t, bool channels_last) {
    using torch::headeronly::MemoryFormat;
    return torch::stable::contiguous(
        t, channels_last ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous);
  }

  // As torch: with ceil_mode windows may reach beyond the padding, but not begin there.
  static int64_t out_size(int64_t size, int64_t kernel, int64_t stride, int64_t pad,
                          bool ceil_mode) {
    const int64_t room = size + 2 * pad - kernel;
    if (room < 0 && !(ceil_mode && room + stride > 0)) return 0;
    const int64_t count = (room + (ceil_mode ? stride - 1 : 0)) / stride + 1;
    return ceil_mode && (count - 1) * stride >= size + pad ? count - 1 : count;
  }

  static std::tuple<Tensor, Tensor> forward(Tensor input, Ints kernel, Ints stride, Ints padding,
                                            bool ceil_mode, int64_t bits, bool channels_last) {
    const char* op = "max_pool2d";
    MaxPoolForward call = {};
    const size_t dims = input.sizes().size();
    const int64_t height = dims < 2 ? 0 : input.sizes()[dims - 2];
    const int64_t width = dims < 2 ? 0 : input.sizes()[dims - 1];
    describe(op, call, input, height, width, kernel, stride, padding, bits, channels_last);
    call.out_height = out_size(height, kernel[0], stride[0], padding[0], ceil_mode);
    call.out_width = out_size(width, kernel[1], stride[1], padding[1], ceil_mode);
    STD_TORCH_CHECK(call.out_height >= 1 && call.out_width >= 1, "fusedtrain::", op,
                    ": the input is smaller than a window");
    const Backend backend(input);
    Tensor y = new_image(input, call.out_height, call.out_width, channels_last);
    Tensor codes =
        new_contiguous(input, {packed_bytes(call.outputs(), call.bits)}, ScalarType::Byte);
    if (call.outputs() > 0) {
      const Tensor x = in_layout(input, channels_last);
      call.x = read_data(x);
      call.y = write_data(y);
      if (bits > 0) call.codes = static_cast<uint8_t*>(write_data(codes));
      backend.run(call);
    }
    return {y, codes};
  }

  static Tensor backward(Tensor grad, Tensor codes, int64_t height, int64_t width, Ints kernel,
                         Ints stride, Ints padding, int64_t bits, bool channels_last) {
    const char* op = "max_pool2d_backward";
    MaxPoolBackward call = {};
    describe(op, call, grad, height, width, kernel, stride, padding, bits, channels_last);
    const size_t dims = grad.sizes().size();
    call.out_height = grad.sizes()[dims - 2];
    call.out_width = grad.sizes()[dims - 1];
    STD_TORCH_CHECK(Backend::on_device(codes) && same_device(codes, grad), "fusedtrain::", op,
                    ": codes must be on the device of grad");
    STD_TORCH_CHECK(bits > 0 && codes.scalar_type() == ScalarType::Byte && codes.dim() == 1 &&
                        codes.numel() == packed_bytes(call.outputs(), call.bits),
                    "fusedtrain::", op, ": codes must be the ", bits,
                    "-bit codes of as many outputs as grad has");
    const Backend backend(grad);
    Tensor grad_input = new_image(grad, height, width, channels_last);
    if (grad.numel() == 0) {
      torch::stable::zero_(grad_input);
      return grad_input;
    }
    const Tensor g = in_layout(grad, channels_last), c = torch::stable::contiguous(codes);
    call.grad = read_data(g);
    call.codes = static_cast<const uint8_t*>(read_data(c));
    call.grad_input = write_data(grad_input);
    backend.run(call);
    return grad_input;
  }
};

FT_REGISTER(m) {
  m.impl("max_pool2d", TORCH_BOX(&Pooling<Backend>::forward));
  m.impl("max_pool2d_backward", TORCH_BOX(&Pooling<Backend>::backward));
}

}  // namespace
}  // namespace fusedtrain
