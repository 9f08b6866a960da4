// Buffers as objects: making, describing, sharing and ending them. What moves bytes is in transfer.cc.
#include "buffer.h"

#include "accelerator.h"
#include "api.h"
#include "call.h"
#include "log.h"
#include "transfer.h"

using flagos::Contents;
using flagos::Fail;
using flagos::Ref;

Ref<Contents> FlagosBuffer::contents() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return contents_;
}

Ref<Contents> FlagosBuffer::Require(const char* what) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!contents_) {
    Fail(FLAGOS_INVALID_ARGUMENT, "%s: the buffer %s was %s; its contents are gone", what,
         flagos::ToString(shape).c_str(), gone_);
  }
  return contents_;
}

Ref<Contents> FlagosBuffer::Take(const char* why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (contents_) gone_ = why;
  return std::move(contents_);
}

void FlagosBuffer::Hold(int32_t delta) {
  Ref<Contents> dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  if (delta == 1) {
    if (!contents_) {
      Fail(FLAGOS_INVALID_ARGUMENT, "buffer_hold: the buffer %s was %s; hold it before",
           flagos::ToString(shape).c_str(), gone_);
    }
    if (holds_++ == 0) held_ = contents_;
  } else if (delta == -1) {
    if (holds_ == 0) Fail(FLAGOS_INVALID_ARGUMENT, "buffer_hold: the buffer is not held; each -1 needs a +1 before");
    if (--holds_ == 0) dropped = std::move(held_);
  } else {
    Fail(FLAGOS_INVALID_ARGUMENT, "buffer_hold: delta is %d; use +1 or -1", delta);
  }
}

Ref<Contents> FlagosBuffer::TakePromise() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::move(promised_);
}

namespace flagos {

void Contents::JoinCompute(Accelerator& accelerator) {
  if (!point_ || joined_.load(std::memory_order_acquire)) return;
  if (!point_->Precedes(&accelerator, Stream::kCompute)) accelerator.streams().Await(Stream::kCompute, *point_);
  joined_.store(true, std::memory_order_release);
}

void CheckMemory(const char* function, Context* context, Memory* memory) {
  if (memory->context != context) {
    Fail(FLAGOS_INVALID_ARGUMENT, "%s: %s belongs to another context; use a memory of the context that is passed",
         function, memory->debug_string.c_str());
  }
}

namespace api {

FlagosError* buffer_allocate(FlagosBufferAllocateArgs* host) {
  return Enter("buffer_allocate", host, [](FlagosBufferAllocateArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, buffer);
    FLAGOS_REQUIRE(args, context);
    FLAGOS_REQUIRE(args, memory);
    CheckMemory("buffer_allocate", args.context, args.memory);
    Shape shape = MakeShape("buffer_allocate", args.element_type, args.dims, args.rank);
    Accelerator* const accelerator = shape.bytes > 0 ? args.memory->accelerator : nullptr;
    // Hosts allocate to write.
    Ref<Block> block = accelerator ? accelerator->Allocate(args.memory, shape.bytes, Stream::kToDevice)
                                   : Block::Allocate(args.memory, shape.bytes);
    args.buffer = new Buffer(args.memory, std::move(shape), Make<Contents>(args.context, Event::Ready(), block));
  });
}

FlagosError* buffer_view(FlagosBufferViewArgs* host) {
  return Enter("buffer_view", host, [](FlagosBufferViewArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, buffer);
    FLAGOS_REQUIRE(args, context);
    FLAGOS_REQUIRE(args, memory);
    CheckMemory("buffer_view", args.context, args.memory);
    Shape shape = MakeShape("buffer_view", args.element_type, args.dims, args.rank);
    if (args.data == nullptr && shape.bytes != 0) {
      Fail(FLAGOS_INVALID_ARGUMENT, "buffer_view: data is NULL for %s", ToString(shape).c_str());
    }
    const auto element = static_cast<uintptr_t>(ElementBytes(shape.type));
    const uintptr_t alignment = std::min<uintptr_t>(element, kHostAlignment);
    if (alignment > 1 && reinterpret_cast<uintptr_t>(args.data) % alignment != 0) {
      Fail(FLAGOS_INVALID_ARGUMENT,
           "buffer_view: data is not aligned to %zu bytes as %s needs; copy it with "
           "buffer_from_host",
           static_cast<size_t>(alignment), ElementName(shape.type));
    }
    // Everything that can fail comes before the release callback is ours to call.
    // Programs write whole vectors around the caches.
    const bool writable = args.writable != 0 && reinterpret_cast<uintptr_t>(args.data) % kHostAlignment == 0;
    Ref<Block> block = Block::Wrap(args.memory, args.data, shape.bytes, writable);
    Ref<Contents> contents = Make<Contents>(args.context, Event::Ready(), block);
    args.buffer = new Buffer(args.memory, std::move(shape), std::move(contents));
    block->SetRelease(args.release, args.release_user_data);
  });
}

