#include "cuda/graph_replay.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "error.h"

namespace flagos::cuda {
namespace {

// An address in a node that is `offset` bytes into an array.
struct Patch {
  size_t array;
  uint64_t offset;
  uint64_t* place;
};

bool Owns(const std::vector<Captures::Range>& ranges, uint64_t address) noexcept {
  return std::any_of(ranges.begin(), ranges.end(),
                     [address](const Captures::Range& r) { return r.begin <= address && address < r.end; });
}

// What may stand where the captures differ.
class Comparison {
 public:
  explicit Comparison(const Captures& captures) : captures_(captures) {}

  // Compares two words, of which `place` is the first, and notes a patch where an array's address stands.
  void Word(uint64_t* place, uint64_t second, const char* what, size_t node, std::vector<Patch>& patches) const {
    const uint64_t first = *place;
    if (first == second) return;
    for (size_t i = 0; i < captures_.arrays.size(); ++i) {
      const Captures::Array& array = captures_.arrays[i];
      const uint64_t offset = first - array.first;
      // One past the end occurs: pointers to the end of a range.
      if (offset <= array.bytes && second - array.second == offset) {
        patches.push_back({i, offset, place});
        return;
      }
    }
    if (Owns(captures_.first_owned, first) && Owns(captures_.second_owned, second)) return;
    Fail(FLAGOS_UNIMPLEMENTED, "%s of node %zu depends on where the arrays are in a way that cannot be patched", what,
         node);
  }

  // `first` stays where it is: patches point into it. Sizes that are no multiple of 8 end in a partial word.
  void Words(unsigned char* first, const unsigned char* second, size_t bytes, const char* what, size_t node,
             std::vector<Patch>& patches) const {
    size_t begin = 0;
    for (; begin + sizeof(uint64_t) <= bytes; begin += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, second + begin, sizeof(word));
      Word(reinterpret_cast<uint64_t*>(first + begin), word, what, node, patches);
    }
    if (std::memcmp(first + begin, second + begin, bytes - begin) != 0) {
      Fail(FLAGOS_UNIMPLEMENTED, "%s of node %zu differs between two captures of the same program", what, node);
    }
  }

 private:
  const Captures& captures_;
};

class PatchedNode {
 public:
  virtual ~PatchedNode() = default;
  virtual Result Set(const Driver& driver, Exec exec, ContextHandle context) = 0;

  std::vector<Patch> patches;
};

class KernelNode final : public PatchedNode {
 public:
  KernelNode(const Driver& driver, Node first, Node second, size_t number, const Comparison& comparison)
      : node_(first) {
    KernelParams other{};
    driver.Check(driver.KernelGetParams(first, &params_), "reading a kernel of the graph");
    driver.Check(driver.KernelGetParams(second, &other), "reading a kernel of the graph");
    const bool same = params_.function == other.function && params_.kernel == other.kernel &&
                      std::equal(params_.grid, params_.grid + 3, other.grid) &&
                      std::equal(params_.block, params_.block + 3, other.block) &&
                      params_.shared_bytes == other.shared_bytes;
    if (!same) Fail(FLAGOS_UNIMPLEMENTED, "node %zu launches another kernel in each capture", number);
    if (params_.values == nullptr) {
      if (params_.extra != nullptr) Fail(FLAGOS_UNIMPLEMENTED, "node %zu packs its parameters", number);
      return;
    }
    Function function = params_.function;
    if (function == nullptr) driver.Check(driver.KernelGetFunction(&function, params_.kernel), "reading a kernel");
    std::vector<size_t> sizes;
    for (size_t offset = 0, size = 0; driver.FunctionGetParamInfo(function, sizes.size(), &offset, &size) == 0;) {
      sizes.push_back(size);
    }
    values_.reserve(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      // Whole words, so that an address is aligned in the copy.
      storage_.push_back(std::make_unique<uint64_t[]>((sizes[i] + 7) / 8));
      auto* copy = reinterpret_cast<unsigned char*>(storage_.back().get());
      std::memcpy(copy, params_.values[i], sizes[i]);
      comparison.Words(copy, static_cast<const unsigned char*>(other.values[i]), sizes[i], "a kernel parameter", number,
                       patches);
      values_.push_back(copy);
    }
    params_.values = values_.data();
    params_.extra = nullptr;
  }

