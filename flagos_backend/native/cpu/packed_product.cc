// Blocks of both operands are copied to where a tile reads them in order, unless they are read so rarely that copying
// takes longer (Goto and van de Geijn, Anatomy of high-performance matrix multiplication, 2008).
#include "cpu/packed_product.h"

#include <algorithm>
#include <complex>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/matrix_product.h"

namespace flagos::cpu {
namespace {

// A panel of b fits the first-level cache, a block of a the second beside what others have in it, a block of b the third.
constexpr int64_t kDepth = 256, kColumns = ProductBlocks::kColumns, kRowBytes = 1 << 17;
template <class T>
constexpr int64_t kRows = kRowBytes / kDepth / static_cast<int64_t>(sizeof(T));
constexpr int64_t kRowsAtOnce = 16;
// Operands that are read by no more panels of the other are read where they stand.
constexpr int64_t kFewRowPanels = 1, kFewColumnPanels = 4;
// What an element costs that is not where it is wanted: moved before a product, or stored one by one after it.
constexpr int64_t kMoved = 1, kStoredAlone = 2;

int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `count` elements of each of `depth` rows of a matrix that has contiguous rows or columns.
template <class T>
void Pack(const PackFunctions<T>& pack, T* to, const StridedMatrix<const T>& from, int64_t count, int64_t depth) {
  if (from.column == 1) return pack.of_rows(to, from.at, from.row, count, depth);
  pack.of_columns(to, from.at, from.column, count, depth);
}

template <class T>
void ToColumns(const T* tile, int64_t width, int64_t rows, int64_t columns, const StridedMatrix<T>& c, Store store) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* const row = tile + r * width;
    T* to = c.at + r * c.row;
    for (int64_t i = 0; i < columns; ++i, to += c.column) {
      *to = store == Store::kWrite ? row[i] : store == Store::kAdd ? *to + row[i] : *to - row[i];
    }
  }
}

// What a later part of the depth does with a result that the first one wrote.
Store After(Store store) { return store == Store::kSubtract ? store : Store::kAdd; }

template <class T>
class RealProduct {
 public:
  RealProduct(int64_t m, int64_t n, int64_t k, const StridedMatrix<const T>& a, const StridedMatrix<const T>& b,
              const StridedMatrix<T>& c)
      : m_(m), n_(n), k_(k), a_(a), b_(b), c_(c), width_(n > kernels_.lanes ? 2 * kernels_.lanes : kernels_.lanes) {
    pack_a_ = n > kFewColumnPanels * width_;
    pack_b_ = b.column != 1 || m > kFewRowPanels * kernels_.rows;
  }

  void Run(Store store) {
    for (int64_t column = 0; column < n_; column += kColumns) {
      columns_ = std::min(kColumns, n_ - column);
      for (int64_t from = 0; from < k_; from += kDepth) {
        depth_ = std::min(kDepth, k_ - from);
        const StridedMatrix<const T> b = b_.From(from, column);
        PackColumns(b);
        for (int64_t row = 0; row < m_; row += kRows<T>) {
          MultiplyBlock(a_.From(row, from), b, c_.From(row, column), std::min(kRows<T>, m_ - row),
                        from == 0 ? store : After(store));
        }
      }
    }
  }

 private:
  int64_t panels() const { return Ceil(columns_, width_); }
  // Whether a panel is read where it was copied to: a whole one otherwise stands in b.
  bool IsPacked(int64_t panel) const { return pack_b_ || (panel + 1) * width_ > columns_; }

  // Columns past the last are zeros.
  void PackColumns(const StridedMatrix<const T>& b) {
    packed_b_.resize(static_cast<size_t>(panels() * depth_ * width_));
    const PackFunctions<T>& pack = kernels_.pack_vectors[width_ / kernels_.lanes - 1];
    // A few rows of all panels at a time: memory is read along its rows.
    for (int64_t d = 0; d < depth_; d += kRowsAtOnce) {
      for (int64_t panel = pack_b_ ? 0 : panels() - 1; panel < panels(); ++panel) {
        if (!IsPacked(panel)) continue;
        Pack(pack, packed_b_.data() + (panel * depth_ + d) * width_, b.From(d, panel * width_),
             std::min(width_, columns_ - panel * width_), std::min(kRowsAtOnce, depth_ - d));
      }
    }
  }

