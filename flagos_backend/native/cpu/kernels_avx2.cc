// Tile kernels for x86-64-v3 (AVX2, FMA, F16C).
#define FLAGOS_CPU_NAMESPACE avx2
#define FLAGOS_CPU_NAME "avx2"
#define FLAGOS_CPU_GETTER Avx2Kernels
#include "cpu/kernels.inc"
