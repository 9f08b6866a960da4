// Fourier transforms for x86-64-v3 (AVX2).
#define FLAGOS_CPU_NAMESPACE avx2
#include "cpu/fourier_kernels.inc"
