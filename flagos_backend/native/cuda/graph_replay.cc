#include "cuda/graph_replay.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "cuda/comparison.h"
#include "error.h"

namespace flagos::cuda {
namespace {

class PatchedNode {
 public:
  virtual ~PatchedNode() = default;
  virtual Result Set(const Driver& driver, Exec exec, ContextHandle context) = 0;

  std::vector<Patch> patches;
};

// The same node of each capture.
struct Nodes {
  Node first, second, third;
  size_t number;
};

// What the driver says of the same node of each capture.
template <class Params>
struct Triple {
  Params first{}, second{}, third{};

  template <class Get>
  Triple(const Driver& driver, Get get, const Nodes& nodes) {
    driver.Check(get(nodes.first, &first), "reading a node of a graph");
    driver.Check(get(nodes.second, &second), "reading a node of a graph");
    driver.Check(get(nodes.third, &third), "reading a node of a graph");
  }
};

class KernelNode final : public PatchedNode {
 public:
  KernelNode(const Driver& driver, const Nodes& nodes, const Comparison& comparison) : node_(nodes.first) {
    const Triple<KernelParams> params(driver, driver.KernelGetParams, nodes);
    params_ = params.first;
    if (!IsSameLaunch(params.first, params.second) || !IsSameLaunch(params.first, params.third)) {
      Fail(FLAGOS_UNIMPLEMENTED, "node %zu launches another kernel in each capture", nodes.number);
    }
    if (params_.extra != nullptr) {
      TakePacked(params, nodes, comparison);
    } else if (params_.values != nullptr) {
      TakeValues(driver, params, nodes, comparison);
    }
  }

  Result Set(const Driver& driver, Exec exec, ContextHandle) override {
    return driver.ExecSetKernel(exec, node_, &params_);
  }

 private:
  static bool IsSameLaunch(const KernelParams& a, const KernelParams& b) {
    return a.function == b.function && a.kernel == b.kernel && std::equal(a.grid, a.grid + 3, b.grid) &&
           std::equal(a.block, a.block + 3, b.block) && a.shared_bytes == b.shared_bytes &&
           (a.values == nullptr) == (b.values == nullptr) && (a.extra == nullptr) == (b.extra == nullptr);
  }

  // Whole words, so that an address is aligned in the copy.
  unsigned char* Keep(const void* bytes, size_t size) {
    storage_.push_back(std::make_unique<uint64_t[]>((size + 7) / 8));
    auto* copy = reinterpret_cast<unsigned char*>(storage_.back().get());
    std::memcpy(copy, bytes, size);
    return copy;
  }

  // Parameters one by one.
  void TakeValues(const Driver& driver, const Triple<KernelParams>& params, const Nodes& nodes,
                  const Comparison& comparison) {
    Function function = params_.function;
    if (function == nullptr) driver.Check(driver.KernelGetFunction(&function, params_.kernel), "reading a kernel");
    for (size_t i = 0, offset = 0, size = 0; driver.FunctionGetParamInfo(function, i, &offset, &size) == 0; ++i) {
      unsigned char* copy = Keep(params_.values[i], size);
      comparison.Compare({copy, static_cast<const unsigned char*>(params.second.values[i]),
                          static_cast<const unsigned char*>(params.third.values[i]), size},
                         "a kernel parameter", nodes.number, patches);
      values_.push_back(copy);
    }
    params_.values = values_.data();
  }

  // All parameters as one piece of memory.
  void TakePacked(const Triple<KernelParams>& params, const Nodes& nodes, const Comparison& comparison) {
    const Packed first = Unpack(params.first, nodes.number), second = Unpack(params.second, nodes.number),
                 third = Unpack(params.third, nodes.number);
    if (first.size != second.size || first.size != third.size) {
      Fail(FLAGOS_UNIMPLEMENTED, "node %zu has parameters of another size in each capture", nodes.number);
    }
    packed_size_ = first.size;
    unsigned char* copy = Keep(first.bytes, first.size);
    comparison.Compare({copy, second.bytes, third.bytes, first.size}, "the parameters", nodes.number, patches);
    values_ = {kPackedBytes, copy, kPackedSize, &packed_size_, kPackedEnd};
    params_.extra = values_.data();
  }

