// Keys become unsigned numbers in the wanted order. An item is such a number with the position that it came from, or
// alone where the key is all there is. Items are sorted by digits of eight bits, few ones by insertion.
#include "cpu/sort.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kInserted = 24;      // items up to which insertion is faster than all else
constexpr int64_t kEachDigit = 24;     // and items for each digit from which digits are
constexpr size_t kOnStack = 16 << 10;  // bytes of items that need no allocation
constexpr int64_t kWorkOfElement = 1 << 4;

// What a position and a key of up to 32 bits are: the key in the upper half.
struct Narrow {
  uint64_t bits;
  static constexpr int kFirstDigit = 4, kKeyBytes = 4;
  uint64_t key() const { return bits >> 32; }
  uint32_t position() const { return static_cast<uint32_t>(bits); }
  void Append(int key_bits, uint64_t key) { bits = (bits >> 32 << key_bits | key) << 32 | static_cast<uint32_t>(bits); }
  static Narrow At(uint32_t position) { return {position}; }
  unsigned Digit(int number) const { return static_cast<unsigned>(bits >> (8 * number)) & 255; }
  bool operator<(const Narrow& other) const { return bits < other.bits; }
};

// The same of a key of up to 64 bits.
struct Wide {
  uint64_t bits;
  uint64_t at;
  static constexpr int kFirstDigit = 0, kKeyBytes = 8;
  uint64_t key() const { return bits; }
  uint32_t position() const { return static_cast<uint32_t>(at); }
  void Append(int key_bits, uint64_t key) { bits = key_bits == 64 ? key : bits << key_bits | key; }
  static Wide At(uint32_t position) { return {0, position}; }
  unsigned Digit(int number) const { return static_cast<unsigned>(bits >> (8 * number)) & 255; }
  bool operator<(const Wide& other) const { return bits != other.bits ? bits < other.bits : at < other.at; }
};

// A key without a position.
template <class T>
struct Alone {
  T bits;
  static constexpr int kFirstDigit = 0, kKeyBytes = sizeof(T);
  unsigned Digit(int number) const { return static_cast<unsigned>(static_cast<uint64_t>(bits) >> (8 * number)) & 255; }
  bool operator<(const Alone& other) const { return bits < other.bits; }
};

template <class Item>
void Insert(Item* items, int64_t n) {
  for (int64_t i = 1; i < n; ++i) {
    const Item item = items[i];
    int64_t at = i;
    for (; at > 0 && item < items[at - 1]; --at) items[at] = items[at - 1];
    items[at] = item;
  }
}

// From the least significant digit on, each pass into the other buffer. Digits in which all agree need none.
template <class Item>
void SortByDigits(Item* items, Item* other, int64_t n, int digits) {
  uint32_t counts[Item::kKeyBytes][256];
  std::memset(counts, 0, sizeof counts[0] * static_cast<size_t>(digits));
  for (int64_t i = 0; i < n; ++i) {
    for (int d = 0; d < digits; ++d) ++counts[d][items[i].Digit(Item::kFirstDigit + d)];
  }
  Item* from = items;
  Item* to = other;
  for (int d = 0; d < digits; ++d) {
    const int digit = Item::kFirstDigit + d;
    uint32_t* const next = counts[d];
    if (next[from[0].Digit(digit)] == static_cast<uint32_t>(n)) continue;
    uint32_t sum = 0;
    for (int value = 0; value < 256; ++value) {
      const uint32_t count = next[value];
      next[value] = sum;
      sum += count;
    }
    for (int64_t i = 0; i < n; ++i) to[next[from[i].Digit(digit)]++] = from[i];
    std::swap(from, to);
  }
  if (from != items) std::copy(from, from + n, items);
}

// Stable, because positions ascend at first. `digits`: of the keys that may differ.
template <class Item>
void SortItems(Item* items, Item* other, int64_t n, int digits) {
  if (n <= kInserted) {
    Insert(items, n);
  } else if (n < kEachDigit * digits) {
    std::sort(items, items + n);
  } else {
    SortByDigits(items, other, n, digits);
  }
}

// An element as an unsigned number that is less for what comes first, and back.
template <class T>
struct Order {
  static constexpr T kSign = static_cast<T>(T{1} << (8 * sizeof(T) - 1));
  T flips = 0;     // bits that change in the end
  T negative = 0;  // bits that change before where the sign is set: of floats, all but it
  T infinity = 0;  // of floats whose zeros are equal and NaNs too

