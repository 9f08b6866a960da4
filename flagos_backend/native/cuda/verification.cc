#include "cuda/verification.h"

#include <algorithm>
#include <cstring>

#include "error.h"

namespace flagos::cuda {

void Verification::Check(unsigned char* bytes, size_t size, const Known* known, const char* what, size_t node,
                         std::vector<Patch>& patches) const {
  for (size_t begin = 0; begin < size; begin += sizeof(uint64_t), ++known) {
    uint64_t value = 0;
    std::memcpy(&value, bytes + begin, std::min(sizeof(value), size - begin));
    if (!Holds(*known, value)) {
      Fail(FLAGOS_UNIMPLEMENTED, "%s of node %zu is not what the captures that were compared have (%llx for %llx)",
           what, node, static_cast<unsigned long long>(value), static_cast<unsigned long long>(known->first));
    }
    if (known->kind == Known::Kind::kArray) {
      patches.push_back({known->number, known->offset, reinterpret_cast<uint64_t*>(bytes + begin)});
    }
  }
}

bool Verification::IsInArray(uint64_t value) const noexcept {
  return std::any_of(arrays_.begin(), arrays_.end(),
                     [value](const Captures::Array& a) { return value - a.first <= a.bytes; });
}

bool Verification::Holds(const Known& known, uint64_t value) const noexcept {
  switch (known.kind) {
    case Known::Kind::kEqual:
      // What a stack left may have been the same in three captures. What follows the arrays or the temporaries was not.
      return value == known.first || !IsInArray(value);
    case Known::Kind::kArray:
      return value == known.first;
    case Known::Kind::kOwned:
      return kept_.Owns(value);
    case Known::Kind::kCondition:
      return value == kept_.conditionals[known.number].handle;
    case Known::Kind::kLeftOver:
      return true;
  }
  return false;
}

}  // namespace flagos::cuda
