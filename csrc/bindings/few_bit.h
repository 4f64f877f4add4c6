// Activations whose derivative is kept in few bits, the same for every backend: check, lay out,
// allocate, run.
#pragma once

#include "../bits.h"
#include "../few_bit.h"
#include "../ops/few_bit.h"
#include "activations.h"

#include <tuple>

namespace fusedtrain {
namespace {

template <class Backend>
struct FewBit {
  static void check_levels(const char* op, int64_t activation, int64_t bits) {
    const SlopeTable* table = slope_table(activation);
    STD_TORCH_CHECK(table != nullptr, "fusedtrain::", op,
                    ": activation has no derivative in few bits");
    STD_TORCH_CHECK(bits >= 1 && bits <= 8 && has_levels(*table, int(bits)), "fusedtrain::", op,
                    ": no derivative of ", kPointwiseNames[activation], " in ", bits, " bits");
  }

  // Codes in the order of the output's memory; x is dense, and y of its layout.
  static Tensor run(const char* op, const Tensor& x, Tensor& y, int64_t activation, int64_t bits) {
    const int64_t n = x.numel();
    Tensor codes =
        new_contiguous(x, {packed_bytes(n, int(bits))}, torch::headeronly::ScalarType::Byte);
    if (n > 0)
      Backend(x).run(
          FewBitForward{int(activation), int(bits), dtype_of(x, op, "input"), read_data(x),
                        write_data(y), static_cast<uint8_t*>(write_data(codes))},
          n);
    return codes;
  }

  static std::tuple<Tensor, Tensor> forward(Tensor input, int64_t activation, int64_t bits) {
    const char* op = "few_bit";
    check_levels(op, activation, bits);
    dtype_of(input, op, "input");
    const Backend backend(input);
    Tensor output = new_output<Backend>(input);
    const bool copied = !is_dense(input);
    if (copied) torch::stable::copy_(output, input);
    Tensor codes = run(op, copied ? output : input, output, activation, bits);
    return {output, codes};
  }

  static Tensor forward_inplace(Tensor input, int64_t activation, int64_t bits) {
    const char* op = "few_bit_";
    check_levels(op, activation, bits);
    dtype_of(input, op, "input");
    const Backend backend(input);
    Tensor work = dense(input);
    Tensor codes = run(op, work, work, activation, bits);
    if (work.const_data_ptr() != input.const_data_ptr()) torch::stable::copy_(input, work);
    return codes;
  }

  static Tensor backward(Tensor grad, Tensor codes, int64_t activation, int64_t bits) {
    const char* op = "few_bit_backward";
    check_levels(op, activation, bits);
    const Dtype dtype = dtype_of(grad, op, "grad");
    const int64_t n = grad.numel();
    STD_TORCH_CHECK(codes.scalar_type() == torch::headeronly::ScalarType::Byte &&
                        codes.dim() == 1 && codes.numel() == packed_bytes(n, int(bits)),
                    "fusedtrain::", op, ": codes must be ", packed_bytes(n, int(bits)),
                    " numbers of uint8, those of a tensor as large as grad");
    STD_TORCH_CHECK(same_device(codes, grad), "fusedtrain::", op,
                    ": codes and grad must be on the same device");
    const Backend backend(grad);
    Tensor grad_input = new_output<Backend>(grad);
    const Tensor g = dense_like(grad, grad_input), c = torch::stable::contiguous(codes);
    if (n > 0)
      backend.run(FewBitBackward{int(activation), int(bits), dtype, read_data(g),
                                 static_cast<const uint8_t*>(read_data(c)), write_data(grad_input)},
                  n);
    return grad_input;
  }
};

FT_REGISTER(m) {
  m.impl("few_bit", TORCH_BOX(&FewBit<Backend>::forward));
  m.impl("few_bit_", TORCH_BOX(&FewBit<Backend>::forward_inplace));
  m.impl("few_bit_backward", TORCH_BOX(&FewBit<Backend>::backward));
}

}  // namespace
}  // namespace fusedtrain
