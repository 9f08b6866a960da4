/* The library's one export. It agrees on a version of the ABI and gives the table; nothing of the chip is touched yet. */
#include "table.h"

static FlagosApi table = SAMPLE_TABLE(sizeof(FlagosApi));
static const FlagosPluginInfo info = SAMPLE_INFO;

__attribute__((visibility("default"))) int32_t flagos_plugin_entry(FlagosEntryArgs* args) {
  const uint32_t min = FLAGOS_ABI_MAKE_VERSION(FLAGOS_ABI_MAJOR, SAMPLE_MIN_MINOR);
  const uint32_t max = FLAGOS_ABI_MAKE_VERSION(FLAGOS_ABI_MAJOR, SAMPLE_MAX_MINOR);
  args->plugin_version_min = min;
  args->plugin_version_max = max;
  args->info = &info;
  if (args->host_version_max < min || args->host_version_min > max) {
    args->message = "the versions do not meet; install builds of one time";
    return FLAGOS_ENTRY_INCOMPATIBLE;
  }
  table.version = args->host_version_max < max ? args->host_version_max : max;
  args->version = table.version;
  args->api = &table;
  return FLAGOS_ENTRY_OK;
}
