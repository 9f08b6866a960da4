// Plans of transforms, and what is computed between the kernels' ones.
#include "cpu/fourier_lines.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cpu/matrix_elements.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kMaxRadix = 61;        // of the kernels
constexpr int64_t kFewElements = 48;     // lines of fewer are transformed beside empty lanes
constexpr int64_t kManyElements = 4096;  // lines of more leave the caches, side by side
constexpr int64_t kMostLanes = 16;
constexpr int64_t kAlignment = 64;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

template <class T>
const FourierKernelsOf<T>& FourierOf() {
  static const FourierKernelsOf<T>& kernels = SelectFourierKernels().Of(T{});
  return kernels;
}

int64_t LanesOf(int64_t bytes) { return SelectFourierKernels().vector_bytes / bytes; }

// exp(-2 pi i k / n), as products of two roots of which there are few, in long double.
class Roots {
 public:
  explicit Roots(int64_t n) : n_(n), few_(static_cast<int64_t>(std::sqrt(static_cast<double>(n))) + 1) {
    for (int64_t k = 0; k < few_; ++k) near_.push_back(Exact(k));
    for (int64_t k = 0; k * few_ < n; ++k) far_.push_back(Exact(k * few_));
  }
  template <class T>
  std::complex<T> At(int64_t k) const {
    const std::complex<long double> root =
        Product(near_[static_cast<size_t>(k % few_)], far_[static_cast<size_t>(k / few_)]);
    return {static_cast<T>(root.real()), static_cast<T>(root.imag())};
  }

 private:
  std::complex<long double> Exact(int64_t k) const {
    const long double angle = -2 * std::acos(-1.0L) * static_cast<long double>(k) / static_cast<long double>(n_);
    return {std::cos(angle), std::sin(angle)};
  }

  const int64_t n_, few_;
  std::vector<std::complex<long double>> near_, far_;
};

// Small factors of n, or none if one of them is larger than what kernels take.
std::vector<int64_t> Radices(int64_t n) {
  std::vector<int64_t> radices;
  while (n % 4 == 0) radices.push_back(4), n /= 4;
  for (int64_t factor = 2; factor <= kMaxRadix && n > 1; ++factor) {
    while (n % factor == 0) radices.push_back(factor), n /= factor;
  }
  if (n > 1) radices.clear();
  return radices;
}

// The columns of a matrix of n elements that is about square, in whole vectors where that is possible; 1 if it would be
// too narrow.
int64_t ColumnsOf(int64_t n) {
  int64_t best = 1, best_score = 0;
  for (int64_t rows = 4; rows * rows <= n; ++rows) {
    if (n % rows != 0) continue;
    const int64_t score = rows * (rows % 8 == 0 && n / rows % 8 == 0 ? 4 : 1);
    if (score > best_score) best = n / rows, best_score = score;
  }
  return best;
}

// Powers of two, times three or five: what has a matrix of whole vectors.
int64_t PaddedLength(int64_t least) {
  int64_t best = 64;
  while (best < least) best *= 2;
  for (const int64_t factor : {3, 5, 9, 15}) {
    int64_t n = factor * 64;
    while (n < least) n *= 2;
    best = std::min(best, n);
  }
  return best;
}

// Twiddles and roots of a length whose radices are known.
template <class T>
void PlanStages(Stages<T>* stages) {
  int64_t rest = stages->length;
  for (const int64_t radix : stages->radices) {
    const Roots of_rest(rest), of_radix(radix);
    rest /= radix;
    for (int64_t p = 0; p < rest; ++p) {
      for (int64_t k = 1; k < radix; ++k) stages->twiddles.push_back(of_rest.At<T>(p * k));
    }
    for (int64_t k = 0; k < radix; ++k) stages->roots.push_back(of_radix.At<T>(k));
  }
}

template <class T>
Stages<T> StagesOf(int64_t length) {
  Stages<T> stages{length, Radices(length), {}, {}};
  PlanStages(&stages);
  return stages;
}

}  // namespace

template <class T>
LineTransform<T>::LineTransform(int64_t length) : length_(length) {
  stages_.length = length;
  stages_.radices = Radices(length);
  if (length > 1 && stages_.radices.empty()) {
    const int64_t padded = PaddedLength(2 * length - 1);
    padded_ = std::make_unique<LineTransform>(padded);
    const Roots roots(2 * length);
    filter_.assign(static_cast<size_t>(padded), 0);
    for (int64_t k = 0, square = 0; k < length; ++k) {  // square: k k modulo 2 length
      const std::complex<T> root = roots.At<T>(square);
      chirp_.push_back(root);
      filter_[static_cast<size_t>(k)] = std::conj(root);
      if (k > 0) filter_[static_cast<size_t>(padded - k)] = std::conj(root);
      square = (square + 2 * k + 1) % (2 * length);
    }
    std::vector<char> scratch(static_cast<size_t>(padded_->ScratchBytes() + kAlignment));
    char* const aligned = reinterpret_cast<char*>(Aligned(reinterpret_cast<int64_t>(scratch.data())));
    const LinesOperands all{filter_.data(), filter_.data(), {1, padded}, {1, padded}, 1};
    padded_->Run(all, false, T(1) / static_cast<T>(padded), aligned);
    return;
  }
  PlanStages(&stages_);
  const int64_t columns = length < kFewElements ? 1 : ColumnsOf(length);
  if (columns == 1) return;
  columns_ = StagesOf<T>(length / columns);
  rows_ = StagesOf<T>(columns);
  const Roots roots(length);
  for (int64_t k = 0; k < length / columns; ++k) {
    for (int64_t j = 0; j < columns; ++j) factors_.push_back(roots.At<T>(j * k));
  }
}

