// LAPACK reads matrices column by column. What stands row by row is its transpose: where a decomposition of the
// transpose is one of the matrix, that is used, and nothing is moved.
#include "cpu/decompositions.h"

#include <algorithm>
#include <vector>

#include "cpu/blas.h"
#include "cpu/lapack.h"
#include "cpu/matrix_elements.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

template <class T>
using Real = decltype(Magnitude(T{}));
template <class T>
using Complex = std::complex<Real<T>>;

using Flag = LinearAlgebra::Flag;

// As TransposeInto, which has more to decide than a small matrix has to move.
template <class T>
void Transpose(T* to, int64_t to_leading, const T* from, int64_t from_leading, int64_t rows, int64_t columns) {
  constexpr int64_t kFew = 256;
  if (rows * columns > kFew) return TransposeInto(to, to_leading, from, from_leading, rows, columns);
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = 0; i < rows; ++i) to[j * to_leading + i] = from[i * from_leading + j];
  }
}

// What one thread computes with. The sizes are the step's.
template <class T>
struct Workspace {
  std::vector<T> matrix, work, first, second;
  std::vector<Real<T>> reals, values, imaginary;
  std::vector<int> integers;

  explicit Workspace(const LinearAlgebra& step)
      : work(static_cast<size_t>(step.workspace.elements)),
        reals(static_cast<size_t>(step.workspace.reals)),
        integers(static_cast<size_t>(step.workspace.integers)) {}
};

// One matrix of a step: sources and targets, as kinds have them, and LAPACK's sizes. With `asks`, workspaces are asked
// for by a call that computes nothing, which leaves their sizes in their first elements.
template <class T>
struct One {
  const LinearAlgebra& step;
  char* const* slots;
  int64_t number;
  Workspace<T>& space;
  bool asks = false;
  Lapack<T> lapack = FindLapack<T>();
  int rows = static_cast<int>(step.rows), columns = static_cast<int>(step.columns);
  int rank = std::min(rows, columns);
  int info = 0;

  bool Has(int64_t flag) const { return (step.flags & flag) != 0; }
  int WorkSize() const { return asks ? -1 : static_cast<int>(space.work.size()); }
  int RealSize() const { return asks ? -1 : static_cast<int>(space.reals.size()); }
  int IntegerSize() const { return asks ? -1 : static_cast<int>(space.integers.size()); }

  template <class E>
  const E* Source(size_t i, int64_t count) const {
    return asks ? nullptr : reinterpret_cast<const E*>(slots[step.sources[i]]) + number * count;
  }
  template <class E>
  E* Target(size_t i, int64_t count) const {
    return asks ? nullptr : reinterpret_cast<E*>(slots[step.targets[i]]) + number * count;
  }
  // The matrix as LAPACK reads it, in memory that it may overwrite: the transpose, column by column or as it stands.
  T* Transposed() {
    if (asks) return nullptr;
    space.matrix.resize(static_cast<size_t>(step.rows * step.columns));
    Transpose(space.matrix.data(), step.rows, Source<T>(0, step.rows * step.columns), step.columns, step.rows,
              step.columns);
    return space.matrix.data();
  }
  T* AsItStands() {
    if (asks) return nullptr;
    const T* const a = Source<T>(0, step.rows * step.columns);
    space.matrix.assign(a, a + step.rows * step.columns);
    return space.matrix.data();
  }
  // Of `count` elements, for what nobody reads, or what is moved from there.
  T* Scratch(std::vector<T>& scratch, int64_t count) const {
    if (!asks) scratch.resize(static_cast<size_t>(count));
    return scratch.data();
  }
};

template <class T>
void FromColumns(T* to, const T* from, int64_t rows, int64_t columns) {
  Transpose(to, columns, from, rows, columns, rows);
}

// a = v w vᴴ of the triangle that is given. LAPACK reads the conjugate of the matrix, whose vectors are conjugates.
template <class T>
void Eigh(One<T>& one) {
  const int n = one.rows;
  const char with_vectors = 'V', triangle = one.Has(Flag::kLower) ? 'U' : 'L';
  T* const a = one.AsItStands();
  Real<T>* const values = one.template Target<Real<T>>(1, n);
  const int work = one.WorkSize(), integers = one.IntegerSize();
  if constexpr (kIsComplex<T>) {
    const int reals = one.RealSize();
    one.lapack(LapackRoutine::kSyevd, &with_vectors, &triangle, &n, a, &n, values, one.space.work.data(), &work,
               one.space.reals.data(), &reals, one.space.integers.data(), &integers, &one.info);
  } else {
    one.lapack(LapackRoutine::kSyevd, &with_vectors, &triangle, &n, a, &n, values, one.space.work.data(), &work,
               one.space.integers.data(), &integers, &one.info);
  }
  if (one.asks || one.info != 0) return;
  T* const vectors = one.template Target<T>(0, one.step.rows * n);
  FromColumns(vectors, a, n, n);
  if constexpr (kIsComplex<T>) std::transform(vectors, vectors + one.step.rows * n, vectors, Conjugate<T>);
}

