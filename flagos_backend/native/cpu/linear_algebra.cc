// Small matrices are factorised and solved here, element by element; larger ones in blocks by BLAS and LAPACK. What
// stands row by row is the transpose of what they read column by column.
#include "cpu/linear_algebra.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu/blas.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kSmall = 16;   // a library's call costs more than it brings for matrices up to this size
constexpr int64_t kBlock = 128;  // columns that are factorised at once
constexpr int64_t kStrip = 256;  // rows or columns of a task of its own

template <class T>
constexpr bool kIsComplex = !std::is_floating_point_v<T>;

// What LAPACK calls the size of a pivot.
template <class T>
auto Magnitude(T x) {
  if constexpr (kIsComplex<T>) {
    return std::abs(x.real()) + std::abs(x.imag());
  } else {
    return std::abs(x);
  }
}

template <class T>
T Conjugate(T x) {
  if constexpr (kIsComplex<T>) {
    return std::conj(x);
  } else {
    return x;
  }
}

template <class T>
T Nan() {
  return T(std::numeric_limits<decltype(Magnitude(T{}))>::quiet_NaN());
}

template <class T>
bool AllFinite(const T* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(Magnitude(x[i]))) return false;
  }
  return true;
}

// body(begin, end) over strips of [0, count), on several threads where the work is worth it.
template <class F>
void ForStrips(int64_t count, int64_t work, const F& body) {
  const int64_t strips = FindBlas().set_threads == nullptr ? 1 : (count + kStrip - 1) / kStrip;
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
void TransposeInto(T* to, int64_t to_leading, const T* from, int64_t from_leading, int64_t rows, int64_t columns) {
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = 0; i < rows; ++i) to[j * to_leading + i] = from[i * from_leading + j];
  }
}

// c[m, n] -= a[m, k] b[k, n], where b may be an adjoint [n, k]; leading dimensions in elements.
template <class T>
void SubtractProduct(T* c, int64_t ldc, const T* a, int64_t lda, const T* b, int64_t ldb, bool adjoint_b, int64_t m,
                     int64_t n, int64_t k) {
  const int rows = static_cast<int>(n), columns = static_cast<int>(m), inner = static_cast<int>(k);
  const int leading_a = static_cast<int>(lda), leading_b = static_cast<int>(ldb), leading_c = static_cast<int>(ldc);
  const T minus_one(-1), one(1);
  if (m > 0 && n > 0) {
    FindBlas().Of(T{}).gemm(adjoint_b ? "C" : "N", "N", &rows, &columns, &inner, &minus_one, b, &leading_b, a,
                            &leading_a, &one, c, &leading_c);
  }
}

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
};

// In place: op(a) x = b for columns of b, or x op(a) = b for rows of it.
template <class T>
void SolveSmall(const Triangle<T>& t, T* x, int64_t unknown_step, int64_t count, int64_t count_step) {
  const bool right = t.Has(LinearAlgebra::kRightSide);
  const bool transposed = t.Has(LinearAlgebra::kTranspose) || t.Has(LinearAlgebra::kAdjoint);
  const bool forward = t.Has(LinearAlgebra::kLower) ^ transposed ^ right;
  for (int64_t step = 0; step < t.order; ++step) {
    const int64_t i = forward ? step : t.order - 1 - step;
    T* const row = x + i * unknown_step;
    for (int64_t before = 0; before < step; ++before) {
      const int64_t j = forward ? before : t.order - 1 - before;
      const T factor = right ? t.At(j, i) : t.At(i, j);
      const T* const known = x + j * unknown_step;
      for (int64_t c = 0; c < count; ++c) row[c * count_step] -= factor * known[c * count_step];
    }
    if (t.Has(LinearAlgebra::kUnitDiagonal)) continue;
    const T diagonal = t.At(i, i);
    for (int64_t c = 0; c < count; ++c) row[c * count_step] /= diagonal;
  }
}