template <class T>
int64_t LineTransform<T>::ScratchBytes() const {
  const int64_t bytes = Aligned(length_ * static_cast<int64_t>(sizeof(std::complex<T>)));
  if (padded_ != nullptr) {
    return Aligned(static_cast<int64_t>(filter_.size() * sizeof(std::complex<T>))) + padded_->ScratchBytes();
  }
  const int64_t lanes = ScratchOfLanes<T>(length_);
  if (rows_.length == 0) return lanes;
  const int64_t matrix = bytes + ScratchOfLanes<T>(std::max(rows_.length, columns_.length));
  return length_ > kManyElements ? matrix : std::max(matrix, lanes);
}

template <class T>
void LineTransform<T>::Run(const LinesOperands& operands, bool inverse, T scale, char* scratch) const {
  if (padded_ != nullptr) return RunConvolved(operands, inverse, scale, scratch);
  if (rows_.length != 0 && (operands.lines < LanesOf(sizeof(T)) || length_ > kManyElements)) {
    return RunAsMatrix(operands, inverse, scale, scratch);
  }
  FourierOf<T>().lanes({&stages_, static_cast<const std::complex<T>*>(operands.from),
                        static_cast<std::complex<T>*>(operands.to), operands.read, operands.written, operands.lines,
                        inverse, inverse, scale, nullptr, scratch});
}

// Element j of a line stands in row j / columns of a matrix. The transforms of columns, with their factors, are written
// one after the other; element k of a row's transform is element k * rows of the result.
template <class T>
void LineTransform<T>::RunAsMatrix(const LinesOperands& operands, bool inverse, T scale, char* scratch) const {
  const int64_t rows = columns_.length, columns = rows_.length;
  auto* const between = reinterpret_cast<std::complex<T>*>(scratch);
  char* const rest = scratch + Aligned(length_ * static_cast<int64_t>(sizeof(std::complex<T>)));
  for (int64_t line = 0; line < operands.lines; ++line) {
    const auto* const from = static_cast<const std::complex<T>*>(operands.from) + line * operands.read.line;
    auto* const to = static_cast<std::complex<T>*>(operands.to) + line * operands.written.line;
    const int64_t read = operands.read.element, written = operands.written.element;
    FourierOf<T>().lanes({&columns_,
                          from,
                          between,
                          {read * columns, read},
                          {columns, 1},
                          columns,
                          inverse,
                          false,
                          T(1),
                          factors_.data(),
                          rest});
    FourierOf<T>().lanes(
        {&rows_, between, to, {1, columns}, {written * rows, written}, rows, false, inverse, scale, nullptr, rest});
  }
}

// sum x[j] w^(jk) with jk = (j j + k k - (k - j)(k - j)) / 2.
template <class T>
void LineTransform<T>::RunConvolved(const LinesOperands& operands, bool inverse, T scale, char* scratch) const {
  using Complex = std::complex<T>;
  const int64_t padded = static_cast<int64_t>(filter_.size());
  auto* const line = reinterpret_cast<Complex*>(scratch);
  char* const rest = scratch + Aligned(padded * static_cast<int64_t>(sizeof(Complex)));
  const LinesOperands all{line, line, {1, padded}, {1, padded}, 1};
  const auto exchanged = [inverse](Complex x) { return inverse ? Complex(x.imag(), x.real()) : x; };
  for (int64_t number = 0; number < operands.lines; ++number) {
    const auto* const from = static_cast<const Complex*>(operands.from) + number * operands.read.line;
    auto* const to = static_cast<Complex*>(operands.to) + number * operands.written.line;
    for (int64_t k = 0; k < length_; ++k) {
      line[k] = Product(exchanged(from[k * operands.read.element]), chirp_[static_cast<size_t>(k)]);
    }
    std::fill(line + length_, line + padded, Complex(0));
    padded_->Run(all, false, T(1), rest);
    for (int64_t k = 0; k < padded; ++k) line[k] = Product(line[k], filter_[static_cast<size_t>(k)]);
    padded_->Run(all, true, T(1), rest);
    for (int64_t k = 0; k < length_; ++k) {
      const Complex result = Product(line[k], chirp_[static_cast<size_t>(k)]);
      to[k * operands.written.element] = exchanged(result * scale);
    }
  }
}

template class LineTransform<float>;
template class LineTransform<double>;

