#include "executable.h"

#include <cinttypes>

#include "api.h"
#include "call.h"
#include "log.h"

namespace flagos {
namespace {

std::vector<FlagosBytes> Borrow(const std::vector<std::string>& texts) {
  std::vector<FlagosBytes> bytes;
  for (const std::string& text : texts) bytes.push_back({text.data(), text.size()});
  return bytes;
}

Memory* FindMemory(const Device& device, const std::string& kind) {
  if (kind.empty()) return device.default_memory();
  for (Memory* memory : device.memories) {
    if (memory->kind == kind) return memory;
  }
  Fail(FLAGOS_INVALID_ARGUMENT,
       "the program places a value in '%s' memory, which %s does not have; its kinds are 'device', "
       "'pinned_host' and 'unpinned_host'",
       kind.c_str(), device.debug_string.c_str());
}

FlagosNamedValue Cost(const std::pair<std::string, double>& cost) {
  FlagosNamedValue value{};
  value.struct_size = sizeof(value);
  value.name = cost.first.c_str();
  value.name_size = cost.first.size();
  value.kind = FLAGOS_VALUE_DOUBLE;
  value.double_value = cost.second;
  value.value_size = 1;
  return value;
}

}  // namespace
}  // namespace flagos

using flagos::Fail;

FlagosExecutable::FlagosExecutable(flagos::Context* context_, std::unique_ptr<flagos::Program> program_)
    : context(flagos::Ref<flagos::Context>::Share(context_)), program(std::move(program_)) {
  const flagos::ProgramInfo& info = this->info();
  for (const flagos::Shape& shape : info.arguments) launch_bytes_ += shape.bytes;
  for (const flagos::Shape& shape : info.outputs) launch_bytes_ += shape.bytes;
  for (size_t i = 0; i < info.device_assignment.size(); ++i) {
    const int64_t id = info.device_assignment[i];
    flagos::Device* device = context->FindDevice(id);
    if (device == nullptr) {
      Fail(FLAGOS_INVALID_ARGUMENT,
           "the program is compiled for device %" PRId64
           ", but the context has the devices 0 to %zu; set "
           "FLAGOS_NUM_CPU_DEVICES for more",
           id, context->devices.size() - 1);
    }
    if (!device->addressable()) continue;
    const auto index = static_cast<int64_t>(i);
    places.push_back({device, index / info.num_partitions, index % info.num_partitions});
    devices_.push_back(device);
    output_memories.push_back(OutputMemories(*device));
    for (const std::string& kind : info.argument_memory_kinds) flagos::FindMemory(*device, kind);
  }
  if (places.empty()) {
    Fail(FLAGOS_INVALID_ARGUMENT,
         "the program is compiled for devices of other processes only; assign one of this process");
  }
  for (const flagos::Shape& shape : info.arguments) argument_bytes_ += shape.bytes;
  for (const flagos::Shape& shape : info.outputs) {
    output_bytes_ += shape.bytes;
    output_types_.push_back(shape.type);
    output_ranks_.push_back(shape.dims.rank());
    output_dims_.insert(output_dims_.end(), shape.dims.data(), shape.dims.data() + shape.dims.rank());
  }
  for (size_t i = 0; i < info.arguments.size(); ++i) {
    if (info.argument_aliases[i] >= 0) alias_bytes_ += info.arguments[i].bytes;
  }
  const char* standard = places[0].device->default_memory()->kind.c_str();
  for (const std::string& kind : info.argument_memory_kinds) {
    argument_kinds_.push_back(kind.empty() ? standard : kind.c_str());
  }
  for (const std::string& kind : info.output_memory_kinds) {
    output_kinds_.push_back(kind.empty() ? standard : kind.c_str());
  }
  argument_shardings_ = flagos::Borrow(info.argument_shardings);
  output_shardings_ = flagos::Borrow(info.output_shardings);
  for (const auto& cost : info.costs) costs_.push_back(flagos::Cost(cost));
}

std::vector<flagos::Memory*> FlagosExecutable::OutputMemories(const flagos::Device& device) const {
  std::vector<flagos::Memory*> memories;
  for (const std::string& kind : info().output_memory_kinds) memories.push_back(flagos::FindMemory(device, kind));
  return memories;
}