FlagosError* buffer_promise(FlagosBufferPromiseArgs* host) {
  return Enter("buffer_promise", host, [](FlagosBufferPromiseArgs& args) {
    Status status = TakeError(args.error);
    args.error = nullptr;
    FLAGOS_REQUIRE_FIELD(args, buffer);
    FLAGOS_REQUIRE(args, context);
    FLAGOS_REQUIRE(args, memory);
    CheckMemory("buffer_promise", args.context, args.memory);
    Shape shape = MakeShape("buffer_promise", args.element_type, args.dims, args.rank);
    const bool open = status.ok();
    Ref<Event> ready = open ? Make<Event>() : Event::Failed(std::move(status));
    Ref<Event> issued = open && args.memory->accelerator ? Make<Event>() : ready;
    auto contents = Make<Contents>(args.context, std::move(ready), std::move(issued), nullptr);
    auto buffer = std::make_unique<Buffer>(args.memory, std::move(shape), std::move(contents));
    if (open) buffer->MakePromise();
    args.buffer = buffer.release();
  });
}

FlagosError* buffer_fulfill(FlagosBufferFulfillArgs* host) {
  return Enter("buffer_fulfill", host, [](FlagosBufferFulfillArgs& args) {
    Status status = TakeError(args.error);
    args.error = nullptr;
    FLAGOS_REQUIRE(args, promise);
    Buffer& promise = *args.promise;
    Ref<Contents> source;
    if (status.ok()) {
      FLAGOS_REQUIRE(args, source);
      if (args.source->shape != promise.shape) {
        Fail(FLAGOS_INVALID_ARGUMENT, "buffer_fulfill: the source is %s but %s was promised",
             ToString(args.source->shape).c_str(), ToString(promise.shape).c_str());
      }
      if (args.source->memory != promise.memory) {
        Fail(FLAGOS_INVALID_ARGUMENT, "buffer_fulfill: the source is in %s but the promise in %s; copy it first",
             args.source->memory->debug_string.c_str(), promise.memory->debug_string.c_str());
      }
      source = args.source->Require("buffer_fulfill");
    }
    Ref<Contents> target = promise.TakePromise();
    if (!target) {
      Fail(FLAGOS_FAILED_PRECONDITION,
           "buffer_fulfill: this buffer is no open promise: it was fulfilled before, or not "
           "made by buffer_promise");
    }
    if (!status.ok()) {
      target->Abandon(std::move(status));
      return;
    }
    source->issued->OnReady([target, source](const Status& done) {
      if (!done.ok()) {
        target->Abandon(done);
      } else if (source->point() != nullptr) {
        target->FulfillAt(source->shared_block(), source->shared_point());
      } else {
        target->Fulfill(source->shared_block());
      }
    });
  });
}

void buffer_destroy(FlagosBuffer* buffer) {
  if (buffer == nullptr) return;
  if (Ref<Contents> promised = buffer->TakePromise()) {
    promised->Abandon(Status(FLAGOS_CANCELLED, "the host destroyed a promised buffer without fulfilling it"));
  }
  delete buffer;
}

FlagosError* buffer_describe(FlagosBufferDescribeArgs* host) {
  return Enter("buffer_describe", host, [](FlagosBufferDescribeArgs& args) {
    FLAGOS_REQUIRE(args, buffer);
    const Buffer& buffer = *args.buffer;
    args.dims = buffer.shape.dims.data();
    args.rank = buffer.shape.dims.rank();
    args.size_bytes = buffer.shape.bytes;
    args.device = buffer.device();
    args.memory = buffer.memory;
    args.element_type = buffer.shape.type;
    args.is_deleted = buffer.contents() ? 0 : 1;
  });
}