namespace {

template <class T>
class ComplexPlan final : public LinesPlan {
 public:
  explicit ComplexPlan(const LinesKind& kind)
      : transform_(kind.length), inverse_(kind.inverse), scale_(static_cast<T>(kind.scale)) {}
  int64_t ScratchBytes() const override { return transform_.ScratchBytes(); }
  void Run(const LinesOperands& operands, char* scratch) const override {
    transform_.Run(operands, inverse_, scale_, scratch);
  }

 private:
  const LineTransform<T> transform_;
  const bool inverse_;
  const T scale_;
};

// Real numbers two by two as complex ones of half the length.
template <class T>
class EvenRealPlan final : public LinesPlan {
 public:
  explicit EvenRealPlan(const LinesKind& kind)
      : half_(kind.length / 2), inverse_(kind.inverse), scale_(static_cast<T>(kind.scale)), transform_(half_) {
    const Roots roots(kind.length);
    for (int64_t k = 0; k <= half_ / 2; ++k) roots_.push_back(roots.At<T>(k));
  }
  int64_t ScratchBytes() const override { return transform_.ScratchBytes(); }
  void Run(const LinesOperands& operands, char* scratch) const override {
    using Complex = std::complex<T>;
    const int64_t halved = half_ + 1;
    auto* const to = static_cast<Complex*>(operands.to);
    if (!inverse_) {
      transform_.Run({operands.from, to, {1, half_}, {1, halved}, operands.lines}, false, scale_, scratch);
      for (int64_t line = 0; line < operands.lines; ++line)
        FourierOf<T>().to_real(to + line * halved, half_, roots_.data());
      return;
    }
    const auto* const from = static_cast<const Complex*>(operands.from);
    for (int64_t line = 0; line < operands.lines; ++line) {
      FourierOf<T>().from_real(from + line * halved, to + line * half_, half_, roots_.data());
    }
    transform_.Run({to, to, {1, half_}, {1, half_}, operands.lines}, true, scale_, scratch);
  }

 private:
  const int64_t half_;
  const bool inverse_;
  const T scale_;
  const LineTransform<T> transform_;
  std::vector<std::complex<T>> roots_;
};

// As complex numbers, a few lines at a time.
template <class T>
class OddRealPlan final : public LinesPlan {
 public:
  explicit OddRealPlan(const LinesKind& kind)
      : length_(kind.length), inverse_(kind.inverse), scale_(static_cast<T>(kind.scale)), transform_(length_) {}
  int64_t ScratchBytes() const override { return LineBytes() + transform_.ScratchBytes(); }
  void Run(const LinesOperands& operands, char* scratch) const override {
    using Complex = std::complex<T>;
    const int64_t halved = length_ / 2 + 1;
    auto* const lines = reinterpret_cast<Complex*>(scratch);
    const int64_t most = kMostLanes;
    for (int64_t first = 0; first < operands.lines; first += most) {
      const int64_t count = std::min(most, operands.lines - first);
      for (int64_t line = 0; line < count; ++line) Widen(operands.from, first + line, lines + line * length_);
      const LinesOperands all{lines, lines, {1, length_}, {1, length_}, count};
      transform_.Run(all, inverse_, scale_, scratch + LineBytes());
      for (int64_t line = 0; line < count; ++line) {
        const Complex* const x = lines + line * length_;
        if (!inverse_) {
          std::copy_n(x, halved, static_cast<Complex*>(operands.to) + (first + line) * halved);
          continue;
        }
        T* const to = static_cast<T*>(operands.to) + (first + line) * length_;
        for (int64_t k = 0; k < length_; ++k) to[k] = x[k].real();
      }
    }
  }

 private:
  int64_t LineBytes() const { return Aligned(length_ * kMostLanes * static_cast<int64_t>(sizeof(std::complex<T>))); }
  void Widen(const void* source, int64_t number, std::complex<T>* line) const {
    if (!inverse_) {
      const T* const x = static_cast<const T*>(source) + number * length_;
      for (int64_t k = 0; k < length_; ++k) line[k] = {x[k], 0};
      return;
    }
    const int64_t halved = length_ / 2 + 1;
    const auto* const x = static_cast<const std::complex<T>*>(source) + number * halved;
    line[0] = {x[0].real(), 0};
    for (int64_t k = 1; k < halved; ++k) {
      line[k] = x[k];
      line[length_ - k] = std::conj(x[k]);
    }
  }

  const int64_t length_;
  const bool inverse_;
  const T scale_;
  const LineTransform<T> transform_;
};

template <class T>
std::unique_ptr<LinesPlan> PlanOf(const LinesKind& kind) {
  if (!kind.is_real) return std::make_unique<ComplexPlan<T>>(kind);
  if (kind.length % 2 == 0) return std::make_unique<EvenRealPlan<T>>(kind);
  return std::make_unique<OddRealPlan<T>>(kind);
}

}  // namespace

std::unique_ptr<LinesPlan> PlanLines(const LinesKind& kind) {
  return kind.is_double ? PlanOf<double>(kind) : PlanOf<float>(kind);
}

}  // namespace flagos::cpu
