// Finds the calls of kernels that the steps of a program come to. What takes no kernels, or is worth threads or more than a
// few tiles, stays a step.
#include <algorithm>
#include <cstring>

#include "cpu/native_program.h"
#include "cpu/run_loop.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

using Place = IterationPlan::Place;

constexpr int64_t kMaxCalls = 64;     // of a loop
constexpr int64_t kMaxRun = 1 << 12;  // elements of a window
constexpr int64_t kSmallWork = 256;   // of a product

template <size_t kBytes>
void CopyFew(void* result, const void* a, const void*, const void*, int64_t) {
  std::memcpy(result, a, kBytes);
}
void CopyBytes(void* result, const void* a, const void*, const void*, int64_t bytes) {
  std::memcpy(result, a, static_cast<size_t>(bytes));
}
TileFunction CopyFunction(int64_t bytes) { return bytes == 4 ? &CopyFew<4> : bytes == 8 ? &CopyFew<8> : &CopyBytes; }

// c: how elements of `bytes` bytes stand.
void MoveTile(void* result, const void* a, const void*, const void* c, int64_t bytes) {
  MoveElements(static_cast<char*>(result), static_cast<const char*>(a), *static_cast<const Plane*>(c), bytes);
}

// Where a block is in an array: so far on, and by how far its last start moves it.
struct BlockStart {
  int64_t moved, limit, stride;
  Type type;
};
template <bool kIsS32>
int64_t BlockOffset(const void* number, const void* block_start) {
  const BlockStart& start = *static_cast<const BlockStart*>(block_start);
  int64_t index;
  if constexpr (kIsS32) {
    index = *static_cast<const int32_t*>(number);
  } else {
    index = ReadIndex(static_cast<const char*>(number), start.type);
  }
  return start.moved + std::clamp<int64_t>(index, 0, start.limit) * start.stride;
}
// b: a start, c: what it means. All but the last start of a block say where the next one begins.
void MoveBlock(void* result, const void*, const void* b, const void* c, int64_t) {
  *static_cast<int64_t*>(result) = BlockOffset<false>(b, c);
}
// kBytes: how many bytes, or 0: any number.
template <bool kIsS32, size_t kBytes>
void SliceBlock(void* result, const void* a, const void* b, const void* c, int64_t bytes) {
  std::memcpy(result, static_cast<const char*>(a) + BlockOffset<kIsS32>(b, c),
              kBytes == 0 ? static_cast<size_t>(bytes) : kBytes);
}
template <bool kIsS32, size_t kBytes>
void UpdateBlock(void* result, const void* a, const void* b, const void* c, int64_t bytes) {
  std::memcpy(static_cast<char*>(result) + BlockOffset<kIsS32>(b, c), a,
              kBytes == 0 ? static_cast<size_t>(bytes) : kBytes);
}
template <bool kIsS32>
TileFunction BlockFunction(bool is_update, int64_t bytes) {
  if (bytes == 4) return is_update ? &UpdateBlock<kIsS32, 4> : &SliceBlock<kIsS32, 4>;
  if (bytes == 8) return is_update ? &UpdateBlock<kIsS32, 8> : &SliceBlock<kIsS32, 8>;
  return is_update ? &UpdateBlock<kIsS32, 0> : &SliceBlock<kIsS32, 0>;
}

