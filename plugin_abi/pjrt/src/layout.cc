#include "layout.h"

#include <array>

#include "element_type.h"
#include "flagos/plugin_abi.h"

namespace flagos_pjrt {
namespace {

constexpr std::array<int64_t, kMaxRank> MakeRowMajorOrder() {
  std::array<int64_t, kMaxRank> order = {};
  for (size_t i = 0; i < kMaxRank; ++i) order[i] = static_cast<int64_t>(kMaxRank - 1 - i);
  return order;
}
constexpr std::array<int64_t, kMaxRank> kRowMajorOrder = MakeRowMajorOrder();

Dims DenseStrides(const int64_t* order, PJRT_Buffer_Type type, const int64_t* dims, size_t rank) {
  Dims strides(rank);
  auto stride = static_cast<int64_t>(ElementSize(type));
  for (size_t i = 0; i < rank; ++i) {
    const auto dimension = static_cast<size_t>(order[i]);
    strides[dimension] = stride;
    if (dims[dimension] > 0) stride *= dims[dimension];
  }
  return strides;
}

PJRT_Error* CheckOrder(const PJRT_Buffer_MemoryLayout_Tiled& tiled, size_t rank, std::string_view where) {
  if (tiled.num_tiles != 0) {
    return MakeError(FLAGOS_UNIMPLEMENTED, {where, ": a layout with ", tiled.num_tiles,
                                            " tiles was asked for; this device holds dense arrays without tiles."});
  }
  bool seen[kMaxRank] = {};
  bool permutation = tiled.minor_to_major_size == rank;
  for (size_t i = 0; permutation && i < rank; ++i) {
    const int64_t dimension = tiled.minor_to_major[i];
    permutation = dimension >= 0 && dimension < static_cast<int64_t>(rank) && !seen[dimension];
    if (permutation) seen[dimension] = true;
  }
  if (!permutation) {
    return MakeError(FLAGOS_INVALID_ARGUMENT,
                     {where, ": minor_to_major ", FormatList(tiled.minor_to_major, tiled.minor_to_major_size),
                      " is not a permutation of the ", rank, " dimensions."});
  }
  return nullptr;
}

bool SameStrides(const int64_t* left, const int64_t* right, const int64_t* dims, size_t rank) {
  for (size_t i = 0; i < rank; ++i) {
    if (dims[i] == 0) return true;  // no element, so every layout is the same
  }
  for (size_t i = 0; i < rank; ++i) {
    if (dims[i] != 1 && left[i] != right[i]) return false;
  }
  return true;
}

// Writing through strides must stay inside the memory and touch each element once.
PJRT_Error* CheckHostStrides(const int64_t* strides, PJRT_Buffer_Type type, const int64_t* dims, size_t rank,
                             size_t size, std::string_view where) {
  size_t extent = ElementSize(type);
  for (size_t i = 0; i < rank; ++i) {
    if (dims[i] == 0) return nullptr;
    if (dims[i] == 1) continue;
    if (strides[i] <= 0) {
      return MakeError(FLAGOS_INVALID_ARGUMENT,
                       {where, ": byte stride ", strides[i], " of dimension ", i,
                        " is not positive; the destination's elements would overlap or precede it."});
    }
    size_t reach = 0;
    if (__builtin_mul_overflow(static_cast<size_t>(strides[i]), static_cast<size_t>(dims[i] - 1), &reach) ||
        __builtin_add_overflow(extent, reach, &extent)) {
      return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": byte strides ", FormatList(strides, rank), " overflow."});
    }
  }
  if (extent > size) {
    return MakeError(FLAGOS_INVALID_ARGUMENT,
                     {where, ": byte strides ", FormatList(strides, rank), " over dimensions ", FormatList(dims, rank),
                      " need ", extent, " bytes of host memory, but it has ", size, "."});
  }
  return nullptr;
}

}  // namespace

