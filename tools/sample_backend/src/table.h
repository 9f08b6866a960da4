/* The initializers of what flagos_plugin_entry gives: every function of the table has a value. */
#ifndef TABLE_H_
#define TABLE_H_

#include "sample.h"

/* clang-format off */
#define SAMPLE_TABLE(size) \
  {.struct_size = (size), \
   .version = FLAGOS_ABI_VERSION, \
   .error_create = sample_error_create, \
   .error_destroy = sample_error_destroy, \
   .error_describe = sample_error_describe, \
   .event_create = sample_event_create, \
   .event_destroy = sample_event_destroy, \
   .event_set = sample_event_set, \
   .event_query = sample_event_query, \
   .event_await = sample_event_await, \
   .event_on_ready = sample_event_on_ready, \
   .context_create = sample_context_create, \
   .context_destroy = sample_context_destroy, \
   .context_describe = sample_context_describe, \
   .device_describe = sample_device_describe, \
   .device_memory_stats = sample_device_memory_stats, \
   .device_synchronize = sample_device_synchronize, \
   .memory_describe = sample_memory_describe, \
   .buffer_from_host = sample_buffer_from_host, \
   .buffer_allocate = sample_buffer_allocate, \
   .buffer_view = sample_buffer_view, \
   .buffer_promise = sample_buffer_promise, \
   .buffer_fulfill = sample_buffer_fulfill, \
   .buffer_destroy = sample_buffer_destroy, \
   .buffer_describe = sample_buffer_describe, \
   .buffer_ready_event = sample_buffer_ready_event, \
   .buffer_to_host = sample_buffer_to_host, \
   .buffer_read_raw = sample_buffer_read_raw, \
   .buffer_write_raw = sample_buffer_write_raw, \
   .buffer_copy = sample_buffer_copy, \
   .buffer_bitcast = sample_buffer_bitcast, \
   .buffer_delete = sample_buffer_delete, \
   .buffer_hold = sample_buffer_hold, \
   .buffer_pointer = sample_buffer_pointer, \
   .buffer_donate = sample_buffer_donate, \
   .compile = sample_compile, \
   .executable_load = sample_executable_load, \
   .executable_destroy = sample_executable_destroy, \
   .executable_describe = sample_executable_describe, \
   .executable_artifact = sample_executable_artifact, \
   .execute = sample_execute, \
   .profiler_start = sample_profiler_start, \
   .profiler_stop = sample_profiler_stop}

#define SAMPLE_INFO \
  {sizeof(FlagosPluginInfo), SAMPLE_NAME, SAMPLE_PLATFORM, SAMPLE_VERSION, SAMPLE_GIT_REVISION, SAMPLE_COMPILER, \
   SAMPLE_GLIBC, SAMPLE_KIND " backend in C", SAMPLE_CXX11_ABI, SAMPLE_PYTHON_ABI}
/* clang-format on */

#endif /* TABLE_H_ */
