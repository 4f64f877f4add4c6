// Helpers with which the units of this folder make their tables. Each unit is compiled once an
// instruction set, with FT_ISA as its namespace (setup.py). Tables are constexpr: nothing of a unit
// may run when the library is loaded, on a processor that may lack its instructions.
#pragma once

#include "kernels.h"
#include "steps.h"

namespace fusedtrain {
namespace cpu {

// A table of kernels for a format: numbers of its type, stored as it says.
template <template <class, class> class Table, class Format>
using TableOf = Table<typename Format::Stored, typename Format::Number>;

// The loops of this unit, also where a table is defined.
#define FT_LOOPS ::fusedtrain::FT_ISA

#define FT_BY_NUMBER(make) {make<float>(), make<double>()}
#define FT_BY_DTYPE(make)                                                                   \
  {make<FT_LOOPS::Plain<float>>(), make<FT_LOOPS::Plain<double>>(), make<FT_LOOPS::Half>(), \
   make<FT_LOOPS::BFloat16>()}

}  // namespace cpu
}  // namespace fusedtrain