  struct Packed {
    const unsigned char* bytes = nullptr;
    size_t size = 0;
  };

  static Packed Unpack(const KernelParams& params, size_t number) {
    Packed packed;
    for (void** entry = params.extra; *entry != kPackedEnd; entry += 2) {
      if (*entry == kPackedBytes) {
        packed.bytes = static_cast<const unsigned char*>(entry[1]);
      } else if (*entry == kPackedSize) {
        packed.size = *static_cast<const size_t*>(entry[1]);
      } else {
        Fail(FLAGOS_UNIMPLEMENTED, "node %zu packs its parameters in an unknown way", number);
      }
    }
    return packed;
  }

  const Node node_;
  KernelParams params_{};
  std::vector<std::unique_ptr<uint64_t[]>> storage_;
  std::vector<void*> values_;
  size_t packed_size_ = 0;
};

class MemcpyNode final : public PatchedNode {
 public:
  MemcpyNode(const Driver& driver, const Nodes& nodes, const Comparison& comparison) : node_(nodes.first) {
    const Triple<MemcpyParams> params(driver, driver.MemcpyGetParams, nodes);
    params_ = params.first;
    Side(params_.source, params.second.source, params.third.source, nodes.number, comparison);
    Side(params_.target, params.second.target, params.third.target, nodes.number, comparison);
  }

  Result Set(const Driver& driver, Exec exec, ContextHandle context) override {
    return driver.ExecSetMemcpy(exec, node_, &params_, context);
  }

 private:
  void Side(MemcpySide& first, const MemcpySide& second, const MemcpySide& third, size_t number,
            const Comparison& comparison) {
    // What the host held at the time of the capture is not there later.
    if (first.type != MemoryType::kDevice && first.type != MemoryType::kUnified) {
      Fail(FLAGOS_UNIMPLEMENTED, "node %zu copies from or to the host", number);
    }
    comparison.Compare(&first.device, second.device, third.device, "a copy's address", number, patches);
  }

