/* The context, its one device, and its two memories, which are both the host's. A real backend opens its chip's driver in
 * context_create, and says UNAVAILABLE with the reason where no chip is there. */
#include <stdlib.h>
#include <string.h>

#include "sample.h"

static char* duplicate(const char* text, size_t size) {
  char* copy = calloc(1, size + 1);
  memcpy(copy, text, size);
  return copy;
}

FlagosError* sample_context_create(FlagosContextCreateArgs* args) {
  FlagosContext* context = calloc(1, sizeof *context);
  context->device.context = context;
  context->devices[0] = &context->device;
  const char* kinds[2] = {"device", "unpinned_host"};
  for (int i = 0; i < 2; ++i) {
    context->memory[i].context = context;
    context->memory[i].id = i;
    context->memory[i].kind = kinds[i];
    context->memories[i] = &context->memory[i];
  }
  context->attributes = calloc(args->num_options + 1, sizeof *context->attributes);
  context->num_attributes = args->num_options;
  for (size_t i = 0; i < args->num_options; ++i) {
    FlagosNamedValue* value = &context->attributes[i];
    *value = args->options[i];
    value->name = duplicate(value->name, value->name_size);
    if (value->kind == FLAGOS_VALUE_STRING) value->string_value = duplicate(value->string_value, value->value_size);
    if (value->kind == FLAGOS_VALUE_INT64_LIST) {
      value->int64_list = (int64_t*)duplicate((const char*)value->int64_list, value->value_size * sizeof(int64_t));
    }
  }
  args->context = context;
  return NULL;
}

void sample_context_destroy(FlagosContext* context) {
  for (size_t i = 0; i < context->num_attributes; ++i) {
    FlagosNamedValue* value = &context->attributes[i];
    free((void*)value->name);
    if (value->kind == FLAGOS_VALUE_STRING) free((void*)value->string_value);
    if (value->kind == FLAGOS_VALUE_INT64_LIST) free((void*)value->int64_list);
  }
  free(context->attributes);
  free(context);
}

FlagosError* sample_context_describe(FlagosContextDescribeArgs* args) {
  args->platform_name = SAMPLE_PLATFORM;
  args->platform_version = SAMPLE_NAME " " SAMPLE_VERSION;
  args->devices = args->addressable_devices = args->context->devices;
  args->num_devices = args->num_addressable_devices = 1;
  args->memories = args->context->memories;
  args->num_memories = 2;
  return NULL;
}

FlagosError* sample_device_describe(FlagosDeviceDescribeArgs* args) {
  FlagosContext* context = args->device->context;
  args->id = 0;
  args->process_index = args->local_hardware_id = 0;
  args->is_addressable = 1;
  args->is_host_memory = SAMPLE_IS_HOST_MEMORY;
  args->kind = SAMPLE_KIND;
  args->debug_string = args->to_string = SAMPLE_KIND ":0";
  args->attributes = context->attributes;
  args->num_attributes = context->num_attributes;
  args->memories = context->memories;
  args->num_memories = 2;
  args->default_memory = context->memories[0];
  return NULL;
}

FlagosError* sample_device_memory_stats(FlagosDeviceMemoryStatsArgs* args) {
  args->bytes_in_use = args->peak_bytes_in_use = args->num_allocations = -1;
  args->largest_allocation = args->bytes_limit = -1;
  return NULL;
}

FlagosError* sample_device_synchronize(FlagosDeviceSynchronizeArgs* args) {
  (void)args;
  return NULL;
}

FlagosError* sample_memory_describe(FlagosMemoryDescribeArgs* args) {
  args->id = args->memory->id;
  args->kind = args->debug_string = args->to_string = args->memory->kind;
  args->kind_id = (int32_t)args->memory->id;
  args->devices = args->memory->context->devices;
  args->num_devices = 1;
  return NULL;
}

/* Nothing is recorded: a trace without events. */
FlagosError* sample_profiler_start(FlagosProfilerStartArgs* args) {
  (void)args;
  return NULL;
}

FlagosError* sample_profiler_stop(FlagosProfilerStopArgs* args) {
  static const char trace[] = "{\"traceEvents\":[]}";
  args->sink(args->sink_data, trace, sizeof trace - 1);
  return NULL;
}