const int64_t* RowMajorOrder(size_t rank) { return kRowMajorOrder.data() + (kMaxRank - rank); }

PJRT_Error* CheckShape(PJRT_Buffer_Type type, const int64_t* dims, size_t rank, std::string_view where) {
  if (ToFlagosType(type) == FLAGOS_TYPE_INVALID) {
    return MakeError(FLAGOS_UNIMPLEMENTED, {where, ": element type ", ElementTypeName(type), " (",
                                            static_cast<int>(type), ") does not exist on this device."});
  }
  if (rank > kMaxRank) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": rank ", rank, " is above the limit of ", kMaxRank, "."});
  }
  size_t bytes = ElementSize(type);
  for (size_t i = 0; i < rank; ++i) {
    if (dims[i] < 0) {
      return MakeError(FLAGOS_INVALID_ARGUMENT,
                       {where, ": dimensions ", FormatList(dims, rank), " must not be negative."});
    }
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(dims[i]), &bytes) || bytes > INT64_MAX) {
      return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": the byte size of ", ElementTypeName(type),
                                                 FormatList(dims, rank), " overflows 63 bits."});
    }
  }
  return nullptr;
}

size_t ArraySizeBytes(PJRT_Buffer_Type type, const int64_t* dims, size_t rank) {
  size_t bytes = ElementSize(type);
  for (size_t i = 0; i < rank; ++i) bytes *= static_cast<size_t>(dims[i]);
  return bytes;
}

PJRT_Error* CheckDeviceLayout(const PJRT_Buffer_MemoryLayout* layout, PJRT_Buffer_Type type, const int64_t* dims,
                              size_t rank, std::string_view where) {
  Dims storage(rank);
  const int64_t* strides = nullptr;
  FLAGOS_RETURN_IF_ERROR(HostStrides(layout, type, dims, rank, SIZE_MAX, where, &storage, &strides));
  if (strides == nullptr) return nullptr;
  if (layout->type == PJRT_Buffer_MemoryLayout_Type_Tiled) {
    return MakeError(FLAGOS_UNIMPLEMENTED,
                     {where, ": device layout minor_to_major ", FormatList(layout->tiled.minor_to_major, rank),
                      " was asked for; arrays on this device are row major, minor_to_major ",
                      FormatList(RowMajorOrder(rank), rank), "."});
  }
  return MakeError(FLAGOS_UNIMPLEMENTED, {where, ": device byte strides ", FormatList(strides, rank),
                                          " were asked for; arrays on this device are dense and row major."});
}

PJRT_Error* HostStrides(const PJRT_Buffer_MemoryLayout* layout, PJRT_Buffer_Type type, const int64_t* dims, size_t rank,
                        size_t size, std::string_view where, Dims* storage, const int64_t** strides) {
  *strides = nullptr;
  if (layout == nullptr) return nullptr;
  const Dims row_major = DenseStrides(RowMajorOrder(rank), type, dims, rank);
  switch (layout->type) {
    case PJRT_Buffer_MemoryLayout_Type_Tiled:
      FLAGOS_RETURN_IF_ERROR(CheckOrder(layout->tiled, rank, where));
      *storage = DenseStrides(layout->tiled.minor_to_major, type, dims, rank);
      break;
    case PJRT_Buffer_MemoryLayout_Type_Strides:
      if (layout->strides.num_byte_strides != rank) {
        return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": ", layout->strides.num_byte_strides,
                                                   " byte strides were given for ", rank, " dimensions."});
      }
      *storage = Dims(layout->strides.byte_strides, rank);
      break;
    default:
      return MakeError(FLAGOS_INVALID_ARGUMENT,
                       {where, ": layout type ", static_cast<int>(layout->type), " is unknown."});
  }
  if (SameStrides(storage->data(), row_major.data(), dims, rank)) return nullptr;
  *strides = storage->data();
  return CheckHostStrides(*strides, type, dims, rank, size, where);
}

}  // namespace flagos_pjrt
