// Programs: from a framework's graph, through the host's converter, to a backend executable and its description.
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "api.h"
#include "element_type.h"
#include "executable.h"
#include "named_values.h"
#include "proto.h"

namespace flagos_pjrt {
namespace {

void AppendTo(void* sink_data, const void* bytes, size_t size) {
  static_cast<std::string*>(sink_data)->append(static_cast<const char*>(bytes), size);
}

// The last answer counts.
void Assign(void* sink_data, const void* bytes, size_t size) {
  static_cast<std::string*>(sink_data)->assign(static_cast<const char*>(bytes), size);
}

void Ignore(void*, const void*, size_t) {}

// How long PJRT_Compile waits for the converter to answer anything at all.
constexpr std::chrono::seconds kConverterPatience{10};

struct Probe {
  std::mutex mutex;
  std::condition_variable answered;
  bool done = false;
};

PJRT_Error* Convert(PJRT_Client* client, const PJRT_Program& source, std::string_view options, const char* where,
                    std::string* converted) {
  const std::string_view format(source.format, source.format_size);
  if (format != "mlir" && format != "hlo") {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {"Unknown program format '", format, "'."});
  }
  if (source.code == nullptr || source.code_size == 0) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": the program is empty."});
  }
  if (!IsWellFormedProto(options)) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": failed to deserialize CompileOptionsProto"});
  }
  if (client->converter == nullptr) {
    return MakeError(FLAGOS_FAILED_PRECONDITION,
                     {where, ": this client was created without the option \"flagos_converter\", so nothing turns a ",
                      format, " program into a flagos.Program."});
  }
  const int32_t code = client->converter(nullptr, format.data(), format.size(), source.code, source.code_size,
                                         options.data(), options.size(), &Assign, converted);
  if (code == FLAGOS_OK) return nullptr;
  return MakeError(code, *converted);
}

// The sharing of state with the probing thread keeps it valid for a probe that is answered too late.
bool Answers(FlagosGraphConverter converter) {
  auto probe = std::make_shared<Probe>();
  std::thread([probe, converter] {
    converter(nullptr, "", 0, "", 0, "", 0, &Ignore, nullptr);
    const std::lock_guard<std::mutex> lock(probe->mutex);
    probe->done = true;
    probe->answered.notify_all();
  }).detach();
  std::unique_lock<std::mutex> lock(probe->mutex);
  return probe->answered.wait_for(lock, kConverterPatience, [&] { return probe->done; });
}

void ReadShardings(const FlagosBytes* bytes, size_t count, std::vector<const char*>* shardings,
                   std::vector<size_t>* sizes) {
  for (size_t i = 0; bytes != nullptr && i < count; ++i) {
    // Empty bytes are a sharding as well: replicated.
    shardings->push_back(bytes[i].data != nullptr ? static_cast<const char*>(bytes[i].data) : "");
    sizes->push_back(bytes[i].size);
  }
}

void ReadSizes(const char* const* texts, size_t count, std::vector<size_t>* sizes) {
  for (size_t i = 0; i < count; ++i) sizes->push_back(std::strlen(texts[i]));
}

}  // namespace

Program::Program(PJRT_Client* client, OwnedExecutable handle)
    : client(Ref<PJRT_Client>::Share(client)),
      handle(std::move(handle)),
      described(MakeArgs<FlagosExecutableDescribeArgs>()) {}

PJRT_Error* Program::Create(PJRT_Client* client, OwnedExecutable handle, Ref<Program>* program) {
  auto created = Ref<Program>::Adopt(new Program(client, std::move(handle)));
  FlagosExecutableDescribeArgs& described = created->described;
  described.executable = created->handle.get();
  FLAGOS_RETURN_IF_ERROR(TakeError(*client->api, client->api->executable_describe(&described)));
  created->name = described.name;
  created->fingerprint = described.fingerprint;
  FLAGOS_RETURN_IF_ERROR(created->ReadDevices());
  FLAGOS_RETURN_IF_ERROR(created->ReadOutputs());
  ReadSizes(described.argument_memory_kinds, described.num_arguments, &created->argument_memory_kind_sizes);
  ReadShardings(described.output_shardings, described.num_outputs, &created->output_shardings,
                &created->output_sharding_sizes);
  ReadShardings(described.argument_shardings, described.num_arguments, &created->argument_shardings,
                &created->argument_sharding_sizes);
  created->cost_analysis = ToPjrtValues(described.cost_analysis, described.num_cost_analysis);
  *program = std::move(created);
  return nullptr;
}