  void MultiplyBlock(const StridedMatrix<const T>& a, const StridedMatrix<const T>& b, const StridedMatrix<T>& c,
                     int64_t rows, Store store) {
    const int64_t height = kernels_.rows;
    if (pack_a_) {
      packed_a_.resize(static_cast<size_t>(Ceil(rows, height) * height * depth_));
      for (int64_t row = 0; row < rows; row += height) {
        Pack(kernels_.pack_factors, packed_a_.data() + row * depth_, a.From(row, 0).Transposed(),
             std::min(height, rows - row), depth_);
      }
    }
    for (int64_t panel = 0; panel < panels(); ++panel) {
      const int64_t column = panel * width_, columns = std::min(width_, columns_ - column);
      const bool packed = IsPacked(panel);
      const T* const of_b = packed ? packed_b_.data() + panel * depth_ * width_ : b.at + column;
      const int64_t vectors = Ceil(columns, kernels_.lanes), tile_width = vectors * kernels_.lanes;
      for (int64_t row = 0; row < rows; row += height) {
        const int64_t tile_rows = std::min(height, rows - row);
        const ProductTile<T> tile = kernels_.tiles[tile_rows - 1][vectors - 1];
        const T* const of_a = pack_a_ ? packed_a_.data() + row * depth_ : a.at + row * a.row;
        const int64_t a_row = pack_a_ ? 1 : a.row, a_depth = pack_a_ ? height : a.column;
        const StridedMatrix<T> of_c = c.From(row, column);
        if (of_c.column == 1 && tile_width == columns) {
          tile(depth_, of_a, a_row, a_depth, of_b, packed ? width_ : b.row, of_c.at, of_c.row, store);
          continue;
        }
        alignas(64) T sums[kMaxTileRows * kMaxTileColumns];
        tile(depth_, of_a, a_row, a_depth, of_b, packed ? width_ : b.row, sums, tile_width, Store::kWrite);
        ToColumns(sums, tile_width, tile_rows, columns, of_c, store);
      }
    }
  }

  static inline thread_local std::vector<T> packed_a_, packed_b_;

  const PackedKernelsOf<T>& kernels_ = SelectPackedKernels().Of(T{});
  const int64_t m_, n_, k_;
  const StridedMatrix<const T> a_, b_;
  const StridedMatrix<T> c_;
  const int64_t width_;  // of a panel of b
  bool pack_a_, pack_b_;
  int64_t columns_ = 0, depth_ = 0;  // of the block
};

// Both operands are copied, real and imaginary parts apart.
template <class T>
class ComplexProduct {
 public:
  using Complex = std::complex<T>;

  ComplexProduct(int64_t m, int64_t n, int64_t k, const StridedMatrix<const Complex>& a,
                 const StridedMatrix<const Complex>& b, const StridedMatrix<Complex>& c)
      : m_(m), n_(n), k_(k), a_(a), b_(b), c_(c) {}

  void Run(Store store) {
    const int64_t height = kernels_.complex_rows, width = kernels_.lanes;
    for (int64_t column = 0; column < n_; column += kColumns) {
      const int64_t columns = std::min(kColumns, n_ - column);
      for (int64_t from = 0; from < k_; from += kDepth) {
        const int64_t depth = std::min(kDepth, k_ - from);
        Pack(b_.From(from, column).Transposed(), columns, depth, width, &packed_b_);
        for (int64_t row = 0; row < m_; row += kRows<T>) {
          const int64_t rows = std::min(kRows<T>, m_ - row);
          Pack(a_.From(row, from), rows, depth, height, &packed_a_);
          for (int64_t i = 0; i < columns; i += width) {
            for (int64_t r = 0; r < rows; r += height) {
              StoreTile(depth, packed_a_.data() + 2 * r * depth, packed_b_.data() + 2 * i * depth,
                        c_.From(row + r, column + i), std::min(height, rows - r), std::min(width, columns - i),
                        from == 0 ? store : After(store));
            }
          }
        }
      }
    }
  }

