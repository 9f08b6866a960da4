// Tile kernels for any machine of this architecture.
#define FLAGOS_CPU_NAMESPACE baseline
#define FLAGOS_CPU_NAME "baseline"
#define FLAGOS_CPU_GETTER BaselineKernels
#include "cpu/kernels.inc"
