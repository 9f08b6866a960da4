#include "cuda/comparison.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "error.h"

namespace flagos::cuda {
namespace {

constexpr uint64_t kHalf = 0xffffffff, kHalfBits = 32;
constexpr uint64_t kAddressBits = 48;    // what is above is zero in every address of a device
constexpr uint64_t kSmall = 1 << 16;     // numbers below are sizes and counts
constexpr uint64_t kFlags = 1 << 4;      // numbers below may be flags
constexpr int64_t kLargestElement = 16;  // bytes

uint64_t DistanceOfHalves(uint64_t half, uint64_t begin) noexcept { return (half - begin) & kHalf; }

// Whether these are halves of addresses in memory of two captures' own: the upper ones, or the lower ones of the same
// place in it. Small numbers are not told from lower halves otherwise.
bool AreOwnedHalves(const Captures::Graph& one, const Captures::Graph& other, uint64_t first,
                    uint64_t second) noexcept {
  const auto is_upper = [](const Captures::Range& r, uint64_t half) {
    return r.begin >> kHalfBits <= half && half <= r.end >> kHalfBits;
  };
  for (const Captures::Range& a : one.owned) {
    for (const Captures::Range& b : other.owned) {
      const uint64_t offset = DistanceOfHalves(first, a.begin);
      if (offset < a.end - a.begin && DistanceOfHalves(second, b.begin) == offset) return true;
      if (is_upper(a, first) && is_upper(b, second)) return true;
    }
  }
  return false;
}

}  // namespace

Word Bytes::At(size_t begin) const noexcept {
  Word word;
  if (begin >= size) return word;
  const size_t count = std::min(sizeof(uint64_t), size - begin);
  std::memcpy(&word.first, first + begin, count);
  std::memcpy(&word.second, second + begin, count);
  std::memcpy(&word.third, third + begin, count);
  return word;
}

AddressSpace::AddressSpace() {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return;
  char line[512];
  while (std::fgets(line, sizeof line, maps) != nullptr) {
    uint64_t begin = 0, end = 0;
    char rights[5] = "";
    if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &begin, &end, rights) != 3) continue;
    mapped_.push_back({begin, end});
    const bool of_device = std::strstr(line, "/dev/nvidia") != nullptr;
    if (rights[0] == 'r' && rights[1] == 'w' && !of_device) written_.push_back({begin, end});
  }
  std::fclose(maps);
}

bool AddressSpace::HasOfHost(uint64_t address) const noexcept {
  return std::any_of(written_.begin(), written_.end(),
                     [address](const Captures::Range& r) { return r.begin <= address && address < r.end; });
}

bool AddressSpace::HasUpper(uint64_t half) const noexcept {
  return half == 0 || std::any_of(mapped_.begin(), mapped_.end(), [half](const Captures::Range& r) {
           return r.begin >> kHalfBits <= half && half <= (r.end - 1) >> kHalfBits;
         });
}

Moves::Moves(const std::vector<Captures::Array>& arrays) noexcept {
  for (const Captures::Array& array : arrays) {
    const auto move = static_cast<int64_t>(array.second - array.first);
    divisor = std::gcd(divisor, move);
    largest = std::max(largest, std::abs(move));
  }
}

bool Moves::Has(int64_t change) const noexcept {
  if (divisor == 0) return false;
  for (int64_t size = 1; size <= kLargestElement; size *= 2) {
    const int64_t most = largest / size;
    if (-most <= change && change <= most && change * size % divisor == 0) return true;
  }
  return false;
}

bool Moves::AreBeyond(int64_t bound) const noexcept { return (divisor & -divisor) / kLargestElement >= bound; }

void Comparison::Compare(const Bytes& bytes, const char* what, size_t node, std::vector<Known>& known) const {
  for (size_t begin = 0; begin < bytes.size; begin += sizeof(uint64_t)) {
    const Word word = bytes.At(begin);
    Known now{Known::Kind::kEqual, word.first};
    if (word.first == word.second) {
      // What changes though nothing moved means nothing.
      if (word.first != word.third) now.kind = Known::Kind::kLeftOver;
    } else if (IsInArray(word, &now.number, &now.offset)) {
      now.kind = Known::Kind::kArray;
    } else if (IsCondition(word, &now.number)) {
      now.kind = Known::Kind::kCondition;
    } else if (IsOwned(word)) {
      now.kind = Known::Kind::kOwned;
    } else if (IsLeftOver(word, bytes.At(begin + sizeof(uint32_t)))) {
      now.kind = Known::Kind::kLeftOver;
    } else {
      Fail(FLAGOS_UNIMPLEMENTED,
           "%s of node %zu depends on where the arrays are in a way that cannot be patched (%llx, %llx, %llx)", what,
           node, static_cast<unsigned long long>(word.first), static_cast<unsigned long long>(word.second),
           static_cast<unsigned long long>(word.third));
    }
    known.push_back(now);
  }
}

