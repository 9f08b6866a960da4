// The greatest or least elements of rows, in order. A row is scanned once; what beats the worst of the best so far, which
// soon is little, is inserted among them.
#include <algorithm>
#include <limits>

#include "cpu/run_loop.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kBlock = 16;  // elements that are compared with the worst of the best at once

// An element as an integer, greater for what comes first; floats in total order.
template <class T, bool kFloat>
T KeyOf(T bits, bool largest) {
  if constexpr (kFloat) {
    bits ^= static_cast<T>((bits >> (8 * sizeof(T) - 1)) & std::numeric_limits<T>::max());
  }
  return largest ? bits : static_cast<T>(~bits);
}

template <class T, bool kFloat>
struct RowTopK {
  const TopK& top_k;
  T* keys;           // of the best, greatest first
  int32_t* indices;  // of the best
  int64_t count = 0;

  void Insert(T key, int64_t index) {
    // Behind its equals, which have lower indices.
    const int64_t at = std::upper_bound(keys, keys + count, key, [](T a, T b) { return a > b; }) - keys;
    count = std::min(count + 1, top_k.k);
    std::copy_backward(keys + at, keys + count - 1, keys + count);
    std::copy_backward(indices + at, indices + count - 1, indices + count);
    keys[at] = key;
    indices[at] = static_cast<int32_t>(index);
  }

  void InsertBetter(const T* x, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T key = KeyOf<T, kFloat>(x[i], top_k.largest);
      if (key > keys[top_k.k - 1]) Insert(key, i);
    }
  }

  void Scan(const T* x) {
    const int64_t k = top_k.k, n = top_k.columns;
    for (int64_t i = 0; i < k; ++i) Insert(KeyOf<T, kFloat>(x[i], top_k.largest), i);
    int64_t i = k;
    for (; i + kBlock <= n; i += kBlock) {
      const T worst = keys[k - 1];
      T better = 0;
      for (int64_t j = 0; j < kBlock; ++j) {
        better = static_cast<T>(better | (KeyOf<T, kFloat>(x[i + j], top_k.largest) > worst));
      }
      if (better != 0) InsertBetter(x, i, i + kBlock);
    }
    InsertBetter(x, i, n);
  }
};

struct Job {
  const TopK* top_k;
  char* const* slots;
};

template <class T, bool kFloat>
void RunRows(void* user, int64_t begin, int64_t end) {
  const Job& job = *static_cast<Job*>(user);
  const TopK& top_k = *job.top_k;
  T keys[kMaxTopK];
  const T* const source = reinterpret_cast<const T*>(job.slots[top_k.source]);
  T* const values = reinterpret_cast<T*>(job.slots[top_k.values]);
  int32_t* const indices = reinterpret_cast<int32_t*>(job.slots[top_k.indices]);
  for (int64_t row = begin; row < end; ++row) {
    const T* const x = source + row * top_k.columns;
    int32_t* const best = indices + row * top_k.k;
    RowTopK<T, kFloat>{top_k, keys, best}.Scan(x);
    for (int64_t i = 0; i < top_k.k; ++i) values[row * top_k.k + i] = x[best[i]];
  }
}

}  // namespace

TopKFunction TopKFunctionOf(Type type) {
  switch (type) {
    case Type::kS8:
      return &RunRows<int8_t, false>;
    case Type::kS16:
      return &RunRows<int16_t, false>;
    case Type::kS32:
      return &RunRows<int32_t, false>;
    case Type::kS64:
      return &RunRows<int64_t, false>;
    case Type::kPred:
    case Type::kU8:
      return &RunRows<uint8_t, false>;
    case Type::kU16:
      return &RunRows<uint16_t, false>;
    case Type::kU32:
      return &RunRows<uint32_t, false>;
    case Type::kU64:
      return &RunRows<uint64_t, false>;
    case Type::kF16:
    case Type::kBF16:
      return &RunRows<int16_t, true>;
    case Type::kF32:
      return &RunRows<int32_t, true>;
    case Type::kF64:
      return &RunRows<int64_t, true>;
    case Type::kC64:
      break;
  }
  return nullptr;
}

void RunTopK(const TopK& top_k, char* const* slots) {
  Job job{&top_k, slots};
  RunTasks(top_k.rows, top_k.rows * top_k.columns, top_k.function, &job);
}

}  // namespace flagos::cpu