// A start of a window: so far on are the starts before it, in elements.
struct WindowStart {
  int64_t offset;
  StartFunction add;
  Starts starts;
};
// b: the number, c: the start. The result is where the next start, or the window, begins.
void AddStart(void* result, const void*, const void* b, const void* c, int64_t) {
  const WindowStart& start = *static_cast<const WindowStart*>(c);
  Starts starts = start.starts;
  starts.numbers = b;
  int64_t offset = start.offset;
  start.add(&offset, starts, 1);
  std::memcpy(result, &offset, sizeof offset);
}
// Elements that stand side by side, at an offset in elements that may be negative: that is outside.
struct Window {
  int64_t offset, run, bytes;
  ScatterFunction combine;
};
void GatherWindow(void* result, const void* a, const void*, const void* c, int64_t) {
  const Window& window = *static_cast<const Window*>(c);
  std::memcpy(result, static_cast<const char*>(a) + window.offset * window.bytes,
              static_cast<size_t>(window.run * window.bytes));
}
void ScatterWindow(void* result, const void* a, const void*, const void* c, int64_t) {
  const Window& window = *static_cast<const Window*>(c);
  if (window.offset < 0) return;
  if (window.combine != nullptr) return window.combine(result, &window.offset, a, window.run, window.run, 1);
  std::memcpy(static_cast<char*>(result) + window.offset * window.bytes, a,
              static_cast<size_t>(window.run * window.bytes));
}

// A tile reduced into one value that nothing was reduced into before.
struct WholeReduction {
  TileFunction widen, narrow;  // to and from what it is reduced in; nullptr: the same type
  ReduceFunction reduce;
  int64_t bytes;
};
// a: the tile, b: what the reduction begins with, c: the reduction.
void ReduceTile(void* result, const void* a, const void* b, const void* c, int64_t n) {
  const WholeReduction& whole = *static_cast<const WholeReduction*>(c);
  alignas(8) char total[8];
  if (whole.widen != nullptr) {
    whole.widen(total, b, nullptr, nullptr, 1);
  } else {
    CopyElement(total, static_cast<const char*>(b), whole.bytes);
  }
  whole.reduce(total, a, n);
  if (whole.narrow != nullptr) return whole.narrow(result, total, nullptr, nullptr, 1);
  CopyElement(static_cast<char*>(result), total, whole.bytes);
}

// A product of matrices that are so small that a library takes longer to begin. Strides in elements.
struct SmallProduct {
  int64_t m, n, k, a_row, a_column, b_row, b_column, c_row;
};
template <class T>
void MultiplySmall(void* result, const void* a, const void* b, const void* c, int64_t) {
  const SmallProduct& p = *static_cast<const SmallProduct*>(c);
  for (int64_t row = 0; row < p.m; ++row) {
    for (int64_t column = 0; column < p.n; ++column) {
      const T* x = static_cast<const T*>(a) + row * p.a_row;
      const T* y = static_cast<const T*>(b) + column * p.b_column;
      double sum = 0.0;
      for (int64_t i = 0; i < p.k; ++i, x += p.a_column, y += p.b_row) {
        sum += static_cast<double>(*x) * static_cast<double>(*y);
      }
      static_cast<T*>(result)[row * p.c_row + column] = static_cast<T>(sum);
    }
  }
}

// A tile of a loop over points: what is read and written, and the registers that hold something from the beginning.
struct Tile {
  struct Access {
    int64_t slot, offset, reg, bytes, stride;  // offset in bytes, stride in elements of `bytes`
  };
  int64_t n;
  std::vector<Access> loads, stores;
  std::vector<int64_t> widths;  // of the registers' elements, in bytes
  std::vector<LoopBase::Step> steps;
};

}  // namespace

// Makes the plan of a program, step by step.
class IterationPlanner {
 public:
  explicit IterationPlanner(IterationPlan& plan) : plan_(plan) {}

  template <class AnyStep>
  bool operator()(const AnyStep&) {
    return false;
  }

  bool operator()(const ScalarLoop& loop) {
    const size_t registers = loop.cells.size();
    Tile tile{1, {}, {}, std::vector<int64_t>(registers, 8), loop.steps};
    BeginLoop(registers);
    for (size_t i = 0; i < registers; ++i) std::memcpy(Buffer(tile, i), &loop.cells[i], 8);
    const auto access = [](const ScalarLoop::Move& move) {
      return Tile::Access{move.slot, move.byte_offset, move.cell, move.bytes, 1};
    };
    for (const ScalarLoop::Move& load : loop.loads) tile.loads.push_back(access(load));
    for (const ScalarLoop::Move& store : loop.stores) tile.stores.push_back(access(store));
    AddTile(tile, buffers_);
    return true;
  }

