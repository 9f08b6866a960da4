// Loaded executables: compiling, loading and launching on devices.
#include <memory>
#include <utility>

#include "api.h"
#include "buffer.h"
#include "event.h"
#include "executable.h"

// A context of executions: nothing in the backend ABI hangs on it.
struct PJRT_ExecuteContext {};

namespace flagos_pjrt {
namespace {

constexpr const char* kExecute = "PJRT_LoadedExecutable_Execute";

PJRT_Error* CheckOptions(const PJRT_ExecuteOptions* options) {
  if (options == nullptr) return nullptr;
  if (options->num_send_ops != 0 || options->num_recv_ops != 0) {
    return MakeError(FLAGOS_UNIMPLEMENTED,
                     {kExecute,
                      ": send and recv callbacks are not supported; programs reach the host through "
                      "flagos.host_callback custom calls."});
  }
  if (FLAGOS_HAS_FIELD(options, PJRT_ExecuteOptions, num_hlo_output_callbacks) &&
      options->num_hlo_output_callbacks != 0) {
    return MakeError(FLAGOS_UNIMPLEMENTED, {kExecute, ": HLO output callbacks are not supported."});
  }
  if (options->multi_slice_config != nullptr) {
    return MakeError(FLAGOS_UNIMPLEMENTED, {kExecute, ": multi-slice configurations are not supported."});
  }
  return nullptr;
}

PJRT_Error* CheckLaunch(const PJRT_LoadedExecutable_Execute_Args& args, const Program& program) {
  FLAGOS_RETURN_IF_ERROR(CheckOptions(args.options));
  if (args.executable->deleted.load(std::memory_order_acquire)) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kExecute, ": executable ", program.name, " has been deleted."});
  }
  if (args.num_args != program.described.num_arguments) {
    return MakeError(FLAGOS_INVALID_ARGUMENT,
                     {kExecute, ": executable ", program.name, " takes ", program.described.num_arguments,
                      " arguments; ", args.num_args, " were given."});
  }
  const size_t expected = args.execute_device != nullptr ? 1 : program.devices.size();
  if (args.num_devices != expected) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kExecute, ": executable ", program.name, " runs on ", expected,
                                               " devices here; argument lists for ", args.num_devices, " were given."});
  }
  if (args.execute_device != nullptr) {
    if (args.execute_device->client != program.client.get() || !args.execute_device->addressable) {
      return MakeError(FLAGOS_INVALID_ARGUMENT,
                       {kExecute, ": the device to execute on is not an addressable device of this client."});
    }
  }
  if (args.output_lists == nullptr || (args.num_args > 0 && args.argument_lists == nullptr)) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kExecute, ": the argument or output lists are NULL."});
  }
  return nullptr;
}

// The launch's handle lists, on the stack for launches of ordinary size.
struct HandleLists {
  HandleLists(size_t num_devices, size_t num_arguments, size_t num_outputs)
      : arguments(num_devices * num_arguments),
        argument_lists(num_devices),
        outputs(num_devices * num_outputs),
        output_lists(num_devices),
        done(num_devices) {
    for (size_t i = 0; i < num_devices; ++i) {
      argument_lists[i] = arguments.data() + i * num_arguments;
      output_lists[i] = outputs.data() + i * num_outputs;
    }
  }
  SmallVector<FlagosBuffer*, 32> arguments;
  SmallVector<FlagosBuffer* const*, 8> argument_lists;
  SmallVector<FlagosBuffer*, 32> outputs;
  SmallVector<FlagosBuffer**, 8> output_lists;
  SmallVector<FlagosEvent*, 8> done;
};

PJRT_Error* ReadArguments(const PJRT_LoadedExecutable_Execute_Args& args, const Program& program, HandleLists* lists) {
  for (size_t i = 0; i < args.num_devices; ++i) {
    for (size_t j = 0; j < args.num_args; ++j) {
      const PJRT_Buffer* argument = args.argument_lists[i][j];
      if (argument == nullptr || argument->client.get() != program.client.get()) {
        return MakeError(FLAGOS_INVALID_ARGUMENT,
                         {kExecute, ": executable ", program.name, ", argument ", j, " for device ", i,
                          argument == nullptr ? " is NULL." : " belongs to another client."});
      }
      lists->arguments[i * args.num_args + j] = argument->get();
    }
  }
  return nullptr;
}