// b: rows x columns, whose rows are `leading` elements apart; becomes x.
template <class T>
void Solve(const Triangle<T>& t, T* b, int64_t rows, int64_t columns, int64_t leading) {
  const bool right = t.Has(LinearAlgebra::kRightSide);
  if (t.order <= kSmall) {
    return right ? SolveSmall(t, b, 1, rows, leading) : SolveSmall(t, b, leading, columns, 1);
  }
  const char* const transpose = t.Has(LinearAlgebra::kAdjoint) ? "C" : t.Has(LinearAlgebra::kTranspose) ? "T" : "N";
  const int64_t count = right ? rows : columns;
  ForStrips(count, t.order * t.order * count, [&](int64_t begin, int64_t end) {
    const int m = static_cast<int>(right ? columns : end - begin), n = static_cast<int>(right ? end - begin : rows);
    const int lda = static_cast<int>(t.leading), ldb = static_cast<int>(leading);
    const T one(1);
    FindBlas().Of(T{}).trsm(right ? "L" : "R", t.Has(LinearAlgebra::kLower) ? "U" : "L", transpose,
                            t.Has(LinearAlgebra::kUnitDiagonal) ? "U" : "N", &m, &n, &one, t.a, &lda,
                            b + begin * (right ? leading : 1), &ldb);
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

// Of a leading block; false: not positive definite.
template <class T>
bool CholeskyBlock(T* a, int64_t n, int64_t leading) {
  const int size = static_cast<int>(n), lda = static_cast<int>(leading);
  int info = 0;
  FindBlas().Of(T{}).potrf("U", &size, a, &lda, &info);
  return info == 0;
}

template <class T>
bool CholeskySmall(T* a, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    T* const row = a + j * n;
    auto pivot = std::real(row[j]);
    for (int64_t k = 0; k < j; ++k) pivot -= std::norm(row[k]);
    if (!(pivot > 0)) return false;
    const auto root = std::sqrt(pivot);
    row[j] = T(root);
    for (int64_t i = j + 1; i < n; ++i) {
      T* const below = a + i * n;
      T sum = below[j];
      for (int64_t k = 0; k < j; ++k) sum -= below[k] * Conjugate(row[k]);
      below[j] = sum / root;
    }
  }
  return true;
}

template <class T>
bool Cholesky(T* a, int64_t n) {
  if (n <= kSmall) return CholeskySmall(a, n);
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, n), size = end - begin, rest = n - end;
    T* const diagonal = a + begin * n + begin;
    {
      const OneThread one_thread;
      if (!CholeskyBlock(diagonal, size, n)) return false;
    }
    const int64_t flags = LinearAlgebra::kRightSide | LinearAlgebra::kLower | LinearAlgebra::kAdjoint;
    T* const panel = a + end * n + begin;
    Solve(Triangle<T>{diagonal, size, n, flags}, panel, rest, size, n);
    ForStrips(rest, rest * rest * size, [&](int64_t first, int64_t last) {
      // Left of the diagonal and a little beyond it.
      SubtractProduct(a + (end + first) * n + end, n, panel + first * n, n, panel, n, true, last - first, last, size);
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
      for (int64_t k = j + 1; k < columns; ++k) row[k] -= factor * top[k];
    }
  }
}

// Of `size` columns from the diagonal element `a` on, by LAPACK in memory of its own; pivots count from `a`.
template <class T>
void LuPanel(T* a, int64_t rows, int64_t size, int64_t leading, int32_t* pivots, std::vector<T>& memory) {
  memory.resize(static_cast<size_t>(rows * size));
  TransposeInto(memory.data(), rows, a, leading, rows, size);
  const int m = static_cast<int>(rows), n = static_cast<int>(size);
  int info = 0;
  {
    const OneThread one_thread;
    FindBlas().Of(T{}).getrf(&m, &n, memory.data(), &m, pivots, &info);
  }
  TransposeInto(a, leading, memory.data(), rows, size, rows);
  for (int64_t i = 0; i < std::min(rows, size); ++i) --pivots[i];
}

template <class T>
void Lu(T* a, int64_t rows, int64_t columns, int32_t* pivots) {
  if (std::max(rows, columns) <= kSmall) return LuSmall(a, rows, columns, pivots);
  const int64_t rank = std::min(rows, columns);
  std::vector<T> memory;
  for (int64_t begin = 0; begin < rank; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, rank), size = end - begin;
    T* const diagonal = a + begin * columns + begin;
    LuPanel(diagonal, rows - begin, size, columns, pivots + begin, memory);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t other = pivots[i] += static_cast<int32_t>(begin);
      T *const row = a + i * columns, *const swapped = a + other * columns;
      if (other == i) continue;
      std::swap_ranges(row, row + begin, swapped);
      std::swap_ranges(row + end, row + columns, swapped + end);
    }
    const int64_t right = columns - end, below = rows - end;
    if (right == 0) continue;
    T* const top = a + begin * columns + end;
    Solve(Triangle<T>{diagonal, size, columns, LinearAlgebra::kLower | LinearAlgebra::kUnitDiagonal}, top, size, right,
          columns);
    ForStrips(below, below * right * size, [&](int64_t first, int64_t last) {
      T* const panel = a + (end + first) * columns + begin;
      SubtractProduct(panel + size, columns, panel, columns, top, columns, false, last - first, right, size);
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
  Lu(lu, step.rows, step.columns, pivots);
  std::iota(permutation, permutation + step.rows, 0);
  for (int64_t i = 0; i < rank; ++i) std::swap(permutation[i], permutation[pivots[i]]);
}

// ---- QR

template <class T>
void QrOne(const LinearAlgebra& step, char* const* slots, int64_t number) {
  const int64_t rows = step.rows, columns = step.columns, size = rows * columns, rank = step.rank();
  const T* const a = reinterpret_cast<const T*>(slots[step.sources[0]]) + number * size;
  T* const factors = reinterpret_cast<T*>(slots[step.targets[0]]) + number * size;
  T* const taus = reinterpret_cast<T*>(slots[step.targets[1]]) + number * rank;
  if (!AllFinite(a, size)) {
    std::fill(factors, factors + size, Nan<T>());
    return std::fill(taus, taus + rank, Nan<T>());
  }
  const int m = static_cast<int>(rows), n = static_cast<int>(columns), work_size = static_cast<int>(columns * 32);
  std::vector<T> memory(static_cast<size_t>(size + work_size));
  TransposeInto(memory.data(), rows, a, columns, rows, columns);
  int info = 0;
  const OneThread one_thread;
  FindBlas().Of(T{}).geqrf(&m, &n, memory.data(), &m, taus, memory.data() + size, &work_size, &info);
  TransposeInto(factors, columns, memory.data(), rows, columns, rows);
}

template <class T>
void ReflectorsOne(const LinearAlgebra& step, char* const* slots, int64_t number) {
  const int64_t rows = step.rows, columns = step.columns, size = rows * columns;
  const T* const a = reinterpret_cast<const T*>(slots[step.sources[0]]) + number * size;
  const T* const taus = reinterpret_cast<const T*>(slots[step.sources[1]]) + number * step.reflectors;
  T* const q = reinterpret_cast<T*>(slots[step.targets[0]]) + number * size;
  const int m = static_cast<int>(rows), n = static_cast<int>(columns), k = static_cast<int>(step.reflectors);
  const int work_size = static_cast<int>(columns * 32);
  std::vector<T> memory(static_cast<size_t>(size + work_size));
  TransposeInto(memory.data(), rows, a, columns, rows, columns);
  int info = 0;
  const OneThread one_thread;
  FindBlas().Of(T{}).orgqr(&m, &n, &k, memory.data(), &m, taus, memory.data() + size, &work_size, &info);
  TransposeInto(q, columns, memory.data(), rows, columns, rows);
}

using One = void (*)(const LinearAlgebra& step, char* const* slots, int64_t number);

template <class T>
One OneOf(LinearAlgebra::Kind kind) {
  constexpr One kAll[LinearAlgebra::kNumKinds] = {&CholeskyOne<T>, &LuOne<T>, &SolveOne<T>, &QrOne<T>,
                                                  &ReflectorsOne<T>};
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
  return step.batch * step.rows * step.columns * inner;
}

bool HaveLinearAlgebra() {
  const Blas& blas = FindBlas();
  return blas.f32.Complete() && blas.f64.Complete() && blas.c64.Complete() && blas.c128.Complete();
}

void RunLinearAlgebra(const LinearAlgebra& step, char* const* slots) {
  Job job{step, slots, OneOf(step)};
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const Job& job = *static_cast<Job*>(user);
    for (int64_t number = begin; number < end; ++number) job.one(job.step, job.slots, number);
  };
  // A library that cannot be held to one thread has threads of its own.
  if (FindBlas().set_threads == nullptr) return body(&job, 0, step.batch);
  RunTasks(step.batch, WorkOf(step), body, &job);
}

}  // namespace flagos::cpu
