#ifndef FLAGOS_NATIVE_CPU_MATRIX_PRODUCT_H_
#define FLAGOS_NATIVE_CPU_MATRIX_PRODUCT_H_

#include "cpu/native_program.h"

namespace flagos::cpu {

inline constexpr int64_t kTaskWork =
    1 << 18;  // multiplications below which a task of its own costs more than it brings
inline constexpr int64_t kTasksPerThread = 2;  // enough to even out; more and every block packs the other operand again

// The batch's matrix at an index: how many elements it stands behind the first.
int64_t BatchOffset(const MatrixProduct& product, const MatrixProduct::Operand& operand, int64_t index);

// Whether a product is one for MultiplyByBlocks, which then needs no BLAS.
bool IsForBlocks(const MatrixProduct& product);
void MultiplyByBlocks(const MatrixProduct& product, char* const* slots);

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_MATRIX_PRODUCT_H_