// aᵀ = u s vᴴ, so a = conj(v) s uᵀ: LAPACK's vᴴ column by column is our u row by row, and its u our vᴴ.
template <class T>
void Svd(One<T>& one) {
  const bool vectors = one.Has(Flag::kVectors), full = one.Has(Flag::kFullMatrices);
  const char which = !vectors ? 'N' : full ? 'A' : 'S';
  const int m = one.columns, n = one.rows, right = full ? n : one.rank;
  const int left = full ? m : one.rank;
  T* const a = one.AsItStands();
  Real<T>* const values = one.template Target<Real<T>>(0, one.rank);
  T unread{};
  T* const u = vectors ? one.template Target<T>(2, int64_t{m} * left) : &unread;
  T* const vh = vectors ? one.template Target<T>(1, int64_t{n} * right) : &unread;
  const int leading_vh = vectors ? right : 1, work = one.WorkSize();
  if constexpr (kIsComplex<T>) {
    one.lapack(LapackRoutine::kGesdd, &which, &m, &n, a, &m, values, u, &m, vh, &leading_vh, one.space.work.data(),
               &work, one.space.reals.data(), one.space.integers.data(), &one.info);
  } else {
    one.lapack(LapackRoutine::kGesdd, &which, &m, &n, a, &m, values, u, &m, vh, &leading_vh, one.space.work.data(),
               &work, one.space.integers.data(), &one.info);
  }
}

// Vectors of a real matrix: a pair of eigenvalues that are conjugates of each other has a column of real parts and one
// of imaginary parts, of the vector of the first.
template <class T>
void Unpack(Complex<T>* to, const T* from, const Complex<T>* values, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    const T* const column = from + j * n;
    if constexpr (kIsComplex<T>) {
      for (int64_t i = 0; i < n; ++i) to[i * n + j] = column[i];
    } else if (values[j].imag() == 0) {
      for (int64_t i = 0; i < n; ++i) to[i * n + j] = column[i];
    } else if (j + 1 < n) {
      for (int64_t i = 0; i < n; ++i) {
        to[i * n + j] = {column[i], column[n + i]};
        to[i * n + j + 1] = {column[i], -column[n + i]};
      }
      ++j;
    }
  }
}

template <class T>
void Eig(One<T>& one) {
  const int n = one.rows;
  const bool left = one.Has(Flag::kLeftVectors), right = one.Has(Flag::kVectors);
  const char with_left = left ? 'V' : 'N', with_right = right ? 'V' : 'N';
  T* const a = one.Transposed();
  T* const lefts = one.Scratch(one.space.first, left ? one.step.rows * n : 1);
  T* const rights = one.Scratch(one.space.second, right ? one.step.rows * n : 1);
  Complex<T>* const values = one.template Target<Complex<T>>(0, n);
  const int work = one.WorkSize();
  if constexpr (kIsComplex<T>) {
    one.lapack(LapackRoutine::kGeev, &with_left, &with_right, &n, a, &n, values, lefts, &n, rights, &n,
               one.space.work.data(), &work, one.space.reals.data(), &one.info);
  } else {
    one.space.values.resize(static_cast<size_t>(n));
    one.space.imaginary.resize(static_cast<size_t>(n));
    one.lapack(LapackRoutine::kGeev, &with_left, &with_right, &n, a, &n, one.space.values.data(),
               one.space.imaginary.data(), lefts, &n, rights, &n, one.space.work.data(), &work, &one.info);
    if (!one.asks) {
      for (size_t i = 0; i < static_cast<size_t>(n); ++i) values[i] = {one.space.values[i], one.space.imaginary[i]};
    }
  }
  if (one.asks || one.info != 0) return;
  if (left) Unpack<T>(one.template Target<Complex<T>>(1, one.step.rows * n), lefts, values, n);
  if (right) Unpack<T>(one.template Target<Complex<T>>(left ? 2 : 1, one.step.rows * n), rights, values, n);
}

