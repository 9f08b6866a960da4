// The host's side of executables. A description comes once, with the executable.
#include <utility>

#include "objects.h"

namespace flagos_isolation {
namespace {

// Whether the lists of a description have the lengths that its counts promise.
bool IsConsistent(const Executable& described, size_t num_devices) {
  const size_t outputs = described.output_types.size();
  const size_t arguments = described.argument_memory_kinds.size();
  const auto is_optional = [](const auto& list, size_t size) { return list.empty() || list.size() == size; };
  int64_t assigned = 0;
  if (described.num_replicas < 0 || described.num_partitions < 0 ||
      __builtin_mul_overflow(described.num_replicas, described.num_partitions, &assigned) ||
      described.device_assignment.size() != static_cast<uint64_t>(assigned)) {
    return false;
  }
  size_t extents = 0;
  for (const int64_t rank : described.output_ranks) {
    if (rank < 0 || static_cast<uint64_t>(rank) > described.output_dims.size()) return false;
    extents += static_cast<size_t>(rank);
  }
  for (const int64_t type : described.output_types) {
    if (type < 0 || type > INT32_MAX || ElementSize(static_cast<int32_t>(type)) < 0) return false;
  }
  for (const int64_t device : described.devices) {
    if (device < 0 || static_cast<uint64_t>(device) >= num_devices) return false;
  }
  return described.output_ranks.size() == outputs && described.output_memory_kinds.size() == outputs &&
         extents == described.output_dims.size() && described.argument_aliases.size() == arguments &&
         is_optional(described.output_shardings, outputs) && is_optional(described.argument_shardings, arguments) &&
         described.sizes.size() == kNumSizes;
}

std::vector<const char*> Texts(const std::vector<std::string>& strings) {
  std::vector<const char*> texts;
  for (const std::string& string : strings) texts.push_back(string.c_str());
  return texts;
}

std::vector<FlagosBytes> Shardings(const std::vector<std::string>& strings) {
  std::vector<FlagosBytes> shardings;
  for (const std::string& string : strings) {
    shardings.push_back({string.empty() ? nullptr : string.data(), string.size()});
  }
  return shardings;
}

Status RequestExecutable(FlagosContext* context, Call* call, FlagosExecutable** executable) {
  const uint64_t id = context->link->NewIds();
  call->made = {static_cast<int64_t>(id)};
  Reply reply;
  FLAGOS_RETURN_IF_ERROR(context->link->Request(*call, &reply));
  if (!IsConsistent(reply.executable, context->devices.size())) {
    return context->link->Malformed("an executable whose parts do not fit");
  }
  auto made = std::make_unique<FlagosExecutable>();
  made->context = context;
  made->id = id;
  made->described = std::move(reply.executable);
  const Executable& described = made->described;
  for (const int64_t index : described.devices) {
    made->devices.push_back(context->devices[static_cast<size_t>(index)].get());
  }
  for (const int64_t type : described.output_types) made->output_types.push_back(static_cast<int32_t>(type));
  for (const int64_t rank : described.output_ranks) made->output_ranks.push_back(static_cast<size_t>(rank));
  made->output_memory_kinds = Texts(described.output_memory_kinds);
  made->argument_memory_kinds = Texts(described.argument_memory_kinds);
  made->output_shardings = Shardings(described.output_shardings);
  made->argument_shardings = Shardings(described.argument_shardings);
  made->cost_analysis = ToAbi(described.cost_analysis);
  *executable = made.release();
  return nullptr;
}

FlagosError* Compile(FlagosCompileArgs* args) {
  return Enter("compile", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("compile", executable);
    FLAGOS_NEED(args->context != nullptr, "compile: no context");
    FLAGOS_NEED(args->program != nullptr || args->program_size == 0, "compile: the program is missing");
    Call call;
    call.method = Method::kCompile;
    call.data.assign(static_cast<const char*>(args->program), args->program_size);
    return RequestExecutable(args->context, &call, &args->executable);
  });
}

FlagosError* ExecutableLoad(FlagosExecutableLoadArgs* args) {
  return Enter("executable_load", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("executable_load", executable);
    FLAGOS_NEED(args->context != nullptr, "executable_load: no context");
    FLAGOS_NEED(args->serialized != nullptr || args->serialized_size == 0,
                "executable_load: the executable is missing");
    Call call;
    call.method = Method::kExecutableLoad;
    call.data.assign(static_cast<const char*>(args->serialized), args->serialized_size);
    if (args->device_assignment != nullptr) {
      call.number = 1;
      call.arguments.assign(args->device_assignment, args->device_assignment + args->num_assigned);
    }
    return RequestExecutable(args->context, &call, &args->executable);
  });
}

void ExecutableDestroy(FlagosExecutable* executable) {
  if (executable == nullptr) return;
  Call call;
  call.method = Method::kExecutableDestroy;
  call.object = executable->id;
  executable->context->link->Post(call);
  delete executable;
}