 private:
  // Panels of `height` rows: of each column the real parts, then the imaginary ones, with zeros past the last row.
  static void Pack(const StridedMatrix<const Complex>& from, int64_t rows, int64_t depth, int64_t height,
                   std::vector<T>* packed) {
    packed->assign(static_cast<size_t>(Ceil(rows, height) * height * depth * 2), T(0));
    for (int64_t panel = 0; panel < rows; panel += height) {
      T* to = packed->data() + 2 * panel * depth;
      const int64_t filled = std::min(height, rows - panel);
      for (int64_t d = 0; d < depth; ++d, to += 2 * height) {
        for (int64_t r = 0; r < filled; ++r) {
          const Complex value = from.at[(panel + r) * from.row + d * from.column];
          to[r] = value.real();
          to[height + r] = from.conjugated ? -value.imag() : value.imag();
        }
      }
    }
  }

  void StoreTile(int64_t depth, const T* a, const T* b, const StridedMatrix<Complex>& c, int64_t rows, int64_t columns,
                 Store store) const {
    const int64_t height = kernels_.complex_rows, width = kernels_.lanes, plane = height * width;
    alignas(64) T sums[kMaxTileRows * kMaxTileColumns];
    kernels_.complex_tile(depth, a, 2 * height, b, 2 * width, sums, width, Planes{height, width, plane});
    alignas(64) Complex tile[kMaxTileRows * kMaxTileColumns / 2];
    for (int64_t i = 0; i < plane; ++i) tile[i] = {sums[i], sums[plane + i]};
    ToColumns(tile, width, rows, columns, c, store);
  }

  static inline thread_local std::vector<T> packed_a_, packed_b_;

  const PackedKernelsOf<T>& kernels_ = SelectPackedKernels().Of(T{});
  const int64_t m_, n_, k_;
  const StridedMatrix<const Complex> a_, b_;
  const StridedMatrix<Complex> c_;
};

// C' = B' A' where that leaves less to be moved.
template <class T>
bool IsBetterTransposed(int64_t m, int64_t n, int64_t k, const StridedMatrix<const T>& a,
                        const StridedMatrix<const T>& b, const StridedMatrix<T>& c) {
  const int64_t straight = (b.column == 1 ? 0 : kMoved * n * k) + (c.column == 1 ? 0 : kStoredAlone * m * n);
  const int64_t transposed = (a.row == 1 ? 0 : kMoved * m * k) + (c.row == 1 ? 0 : kStoredAlone * m * n);
  return transposed < straight;
}

}  // namespace

template <class T>
void MultiplyPacked(int64_t m, int64_t n, int64_t k, const StridedMatrix<const T>& a, const StridedMatrix<const T>& b,
                    const StridedMatrix<T>& c, Store store) {
  if (k == 0 && store == Store::kWrite) {
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t i = 0; i < n; ++i) c.at[r * c.row + i * c.column] = T(0);
    }
  }
  if (m == 0 || n == 0 || k == 0) return;
  if constexpr (std::is_floating_point_v<T>) {
    if (IsBetterTransposed(m, n, k, a, b, c)) {
      return RealProduct<T>(n, m, k, b.Transposed(), a.Transposed(), c.Transposed()).Run(store);
    }
    RealProduct<T>(m, n, k, a, b, c).Run(store);
  } else {
    ComplexProduct<typename T::value_type>(m, n, k, a, b, c).Run(store);
  }
}

template void MultiplyPacked(int64_t, int64_t, int64_t, const StridedMatrix<const float>&,
                             const StridedMatrix<const float>&, const StridedMatrix<float>&, Store);
template void MultiplyPacked(int64_t, int64_t, int64_t, const StridedMatrix<const double>&,
                             const StridedMatrix<const double>&, const StridedMatrix<double>&, Store);
template void MultiplyPacked(int64_t, int64_t, int64_t, const StridedMatrix<const std::complex<float>>&,
                             const StridedMatrix<const std::complex<float>>&, const StridedMatrix<std::complex<float>>&,
                             Store);
template void MultiplyPacked(int64_t, int64_t, int64_t, const StridedMatrix<const std::complex<double>>&,
                             const StridedMatrix<const std::complex<double>>&,
                             const StridedMatrix<std::complex<double>>&, Store);

}  // namespace flagos::cpu