  Order(Type type, bool descending, bool merged) {
    const bool is_float = type == Type::kF16 || type == Type::kBF16 || type == Type::kF32 || type == Type::kF64;
    const bool is_signed =
        is_float || type == Type::kS8 || type == Type::kS16 || type == Type::kS32 || type == Type::kS64;
    if (is_signed) flips = kSign;
    if (is_float) negative = static_cast<T>(~kSign);
    if (descending) flips = static_cast<T>(~flips);
    if (is_float && merged) {
      const uint64_t bits = type == Type::kF16    ? 0x7C00
                            : type == Type::kBF16 ? 0x7F80
                            : type == Type::kF32  ? 0x7F800000
                                                  : 0x7FF0000000000000;
      infinity = static_cast<T>(bits);
    }
  }

  bool merges() const { return infinity != 0; }
  bool IsZero(T bits) const { return static_cast<T>(bits << 1) == 0; }
  bool IsNan(T bits) const { return static_cast<T>(bits & ~kSign) > infinity; }

  T operator()(T bits) const {
    if (merges()) bits = IsZero(bits) ? T{0} : IsNan(bits) ? static_cast<T>(~kSign) : bits;
    bits ^= (bits & kSign) != 0 ? negative : T{0};
    return static_cast<T>(bits ^ flips);
  }
  T Bits(T key) const {
    key ^= flips;
    return static_cast<T>(key ^ ((key & kSign) != 0 ? negative : T{0}));
  }
};

template <class T>
T Load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class Visit>
void WithKeyType(int64_t bytes, const Visit& visit) {
  switch (bytes) {
    case 1:
      return visit(uint8_t{});
    case 2:
      return visit(uint16_t{});
    case 4:
      return visit(uint32_t{});
    default:
      return visit(uint64_t{});
  }
}

int KeyBits(const Sort::Key& key) { return 8 * static_cast<int>(TypeBytes(key.type)); }

// Keys that one number holds: those of [begin, end).
struct Group {
  size_t begin, end;
  int bits;
};

Group NextGroup(const Sort& sort, size_t begin) {
  Group group{begin, begin, 0};
  while (group.end < sort.keys.size() && group.bits + KeyBits(sort.keys[group.end]) <= 64) {
    group.bits += KeyBits(sort.keys[group.end++]);
  }
  return group;
}

// One row: where its elements are in each operand, and memory for items.
template <class Item>
class Row {
 public:
  Row(const Sort& sort, char* const* slots, Item* items, Item* other)
      : sort_(sort), slots_(slots), items_(items), other_(other) {}

  void Run(int64_t row) {
    base_ = row / sort_.inner * sort_.size * sort_.inner + row % sort_.inner;
    for (int64_t i = 0; i < sort_.size; ++i) items_[i] = Item::At(static_cast<uint32_t>(i));
    SortRange(items_, sort_.size, NextGroup(sort_, 0));
    for (size_t operand = 0; operand < sort_.sources.size(); ++operand) Permute(operand);
  }

 private:
  const char* Source(size_t operand) const {
    return slots_[sort_.sources[operand]] + base_ * sort_.element_bytes[operand];
  }

  void AppendKey(Item* items, int64_t n, const Sort::Key& key) const {
    WithKeyType(TypeBytes(key.type), [&](auto zero) {
      using T = decltype(zero);
      const Order<T> order(key.type, key.descending, key.merged);
      const char* const from = Source(static_cast<size_t>(key.operand));
      const int64_t stride = sort_.inner * int64_t{sizeof(T)};
      for (int64_t i = 0; i < n; ++i) {
        items[i].Append(8 * sizeof(T), order(Load<T>(from + items[i].position() * stride)));
      }
    });
  }

  // Items whose positions ascend, by the keys from those of `group` on.
  void SortRange(Item* items, int64_t n, Group group) {
    for (size_t k = group.begin; k < group.end; ++k) AppendKey(items, n, sort_.keys[k]);
    SortItems(items, other_, n, group.bits / 8);
    if (group.end == sort_.keys.size()) return;
    const Group next = NextGroup(sort_, group.end);
    for (int64_t begin = 0; begin < n;) {
      int64_t end = begin + 1;
      while (end < n && items[end].key() == items[begin].key()) ++end;
      if (end - begin > 1) SortRange(items + begin, end - begin, next);
      begin = end;
    }
  }