FlagosError* ExecutableDescribe(FlagosExecutableDescribeArgs* args) {
  return Enter("executable_describe", args, [&]() -> Status {
    FLAGOS_NEED(args->executable != nullptr, "executable_describe: no executable");
    const FlagosExecutable& executable = *args->executable;
    const Executable& described = executable.described;
    args->name = described.name.c_str();
    args->fingerprint = described.fingerprint.c_str();
    args->num_replicas = described.num_replicas;
    args->num_partitions = described.num_partitions;
    args->devices = executable.devices.data();
    args->num_devices = executable.devices.size();
    args->device_assignment = described.device_assignment.data();
    args->num_arguments = executable.argument_memory_kinds.size();
    args->num_outputs = executable.output_types.size();
    args->output_types = executable.output_types.data();
    args->output_dims = described.output_dims.data();
    args->output_ranks = executable.output_ranks.data();
    args->output_memory_kinds = executable.output_memory_kinds.data();
    args->argument_memory_kinds = executable.argument_memory_kinds.data();
    args->output_shardings = described.output_shardings.empty() ? nullptr : executable.output_shardings.data();
    args->argument_shardings = described.argument_shardings.empty() ? nullptr : executable.argument_shardings.data();
    args->argument_aliases = described.argument_aliases.data();
    const auto size = [&](size_t which) { return static_cast<size_t>(described.sizes[which]); };
    args->generated_code_bytes = size(0);
    args->argument_bytes = size(1);
    args->output_bytes = size(2);
    args->alias_bytes = size(3);
    args->temporary_bytes = size(4);
    args->peak_bytes = size(5);
    args->cost_analysis = executable.cost_analysis.data();
    args->num_cost_analysis = executable.cost_analysis.size();
    return nullptr;
  });
}

FlagosError* ExecutableArtifact(FlagosExecutableArtifactArgs* args) {
  return Enter("executable_artifact", args, [&]() -> Status {
    FLAGOS_NEED(args->executable != nullptr && args->sink != nullptr, "executable_artifact: no executable or no sink");
    Call call;
    call.method = Method::kExecutableArtifact;
    call.object = args->executable->id;
    call.number = args->kind;
    Reply reply;
    FLAGOS_RETURN_IF_ERROR(args->executable->context->link->Request(call, &reply));
    args->sink(args->sink_data, reply.data.data(), reply.data.size());
    return nullptr;
  });
}

// The buffers that the child made, as handles; all or none.
Status TakeOutputs(const FlagosExecuteArgs& args, FlagosContext* context, uint64_t first, std::vector<Buffer> made) {
  std::vector<FlagosBuffer*> buffers;
  Status status;
  for (size_t i = 0; i < made.size() && status == nullptr; ++i) {
    FlagosBuffer* buffer = nullptr;
    status = NewBuffer(context, first + i, std::move(made[i]), &buffer);
    if (status == nullptr) buffers.push_back(buffer);
  }
  if (status != nullptr) {
    for (FlagosBuffer* buffer : buffers) delete buffer;
    return status;
  }
  const size_t outputs = args.executable->output_types.size();
  for (size_t i = 0; i < buffers.size(); ++i) args.outputs[i / outputs][i % outputs] = buffers[i];
  return nullptr;
}

FlagosError* Execute(FlagosExecuteArgs* args) {
  return Enter("execute", args, [&]() -> Status {
    FLAGOS_NEED(args->executable != nullptr, "execute: no executable");
    FLAGOS_NEED(args->arguments != nullptr || args->num_devices == 0, "execute: the arguments are missing");
    FLAGOS_NEED(args->non_donatable != nullptr || args->num_non_donatable == 0, "execute: non_donatable is missing");
    FlagosContext* context = args->executable->context;
    Link& link = *context->link;
    const size_t outputs = args->executable->output_types.size();
    FLAGOS_NEED(args->outputs != nullptr || outputs == 0 || args->num_devices == 0,
                "execute: no place for the outputs");
    FLAGOS_NEED(args->device == nullptr || args->device->context == context,
                "execute: the device is of another context");
    Call call;
    call.method = Method::kExecute;
    call.object = args->executable->id;
    call.num_devices = static_cast<int64_t>(args->num_devices);
    call.launch_id = args->launch_id;
    call.device = args->device != nullptr ? args->device->index + 1 : 0;
    call.non_donatable.assign(args->non_donatable, args->non_donatable + args->num_non_donatable);
    std::vector<FlagosBuffer*> given;
    for (size_t device = 0; device < args->num_devices; ++device) {
      for (size_t i = 0; i < args->num_arguments; ++i) {
        FlagosBuffer* buffer = args->arguments[device][i];
        FLAGOS_NEED(buffer != nullptr && buffer->context == context,
                    "execute: argument " + std::to_string(i) + " is missing or of another context");
        given.push_back(buffer);
        call.arguments.push_back(static_cast<int64_t>(buffer->id));
      }
    }
    const size_t made = args->num_devices * outputs;
    const uint64_t first = link.NewIds(made + 1);
    call.made = {static_cast<int64_t>(first)};
    std::vector<std::shared_ptr<EventState>> done;
    if (args->done != nullptr) {
      call.event = link.NewIds(args->num_devices);
      for (size_t device = 0; device < args->num_devices; ++device) done.push_back(link.Expect(call.event + device));
    }
    Reply reply;
    Status status = link.Request(call, &reply);
    for (const int64_t id : reply.deleted) {
      for (FlagosBuffer* buffer : given) {
        if (buffer->id == static_cast<uint64_t>(id)) buffer->is_deleted = true;
      }
    }
    if (status == nullptr && reply.buffers.size() != made) status = link.Malformed("other outputs than a launch has");
    if (status == nullptr) status = TakeOutputs(*args, context, first, std::move(reply.buffers));
    for (size_t device = 0; device < done.size(); ++device) {
      if (status != nullptr) {
        link.Complete(call.event + device, status, {});
      } else {
        args->done[device] = NewEvent(context, done[device], call.event + device);
      }
    }
    return status;
  });
}

}  // namespace

void FillExecutables(FlagosApi* api) {
  api->compile = Compile;
  api->executable_load = ExecutableLoad;
  api->executable_destroy = ExecutableDestroy;
  api->executable_describe = ExecutableDescribe;
  api->executable_artifact = ExecutableArtifact;
  api->execute = Execute;
}

}  // namespace flagos_isolation