PJRT_Error* Program::ReadDevices() {
  const DeviceAssignment assignment{
      described.num_replicas, described.num_partitions,
      std::vector<int64_t>(described.device_assignment,
                           described.device_assignment + described.num_replicas * described.num_partitions)};
  device_assignment = SerializeDeviceAssignment(assignment);
  for (size_t i = 0; i < described.num_devices; ++i) {
    PJRT_Device* device = client->FindDevice(described.devices[i]);
    if (device == nullptr) {
      return MakeError(FLAGOS_INTERNAL, {"Executable ", name, ": its device ", i, " is unknown to the client."});
    }
    devices.push_back(device);
    for (size_t slot = 0; slot < assignment.ids.size(); ++slot) {
      if (assignment.ids[slot] != device->description.id) continue;
      const auto position = static_cast<int64_t>(slot);
      logical_ids.push_back({static_cast<int>(position / described.num_partitions),
                             static_cast<int>(position % described.num_partitions)});
      break;
    }
  }
  if (logical_ids.size() != devices.size()) {
    return MakeError(FLAGOS_INTERNAL, {"Executable ", name, ": its devices are not those of its device assignment."});
  }
  return nullptr;
}

PJRT_Error* Program::ReadOutputs() {
  const int64_t* dims = described.output_dims;
  for (size_t i = 0; i < described.num_outputs; ++i) {
    output_types.push_back(ToPjrtType(described.output_types[i]));
    if (output_types.back() == PJRT_Buffer_Type_INVALID) {
      return MakeError(FLAGOS_INTERNAL, {"Executable ", name, ": output ", i, " has the unknown element type ",
                                         described.output_types[i], "."});
    }
    output_dims.push_back(dims);
    dims += described.output_ranks[i];
  }
  ReadSizes(described.output_memory_kinds, described.num_outputs, &output_memory_kind_sizes);
  for (const PJRT_Device* device : devices) {
    for (size_t i = 0; i < described.num_outputs; ++i) {
      Memory* memory = device->FindMemory(described.output_memory_kinds[i]);
      if (memory == nullptr) {
        return MakeError(FLAGOS_INTERNAL, {"Executable ", name, ": output ", i, " lies in memory kind ",
                                           described.output_memory_kinds[i], ", which device ",
                                           device->description.to_string, " does not have."});
      }
      output_memories.push_back(memory);
    }
  }
  return nullptr;
}

PJRT_Error* Program::Artifact(int32_t kind, std::string* bytes) const {
  auto args = MakeArgs<FlagosExecutableArtifactArgs>();
  args.executable = handle.get();
  args.kind = kind;
  args.sink = &AppendTo;
  args.sink_data = bytes;
  return TakeError(*client->api, client->api->executable_artifact(&args));
}

PJRT_Error* Program::OptimizedModule(std::string_view* module) {
  const std::lock_guard<std::mutex> lock(optimized_mutex_);
  if (optimized_.empty()) {
    std::string program;
    FLAGOS_RETURN_IF_ERROR(Artifact(FLAGOS_ARTIFACT_OPTIMIZED_PROGRAM, &program));
    optimized_ = ModuleWithConfig(program, described.num_replicas, described.num_partitions);
    if (optimized_.empty()) {
      return MakeError(FLAGOS_INTERNAL, {"Executable ", name, ": the backend's optimized program has no module."});
    }
  }
  *module = optimized_;
  return nullptr;
}

PJRT_Error* Compile(PJRT_Client* client, const PJRT_Program* source, std::string_view options, const char* where,
                    Ref<Program>* program) {
  if (source == nullptr) return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": the program is NULL."});
  std::string converted;
  FLAGOS_RETURN_IF_ERROR(Convert(client, *source, options, where, &converted));
  auto compile = MakeArgs<FlagosCompileArgs>();
  compile.context = client->context;
  compile.program = converted.data();
  compile.program_size = converted.size();
  FLAGOS_RETURN_IF_ERROR(TakeError(*client->api, client->api->compile(&compile)));
  return Program::Create(client, OwnedExecutable(compile.executable, Destroyer{client->api}), program);
}

PJRT_Error* CheckConverterAnswers(PJRT_Client* client, const char* where) {
  if (client->converter == nullptr || Answers(client->converter)) return nullptr;
  return MakeError(FLAGOS_FAILED_PRECONDITION,
                   {where,
                    ": the caller keeps the Python interpreter locked while it waits for this compilation, which "
                    "needs the interpreter. jaxlib does so when it compiles for a topology without devices; "
                    "compile for this process's devices instead, with jax.jit(f).lower(...).compile()."});
}

PJRT_Error* Load(PJRT_Client* client, std::string_view serialized, std::string_view options, const char* where,
                 Ref<Program>* program) {
  DeviceAssignment assignment;
  if (!FindDeviceAssignment(options, &assignment)) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": failed to deserialize CompileOptionsProto"});
  }
  auto load = MakeArgs<FlagosExecutableLoadArgs>();
  load.context = client->context;
  load.serialized = serialized.data();
  load.serialized_size = serialized.size();
  if (!assignment.ids.empty()) {
    load.device_assignment = assignment.ids.data();
    load.num_assigned = assignment.ids.size();
  }
  FLAGOS_RETURN_IF_ERROR(TakeError(*client->api, client->api->executable_load(&load)));
  return Program::Create(client, OwnedExecutable(load.executable, Destroyer{client->api}), program);
}

}  // namespace flagos_pjrt
