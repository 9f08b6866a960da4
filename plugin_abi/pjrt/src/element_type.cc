#include "element_type.h"

#include "flagos/plugin_abi.h"

namespace flagos_pjrt {
namespace {

struct Row {
  int32_t flagos;
  size_t size;
  const char* name;
};

// Indexed by PJRT_Buffer_Type.
constexpr Row kTypes[] = {
    {FLAGOS_TYPE_INVALID, 0, "INVALID"},
    {FLAGOS_TYPE_PRED, 1, "PRED"},
    {FLAGOS_TYPE_S8, 1, "S8"},
    {FLAGOS_TYPE_S16, 2, "S16"},
    {FLAGOS_TYPE_S32, 4, "S32"},
    {FLAGOS_TYPE_S64, 8, "S64"},
    {FLAGOS_TYPE_U8, 1, "U8"},
    {FLAGOS_TYPE_U16, 2, "U16"},
    {FLAGOS_TYPE_U32, 4, "U32"},
    {FLAGOS_TYPE_U64, 8, "U64"},
    {FLAGOS_TYPE_F16, 2, "F16"},
    {FLAGOS_TYPE_F32, 4, "F32"},
    {FLAGOS_TYPE_F64, 8, "F64"},
    {FLAGOS_TYPE_BF16, 2, "BF16"},
    {FLAGOS_TYPE_C64, 8, "C64"},
    {FLAGOS_TYPE_C128, 16, "C128"},
    {FLAGOS_TYPE_F8E5M2, 1, "F8E5M2"},
    {FLAGOS_TYPE_F8E4M3FN, 1, "F8E4M3FN"},
    {FLAGOS_TYPE_F8E4M3B11FNUZ, 1, "F8E4M3B11FNUZ"},
    {FLAGOS_TYPE_F8E5M2FNUZ, 1, "F8E5M2FNUZ"},
    {FLAGOS_TYPE_F8E4M3FNUZ, 1, "F8E4M3FNUZ"},
    {FLAGOS_TYPE_S4, 1, "S4"},
    {FLAGOS_TYPE_U4, 1, "U4"},
    {FLAGOS_TYPE_TOKEN, 0, "TOKEN"},
    {FLAGOS_TYPE_S2, 1, "S2"},
    {FLAGOS_TYPE_U2, 1, "U2"},
    {FLAGOS_TYPE_F8E4M3, 1, "F8E4M3"},
    {FLAGOS_TYPE_F8E3M4, 1, "F8E3M4"},
    {FLAGOS_TYPE_F8E8M0FNU, 1, "F8E8M0FNU"},
    {FLAGOS_TYPE_F4E2M1FN, 1, "F4E2M1FN"},
    {FLAGOS_TYPE_S1, 1, "S1"},
    {FLAGOS_TYPE_U1, 1, "U1"},
    {FLAGOS_TYPE_INVALID, 0, "F6E2M3FN"},
    {FLAGOS_TYPE_INVALID, 0, "F6E3M2FN"},
};
constexpr size_t kNumTypes = sizeof(kTypes) / sizeof(kTypes[0]);
static_assert(kNumTypes == PJRT_Buffer_Type_F6E3M2FN + 1);

const Row& Lookup(PJRT_Buffer_Type type) {
  const auto index = static_cast<size_t>(type);
  return kTypes[index < kNumTypes ? index : 0];
}

}  // namespace

int32_t ToFlagosType(PJRT_Buffer_Type type) { return Lookup(type).flagos; }

PJRT_Buffer_Type ToPjrtType(int32_t type) {
  for (size_t i = 1; i < kNumTypes; ++i) {
    if (kTypes[i].flagos == type && type != FLAGOS_TYPE_INVALID) return static_cast<PJRT_Buffer_Type>(i);
  }
  return PJRT_Buffer_Type_INVALID;
}

size_t ElementSize(PJRT_Buffer_Type type) { return Lookup(type).size; }

const char* ElementTypeName(PJRT_Buffer_Type type) { return Lookup(type).name; }

}  // namespace flagos_pjrt