  Result Set(const Driver& driver, Exec exec, ContextHandle) override {
    return driver.ExecSetKernel(exec, node_, &params_);
  }

 private:
  const Node node_;
  KernelParams params_{};
  std::vector<std::unique_ptr<uint64_t[]>> storage_;
  std::vector<void*> values_;
};

class MemcpyNode final : public PatchedNode {
 public:
  MemcpyNode(const Driver& driver, Node first, Node second, size_t number, const Comparison& comparison)
      : node_(first) {
    MemcpyParams other{};
    driver.Check(driver.MemcpyGetParams(first, &params_), "reading a copy of the graph");
    driver.Check(driver.MemcpyGetParams(second, &other), "reading a copy of the graph");
    Side(params_.source, other.source, number, comparison);
    Side(params_.target, other.target, number, comparison);
  }

  Result Set(const Driver& driver, Exec exec, ContextHandle context) override {
    return driver.ExecSetMemcpy(exec, node_, &params_, context);
  }

 private:
  void Side(MemcpySide& first, const MemcpySide& second, size_t number, const Comparison& comparison) {
    // What the host held at the time of the capture is not there later.
    if (first.type != MemoryType::kDevice && first.type != MemoryType::kUnified) {
      Fail(FLAGOS_UNIMPLEMENTED, "node %zu copies from or to the host", number);
    }
    comparison.Word(&first.device, second.device, "a copy's address", number, patches);
  }

  const Node node_;
  MemcpyParams params_{};
};

class MemsetNode final : public PatchedNode {
 public:
  MemsetNode(const Driver& driver, Node first, Node second, size_t number, const Comparison& comparison)
      : node_(first) {
    MemsetParams other{};
    driver.Check(driver.MemsetGetParams(first, &params_), "reading a fill of the graph");
    driver.Check(driver.MemsetGetParams(second, &other), "reading a fill of the graph");
    comparison.Word(&params_.target, other.target, "a fill's address", number, patches);
  }

  Result Set(const Driver& driver, Exec exec, ContextHandle context) override {
    return driver.ExecSetMemset(exec, node_, &params_, context);
  }

