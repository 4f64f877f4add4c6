// All tables of an instruction set.
#include "tables.h"

#define FT_QUOTED(text) FT_QUOTE(text)
#define FT_QUOTE(text) #text

const fusedtrain::cpu::Kernels& fusedtrain::cpu::tables::FT_ISA::all() {
  static constexpr Kernels kernels = {
      FT_QUOTED(FT_ISA_NAME),
      {FT_LOOPS::from_16bit<FT_LOOPS::Half>, FT_LOOPS::to_16bit<FT_LOOPS::Half>},
      {FT_LOOPS::from_16bit<FT_LOOPS::BFloat16>, FT_LOOPS::to_16bit<FT_LOOPS::BFloat16>},
#define FT_ENTRY(Table, name) name,
      FT_TABLES(FT_ENTRY)
#undef FT_ENTRY
  };
  return kernels;
}