  bool operator()(const Loop& loop) {
    const size_t rank = loop.dims.size(), outer_rank = rank - (rank > 0 ? 1 : 0);
    const int64_t n = rank == 0 ? 1 : loop.dims.back(), tiles = Product(loop.dims, 0, outer_rank);
    const int64_t calls = static_cast<int64_t>(loop.inputs.size() + loop.steps.size() + loop.outputs.size());
    if (loop.mode != LoopMode::kMap || !loop.box.empty() || n > loop.tile || tiles > kMaxCalls ||
        tiles * calls > kMaxCalls || (tiles > 1 && ReadsWhatOthersWrite(loop))) {
      return false;
    }
    if (n == 0 || tiles == 0) return true;
    Tile tile{n, {}, {}, {}, loop.steps};
    for (const Type type : loop.registers) tile.widths.push_back(TypeBytes(type));
    BeginLoop(loop.registers.size());
    for (const LoopBase::Constant& constant : loop.constants) {
      const size_t reg = static_cast<size_t>(constant.reg);
      Gather(Buffer(tile, reg), reinterpret_cast<const char*>(&constant.bits), 0, n, tile.widths[reg]);
    }
    for (const LoopBase::Array& array : loop.arrays) buffers_[static_cast<size_t>(array.reg)] = {array.slot, 0};
    std::vector<int64_t> index(rank);
    for (int64_t i = 0; i < tiles; ++i) {
      SetIndex(index.data(), i, loop.dims, 0, outer_rank);
      AddTileAt(loop, index, tile);
    }
    return true;
  }

  bool operator()(const BlockCopy& copy) {
    if (copy.rows > 1 || (copy.is_update && copy.array != copy.target)) return false;
    const int64_t bytes = copy.rows * copy.run;
    const Place array{copy.array, 0}, block{copy.block, 0};
    const Place from = copy.is_update ? block : array, to = copy.is_update ? Place{copy.target, 0} : block;
    if (copy.starts.empty()) {
      AddCall({CopyFunction(bytes), to, from, from, from, bytes, -1});
      return true;
    }
    std::vector<Place> starts;
    for (const BlockCopy::Start& start : copy.starts) {
      const BlockStart cell{0, start.limit, start.stride, start.type};
      starts.push_back(Add(&cell, sizeof cell));
    }
    for (size_t i = 0; i + 1 < starts.size(); ++i) {
      AddCall({&MoveBlock, starts[i + 1], from, {copy.starts[i].slot, 0}, starts[i], 1, -1});
    }
    const BlockCopy::Start& last = copy.starts.back();
    const TileFunction function = last.type == Type::kS32 ? BlockFunction<true>(copy.is_update, bytes)
                                                          : BlockFunction<false>(copy.is_update, bytes);
    AddCall({function, to, from, {last.slot, 0}, starts.back(), bytes, -1});
    return true;
  }

