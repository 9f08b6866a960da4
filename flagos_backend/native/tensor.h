// Blocks as tensors and back, through DLPack capsules. All with the GIL.
#ifndef FLAGOS_NATIVE_TENSOR_H_
#define FLAGOS_NATIVE_TENSOR_H_

#include "memory.h"
#include "python.h"
#include "shape.h"

namespace flagos {

// DLPack's type and number of a device.
struct DlDevice {
  int32_t type;
  int32_t number;
};
inline constexpr DlDevice kHostDevice{1, 0};

// What a dense tensor says of itself.
struct TensorView {
  void* data = nullptr;
  size_t bytes = 0;
};

// A capsule "dltensor" over the block, in the storage dtype of the shape's type; it keeps the block.
python::Object ToCapsule(const Ref<Block>& block, const Shape& shape, DlDevice device = kHostDevice);

// The same over memory that the caller keeps until every tensor made from the capsule is gone.
python::Object ToCapsule(void* data, const Shape& shape, DlDevice device = kHostDevice);

// Where the elements of the tensor in a capsule lie. Throws Failure(INTERNAL) that names `what` unless it is a dense
// array on `device` of exactly this shape in its storage dtype.
TensorView FromCapsule(PyObject* capsule, const Shape& shape, const char* what, DlDevice device = kHostDevice);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_TENSOR_H_
