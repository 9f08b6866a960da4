// Loops that reduce columns: blocks of rows are computed at once and reduced into a row of accumulators.
#include <algorithm>
#include <cstring>

#include "cpu/run_loop.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

// How the tasks of a loop are numbered: the outer dimensions, tiles of columns, segments of the blocks of rows.
struct Tasks {
  explicit Tasks(const Loop& loop)
      : rank(loop.dims.size()),
        kept(rank - 1 - static_cast<size_t>(loop.num_reduced)),
        inner(loop.dims.back()),
        chunks((inner + loop.columns - 1) / loop.columns),
        tiles(Product(loop.dims, 0, kept) * chunks),
        blocks_in_dimension((loop.dims[rank - 2] + loop.rows - 1) / loop.rows),
        blocks(Product(loop.dims, kept, rank - 2) * blocks_in_dimension) {}

  size_t rank, kept;
  int64_t inner, chunks, tiles, blocks_in_dimension, blocks;
};

class ColumnLane {
 public:
  // partials: where the accumulators of all tasks go, or null when nothing has to join them.
  ColumnLane(const Loop& loop, char* const* slots, char* partials)
      : loop_(loop),
        tasks_(loop),
        slots_(slots),
        partials_(partials),
        tiles_(loop.lane_bytes, loop.registers.size() + loop.reductions.size(), loop.dims.size()),
        loaded_(loop.inputs.size()) {
    accumulators_ = tiles_.buffer + loop.registers.size();
    for (size_t i = 0; i < loop.registers.size(); ++i) {
      tiles_.buffer[i] = tiles_.place[i] = tiles_.Take(loop.tile * TypeBytes(loop.registers[i]));
    }
    for (size_t r = 0; r < loop.reductions.size(); ++r) accumulators_[r] = tiles_.Take(loop.columns * 8);
    FillInvariant(loop, slots, tiles_);
  }

