// One declaration for each slot of PJRT_Api and of its extensions; each object family defines its own in the source
// file of its name.
#ifndef FLAGOS_PJRT_API_H_
#define FLAGOS_PJRT_API_H_

#include "pjrt_abi.h"

namespace flagos_pjrt {

#define FLAGOS_DECLARE(result, function, arguments, handle) result function(arguments* args);
PJRT_API_FUNCTIONS(FLAGOS_DECLARE)
PJRT_SHARDINGS_FUNCTIONS(FLAGOS_DECLARE)
PJRT_MEMORY_DESCRIPTIONS_FUNCTIONS(FLAGOS_DECLARE)
#undef FLAGOS_DECLARE

// Whether the caller's struct reaches as far as a field that younger versions appended.
#define FLAGOS_HAS_FIELD(args, type, field) ((args)->struct_size >= offsetof(type, field) + sizeof((args)->field))

}  // namespace flagos_pjrt

#endif  // FLAGOS_PJRT_API_H_
