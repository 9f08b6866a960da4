/* What the files of the sample share: its objects, and what the build knows of itself (CMakeLists.txt defines it). */
#ifndef SAMPLE_H_
#define SAMPLE_H_

#include <pthread.h>

#include "flagos/plugin_abi.h"

/* The name that the manifest has too; it begins the payloads of errors. */
#ifndef SAMPLE_NAME
#define SAMPLE_NAME "samplechip"
#endif
/* The kind of device, as frameworks print it. */
#ifndef SAMPLE_KIND
#define SAMPLE_KIND SAMPLE_NAME
#endif
/* What JAX and PyTorch look for. */
#ifndef SAMPLE_PLATFORM
#define SAMPLE_PLATFORM "flagos"
#endif
#ifndef SAMPLE_VERSION
#define SAMPLE_VERSION "0.1.0"
#endif
/* 40 hex digits, or "" for a build of no commit. */
#ifndef SAMPLE_GIT_REVISION
#define SAMPLE_GIT_REVISION ""
#endif
#ifndef SAMPLE_COMPILER
#error "define SAMPLE_COMPILER as the manifest has it, such as \"gcc 12.2.0\""
#endif
#ifndef SAMPLE_GLIBC
#error "define SAMPLE_GLIBC as the manifest has it, such as \"2.36\""
#endif
/* 0 or 1 where C++ is linked in, -1 without. */
#ifndef SAMPLE_CXX11_ABI
#define SAMPLE_CXX11_ABI (-1)
#endif
/* 0: no Python is linked in. */
#ifndef SAMPLE_PYTHON_ABI
#define SAMPLE_PYTHON_ABI 0
#endif
#ifndef SAMPLE_IS_HOST_MEMORY
#define SAMPLE_IS_HOST_MEMORY 1
#endif
/* The minor versions of the ABI that this backend speaks. */
#ifndef SAMPLE_MIN_MINOR
#define SAMPLE_MIN_MINOR 0
#endif
#ifndef SAMPLE_MAX_MINOR
#define SAMPLE_MAX_MINOR FLAGOS_ABI_MINOR
#endif

enum { MAX_RANK = 8 };

struct FlagosError {
  int32_t code;
  size_t message_size;
  char message[256];
  FlagosNamedValue payload;
};

struct FlagosEvent {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int is_ready;
  FlagosError* error;
  struct Listener* listeners;
};

struct FlagosDevice {
  FlagosContext* context;
};

struct FlagosMemory {
  FlagosContext* context;
  int64_t id;
  const char* kind;
};

struct FlagosContext {
  FlagosDevice device;
  FlagosDevice* devices[1];
  FlagosMemory memory[2];
  FlagosMemory* memories[2];
  FlagosNamedValue* attributes; /* the options that the context was given, for the host to look at */
  size_t num_attributes;
};

struct FlagosBuffer {
  FlagosMemory* memory;
  void* data;
  int owns_data;
  FlagosReleaseCallback release;
  void* release_user_data;
  int64_t dims[MAX_RANK];
  size_t rank;
  size_t size_bytes;
  int32_t element_type;
  int32_t is_deleted;
  int32_t holds;
};

/* objects.c. An error's payload SAMPLE_NAME ".slot" names the function that made it. Never NULL. */
FlagosError* sample_error(int32_t code, const char* slot, const char* message);
FlagosError* sample_unimplemented(const char* slot);
FlagosError* sample_copy_error(const FlagosError* error);
FlagosEvent* sample_event(int is_ready);
FlagosError* sample_error_create(FlagosErrorCreateArgs* args);
void sample_error_destroy(FlagosError* error);
void sample_error_describe(FlagosErrorDescribeArgs* args);
FlagosError* sample_event_create(FlagosEventCreateArgs* args);
void sample_event_destroy(FlagosEvent* event);
FlagosError* sample_event_set(FlagosEventSetArgs* args);
FlagosError* sample_event_query(FlagosEventQueryArgs* args);
FlagosError* sample_event_await(FlagosEventAwaitArgs* args);
FlagosError* sample_event_on_ready(FlagosEventOnReadyArgs* args);

/* device.c */
FlagosError* sample_context_create(FlagosContextCreateArgs* args);
void sample_context_destroy(FlagosContext* context);
FlagosError* sample_context_describe(FlagosContextDescribeArgs* args);
FlagosError* sample_device_describe(FlagosDeviceDescribeArgs* args);
FlagosError* sample_device_memory_stats(FlagosDeviceMemoryStatsArgs* args);
FlagosError* sample_device_synchronize(FlagosDeviceSynchronizeArgs* args);
FlagosError* sample_memory_describe(FlagosMemoryDescribeArgs* args);
FlagosError* sample_profiler_start(FlagosProfilerStartArgs* args);
FlagosError* sample_profiler_stop(FlagosProfilerStopArgs* args);

/* buffer.c */
FlagosError* sample_buffer_from_host(FlagosBufferFromHostArgs* args);
FlagosError* sample_buffer_allocate(FlagosBufferAllocateArgs* args);
FlagosError* sample_buffer_view(FlagosBufferViewArgs* args);
FlagosError* sample_buffer_promise(FlagosBufferPromiseArgs* args);
FlagosError* sample_buffer_fulfill(FlagosBufferFulfillArgs* args);
void sample_buffer_destroy(FlagosBuffer* buffer);
FlagosError* sample_buffer_describe(FlagosBufferDescribeArgs* args);
FlagosError* sample_buffer_ready_event(FlagosBufferReadyEventArgs* args);
FlagosError* sample_buffer_to_host(FlagosBufferToHostArgs* args);
FlagosError* sample_buffer_read_raw(FlagosBufferReadRawArgs* args);
FlagosError* sample_buffer_write_raw(FlagosBufferWriteRawArgs* args);
FlagosError* sample_buffer_copy(FlagosBufferCopyArgs* args);
FlagosError* sample_buffer_bitcast(FlagosBufferBitcastArgs* args);
FlagosError* sample_buffer_delete(FlagosBufferDeleteArgs* args);
FlagosError* sample_buffer_hold(FlagosBufferHoldArgs* args);
FlagosError* sample_buffer_pointer(FlagosBufferPointerArgs* args);
FlagosError* sample_buffer_donate(FlagosBufferDonateArgs* args);
/* INVALID_ARGUMENT for a deleted buffer, else NULL. */
FlagosError* sample_live(const FlagosBuffer* buffer, const char* slot);

/* executable.c: what compiles and runs */
FlagosError* sample_compile(FlagosCompileArgs* args);
FlagosError* sample_executable_load(FlagosExecutableLoadArgs* args);
void sample_executable_destroy(FlagosExecutable* executable);
FlagosError* sample_executable_describe(FlagosExecutableDescribeArgs* args);
FlagosError* sample_executable_artifact(FlagosExecutableArtifactArgs* args);
FlagosError* sample_execute(FlagosExecuteArgs* args);

#endif /* SAMPLE_H_ */
