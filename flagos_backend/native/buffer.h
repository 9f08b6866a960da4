// Buffers: a host's handle on contents, which may be shared, promised, given away, or still being made.
#ifndef FLAGOS_NATIVE_BUFFER_H_
#define FLAGOS_NATIVE_BUFFER_H_

#include <atomic>
#include <mutex>

#include "context.h"
#include "event.h"
#include "memory.h"
#include "shape.h"

namespace flagos {

// What a buffer holds: a block that is there once `ready` completes without an error. Work in flight keeps references,
// so deletion never frees what is in use; whoever holds the only reference to contents and block may write.
//
// On an accelerator the block exists earlier: once `issued` completes, work on the same device may be enqueued that reads
// it, after JoinCompute. In host memory both are one event.
class Contents : public RefCounted<Contents> {
 public:
  Contents(Context* context, Ref<Event> ready_event, Ref<Block> block = nullptr)
      : Contents(context, ready_event, ready_event, std::move(block)) {}
  Contents(Context* context, Ref<Event> ready_event, Ref<Event> issued_event, Ref<Block> block)
      : ready(std::move(ready_event)),
        issued(std::move(issued_event)),
        context_(Ref<Context>::Share(context)),
        block_(std::move(block)) {}

  // For who completes the events itself.
  void SetBlock(Ref<Block> block) noexcept { block_ = std::move(block); }
  // Where the work is done that makes the block; before `issued` completes.
  void SetPoint(Ref<Point> point) noexcept { point_ = std::move(point); }
  // Sets the block, which is there, then completes. Once.
  void Fulfill(Ref<Block> block) {
    block_ = std::move(block);
    ready->Complete(Status());
    issued->Complete(Status());
  }
  // Sets the block, which is there from `point` on, then completes. Once.
  void FulfillAt(Ref<Block> block, Ref<Point> point) {
    block_ = std::move(block);
    point_ = point;
    ready->CompleteAt(std::move(point));
    issued->Complete(Status());
  }
  void Abandon(Status status) {
    ready->Complete(status);
    issued->Complete(std::move(status));
  }

  // Only once issued and ok.
  Block& block() const noexcept { return *block_; }
  const Ref<Block>& shared_block() const noexcept { return block_; }
  Context* context() const noexcept { return context_.get(); }
  // With the only reference to these contents: whether nobody else sees the block either.
  bool SoleOwner() const noexcept {
    return ref_count() == 1 && block_ && block_->writable() && block_->ref_count() == 1;
  }

  // NULL: there when issued. Only once issued.
  Point* point() const noexcept { return point_.get(); }
  const Ref<Point>& shared_point() const noexcept { return point_; }
  // Has the compute stream of `accelerator` come after the point. Only once issued.
  void JoinCompute(Accelerator& accelerator);

  const Ref<Event> ready;
  const Ref<Event> issued;

 private:
  Ref<Context> context_;  // outlives the block, whose memory it owns
  Ref<Block> block_;
  Ref<Point> point_;
  std::atomic<bool> joined_{false};
};

}  // namespace flagos

struct FlagosBuffer {
  FlagosBuffer(flagos::Memory* memory_, flagos::Shape shape_, flagos::Ref<flagos::Contents> contents)
      : memory(memory_),
        shape(std::move(shape_)),
        contents_(std::move(contents)),
        context_(flagos::Ref<flagos::Context>::Share(memory_->context)) {}

  flagos::Memory* const memory;
  const flagos::Shape shape;

  flagos::Device* device() const noexcept { return memory->device; }
  flagos::Context* context() const noexcept { return context_.get(); }

  // NULL once deleted or given away.
  flagos::Ref<flagos::Contents> contents() const;
  // Throws Failure(INVALID_ARGUMENT) that names `what` and why the contents are gone.
  flagos::Ref<flagos::Contents> Require(const char* what) const;
  // Takes the contents away; NULL if they are gone. `why` is a literal for later messages: "donated to an execution".
  flagos::Ref<flagos::Contents> Take(const char* why);
  void Hold(int32_t delta);

  // The contents that the host promised, also after they were passed on or deleted; NULL from the second call on.
  flagos::Ref<flagos::Contents> TakePromise();
  void MakePromise() { promised_ = contents_; }

 private:
  mutable std::mutex mutex_;
  flagos::Ref<flagos::Contents> contents_;
  flagos::Ref<flagos::Contents> held_;  // while holds_ > 0, also after deletion
  flagos::Ref<flagos::Contents> promised_;
  int32_t holds_ = 0;
  const char* gone_ = nullptr;
  flagos::Ref<flagos::Context> context_;
};

namespace flagos {

using Buffer = ::FlagosBuffer;

}  // namespace flagos

#endif  // FLAGOS_NATIVE_BUFFER_H_