  bool operator()(const RowLoop& loop) {
    const size_t rank = loop.dims.size(), kept = rank - static_cast<size_t>(loop.num_reduced);
    const int64_t rows = Product(loop.dims, 0, kept);
    int64_t calls = static_cast<int64_t>(loop.inputs.size());
    const auto is_compensated = [](const LoopBase::Reduction& reduction) { return reduction.compensated; };
    for (const RowLoop::Phase& phase : loop.phases) {
      calls += static_cast<int64_t>(phase.scalar_steps.size() + phase.scalar_outputs.size() + phase.broadcasts.size() +
                                    phase.steps.size() + phase.reductions.size() + phase.outputs.size());
      if (std::any_of(phase.reductions.begin(), phase.reductions.end(), is_compensated)) return false;
    }
    if (loop.row == 0 || loop.row != loop.dims.back() || loop.row > loop.tile || rows > kMaxCalls ||
        rows * calls > kMaxCalls) {
      return false;
    }
    RowTile row{loop, std::vector<int64_t>(rank), std::vector<Place>(loop.registers.size())};
    std::vector<Place>& buffers = row.buffers;
    for (size_t i = 0; i < buffers.size(); ++i) buffers[i] = Reserve(loop.row * TypeBytes(loop.registers[i]));
    for (const LoopBase::Constant& constant : loop.constants) {
      const char* const bits = reinterpret_cast<const char*>(&constant.bits);
      Gather(Cell(row.Buffer(constant.reg)), bits, 0, loop.row, row.Bytes(constant.reg));
    }
    for (const LoopBase::Array& array : loop.arrays) buffers[static_cast<size_t>(array.reg)] = {array.slot, 0};
    for (int64_t i = 0; i < rows; ++i) {
      SetIndex(row.index.data(), i, loop.dims, 0, kept);
      AddRow(row);
    }
    return true;
  }

  bool operator()(const MatrixProduct& product) {
    const bool is_float = product.type == Type::kF32 || product.type == Type::kF64;
    if (!is_float || product.a_type != product.type || product.num_matrices != 1 ||
        product.m * product.n > kSmallWork || product.m * product.n * product.k > kSmallWork) {
      return false;
    }
    const auto place = [&](const MatrixProduct::Operand& operand) {
      return Place{operand.slot, operand.offset * TypeBytes(product.type)};
    };
    const auto row = [](const MatrixProduct::Operand& operand) { return operand.transposed ? 1 : operand.leading; };
    const auto column = [](const MatrixProduct::Operand& operand) { return operand.transposed ? operand.leading : 1; };
    const SmallProduct small{product.m,         product.n,      product.k,         row(product.a),
                             column(product.a), row(product.b), column(product.b), product.c.leading};
    const TileFunction function = product.type == Type::kF32 ? &MultiplySmall<float> : &MultiplySmall<double>;
    AddCall({function, place(product.c), place(product.a), place(product.b), Add(&small, sizeof small), 1, -1});
    return true;
  }

  bool operator()(const GatherWindows& gather) {
    return AddWindow(gather, &GatherWindow, {gather.target, 0}, {gather.array, 0}, nullptr);
  }

  bool operator()(const ScatterWindows& scatter) {
    return scatter.array == scatter.target &&
           AddWindow(scatter, &ScatterWindow, {scatter.target, 0}, {scatter.updates, 0}, scatter.combine);
  }

 private:
  Place Reserve(int64_t bytes) {
    constexpr size_t kAligned = 16;
    const size_t offset = (plan_.cells.size() + kAligned - 1) / kAligned * kAligned;
    plan_.cells.resize(offset + static_cast<size_t>(bytes));
    return {IterationPlan::kCells, static_cast<int64_t>(offset)};
  }
  char* Cell(const Place& place) { return plan_.cells.data() + place.offset; }
  Place Add(const void* content, int64_t bytes) {
    const Place place = Reserve(bytes);
    std::memcpy(Cell(place), content, static_cast<size_t>(bytes));
    return place;
  }
  void AddCall(const IterationPlan::Call& call) { plan_.calls.push_back(call); }

  void Move(const Place& to, int64_t to_stride, const Place& from, int64_t from_stride, int64_t n, int64_t bytes) {
    if (n == 1 || (to_stride == 1 && from_stride == 1)) {
      AddCall({CopyFunction(n * bytes), to, from, from, from, n * bytes, -1});
      return;
    }
    const Plane plane{1, n, 0, to_stride, 0, from_stride};
    AddCall({&MoveTile, to, from, from, Add(&plane, sizeof plane), bytes, -1});
  }

  // A row of a loop over rows that is no longer than a tile.
  struct RowTile {
    const RowLoop& loop;
    std::vector<int64_t> index;
    std::vector<Place> buffers;  // cells of the registers