// What a launch gave out and nothing wraps yet: destroyed when wrapping runs out of memory.
struct Unwrapped {
  Unwrapped(const FlagosApi& api, HandleLists* lists, bool with_events) : api(api), lists(lists), events(with_events) {}
  ~Unwrapped() {
    for (size_t i = 0; i < lists->outputs.size(); ++i) {
      if (lists->outputs[i] != nullptr) api.buffer_destroy(lists->outputs[i]);
    }
    for (size_t i = 0; events && i < lists->done.size(); ++i) {
      if (lists->done[i] != nullptr) api.event_destroy(lists->done[i]);
    }
  }
  const FlagosApi& api;
  HandleLists* lists;
  bool events;
};

void WrapOutputs(const Program& program, PJRT_Device* device, Memory* const* memories, FlagosBuffer** handles,
                 PJRT_Buffer** outputs) {
  for (size_t i = 0; i < program.described.num_outputs; ++i) {
    outputs[i] = NewBuffer(program.client.get(), device, memories[i], program.output_types[i], program.output_dims[i],
                           program.described.output_ranks[i], std::exchange(handles[i], nullptr));
  }
}

// The memories of a launch on a device that was chosen for it alone.
PJRT_Error* FindMemories(const Program& program, const PJRT_Device& device, SmallVector<Memory*, 32>* memories) {
  for (size_t i = 0; i < memories->size(); ++i) {
    (*memories)[i] = device.FindMemory(program.described.output_memory_kinds[i]);
    if ((*memories)[i] == nullptr) {
      return MakeError(FLAGOS_INVALID_ARGUMENT,
                       {kExecute, ": device ", device.description.to_string, " has no memory of kind ",
                        program.described.output_memory_kinds[i], ", where output ", i, " lies."});
    }
  }
  return nullptr;
}

PJRT_Error* FinishLoad(Ref<Program> program, PJRT_LoadedExecutable** executable) {
  *executable = new PJRT_LoadedExecutable{std::move(program), {}};
  return nullptr;
}

}  // namespace

PJRT_Error* PJRT_Client_Compile(PJRT_Client_Compile_Args* args) {
  Ref<Program> program;
  FLAGOS_RETURN_IF_ERROR(Compile(args->client, args->program,
                                 std::string_view(args->compile_options, args->compile_options_size),
                                 "PJRT_Client_Compile", &program));
  return FinishLoad(std::move(program), &args->executable);
}

PJRT_Error* PJRT_Client_Load(PJRT_Client_Load_Args* args) {
  constexpr const char* kWhere = "PJRT_Client_Load";
  if (args->executable == nullptr) return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": executable is NULL."});
  const Ref<Program>& compiled = args->executable->program;
  if (compiled->client.get() == args->client) return FinishLoad(compiled, &args->loaded_executable);
  // Compiled in a topology's own context: it moves over in its serialized form.
  std::string serialized;
  FLAGOS_RETURN_IF_ERROR(compiled->Artifact(FLAGOS_ARTIFACT_SERIALIZED, &serialized));
  Ref<Program> program;
  FLAGOS_RETURN_IF_ERROR(Load(args->client, serialized,
                              std::string_view(args->compile_options, args->compile_options_size), kWhere, &program));
  return FinishLoad(std::move(program), &args->loaded_executable);
}

PJRT_Error* PJRT_Executable_DeserializeAndLoad(PJRT_Executable_DeserializeAndLoad_Args* args) {
  Ref<Program> program;
  FLAGOS_RETURN_IF_ERROR(Load(
      args->client, std::string_view(args->serialized_executable, args->serialized_executable_size),
      std::string_view(args->overridden_serialized_compile_options, args->overridden_serialized_compile_options_size),
      "PJRT_Executable_DeserializeAndLoad", &program));
  return FinishLoad(std::move(program), &args->loaded_executable);
}

PJRT_Error* PJRT_LoadedExecutable_Destroy(PJRT_LoadedExecutable_Destroy_Args* args) {
  delete args->executable;
  return nullptr;
}

PJRT_Error* PJRT_LoadedExecutable_GetExecutable(PJRT_LoadedExecutable_GetExecutable_Args* args) {
  args->executable = new PJRT_Executable{args->loaded_executable->program};
  return nullptr;
}

