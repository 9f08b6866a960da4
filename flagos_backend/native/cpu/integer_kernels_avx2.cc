// Products of integers for x86-64-v3 (AVX2).
#define FLAGOS_CPU_NAMESPACE avx2
#include "cpu/integer_kernels.inc"
