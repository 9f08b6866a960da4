// Products of a few vectors with a matrix for any machine of this architecture.
#define FLAGOS_CPU_NAMESPACE baseline
#include "cpu/skinny_kernels.inc"
