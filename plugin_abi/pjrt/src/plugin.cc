// The plugin itself: its attributes, the slots that nothing stands behind, and the table that GetPjrtApi gives out.
#include "api.h"
#include "entry.h"
#include "flagos/plugin_abi_layout.h"
#include "named_values.h"
#include "profiler.h"

namespace flagos_pjrt {
namespace {

PJRT_Error* NoStream(const char* where) {
  return MakeError(FLAGOS_UNIMPLEMENTED,
                   {where,
                    ": device streams exist only inside recv callbacks, which this device does not take; "
                    "programs reach the host through flagos.host_callback custom calls."});
}

}  // namespace

PJRT_Error* PJRT_Plugin_Initialize(PJRT_Plugin_Initialize_Args*) { return nullptr; }

PJRT_Error* PJRT_Plugin_Attributes(PJRT_Plugin_Attributes_Args* args) {
  // Programs are converted by the very jaxlib that serializes them, so any version that it can write it can read too.
  // It lowers a version beyond its own to its own.
  static constexpr int64_t kNewestStableHlo[] = {1, 9999, 0};
  static constexpr int64_t kOldestStableHlo[] = {0, 9, 0};
  static const PJRT_NamedValue attributes[] = {
      Int64Value("xla_version", 2),
      Int64ListValue("stablehlo_current_version", kNewestStableHlo, 3),
      Int64ListValue("stablehlo_minimum_version", kOldestStableHlo, 3),
  };
  args->attributes = attributes;
  args->num_attributes = sizeof(attributes) / sizeof(attributes[0]);
  return nullptr;
}

PJRT_Error* PJRT_CopyToDeviceStream_Destroy(PJRT_CopyToDeviceStream_Destroy_Args*) {
  return NoStream("PJRT_CopyToDeviceStream_Destroy");
}

PJRT_Error* PJRT_CopyToDeviceStream_AddChunk(PJRT_CopyToDeviceStream_AddChunk_Args*) {
  return NoStream("PJRT_CopyToDeviceStream_AddChunk");
}

PJRT_Error* PJRT_CopyToDeviceStream_TotalBytes(PJRT_CopyToDeviceStream_TotalBytes_Args*) {
  return NoStream("PJRT_CopyToDeviceStream_TotalBytes");
}

PJRT_Error* PJRT_CopyToDeviceStream_GranuleSize(PJRT_CopyToDeviceStream_GranuleSize_Args*) {
  return NoStream("PJRT_CopyToDeviceStream_GranuleSize");
}

PJRT_Error* PJRT_CopyToDeviceStream_CurrentBytes(PJRT_CopyToDeviceStream_CurrentBytes_Args*) {
  return NoStream("PJRT_CopyToDeviceStream_CurrentBytes");
}

namespace {

PJRT_API_FUNCTIONS(FLAGOS_DEFINE_ENTRY)
PJRT_SHARDINGS_FUNCTIONS(FLAGOS_DEFINE_ENTRY)
PJRT_MEMORY_DESCRIPTIONS_FUNCTIONS(FLAGOS_DEFINE_ENTRY)

constexpr PJRT_Extension_Base Extension(PJRT_Extension_Type type, size_t size, const PJRT_Extension_Base* next) {
  return {size, type, const_cast<PJRT_Extension_Base*>(next)};
}

const PJRT_Shardings_Extension kShardings = {
    Extension(PJRT_Extension_Type_Shardings, PJRT_Shardings_Extension_STRUCT_SIZE, nullptr),
    PJRT_SHARDINGS_FUNCTIONS(FLAGOS_LIST_ENTRY)};

const PJRT_MemoryDescriptions_Extension kMemoryDescriptions = {
    Extension(PJRT_Extension_Type_MemoryDescriptions, PJRT_MemoryDescriptions_Extension_STRUCT_SIZE, &kShardings.base),
    PJRT_MEMORY_DESCRIPTIONS_FUNCTIONS(FLAGOS_LIST_ENTRY)};

const PJRT_Profiler_Extension kProfiler = {
    Extension(PJRT_Extension_Type_Profiler, PJRT_Profiler_Extension_STRUCT_SIZE, &kMemoryDescriptions.base),
    const_cast<PLUGIN_Profiler_Api*>(&kProfilerApi), 0};

const PJRT_Api kApi = {PJRT_Api_STRUCT_SIZE,
                       const_cast<PJRT_Extension_Base*>(&kProfiler.base),
                       {PJRT_Api_Version_STRUCT_SIZE, nullptr, PJRT_API_MAJOR, PJRT_API_MINOR},
                       PJRT_API_FUNCTIONS(FLAGOS_LIST_ENTRY)};

}  // namespace
}  // namespace flagos_pjrt

extern "C" __attribute__((visibility("default"))) const PJRT_Api* GetPjrtApi() { return &flagos_pjrt::kApi; }