FlagosError* buffer_ready_event(FlagosBufferReadyEventArgs* host) {
  return Enter("buffer_ready_event", host, [](FlagosBufferReadyEventArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, event);
    FLAGOS_REQUIRE(args, buffer);
    args.event = Ref<Event>(args.buffer->Require("buffer_ready_event")->ready).Detach();
  });
}

FlagosError* buffer_bitcast(FlagosBufferBitcastArgs* host) {
  return Enter("buffer_bitcast", host, [](FlagosBufferBitcastArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, view);
    FLAGOS_REQUIRE(args, buffer);
    Shape shape = MakeShape("buffer_bitcast", args.element_type, args.dims, args.rank);
    if (shape.bytes != args.buffer->shape.bytes) {
      Fail(FLAGOS_INVALID_ARGUMENT, "buffer_bitcast: %s has %zu bytes but %s has %zu; the sizes must be equal",
           ToString(args.buffer->shape).c_str(), args.buffer->shape.bytes, ToString(shape).c_str(), shape.bytes);
    }
    args.view = new Buffer(args.buffer->memory, std::move(shape), args.buffer->Require("buffer_bitcast"));
  });
}

FlagosError* buffer_delete(FlagosBufferDeleteArgs* host) {
  return Enter("buffer_delete", host, [](FlagosBufferDeleteArgs& args) {
    FLAGOS_REQUIRE(args, buffer);
    args.buffer->Take("deleted");
  });
}

FlagosError* buffer_hold(FlagosBufferHoldArgs* host) {
  return Enter("buffer_hold", host, [](FlagosBufferHoldArgs& args) {
    FLAGOS_REQUIRE(args, buffer);
    args.buffer->Hold(args.delta);
  });
}

FlagosError* buffer_pointer(FlagosBufferPointerArgs* host) {
  return Enter("buffer_pointer", host, [](FlagosBufferPointerArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, pointer);
    FLAGOS_REQUIRE(args, buffer);
    Ref<Contents> contents = args.buffer->Require("buffer_pointer");
    const bool in_order = args.issued != 0 && args.buffer->memory->accelerator != nullptr;
    const Status& status = (in_order ? contents->issued : contents->ready)->Wait();
    if (!status.ok()) throw Failure(status);
    if (in_order) contents->JoinCompute(*args.buffer->memory->accelerator);
    args.pointer = contents->block().data();
  });
}

FlagosError* buffer_donate(FlagosBufferDonateArgs* host) {
  return Enter("buffer_donate", host, [](FlagosBufferDonateArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, donated);
    FLAGOS_REQUIRE(args, buffer);
    FLAGOS_REQUIRE(args, dependency);
    Buffer& buffer = *args.buffer;
    Ref<Event> ready = Make<Event>();
    Ref<Event> issued = buffer.memory->accelerator ? Make<Event>() : ready;
    auto later = Make<Contents>(buffer.context(), std::move(ready), std::move(issued), nullptr);
    auto donated = std::make_unique<Buffer>(buffer.memory, buffer.shape, later);
    buffer.Require("buffer_donate");
    Ref<Contents> former = buffer.Take("donated");
    if (!former) Fail(FLAGOS_INVALID_ARGUMENT, "buffer_donate: the buffer was donated by another thread meanwhile");
    buffer.device()->Track(later->ready);
    Ref<Event> both = WhenAll({Ref<Event>::Share(args.dependency), former->issued});
    both->OnReady([later, former](const Status& done) mutable {
      if (!done.ok()) {
        later->Abandon(done);
        return;
      }
      Ref<Block> block = former->shared_block();
      Ref<Point> point = former->shared_point();
      former.Reset();  // before anybody can ask whether the new contents are the block's only user
      if (point) {
        later->FulfillAt(std::move(block), std::move(point));
      } else {
        later->Fulfill(std::move(block));
      }
    });
    args.donated = donated.release();
  });
}

}  // namespace api
}  // namespace flagos
