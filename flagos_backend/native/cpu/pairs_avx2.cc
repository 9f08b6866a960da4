// Pairs of operations for x86-64-v3 (AVX2, FMA, F16C).
#define FLAGOS_CPU_NAMESPACE avx2
#include "cpu/pairs.inc"