template <class T>
void Schur(One<T>& one) {
  const int n = one.rows;
  const bool vectors = one.Has(Flag::kVectors);
  const char which = vectors ? 'V' : 'N', unsorted = 'N';
  T* const t = one.Transposed();
  T* const z = one.Scratch(one.space.first, vectors ? one.step.rows * n : 1);
  char* const select = nullptr;  // of eigenvalues, to sort by: not called
  int selected = 0, unread = 0;
  const int work = one.WorkSize();
  if constexpr (kIsComplex<T>) {
    T* const values = one.Scratch(one.space.second, n);
    one.lapack(LapackRoutine::kGees, &which, &unsorted, select, &n, t, &n, &selected, values, z, &n,
               one.space.work.data(), &work, one.space.reals.data(), &unread, &one.info);
  } else {
    one.space.values.resize(static_cast<size_t>(n));
    one.space.imaginary.resize(static_cast<size_t>(n));
    one.lapack(LapackRoutine::kGees, &which, &unsorted, select, &n, t, &n, &selected, one.space.values.data(),
               one.space.imaginary.data(), z, &n, one.space.work.data(), &work, &unread, &one.info);
  }
  if (one.asks || one.info != 0) return;
  FromColumns(one.template Target<T>(0, one.step.rows * n), t, n, n);
  if (vectors) FromColumns(one.template Target<T>(1, one.step.rows * n), z, n, n);
}

template <class T>
void Hessenberg(One<T>& one) {
  const int n = one.rows, first = 1, work = one.WorkSize();
  T* const a = one.Transposed();
  one.lapack(LapackRoutine::kGehrd, &n, &first, &n, a, &n, one.template Target<T>(1, n - 1), one.space.work.data(),
             &work, &one.info);
  if (!one.asks) FromColumns(one.template Target<T>(0, one.step.rows * n), a, n, n);
}

template <class T>
void Tridiagonal(One<T>& one) {
  const int n = one.rows, work = one.WorkSize();
  const char triangle = one.Has(Flag::kLower) ? 'L' : 'U';
  T* const a = one.Transposed();
  one.lapack(LapackRoutine::kSytrd, &triangle, &n, a, &n, one.template Target<Real<T>>(1, n),
             one.template Target<Real<T>>(2, n - 1), one.template Target<T>(3, n - 1), one.space.work.data(), &work,
             &one.info);
  if (!one.asks) FromColumns(one.template Target<T>(0, one.step.rows * n), a, n, n);
}

template <class T>
void PivotedQr(One<T>& one) {
  const int m = one.rows, n = one.columns, work = one.WorkSize();
  T* const a = one.Transposed();
  int* const order = one.template Target<int>(1, n);
  if (!one.asks) std::copy_n(one.template Source<int>(1, n), n, order);
  T* const taus = one.template Target<T>(2, one.rank);
  if constexpr (kIsComplex<T>) {
    one.lapack(LapackRoutine::kGeqp3, &m, &n, a, &m, order, taus, one.space.work.data(), &work, one.space.reals.data(),
               &one.info);
  } else {
    one.lapack(LapackRoutine::kGeqp3, &m, &n, a, &m, order, taus, one.space.work.data(), &work, &one.info);
  }
  if (!one.asks) FromColumns(one.template Target<T>(0, one.step.rows * n), a, m, n);
}

// q c, qᴴ c, c q or c qᴴ of the reflectors of sources[0], order x reflectors, and a matrix c of rows x columns.
template <class T>
void ApplyReflectors(One<T>& one) {
  const int m = one.rows, n = one.columns, k = static_cast<int>(one.step.reflectors);
  const int order = static_cast<int>(one.step.order()), work = one.WorkSize();
  const char side = one.Has(Flag::kRightSide) ? 'R' : 'L';
  const char op = !one.Has(Flag::kAdjoint) ? 'N' : kIsComplex<T> ? 'C' : 'T';
  const int64_t size = one.step.rows * n;
  T* const q = one.Scratch(one.space.first, int64_t{order} * k);
  T* const c = one.Scratch(one.space.second, size);
  if (!one.asks) {
    Transpose(q, order, one.template Source<T>(0, int64_t{order} * k), k, order, k);
    Transpose(c, m, one.template Source<T>(2, size), n, m, n);
  }
  one.lapack(LapackRoutine::kOrmqr, &side, &op, &m, &n, &k, q, &order, one.template Source<T>(1, k), c, &m,
             one.space.work.data(), &work, &one.info);
  if (!one.asks) FromColumns(one.template Target<T>(0, size), c, m, n);
}

template <class T>
void Compute(One<T>& one) {
  using Kind = LinearAlgebra::Kind;
  switch (one.step.kind) {
    case Kind::kEigh:
      return Eigh(one);
    case Kind::kSvd:
      return Svd(one);
    case Kind::kEig:
      return Eig(one);
    case Kind::kSchur:
      return Schur(one);
    case Kind::kHessenberg:
      return Hessenberg(one);
    case Kind::kTridiagonal:
      return Tridiagonal(one);
    case Kind::kPivotedQr:
      return PivotedQr(one);
    default:
      return ApplyReflectors(one);
  }
}