 private:
  const Node node_;
  MemsetParams params_{};
};

std::vector<Node> NodesOf(const Driver& driver, uint64_t handle) {
  auto* graph = reinterpret_cast<Graph>(handle);
  size_t count = 0;
  driver.Check(driver.GraphGetNodes(graph, nullptr, &count), "reading a graph");
  std::vector<Node> nodes(count);
  if (count > 0) driver.Check(driver.GraphGetNodes(graph, nodes.data(), &count), "reading a graph");
  return nodes;
}

std::unique_ptr<PatchedNode> Compare(const Driver& driver, Node first, Node second, size_t number,
                                     const Comparison& comparison) {
  NodeType type{}, other{};
  driver.Check(driver.NodeGetType(first, &type), "reading a graph");
  driver.Check(driver.NodeGetType(second, &other), "reading a graph");
  if (type != other) Fail(FLAGOS_UNIMPLEMENTED, "node %zu is of another kind in each capture", number);
  switch (type) {
    case NodeType::kKernel:
      return std::make_unique<KernelNode>(driver, first, second, number, comparison);
    case NodeType::kMemcpy:
      return std::make_unique<MemcpyNode>(driver, first, second, number, comparison);
    case NodeType::kMemset:
      return std::make_unique<MemsetNode>(driver, first, second, number, comparison);
    case NodeType::kEmpty:
      return nullptr;
  }
  Fail(FLAGOS_UNIMPLEMENTED, "node %zu is of kind %d, which cannot be patched", number, static_cast<int>(type));
}

class GraphReplay final : public Replay {
 public:
  GraphReplay(const CudaStreams& streams, const Captures& captures) : streams_(streams) {
    const Driver& driver = streams.driver();
    ContextScope current(driver, streams.context());
    const std::vector<Node> first = NodesOf(driver, captures.first_graph);
    const std::vector<Node> second = NodesOf(driver, captures.second_graph);
    if (first.size() != second.size()) {
      Fail(FLAGOS_UNIMPLEMENTED, "two captures have %zu and %zu nodes", first.size(), second.size());
    }
    const Comparison comparison(captures);
    for (size_t i = 0; i < first.size(); ++i) {
      auto node = Compare(driver, first[i], second[i], i, comparison);
      if (!node || node->patches.empty()) continue;
      patches_ += node->patches.size();
      patched_.push_back(std::move(node));
    }
    nodes_ = first.size();
    addresses_.reserve(captures.arrays.size());
    for (const Captures::Array& array : captures.arrays) addresses_.push_back(array.first);
    driver.Check(driver.GraphInstantiate(&exec_, reinterpret_cast<Graph>(captures.first_graph), 0),
                 "instantiating a graph");
    Rehearse();
    driver.Check(driver.GraphUpload(exec_, streams.handle(Stream::kCompute)), "uploading a graph");
  }

  ~GraphReplay() override {
    if (exec_ != nullptr) streams_.driver().ExecDestroy(exec_);
  }

  void Launch(void* const* addresses) override {
    const Driver& driver = streams_.driver();
    ContextScope current(driver, streams_.context());
    std::lock_guard<std::mutex> lock(mutex_);
    const bool all = std::exchange(dirty_, true);  // until every node is known to be patched
    for (const auto& node : patched_) {
      bool moved = false;
      for (const Patch& patch : node->patches) {
        const auto address = reinterpret_cast<uint64_t>(addresses[patch.array]);
        if (address == addresses_[patch.array] && !all) continue;
        *patch.place = address + patch.offset;
        moved = true;
      }
      if (moved) driver.Check(node->Set(driver, exec_, streams_.context()), "patching a graph");
    }
    for (size_t i = 0; i < addresses_.size(); ++i) addresses_[i] = reinterpret_cast<uint64_t>(addresses[i]);
    dirty_ = false;
    driver.Check(driver.GraphLaunch(exec_, streams_.handle(Stream::kCompute)), "launching a graph");
  }

  size_t nodes() const noexcept override { return nodes_; }
  size_t patches() const noexcept override { return patches_; }

 private:
  // Patches every node with what it holds: the driver refuses that for some kernels of libraries (cuDNN's attention),
  // which must be known before a launch relies on it.
  void Rehearse() {
    const Driver& driver = streams_.driver();
    for (size_t i = 0; i < patched_.size(); ++i) {
      const Result result = patched_[i]->Set(driver, exec_, streams_.context());
      if (result == 0) continue;
      driver.ExecDestroy(std::exchange(exec_, nullptr));
      Fail(FLAGOS_UNIMPLEMENTED, "the driver refuses to patch node %zu of %zu that hold addresses (error %d)", i,
           patched_.size(), static_cast<int>(result));
    }
  }

  const CudaStreams& streams_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<PatchedNode>> patched_;
  std::vector<uint64_t> addresses_;  // those in the graph
  bool dirty_ = false;
  Exec exec_ = nullptr;
  size_t nodes_ = 0;
  size_t patches_ = 0;
};

}  // namespace

std::unique_ptr<Replay> MakeGraphReplay(const CudaStreams& streams, const Captures& captures) {
  return std::make_unique<GraphReplay>(streams, captures);
}

}  // namespace flagos::cuda
