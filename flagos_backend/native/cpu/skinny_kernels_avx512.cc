// Products of a few vectors with a matrix for x86-64-v4 (AVX-512).
#define FLAGOS_CPU_NAMESPACE avx512
#include "cpu/skinny_kernels.inc"
