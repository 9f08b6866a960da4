// The CUDA driver library, found at run time: nothing links it. The types are those of its binary interface.
#ifndef FLAGOS_NATIVE_CUDA_DRIVER_H_
#define FLAGOS_NATIVE_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>

namespace flagos::cuda {

using Result = int;  // 0: success
inline constexpr Result kInvalidValue = 1, kNotReady = 600;
using Device = int;
using DevicePointer = uint64_t;
struct ContextObject;
struct StreamObject;
struct EventObject;
struct GraphObject;
struct NodeObject;
struct ExecObject;
struct FunctionObject;
struct KernelObject;
struct ModuleObject;
using ContextHandle = ContextObject*;
using StreamHandle = StreamObject*;
using EventHandle = EventObject*;
using Graph = GraphObject*;
using Node = NodeObject*;
using Exec = ExecObject*;
using Function = FunctionObject*;
using Kernel = KernelObject*;
using Module = ModuleObject*;

inline constexpr unsigned kEventBlockingSync = 1, kEventDisableTiming = 2;
inline constexpr unsigned kStreamNonBlocking = 1;

enum class NodeType : int {
  kKernel = 0,
  kMemcpy = 1,
  kMemset = 2,
  kEmpty = 5,
  kWaitEvent = 6,
  kRecordEvent = 7,
  kConditional = 13
};
enum class ConditionalKind : int { kIf = 0, kWhile = 1 };
enum class CaptureStatus : int { kNone = 0, kActive = 1, kInvalidated = 2 };
inline constexpr int kCaptureThreadLocal = 1;
inline constexpr unsigned kSetDependencies = 1;
enum class MemoryType : int { kHost = 1, kDevice = 2, kArray = 3, kUnified = 4 };

// CUDA_KERNEL_NODE_PARAMS_v2
struct KernelParams {
  Function function;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void** values;
  void** extra;
  Kernel kernel;
  ContextHandle context;
};

// What `extra` names: CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END.
inline void* const kPackedBytes = reinterpret_cast<void*>(1);
inline void* const kPackedSize = reinterpret_cast<void*>(2);
inline constexpr void* kPackedEnd = nullptr;

// CUDA_MEMCPY3D_v2
struct MemcpySide {
  size_t x, y, z, lod;
  MemoryType type;
  void* host;
  DevicePointer device;
  void* array;
  void* reserved;
  size_t pitch, height;
};
struct MemcpyParams {
  MemcpySide source, target;
  size_t width, height, depth;
};

// CUDA_MEMSET_NODE_PARAMS
struct MemsetParams {
  DevicePointer target;
  size_t pitch;
  unsigned value, element_bytes;
  size_t width, height;
};

// CUgraphNodeParams of a conditional node
struct ConditionalParams {
  NodeType type;
  int reserved[3];
  uint64_t handle;
  ConditionalKind kind;
  unsigned num_bodies;
  Graph* bodies;  // the driver's: out
  ContextHandle context;
  unsigned char rest[208];
};
static_assert(sizeof(ConditionalParams) == 256, "the driver's structure of a node");

// name of the member, exported name, parameters
#define FLAGOS_CUDA_FUNCTIONS(X)                                                                       \
  X(GetErrorString, "cuGetErrorString", (Result, const char**))                                        \
  X(Init, "cuInit", (unsigned))                                                                        \
  X(DeviceGet, "cuDeviceGet", (Device*, int))                                                          \
  X(PrimaryContextRetain, "cuDevicePrimaryCtxRetain", (ContextHandle*, Device))                        \
  X(ContextPush, "cuCtxPushCurrent_v2", (ContextHandle))                                               \
  X(ContextPop, "cuCtxPopCurrent_v2", (ContextHandle*))                                                \
  X(StreamCreate, "cuStreamCreate", (StreamHandle*, unsigned))                                         \
  X(EventCreate, "cuEventCreate", (EventHandle*, unsigned))                                            \
  X(EventRecord, "cuEventRecord", (EventHandle, StreamHandle))                                         \
  X(EventQuery, "cuEventQuery", (EventHandle))                                                         \
  X(EventSynchronize, "cuEventSynchronize", (EventHandle))                                             \
  X(StreamWaitEvent, "cuStreamWaitEvent", (StreamHandle, EventHandle, unsigned))                       \
  X(MemcpyAsync, "cuMemcpyAsync", (DevicePointer, DevicePointer, size_t, StreamHandle))                \
  X(GraphGetNodes, "cuGraphGetNodes", (Graph, Node*, size_t*))                                         \
  X(NodeGetType, "cuGraphNodeGetType", (Node, NodeType*))                                              \
  X(KernelGetParams, "cuGraphKernelNodeGetParams_v2", (Node, KernelParams*))                           \
  X(MemcpyGetParams, "cuGraphMemcpyNodeGetParams", (Node, MemcpyParams*))                              \
  X(MemsetGetParams, "cuGraphMemsetNodeGetParams", (Node, MemsetParams*))                              \
  X(NodeGetDependencies, "cuGraphNodeGetDependencies", (Node, Node*, size_t*))                         \
  X(NodeGetDependents, "cuGraphNodeGetDependentNodes", (Node, Node*, size_t*))                         \
  X(GraphAddDependencies, "cuGraphAddDependencies", (Graph, const Node*, const Node*, size_t))         \
  X(GraphDestroyNode, "cuGraphDestroyNode", (Node))                                                    \
  X(KernelGetFunction, "cuKernelGetFunction", (Function*, Kernel))                                     \
  X(FunctionGetParamInfo, "cuFuncGetParamInfo", (Function, size_t, size_t*, size_t*))                  \
  X(GraphInstantiate, "cuGraphInstantiateWithFlags", (Exec*, Graph, unsigned long long))               \
  X(ExecDestroy, "cuGraphExecDestroy", (Exec))                                                         \
  X(ExecSetKernel, "cuGraphExecKernelNodeSetParams_v2", (Exec, Node, const KernelParams*))             \
  X(ExecSetMemcpy, "cuGraphExecMemcpyNodeSetParams", (Exec, Node, const MemcpyParams*, ContextHandle)) \
  X(ExecSetMemset, "cuGraphExecMemsetNodeSetParams", (Exec, Node, const MemsetParams*, ContextHandle)) \
  X(GraphUpload, "cuGraphUpload", (Exec, StreamHandle))                                                \
  X(GraphLaunch, "cuGraphLaunch", (Exec, StreamHandle))

// What only conditional nodes need.
#define FLAGOS_CUDA_CONDITIONAL_FUNCTIONS(X)                                                                          \
  X(ModuleLoadData, "cuModuleLoadData", (Module*, const void*))                                                       \
  X(ModuleGetFunction, "cuModuleGetFunction", (Function*, Module, const char*))                                       \
  X(LaunchKernel, "cuLaunchKernel",                                                                                   \
    (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, StreamHandle, void**, void**))   \
  X(StreamGetCaptureInfo, "cuStreamGetCaptureInfo_v2",                                                                \
    (StreamHandle, CaptureStatus*, uint64_t*, Graph*, const Node**, size_t*))                                         \
  X(StreamUpdateCaptureDependencies, "cuStreamUpdateCaptureDependencies", (StreamHandle, Node*, size_t, unsigned))    \
  X(StreamBeginCaptureToGraph, "cuStreamBeginCaptureToGraph",                                                         \
    (StreamHandle, Graph, const Node*, const void*, size_t, int))                                                     \
  X(StreamEndCapture, "cuStreamEndCapture", (StreamHandle, Graph*))                                                   \
  X(ConditionalHandleCreate, "cuGraphConditionalHandleCreate", (uint64_t*, Graph, ContextHandle, unsigned, unsigned)) \
  X(GraphAddNode, "cuGraphAddNode", (Node*, Graph, const Node*, size_t, ConditionalParams*))

struct Driver {
#define FLAGOS_CUDA_MEMBER(name, symbol, parameters) Result(*name) parameters;
  FLAGOS_CUDA_FUNCTIONS(FLAGOS_CUDA_MEMBER)
  FLAGOS_CUDA_CONDITIONAL_FUNCTIONS(FLAGOS_CUDA_MEMBER)
#undef FLAGOS_CUDA_MEMBER
  // One of those that this driver lacks, or NULL.
  const char* missing_for_conditionals;

  // Throws Failure that names `what` unless `result` is success.
  void Check(Result result, const char* what) const;
};

// NULL, with a line in the log, when the library is not there or lacks a function.
const Driver* TheDriver() noexcept;

// Makes a device's primary context, which torch uses too, current in this thread for the length of a scope.
class ContextScope {
 public:
  ContextScope(const Driver& driver, ContextHandle context) : driver_(driver) {
    driver_.Check(driver_.ContextPush(context), "making the device current");
  }
  ~ContextScope() {
    ContextHandle popped = nullptr;
    driver_.ContextPop(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Driver& driver_;
};

}  // namespace flagos::cuda

#endif  // FLAGOS_NATIVE_CUDA_DRIVER_H_
