// Triangular solves, Cholesky and LU divide matrices in two, down to small ones that are computed here or by kernels,
// with products of matrices between. QR is qr.cc's.
#include "cpu/linear_algebra.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu/blas.h"
#include "cpu/decompositions.h"
#include "cpu/matrix_elements.h"
#include "cpu/packed_product.h"
#include "cpu/qr.h"
#include "cpu/small_matrices.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kBlock = 128;  // columns that are factorised at once
constexpr int64_t kStrip = 256;  // rows or columns of a task of its own

// body(begin, end) over strips of [0, count), on several threads where the work is worth it.
template <class F>
void ForStrips(int64_t count, int64_t work, const F& body) {
  const int64_t strips = FindBlas().IsShared() ? (count + kStrip - 1) / kStrip : 1;
  const int64_t strip = (count + strips - 1) / std::max<int64_t>(strips, 1);
  const auto run = [&](int64_t begin, int64_t end) {
    const OneThread one_thread;
    body(begin * strip, std::min(end * strip, count));
  };
  if (count > 0) {
    RunTasks(
        strips, work, [](void* user, int64_t begin, int64_t end) { (*static_cast<decltype(run)*>(user))(begin, end); },
        const_cast<void*>(static_cast<const void*>(&run)));
  }
}

template <class T>
const SmallMatrixKernelsOf<T>& Kernels() {
  static const SmallMatrixKernelsOf<T>& kernels = SelectSmallMatrixKernels().Of(T{});
  return kernels;
}

// An operand of a product: a matrix, or its transpose ('T') or adjoint ('C') where it is not 'N'.
template <class T>
struct Operand {
  const T* elements;
  int64_t leading;
  char op = 'N';
};

template <class T>
StridedMatrix<const T> Strided(const Operand<T>& operand) {
  if (operand.op == 'N') return {operand.elements, operand.leading, 1};
  return {operand.elements, 1, operand.leading, operand.op == 'C'};
}

// c[m, n] -= op(a)[m, k] op(b)[k, n]; leading dimensions in elements. For a BLAS, which reads column by column, what
// stands row by row is transposed.
template <class T>
void SubtractProduct(T* c, int64_t ldc, const Operand<T>& a, const Operand<T>& b, int64_t m, int64_t n, int64_t k) {
  if (m == 0 || n == 0) return;
  const auto gemm = FindBlas().Of(T{}).gemm;
  if (gemm == nullptr) {
    return MultiplyPacked<T>(m, n, k, Strided(a), Strided(b), StridedMatrix<T>{c, ldc, 1}, Store::kSubtract);
  }
  const int rows = static_cast<int>(n), columns = static_cast<int>(m), inner = static_cast<int>(k);
  const int leading_a = static_cast<int>(a.leading), leading_b = static_cast<int>(b.leading);
  const int leading_c = static_cast<int>(ldc);
  const T minus_one(-1), one(1);
  gemm(&b.op, &a.op, &rows, &columns, &inner, &minus_one, b.elements, &leading_b, a.elements, &leading_a, &one, c,
       &leading_c);
}

// Where a matrix is divided in two: at a multiple of what kernels take.
int64_t Half(int64_t n) { return (n / 2 + kSmall - 1) / kSmall * kSmall; }

// ---- Triangular solves

template <class T>
struct Triangle {
  const T* a;
  int64_t order, leading;
  int64_t flags;

  bool Has(int64_t flag) const { return (flags & flag) != 0; }
  T At(int64_t i, int64_t j) const {
    if (Has(LinearAlgebra::kAdjoint)) return Conjugate(a[j * leading + i]);
    return Has(LinearAlgebra::kTranspose) ? a[j * leading + i] : a[i * leading + j];
  }
  char Op() const { return Has(LinearAlgebra::kAdjoint) ? 'C' : Has(LinearAlgebra::kTranspose) ? 'T' : 'N'; }
  bool IsTransposed() const { return Has(LinearAlgebra::kTranspose) || Has(LinearAlgebra::kAdjoint); }
  // Whether the first unknowns are the first to be known.
  bool IsForward() const { return Has(LinearAlgebra::kLower) ^ IsTransposed() ^ Has(LinearAlgebra::kRightSide); }
  Triangle Part(int64_t begin, int64_t end) const { return {a + begin * leading + begin, end - begin, leading, flags}; }
  // The part off the diagonal: of the rows from `half` on, or of the columns.
  Operand<T> OffDiagonal(int64_t half) const {
    return {a + half * (Has(LinearAlgebra::kLower) ? leading : 1), leading, Op()};
  }
};

