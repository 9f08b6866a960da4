// Each pass transforms the lines along one dimension, a block of them at a time. Blocks are shared out among our own
// threads, because those of the library spin while they wait for each other.
#include "cpu/fourier.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

// What MKL's documentation of DftiSetValue calls these, with its numbers.
enum Parameter : int {
  kForwardScale = 4,
  kBackwardScale = 5,
  kNumberOfTransforms = 7,
  kConjugateEvenStorage = 10,
  kPlacement = 11,
  kInputStrides = 12,
  kOutputStrides = 13,
  kInputDistance = 14,
  kOutputDistance = 15,
  kThreadLimit = 27
};
enum Value : int { kComplexDomain = 32, kRealDomain = 33, kComplexStorage = 39, kInPlace = 43, kNotInPlace = 44 };

struct Library {
  long (*create_f32)(void** descriptor, int domain, long length) = nullptr;
  long (*create_f64)(void** descriptor, int domain, long length) = nullptr;
  long (*set_value)(void* descriptor, int parameter, ...) = nullptr;
  long (*commit)(void* descriptor) = nullptr;
  long (*forward)(void* descriptor, void* from, ...) = nullptr;
  long (*backward)(void* descriptor, void* from, ...) = nullptr;
  long (*free)(void** descriptor) = nullptr;

  bool Complete() const { return create_f32 && create_f64 && set_value && commit && forward && backward && free; }
};

template <class F>
void Find(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
}

const Library& FindLibrary() {
  static const Library library = [] {
    Library found;
    const char* wanted = std::getenv("FLAGOS_CPU_PRODUCTS");
    if (wanted != nullptr && std::string_view(wanted) == "flagos") return found;
    void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == nullptr) return found;
    Find(torch, "DftiCreateDescriptor_s_1d", &found.create_f32);
    Find(torch, "DftiCreateDescriptor_d_1d", &found.create_f64);
    Find(torch, "DftiSetValue", &found.set_value);
    Find(torch, "DftiCommitDescriptor", &found.commit);
    Find(torch, "DftiComputeForward", &found.forward);
    Find(torch, "DftiComputeBackward", &found.backward);
    Find(torch, "DftiFreeDescriptor", &found.free);
    return found;
  }();
  return library;
}

// Lines of a descriptor; strides and distances in elements of what is read and written.
struct Lines {
  bool is_double, is_real, in_place;
  int64_t length, stride, from_distance, to_distance;
  double scale;
};

// A committed descriptor of `count` lines, or null. Several threads may compute with it at once.
std::shared_ptr<void> Descriptor(const Lines& lines, int64_t count) {
  const Library& library = FindLibrary();
  void* made = nullptr;
  const auto create = lines.is_double ? library.create_f64 : library.create_f32;
  if (create(&made, lines.is_real ? kRealDomain : kComplexDomain, lines.length) != 0) return nullptr;
  std::shared_ptr<void> descriptor(made, [](void* p) { FindLibrary().free(&p); });
  const long strides[] = {0, static_cast<long>(lines.stride)};
  bool done = true;
  const auto set = [&](Parameter parameter, auto value) {
    done = done && library.set_value(made, parameter, value) == 0;
  };
  if (lines.is_real) set(kConjugateEvenStorage, static_cast<int>(kComplexStorage));
  set(kPlacement, static_cast<int>(lines.in_place ? kInPlace : kNotInPlace));
  set(kNumberOfTransforms, static_cast<long>(count));
  set(kInputStrides, &strides[0]);
  set(kOutputStrides, &strides[0]);
  set(kInputDistance, static_cast<long>(lines.from_distance));
  set(kOutputDistance, static_cast<long>(lines.to_distance));
  set(kForwardScale, lines.scale);
  set(kBackwardScale, lines.scale);
  set(kThreadLimit, 1L);
  if (!done || library.commit(made) != 0) return nullptr;
  return descriptor;
}

// What a block of lines reads and writes stays in a cache.
constexpr int64_t kBlockElements = 1 << 14;
constexpr int64_t kLanes = 16;  // of the widest vectors

int64_t OperationsOfLine(int64_t length) {
  int64_t operations = length;
  for (int64_t rest = length; rest > 1; rest /= 2) operations += length;
  return operations;
}

