// By Householder's reflectors h = 1 - tau v vᴴ, of which v begins with 1, as LAPACK's geqrf and orgqr have them. Columns
// are contiguous here; several reflectors at once are products of matrices.
#include "cpu/qr.h"

#include <algorithm>
#include <vector>

#include "cpu/matrix_elements.h"
#include "cpu/packed_product.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kReflectorsAtOnce = 16;

template <class T>
using Real = decltype(Magnitude(T{}));

// Several sums side by side, which vectors may hold.
template <class T>
T ConjugateDot(const T* x, const T* y, int64_t n) {
  constexpr int64_t kSums = 8;
  T sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int64_t s = 0; s < kSums; ++s) sums[s] += Product(Conjugate(x[i + s]), y[i + s]);
  }
  for (; i < n; ++i) sums[0] += Product(Conjugate(x[i]), y[i]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// The length of a vector. Squares of doubles may be too large or too small: then they are scaled by the largest element.
template <class T>
Real<T> Norm(const T* x, int64_t n) {
  const auto sum = [&](double scale) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double real = std::real(x[i]) * scale, imaginary = std::imag(x[i]) * scale;
      sum += real * real + imaginary * imaginary;
    }
    return sum;
  };
  constexpr double kLeast = 1e-280, kMost = 1e300;
  const double plain = sum(1);
  if (sizeof(Real<T>) < sizeof(double) || (plain > kLeast && plain < kMost)) {
    return static_cast<Real<T>>(std::sqrt(plain));
  }
  double largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    largest = std::max<double>({largest, std::abs(std::real(x[i])), std::abs(std::imag(x[i]))});
  }
  if (largest == 0) return static_cast<Real<T>>(plain);  // which may be a NaN
  const int exponent = std::clamp(std::ilogb(largest), -1022, 1022);
  return static_cast<Real<T>>(std::ldexp(std::sqrt(sum(std::ldexp(1.0, -exponent))), exponent));
}

// x becomes beta, which is real, and v from its second element on; returns tau: hᴴ x = beta e1.
template <class T>
T MakeReflector(T* x, int64_t n) {
  constexpr Real<T> kSmallest = std::numeric_limits<Real<T>>::min() / std::numeric_limits<Real<T>>::epsilon();
  const Real<T> imaginary = std::imag(x[0]);
  if (Norm(x + 1, n - 1) == 0 && imaginary == 0) return T(0);
  // Quotients by tiny numbers would lose digits, or be infinite.
  constexpr int kLift = -std::numeric_limits<Real<T>>::min_exponent / 2;
  int lifted = 0;
  Real<T> length = Norm(x, n);
  while (length < kSmallest) {
    for (int64_t i = 0; i < n; ++i) x[i] *= std::ldexp(Real<T>(1), kLift);
    length = Norm(x, n);
    lifted += kLift;
  }
  const Real<T> beta = std::signbit(std::real(x[0])) ? length : -length;
  T tau;
  if constexpr (kIsComplex<T>) {
    tau = {(beta - x[0].real()) / beta, -x[0].imag() / beta};
  } else {
    tau = (beta - x[0]) / beta;
  }
  const T scale = T(1) / (x[0] - T(beta));
  for (int64_t i = 1; i < n; ++i) x[i] = Product(x[i], scale);
  x[0] = T(std::ldexp(beta, -lifted));
  return tau;
}

// The product of the reflectors h1 h2 ... of a panel, 1 - v t vᴴ: v is unit lower trapezoidal, t upper triangular.
template <class T>
struct BlockReflector {
  int64_t rows, count;
  std::vector<T> v = std::vector<T>(static_cast<size_t>(rows * count)),
                 t = std::vector<T>(static_cast<size_t>(count * count));

  // The panel's columns are `leading` elements apart; below the diagonal they are v.
  BlockReflector(const T* panel, int64_t leading, int64_t rows, int64_t count, const T* taus)
      : rows(rows), count(count) {
    for (int64_t j = 0; j < count; ++j) {
      v[j * rows + j] = T(1);
      std::copy(panel + j * leading + j + 1, panel + j * leading + rows, v.begin() + j * rows + j + 1);
    }
    for (int64_t j = 0; j < count; ++j) {
      T* const column = t.data() + j * count;
      for (int64_t i = 0; i < j; ++i) {
        column[i] = -Product(taus[j], ConjugateDot(v.data() + i * rows + j, v.data() + j * rows + j, rows - j));
      }
      for (int64_t i = 0; i < j; ++i) {  // rows of t from the first on, which read those below
        T sum(0);
        for (int64_t k = i; k < j; ++k) sum += Product(t[k * count + i], column[k]);
        column[i] = sum;
      }
      column[j] = taus[j];
    }
  }

