// Eigenvalues, singular values, Schur forms and what else LAPACK computes of matrices that stand row by row.
#ifndef FLAGOS_NATIVE_CPU_DECOMPOSITIONS_H_
#define FLAGOS_NATIVE_CPU_DECOMPOSITIONS_H_

#include "cpu/linear_algebra.h"

namespace flagos::cpu {

// Whether LAPACK computes steps of this kind.
bool IsDecomposition(LinearAlgebra::Kind kind);

// Asks LAPACK for the sizes of its workspaces, once a step. False: it refuses.
bool PlanDecomposition(LinearAlgebra* step);

// A matrix that is not finite, or on which the algorithm fails, gets NaN; the others of its batch do not.
void RunDecomposition(const LinearAlgebra& step, char* const* slots);

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_DECOMPOSITIONS_H_
