// Element types: PJRT's numbers against the C ABI's.
#ifndef FLAGOS_PJRT_ELEMENT_TYPE_H_
#define FLAGOS_PJRT_ELEMENT_TYPE_H_

#include <cstddef>
#include <cstdint>

#include "pjrt_abi.h"

namespace flagos_pjrt {

// FLAGOS_TYPE_INVALID when the backend ABI has no such type.
int32_t ToFlagosType(PJRT_Buffer_Type type);
PJRT_Buffer_Type ToPjrtType(int32_t type);
// Bytes of one element in an array, 0 for types without storage.
size_t ElementSize(PJRT_Buffer_Type type);
const char* ElementTypeName(PJRT_Buffer_Type type);

}  // namespace flagos_pjrt

#endif  // FLAGOS_PJRT_ELEMENT_TYPE_H_