PJRT_Error* PJRT_LoadedExecutable_GetDeviceAssignment(PJRT_LoadedExecutable_GetDeviceAssignment_Args* args) {
  // It lives as long as the executable.
  args->serialized_bytes = args->executable->program->device_assignment.data();
  args->serialized_bytes_size = args->executable->program->device_assignment.size();
  args->serialized_device_assignment = nullptr;
  args->serialized_device_assignment_deleter = [](PJRT_DeviceAssignmentSerialized*) {};
  return nullptr;
}

PJRT_Error* PJRT_LoadedExecutable_AddressableDevices(PJRT_LoadedExecutable_AddressableDevices_Args* args) {
  args->addressable_devices = args->executable->program->devices.data();
  args->num_addressable_devices = args->executable->program->devices.size();
  return nullptr;
}

PJRT_Error* PJRT_LoadedExecutable_AddressableDeviceLogicalIds(
    PJRT_LoadedExecutable_AddressableDeviceLogicalIds_Args* args) {
  args->addressable_device_logical_ids = args->executable->program->logical_ids.data();
  args->num_addressable_device_logical_ids = args->executable->program->logical_ids.size();
  return nullptr;
}

PJRT_Error* PJRT_LoadedExecutable_Delete(PJRT_LoadedExecutable_Delete_Args* args) {
  args->executable->deleted.store(true, std::memory_order_release);
  return nullptr;
}

PJRT_Error* PJRT_LoadedExecutable_IsDeleted(PJRT_LoadedExecutable_IsDeleted_Args* args) {
  args->is_deleted = args->executable->deleted.load(std::memory_order_acquire);
  return nullptr;
}

PJRT_Error* PJRT_LoadedExecutable_Fingerprint(PJRT_LoadedExecutable_Fingerprint_Args* args) {
  args->executable_fingerprint = args->executable->program->fingerprint.data();
  args->executable_fingerprint_size = args->executable->program->fingerprint.size();
  return nullptr;
}

PJRT_Error* PJRT_LoadedExecutable_Execute(PJRT_LoadedExecutable_Execute_Args* args) {
  const Program& program = *args->executable->program;
  FLAGOS_RETURN_IF_ERROR(CheckLaunch(*args, program));
  const size_t num_outputs = program.described.num_outputs;
  SmallVector<Memory*, 32> chosen(args->execute_device != nullptr ? num_outputs : 0);
  if (args->execute_device != nullptr) FLAGOS_RETURN_IF_ERROR(FindMemories(program, *args->execute_device, &chosen));
  HandleLists lists(args->num_devices, args->num_args, num_outputs);
  FLAGOS_RETURN_IF_ERROR(ReadArguments(*args, program, &lists));

  auto execute = MakeArgs<FlagosExecuteArgs>();
  execute.executable = program.handle.get();
  execute.num_devices = args->num_devices;
  execute.num_arguments = args->num_args;
  execute.arguments = lists.argument_lists.data();
  execute.device = args->execute_device != nullptr ? args->execute_device->handle : nullptr;
  execute.outputs = lists.output_lists.data();
  execute.done = args->device_complete_events != nullptr ? lists.done.data() : nullptr;
  if (args->options != nullptr) {
    execute.non_donatable = args->options->non_donatable_input_indices;
    execute.num_non_donatable = args->options->num_non_donatable_input_indices;
    execute.launch_id = args->options->launch_id;
  }
  const FlagosApi& api = *program.client->api;
  FLAGOS_RETURN_IF_ERROR(TakeError(api, api.execute(&execute)));

  const Unwrapped unwrapped(api, &lists, execute.done != nullptr);
  for (size_t i = 0; i < args->num_devices; ++i) {
    PJRT_Device* device = args->execute_device != nullptr ? args->execute_device : program.devices[i];
    Memory* const* memories =
        args->execute_device != nullptr ? chosen.data() : program.output_memories.data() + i * num_outputs;
    WrapOutputs(program, device, memories, lists.output_lists[i], args->output_lists[i]);
    if (execute.done != nullptr) {
      args->device_complete_events[i] = WrapEvent(program.client.get(), std::exchange(lists.done[i], nullptr));
    }
  }
  return nullptr;
}

PJRT_Error* PJRT_ExecuteContext_Create(PJRT_ExecuteContext_Create_Args* args) {
  args->context = new PJRT_ExecuteContext;
  return nullptr;
}

PJRT_Error* PJRT_ExecuteContext_Destroy(PJRT_ExecuteContext_Destroy_Args* args) {
  delete args->context;
  return nullptr;
}

}  // namespace flagos_pjrt