bool Comparison::IsInArray(const Word& word, size_t* number, uint64_t* offset) const noexcept {
  for (size_t i = 0; i < captures_.arrays.size(); ++i) {
    const Captures::Array& array = captures_.arrays[i];
    const uint64_t distance = word.first - array.first;
    // One past the end occurs: pointers to the end of a range.
    if (distance > array.bytes || word.second - array.second != distance) continue;
    *number = i;
    *offset = distance;
    return true;
  }
  return false;
}

bool Comparison::IsOwned(const Word& word) const noexcept {
  return captures_.first.Owns(word.first) && captures_.second.Owns(word.second);
}

bool Comparison::IsCondition(const Word& word, size_t* number) const noexcept {
  if (word.first == word.second || word.first == word.third || word.second == word.third) return false;
  const auto &first = captures_.first.conditionals, &second = captures_.second.conditionals,
             &third = captures_.third.conditionals;
  for (size_t i = 0; i < first.size(); ++i) {
    if (word.first != first[i].handle || word.second != second[i].handle || word.third != third[i].handle) continue;
    *number = i;
    return true;
  }
  return false;
}

bool Comparison::IsLeftOver(const Word& word, const Word& straddling) const noexcept {
  // An address before or behind an array may be one that the host reads, too, where memory is unified.
  const bool moved = moves_.Has(static_cast<int64_t>(word.second - word.first));
  if (!moved && space_.HasOfHost(word.first) && space_.HasOfHost(word.second)) return true;
  if (IsOverwrittenAddress(word)) return true;
  const uint64_t lower = word.first & kHalf, upper = word.first >> kHalfBits;
  if (word.first != word.third) {
    if (!IsShift(word.first - word.third)) return true;
    const bool halves = IsEqualOrOwnedHalf(captures_.third, lower, word.third & kHalf) &&
                        IsEqualOrOwnedHalf(captures_.third, upper, word.third >> kHalfBits);
    if (!halves) return false;
  }
  size_t number = 0;
  uint64_t offset = 0;
  if (IsInArray(straddling, &number, &offset) || IsOwned(straddling)) return false;
  const uint64_t second_lower = word.second & kHalf, second_upper = word.second >> kHalfBits;
  // A half that changed alone may be a size or a count that an address decides; where the arrays moved by more than
  // counts are, and by multiples of it, no more than a flag.
  const uint64_t alone = moves_.AreBeyond(kSmall) ? kFlags : kSmall;
  const uint64_t least = lower != second_lower && upper != second_upper ? 0 : alone;
  const bool is_address = space_.HasUpper(upper) && space_.HasUpper(second_upper);
  return IsLeftOverHalf(lower, second_lower, least) && (is_address || IsLeftOverHalf(upper, second_upper, least));
}

bool Comparison::IsOverwrittenAddress(const Word& word) const noexcept {
  const uint64_t top = word.first >> kAddressBits;
  if (top == 0 || top != word.second >> kAddressBits || top != word.third >> kAddressBits) return false;
  const auto address = [](uint64_t value) { return value & ((uint64_t{1} << kAddressBits) - 1); };
  const Word below{address(word.first), address(word.second), address(word.third)};
  size_t number = 0;
  uint64_t offset = 0;
  return IsOwned(below) || IsInArray(below, &number, &offset);
}

bool Comparison::IsLeftOverHalf(uint64_t first, uint64_t second, uint64_t least) const noexcept {
  if (IsEqualOrOwnedHalf(captures_.second, first, second) || IsHalfInArray(first, second)) return true;
  const auto change = static_cast<int64_t>(static_cast<int32_t>(second - first));
  return !moves_.Has(change) && std::max(first, second) >= least;
}

bool Comparison::IsShift(uint64_t change) const noexcept {
  for (const Captures::Range& first : captures_.first.owned) {
    for (const Captures::Range& third : captures_.third.owned) {
      const auto shift = static_cast<int64_t>(first.begin - third.begin);
      for (int64_t size = 1; size <= kLargestElement; size *= 2) {
        if (shift % size != 0) continue;
        if (change == static_cast<uint64_t>(shift / size) || change == static_cast<uint64_t>(-shift / size))
          return true;
      }
    }
  }
  return false;
}

bool Comparison::IsEqualOrOwnedHalf(const Captures::Graph& other, uint64_t first, uint64_t half) const noexcept {
  return first == half || AreOwnedHalves(captures_.first, other, first, half);
}

bool Comparison::IsHalfInArray(uint64_t first, uint64_t second) const noexcept {
  for (const Captures::Array& array : captures_.arrays) {
    const uint64_t offset = DistanceOfHalves(first, array.first);
    if (offset <= array.bytes && DistanceOfHalves(second, array.second) == offset) return true;
    if (first == array.first >> kHalfBits && second == array.second >> kHalfBits) return true;
  }
  return false;
}

}  // namespace flagos::cuda