constexpr int64_t kFewUnknowns = 8;
template <class T>
constexpr int64_t kFewVectors = (kIsComplex<T> ? 16 : 32) / sizeof(T);

// In place, by few operations, which packing would delay: op(a) x = b for columns of b, or x op(a) = b for rows of it.
template <class T>
void SolveFew(const Triangle<T>& t, T* x, int64_t unknown_step, int64_t count, int64_t count_step) {
  for (int64_t step = 0; step < t.order; ++step) {
    const int64_t i = t.IsForward() ? step : t.order - 1 - step;
    T* const row = x + i * unknown_step;
    for (int64_t before = 0; before < step; ++before) {
      const int64_t j = t.IsForward() ? before : t.order - 1 - before;
      const T factor = t.Has(LinearAlgebra::kRightSide) ? t.At(j, i) : t.At(i, j);
      const T* const known = x + j * unknown_step;
      for (int64_t c = 0; c < count; ++c) row[c * count_step] -= Product(factor, known[c * count_step]);
    }
    if (t.Has(LinearAlgebra::kUnitDiagonal)) continue;
    const T diagonal = t.At(i, i);
    for (int64_t c = 0; c < count; ++c) row[c * count_step] /= diagonal;
  }
}

// As the kernel reads it: the unknowns in the order in which they become known, those known before from the left.
template <class T>
void Pack(const Triangle<T>& t, T* l) {
  const bool transposed = t.IsTransposed() ^ t.Has(LinearAlgebra::kRightSide);
  const int64_t direction = t.IsForward() ? 1 : -1;
  const int64_t row = direction * (transposed ? 1 : t.leading), column = direction * (transposed ? t.leading : 1);
  const T* const first = t.IsForward() ? t.a : t.a + (t.order - 1) * (t.leading + 1);
  for (int64_t i = 0; i < t.order; ++i) {
    for (int64_t j = 0; j <= i; ++j) l[i * kSmall + j] = first[i * row + j * column];
  }
  if (!t.Has(LinearAlgebra::kAdjoint)) return;
  for (int64_t i = 0; i < t.order; ++i) {
    for (int64_t j = 0; j <= i; ++j) l[i * kSmall + j] = Conjugate(l[i * kSmall + j]);
  }
}

// In place: op(a) x = b for columns of b.
template <class T>
void SubstituteLeft(const Triangle<T>& t, const T* l, T* x, int64_t leading, int64_t count) {
  const bool unit = t.Has(LinearAlgebra::kUnitDiagonal);
  if (t.IsForward()) return Kernels<T>().substitute(l, t.order, unit, x, leading, count);
  Kernels<T>().substitute(l, t.order, unit, x + (t.order - 1) * leading, -leading, count);
}

template <class T>
void SolveSmall(const Triangle<T>& t, T* x, int64_t leading, int64_t count) {
  const bool right = t.Has(LinearAlgebra::kRightSide);
  if (t.order <= kFewUnknowns && count <= kFewVectors<T>) {
    return SolveFew(t, x, right ? 1 : leading, count, right ? leading : 1);
  }
  T l[kSmall * kSmall];
  Pack(t, l);
  if (!right) return SubstituteLeft(t, l, x, leading, count);
  constexpr int64_t kRows = 64;
  T columns[kSmall * kRows];
  for (int64_t begin = 0; begin < count; begin += kRows) {
    const int64_t rows = std::min(kRows, count - begin);
    TransposeInto(columns, kRows, x + begin * leading, leading, rows, t.order);
    SubstituteLeft(t, l, columns, kRows, rows);
    TransposeInto(x + begin * leading, leading, columns, kRows, t.order, rows);
  }
}

