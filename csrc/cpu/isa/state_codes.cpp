// The table of state_codes.h.
#include "state_codes.h"

#include "tables.h"

namespace fusedtrain {
namespace cpu {

constexpr StateCodeKernels tables::FT_ISA::state_codes = {
    {FT_LOOPS::load_codes<FT_LOOPS::SignedCodes>, FT_LOOPS::load_codes<FT_LOOPS::SquareCodes>},
    {FT_LOOPS::store_codes<FT_LOOPS::SignedCodes>, FT_LOOPS::store_codes<FT_LOOPS::SquareCodes>},
};

}  // namespace cpu
}  // namespace fusedtrain
