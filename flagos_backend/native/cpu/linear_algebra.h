// Factorisations and triangular solves of matrices that stand row by row, each one of a batch.
#ifndef FLAGOS_NATIVE_CPU_LINEAR_ALGEBRA_H_
#define FLAGOS_NATIVE_CPU_LINEAR_ALGEBRA_H_

#include <cstdint>
#include <vector>

#include "flagos/native_tables.h"

namespace flagos::cpu {

struct LinearAlgebra {
  // Sources and targets of each: a -> its factor; a -> l and u, s32 pivots, s32 permutation of rows; a, b -> x;
  // a -> r and reflectors, taus; reflectors, taus -> q. Then those of LAPACK: a -> v, w; a -> s, and u, vᴴ with
  // kVectors; a -> w, and left and right vectors by their flags; a -> t, and z with kVectors; a -> h and reflectors,
  // taus; a -> packed, diagonal, other diagonal, taus; a, s32 order of columns -> r and reflectors, order, taus;
  // reflectors, taus, c -> product.
  using Kind = LinearAlgebraKind;
  static constexpr int64_t kNumKinds = static_cast<int64_t>(Kind::kCount);
  enum Flag : int64_t {
    kLower = 1,
    kUnitDiagonal = 2,
    kRightSide = 4,
    kTranspose = 8,
    kAdjoint = 16,
    kVectors = 32,
    kLeftVectors = 64,
    kFullMatrices = 128
  };
  static constexpr int64_t kAllFlags = 255;

  Kind kind;
  int64_t element_type;                   // 0: f32, 1: f64, 2: c64, 3: c128
  int64_t batch;                          // matrices
  int64_t rows, columns;                  // of each; of a triangular solve, those of b, of kApplyReflectors, of c
  int64_t reflectors;                     // those that kReflectors multiplies, or kApplyReflectors applies
  int64_t flags;                          // those of Flag
  std::vector<int64_t> sources, targets;  // slots
  std::vector<int64_t> target_bytes;      // of all matrices
  struct Workspace {
    int64_t elements, reals, integers;
  } workspace;  // of each of LAPACK's

  int64_t rank() const { return rows < columns ? rows : columns; }
  // The size of the triangular matrix a, or of the reflectors that kApplyReflectors applies.
  int64_t order() const { return (flags & kRightSide) != 0 ? columns : rows; }
};

inline constexpr int64_t kDecompositionWork = 10;

// Operations on elements, to decide on threads.
int64_t WorkOf(const LinearAlgebra& step);

void RunLinearAlgebra(const LinearAlgebra& step, char* const* slots);

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_LINEAR_ALGEBRA_H_
