// Extensions: shardings of an executable's arguments and outputs, and the memories of described devices.
#include "api.h"
#include "client.h"
#include "executable.h"

namespace flagos_pjrt {

PJRT_Error* PJRT_Shardings_PJRT_Executable_ParameterShardings(
    PJRT_Shardings_PJRT_Executable_ParameterShardings_Args* args) {
  const Program& program = *args->executable->program;
  args->num_parameters = program.described.num_arguments;
  const bool sharded = program.described.argument_shardings != nullptr;
  args->shardings = sharded ? program.argument_shardings.data() : nullptr;
  args->sharding_sizes = sharded ? program.argument_sharding_sizes.data() : nullptr;
  return nullptr;
}

PJRT_Error* PJRT_Shardings_PJRT_Executable_OutputShardings(PJRT_Shardings_PJRT_Executable_OutputShardings_Args* args) {
  const Program& program = *args->executable->program;
  args->num_outputs = program.described.num_outputs;
  const bool sharded = program.described.output_shardings != nullptr;
  args->shardings = sharded ? program.output_shardings.data() : nullptr;
  args->sharding_sizes = sharded ? program.output_sharding_sizes.data() : nullptr;
  return nullptr;
}

PJRT_Error* PJRT_DeviceDescription_MemoryDescriptions(PJRT_DeviceDescription_MemoryDescriptions_Args* args) {
  const PJRT_DeviceDescription& description = *args->device_description;
  args->memory_descriptions = description.memory_pointers.data();
  args->num_memory_descriptions = description.memory_pointers.size();
  args->default_memory_index = description.default_memory_index;
  return nullptr;
}

PJRT_Error* PJRT_MemoryDescription_Kind(PJRT_MemoryDescription_Kind_Args* args) {
  args->kind = args->memory_description->kind.data();
  args->kind_size = args->memory_description->kind.size();
  args->kind_id = args->memory_description->kind_id;
  return nullptr;
}

}  // namespace flagos_pjrt
