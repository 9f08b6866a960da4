#include "cpu/run_loop.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/thread_pool.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kParallelWork = 1 << 16;  // element operations below which threads cost more than they bring

template <class T>
void CopyStrided(void* to, const char* from, int64_t stride, int64_t n) {
  T* d = static_cast<T*>(to);
  const T* x = reinterpret_cast<const T*>(from);
  for (int64_t i = 0; i < n; ++i) d[i] = x[i * stride];
}
template <class T>
void StoreStrided(char* to, const void* from, int64_t stride, int64_t n) {
  T* d = reinterpret_cast<T*>(to);
  const T* x = static_cast<const T*>(from);
  for (int64_t i = 0; i < n; ++i) d[i * stride] = x[i];
}
void Gather(void* to, const char* from, int64_t stride, int64_t n, int64_t bytes) {
  switch (bytes) {
    case 1:
      return CopyStrided<uint8_t>(to, from, stride, n);
    case 2:
      return CopyStrided<uint16_t>(to, from, stride, n);
    case 4:
      return CopyStrided<uint32_t>(to, from, stride, n);
    default:
      return CopyStrided<uint64_t>(to, from, stride, n);
  }
}
void Scatter(char* to, const void* from, int64_t stride, int64_t n, int64_t bytes) {
  if (stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(n * bytes));
    return;
  }
  switch (bytes) {
    case 1:
      return StoreStrided<uint8_t>(to, from, stride, n);
    case 2:
      return StoreStrided<uint16_t>(to, from, stride, n);
    case 4:
      return StoreStrided<uint32_t>(to, from, stride, n);
    default:
      return StoreStrided<uint64_t>(to, from, stride, n);
  }
}

// Memory that a thread keeps from loop to loop. A thread runs one loop at a time.
struct LaneMemory {
  std::vector<char> tiles;
  std::vector<char*> pointers;
  std::vector<int64_t> index;
};

LaneMemory& ThisThreadsMemory() {
  thread_local LaneMemory memory;
  return memory;
}

// What one thread needs for one loop: a tile of memory for each register, and where each register's tile lies now (a
// contiguous input is read in place, a result that is stored contiguously is computed in place).
class Lane {
 public:
  Lane(const Loop& loop, char* const* slots) : loop_(loop), slots_(slots), kernels_(SelectedKernels()) {
    LaneMemory& memory = ThisThreadsMemory();
    const size_t n = loop.registers.size(), num_reductions = loop.reductions.size();
    if (memory.tiles.size() < loop.lane_bytes) memory.tiles.resize(loop.lane_bytes);
    if (memory.pointers.size() < 2 * (n + num_reductions)) memory.pointers.resize(2 * (n + num_reductions));
    memory.index.assign(loop.dims.size(), 0);
    cursor_ = memory.tiles.data();
    home_ = memory.pointers.data();
    place_ = home_ + n;
    accumulators_ = place_ + n;
    widened_ = accumulators_ + num_reductions;
    index_ = memory.index.data();
    for (size_t i = 0; i < n; ++i) home_[i] = place_[i] = Take(loop.tile * TypeBytes(loop.registers[i]));
    for (size_t i = 0; i < num_reductions; ++i) {
      accumulators_[i] = Take(loop.tile * 8);
      widened_[i] = Take(loop.tile * 8);
    }
    for (const Loop::Constant& constant : loop.constants) {
      const char* const bits = reinterpret_cast<const char*>(&constant.bits);
      Gather(home_[Index(constant.reg)], bits, 0, loop.tile, Bytes(constant.reg));
    }
    for (const Loop::Input& input : loop.inputs) {
      if (input.invariant) LoadTile(input, loop.tile);
    }
  }

  // Writes dimensions [begin, end) of the index from a flat number over them.
  void SetIndex(int64_t flat, size_t begin, size_t end) {
    for (size_t d = end; d-- > begin;) {
      index_[d] = flat % loop_.dims[d];
      flat /= loop_.dims[d];
    }
  }

  void Compute(int64_t inner, int64_t n) {
    if (!loop_.dims.empty()) index_[loop_.dims.size() - 1] = inner;
    for (const Loop::Input& input : loop_.inputs) {
      if (!input.invariant) LoadTile(input, n);
    }
    for (const Loop::Iota& iota : loop_.iotas) {
      int64_t start = iota.offset;
      for (size_t d = 0; d < loop_.dims.size(); ++d) start += index_[d] * iota.coefficients[d];
      const int64_t step = loop_.dims.empty() ? 0 : iota.coefficients.back();
      kernels_.iota[static_cast<int>(loop_.registers[Index(iota.reg)])](home_[Index(iota.reg)], &start, &step, nullptr,
                                                                        n);
    }
    for (const Loop::Step& step : loop_.steps) {
      step.function(place_[Index(step.result)], place_[Index(step.a)], place_[Index(step.b)], place_[Index(step.c)], n);
    }
  }

