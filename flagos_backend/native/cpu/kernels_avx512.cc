// Tile kernels for x86-64-v4 (AVX-512).
#define FLAGOS_CPU_NAMESPACE avx512
#define FLAGOS_CPU_NAME "avx512"
#define FLAGOS_CPU_GETTER Avx512Kernels
#include "cpu/kernels.inc"
