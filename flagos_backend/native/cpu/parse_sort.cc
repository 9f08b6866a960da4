// Reads sorts.
#include <algorithm>
#include <limits>

#include "cpu/parse.h"

namespace flagos::cpu {

Sort Parser::ParseSort() {
  // So that what a sort takes is a number.
  constexpr int64_t kMostElements = int64_t{1} << 48;
  Sort sort;
  sort.outer = Word();
  sort.size = Word();
  sort.inner = Word();
  const int64_t elements = Times(Times(sort.outer, sort.size), sort.inner);
  Require(elements <= kMostElements && sort.size <= std::numeric_limits<int32_t>::max(), "a sort is too large");
  for (int64_t i = Count(); i > 0; --i) {
    sort.element_bytes.push_back(Word());
    const int64_t bytes = sort.element_bytes.back();
    Require(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16, "elements of this size do not exist");
  }
  for (int64_t i = Count(); i > 0; --i) {
    Sort::Key key;
    key.operand = Word();
    Require(key.operand >= 0 && key.operand < static_cast<int64_t>(sort.element_bytes.size()),
            "a key is no operand of its sort");
    key.type = ParseType();
    const int64_t descending = Word(), merged = Word();
    Require((descending == 0 || descending == 1) && (merged == 0 || merged == 1), "a key goes up or down");
    key.descending = descending == 1;
    key.merged = merged == 1;
    Require(IsSortKey(key.type) && TypeBytes(key.type) == sort.element_bytes[static_cast<size_t>(key.operand)],
            "a key has another type than its operand");
    sort.keys.push_back(key);
  }
  Require(!sort.keys.empty(), "a sort without keys");
  sort.sources = ReadableSlots();
  sort.targets = WritableSlots();
  Require(Count() == 0, "a sort has no scratch");
  std::vector<int64_t> bytes;
  for (const int64_t element : sort.element_bytes) bytes.push_back(Times(elements, element));
  CheckBuffers(sort.sources, bytes);
  CheckBuffers(sort.targets, bytes);
  for (const int64_t target : sort.targets) {
    Require(std::count(sort.sources.begin(), sort.sources.end(), target) == 0 &&
                std::count(sort.targets.begin(), sort.targets.end(), target) == 1,
            "a sort writes over its operands");
  }
  return sort;
}

}  // namespace flagos::cpu