  void RunMap(int64_t begin, int64_t end) {
    const size_t outer_rank = loop_.dims.empty() ? 0 : loop_.dims.size() - 1;
    const int64_t inner = loop_.dims.empty() ? 1 : loop_.dims.back();
    const int64_t chunks = (inner + loop_.tile - 1) / loop_.tile;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t start = task % chunks * loop_.tile;
      const int64_t n = std::min(loop_.tile, inner - start);
      SetIndex(task / chunks, 0, outer_rank);
      if (!loop_.dims.empty()) index_[loop_.dims.size() - 1] = start;
      for (const Loop::Output& output : loop_.outputs) {
        if (output.in_place) place_[Index(output.reg)] = OutputAddress(output);
      }
      Compute(start, n);
      for (const Loop::Output& output : loop_.outputs) {
        if (output.in_place) continue;
        const int64_t stride = output.strides.empty() ? 1 : output.strides.back();
        Scatter(OutputAddress(output), place_[Index(output.reg)], stride, n, Bytes(output.reg));
      }
    }
  }

  void RunRows(int64_t begin, int64_t end) {
    const size_t kept = loop_.dims.size() - static_cast<size_t>(loop_.num_folded);
    const int64_t inner = loop_.dims.back();
    int64_t outer_folded = 1;
    for (size_t d = kept; d + 1 < loop_.dims.size(); ++d) outer_folded *= loop_.dims[d];
    for (int64_t row = begin; row < end; ++row) {
      SetIndex(row, 0, kept);
      for (size_t r = 0; r < loop_.reductions.size(); ++r) {
        Start(r, 1);
        Lost(r) = 0.0;
      }
      for (int64_t folded = 0; folded < outer_folded; ++folded) {
        SetIndex(folded, kept, loop_.dims.size() - 1);
        for (int64_t start = 0; start < inner; start += loop_.tile) {
          const int64_t n = std::min(loop_.tile, inner - start);
          Compute(start, n);
          for (size_t r = 0; r < loop_.reductions.size(); ++r) FoldTile(r, n);
        }
      }
      for (size_t r = 0; r < loop_.reductions.size(); ++r) {
        if (loop_.reductions[r].compensated && std::isfinite(Lost(r))) Total(r) += Lost(r);
      }
      Finish(1);
    }
  }

  void RunColumns(int64_t begin, int64_t end) {
    const size_t rank = loop_.dims.size();
    const size_t kept = rank - 1 - static_cast<size_t>(loop_.num_folded);
    const int64_t inner = loop_.dims.back();
    const int64_t chunks = (inner + loop_.tile - 1) / loop_.tile;
    int64_t folded_count = 1;
    for (size_t d = kept; d + 1 < rank; ++d) folded_count *= loop_.dims[d];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t start = task % chunks * loop_.tile;
      const int64_t n = std::min(loop_.tile, inner - start);
      SetIndex(task / chunks, 0, kept);
      for (size_t r = 0; r < loop_.reductions.size(); ++r) Start(r, n);
      for (int64_t folded = 0; folded < folded_count; ++folded) {
        SetIndex(folded, kept, rank - 1);
        Compute(start, n);
        for (size_t r = 0; r < loop_.reductions.size(); ++r) {
          const Loop::Reduction& reduction = loop_.reductions[r];
          const char* value = place_[Index(reduction.reg)];
          if (reduction.widen != nullptr) {
            reduction.widen(widened_[r], value, nullptr, nullptr, n);
            value = widened_[r];
          }
          reduction.combine_wide(accumulators_[r], accumulators_[r], value, nullptr, n);
        }
      }
      Finish(n);
    }
  }

 private:
  static const Kernels& SelectedKernels() {
    static const Kernels& kernels = SelectKernels();
    return kernels;
  }
  static size_t Index(int64_t reg) { return static_cast<size_t>(reg); }
  int64_t Bytes(int64_t reg) const { return TypeBytes(loop_.registers[Index(reg)]); }

  char* Take(int64_t bytes) {
    char* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(cursor_) + 63) & ~uintptr_t{63});
    cursor_ = aligned + bytes;
    return aligned;
  }

  void LoadTile(const Loop::Input& input, int64_t n) {
    int64_t offset = input.offset;
    for (size_t d = 0; d < loop_.dims.size(); ++d) offset += index_[d] * input.strides[d];
    const int64_t bytes = Bytes(input.reg);
    const int64_t stride = input.strides.empty() ? 1 : input.strides.back();
    char* from = slots_[Index(input.slot)] + offset * bytes;
    if (stride == 1 && !input.strides.empty() && !input.invariant) {
      place_[Index(input.reg)] = from;
    } else {
      Gather(home_[Index(input.reg)], from, input.strides.empty() ? 0 : stride, n, bytes);
    }
  }

  char* OutputAddress(const Loop::Output& output) const {
    int64_t offset = output.offset;
    // In column mode the last stride belongs to the tile dimension, which is the last of the loop.
    for (size_t d = 0; d < output.strides.size(); ++d) {
      const size_t dimension =
          loop_.mode == LoopMode::kColumns && d + 1 == output.strides.size() ? loop_.dims.size() - 1 : d;
      offset += index_[dimension] * output.strides[d];
    }
    return slots_[Index(output.slot)] + offset * Bytes(output.reg);
  }

  void Start(size_t r, int64_t n) {
    const Loop::Reduction& reduction = loop_.reductions[r];
    const char* initial = slots_[Index(reduction.initial_slot)];
    char wide[8];
    int64_t bytes = TypeBytes(reduction.type);
    if (reduction.widen != nullptr) {
      reduction.widen(wide, initial, nullptr, nullptr, 1);
      bytes = TypeBytes(AccumulatorType(reduction.combine, reduction.type));
      initial = wide;
    }
    Gather(accumulators_[r], initial, 0, n, bytes);
  }

  // Of a compensated reduction over rows: the sum, and what rounding took from it so far.
  double& Total(size_t r) { return *reinterpret_cast<double*>(accumulators_[r]); }
  double& Lost(size_t r) { return *reinterpret_cast<double*>(widened_[r]); }

  // Folds a tile of a row into its accumulator.
  void FoldTile(size_t r, int64_t n) {
    const Loop::Reduction& reduction = loop_.reductions[r];
    const char* const values = place_[Index(reduction.reg)];
    if (!reduction.compensated) return reduction.fold(accumulators_[r], values, n);
    double part = 0.0;
    reduction.fold(&part, values, n);
    // Knuth's exact sum: total + part = sum + error.
    const double total = Total(r), sum = total + part, taken = sum - total;
    Lost(r) += (total - (sum - taken)) + (part - taken);
    Total(r) = sum;
  }

  void Finish(int64_t n) {
    for (size_t r = 0; r < loop_.reductions.size(); ++r) {
      const Loop::Reduction& reduction = loop_.reductions[r];
      char* to = home_[Index(reduction.result)];
      place_[Index(reduction.result)] = to;
      if (reduction.narrow != nullptr) {
        reduction.narrow(to, accumulators_[r], nullptr, nullptr, n);
      } else {
        std::memcpy(to, accumulators_[r], static_cast<size_t>(n * TypeBytes(reduction.type)));
      }
    }
    for (const Loop::Output& output : loop_.outputs) {
      const int64_t stride = loop_.mode == LoopMode::kColumns ? output.strides.back() : 1;
      Scatter(OutputAddress(output), place_[Index(output.reg)], stride, n, Bytes(output.reg));
    }
  }

  const Loop& loop_;
  char* const* slots_;
  const Kernels& kernels_;
  char* cursor_ = nullptr;
  char** home_;          // of each register
  char** place_;         // of each register
  char** accumulators_;  // of each reduction
  char** widened_;       // of each reduction
  int64_t* index_;       // of each dimension
};