// In place: op(a) x = b for `count` columns of b, or x op(a) = b for so many rows of it.
template <class T>
void SolveStrip(const Triangle<T>& t, T* x, int64_t leading, int64_t count) {
  if (t.order <= kSmall) return SolveSmall(t, x, leading, count);
  const int64_t half = Half(t.order);
  const bool right = t.Has(LinearAlgebra::kRightSide), forward = t.IsForward();
  const Triangle<T> upper = t.Part(0, half), lower = t.Part(half, t.order);
  const Triangle<T>&first = forward ? upper : lower, &second = forward ? lower : upper;
  T* const middle = x + half * (right ? 1 : leading);
  T *const known = forward ? x : middle, *const unknown = forward ? middle : x;
  SolveStrip(first, known, leading, count);
  const Operand<T> between = t.OffDiagonal(half);
  if (right) {
    SubtractProduct(unknown, leading, {known, leading}, between, count, second.order, first.order);
  } else {
    SubtractProduct(unknown, leading, between, {known, leading}, second.order, count, first.order);
  }
  SolveStrip(second, unknown, leading, count);
}

// b: rows x columns, whose rows are `leading` elements apart; becomes x.
template <class T>
void Solve(const Triangle<T>& t, T* b, int64_t rows, int64_t columns, int64_t leading) {
  const bool right = t.Has(LinearAlgebra::kRightSide);
  const int64_t count = right ? rows : columns;
  if (t.order <= kSmall) return SolveSmall(t, b, leading, count);
  ForStrips(count, t.order * t.order * count, [&](int64_t begin, int64_t end) {
    SolveStrip(t, b + begin * (right ? leading : 1), leading, end - begin);
  });
}

template <class T>
void SolveOne(const LinearAlgebra& step, char* const* slots, int64_t number) {
  const int64_t order = step.order(), size = step.rows * step.columns;
  const T* const b = reinterpret_cast<const T*>(slots[step.sources[1]]) + number * size;
  T* const x = reinterpret_cast<T*>(slots[step.targets[0]]) + number * size;
  std::copy(b, b + size, x);
  const T* const a = reinterpret_cast<const T*>(slots[step.sources[0]]) + number * order * order;
  Solve(Triangle<T>{a, order, order, step.flags}, x, step.rows, step.columns, step.columns);
}

// ---- Cholesky: a = l lᴴ, in place. The upper factor is the adjoint of the lower one of the same matrix.

constexpr int64_t kCholeskySolve = LinearAlgebra::kRightSide | LinearAlgebra::kLower | LinearAlgebra::kAdjoint;

template <class T>
bool CholeskySmall(T* a, int64_t n, int64_t leading) {
  for (int64_t j = 0; j < n; ++j) {
    T* const row = a + j * leading;
    auto pivot = std::real(row[j]);
    for (int64_t k = 0; k < j; ++k) pivot -= std::norm(row[k]);
    if (!(pivot > 0)) return false;
    const auto root = std::sqrt(pivot);
    row[j] = T(root);
    for (int64_t i = j + 1; i < n; ++i) {
      T* const below = a + i * leading;
      T sum = below[j];
      for (int64_t k = 0; k < j; ++k) sum -= Product(below[k], Conjugate(row[k]));
      below[j] = sum / root;
    }
  }
  return true;
}

// Of a block on the diagonal; false: not positive definite.
template <class T>
bool CholeskyBlock(T* a, int64_t n, int64_t leading) {
  if (n <= kSmall) return CholeskySmall(a, n, leading);
  const int64_t half = Half(n), rest = n - half;
  T *const below = a + half * leading, *const last = below + half;
  if (!CholeskyBlock(a, half, leading)) return false;
  SolveStrip(Triangle<T>{a, half, leading, kCholeskySolve}, below, leading, rest);
  SubtractProduct(last, leading, {below, leading}, {below, leading, 'C'}, rest, rest, half);
  return CholeskyBlock(last, rest, leading);
}

