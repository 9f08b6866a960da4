// Tiles of products for any machine of this architecture.
#define FLAGOS_CPU_NAMESPACE baseline
#include "cpu/packed_kernels.inc"
