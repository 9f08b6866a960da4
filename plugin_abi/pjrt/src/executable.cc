// Executables: what a compiled program is, apart from the devices that it is loaded on.
#include "executable.h"

#include <memory>
#include <utility>

#include "api.h"
#include "topology.h"

struct PJRT_SerializedExecutable {
  std::string bytes;
};

struct PJRT_SerializedCompileOptions {
  std::string bytes;
};

namespace flagos_pjrt {
namespace {

int64_t Signed(size_t bytes) { return static_cast<int64_t>(bytes); }

}  // namespace

PJRT_Error* PJRT_Compile(PJRT_Compile_Args* args) {
  constexpr const char* kWhere = "PJRT_Compile";
  PJRT_Client* client = args->client != nullptr ? args->client : args->topology->client;
  if (client == nullptr) {
    return MakeError(FLAGOS_FAILED_PRECONDITION,
                     {kWhere, ": a deserialized topology has no backend to compile with; pass a client as well."});
  }
  FLAGOS_RETURN_IF_ERROR(CheckConverterAnswers(client, kWhere));
  Ref<Program> program;
  FLAGOS_RETURN_IF_ERROR(Compile(
      client, args->program, std::string_view(args->compile_options, args->compile_options_size), kWhere, &program));
  args->executable = new PJRT_Executable{std::move(program)};
  return nullptr;
}

PJRT_Error* PJRT_Executable_Destroy(PJRT_Executable_Destroy_Args* args) {
  delete args->executable;
  return nullptr;
}

PJRT_Error* PJRT_Executable_Name(PJRT_Executable_Name_Args* args) {
  args->executable_name = args->executable->program->name.data();
  args->executable_name_size = args->executable->program->name.size();
  return nullptr;
}

PJRT_Error* PJRT_Executable_NumReplicas(PJRT_Executable_NumReplicas_Args* args) {
  args->num_replicas = static_cast<size_t>(args->executable->program->described.num_replicas);
  return nullptr;
}

PJRT_Error* PJRT_Executable_NumPartitions(PJRT_Executable_NumPartitions_Args* args) {
  args->num_partitions = static_cast<size_t>(args->executable->program->described.num_partitions);
  return nullptr;
}

PJRT_Error* PJRT_Executable_NumOutputs(PJRT_Executable_NumOutputs_Args* args) {
  args->num_outputs = args->executable->program->described.num_outputs;
  return nullptr;
}

PJRT_Error* PJRT_Executable_SizeOfGeneratedCodeInBytes(PJRT_Executable_SizeOfGeneratedCodeInBytes_Args* args) {
  args->size_in_bytes = Signed(args->executable->program->described.generated_code_bytes);
  return nullptr;
}

PJRT_Error* PJRT_Executable_Fingerprint(PJRT_Executable_Fingerprint_Args* args) {
  args->executable_fingerprint = args->executable->program->fingerprint.data();
  args->executable_fingerprint_size = args->executable->program->fingerprint.size();
  return nullptr;
}

PJRT_Error* PJRT_Executable_GetCostAnalysis(PJRT_Executable_GetCostAnalysis_Args* args) {
  args->properties = args->executable->program->cost_analysis.data();
  args->num_properties = args->executable->program->cost_analysis.size();
  return nullptr;
}

PJRT_Error* PJRT_Executable_GetCompiledMemoryStats(PJRT_Executable_GetCompiledMemoryStats_Args* args) {
  const FlagosExecutableDescribeArgs& described = args->executable->program->described;
  args->generated_code_size_in_bytes = Signed(described.generated_code_bytes);
  args->argument_size_in_bytes = Signed(described.argument_bytes);
  args->output_size_in_bytes = Signed(described.output_bytes);
  args->alias_size_in_bytes = Signed(described.alias_bytes);
  args->temp_size_in_bytes = Signed(described.temporary_bytes);
  args->host_generated_code_size_in_bytes = 0;
  args->host_argument_size_in_bytes = 0;
  args->host_output_size_in_bytes = 0;
  args->host_alias_size_in_bytes = 0;
  args->host_temp_size_in_bytes = 0;
  args->peak_memory_in_bytes = Signed(described.peak_bytes);
  const int64_t total = Signed(described.argument_bytes + described.output_bytes + described.temporary_bytes +
                               described.generated_code_bytes - described.alias_bytes);
  args->total_size_in_bytes = total;
  args->total_allocation_bytes = total;
  args->indefinite_allocations = 0;
  args->peak_unpadded_heap_bytes = Signed(described.peak_bytes);
  return nullptr;
}

PJRT_Error* PJRT_Executable_OutputElementTypes(PJRT_Executable_OutputElementTypes_Args* args) {
  args->output_types = args->executable->program->output_types.data();
  args->num_output_types = args->executable->program->output_types.size();
  return nullptr;
}

PJRT_Error* PJRT_Executable_OutputDimensions(PJRT_Executable_OutputDimensions_Args* args) {
  const FlagosExecutableDescribeArgs& described = args->executable->program->described;
  args->num_outputs = described.num_outputs;
  args->dims = described.output_dims;
  args->dim_sizes = described.output_ranks;
  return nullptr;
}

PJRT_Error* PJRT_Executable_ParameterMemoryKinds(PJRT_Executable_ParameterMemoryKinds_Args* args) {
  const Program& program = *args->executable->program;
  args->num_parameters = program.described.num_arguments;
  args->memory_kinds = program.described.argument_memory_kinds;
  args->memory_kind_sizes = program.argument_memory_kind_sizes.data();
  return nullptr;
}

PJRT_Error* PJRT_Executable_OutputMemoryKinds(PJRT_Executable_OutputMemoryKinds_Args* args) {
  const Program& program = *args->executable->program;
  args->num_outputs = program.described.num_outputs;
  args->memory_kinds = program.described.output_memory_kinds;
  args->memory_kind_sizes = program.output_memory_kind_sizes.data();
  return nullptr;
}

PJRT_Error* PJRT_Executable_OptimizedProgram(PJRT_Executable_OptimizedProgram_Args* args) {
  constexpr const char* kWhere = "PJRT_Executable_OptimizedProgram";
  constexpr std::string_view kFormat = "hlo_with_config";
  if (args->program == nullptr) return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": program is NULL."});
  std::string_view module;
  FLAGOS_RETURN_IF_ERROR(args->executable->program->OptimizedModule(&module));
  PJRT_Program& program = *args->program;
  program.format = kFormat.data();
  program.format_size = kFormat.size();
  // The first call asks for the size, the second brings the memory.
  if (program.code != nullptr) {
    if (program.code_size < module.size()) {
      return MakeError(FLAGOS_INVALID_ARGUMENT,
                       {kWhere, ": code has ", program.code_size, " bytes, the program needs ", module.size(), "."});
    }
    module.copy(program.code, module.size());
  }
  program.code_size = module.size();
  return nullptr;
}