  void Permute(size_t operand) const {
    switch (sort_.element_bytes[operand]) {
      case 1:
        return PermuteElements<1>(operand);
      case 2:
        return PermuteElements<2>(operand);
      case 4:
        return PermuteElements<4>(operand);
      case 8:
        return PermuteElements<8>(operand);
      default:
        return PermuteElements<16>(operand);
    }
  }
  template <int kBytes>
  void PermuteElements(size_t operand) const {
    const char* const from = Source(operand);
    char* const to = slots_[sort_.targets[operand]] + base_ * kBytes;
    const int64_t stride = sort_.inner * kBytes;
    for (int64_t i = 0; i < sort_.size; ++i) std::memcpy(to + i * stride, from + items_[i].position() * stride, kBytes);
  }

  const Sort& sort_;
  char* const* const slots_;
  Item* const items_;
  Item* const other_;
  int64_t base_ = 0;
};

// A row of which the key is all there is.
template <class T>
class Row<Alone<T>> {
 public:
  using Item = Alone<T>;
  Row(const Sort& sort, char* const* slots, Item* items, Item* other)
      : sort_(sort),
        order_(sort.keys[0].type, sort.keys[0].descending, sort.keys[0].merged),
        slots_(slots),
        items_(items),
        other_(other) {}

  void Run(int64_t row) {
    constexpr int64_t kBytes = sizeof(T);
    const int64_t base = row / sort_.inner * sort_.size * sort_.inner + row % sort_.inner, n = sort_.size;
    const int64_t stride = sort_.inner * kBytes;
    const char* const from = slots_[sort_.sources[0]] + base * kBytes;
    char* const to = slots_[sort_.targets[0]] + base * kBytes;
    for (int64_t i = 0; i < n; ++i) items_[i].bits = order_(Load<T>(from + i * stride));
    SortItems(items_, other_, n, Item::kKeyBytes);
    for (int64_t i = 0; i < n; ++i) Store(to + i * stride, order_.Bits(items_[i].bits));
    if (!order_.merges()) return;
    // Elements that share a key are written as they were, and in their old order.
    Restore(from, to, stride, order_(T{0}), [this](T bits) { return order_.IsZero(bits); });
    Restore(from, to, stride, order_(static_cast<T>(~Order<T>::kSign)), [this](T bits) { return order_.IsNan(bits); });
  }

 private:
  static void Store(char* to, T bits) { std::memcpy(to, &bits, sizeof bits); }

  template <class Shares>
  void Restore(const char* from, char* to, int64_t stride, T key, const Shares& shares) const {
    const auto [begin, end] = std::equal_range(items_, items_ + sort_.size, Item{key});
    char* next = to + (begin - items_) * stride;
    for (int64_t left = end - begin; left > 0; from += stride) {
      const T bits = Load<T>(from);
      if (!shares(bits)) continue;
      Store(next, bits);
      next += stride;
      --left;
    }
  }

  const Sort& sort_;
  const Order<T> order_;
  char* const* const slots_;
  Item* const items_;
  Item* const other_;
};

struct Job {
  const Sort& sort;
  char* const* slots;
};

template <class Item>
void RunRows(void* user, int64_t begin, int64_t end) {
  const Job& job = *static_cast<Job*>(user);
  const size_t items = static_cast<size_t>(job.sort.size);
  constexpr size_t kFew = kOnStack / sizeof(Item);
  Item few[kFew];
  std::unique_ptr<Item[]> many(2 * items > kFew ? new Item[2 * items] : nullptr);
  Item* const memory = many != nullptr ? many.get() : few;
  Row<Item> row(job.sort, job.slots, memory, memory + items);
  for (int64_t number = begin; number < end; ++number) row.Run(number);
}

}  // namespace

bool IsSortKey(Type type) { return type != Type::kC64; }

int64_t WorkOf(const Sort& sort) { return sort.outer * sort.size * sort.inner * kWorkOfElement; }

void RunSort(const Sort& sort, char* const* slots) {
  const int64_t rows = sort.outer * sort.inner;
  if (rows == 0 || sort.size == 0) return;
  Job job{sort, slots};
  const auto run = [&](void (*body)(void*, int64_t, int64_t)) { RunTasks(rows, WorkOf(sort), body, &job); };
  if (sort.sources.size() == 1 && sort.keys.size() == 1) {
    WithKeyType(sort.element_bytes[0], [&](auto zero) { run(&RunRows<Alone<decltype(zero)>>); });
    return;
  }
  // One item for all keys of a sort, as wide as its widest group.
  for (Group group{0, 0, 0}; group.end < sort.keys.size();) {
    group = NextGroup(sort, group.end);
    if (group.bits > 32) return run(&RunRows<Wide>);
  }
  run(&RunRows<Narrow>);
}

}  // namespace flagos::cpu
