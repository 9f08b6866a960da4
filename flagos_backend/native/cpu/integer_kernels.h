// Products of blocks of integer matrices, modulo 2^32. A word holds a group of neighbours along what is summed: four
// elements of 8 bits, two of 16, or one of 32. Compiled once for each instruction set.
#ifndef FLAGOS_NATIVE_CPU_INTEGER_KERNELS_H_
#define FLAGOS_NATIVE_CPU_INTEGER_KERNELS_H_

#include "cpu/kernels.h"

namespace flagos::cpu {

// Element (d, i) of a matrix: at[d * depth_step + i * step], in elements.
struct Elements {
  const void* at;
  int64_t depth_step, step;
};
// Word i of group g stands g * group + i * step bytes behind the first, aligned or not.
struct Words {
  const void* at;
  int64_t group, step;
};

// to[g * count + i] = group g of elements (., i), each with bit 7 flipped if it is `flipped` (8 bits alone). Where
// depth ends within a group, zeros follow.
using PackFunction = void (*)(uint32_t* to, const Elements& from, int64_t depth, int64_t count, bool flipped);
// What a product is taken less of, for each row and each column. kReadBeyond more columns are read.
struct Terms {
  const int32_t *rows, *columns;
};
// c[r * leading + i] = or, if it `adds`, += the sum over g of the products of the elements of a's word r and b's word i of
// group g, less the terms. b's words stand side by side, and kReadBeyond of them behind the last are read too.
using MultiplyFunction = void (*)(int32_t* c, int64_t leading, const Words& a, const Words& b, int64_t groups,
                                  int64_t rows, int64_t columns, const Terms& terms, bool adds);
inline constexpr int64_t kReadBeyond = 64;
// The same for one row of a, where the groups of both stand side by side, and nothing behind the last is read. b's bytes
// are flipped first if they are `flipped`.
using MultiplyRowFunction = void (*)(int32_t* c, const void* a, const void* b, int64_t b_step, int64_t groups,
                                     int64_t columns, bool flipped, const Terms& terms, bool adds);

struct GroupKernels {
  PackFunction pack[kNumTypes];  // nullptr: elements of this type are too wide
  MultiplyFunction multiply;     // nullptr: the processor has no such instruction
  MultiplyRowFunction multiply_row;
};
struct IntegerKernels {
  // Of bytes a's are signed and b's unsigned.
  GroupKernels bytes, halves, words;
};

namespace baseline {
extern const IntegerKernels kIntegerKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const IntegerKernels kIntegerKernels;
}
namespace avx512 {
extern const IntegerKernels kIntegerKernels;
}
namespace avx512_vnni {
extern const IntegerKernels kIntegerKernels;
}
#endif
const IntegerKernels& SelectIntegerKernels();

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_INTEGER_KERNELS_H_
