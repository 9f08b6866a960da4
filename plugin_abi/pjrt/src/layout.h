// Memory layouts. Device buffers are dense and row major; host memory may be strided or permuted.
#ifndef FLAGOS_PJRT_LAYOUT_H_
#define FLAGOS_PJRT_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "error.h"
#include "small_vector.h"

namespace flagos_pjrt {

constexpr size_t kInlineRank = 6;
using Dims = SmallVector<int64_t, kInlineRank>;

constexpr size_t kMaxRank = 64;
// {rank - 1, ..., 1, 0}: the row-major order. rank is at most kMaxRank.
const int64_t* RowMajorOrder(size_t rank);

// Refuses negative dimensions, more than kMaxRank of them, types that the backend ABI lacks, and arrays whose byte size
// overflows.
[[nodiscard]] PJRT_Error* CheckShape(PJRT_Buffer_Type type, const int64_t* dims, size_t rank, std::string_view where);
// Of a shape that passed CheckShape.
size_t ArraySizeBytes(PJRT_Buffer_Type type, const int64_t* dims, size_t rank);

// Null when layout is absent or dense row major, which is how device buffers lie.
[[nodiscard]] PJRT_Error* CheckDeviceLayout(const PJRT_Buffer_MemoryLayout* layout, PJRT_Buffer_Type type,
                                            const int64_t* dims, size_t rank, std::string_view where);

// The byte strides that layout gives to host memory of `size` bytes (unless it is unknown: SIZE_MAX); *strides is set
// to null for dense row major and to storage otherwise.
[[nodiscard]] PJRT_Error* HostStrides(const PJRT_Buffer_MemoryLayout* layout, PJRT_Buffer_Type type,
                                      const int64_t* dims, size_t rank, size_t size, std::string_view where,
                                      Dims* storage, const int64_t** strides);

}  // namespace flagos_pjrt

#endif  // FLAGOS_PJRT_LAYOUT_H_
