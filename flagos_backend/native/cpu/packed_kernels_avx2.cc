// Tiles of products for x86-64-v3 (AVX2).
#define FLAGOS_CPU_NAMESPACE avx2
#include "cpu/packed_kernels.inc"
