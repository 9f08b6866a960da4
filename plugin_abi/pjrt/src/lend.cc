// Lends buffers to other frameworks, as DLPack has them.
#include "../lend.h"

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "buffer.h"
#include "element_type.h"

namespace flagos_pjrt {
namespace {

static_assert(sizeof(FlagosDlManagedTensor) == 64 && offsetof(FlagosDlManagedTensor, dims) == 24 &&
                  offsetof(FlagosDlManagedTensor, deleter) == 56,
              "DLPack's layout on 64-bit machines");

// DLDataTypeCode
enum : uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

// False for what DLPack has no type of.
bool TypeOf(PJRT_Buffer_Type type, FlagosDlManagedTensor* tensor) {
  const auto bits = static_cast<uint8_t>(8 * ElementSize(type));
  const auto is = [&](uint8_t code) {
    tensor->type_code = code;
    tensor->type_bits = bits;
    tensor->type_lanes = 1;
    return true;
  };
  switch (type) {
    case PJRT_Buffer_Type_PRED:
      return is(kBool);
    case PJRT_Buffer_Type_S8:
    case PJRT_Buffer_Type_S16:
    case PJRT_Buffer_Type_S32:
    case PJRT_Buffer_Type_S64:
      return is(kInt);
    case PJRT_Buffer_Type_U8:
    case PJRT_Buffer_Type_U16:
    case PJRT_Buffer_Type_U32:
    case PJRT_Buffer_Type_U64:
      return is(kUint);
    case PJRT_Buffer_Type_F16:
    case PJRT_Buffer_Type_F32:
    case PJRT_Buffer_Type_F64:
      return is(kFloat);
    case PJRT_Buffer_Type_BF16:
      return is(kBfloat);
    case PJRT_Buffer_Type_C64:
    case PJRT_Buffer_Type_C128:
      return is(kComplex);
    default:
      return false;
  }
}

struct Lent {
  FlagosDlManagedTensor tensor{};
  Ref<PJRT_Buffer> buffer;
  std::vector<int64_t> dims;
};

void GiveBack(FlagosDlManagedTensor* tensor) {
  std::unique_ptr<Lent> lent(static_cast<Lent*>(tensor->manager));
  // A buffer that is held can be let go of: there is no error to tell anybody.
  DestroyError(HoldBuffer(*lent->buffer, -1));
}

struct Asked {
  PJRT_Buffer* buffer = nullptr;
  uintptr_t pointer = 0;
};
thread_local Asked asked;

}  // namespace

void RememberPointer(PJRT_Buffer* buffer, uintptr_t pointer) { asked = {buffer, pointer}; }

}  // namespace flagos_pjrt

extern "C" __attribute__((visibility("default"))) FlagosDlManagedTensor* FlagosPjrtLend(uintptr_t pointer,
                                                                                        int32_t device_type,
                                                                                        int32_t device_id) try {
  using namespace flagos_pjrt;
  const Asked last = std::exchange(asked, {});
  if (last.buffer == nullptr || last.pointer != pointer) return nullptr;
  auto lent = std::make_unique<Lent>();
  FlagosDlManagedTensor& tensor = lent->tensor;
  if (!TypeOf(last.buffer->type, &tensor)) return nullptr;
  lent->dims.assign(last.buffer->dims.data(), last.buffer->dims.data() + last.buffer->dims.size());
  tensor.data = last.buffer->size_bytes() > 0 ? reinterpret_cast<void*>(pointer) : nullptr;
  tensor.device_type = device_type;
  tensor.device_id = device_id;
  tensor.rank = static_cast<int32_t>(lent->dims.size());
  tensor.dims = lent->dims.data();
  tensor.manager = lent.get();
  tensor.deleter = &GiveBack;
  lent->buffer = Ref<PJRT_Buffer>::Share(last.buffer);
  if (PJRT_Error* error = HoldBuffer(*last.buffer, 1)) {
    DestroyError(error);
    return nullptr;
  }
  return &lent.release()->tensor;
} catch (...) {
  return nullptr;  // no memory for it
}
