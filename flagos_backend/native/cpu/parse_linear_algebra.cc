// Reads what libraries compute elsewhere: factorisations, decompositions and Fourier transforms.
#include <algorithm>
#include <limits>
#include <utility>

#include "cpu/decompositions.h"
#include "cpu/lapack.h"
#include "cpu/parse.h"

namespace flagos::cpu {
namespace {

// How many bytes the buffers of a step of LAPACK's have.
void DecompositionBuffers(const LinearAlgebra& step, int64_t element, std::vector<int64_t>* sources,
                          std::vector<int64_t>* targets) {
  using Kind = LinearAlgebra::Kind;
  const auto has = [&](int64_t flag) { return (step.flags & flag) != 0; };
  const bool is_complex = step.element_type >= 2;
  const int64_t n = step.columns, rank = step.rank(), real = is_complex ? element / 2 : element;
  const auto bytes = [&](int64_t count, int64_t each) { return Times(step.batch, Times(count, each)); };
  const int64_t square = bytes(Times(n, n), element), wide = is_complex ? element : 2 * element;
  const bool any_shape =
      step.kind == Kind::kSvd || step.kind == Kind::kPivotedQr || step.kind == Kind::kApplyReflectors;
  Require(any_shape || step.rows == n, "a matrix is not square");
  Require(Times(step.rows, n) <= std::numeric_limits<int32_t>::max(), "a matrix is too large for LAPACK");
  switch (step.kind) {
    case Kind::kEigh:
      *targets = {square, bytes(n, real)};
      break;
    case Kind::kSvd: {
      const int64_t left = has(LinearAlgebra::kFullMatrices) ? step.rows : rank;
      const int64_t right = has(LinearAlgebra::kFullMatrices) ? n : rank;
      *targets = {bytes(rank, real)};
      if (has(LinearAlgebra::kVectors)) {
        targets->push_back(bytes(Times(step.rows, left), element));
        targets->push_back(bytes(Times(right, n), element));
      }
      break;
    }
    case Kind::kEig:
      *targets = {bytes(n, wide)};
      for (const auto flag : {LinearAlgebra::kLeftVectors, LinearAlgebra::kVectors}) {
        if (has(flag)) targets->push_back(bytes(Times(n, n), wide));
      }
      break;
    case Kind::kSchur:
      *targets = {square};
      if (has(LinearAlgebra::kVectors)) targets->push_back(square);
      break;
    case Kind::kHessenberg:
      *targets = {square, bytes(n - 1, element)};
      break;
    case Kind::kTridiagonal:
      *targets = {square, bytes(n, real), bytes(n - 1, real), bytes(n - 1, element)};
      break;
    case Kind::kPivotedQr:
      sources->push_back(bytes(n, 4));
      *targets = {sources->front(), bytes(n, 4), bytes(rank, element)};
      break;
    default:
      Require(step.reflectors > 0 && step.reflectors <= step.order(), "more reflectors than columns");
      *targets = *sources;
      *sources = {bytes(Times(step.order(), step.reflectors), element), bytes(step.reflectors, element),
                  sources->front()};
  }
}

}  // namespace

LinearAlgebra Parser::ParseLinearAlgebra() {
  using Kind = LinearAlgebra::Kind;
  LinearAlgebra step;
  const int64_t kind = Word();
  step.element_type = Word();
  Require(kind >= 0 && kind < LinearAlgebra::kNumKinds && step.element_type >= 0 && step.element_type <= 3,
          "linear algebra that does not exist");
  step.kind = static_cast<Kind>(kind);
  for (int64_t* size : {&step.batch, &step.rows, &step.columns}) {
    *size = Word();
    Require(*size > 0 && *size <= std::numeric_limits<int32_t>::max() / 64, "a matrix dimension is out of range");
  }
  step.reflectors = Word();
  step.flags = Word();
  Require(step.flags >= 0 && step.flags <= LinearAlgebra::kAllFlags, "unknown flags");
  step.sources = ReadableSlots();
  step.targets = WritableSlots();
  const int64_t bytes[] = {4, 8, 8, 16}, element = bytes[step.element_type];
  const int64_t rows = Times(step.batch, step.rows), matrices = Times(rows, Times(step.columns, element));
  const int64_t diagonals = Times(step.batch, Times(step.rank(), element));
  const int64_t triangles = Times(step.batch, Times(Times(step.order(), step.order()), element));
  Times(Times(matrices, step.rank()), kDecompositionWork);  // so that their work is a number
  Require(Count() == 0, "linear algebra has no scratch");
  std::vector<int64_t> sources{matrices}, targets{matrices};
  if (step.kind == Kind::kCholesky) Require(step.rows == step.columns, "a Cholesky factor is square");
  if (step.kind == Kind::kLu) targets = {matrices, Times(step.batch, step.rank() * 4), Times(rows, 4)};
  if (step.kind == Kind::kTriangularSolve) sources = {triangles, matrices};
  if (step.kind == Kind::kQr) targets = {matrices, diagonals};
  if (step.kind == Kind::kReflectors) {
    Require(step.columns <= step.rows && step.reflectors >= 0 && step.reflectors <= step.columns,
            "more reflectors than columns");
    sources = {matrices, Times(step.batch, Times(step.reflectors, element))};
  }
  if (IsDecomposition(step.kind)) {
    Require(HaveLapack(), "no LAPACK in this process");
    DecompositionBuffers(step, element, &sources, &targets);
  }
  CheckBuffers(step.sources, sources);
  CheckBuffers(step.targets, targets);
  step.target_bytes = std::move(targets);
  if (IsDecomposition(step.kind)) Require(PlanDecomposition(&step), "LAPACK refuses a matrix");
  return step;
}

Fourier Parser::ParseFourier() {
  constexpr int64_t kMostElements = int64_t{1} << 48;  // so that their bytes and work are numbers
  Fourier step;
  const int64_t kind = Word(), is_double = Word(), rank = Count();
  Require(kind >= 0 && kind < Fourier::kNumKinds && (is_double == 0 || is_double == 1) && rank > 0 &&
              rank <= Fourier::kMaxRank,
          "a Fourier transform that does not exist");
  step.kind = static_cast<Fourier::Kind>(kind);
  step.is_double = is_double == 1;
  step.batch = Word();
  Require(step.batch > 0, "no Fourier transforms");
  int64_t rows = step.batch;  // lines along the last dimension
  for (int64_t d = 0; d < rank; ++d) {
    step.lengths.push_back(Word());
    Require(step.lengths.back() > 0 && step.lengths.back() <= std::numeric_limits<int32_t>::max(),
            "the length of a Fourier transform is out of range");
    if (d + 1 < rank) rows = Times(rows, step.lengths.back());
  }
  const int64_t length = step.lengths.back(), element = step.is_double ? 8 : 4;
  Require(Times(rows, length) <= kMostElements, "too many Fourier transforms");
  const int64_t real = Times(rows, length * element);
  const int64_t complex = Times(rows, (step.is_real() ? length / 2 + 1 : length) * 2 * element);
  const std::vector<int64_t> sources = ReadableSlots(), targets = WritableSlots(), scratch = WritableSlots();
  CheckBuffers(sources, {step.kind == Fourier::Kind::kReal ? real : complex});
  CheckBuffers(targets, {step.kind == Fourier::Kind::kRealInverse ? real : complex});
  CheckBuffers(scratch, step.needs_scratch() ? std::vector<int64_t>{complex} : std::vector<int64_t>{});
  step.source = sources[0];
  step.target = targets[0];
  step.scratch = scratch.empty() ? -1 : scratch[0];
  Require(PlanFourier(&step), "the library refuses a Fourier transform");
  return step;
}

}  // namespace flagos::cpu
