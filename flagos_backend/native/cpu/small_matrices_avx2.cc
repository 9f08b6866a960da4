// Small triangles and narrow panels for x86-64-v3 (AVX2, FMA).
#define FLAGOS_CPU_NAMESPACE avx2
#include "cpu/small_matrices.inc"
