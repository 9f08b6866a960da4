#include "shape.h"

#include <limits>

namespace flagos {
namespace {

struct TypeFacts {
  const char* name;
  int bytes;
};

// By the numbers of FLAGOS_TYPE_*. Sub-byte integers take one byte an element.
constexpr TypeFacts kTypes[] = {
    {nullptr, -1},     {"pred", 1},       {"s8", 1},       {"s16", 2},      {"s32", 4},    {"s64", 8},
    {"u8", 1},         {"u16", 2},        {"u32", 4},      {"u64", 8},      {"f16", 2},    {"f32", 4},
    {"f64", 8},        {nullptr, -1},     {nullptr, -1},   {"c64", 8},      {"bf16", 2},   {"token", 0},
    {"c128", 16},      {"f8e5m2", 1},     {"f8e4m3fn", 1}, {"s4", 1},       {"u4", 1},     {"f8e4m3b11fnuz", 1},
    {"f8e5m2fnuz", 1}, {"f8e4m3fnuz", 1}, {"s2", 1},       {"u2", 1},       {"f8e4m3", 1}, {"f8e3m4", 1},
    {"s1", 1},         {"u1", 1},         {"f4e2m1fn", 1}, {"f8e8m0fnu", 1}};
constexpr int32_t kNumTypes = sizeof(kTypes) / sizeof(kTypes[0]);
static_assert(kNumTypes == FLAGOS_TYPE_F8E8M0FNU + 1, "one row for each element type");

}  // namespace

int ElementBytes(int32_t type) noexcept { return type > 0 && type < kNumTypes ? kTypes[type].bytes : -1; }

const char* ElementName(int32_t type) noexcept {
  const char* name = type > 0 && type < kNumTypes ? kTypes[type].name : nullptr;
  return name ? name : "invalid";
}

Shape MakeShape(const char* function, int32_t type, const int64_t* dims, size_t rank) {
  const int element = ElementBytes(type);
  if (element < 0) {
    Fail(FLAGOS_INVALID_ARGUMENT, "%s: element_type %d is no element type; see FLAGOS_TYPE_* in plugin_abi.h", function,
         type);
  }
  if (rank > kMaxRank) {
    Fail(FLAGOS_INVALID_ARGUMENT, "%s: rank %zu is more than the %zu that are supported", function, rank, kMaxRank);
  }
  if (rank > 0 && dims == nullptr) Fail(FLAGOS_INVALID_ARGUMENT, "%s: dims is NULL but rank is %zu", function, rank);
  if (type == FLAGOS_TYPE_TOKEN && rank != 0) {
    Fail(FLAGOS_INVALID_ARGUMENT, "%s: a token has no dimensions, but rank is %zu", function, rank);
  }
  // A zero anywhere makes the size zero, but must not hide a negative or absurd dimension beside it.
  int64_t product = element;
  bool empty = false;
  for (size_t i = 0; i < rank; ++i) {
    if (dims[i] < 0) {
      Fail(FLAGOS_INVALID_ARGUMENT, "%s: dims[%zu] is %lld; dimensions are not negative", function, i,
           static_cast<long long>(dims[i]));
    }
    if (dims[i] == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, dims[i], &product)) {
      Fail(FLAGOS_INVALID_ARGUMENT, "%s: the size of a %zu-dimensional %s array overflows at dims[%zu] = %lld",
           function, rank, ElementName(type), i, static_cast<long long>(dims[i]));
    }
  }
  return Shape{type, Dims(dims, rank), empty ? size_t{0} : static_cast<size_t>(product)};
}

std::string ToString(const Shape& shape) {
  std::string text = ElementName(shape.type);
  text += '[';
  for (size_t i = 0; i < shape.dims.rank(); ++i) {
    if (i) text += ',';
    text += std::to_string(shape.dims[i]);
  }
  return text + ']';
}

void DenseStrides(const Shape& shape, int64_t* strides) noexcept {
  int64_t stride = ElementBytes(shape.type);
  for (size_t i = shape.dims.rank(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape.dims[i] > 0 ? shape.dims[i] : 1;
  }
}

bool IsDense(const Shape& shape, const int64_t* byte_strides) noexcept {
  if (byte_strides == nullptr || shape.bytes == 0) return true;
  int64_t stride = ElementBytes(shape.type);
  for (size_t i = shape.dims.rank(); i-- > 0;) {
    if (shape.dims[i] != 1 && byte_strides[i] != stride) return false;
    stride *= shape.dims[i];
  }
  return true;
}

void CheckStrides(const char* function, const Shape& shape, const int64_t* byte_strides) {
  if (byte_strides == nullptr || shape.bytes == 0) return;
  int64_t low = 0, high = ElementBytes(shape.type);
  for (size_t i = 0; i < shape.dims.rank(); ++i) {
    int64_t reach = 0;
    int64_t& end = byte_strides[i] < 0 ? low : high;
    if (__builtin_mul_overflow(shape.dims[i] - 1, byte_strides[i], &reach) ||
        __builtin_add_overflow(end, reach, &end)) {
      Fail(FLAGOS_INVALID_ARGUMENT, "%s: byte_strides[%zu] = %lld reaches beyond the address space over dimension %lld",
           function, i, static_cast<long long>(byte_strides[i]), static_cast<long long>(shape.dims[i]));
    }
  }
}

}  // namespace flagos
