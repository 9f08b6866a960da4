// DLPack's versioned structs and the C table through which PyTorch exchanges tensors: torch.Tensor's attribute
// __dlpack_c_exchange_api__. Layouts are fixed by the DLPack specification, 1.3.
#ifndef FLAGOS_TORCH_NATIVE_DLPACK_H_
#define FLAGOS_TORCH_NATIVE_DLPACK_H_

#include <cstdint>

namespace flagos::dlpack {

inline constexpr const char* kTableCapsule = "dlpack_exchange_api";
inline constexpr uint32_t kMajorVersion = 1;

struct Device {
  int32_t type;
  int32_t id;

  bool operator==(const Device& other) const { return type == other.type && id == other.id; }
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;

  bool operator!=(const DataType& other) const {
    return code != other.code || bits != other.bits || lanes != other.lanes;
  }
};
inline constexpr uint8_t kComplex = 5;

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct ManagedTensor {
  Version version;
  void* manager;
  void (*deleter)(ManagedTensor* self);
  uint64_t flags;
  Tensor tensor;
};

// Functions return 0, or another number with a Python exception set. None of them synchronizes.
struct ExchangeTable {
  Version version;
  ExchangeTable* previous;
  int (*allocate)(Tensor* prototype, ManagedTensor** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  int (*export_managed)(void* object, ManagedTensor** out);
  int (*import_managed)(ManagedTensor* tensor, void** object);
  int (*describe)(void* object, Tensor* out);  // borrows from the object
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // namespace flagos::dlpack

#endif  // FLAGOS_TORCH_NATIVE_DLPACK_H_
