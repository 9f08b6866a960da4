// Products of integers for x86-64-v4 with AVX512-VNNI.
#define FLAGOS_CPU_NAMESPACE avx512_vnni
#include "cpu/integer_kernels.inc"