    const Place& Buffer(int64_t reg) const { return buffers[static_cast<size_t>(reg)]; }
    int64_t Bytes(int64_t reg) const { return TypeBytes(loop.registers[static_cast<size_t>(reg)]); }
    // Of an input's or an output's element at the index.
    template <class Access>
    Place At(const Access& access) const {
      int64_t offset = access.offset;
      for (size_t d = 0; d < access.strides.size(); ++d) offset += index[d] * access.strides[d];
      return {access.slot, offset * Bytes(access.reg)};
    }
  };

  void AddRow(const RowTile& row) {
    const RowLoop& loop = row.loop;
    std::vector<Place> places = row.buffers;
    const auto place = [&](int64_t reg) -> Place& { return places[static_cast<size_t>(reg)]; };
    const auto add_input = [&](int64_t i) {
      const LoopBase::Input& input = loop.inputs[static_cast<size_t>(i)];
      const bool in_place = input.strides.back() == 1;
      if (in_place) place(input.reg) = row.At(input);
      if (!in_place) Move(place(input.reg), 1, row.At(input), input.strides.back(), loop.row, row.Bytes(input.reg));
    };
    const auto add_iota = [&](int64_t i, int64_t n) {
      const LoopBase::Iota& iota = loop.iotas[static_cast<size_t>(i)];
      int64_t start = iota.offset;
      for (size_t d = 0; d < row.index.size(); ++d) start += row.index[d] * iota.coefficients[d];
      place(iota.reg) = Reserve(loop.row * row.Bytes(iota.reg));
      iota.function(Cell(place(iota.reg)), &start, &iota.coefficients.back(), nullptr, n);
    };
    const auto add_steps = [&](const std::vector<LoopBase::Step>& steps, int64_t n) {
      for (const LoopBase::Step& step : steps) {
        AddCall({n == 1 ? step.point : step.function, place(step.result), place(step.a), place(step.b), place(step.c),
                 n, -1});
      }
    };
    for (size_t i = 0; i < loop.inputs.size(); ++i) {
      if (loop.inputs[i].invariant) add_input(static_cast<int64_t>(i));
    }
    for (const int64_t i : loop.row_inputs) {
      const LoopBase::Input& input = loop.inputs[static_cast<size_t>(i)];
      Move(place(input.reg), 1, row.At(input), 1, 1, row.Bytes(input.reg));
    }
    for (const int64_t i : loop.row_iotas) add_iota(i, 1);
    for (const RowLoop::Phase& phase : loop.phases) {
      add_steps(phase.scalar_steps, 1);
      for (const LoopBase::Output& output : phase.scalar_outputs) {
        Move(row.At(output), 1, place(output.reg), 1, 1, row.Bytes(output.reg));
      }
      for (const int64_t reg : phase.broadcasts) Move(place(reg), 1, place(reg), 0, loop.row, row.Bytes(reg));
      for (const int64_t i : phase.inputs) add_input(i);
      for (const int64_t i : phase.iotas) add_iota(i, loop.row);
      for (const LoopBase::Output& output : phase.outputs) {
        if (output.in_place) place(output.reg) = row.At(output);
      }
      add_steps(phase.steps, loop.row);
      for (const LoopBase::Reduction& reduction : phase.reductions) {
        const WholeReduction whole{reduction.widen, reduction.narrow, reduction.reduce, TypeBytes(reduction.type)};
        AddCall({&ReduceTile, row.Buffer(reduction.result), place(reduction.reg), place(reduction.initial),
                 Add(&whole, sizeof whole), loop.row, -1});
      }
      for (const LoopBase::Output& output : phase.outputs) {
        if (output.in_place) {
          place(output.reg) = row.Buffer(output.reg);
        } else {
          Move(row.At(output), output.strides.back(), place(output.reg), 1, loop.row, row.Bytes(output.reg));
        }
      }
    }
  }

