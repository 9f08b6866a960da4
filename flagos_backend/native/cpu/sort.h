// Sorts of rows by keys that are read from operands; all operands are brought into the order of the keys.
#ifndef FLAGOS_NATIVE_CPU_SORT_H_
#define FLAGOS_NATIVE_CPU_SORT_H_

#include <cstdint>
#include <vector>

#include "flagos/native_tables.h"

namespace flagos::cpu {

struct Sort {
  struct Key {
    int64_t operand;
    Type type;
    bool descending;
    bool merged;  // of floats: zeros of both signs are equal, and so are all NaNs, which are above infinity
  };
  // Operands are arrays [outer][size][inner], of which `size` is sorted. Elements with equal keys keep their order.
  int64_t outer, size, inner;
  std::vector<Key> keys;                                 // the most significant first
  std::vector<int64_t> element_bytes, sources, targets;  // of each operand
};

// Whether there is a kernel for keys of the type.
bool IsSortKey(Type type);

// Operations on elements, to decide on threads.
int64_t WorkOf(const Sort& sort);

// No target is a source.
void RunSort(const Sort& sort, char* const* slots);

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_SORT_H_
