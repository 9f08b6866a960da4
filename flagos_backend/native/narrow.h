// Elements that are narrower than their byte.
#ifndef FLAGOS_NATIVE_NARROW_H_
#define FLAGOS_NATIVE_NARROW_H_

#include <cstddef>
#include <cstdint>

#include "flagos/plugin_abi.h"

namespace flagos {

// Bits of an element that is narrower than its byte, or 0. Hosts give them in the low bits; what they leave in the others
// is not specified, and kernels take signed ones sign-extended and unsigned ones zero-extended.
inline int NarrowBits(int32_t type) noexcept {
  switch (type) {
    case FLAGOS_TYPE_S1:
    case FLAGOS_TYPE_U1:
      return 1;
    case FLAGOS_TYPE_S2:
    case FLAGOS_TYPE_U2:
      return 2;
    case FLAGOS_TYPE_S4:
    case FLAGOS_TYPE_U4:
    case FLAGOS_TYPE_F4E2M1FN:
      return 4;
    default:
      return 0;
  }
}

// Brings elements that a host gave into the form that kernels take.
inline void ExtendNarrow(int32_t type, void* data, size_t bytes) noexcept {
  const int bits = NarrowBits(type);
  if (bits == 0) return;
  const bool is_signed = type == FLAGOS_TYPE_S1 || type == FLAGOS_TYPE_S2 || type == FLAGOS_TYPE_S4;
  auto* elements = static_cast<uint8_t*>(data);
  const int sign = is_signed ? 1 << (bits - 1) : 0;
  const int mask = (1 << bits) - 1;
  for (size_t i = 0; i < bytes; ++i) elements[i] = static_cast<uint8_t>(((elements[i] & mask) ^ sign) - sign);
}

}  // namespace flagos

#endif  // FLAGOS_NATIVE_NARROW_H_
