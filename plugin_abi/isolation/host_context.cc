// The host's side of errors, contexts, devices and memories. Descriptions come once, with the context.
#include <cstring>

#include "objects.h"

namespace flagos_isolation {
namespace {

// Their values let others reach the device's memory, which is in another process.
bool IsAboutMemoryOfTheProcess(const std::string& name) {
  return name == "torch_device" || name == "dlpack_device_type" || name == "dlpack_device_id";
}

bool IsIndex(int64_t index, size_t count) { return index >= 0 && static_cast<uint64_t>(index) < count; }

template <typename T, typename Owned>
bool Resolve(const std::vector<int64_t>& indices, const std::vector<Owned>& all, std::vector<T*>* found) {
  for (const int64_t index : indices) {
    if (!IsIndex(index, all.size())) return false;
    found->push_back(all[static_cast<size_t>(index)].get());
  }
  return true;
}

bool Adopt(Context described, FlagosContext* context) {
  context->platform_name = std::move(described.platform_name);
  context->platform_version = std::move(described.platform_version);
  for (Device& device : described.devices) {
    auto& made = context->devices.emplace_back(std::make_unique<FlagosDevice>());
    made->context = context;
    made->index = static_cast<int64_t>(context->devices.size()) - 1;
    made->described = std::move(device);
    std::vector<NamedValue> kept;
    for (NamedValue& value : made->described.attributes) {
      if (!IsAboutMemoryOfTheProcess(value.name)) kept.push_back(std::move(value));
    }
    NamedValue& isolated = kept.emplace_back();
    isolated.name = "isolated_process_id";
    isolated.kind = FLAGOS_VALUE_INT64;
    isolated.int64_value = context->link->process();
    std::string denied;  // by the time that the context is there; what comes later is in the log
    for (const std::string& name : context->link->Denied()) denied += (denied.empty() ? "" : ", ") + name;
    if (!denied.empty()) {
      NamedValue& value = kept.emplace_back();
      value.name = "isolated_denied";
      value.string_value = std::move(denied);
    }
    made->described.attributes = std::move(kept);
    made->attributes = ToAbi(made->described.attributes);
    context->all_devices.push_back(made.get());
  }
  for (Memory& memory : described.memories) {
    auto& made = context->memories.emplace_back(std::make_unique<FlagosMemory>());
    made->context = context;
    made->index = static_cast<int64_t>(context->memories.size()) - 1;
    made->described = std::move(memory);
    context->all_memories.push_back(made.get());
    if (!Resolve(made->described.devices, context->devices, &made->devices)) return false;
  }
  for (auto& device : context->devices) {
    if (!Resolve(device->described.memories, context->memories, &device->memories)) return false;
    const int64_t memory = device->described.default_memory;
    if (memory == 0) continue;
    if (!IsIndex(memory - 1, context->memories.size())) return false;
    device->default_memory = context->memories[static_cast<size_t>(memory - 1)].get();
  }
  return Resolve(described.addressable_devices, context->devices, &context->addressable_devices);
}

FlagosError* ErrorCreate(FlagosErrorCreateArgs* args) {
  return Enter("error_create", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("error_create", error);
    FLAGOS_NEED(args->code > FLAGOS_OK && args->code <= FLAGOS_UNAUTHENTICATED, "error_create: no code of an error");
    FLAGOS_NEED(args->message != nullptr || args->message_size == 0, "error_create: the message is missing");
    args->error =
        NewError(MakeStatus(args->code, std::string(args->message_size == 0 ? "" : args->message, args->message_size)));
    return nullptr;
  });
}

void ErrorDestroy(FlagosError* error) { delete error; }

void ErrorDescribe(FlagosErrorDescribeArgs* args) {
  if (args == nullptr || args->struct_size < sizeof(size_t)) return;
  FlagosErrorDescribeArgs own{};
  const size_t known = KnownSize(args->struct_size, sizeof(own));
  std::memcpy(&own, args, known);
  if (own.error == nullptr) return;
  const ErrorData& data = *own.error->status;
  own.message = data.message.data();
  own.message_size = data.message.size();
  own.code = data.code;
  own.payloads = own.error->payloads.data();
  own.num_payloads = own.error->payloads.size();
  std::memcpy(args, &own, known);
}

void ContextDestroy(FlagosContext* context) {
  if (context == nullptr) return;
  Call call;
  call.method = Method::kContextDestroy;
  Reply reply;
  // A child that could not let go of its context is of no use to the next one.
  const bool is_well = context->link->Request(call, &reply) == nullptr;
  context->link->answerer().End();
  if (is_well) {
    context->give_back(std::move(context->link));
  } else {
    context->link->Close();
  }
  delete context;
}

FlagosError* ContextDescribe(FlagosContextDescribeArgs* args) {
  return Enter("context_describe", args, [&]() -> Status {
    FLAGOS_NEED(args->context != nullptr, "context_describe: no context");
    const FlagosContext& context = *args->context;
    args->platform_name = context.platform_name.c_str();
    args->platform_version = context.platform_version.c_str();
    args->devices = context.all_devices.data();
    args->num_devices = context.all_devices.size();
    args->addressable_devices = context.addressable_devices.data();
    args->num_addressable_devices = context.addressable_devices.size();
    args->memories = context.all_memories.data();
    args->num_memories = context.all_memories.size();
    return nullptr;
  });
}

FlagosError* DeviceDescribe(FlagosDeviceDescribeArgs* args) {
  return Enter("device_describe", args, [&]() -> Status {
    FLAGOS_NEED(args->device != nullptr, "device_describe: no device");
    const FlagosDevice& device = *args->device;
    args->id = device.described.id;
    args->process_index = static_cast<int32_t>(device.described.process_index);
    args->local_hardware_id = static_cast<int32_t>(device.described.local_hardware_id);
    args->is_addressable = device.described.is_addressable != 0 ? 1 : 0;
    args->is_host_memory = 0;  // not of this process, whatever it is
    args->kind = device.described.kind.c_str();
    args->debug_string = device.described.debug_string.c_str();
    args->to_string = device.described.to_string.c_str();
    args->attributes = device.attributes.data();
    args->num_attributes = device.attributes.size();
    args->memories = device.memories.data();
    args->num_memories = device.memories.size();
    args->default_memory = device.default_memory;
    return nullptr;
  });
}

FlagosError* MemoryDescribe(FlagosMemoryDescribeArgs* args) {
  return Enter("memory_describe", args, [&]() -> Status {
    FLAGOS_NEED(args->memory != nullptr, "memory_describe: no memory");
    const FlagosMemory& memory = *args->memory;
    args->id = memory.described.id;
    args->kind = memory.described.kind.c_str();
    args->kind_id = static_cast<int32_t>(memory.described.kind_id);
    args->debug_string = memory.described.debug_string.c_str();
    args->to_string = memory.described.to_string.c_str();
    args->devices = memory.devices.data();
    args->num_devices = memory.devices.size();
    return nullptr;
  });
}

FlagosError* DeviceMemoryStats(FlagosDeviceMemoryStatsArgs* args) {
  return Enter("device_memory_stats", args, [&]() -> Status {
    FLAGOS_NEED(args->device != nullptr, "device_memory_stats: no device");
    Call call;
    call.method = Method::kDeviceMemoryStats;
    call.device = args->device->index + 1;
    call.number = args->clear_peaks;
    Reply reply;
    Link& link = *args->device->context->link;
    FLAGOS_RETURN_IF_ERROR(link.Request(call, &reply));
    if (reply.numbers.size() != 5) return link.Malformed("statistics that are none");
    args->bytes_in_use = reply.numbers[0];
    args->peak_bytes_in_use = reply.numbers[1];
    args->num_allocations = reply.numbers[2];
    args->largest_allocation = reply.numbers[3];
    args->bytes_limit = reply.numbers[4];
    return nullptr;
  });
}

FlagosError* DeviceSynchronize(FlagosDeviceSynchronizeArgs* args) {
  return Enter("device_synchronize", args, [&]() -> Status {
    FLAGOS_NEED(args->device != nullptr, "device_synchronize: no device");
    Call call;
    call.method = Method::kDeviceSynchronize;
    call.device = args->device->index + 1;
    Reply reply;
    Link& link = *args->device->context->link;
    Status status = link.Request(call, &reply);
    // What has completed is known here, as in a process that has the backend to itself.
    if (!reply.numbers.empty()) FLAGOS_RETURN_IF_ERROR(link.AwaitEvents(reply.numbers[0]));
    return status;
  });
}

FlagosError* ProfilerStart(FlagosProfilerStartArgs* args) {
  return Enter("profiler_start", args, [&]() -> Status {
    FLAGOS_NEED(args->context != nullptr, "profiler_start: no context");
    Call call;
    call.method = Method::kProfilerStart;
    Reply reply;
    return args->context->link->Request(call, &reply);
  });
}

FlagosError* ProfilerStop(FlagosProfilerStopArgs* args) {
  return Enter("profiler_stop", args, [&]() -> Status {
    FLAGOS_NEED(args->context != nullptr && args->sink != nullptr, "profiler_stop: no context or no sink");
    Call call;
    call.method = Method::kProfilerStop;
    Reply reply;
    FLAGOS_RETURN_IF_ERROR(args->context->link->Request(call, &reply));
    args->sink(args->sink_data, reply.data.data(), reply.data.size());
    return nullptr;
  });
}

}  // namespace