  void Run(int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t segment = task % loop_.segments, n = Begin(task / loop_.segments);
      const int64_t first = tasks_.blocks * segment / loop_.segments;
      const int64_t last = tasks_.blocks * (segment + 1) / loop_.segments;
      const int64_t start = tiles_.index[tasks_.rank - 1];
      LoadFixed(n);
      Compute(loop_.fixed_steps, loop_.rows * n);
      if (segment == 0) Start(n);
      if (first < last)
        SetIndex(tiles_.index, first / tasks_.blocks_in_dimension, loop_.dims, tasks_.kept, tasks_.rank - 2);
      int64_t row = first < last ? first % tasks_.blocks_in_dimension * loop_.rows : 0;
      for (int64_t block = first; block < last; ++block) {
        tiles_.index[tasks_.rank - 2] = row;
        tiles_.index[tasks_.rank - 1] = start;
        const int64_t rows = std::min(loop_.rows, loop_.dims[tasks_.rank - 2] - row);
        Load(rows, n);
        Compute(loop_.steps, rows * n);
        for (size_t r = 0; r < loop_.reductions.size(); ++r) Reduce(r, rows, n, segment > 0 && block == first);
        row += loop_.rows;
        if (row >= loop_.dims[tasks_.rank - 2]) {
          row = 0;
          Advance(tiles_.index, loop_.dims, tasks_.kept, tasks_.rank - 2);
        }
      }
      if (partials_ != nullptr) {
        Keep(task);
      } else {
        Finish(n);
      }
    }
  }

  // The segments of one tile after another.
  void Join() {
    for (int64_t tile = 0; tile < tasks_.tiles; ++tile) {
      const int64_t n = Begin(tile);
      for (size_t r = 0; r < loop_.reductions.size(); ++r) {
        std::memcpy(accumulators_[r], Partial(tile * loop_.segments, r), static_cast<size_t>(loop_.columns * 8));
        for (int64_t segment = 1; segment < loop_.segments; ++segment) {
          const char* const partial = Partial(tile * loop_.segments + segment, r);
          loop_.reductions[r].combine_wide(accumulators_[r], accumulators_[r], partial, nullptr, n);
        }
      }
      Finish(n);
    }
  }

 private:
  struct Block {
    const char* from = nullptr;
    int64_t rows = 0, n = 0;
  };

  static size_t Index(int64_t reg) { return static_cast<size_t>(reg); }
  int64_t Bytes(int64_t reg) const { return TypeBytes(loop_.registers[Index(reg)]); }

  // Sets the index to a tile and returns how many columns it has.
  int64_t Begin(int64_t tile) {
    const int64_t start = tile % tasks_.chunks * loop_.columns;
    SetIndex(tiles_.index, tile / tasks_.chunks, loop_.dims, 0, tasks_.kept);
    tiles_.index[tasks_.rank - 1] = start;
    return std::min(loop_.columns, tasks_.inner - start);
  }

  const char* Address(const Loop::Input& input) const {
    int64_t offset = input.offset;
    for (size_t d = 0; d < tasks_.rank; ++d) offset += tiles_.index[d] * input.strides[d];
    return slots_[Index(input.slot)] + offset * Bytes(input.reg);
  }

  void Compute(const std::vector<Loop::Step>& steps, int64_t n) {
    for (const Loop::Step& step : steps) {
      step.function(tiles_.place[Index(step.result)], tiles_.place[Index(step.a)], tiles_.place[Index(step.b)],
                    tiles_.place[Index(step.c)], n);
    }
  }

  // What is the same in all rows, for as many as a block has.
  void LoadFixed(int64_t n) {
    for (size_t i = 0; i < loop_.inputs.size(); ++i) {
      if (loop_.inputs[i].fixed && !loop_.inputs[i].invariant) LoadBlock(i, loop_.rows, n);
    }
  }

  void LoadBlock(size_t number, int64_t rows, int64_t n) {
    const Loop::Input& input = loop_.inputs[number];
    const int64_t stride = input.strides[tasks_.rank - 1], row_stride = input.strides[tasks_.rank - 2];
    const char* const from = Address(input);
    char*& place = tiles_.place[Index(input.reg)];
    if (input.reduced_in_place || (stride == 1 && (row_stride == n || rows == 1))) {
      place = const_cast<char*>(from);
      return;
    }
    place = tiles_.buffer[Index(input.reg)];
    // What does not change from block to block is still there.
    Block& block = loaded_[number];
    if (block.from == from && block.rows >= rows && block.n == n) return;
    block = {from, rows, n};
    MoveElements(place, from, {rows, n, n, 1, row_stride, stride}, Bytes(input.reg));
  }

  void Load(int64_t rows, int64_t n) {
    for (size_t i = 0; i < loop_.inputs.size(); ++i) {
      if (!loop_.inputs[i].fixed) LoadBlock(i, rows, n);
    }
    for (const Loop::Iota& iota : loop_.iotas) {
      int64_t start = iota.offset;
      for (size_t d = 0; d < tasks_.rank; ++d) start += tiles_.index[d] * iota.coefficients[d];
      for (int64_t row = 0; row < rows; ++row, start += iota.coefficients[tasks_.rank - 2]) {
        char* const to = tiles_.buffer[Index(iota.reg)] + row * n * Bytes(iota.reg);
        iota.function(to, &start, &iota.coefficients.back(), nullptr, n);
      }
    }
  }

  void Start(int64_t n) {
    for (size_t r = 0; r < loop_.reductions.size(); ++r) Start(r, tiles_.buffer[Index(loop_.reductions[r].initial)], n);
  }

  void Start(size_t r, const char* values, int64_t n) {
    const Loop::Reduction& reduction = loop_.reductions[r];
    if (reduction.widen != nullptr) {
      reduction.widen(accumulators_[r], values, nullptr, nullptr, n);
    } else {
      std::memcpy(accumulators_[r], values, static_cast<size_t>(n * TypeBytes(reduction.type)));
    }
  }

  void Reduce(size_t r, int64_t rows, int64_t n, bool begins) {
    const Loop::Reduction& reduction = loop_.reductions[r];
    const char* values = tiles_.place[Index(reduction.reg)];
    const int64_t stride = reduction.input < 0 ? n : loop_.inputs[Index(reduction.input)].strides[tasks_.rank - 2];
    if (begins) {
      Start(r, values, n);
      values += stride * TypeBytes(reduction.type);
      --rows;
    }
    reduction.reduce_rows(accumulators_[r], values, rows, stride, n);
  }

  char* Partial(int64_t task, size_t r) const {
    const int64_t number = task * static_cast<int64_t>(loop_.reductions.size()) + static_cast<int64_t>(r);
    return partials_ + number * loop_.columns * 8;
  }

  void Keep(int64_t task) {
    for (size_t r = 0; r < loop_.reductions.size(); ++r) {
      std::memcpy(Partial(task, r), accumulators_[r], static_cast<size_t>(loop_.columns * 8));
    }
  }

  void Finish(int64_t n) {
    for (size_t r = 0; r < loop_.reductions.size(); ++r) {
      const Loop::Reduction& reduction = loop_.reductions[r];
      char* const to = tiles_.buffer[Index(reduction.result)];
      if (reduction.narrow != nullptr) {
        reduction.narrow(to, accumulators_[r], nullptr, nullptr, n);
      } else {
        std::memcpy(to, accumulators_[r], static_cast<size_t>(n * TypeBytes(reduction.type)));
      }
    }
    for (const Loop::Output& output : loop_.outputs) {
      int64_t offset = output.offset + tiles_.index[tasks_.rank - 1] * output.strides.back();
      for (size_t d = 0; d < tasks_.kept; ++d) offset += tiles_.index[d] * output.strides[d];
      char* const to = slots_[Index(output.slot)] + offset * Bytes(output.reg);
      Scatter(to, tiles_.buffer[Index(output.reg)], output.strides.back(), n, Bytes(output.reg));
    }
  }

  const Loop& loop_;
  const Tasks tasks_;
  char* const* slots_;
  char* const partials_;
  Tiles tiles_;
  std::vector<Block> loaded_;  // of each input, what is in its register
  char** accumulators_;        // of each reduction
};

}  // namespace

void RunColumnLoop(const Loop& loop, char* const* slots) {
  const int64_t num_tasks = Tasks(loop).tiles * loop.segments;
  if (num_tasks == 0) return;
  std::vector<char> partials;
  if (loop.segments > 1) {
    partials.resize(static_cast<size_t>(num_tasks * loop.columns * 8) * loop.reductions.size());
  }
  struct Job {
    const Loop& loop;
    char* const* slots;
    char* partials;
  } job{loop, slots, loop.segments > 1 ? partials.data() : nullptr};
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const Job& work = *static_cast<Job*>(user);
    if (begin < end) ColumnLane(work.loop, work.slots, work.partials).Run(begin, end);
  };
  RunTasks(num_tasks, loop.work, body, &job);
  if (loop.segments > 1) ColumnLane(loop, slots, partials.data()).Join();
}

}  // namespace flagos::cpu