template <class T>
bool Cholesky(T* a, int64_t n) {
  if (n <= kSmall) return CholeskySmall(a, n, n);
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, n), size = end - begin, rest = n - end;
    T* const diagonal = a + begin * n + begin;
    {
      const OneThread one_thread;
      if (!CholeskyBlock(diagonal, size, n)) return false;
    }
    T* const panel = a + end * n + begin;
    Solve(Triangle<T>{diagonal, size, n, kCholeskySolve}, panel, rest, size, n);
    ForStrips(rest, rest * rest * size, [&](int64_t first, int64_t last) {
      // Left of the diagonal and a little beyond it.
      SubtractProduct(a + (end + first) * n + end, n, {panel + first * n, n}, {panel, n, 'C'}, last - first, last,
                      size);
    });
  }
  return true;
}

template <class T>
void CholeskyOne(const LinearAlgebra& step, char* const* slots, int64_t number) {
  const int64_t n = step.rows;
  const T* const a = reinterpret_cast<const T*>(slots[step.sources[0]]) + number * n * n;
  T* const factor = reinterpret_cast<T*>(slots[step.targets[0]]) + number * n * n;
  const bool lower = (step.flags & LinearAlgebra::kLower) != 0;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) factor[i * n + j] = lower ? a[i * n + j] : Conjugate(a[j * n + i]);
  }
  bool succeeded = Cholesky(factor, n);
  for (int64_t i = 0; succeeded && i < n; ++i) succeeded = std::isfinite(Magnitude(factor[i * n + i]));
  if (!succeeded) return std::fill(factor, factor + n * n, Nan<T>());
  for (int64_t i = 0; i < n; ++i) {
    std::fill(factor + i * n + i + 1, factor + (i + 1) * n, T(0));
    if (lower) continue;
    for (int64_t j = 0; j < i; ++j) {
      factor[j * n + i] = Conjugate(factor[i * n + j]);
      factor[i * n + j] = T(0);
    }
  }
}

// ---- LU with partial pivoting, in place

template <class T>
void LuSmall(T* a, int64_t rows, int64_t columns, int32_t* pivots) {
  for (int64_t j = 0; j < std::min(rows, columns); ++j) {
    int64_t pivot = j;
    for (int64_t i = j + 1; i < rows; ++i) {
      if (Magnitude(a[i * columns + j]) > Magnitude(a[pivot * columns + j])) pivot = i;
    }
    pivots[j] = static_cast<int32_t>(pivot);
    T* const top = a + j * columns;
    if (pivot != j) std::swap_ranges(top, top + columns, a + pivot * columns);
    if (top[j] == T(0)) continue;
    for (int64_t i = j + 1; i < rows; ++i) {
      T* const row = a + i * columns;
      const T factor = row[j] = row[j] / top[j];
      for (int64_t k = j + 1; k < columns; ++k) row[k] -= Product(factor, top[k]);
    }
  }
}

template <class T>
struct Matrix {
  T* a;
  int64_t rows, columns;

  T* At(int64_t row, int64_t column) const { return a + row * columns + column; }
};

// Columns `begin` to `end`, of the rows from `begin` on, in memory where each column is contiguous.
template <class T>
void LuColumns(const Matrix<T>& m, int64_t begin, int64_t end, int32_t* pivots) {
  thread_local std::vector<T> memory;
  const int64_t rows = m.rows - begin, size = end - begin;
  // Columns that are a power of two apart would have the same places in a cache.
  const int64_t leading = ((rows / kSmall + 1) | 1) * kSmall;
  memory.resize(static_cast<size_t>(leading * size));
  TransposeInto(memory.data(), leading, m.At(begin, begin), m.columns, rows, size);
  Kernels<T>().lu(memory.data(), leading, rows, size, pivots + begin);
  TransposeInto(m.At(begin, begin), m.columns, memory.data(), leading, size, rows);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t other = pivots[i] += static_cast<int32_t>(begin);
    if (other == i) continue;
    std::swap_ranges(m.At(i, 0), m.At(i, begin), m.At(other, 0));
    std::swap_ranges(m.At(i, end), m.At(i, m.columns), m.At(other, end));
  }
}

constexpr int64_t kLuSolve = LinearAlgebra::kLower | LinearAlgebra::kUnitDiagonal;