int64_t Product(const std::vector<int64_t>& dims, size_t begin, size_t end) {
  int64_t product = 1;
  for (size_t d = begin; d < end; ++d) product *= dims[d];
  return product;
}

}  // namespace

void RunLoop(const Loop& loop, char* const* slots) {
  struct Job {
    const Loop* loop;
    char* const* slots;
  } job{&loop, slots};
  const size_t rank = loop.dims.size();
  const size_t folded = static_cast<size_t>(loop.num_folded);
  int64_t tasks = 1;
  if (loop.mode == LoopMode::kRows) {
    tasks = Product(loop.dims, 0, rank - folded);
  } else if (rank > 0) {
    tasks = Product(loop.dims, 0, rank - 1 - folded) * ((loop.dims.back() + loop.tile - 1) / loop.tile);
  }
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const Job& work = *static_cast<Job*>(user);
    Lane lane(*work.loop, work.slots);
    switch (work.loop->mode) {
      case LoopMode::kMap:
        return lane.RunMap(begin, end);
      case LoopMode::kRows:
        return lane.RunRows(begin, end);
      case LoopMode::kColumns:
        return lane.RunColumns(begin, end);
    }
  };
  if (loop.work < kParallelWork || tasks < 2) {
    body(&job, 0, tasks);
  } else {
    ThreadPool::Shared().ParallelFor(tasks, std::max<int64_t>(1, tasks * (kParallelWork / 4) / loop.work), body, &job);
  }
}

}  // namespace flagos::cpu
