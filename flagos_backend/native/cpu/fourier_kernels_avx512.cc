// Fourier transforms for x86-64-v4 (AVX-512).
#define FLAGOS_CPU_NAMESPACE avx512
#include "cpu/fourier_kernels.inc"