// The pass along dimension d of the lengths, from one slot to another.
bool AddPass(Fourier* step, size_t d, int64_t from, int64_t to, double scale) {
  const std::vector<int64_t>& lengths = step->lengths;
  const int64_t complex_bytes = step->is_double ? 16 : 8;
  const bool is_last = d + 1 == lengths.size(), is_real = is_last && step->is_real();
  const int64_t halved = step->is_real() ? lengths.back() / 2 + 1 : lengths.back();
  Fourier::Pass pass;
  Lines lines{step->is_double, is_real, from == to, lengths[d], 1, 1, 1, scale};
  pass.forward = !step->is_inverse();
  pass.from = from;
  pass.to = to;
  pass.outer = step->batch;
  for (size_t i = 0; i < d; ++i) pass.outer *= lengths[i];
  pass.lines = 1;
  pass.from_outer = pass.to_outer = 0;
  if (is_last) {
    std::swap(pass.outer, pass.lines);
    lines.from_distance = step->kind == Fourier::Kind::kReal ? lengths[d] : halved;
    lines.to_distance = step->kind == Fourier::Kind::kRealInverse ? lengths[d] : halved;
  } else {
    for (size_t i = d + 1; i < lengths.size(); ++i) pass.lines *= i + 1 < lengths.size() ? lengths[i] : halved;
    lines.stride = pass.lines;
    pass.from_outer = pass.to_outer = lengths[d] * pass.lines * complex_bytes;
  }
  pass.from_line =
      lines.from_distance * (step->kind == Fourier::Kind::kReal && is_last ? complex_bytes / 2 : complex_bytes);
  pass.to_line =
      lines.to_distance * (step->kind == Fourier::Kind::kRealInverse && is_last ? complex_bytes / 2 : complex_bytes);
  pass.block_lines = std::clamp<int64_t>(kBlockElements / lengths[d], 1, pass.lines);
  pass.work = pass.outer * pass.lines * OperationsOfLine(lengths[d]);
  if (!FindLibrary().Complete()) {
    // Whole vectors of lines.
    pass.block_lines = std::min((pass.block_lines + kLanes - 1) / kLanes * kLanes, pass.lines);
    pass.own = PlanLines({step->is_double, is_real, step->is_inverse(), lengths[d], scale});
    pass.read = pass.written = {lines.stride, 1};
    if (is_last) pass.read.line = pass.written.line = lengths[d];
    step->passes.push_back(std::move(pass));
    return true;
  }
  pass.block = Descriptor(lines, pass.block_lines);
  const int64_t rest = pass.lines % pass.block_lines;
  pass.rest = rest == 0 ? pass.block : Descriptor(lines, rest);
  const bool made = pass.block != nullptr && pass.rest != nullptr;
  step->passes.push_back(std::move(pass));
  return made;
}

struct Scratch {
  explicit Scratch(int64_t bytes) : memory(new char[static_cast<size_t>(bytes + 64)]) {}
  char* get() const { return memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64); }
  const std::unique_ptr<char[]> memory;
};

// What computes a block of a pass: our own kernels, with memory of the thread that they run on.
class OwnLines {
 public:
  explicit OwnLines(const Fourier::Pass& pass) : pass_(pass), scratch_(pass.own->ScratchBytes()) {}
  void operator()(const char* from, char* to, int64_t lines) const {
    pass_.own->Run({from, to, pass_.read, pass_.written, lines}, scratch_.get());
  }

 private:
  const Fourier::Pass& pass_;
  const Scratch scratch_;
};

// The library's.
class LibraryLines {
 public:
  explicit LibraryLines(const Fourier::Pass& pass)
      : pass_(pass), compute_(pass.forward ? FindLibrary().forward : FindLibrary().backward) {}
  void operator()(char* from, char* to, int64_t lines) const {
    compute_((lines == pass_.block_lines ? pass_.block : pass_.rest).get(), from, to);
  }

 private:
  const Fourier::Pass& pass_;
  long (*const compute_)(void* descriptor, void* from, ...);
};

template <class Lines>
void RunBlocks(const Fourier::Pass& pass, char* const* slots) {
  struct Job {
    const Fourier::Pass& pass;
    char *from, *to;
  } job{pass, slots[pass.from], slots[pass.to]};
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const Job& job = *static_cast<Job*>(user);
    const Fourier::Pass& pass = job.pass;
    const Lines compute(pass);
    for (int64_t number = begin; number < end; ++number) {
      const int64_t outer = number / pass.blocks(), line = number % pass.blocks() * pass.block_lines;
      compute(job.from + outer * pass.from_outer + line * pass.from_line,
              job.to + outer * pass.to_outer + line * pass.to_line, std::min(pass.block_lines, pass.lines - line));
    }
  };
  RunTasks(pass.outer * pass.blocks(), pass.work, body, &job);
}

void RunPass(const Fourier::Pass& pass, char* const* slots) {
  if (pass.own != nullptr) return RunBlocks<OwnLines>(pass, slots);
  RunBlocks<LibraryLines>(pass, slots);
}

}  // namespace

bool PlanFourier(Fourier* step) {
  double scale = 1;
  if (step->is_inverse()) {
    for (const int64_t length : step->lengths) scale /= static_cast<double>(length);
  }
  const size_t last = step->lengths.size() - 1;
  // What a real inverse reads of the last dimension is half of it, the rest follows: other dimensions come first.
  if (step->kind != Fourier::Kind::kRealInverse) {
    if (!AddPass(step, last, step->source, step->target, last == 0 ? scale : 1)) return false;
    for (size_t d = last; d-- > 0;) {
      if (!AddPass(step, d, step->target, step->target, d == 0 ? scale : 1)) return false;
    }
    return true;
  }
  for (size_t d = 0; d < last; ++d) {
    if (!AddPass(step, d, d == 0 ? step->source : step->scratch, step->scratch, 1)) return false;
  }
  return AddPass(step, last, last == 0 ? step->source : step->scratch, step->target, scale);
}

int64_t WorkOf(const Fourier& step) {
  int64_t work = 0;
  for (const Fourier::Pass& pass : step.passes) work += pass.work;
  return work;
}

void RunFourier(const Fourier& step, char* const* slots) {
  for (const Fourier::Pass& pass : step.passes) RunPass(pass, slots);
}

}  // namespace flagos::cpu
