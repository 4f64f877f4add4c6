// The body of an instruction-set unit: compiled three times with different flags.
#include "batch_norm.h"
#include "bias_act.h"
#include "channelwise.h"
#include "convert.h"
#include "few_bit.h"
#include "gated.h"
#include "images.h"
#include "kernels.h"
#include "optimizers.h"
#include "pointwise.h"
#include "pool.h"
#include "scale_add.h"

namespace fusedtrain {
namespace cpu {

// A table of kernels for a format: numbers of its type, stored as it says.
template <template <class, class> class Table, class Format>
using TableOf = Table<typename Format::Stored, typename Format::Number>;

template <class Format>
static constexpr TableOf<PointwiseKernels, Format> pointwise_kernels() {
  if constexpr (sizeof(typename Format::Stored) == sizeof(typename Format::Number)) {
    return {
#define FT_FORWARD(name, Formula, ...)                                 \
  FT_ISA::pointwise_forward<FT_ISA::Formula, typename Format::Number>,
#define FT_BACKWARD(name, Formula, ...)                                 \
  FT_ISA::pointwise_backward<FT_ISA::Formula, typename Format::Number>,
        {FT_POINTWISE(FT_FORWARD)},
        {FT_POINTWISE(FT_BACKWARD)},
    };
  } else {
    return {
#define FT_FORWARD_16(name, Formula, ...) FT_ISA::pointwise_forward_16bit<FT_ISA::Formula, Format>,
#define FT_BACKWARD_16(name, Formula, ...)                   \
  FT_ISA::pointwise_backward_16bit<FT_ISA::Formula, Format>,
        {FT_POINTWISE(FT_FORWARD_16)},
        {FT_POINTWISE(FT_BACKWARD_16)},
    };
  }
}

template <class T>
static constexpr ChannelwiseKernels<T> channelwise_kernels() {
  return {
#define FT_CHANNEL_FORWARD(name, Formula, n) FT_ISA::channelwise_forward<FT_ISA::Formula, n, T>,
#define FT_CHANNEL_BACKWARD(name, Formula, n) FT_ISA::channelwise_backward<FT_ISA::Formula, n, T>,
      {FT_CHANNELWISE(FT_CHANNEL_FORWARD)},
      {FT_CHANNELWISE(FT_CHANNEL_BACKWARD)},
  };
}

template <class By, class Format, template <class> class Formula, bool kByOutput>
struct WithNorm {
  using S = typename Format::Stored;
  using T = typename Format::Number;
  using Kernel = typename BatchNormKernels<S, T>::Kernel;
  static constexpr bool kThere = FT_ISA::kWithNorm<Formula> && sizeof(T) == sizeof(float);