template <class T>
void LuPanel(const Matrix<T>& m, int64_t begin, int64_t end, int32_t* pivots) {
  if (end - begin <= kSmall) return LuColumns(m, begin, end, pivots);
  const int64_t half = Half(end - begin), middle = begin + half, right = end - middle;
  LuPanel(m, begin, middle, pivots);
  T* const top = m.At(begin, middle);
  SolveStrip(Triangle<T>{m.At(begin, begin), half, m.columns, kLuSolve}, top, m.columns, right);
  SubtractProduct(m.At(middle, middle), m.columns, {m.At(middle, begin), m.columns}, {top, m.columns}, m.rows - middle,
                  right, half);
  LuPanel(m, middle, end, pivots);
}

template <class T>
void Lu(const Matrix<T>& m, int32_t* pivots) {
  if (std::max(m.rows, m.columns) <= kSmall) return LuSmall(m.a, m.rows, m.columns, pivots);
  const int64_t rank = std::min(m.rows, m.columns);
  for (int64_t begin = 0; begin < rank; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, rank), size = end - begin;
    {
      const OneThread one_thread;
      LuPanel(m, begin, end, pivots);
    }
    const int64_t right = m.columns - end, below = m.rows - end;
    if (right == 0) continue;
    T* const top = m.At(begin, end);
    Solve(Triangle<T>{m.At(begin, begin), size, m.columns, kLuSolve}, top, size, right, m.columns);
    ForStrips(below, below * right * size, [&](int64_t first, int64_t last) {
      SubtractProduct(m.At(end + first, end), m.columns, {m.At(end + first, begin), m.columns}, {top, m.columns},
                      last - first, right, size);
    });
  }
}

template <class T>
void LuOne(const LinearAlgebra& step, char* const* slots, int64_t number) {
  const int64_t size = step.rows * step.columns, rank = step.rank();
  const T* const a = reinterpret_cast<const T*>(slots[step.sources[0]]) + number * size;
  T* const lu = reinterpret_cast<T*>(slots[step.targets[0]]) + number * size;
  int32_t* const pivots = reinterpret_cast<int32_t*>(slots[step.targets[1]]) + number * rank;
  int32_t* const permutation = reinterpret_cast<int32_t*>(slots[step.targets[2]]) + number * step.rows;
  std::copy(a, a + size, lu);
  Lu(Matrix<T>{lu, step.rows, step.columns}, pivots);
  std::iota(permutation, permutation + step.rows, 0);
  for (int64_t i = 0; i < rank; ++i) std::swap(permutation[i], permutation[pivots[i]]);
}

using One = void (*)(const LinearAlgebra& step, char* const* slots, int64_t number);

template <class T>
One OneOf(LinearAlgebra::Kind kind) {
  constexpr One kAll[] = {&CholeskyOne<T>, &LuOne<T>, &SolveOne<T>, &QrOne<T>, &ReflectorsOne<T>};
  return kAll[static_cast<int64_t>(kind)];
}

One OneOf(const LinearAlgebra& step) {
  switch (step.element_type) {
    case 0:
      return OneOf<float>(step.kind);
    case 1:
      return OneOf<double>(step.kind);
    case 2:
      return OneOf<std::complex<float>>(step.kind);
    default:
      return OneOf<std::complex<double>>(step.kind);
  }
}

struct Job {
  const LinearAlgebra& step;
  char* const* slots;
  One one;
};

}  // namespace

int64_t WorkOf(const LinearAlgebra& step) {
  const int64_t inner = step.kind == LinearAlgebra::Kind::kTriangularSolve ? step.order() : step.rank();
  // Iterations to eigenvalues take some ten times as long as a factorization.
  const int64_t often = IsDecomposition(step.kind) ? kDecompositionWork : 1;
  return step.batch * step.rows * step.columns * inner * often;
}

void RunLinearAlgebra(const LinearAlgebra& step, char* const* slots) {
  if (IsDecomposition(step.kind)) return RunDecomposition(step, slots);
  Job job{step, slots, OneOf(step)};
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const Job& job = *static_cast<Job*>(user);
    for (int64_t number = begin; number < end; ++number) job.one(job.step, job.slots, number);
  };
  if (!FindBlas().IsShared()) return body(&job, 0, step.batch);
  RunTasks(step.batch, WorkOf(step), body, &job);
}

}  // namespace flagos::cpu
