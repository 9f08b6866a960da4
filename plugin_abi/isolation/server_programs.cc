// What the child does for calls about executables.
#include <utility>

#include "named_values.h"
#include "server.h"

namespace flagos_isolation {
namespace {

constexpr int64_t kMaxDevices = 1 << 16;

std::string Text(const char* text) { return text == nullptr ? "" : text; }

std::vector<std::string> Texts(const char* const* texts, size_t count) {
  std::vector<std::string> copies;
  for (size_t i = 0; i < count; ++i) copies.push_back(Text(texts[i]));
  return copies;
}

std::vector<std::string> Shardings(const FlagosBytes* shardings, size_t count) {
  std::vector<std::string> copies;
  if (shardings == nullptr) return copies;
  for (size_t i = 0; i < count; ++i) {
    const FlagosBytes& bytes = shardings[i];
    copies.push_back(bytes.data == nullptr ? "" : std::string(static_cast<const char*>(bytes.data), bytes.size));
  }
  return copies;
}

Status NoSuch(const char* what) {
  return MakeStatus(FLAGOS_INVALID_ARGUMENT, std::string("the backend's process has no such ") + what);
}

void AppendBytes(void* sink_data, const void* bytes, size_t size) {
  static_cast<std::string*>(sink_data)->append(static_cast<const char*>(bytes), size);
}

}  // namespace

Server::Program Server::FindProgram(uint64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = programs_.find(id);
  return found == programs_.end() ? Program() : found->second;
}

Status Server::MakeProgram(const Call& call, Reply* reply) {
  if (call.made.size() != 1) return NoSuch("id for what is made");
  Program program;
  Status status;
  if (call.method == Method::kCompile) {
    FlagosCompileArgs args{};
    args.struct_size = sizeof(args);
    args.context = context_;
    args.program = call.data.data();
    args.program_size = call.data.size();
    status = Take(api_.compile(&args));
    program.handle = args.executable;
  } else {
    FlagosExecutableLoadArgs args{};
    args.struct_size = sizeof(args);
    args.context = context_;
    args.serialized = call.data.data();
    args.serialized_size = call.data.size();
    if (call.number != 0) {
      args.device_assignment = call.arguments.data();
      args.num_assigned = call.arguments.size();
    }
    status = Take(api_.executable_load(&args));
    program.handle = args.executable;
  }
  if (status != nullptr) return status;
  status = DescribeProgram(program.handle, &reply->executable);
  if (status != nullptr) {
    api_.executable_destroy(program.handle);
    return status;
  }
  program.num_outputs = reply->executable.output_types.size();
  program.aliases = reply->executable.argument_aliases;
  const std::lock_guard<std::mutex> lock(mutex_);
  programs_[static_cast<uint64_t>(call.made[0])] = std::move(program);
  return nullptr;
}

Status Server::DescribeProgram(FlagosExecutable* executable, Executable* described) {
  FlagosExecutableDescribeArgs args{};
  args.struct_size = sizeof(args);
  args.executable = executable;
  if (Status status = Take(api_.executable_describe(&args)); status != nullptr) return status;
  described->name = Text(args.name);
  described->fingerprint = Text(args.fingerprint);
  described->num_replicas = args.num_replicas;
  described->num_partitions = args.num_partitions;
  for (size_t i = 0; i < args.num_devices; ++i) {
    for (size_t index = 0; index < devices_.size(); ++index) {
      if (devices_[index] == args.devices[i]) described->devices.push_back(static_cast<int64_t>(index));
    }
  }
  const int64_t assigned = args.num_replicas * args.num_partitions;
  described->device_assignment.assign(args.device_assignment, args.device_assignment + assigned);
  size_t extents = 0;
  for (size_t i = 0; i < args.num_outputs; ++i) {
    described->output_types.push_back(args.output_types[i]);
    described->output_ranks.push_back(static_cast<int64_t>(args.output_ranks[i]));
    extents += args.output_ranks[i];
  }
  described->output_dims.assign(args.output_dims, args.output_dims + extents);
  described->argument_aliases.assign(args.argument_aliases, args.argument_aliases + args.num_arguments);
  described->output_memory_kinds = Texts(args.output_memory_kinds, args.num_outputs);
  described->argument_memory_kinds = Texts(args.argument_memory_kinds, args.num_arguments);
  described->output_shardings = Shardings(args.output_shardings, args.num_outputs);
  described->argument_shardings = Shardings(args.argument_shardings, args.num_arguments);
  for (const size_t size : {args.generated_code_bytes, args.argument_bytes, args.output_bytes, args.alias_bytes,
                            args.temporary_bytes, args.peak_bytes}) {
    described->sizes.push_back(static_cast<int64_t>(size));
  }
  described->cost_analysis = FromAbi(args.cost_analysis, args.num_cost_analysis);
  return nullptr;
}

Status Server::Artifact(const Call& call, Reply* reply) {
  FlagosExecutableArtifactArgs args{};
  args.struct_size = sizeof(args);
  args.executable = FindProgram(call.object).handle;
  if (args.executable == nullptr) return NoSuch("executable");
  args.kind = static_cast<int32_t>(call.number);
  args.sink = AppendBytes;
  args.sink_data = &reply->data;
  return Take(api_.executable_artifact(&args));
}

Status Server::Execute(const Call& call, Reply* reply) {
  const Program program = FindProgram(call.object);
  if (program.handle == nullptr) return NoSuch("executable");
  if (call.num_devices < 0 || call.num_devices > kMaxDevices) return NoSuch("number of devices");
  const auto num_devices = static_cast<size_t>(call.num_devices);
  const size_t num_arguments = num_devices == 0 ? 0 : call.arguments.size() / num_devices;
  if (num_arguments * num_devices != call.arguments.size()) return NoSuch("number of arguments");
  std::vector<FlagosBuffer*> arguments;
  for (const int64_t id : call.arguments) {
    arguments.push_back(FindBuffer(static_cast<uint64_t>(id)));
    if (arguments.back() == nullptr) return NoSuch("buffer");
  }
  std::vector<FlagosBuffer*> outputs(num_devices * program.num_outputs);
  std::vector<FlagosEvent*> done(num_devices);
  std::vector<FlagosBuffer* const*> argument_rows;
  std::vector<FlagosBuffer**> output_rows;
  for (size_t device = 0; device < num_devices; ++device) {
    argument_rows.push_back(arguments.data() + device * num_arguments);
    output_rows.push_back(outputs.data() + device * program.num_outputs);
  }
  FlagosExecuteArgs args{};
  args.struct_size = sizeof(args);
  args.executable = program.handle;
  args.num_devices = num_devices;
  args.num_arguments = num_arguments;
  args.arguments = argument_rows.data();
  args.non_donatable = call.non_donatable.data();
  args.num_non_donatable = call.non_donatable.size();
  args.device = FindDevice(call.device);
  if (call.device != 0 && args.device == nullptr) return NoSuch("device");
  args.launch_id = call.launch_id;
  args.outputs = output_rows.data();
  args.done = call.event != 0 ? done.data() : nullptr;
  Status status = Take(api_.execute(&args));
  // Which arguments it took: only those of which the program may reuse the memory.
  for (size_t i = 0; i < arguments.size(); ++i) {
    const size_t argument = i % num_arguments;
    if (argument >= program.aliases.size() || program.aliases[argument] < 0) continue;
    FlagosBufferDescribeArgs described{};
    described.struct_size = sizeof(described);
    described.buffer = arguments[i];
    const Status failed = Take(api_.buffer_describe(&described));
    if (failed == nullptr && described.is_deleted != 0) reply->deleted.push_back(call.arguments[i]);
  }
  if (status != nullptr) return status;
  if (call.event != 0) {
    for (size_t device = 0; device < num_devices; ++device) Tell(done[device], call.event + device, nullptr, reply);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    Status failed = AddBuffer(outputs[i], call, i, reply);
    if (failed != nullptr && status == nullptr) status = failed;
  }
  return status;
}

}  // namespace flagos_isolation
