// The converters, and all tables of an instruction set.
#include "tables.h"

namespace fusedtrain {
namespace cpu {

template <class Stored>
static constexpr Format converters() {
  return {FT_LOOPS::from_16bit<Stored>, FT_LOOPS::to_16bit<Stored>};
}

constexpr Format tables::FT_ISA::half = converters<FT_LOOPS::Half>();
constexpr Format tables::FT_ISA::bfloat16 = converters<FT_LOOPS::BFloat16>();

#define FT_QUOTED(text) FT_QUOTE(text)
#define FT_QUOTE(text) #text
#define FT_ENTRY(Table, name) , name

const Kernels& tables::FT_ISA::all() {
  static constexpr Kernels kernels = {FT_QUOTED(FT_ISA_NAME) FT_TABLES(FT_ENTRY)};
  return kernels;
}

}  // namespace cpu
}  // namespace fusedtrain