// What does not add up to a decomposition: elements that are read and not finite.
template <class T>
bool IsFinite(const One<T>& one) {
  const int64_t rows = one.step.rows, columns = one.step.columns;
  const T* const a = one.template Source<T>(0, rows * columns);
  if (one.step.kind != LinearAlgebra::Kind::kEigh) return AllFinite(a, rows * columns);
  for (int64_t i = 0; i < rows; ++i) {
    const bool lower = one.Has(Flag::kLower);
    if (!AllFinite(a + i * columns + (lower ? 0 : i), lower ? i + 1 : columns - i)) return false;
  }
  return true;
}

// Whether every matrix gets a result, whatever is in it: reflections of what is not finite are not finite.
bool TakesAny(LinearAlgebra::Kind kind) {
  return kind == LinearAlgebra::Kind::kPivotedQr || kind == LinearAlgebra::Kind::kApplyReflectors;
}

// All targets hold floats: numbers of the type's parts.
template <class T>
void FillWithNan(const One<T>& one) {
  for (size_t i = 0; i < one.step.targets.size(); ++i) {
    const int64_t count = one.step.target_bytes[i] / one.step.batch / static_cast<int64_t>(sizeof(Real<T>));
    std::fill_n(one.template Target<Real<T>>(i, count), count, Nan<Real<T>>());
  }
}

template <class T>
void RunRange(const LinearAlgebra& step, char* const* slots, int64_t begin, int64_t end) {
  const OneThread one_thread;
  Workspace<T> space(step);
  for (int64_t number = begin; number < end; ++number) {
    One<T> one{step, slots, number, space};
    if (TakesAny(step.kind)) {
      Compute(one);
      continue;
    }
    const bool is_finite = IsFinite(one);
    if (is_finite) Compute(one);
    if (!is_finite || one.info != 0) FillWithNan(one);
  }
}

// Of real numbers that LAPACK does not tell when it is asked for workspaces.
template <class T>
int64_t RealsOf(const LinearAlgebra& step) {
  if (!kIsComplex<T>) return 0;
  const int64_t least = step.rank(), most = std::max(step.rows, step.columns);
  switch (step.kind) {
    case LinearAlgebra::Kind::kSvd:
      if ((step.flags & Flag::kVectors) == 0) return 7 * least;
      return std::max(5 * least * least + 5 * least, 2 * most * least + 2 * least * least + least);
    case LinearAlgebra::Kind::kEig:
    case LinearAlgebra::Kind::kPivotedQr:
      return 2 * step.columns;
    case LinearAlgebra::Kind::kSchur:
      return step.columns;
    default:
      return 0;
  }
}

template <class T>
bool Plan(LinearAlgebra* step) {
  step->workspace = {1, 1, 1};
  Workspace<T> space(*step);
  One<T> one{*step, nullptr, 0, space, true};
  Compute(one);
  if (one.info != 0) return false;
  const bool is_eigh = step->kind == LinearAlgebra::Kind::kEigh;
  step->workspace.elements = std::max<int64_t>(1, static_cast<int64_t>(std::real(space.work[0])));
  step->workspace.reals = is_eigh ? static_cast<int64_t>(space.reals[0]) : RealsOf<T>(*step);
  step->workspace.reals = std::max<int64_t>(1, step->workspace.reals);
  step->workspace.integers = step->kind == LinearAlgebra::Kind::kSvd ? 8 * step->rank()
                             : is_eigh                               ? space.integers[0]
                                                                     : 1;
  return true;
}

struct Job {
  const LinearAlgebra& step;
  char* const* slots;
};

}  // namespace

bool IsDecomposition(LinearAlgebra::Kind kind) { return kind >= LinearAlgebra::Kind::kEigh; }

bool PlanDecomposition(LinearAlgebra* step) {
  switch (step->element_type) {
    case 0:
      return Plan<float>(step);
    case 1:
      return Plan<double>(step);
    case 2:
      return Plan<std::complex<float>>(step);
    default:
      return Plan<std::complex<double>>(step);
  }
}

void RunDecomposition(const LinearAlgebra& step, char* const* slots) {
  Job job{step, slots};
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const Job& job = *static_cast<Job*>(user);
    switch (job.step.element_type) {
      case 0:
        return RunRange<float>(job.step, job.slots, begin, end);
      case 1:
        return RunRange<double>(job.step, job.slots, begin, end);
      case 2:
        return RunRange<std::complex<float>>(job.step, job.slots, begin, end);
      default:
        return RunRange<std::complex<double>>(job.step, job.slots, begin, end);
    }
  };
  RunTasks(step.batch, WorkOf(step), body, &job);
}

}  // namespace flagos::cpu
