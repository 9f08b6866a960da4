// Products of integers for any machine of this architecture.
#define FLAGOS_CPU_NAMESPACE baseline
#include "cpu/integer_kernels.inc"