FlagosError* NewError(const Status& status) {
  if (status == nullptr) return nullptr;
  auto* error = new FlagosError{status, {}};
  for (const auto& [name, value] : status->payloads) {
    FlagosNamedValue payload{};
    payload.struct_size = sizeof(payload);
    payload.name = name.c_str();
    payload.name_size = name.size();
    payload.kind = FLAGOS_VALUE_STRING;
    payload.string_value = value.data();
    payload.value_size = value.size();
    error->payloads.push_back(payload);
  }
  return error;
}

Status TakeError(FlagosError* error) {
  if (error == nullptr) return nullptr;
  Status status = error->status;
  delete error;
  return status;
}

Status CreateContext(std::shared_ptr<Link> link, FlagosContextCreateArgs* args,
                     std::unique_ptr<FlagosContext>* context) {
  FLAGOS_NEED(args->options != nullptr || args->num_options == 0, "context_create: the options are missing");
  Call call;
  call.method = Method::kContextCreate;
  HostFunctions functions;
  functions.callback = args->host_callback;
  functions.callback_user_data = args->host_callback_user_data;
  functions.get = args->key_value_get;
  functions.put = args->key_value_put;
  functions.store_user_data = args->key_value_user_data;
  const bool gives_store = functions.get != nullptr && functions.put != nullptr;
  call.number = (functions.callback != nullptr ? kGivesCallback : 0) + (gives_store ? kGivesStore : 0);
  call.process_index = args->process_index;
  call.num_processes = args->num_processes;
  call.options = FromAbi(args->options, args->num_options);
  Reply reply;
  link->answerer().Begin(functions);
  Status status = link->Request(call, &reply);
  auto made = std::make_unique<FlagosContext>();
  made->link = link;
  if (status == nullptr && !Adopt(std::move(reply.context), made.get())) {
    status = link->Malformed("a context whose parts do not fit");
  }
  if (status != nullptr) {
    link->answerer().End();
    return status;
  }
  *context = std::move(made);
  return nullptr;
}

FlagosApi CommonTable() {
  FlagosApi api{};
  api.struct_size = sizeof(api);
  api.error_create = ErrorCreate;
  api.error_destroy = ErrorDestroy;
  api.error_describe = ErrorDescribe;
  api.context_destroy = ContextDestroy;
  api.context_describe = ContextDescribe;
  api.device_describe = DeviceDescribe;
  api.device_memory_stats = DeviceMemoryStats;
  api.device_synchronize = DeviceSynchronize;
  api.memory_describe = MemoryDescribe;
  api.profiler_start = ProfilerStart;
  api.profiler_stop = ProfilerStop;
  FillEvents(&api);
  FillBuffers(&api);
  FillTransfers(&api);
  FillExecutables(&api);
  return api;
}

}  // namespace flagos_isolation
