#include "cpu/run_loop.h"

#include <algorithm>
#include <cstring>

#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

// What one thread needs for one loop: a tile of memory for each register, and where each register's tile lies now (a
// contiguous input is read in place, a result that is stored contiguously is computed in place).
class Lane {
 public:
  Lane(const Loop& loop, char* const* slots)
      : loop_(loop),
        slots_(slots),
        tiles_(loop.lane_bytes, loop.registers.size(), loop.dims.size() + 2 * loop.iotas.size()),
        starts_(tiles_.index + loop.dims.size()),
        counted_(starts_ + loop.iotas.size()) {
    for (size_t i = 0; i < loop.registers.size(); ++i) {
      tiles_.buffer[i] = tiles_.place[i] = tiles_.Take(loop.tile * TypeBytes(loop.registers[i]));
    }
    FillInvariant(loop, slots, tiles_);
    int64_t bytes = 0;
    for (const Loop::Input& input : loop.inputs) bytes += BytesOf(input);
    for (const Loop::Output& output : loop.outputs) bytes += BytesOf(output);
    const int64_t run = loop.dims.empty() ? 1 : std::min(loop.tile, loop.dims.back());
    looks_ahead_ = !loop.steps.empty() && run >= kLongRun && bytes >= Ahead::kFar;
  }

  void RunMap(int64_t begin, int64_t end) {
    const size_t outer_rank = loop_.dims.empty() ? 0 : loop_.dims.size() - 1;
    const int64_t inner = loop_.dims.empty() ? 1 : loop_.dims.back();
    const int64_t chunks = (inner + loop_.tile - 1) / loop_.tile;
    int64_t chunk = begin % chunks;
    SetIndex(tiles_.index, begin / chunks, loop_.dims, 0, outer_rank);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t start = chunk * loop_.tile;
      const int64_t n = std::min(loop_.tile, inner - start);
      if (!loop_.dims.empty()) tiles_.index[loop_.dims.size() - 1] = start;
      for (const Loop::Output& output : loop_.outputs) {
        if (output.in_place) tiles_.place[Index(output.reg)] = OutputAddress(output);
      }
      Load(start, n);
      if (looks_ahead_) LookAhead(n);
      Compute(n);
      for (const Loop::Output& output : loop_.outputs) {
        if (output.in_place) continue;
        if (output.streamed) {
          Stream(OutputAddress(output), tiles_.place[Index(output.reg)], n * Bytes(output.reg));
          continue;
        }
        const int64_t stride = output.strides.empty() ? 1 : output.strides.back();
        Scatter(OutputAddress(output), tiles_.place[Index(output.reg)], stride, n, Bytes(output.reg));
      }
      if (++chunk == chunks) {
        chunk = 0;
        Advance(tiles_.index, loop_.dims, 0, outer_rank);
      }
    }
    if (loop_.streams) FlushStreams();
  }

 private:
  // Looking ahead pays where tiles are long.
  static constexpr int64_t kLongRun = 256;  // elements

  static size_t Index(int64_t reg) { return static_cast<size_t>(reg); }
  int64_t Bytes(int64_t reg) const { return TypeBytes(loop_.registers[Index(reg)]); }

  // Of an input or an output, all that is read or written; what repeats is so once.
  template <class Access>
  int64_t BytesOf(const Access& access) const {
    int64_t elements = 1;
    for (size_t d = 0; d < access.strides.size(); ++d) {
      if (access.strides[d] != 0) elements *= loop_.dims[d];
    }
    return elements * Bytes(access.reg);
  }

  void Load(int64_t inner, int64_t n) {
    if (!loop_.dims.empty()) tiles_.index[loop_.dims.size() - 1] = inner;
    for (const Loop::Input& input : loop_.inputs) {
      if (!input.invariant) LoadTile(input, n);
    }
    for (size_t i = 0; i < loop_.iotas.size(); ++i) {
      const Loop::Iota& iota = loop_.iotas[i];
      int64_t start = iota.offset;
      for (size_t d = 0; d < loop_.dims.size(); ++d) start += tiles_.index[d] * iota.coefficients[d];
      if (starts_[i] == start && counted_[i] >= n) continue;
      starts_[i] = start;
      counted_[i] = n;
      const int64_t step = loop_.dims.empty() ? 0 : iota.coefficients.back();
      iota.function(tiles_.buffer[Index(iota.reg)], &start, &step, nullptr, n);
    }
  }

  // What the next tile reads and writes, where it goes on in memory.
  void LookAhead(int64_t n) {
    ahead_.Clear();
    const auto add = [&](const auto& access, const char* address) {
      const int64_t bytes = n * Bytes(access.reg);
      if (!access.strides.empty() && access.strides.back() == 1) ahead_.Add(address + bytes, bytes);
    };
    for (const Loop::Input& input : loop_.inputs) add(input, tiles_.place[Index(input.reg)]);
    for (const Loop::Output& output : loop_.outputs) {
      if (!output.streamed) add(output, OutputAddress(output));
    }
    ahead_.Start(static_cast<int64_t>(loop_.steps.size()));
  }

  void Compute(int64_t n) {
    for (const Loop::Step& step : loop_.steps) {
      ahead_.Step();
      step.function(tiles_.place[Index(step.result)], tiles_.place[Index(step.a)], tiles_.place[Index(step.b)],
                    tiles_.place[Index(step.c)], n);
    }
  }

  void LoadTile(const Loop::Input& input, int64_t n) {
    int64_t offset = input.offset;
    for (size_t d = 0; d < loop_.dims.size(); ++d) offset += tiles_.index[d] * input.strides[d];
    const int64_t bytes = Bytes(input.reg);
    const int64_t stride = input.strides.empty() ? 1 : input.strides.back();
    char* from = slots_[Index(input.slot)] + offset * bytes;
    if (input.is_number || (stride == 1 && !input.strides.empty() && !input.invariant)) {
      tiles_.place[Index(input.reg)] = from;
    } else {
      Gather(tiles_.buffer[Index(input.reg)], from, input.strides.empty() ? 0 : stride, n, bytes);
    }
  }

  char* OutputAddress(const Loop::Output& output) const {
    int64_t offset = output.offset;
    for (size_t d = 0; d < output.strides.size(); ++d) offset += tiles_.index[d] * output.strides[d];
    return slots_[Index(output.slot)] + offset * Bytes(output.reg);
  }

  const Loop& loop_;
  char* const* slots_;
  Tiles tiles_;
  int64_t* const starts_;   // of the positions that tiles hold
  int64_t* const counted_;  // how many of them are there
  Ahead ahead_;
  bool looks_ahead_;
};

}  // namespace

void RunLoop(const Loop& loop, char* const* slots) {
  if (loop.mode == LoopMode::kColumns) return RunColumnLoop(loop, slots);
  if (!loop.box.empty()) return RunBoxLoop(loop, slots);
  struct Job {
    const Loop* loop;
    char* const* slots;
  } job{&loop, slots};
  int64_t tasks = 1;
  if (!loop.dims.empty()) {
    tasks = Product(loop.dims, 0, loop.dims.size() - 1) * ((loop.dims.back() + loop.tile - 1) / loop.tile);
  }
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const Job& work = *static_cast<Job*>(user);
    if (begin < end) Lane(*work.loop, work.slots).RunMap(begin, end);
  };
  RunTasks(tasks, loop.work, body, &job);
}

}  // namespace flagos::cpu
