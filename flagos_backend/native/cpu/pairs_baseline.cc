// Pairs of operations for any machine of this architecture.
#define FLAGOS_CPU_NAMESPACE baseline
#include "cpu/pairs.inc"
