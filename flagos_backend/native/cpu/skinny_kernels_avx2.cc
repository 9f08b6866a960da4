// Products of a few vectors with a matrix for x86-64-v3 (AVX2).
#define FLAGOS_CPU_NAMESPACE avx2
#include "cpu/skinny_kernels.inc"