  // A single window that is one run.
  bool AddWindow(const IndexedWindows& windows, TileFunction function, const Place& to, const Place& from,
                 ScatterFunction combine) {
    if (windows.num_windows != 1 || windows.window_elements != windows.run || windows.run > kMaxRun) return false;
    const Window cell{0, windows.run, windows.element_bytes, combine};
    const Place window = Add(&cell, sizeof cell);
    std::vector<Place> places;
    for (const IndexedWindows::Start& start : windows.starts) {
      const WindowStart content{0, windows.start, {nullptr, 1, start.limit, start.array_stride, start.wrap}};
      places.push_back(Add(&content, sizeof content));
    }
    places.push_back(window);
    for (size_t i = 0; i < windows.starts.size(); ++i) {
      const IndexedWindows::Start& start = windows.starts[i];
      const Place number{start.slot, start.offset * windows.index_bytes};
      AddCall({&AddStart, places[i + 1], number, number, places[i], 1, -1});
    }
    AddCall({function, to, from, from, window, 1, -1});
    return true;
  }

  void BeginLoop(size_t registers) {
    buffers_.assign(registers, {});
    has_buffer_.assign(registers, false);
  }
  // Cells of a register, the same in all tiles of a loop.
  char* Buffer(const Tile& tile, size_t reg) {
    if (!has_buffer_[reg]) buffers_[reg] = Reserve(tile.n * tile.widths[reg]);
    has_buffer_[reg] = true;
    return Cell(buffers_[reg]);
  }

  // Whether a tile may write what another one reads.
  static bool ReadsWhatOthersWrite(const Loop& loop) {
    return std::any_of(loop.outputs.begin(), loop.outputs.end(), [&](const LoopBase::Output& output) {
      const auto is_read = [&](const LoopBase::Array& array) { return array.slot == output.slot; };
      const auto is_read_elsewhere = [&](const LoopBase::Input& input) {
        return input.slot == output.slot && (input.offset != output.offset || input.strides != output.strides);
      };
      return std::any_of(loop.arrays.begin(), loop.arrays.end(), is_read) ||
             std::any_of(loop.inputs.begin(), loop.inputs.end(), is_read_elsewhere);
    });
  }

  // A loop's tile that begins at `index`.
  void AddTileAt(const Loop& loop, const std::vector<int64_t>& index, Tile& tile) {
    const auto access = [&](const auto& array) {
      int64_t offset = array.offset;
      for (size_t d = 0; d < index.size(); ++d) offset += index[d] * array.strides[d];
      const int64_t bytes = tile.widths[static_cast<size_t>(array.reg)];
      return Tile::Access{array.slot, offset * bytes, array.reg, bytes, index.empty() ? 0 : array.strides.back()};
    };
    tile.loads.clear();
    tile.stores.clear();
    for (const LoopBase::Input& input : loop.inputs) tile.loads.push_back(access(input));
    for (const LoopBase::Output& output : loop.outputs) tile.stores.push_back(access(output));
    std::vector<Place> places = buffers_;
    for (const LoopBase::Iota& iota : loop.iotas) {
      const size_t reg = static_cast<size_t>(iota.reg);
      int64_t start = iota.offset;
      for (size_t d = 0; d < index.size(); ++d) start += index[d] * iota.coefficients[d];
      const int64_t step = index.empty() ? 0 : iota.coefficients.back();
      places[reg] = Reserve(tile.n * tile.widths[reg]);
      iota.function(Cell(places[reg]), &start, &step, nullptr, tile.n);
    }
    AddTile(tile, std::move(places));
  }

