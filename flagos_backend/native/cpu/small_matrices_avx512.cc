// Small triangles and narrow panels for x86-64-v4 (AVX-512).
#define FLAGOS_CPU_NAMESPACE avx512
#include "cpu/small_matrices.inc"