  // c -= v op(t) vᴴ c for `columns` columns of c, which are `leading` elements apart; op: the adjoint, if so wanted.
  void Apply(bool adjoint, T* c, int64_t leading, int64_t columns) const {
    if (columns == 0) return;
    const StridedMatrix<const T> of_v{v.data(), 1, rows}, v_adjoint{v.data(), rows, 1, true};
    const StridedMatrix<const T> of_t =
        adjoint ? StridedMatrix<const T>{t.data(), count, 1, true} : StridedMatrix<const T>{t.data(), 1, count};
    const StridedMatrix<T> of_c{c, 1, leading};
    std::vector<T> products(static_cast<size_t>(2 * count * columns));
    const StridedMatrix<T> w{products.data(), columns, 1}, tw{products.data() + count * columns, columns, 1};
    MultiplyPacked<T>(count, columns, rows, v_adjoint, of_c, w, Store::kWrite);
    MultiplyPacked<T>(count, columns, count, of_t, w, tw, Store::kWrite);
    MultiplyPacked<T>(rows, columns, count, of_v, tw, of_c, Store::kSubtract);
  }
};

// Columns `begin` to `end` of columns that are `rows` elements long, from the diagonal on.
template <class T>
void QrPanel(T* a, int64_t rows, int64_t begin, int64_t end, T* taus) {
  for (int64_t j = begin; j < end; ++j) {
    T* const x = a + j * rows + j;
    const int64_t n = rows - j;
    const T tau = taus[j] = MakeReflector(x, n);
    for (int64_t c = j + 1; c < end; ++c) {
      T* const y = a + c * rows + j;
      const T factor = Product(Conjugate(tau), y[0] + ConjugateDot(x + 1, y + 1, n - 1));
      y[0] -= factor;
      for (int64_t i = 1; i < n; ++i) y[i] -= Product(factor, x[i]);
    }
  }
}

}  // namespace

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
  std::vector<T> memory(static_cast<size_t>(size));
  TransposeInto(memory.data(), rows, a, columns, rows, columns);
  for (int64_t begin = 0; begin < rank; begin += kReflectorsAtOnce) {
    const int64_t end = std::min(begin + kReflectorsAtOnce, rank);
    QrPanel(memory.data(), rows, begin, end, taus);
    if (end == columns) break;
    const BlockReflector<T> block(memory.data() + begin * (rows + 1), rows, rows - begin, end - begin, taus + begin);
    block.Apply(true, memory.data() + end * rows + begin, rows, columns - end);
  }
  TransposeInto(factors, columns, memory.data(), rows, columns, rows);
}

// The first columns of the product of all reflectors, of which the last are applied first.
template <class T>
void ReflectorsOne(const LinearAlgebra& step, char* const* slots, int64_t number) {
  const int64_t rows = step.rows, columns = step.columns, size = rows * columns, reflectors = step.reflectors;
  const T* const a = reinterpret_cast<const T*>(slots[step.sources[0]]) + number * size;
  const T* const taus = reinterpret_cast<const T*>(slots[step.sources[1]]) + number * reflectors;
  T* const q = reinterpret_cast<T*>(slots[step.targets[0]]) + number * size;
  std::vector<T> panels(static_cast<size_t>(size)), memory(static_cast<size_t>(size));
  TransposeInto(panels.data(), rows, a, columns, rows, columns);
  for (int64_t i = 0; i < columns; ++i) memory[i * (rows + 1)] = T(1);
  for (int64_t end = reflectors; end > 0;) {
    const int64_t begin = (end - 1) / kReflectorsAtOnce * kReflectorsAtOnce;
    const BlockReflector<T> block(panels.data() + begin * (rows + 1), rows, rows - begin, end - begin, taus + begin);
    block.Apply(false, memory.data() + begin * (rows + 1), rows, columns - begin);
    end = begin;
  }
  TransposeInto(q, columns, memory.data(), rows, columns, rows);
}

template void QrOne<float>(const LinearAlgebra&, char* const*, int64_t);
template void ReflectorsOne<float>(const LinearAlgebra&, char* const*, int64_t);
template void QrOne<double>(const LinearAlgebra&, char* const*, int64_t);
template void ReflectorsOne<double>(const LinearAlgebra&, char* const*, int64_t);
template void QrOne<std::complex<float>>(const LinearAlgebra&, char* const*, int64_t);
template void ReflectorsOne<std::complex<float>>(const LinearAlgebra&, char* const*, int64_t);
template void QrOne<std::complex<double>>(const LinearAlgebra&, char* const*, int64_t);
template void ReflectorsOne<std::complex<double>>(const LinearAlgebra&, char* const*, int64_t);

}  // namespace flagos::cpu