  // places: of constants and positions.
  void AddTile(const Tile& tile, std::vector<Place> places) {
    const auto at = [](auto& list, int64_t i) -> auto& { return list[static_cast<size_t>(i)]; };
    const auto send_to_buffer = [&](int64_t reg) {
      Buffer(tile, static_cast<size_t>(reg));
      at(places, reg) = at(buffers_, reg);
    };
    for (const LoopBase::Step& step : tile.steps) send_to_buffer(step.result);
    // The step that writes a register straight to where it is stored, or -1.
    std::vector<int64_t> straight(places.size(), -1);
    std::vector<const Tile::Access*> copied;
    for (const Tile::Access& store : tile.stores) {
      const int64_t step = OnlyWriter(tile, store.reg);
      if (step < 0 || at(straight, store.reg) >= 0 || (tile.n > 1 && store.stride != 1)) {
        copied.push_back(&store);
        continue;
      }
      at(straight, store.reg) = step;
      at(places, store.reg) = {store.slot, store.offset};
    }
    for (const Tile::Access& load : tile.loads) {
      const bool whole = tile.n == 1 || load.stride == 1 || (load.stride == 0 && !IsReadAsTile(tile, load.reg));
      if (whole && StaysUntilRead(tile, load, straight)) {
        at(places, load.reg) = {load.slot, load.offset};
      } else {
        send_to_buffer(load.reg);
        Move(at(places, load.reg), 1, {load.slot, load.offset}, load.stride, tile.n, load.bytes);
      }
    }
    for (const LoopBase::Step& step : tile.steps) {
      AddCall({tile.n == 1 ? step.point : step.function, at(places, step.result), at(places, step.a),
               at(places, step.b), at(places, step.c), tile.n, -1});
    }
    for (const Tile::Access* store : copied) {
      Move({store->slot, store->offset}, store->stride, at(places, store->reg), 1, tile.n, store->bytes);
    }
  }

  // The number of the one step that writes a register, or -1.
  static int64_t OnlyWriter(const Tile& tile, int64_t reg) {
    const auto writes = [reg](const LoopBase::Step& step) { return step.result == reg; };
    const auto first = std::find_if(tile.steps.begin(), tile.steps.end(), writes);
    if (first == tile.steps.end() || std::any_of(first + 1, tile.steps.end(), writes)) return -1;
    return first - tile.steps.begin();
  }

  static bool IsReadAsTile(const Tile& tile, int64_t reg) {
    const auto reads = [reg](const LoopBase::Step& step) {
      return (step.a == reg && (step.numbers & 1) == 0) || (step.b == reg && (step.numbers & 2) == 0) ||
             (step.c == reg && (step.numbers & 4) == 0);
    };
    return IsStored(tile, reg) || std::any_of(tile.steps.begin(), tile.steps.end(), reads);
  }

  static bool IsStored(const Tile& tile, int64_t reg) {
    return std::any_of(tile.stores.begin(), tile.stores.end(),
                       [reg](const Tile::Access& store) { return store.reg == reg; });
  }

  // Whether what is loaded is still there when it is read last.
  static bool StaysUntilRead(const Tile& tile, const Tile::Access& load, const std::vector<int64_t>& straight) {
    return std::all_of(tile.stores.begin(), tile.stores.end(), [&](const Tile::Access& store) {
      if (store.slot != load.slot) return true;
      if (IsStored(tile, load.reg)) return false;
      const int64_t writer = straight[static_cast<size_t>(store.reg)];
      if (writer < 0) return true;  // after all steps
      const bool same = store.offset == load.offset && store.bytes == load.bytes && (tile.n == 1 || load.stride == 1);
      return same && std::none_of(tile.steps.begin() + writer + 1, tile.steps.end(), [&](const LoopBase::Step& step) {
               return step.a == load.reg || step.b == load.reg || step.c == load.reg;
             });
    });
  }

  IterationPlan& plan_;
  // Of the loop at hand.
  std::vector<Place> buffers_;
  std::vector<bool> has_buffer_;
};

void NativeProgram::PlanTrip() {
  IterationPlanner planner(iteration_);
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (!std::visit(planner, steps_[i]))
      iteration_.calls.push_back({nullptr, {}, {}, {}, {}, 0, static_cast<int64_t>(i)});
  }
}

}  // namespace flagos::cpu