  const Node node_;
  MemcpyParams params_{};
};

class MemsetNode final : public PatchedNode {
 public:
  MemsetNode(const Driver& driver, const Nodes& nodes, const Comparison& comparison) : node_(nodes.first) {
    const Triple<MemsetParams> params(driver, driver.MemsetGetParams, nodes);
    params_ = params.first;
    comparison.Compare(&params_.target, params.second.target, params.third.target, "a fill's address", nodes.number,
                       patches);
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

NodeType TypeOf(const Driver& driver, const Nodes& nodes) {
  const Triple<NodeType> type(driver, driver.NodeGetType, nodes);
  if (type.first != type.second || type.first != type.third) {
    Fail(FLAGOS_UNIMPLEMENTED, "node %zu is of another kind in each capture", nodes.number);
  }
  return type.first;
}

std::unique_ptr<PatchedNode> Compare(const Driver& driver, NodeType type, const Nodes& nodes,
                                     const Comparison& comparison) {
  switch (type) {
    case NodeType::kKernel:
      return std::make_unique<KernelNode>(driver, nodes, comparison);
    case NodeType::kMemcpy:
      return std::make_unique<MemcpyNode>(driver, nodes, comparison);
    case NodeType::kMemset:
      return std::make_unique<MemsetNode>(driver, nodes, comparison);
    case NodeType::kEmpty:
      return nullptr;
    case NodeType::kConditional:
      break;
  }
  Fail(FLAGOS_UNIMPLEMENTED, "node %zu is of kind %d, which cannot be patched", nodes.number, static_cast<int>(type));
}

class GraphReplay final : public Replay {
 public:
  GraphReplay(const CudaStreams& streams, const Captures& captures) : streams_(streams), driver_(streams.driver()) {
    const Driver& driver = driver_;
    ContextScope current(driver, streams.context());
    const size_t conditionals = captures.first.conditionals.size();
    if (conditionals != captures.second.conditionals.size() || conditionals != captures.third.conditionals.size()) {
      Fail(FLAGOS_UNIMPLEMENTED, "three captures have %zu, %zu and %zu conditional nodes", conditionals,
           captures.second.conditionals.size(), captures.third.conditionals.size());
    }
    Take(captures, {captures.first.handle, captures.second.handle, captures.third.handle}, Comparison(captures));
    addresses_.reserve(captures.arrays.size());
    for (const Captures::Array& array : captures.arrays) addresses_.push_back(array.first);
    driver.Check(driver.GraphInstantiate(&exec_, reinterpret_cast<Graph>(captures.first.handle), 0),
                 "instantiating a graph");
    Rehearse();
    driver.Check(driver.GraphUpload(exec_, streams.handle(Stream::kCompute)), "uploading a graph");
  }

  ~GraphReplay() override {
    if (exec_ != nullptr) driver_.ExecDestroy(exec_);
  }

  void Launch(void* const* addresses) override {
    const Driver& driver = driver_;
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

  size_t arrays() const noexcept override { return addresses_.size(); }
  size_t nodes() const noexcept override { return nodes_; }
  size_t patches() const noexcept override { return patches_; }

 private:
  // The same graph of each capture.
  struct Graphs {
    uint64_t first, second, third;
  };

  // The nodes of a graph, and of the bodies in it: the driver patches those through the graph around them.
  void Take(const Captures& captures, const Graphs& graphs, const Comparison& comparison) {
    const std::vector<Node> first = NodesOf(driver_, graphs.first), second = NodesOf(driver_, graphs.second),
                            third = NodesOf(driver_, graphs.third);
    if (first.size() != second.size() || first.size() != third.size()) {
      Fail(FLAGOS_UNIMPLEMENTED, "three captures have %zu, %zu and %zu nodes", first.size(), second.size(),
           third.size());
    }
    for (size_t i = 0; i < first.size(); ++i) {
      const Nodes nodes{first[i], second[i], third[i], nodes_++};
      const NodeType type = TypeOf(driver_, nodes);
      if (type == NodeType::kConditional) {
        Take(captures, BodiesOf(captures, nodes), comparison);
        continue;
      }
      auto node = Compare(driver_, type, nodes, comparison);
      if (!node || node->patches.empty()) continue;
      patches_ += node->patches.size();
      patched_.push_back(std::move(node));
    }
  }

  // The driver names no body of a node: who captured it knows.
  static Graphs BodiesOf(const Captures& captures, const Nodes& nodes) {
    const auto &first = captures.first.conditionals, &second = captures.second.conditionals,
               &third = captures.third.conditionals;
    for (size_t i = 0; i < first.size(); ++i) {
      if (first[i].node == reinterpret_cast<uint64_t>(nodes.first) &&
          second[i].node == reinterpret_cast<uint64_t>(nodes.second) &&
          third[i].node == reinterpret_cast<uint64_t>(nodes.third)) {
        return {first[i].body, second[i].body, third[i].body};
      }
    }
    Fail(FLAGOS_UNIMPLEMENTED, "node %zu is a conditional node of which the captures do not tell", nodes.number);
  }

  // Patches every node with what it holds: the driver refuses that for some kernels of libraries (cuDNN's attention),
  // which must be known before a launch relies on it.
  void Rehearse() {
    const Driver& driver = driver_;
    for (size_t i = 0; i < patched_.size(); ++i) {
      const Result result = patched_[i]->Set(driver, exec_, streams_.context());
      if (result == 0) continue;
      driver.ExecDestroy(std::exchange(exec_, nullptr));
      Fail(FLAGOS_UNIMPLEMENTED, "the driver refuses to patch node %zu of %zu that hold addresses (error %d)", i,
           patched_.size(), static_cast<int>(result));
    }
  }

  const CudaStreams& streams_;
  const Driver& driver_;  // outlives the streams, which are gone when the interpreter drops a replay late
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
