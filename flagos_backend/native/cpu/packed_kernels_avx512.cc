// Tiles of products for x86-64-v4 (AVX-512).
#define FLAGOS_CPU_NAMESPACE avx512
#include "cpu/packed_kernels.inc"
