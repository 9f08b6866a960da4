// The only exported symbol: negotiates a version and hands out the table.
#include <cstdio>

#include "api.h"
#include "call.h"
#include "flagos/build_facts.h"
#include "flagos/plugin_abi_layout.h"
#include "log.h"

namespace {

constexpr uint32_t kVersionMin = FLAGOS_ABI_MAKE_VERSION(1, 0);
constexpr uint32_t kVersionMax = FLAGOS_ABI_VERSION;

constexpr FlagosPluginInfo kInfo = {
    sizeof(FlagosPluginInfo), "flagos",           "flagos",        FLAGOS_BUILD_VERSION,   FLAGOS_BUILD_GIT_REVISION,
    FLAGOS_BUILD_COMPILER,    FLAGOS_BUILD_GLIBC, FLAGOS_BUILD_ID, FLAGOS_BUILD_CXX11_ABI, 1};

namespace api = flagos::api;

constexpr FlagosApi kApi = {
    sizeof(FlagosApi),
    kVersionMax,
    0,
    api::error_create,
    api::error_destroy,
    api::error_describe,
    api::context_create,
    api::context_destroy,
    api::context_describe,
    api::device_describe,
    api::device_memory_stats,
    api::device_synchronize,
    api::memory_describe,
    api::event_create,
    api::event_destroy,
    api::event_set,
    api::event_query,
    api::event_await,
    api::event_on_ready,
    api::buffer_from_host,
    api::buffer_allocate,
    api::buffer_view,
    api::buffer_promise,
    api::buffer_fulfill,
    api::buffer_destroy,
    api::buffer_describe,
    api::buffer_ready_event,
    api::buffer_to_host,
    api::buffer_read_raw,
    api::buffer_write_raw,
    api::buffer_copy,
    api::buffer_bitcast,
    api::buffer_delete,
    api::buffer_hold,
    api::buffer_pointer,
    api::buffer_donate,
    api::compile,
    api::executable_load,
    api::executable_destroy,
    api::executable_describe,
    api::executable_artifact,
    api::execute,
    api::profiler_start,
    api::profiler_stop,
};

// Fills `args` as far as the host's struct reaches.
int32_t Negotiate(FlagosEntryArgs& args) noexcept {
  args.plugin_version_min = kVersionMin;
  args.plugin_version_max = kVersionMax;
  args.info = &kInfo;
  const uint32_t version = args.host_version_max < kVersionMax ? args.host_version_max : kVersionMax;
  if (args.host_version_min > args.host_version_max) {
    args.message = "the host's version range is empty: host_version_min is greater than host_version_max";
    return FLAGOS_ENTRY_FAILED;
  }
  if (version < kVersionMin || version < args.host_version_min) {
    args.message = "no ABI version is spoken by both sides; install a host and a backend whose ranges meet";
    return FLAGOS_ENTRY_INCOMPATIBLE;
  }
  args.version = version;
  args.api = &kApi;
  args.message = nullptr;
  return FLAGOS_ENTRY_OK;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int32_t flagos_plugin_entry(FlagosEntryArgs* host) {
  // Up to the versions there is nothing to negotiate with.
  if (host == nullptr || host->struct_size < offsetof(FlagosEntryArgs, host_name)) return FLAGOS_ENTRY_FAILED;
  FlagosEntryArgs args = flagos::ReadStruct(host);
  args.version = 0;
  args.api = nullptr;
  const int32_t outcome = Negotiate(args);
  if (outcome == FLAGOS_ENTRY_OK) flagos::SetLog(args.log, args.log_user_data, args.log_level);
  std::memcpy(host, &args, flagos::KnownSize(args.struct_size, sizeof(args)));
  return outcome;
}