void FlagosExecutable::Describe(FlagosExecutableDescribeArgs& args) const {
  const flagos::ProgramInfo& info = this->info();
  args.name = info.name.c_str();
  args.fingerprint = info.fingerprint.c_str();
  args.num_replicas = info.num_replicas;
  args.num_partitions = info.num_partitions;
  args.devices = devices_.data();
  args.num_devices = devices_.size();
  args.device_assignment = info.device_assignment.data();
  args.num_arguments = info.arguments.size();
  args.num_outputs = info.outputs.size();
  args.output_types = output_types_.data();
  args.output_dims = output_dims_.data();
  args.output_ranks = output_ranks_.data();
  args.output_memory_kinds = output_kinds_.data();
  args.argument_memory_kinds = argument_kinds_.data();
  args.output_shardings = output_shardings_.empty() ? nullptr : output_shardings_.data();
  args.argument_shardings = argument_shardings_.empty() ? nullptr : argument_shardings_.data();
  args.argument_aliases = info.argument_aliases.data();
  args.generated_code_bytes = info.generated_code_bytes;
  args.argument_bytes = argument_bytes_;
  args.output_bytes = output_bytes_;
  args.alias_bytes = alias_bytes_;
  args.temporary_bytes = info.temporary_bytes;
  args.peak_bytes = info.peak_bytes;
  args.cost_analysis = costs_.data();
  args.num_cost_analysis = costs_.size();
}

namespace flagos::api {

FlagosError* compile(FlagosCompileArgs* host) {
  return Enter("compile", host, [](FlagosCompileArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, executable);
    FLAGOS_REQUIRE(args, context);
    if (args.program == nullptr || args.program_size == 0) {
      Fail(FLAGOS_INVALID_ARGUMENT, "compile: the program is empty; pass a serialized flagos.Program");
    }
    ScopedSpan span(args.context->profiler, SpanCategory::kCompile, "compile", {});
    auto executable = Make<Executable>(args.context, CompileProgram(args.context, args.program, args.program_size));
    span.Rename("compile " + executable->info().name);
    span.End();
    Log(FLAGOS_LOG_INFO, "compiled %s: %zu arguments, %zu outputs, %zu devices%s", executable->info().name.c_str(),
        executable->info().arguments.size(), executable->info().outputs.size(), executable->places.size(),
        executable->info().is_small ? ", runs in the caller's thread" : "");
    args.executable = executable.Detach();
  });
}

FlagosError* executable_load(FlagosExecutableLoadArgs* host) {
  return Enter("executable_load", host, [](FlagosExecutableLoadArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, executable);
    FLAGOS_REQUIRE(args, context);
    if (args.serialized == nullptr || args.serialized_size == 0) {
      Fail(FLAGOS_INVALID_ARGUMENT, "executable_load: there are no bytes; pass what executable_artifact gave");
    }
    std::vector<int64_t> assignment;
    if (args.device_assignment != nullptr) {
      assignment.assign(args.device_assignment, args.device_assignment + args.num_assigned);
    }
    ScopedSpan span(args.context->profiler, SpanCategory::kCompile, "executable_load", {});
    auto program = LoadProgram(args.context, args.serialized, args.serialized_size, assignment);
    args.executable = Make<Executable>(args.context, std::move(program)).Detach();
  });
}

void executable_destroy(FlagosExecutable* executable) {
  if (executable != nullptr) executable->Release();
}

FlagosError* executable_describe(FlagosExecutableDescribeArgs* host) {
  return Enter("executable_describe", host, [](FlagosExecutableDescribeArgs& args) {
    FLAGOS_REQUIRE(args, executable);
    args.executable->Describe(args);
  });
}

FlagosError* executable_artifact(FlagosExecutableArtifactArgs* host) {
  return Enter("executable_artifact", host, [](FlagosExecutableArtifactArgs& args) {
    FLAGOS_REQUIRE(args, executable);
    FLAGOS_REQUIRE(args, sink);
    if (args.kind < FLAGOS_ARTIFACT_SERIALIZED || args.kind > FLAGOS_ARTIFACT_COMPILE_OPTIONS) {
      Fail(FLAGOS_INVALID_ARGUMENT, "executable_artifact: kind %d is unknown; see FLAGOS_ARTIFACT_*", args.kind);
    }
    const std::string bytes = args.executable->program->Artifact(args.kind);
    args.sink(args.sink_data, bytes.data(), bytes.size());
  });
}

}  // namespace flagos::api
