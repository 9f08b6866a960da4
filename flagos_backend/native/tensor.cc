#include "tensor.h"

#include <memory>

#include "context.h"

namespace flagos {
namespace {

// The layout of DLPack's unversioned exchange struct, fixed for good by the DLPack specification.
struct DLDevice {
  int32_t type;
  int32_t id;
};
struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* manager;
  void (*deleter)(DLManagedTensor*);
};

constexpr const char* kCapsuleName = "dltensor";  // renamed by whoever takes the tensor out
enum : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

// Storage dtypes: unsigned integers wider than a byte as signed ones, floats of a byte or less as their bits.
DLDataType StorageType(int32_t type) {
  switch (type) {
    case FLAGOS_TYPE_PRED:
      return {kBool, 8, 1};
    case FLAGOS_TYPE_S1:
    case FLAGOS_TYPE_S2:
    case FLAGOS_TYPE_S4:
    case FLAGOS_TYPE_S8:
      return {kInt, 8, 1};
    case FLAGOS_TYPE_S16:
    case FLAGOS_TYPE_U16:
      return {kInt, 16, 1};
    case FLAGOS_TYPE_S32:
    case FLAGOS_TYPE_U32:
      return {kInt, 32, 1};
    case FLAGOS_TYPE_S64:
    case FLAGOS_TYPE_U64:
      return {kInt, 64, 1};
    case FLAGOS_TYPE_F16:
      return {kFloat, 16, 1};
    case FLAGOS_TYPE_BF16:
      return {kBfloat, 16, 1};
    case FLAGOS_TYPE_F32:
      return {kFloat, 32, 1};
    case FLAGOS_TYPE_F64:
      return {kFloat, 64, 1};
    case FLAGOS_TYPE_C64:
      return {kComplex, 64, 1};
    case FLAGOS_TYPE_C128:
      return {kComplex, 128, 1};
    default:
      return {kUInt, 8, 1};
  }
}

struct Export {
  DLManagedTensor managed;
  Ref<Context> context;  // outlives the block: who took the tensor may keep it longer than the host keeps anything
  Ref<Block> block;
  Dims dims;
};

void DeleteExport(DLManagedTensor* managed) { delete static_cast<Export*>(managed->manager); }

// A capsule that nobody took the tensor out of still owns it.
void DestroyCapsule(PyObject* capsule) {
  const python::Functions& py = *python::Known();
  if (py.PyCapsule_IsValid(capsule, kCapsuleName) == 0) return;
  auto* managed = static_cast<DLManagedTensor*>(py.PyCapsule_GetPointer(capsule, kCapsuleName));
  managed->deleter(managed);
}

bool IsDenseTensor(const DLTensor& tensor, const Shape& shape) {
  if (tensor.strides == nullptr || shape.bytes == 0) return true;
  int64_t stride = 1;
  for (int32_t i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != stride) return false;
    stride *= tensor.shape[i];
  }
  return true;
}

}  // namespace

namespace {

// `block` may be NULL: somebody else keeps the memory.
python::Object MakeCapsule(void* data, const Ref<Block>& block, const Shape& shape, DlDevice device) {
  auto exported = std::make_unique<Export>();
  if (block && block->memory() != nullptr) exported->context = Ref<Context>::Share(block->memory()->context);
  exported->block = block;
  exported->dims = shape.dims;
  DLManagedTensor& managed = exported->managed;
  managed.tensor.data = shape.bytes > 0 || device.type == kHostDevice.type ? data : nullptr;
  managed.tensor.device = {device.type, device.number};
  managed.tensor.ndim = static_cast<int32_t>(shape.dims.rank());
  managed.tensor.dtype = StorageType(shape.type);
  managed.tensor.shape = exported->dims.data();
  managed.tensor.strides = nullptr;
  managed.tensor.byte_offset = 0;
  managed.manager = exported.get();
  managed.deleter = DeleteExport;
  python::Object capsule =
      python::Check(python::Known()->PyCapsule_New(&managed, kCapsuleName, DestroyCapsule), "PyCapsule_New");
  exported.release();
  return capsule;
}

}  // namespace

python::Object ToCapsule(const Ref<Block>& block, const Shape& shape, DlDevice device) {
  return MakeCapsule(block->data(), block, shape, device);
}

python::Object ToCapsule(void* data, const Shape& shape, DlDevice device) {
  return MakeCapsule(data, nullptr, shape, device);
}

TensorView FromCapsule(PyObject* capsule, const Shape& shape, const char* what, DlDevice device) {
  auto* managed = static_cast<DLManagedTensor*>(python::Known()->PyCapsule_GetPointer(capsule, kCapsuleName));
  if (managed == nullptr) throw Failure(python::TakeException(what));
  const DLTensor& tensor = managed->tensor;
  const DLDataType expected = StorageType(shape.type);
  const bool same_dims = static_cast<size_t>(tensor.ndim) == shape.dims.rank() &&
                         std::equal(tensor.shape, tensor.shape + tensor.ndim, shape.dims.data());
  const bool same_type =
      tensor.dtype.code == expected.code && tensor.dtype.bits == expected.bits && tensor.dtype.lanes == 1;
  const bool same_device = tensor.device.type == device.type && tensor.device.id == device.number;
  if (!same_dims || !same_type || !same_device || !IsDenseTensor(tensor, shape)) {
    Fail(FLAGOS_INTERNAL,
         "%s: a kernel returned something else than a dense array %s on device %d:%d (rank %d, type code %d, %d bits, "
         "device %d:%d); this is a defect of the backend, please report it",
         what, ToString(shape).c_str(), device.type, device.number, tensor.ndim, tensor.dtype.code, tensor.dtype.bits,
         tensor.device.type, tensor.device.id);
  }
  return {static_cast<char*>(tensor.data) + tensor.byte_offset, shape.bytes};
}

}  // namespace flagos
