#include "cuda/graph_replay.h"

#include <atomic>
#include <mutex>
#include <utility>

#include "error.h"

namespace flagos::cuda {
namespace {

class GraphReplay final : public Replay {
 public:
  GraphReplay(const CudaStreams& streams, uint64_t graph, size_t nodes, std::vector<PatchedNode> patched,
              const std::vector<Captures::Array>& arrays)
      : streams_(streams), driver_(streams.driver()), patched_(std::move(patched)), nodes_(nodes) {
    const Driver& driver = driver_;
    for (const PatchedNode& node : patched_) patches_ += node.patches.size();
    addresses_.reserve(arrays.size());
    for (const Captures::Array& array : arrays) addresses_.push_back(array.first);
    driver.Check(driver.GraphInstantiate(&exec_, reinterpret_cast<Graph>(graph), 0), "instantiating a graph");
    WarmUp();
    driver.Check(driver.GraphUpload(exec_, streams.handle(Stream::kCompute)), "uploading a graph");
  }

  ~GraphReplay() override { Destroy(); }

  void Drop() noexcept override {
    {
      std::lock_guard<std::mutex> lock(patching_);
      dropped_ = true;
    }
    DestroyIfDropped();
  }

  bool dropped() const noexcept override { return dropped_; }

  void Launch(void* const* addresses) override {
    const Driver& driver = driver_;
    ContextScope current(driver, streams_.context());
    const AtTheEnd end{*this};
    std::lock_guard<std::mutex> lock(mutex_);
    SetAddresses(addresses);
    // All replays of a device go to this stream, one after another: so they may have their temporaries in one place.
    driver.Check(driver.GraphLaunch(exec_, streams_.handle(Stream::kCompute)), "launching a graph");
  }

  size_t arrays() const noexcept override { return addresses_.size(); }
  size_t nodes() const noexcept override { return nodes_; }
  size_t patches() const noexcept override { return patches_; }

 private:
  // Of a launch, during which the graph may have been given up.
  struct AtTheEnd {
    GraphReplay& replay;
    ~AtTheEnd() { replay.DestroyIfDropped(); }
  };

  void DestroyIfDropped() noexcept {
    if (!dropped_) return;
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);  // whoever has it comes here, too
    if (lock.owns_lock()) Destroy();
  }

  void Destroy() noexcept {
    if (exec_ != nullptr) driver_.ExecDestroy(std::exchange(exec_, nullptr));
  }

  void SetAddresses(void* const* addresses) {
    const Driver& driver = driver_;
    std::lock_guard<std::mutex> lock(patching_);
    if (dropped_) Fail(FLAGOS_ABORTED, "this graph was given up, as the devices that meet in it no longer do");
    const bool all = std::exchange(dirty_, true);  // until every node is known to be patched
    for (const PatchedNode& patched : patched_) {
      bool moved = false;
      for (const Patch& patch : patched.patches) {
        const auto address = reinterpret_cast<uint64_t>(addresses[patch.array]);
        if (address == addresses_[patch.array] && !all) continue;
        *patch.place = address + patch.offset;
        moved = true;
      }
      if (moved) driver.Check(patched.node->Set(driver, exec_, streams_.context()), "patching a graph");
    }
    for (size_t i = 0; i < addresses_.size(); ++i) addresses_[i] = reinterpret_cast<uint64_t>(addresses[i]);
    dirty_ = false;
  }

  // Patches every node with what it holds: the driver refuses that for some kernels of libraries (cuDNN's attention),
  // which must be known before a launch relies on it.
  void WarmUp() {
    const Driver& driver = driver_;
    for (size_t i = 0; i < patched_.size(); ++i) {
      const Result result = patched_[i].node->Set(driver, exec_, streams_.context());
      if (result == 0) continue;
      driver.ExecDestroy(std::exchange(exec_, nullptr));
      Fail(FLAGOS_UNIMPLEMENTED, "the driver refuses to patch node %zu of %zu that hold addresses (error %d)", i,
           patched_.size(), static_cast<int>(result));
    }
  }

  const CudaStreams& streams_;
  const Driver& driver_;  // outlives the streams, which are gone when the interpreter drops a replay late
  std::mutex mutex_;      // of launches
  std::mutex patching_;   // of who reads the nodes of the graph, which goes once it is given up
  const std::vector<PatchedNode> patched_;
  std::vector<uint64_t> addresses_;  // those in the graph
  bool dirty_ = false;
  std::atomic<bool> dropped_{false};
  Exec exec_ = nullptr;
  const size_t nodes_;
  size_t patches_ = 0;
};

}  // namespace

std::unique_ptr<Replay> MakeGraphReplay(const CudaStreams& streams, uint64_t graph, size_t nodes,
                                        std::vector<PatchedNode> patched, const std::vector<Captures::Array>& arrays) {
  return std::make_unique<GraphReplay>(streams, graph, nodes, std::move(patched), arrays);
}

}  // namespace flagos::cuda
