// The functions of the CUDA driver that launches of Triton's kernels call, found at run time: nothing links the driver. The
// types are those of its binary interface.
#ifndef FLAGOS_KERNELS_TRITON_CUDA_H_
#define FLAGOS_KERNELS_TRITON_CUDA_H_

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace flagos::triton {

using Result = int;  // 0: success
inline constexpr Result kInvalidValue = 1;
using Device = int;
using DevicePointer = uint64_t;
struct ContextObject;
struct StreamObject;
struct FunctionObject;
using Context = ContextObject*;
using Stream = StreamObject*;
using Function = FunctionObject*;

inline constexpr int kPointerDevicePointer = 3;          // CU_POINTER_ATTRIBUTE_DEVICE_POINTER
inline constexpr int kFunctionNonPortableClusters = 14;  // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED

enum class AttributeKind : int {
  kCooperative = 2,
  kClusterDimension = 4,
  kClusterScheduling = 5,
  kProgrammaticSerialization = 6
};
inline constexpr unsigned kClusterSchedulingSpread = 1;

// CUlaunchAttribute: every value used here is one or several of `value`'s elements, from the first on.
struct Attribute {
  AttributeKind kind;
  unsigned padding;
  unsigned value[16];
};
static_assert(sizeof(Attribute) == 72);

// CUlaunchConfig
struct Configuration {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  Attribute* attributes;
  unsigned num_attributes;
};
static_assert(offsetof(Configuration, stream) == 32);
static_assert(sizeof(Configuration) == 56);

// name of the member, exported name, parameters
#define FLAGOS_TRITON_CUDA_FUNCTIONS(X)                                        \
  X(GetErrorString, "cuGetErrorString", (Result, const char**))                \
  X(DeviceGet, "cuDeviceGet", (Device*, int))                                  \
  X(PrimaryContextRetain, "cuDevicePrimaryCtxRetain", (Context*, Device))      \
  X(ContextGet, "cuCtxGetCurrent", (Context*))                                 \
  X(ContextSet, "cuCtxSetCurrent", (Context))                                  \
  X(PointerGetAttribute, "cuPointerGetAttribute", (void*, int, DevicePointer)) \
  X(FunctionSetAttribute, "cuFuncSetAttribute", (Function, int, int))          \
  X(LaunchKernel, "cuLaunchKernelEx", (const Configuration*, Function, void**, void**))

struct Driver {
#define FLAGOS_TRITON_CUDA_MEMBER(name, symbol, parameters) Result(*name) parameters;
  FLAGOS_TRITON_CUDA_FUNCTIONS(FLAGOS_TRITON_CUDA_MEMBER)
#undef FLAGOS_TRITON_CUDA_MEMBER
};

// The driver, or NULL with an exception. Called with the GIL held.
const Driver* TheDriver();

// Whether `result` is success, else false with Triton's exception for it.
bool Check(const Driver& driver, Result result);

// Whether the thread has a context: that of device 0 becomes current where there is none. Else false with an exception.
bool EnsureContext(const Driver& driver);

}  // namespace flagos::triton

#endif  // FLAGOS_KERNELS_TRITON_CUDA_H_