  static constexpr Kernel forward() {
    if constexpr (kThere)
      return FT_ISA::norm_forward<By, Format, Formula, NormTile<S, T>>;
    else
      return nullptr;
  }
  static constexpr Kernel backward() {
    if constexpr (kThere)
      return FT_ISA::norm_backward<By, Format, Formula, kByOutput, NormTile<S, T>>;
    else
      return nullptr;
  }
};

template <class By, class Format>
static constexpr auto batch_norm_kernels() {
  using S = typename Format::Stored;
  using T = typename Format::Number;
  using Tile = NormTile<S, T>;
  return BatchNormKernels<S, T>{
      FT_ISA::norm_collect<By, Format, Tile>,
      FT_ISA::norm_forward<By, Format, FT_ISA::Identity, Tile>,
#define FT_NORM_FORWARD(name, Formula, n, rounds, saved)              \
  WithNorm<By, Format, FT_ISA::Formula, saved == kOutput>::forward(),
#define FT_NORM_BACKWARD(name, Formula, n, rounds, saved)              \
  WithNorm<By, Format, FT_ISA::Formula, saved == kOutput>::backward(),
      {FT_POINTWISE(FT_NORM_FORWARD)},
      FT_ISA::norm_restore<By, Format, Tile>,
      FT_ISA::norm_reduce<By, Format, Tile>,
      {FT_POINTWISE(FT_NORM_BACKWARD)},
      FT_ISA::norm_grad_input<By, Format, Tile, T>,
      FT_ISA::move_sums<T>,
  };
}
template <class Format>
static constexpr TableOf<BatchNormLayouts, Format> batch_norm_layouts() {
  return {batch_norm_kernels<FT_ISA::Column, Format>(), batch_norm_kernels<FT_ISA::Row, Format>()};
}

template <class Format>
static constexpr TableOf<OptimizerKernels, Format> optimizer_kernels() {
  if constexpr (sizeof(typename Format::Stored) == sizeof(typename Format::Number)) {
    using T = typename Format::Number;
    return {
#define FT_UPDATE(name, Rule, least, most)                    \
  {FT_ISA::update_kernel<FT_ISA::Rule, 0, least, most, T>(),  \
   FT_ISA::update_kernel<FT_ISA::Rule, 1, least, most, T>(),  \
   FT_ISA::update_kernel<FT_ISA::Rule, 2, least, most, T>(),  \
   FT_ISA::update_kernel<FT_ISA::Rule, 3, least, most, T>()},
#define FT_TRIAL(name, Rule, least, most)                    \
  {FT_ISA::trial_kernel<FT_ISA::Rule, 0, least, most, T>(),  \
   FT_ISA::trial_kernel<FT_ISA::Rule, 1, least, most, T>(),  \
   FT_ISA::trial_kernel<FT_ISA::Rule, 2, least, most, T>(),  \
   FT_ISA::trial_kernel<FT_ISA::Rule, 3, least, most, T>()},
        {FT_RULES(FT_UPDATE)}, {FT_RULES(FT_TRIAL)}, FT_ISA::measure<T>,
        FT_ISA::multiply<T>,   FT_ISA::average<T>,
    };
  } else {
    return {
#define FT_UPDATE_16(name, Rule, least, most)                            \
  {FT_ISA::update_kernel_16bit<FT_ISA::Rule, 0, least, most, Format>(),  \
   FT_ISA::update_kernel_16bit<FT_ISA::Rule, 1, least, most, Format>(),  \
   FT_ISA::update_kernel_16bit<FT_ISA::Rule, 2, least, most, Format>(),  \
   FT_ISA::update_kernel_16bit<FT_ISA::Rule, 3, least, most, Format>()},
        {FT_RULES(FT_UPDATE_16)},
    };
  }
}

template <class T>
static constexpr ChainKernels<T> chain_kernels() {
  return {FT_ISA::multiply_into<T>, FT_ISA::bias_add<T>, FT_ISA::bias_sum<T>,
          FT_ISA::finish_forward<T, ChainFinish<T>>, FT_ISA::finish_backward<T, ChainFinish<T>>};
}

template <class Format>
static constexpr TableOf<ScaleKernels, Format> scale_kernels() {
  return {FT_ISA::scale_forward<Format, typename Format::Stored, typename Format::Number>,
          FT_ISA::scale_backward<Format, typename Format::Stored, typename Format::Number>};
}

template <template <class> class Formula, class Format>
struct WithGate {
  using S = typename Format::Stored;
  static constexpr auto forward() -> void (*)(const S*, const S*, S*, int64_t) {
    if constexpr (FT_ISA::kWithGate<Formula>)
      return FT_ISA::gated_forward<Formula, Format, S>;
    else
      return nullptr;
  }
  static constexpr auto backward() -> void (*)(const S*, const S*, const S*, S*, S*, int64_t) {
    if constexpr (FT_ISA::kWithGate<Formula>)
      return FT_ISA::gated_backward<Formula, Format, S>;
    else
      return nullptr;
  }
};

template <class Format>
static constexpr TableOf<GatedKernels, Format> gated_kernels() {
  return {
#define FT_GATED_FORWARD(name, Formula, ...) WithGate<FT_ISA::Formula, Format>::forward(),
#define FT_GATED_BACKWARD(name, Formula, ...) WithGate<FT_ISA::Formula, Format>::backward(),
      {FT_POINTWISE(FT_GATED_FORWARD)},
      {FT_POINTWISE(FT_GATED_BACKWARD)},
  };
}

// Only formulas with levels have kernels.
template <template <class> class Formula>
constexpr bool kHasSlopes = false;
#define FT_HAS_SLOPES(name, Formula, table)          \
  template <>                                        \
  constexpr bool kHasSlopes<FT_ISA::Formula> = true;
FT_FEW_BIT(FT_HAS_SLOPES)

template <class Format, template <class> class Formula, bool kByOutput>
static constexpr auto few_bit_forward() ->
    typename FewBitKernels<typename Format::Stored, typename Format::Number>::Forward {
  if constexpr (kHasSlopes<Formula>)
    return FT_ISA::few_bit_forward<Formula, kByOutput, Format>;
  else
    return nullptr;
}

template <class Format>
static constexpr TableOf<FewBitKernels, Format> few_bit_kernels() {
  return {
#define FT_FEW_BIT_FORWARD(name, Formula, n, rounds, saved)     \
  few_bit_forward<Format, FT_ISA::Formula, saved == kOutput>(),
      {FT_POINTWISE(FT_FEW_BIT_FORWARD)},
      FT_ISA::few_bit_backward<Format>,
  };
}

template <class Format>
static constexpr TableOf<MaxPoolKernels, Format> max_pool_kernels() {
  return {FT_ISA::MaxPooling<Format>::forward, FT_ISA::MaxPooling<Format>::backward};
}

template <class Format>
static constexpr TableOf<ImageKernels, Format> image_kernels() {
  if constexpr (sizeof(typename Format::Number) == sizeof(double))
    return {nullptr};
  else
    return {FT_ISA::normalize_run<Format, typename Format::Stored>};
}

static constexpr Kernels make_kernels(const char* name) {
#define FT_BY_NUMBER(make) {make<float>(), make<double>()}
#define FT_BY_DTYPE(make)                                                              \
  {                                                                                    \
    make<FT_ISA::Plain<float>>(), make<FT_ISA::Plain<double>>(), make<FT_ISA::Half>(), \
        make<FT_ISA::BFloat16>()                                                       \
  }
  return Kernels{name,
                 {FT_ISA::from_16bit<FT_ISA::Half>, FT_ISA::to_16bit<FT_ISA::Half>},
                 {FT_ISA::from_16bit<FT_ISA::BFloat16>, FT_ISA::to_16bit<FT_ISA::BFloat16>},
                 FT_BY_DTYPE(pointwise_kernels),
                 FT_BY_NUMBER(channelwise_kernels),
                 FT_BY_DTYPE(few_bit_kernels),
                 FT_BY_DTYPE(batch_norm_layouts),
                 FT_BY_DTYPE(optimizer_kernels),
                 FT_ISA::to_bfloat16_stochastic,
                 FT_BY_DTYPE(gated_kernels),
                 FT_BY_DTYPE(scale_kernels),
                 FT_BY_NUMBER(chain_kernels),
                 FT_ISA::philox_words,
                 FT_BY_DTYPE(max_pool_kernels),
                 FT_BY_DTYPE(image_kernels),
                 FT_ISA::join_channels,
                 FT_ISA::split_channels};
}

}  // namespace cpu
}  // namespace fusedtrain