PJRT_Error* PJRT_Executable_Serialize(PJRT_Executable_Serialize_Args* args) {
  auto serialized = std::make_unique<PJRT_SerializedExecutable>();
  FLAGOS_RETURN_IF_ERROR(args->executable->program->Artifact(FLAGOS_ARTIFACT_SERIALIZED, &serialized->bytes));
  args->serialized_bytes = serialized->bytes.data();
  args->serialized_bytes_size = serialized->bytes.size();
  args->serialized_executable_deleter = [](PJRT_SerializedExecutable* executable) { delete executable; };
  args->serialized_executable = serialized.release();
  return nullptr;
}

PJRT_Error* PJRT_Executable_GetCompileOptions(PJRT_Executable_GetCompileOptions_Args* args) {
  auto options = std::make_unique<PJRT_SerializedCompileOptions>();
  FLAGOS_RETURN_IF_ERROR(args->executable->program->Artifact(FLAGOS_ARTIFACT_COMPILE_OPTIONS, &options->bytes));
  args->serialized_bytes = options->bytes.data();
  args->serialized_bytes_size = options->bytes.size();
  args->serialized_compile_options_deleter = [](PJRT_SerializedCompileOptions* given) { delete given; };
  args->serialized_compile_options = options.release();
  return nullptr;
}

}  // namespace flagos_pjrt
