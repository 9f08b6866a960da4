// The profiler extension: what the backend traced, as an XSpace.
#ifndef FLAGOS_PJRT_PROFILER_H_
#define FLAGOS_PJRT_PROFILER_H_

#include "pjrt_abi.h"

namespace flagos_pjrt {

extern const PLUGIN_Profiler_Api kProfilerApi;

}  // namespace flagos_pjrt

#endif  // FLAGOS_PJRT_PROFILER_H_
