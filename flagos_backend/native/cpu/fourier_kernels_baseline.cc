// Fourier transforms for any machine of this architecture.
#define FLAGOS_CPU_NAMESPACE baseline
#include "cpu/fourier_kernels.inc"
