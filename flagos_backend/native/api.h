// The functions of the table, each defined in the file of its object and collected in entry.cc.
#ifndef FLAGOS_NATIVE_API_H_
#define FLAGOS_NATIVE_API_H_

#include "flagos/plugin_abi.h"

namespace flagos::api {

FlagosError* error_create(FlagosErrorCreateArgs* args);
void error_destroy(FlagosError* error);
void error_describe(FlagosErrorDescribeArgs* args);

FlagosError* context_create(FlagosContextCreateArgs* args);
void context_destroy(FlagosContext* context);
FlagosError* context_describe(FlagosContextDescribeArgs* args);
FlagosError* device_describe(FlagosDeviceDescribeArgs* args);
FlagosError* device_memory_stats(FlagosDeviceMemoryStatsArgs* args);
FlagosError* device_synchronize(FlagosDeviceSynchronizeArgs* args);
FlagosError* memory_describe(FlagosMemoryDescribeArgs* args);

FlagosError* event_create(FlagosEventCreateArgs* args);
void event_destroy(FlagosEvent* event);
FlagosError* event_set(FlagosEventSetArgs* args);
FlagosError* event_query(FlagosEventQueryArgs* args);
FlagosError* event_await(FlagosEventAwaitArgs* args);
FlagosError* event_on_ready(FlagosEventOnReadyArgs* args);

FlagosError* buffer_from_host(FlagosBufferFromHostArgs* args);
FlagosError* buffer_allocate(FlagosBufferAllocateArgs* args);
FlagosError* buffer_view(FlagosBufferViewArgs* args);
FlagosError* buffer_promise(FlagosBufferPromiseArgs* args);
FlagosError* buffer_fulfill(FlagosBufferFulfillArgs* args);
void buffer_destroy(FlagosBuffer* buffer);
FlagosError* buffer_describe(FlagosBufferDescribeArgs* args);
FlagosError* buffer_ready_event(FlagosBufferReadyEventArgs* args);
FlagosError* buffer_to_host(FlagosBufferToHostArgs* args);
FlagosError* buffer_read_raw(FlagosBufferReadRawArgs* args);
FlagosError* buffer_write_raw(FlagosBufferWriteRawArgs* args);
FlagosError* buffer_copy(FlagosBufferCopyArgs* args);
FlagosError* buffer_bitcast(FlagosBufferBitcastArgs* args);
FlagosError* buffer_delete(FlagosBufferDeleteArgs* args);
FlagosError* buffer_hold(FlagosBufferHoldArgs* args);
FlagosError* buffer_pointer(FlagosBufferPointerArgs* args);
FlagosError* buffer_donate(FlagosBufferDonateArgs* args);

FlagosError* compile(FlagosCompileArgs* args);
FlagosError* executable_load(FlagosExecutableLoadArgs* args);
void executable_destroy(FlagosExecutable* executable);
FlagosError* executable_describe(FlagosExecutableDescribeArgs* args);
FlagosError* executable_artifact(FlagosExecutableArtifactArgs* args);
FlagosError* execute(FlagosExecuteArgs* args);

FlagosError* profiler_start(FlagosProfilerStartArgs* args);
FlagosError* profiler_stop(FlagosProfilerStopArgs* args);

}  // namespace flagos::api

#endif  // FLAGOS_NATIVE_API_H_
