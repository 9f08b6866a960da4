// Small triangles and narrow panels for any machine of this architecture.
#define FLAGOS_CPU_NAMESPACE baseline
#include "cpu/small_matrices.inc"
