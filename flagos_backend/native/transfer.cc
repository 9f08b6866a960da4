#include "transfer.h"

#include "api.h"
#include "call.h"
#include "copy.h"
#include "device_transfer.h"
#include "narrow.h"

namespace flagos {
namespace {

// Below this aliasing host memory costs more (its owner must be kept and told) than copying it.
constexpr size_t kZeroCopyBytes = size_t{4} << 10;

}  // namespace

Ref<Event> Transfer(Device* device, const Ref<Event>& after, size_t bytes, const char* name,
                    std::function<void()> work) {
  Context* context = device->context;
  if (after->ready() && bytes <= kInlineBytes) {
    if (!after->status().ok()) return after;
    ScopedSpan span(context->profiler, SpanCategory::kTransfer, name, {device->id, static_cast<int64_t>(bytes)});
    work();
    return Event::Ready();
  }
  Ref<Event> done = Make<Event>();
  device->Track(done);
  auto keep = Ref<Context>::Share(context);
  after->OnReady([done, device, keep, bytes, name, work = std::move(work)](const Status& status) mutable {
    if (!status.ok()) {
      done->Complete(status);
      return;
    }
    keep->transfers->Submit([done, device, keep, bytes, name, work = std::move(work)]() mutable {
      Status outcome;
      try {
        ScopedSpan span(keep->profiler, SpanCategory::kTransfer, name, {device->id, static_cast<int64_t>(bytes)});
        work();
      } catch (...) {
        outcome = StatusOfException(name);
      }
      work = nullptr;  // what it held is free before anybody hears that it is done
      done->Complete(std::move(outcome));
    });
  });
  return done;
}

namespace {

bool MayAlias(const FlagosBufferFromHostArgs& args, const Shape& shape) {
  return args.memory->accelerator == nullptr && args.memory->pinned_by == nullptr &&
         args.semantics >= FLAGOS_HOST_IMMUTABLE_ZERO_COPY && shape.bytes >= kZeroCopyBytes &&
         NarrowBits(shape.type) == 0 && reinterpret_cast<uintptr_t>(args.data) % kHostAlignment == 0 &&
         IsDense(shape, args.byte_strides);
}

void CheckRange(const char* function, const Buffer& buffer, const void* data, int64_t offset, int64_t size) {
  int64_t end = 0;
  if (offset < 0 || size < 0 || __builtin_add_overflow(offset, size, &end) ||
      static_cast<uint64_t>(end) > buffer.shape.bytes) {
    Fail(FLAGOS_OUT_OF_RANGE, "%s: %lld bytes at offset %lld reach outside the %zu bytes of %s", function,
         static_cast<long long>(size), static_cast<long long>(offset), buffer.shape.bytes,
         ToString(buffer.shape).c_str());
  }
  if (data == nullptr && size > 0) {
    Fail(FLAGOS_INVALID_ARGUMENT, "%s: data is NULL for %lld bytes", function, static_cast<long long>(size));
  }
}

// The buffer around the host's own memory; done completes when the last user of the memory is gone.
Buffer* Alias(const FlagosBufferFromHostArgs& args, Shape shape, Ref<Event>& done) {
  const bool writable = args.semantics == FLAGOS_HOST_MUTABLE_ZERO_COPY;
  done = Make<Event>();
  // The handle on the event passes through a C callback.
  Ref<Block> block = Block::Wrap(args.memory, const_cast<void*>(args.data), shape.bytes, writable);
  auto buffer =
      std::make_unique<Buffer>(args.memory, std::move(shape), Make<Contents>(args.context, Event::Ready(), block));
  block->SetRelease([](void* event) { Ref<Event>::Adopt(static_cast<Event*>(event))->Complete(Status()); },
                    Ref<Event>(done).Detach());
  return buffer.release();
}

}  // namespace

namespace api {

FlagosError* buffer_from_host(FlagosBufferFromHostArgs* host) {
  return Enter("buffer_from_host", host, [](FlagosBufferFromHostArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, buffer);
    FLAGOS_REQUIRE(args, context);
    FLAGOS_REQUIRE(args, memory);
    CheckMemory("buffer_from_host", args.context, args.memory);
    Shape shape = MakeShape("buffer_from_host", args.element_type, args.dims, args.rank);
    if (args.data == nullptr && shape.bytes != 0) {
      Fail(FLAGOS_INVALID_ARGUMENT, "buffer_from_host: data is NULL for %s", ToString(shape).c_str());
    }
    if (args.semantics < FLAGOS_HOST_IMMUTABLE_ONLY_DURING_CALL || args.semantics > FLAGOS_HOST_MUTABLE_ZERO_COPY) {
      Fail(FLAGOS_INVALID_ARGUMENT, "buffer_from_host: semantics is %d; see FLAGOS_HOST_*", args.semantics);
    }
    CheckStrides("buffer_from_host", shape, args.byte_strides);
    Ref<Event> done;
    if (MayAlias(args, shape)) {
      args.buffer = Alias(args, std::move(shape), done);
      args.done_with_host = done.Detach();
      return;
    }
    const Strides strides(args.byte_strides, shape.dims.rank());
    if (args.memory->accelerator != nullptr) {
      const bool now = args.semantics == FLAGOS_HOST_IMMUTABLE_ONLY_DURING_CALL;
      Ref<Contents> contents = UploadBuffer(args.memory, shape, args.data, strides, now, done);
      args.buffer = new Buffer(args.memory, std::move(shape), std::move(contents));
      args.done_with_host = done.Detach();
      return;
    }
    Ref<Block> block = Block::Allocate(args.memory, shape.bytes);
    ThreadPool* pool = args.context->transfers.get();
    auto work = [block, shape, strides, pool, data = args.data] {
      CopyElements(shape, block->data(), nullptr, data, strides.get(), pool);
      ExtendNarrow(shape.type, block->data(), shape.bytes);
    };
    if (args.semantics == FLAGOS_HOST_IMMUTABLE_ONLY_DURING_CALL && shape.bytes > kInlineBytes) {
      python::ReleaseGil released;
      ScopedSpan span(args.context->profiler, SpanCategory::kTransfer, "buffer_from_host",
                      {args.memory->device->id, static_cast<int64_t>(shape.bytes)});
      work();
      done = Event::Ready();
    } else {
      done = Transfer(args.memory->device, Event::Ready(), shape.bytes, "buffer_from_host", std::move(work));
    }
    args.buffer = new Buffer(args.memory, std::move(shape), Make<Contents>(args.context, done, std::move(block)));
    args.done_with_host = done.Detach();
  });
}

FlagosError* buffer_to_host(FlagosBufferToHostArgs* host) {
  return Enter("buffer_to_host", host, [](FlagosBufferToHostArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, done);
    FLAGOS_REQUIRE(args, buffer);
    Ref<Contents> contents = args.buffer->Require("buffer_to_host");
    const Shape& shape = args.buffer->shape;
    if (args.data == nullptr && shape.bytes != 0) {
      Fail(FLAGOS_INVALID_ARGUMENT, "buffer_to_host: data is NULL for %s", ToString(shape).c_str());
    }
    if (args.byte_strides == nullptr && args.size < shape.bytes) {
      Fail(FLAGOS_INVALID_ARGUMENT, "buffer_to_host: size is %zu but %s needs %zu bytes", args.size,
           ToString(shape).c_str(), shape.bytes);
    }
    CheckStrides("buffer_to_host", shape, args.byte_strides);
    const Strides strides(args.byte_strides, shape.dims.rank());
    ThreadPool* pool = args.buffer->context()->transfers.get();
    if (args.buffer->memory->accelerator != nullptr) {
      args.done = DownloadBuffer(args.buffer->memory, contents, 0, shape, args.data, strides).Detach();
      return;
    }
    args.done = Transfer(args.buffer->device(), contents->ready, shape.bytes, "buffer_to_host",
                         [contents, shape, strides, pool, data = args.data] {
                           CopyElements(shape, data, strides.get(), contents->block().data(), nullptr, pool);
                         })
                    .Detach();
  });
}

FlagosError* buffer_read_raw(FlagosBufferReadRawArgs* host) {
  return Enter("buffer_read_raw", host, [](FlagosBufferReadRawArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, done);
    FLAGOS_REQUIRE(args, buffer);
    Ref<Contents> contents = args.buffer->Require("buffer_read_raw");
    CheckRange("buffer_read_raw", *args.buffer, args.data, args.offset, args.size);
    const auto size = static_cast<size_t>(args.size);
    if (args.buffer->memory->accelerator != nullptr) {
      const Shape bytes = MakeShape("buffer_read_raw", FLAGOS_TYPE_U8, &args.size, 1);
      args.done = DownloadBuffer(args.buffer->memory, contents, static_cast<size_t>(args.offset), bytes, args.data, {})
                      .Detach();
      return;
    }
    args.done = Transfer(args.buffer->device(), contents->ready, size, "buffer_read_raw",
                         [contents, size, offset = args.offset, data = args.data] {
                           if (size) std::memcpy(data, static_cast<char*>(contents->block().data()) + offset, size);
                         })
                    .Detach();
  });
}

FlagosError* buffer_write_raw(FlagosBufferWriteRawArgs* host) {
  return Enter("buffer_write_raw", host, [](FlagosBufferWriteRawArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, done);
    FLAGOS_REQUIRE(args, buffer);
    Ref<Contents> contents = args.buffer->Require("buffer_write_raw");
    CheckRange("buffer_write_raw", *args.buffer, args.data, args.offset, args.size);
    if (contents->ready->ready() && contents->ready->status().ok() && !contents->block().writable()) {
      Fail(FLAGOS_FAILED_PRECONDITION,
           "buffer_write_raw: the buffer aliases memory of the host that must not change; "
           "write into a buffer of buffer_allocate");
    }
    const auto size = static_cast<size_t>(args.size);
    if (args.buffer->memory->accelerator != nullptr) {
      args.done =
          WriteBuffer(args.buffer->memory, contents, static_cast<size_t>(args.offset), args.data, size).Detach();
      return;
    }
    args.done = Transfer(args.buffer->device(), contents->ready, size, "buffer_write_raw",
                         [contents, size, offset = args.offset, data = args.data] {
                           if (size) std::memcpy(static_cast<char*>(contents->block().data()) + offset, data, size);
                         })
                    .Detach();
  });
}

FlagosError* buffer_copy(FlagosBufferCopyArgs* host) {
  return Enter("buffer_copy", host, [](FlagosBufferCopyArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, copy);
    FLAGOS_REQUIRE(args, buffer);
    FLAGOS_REQUIRE(args, memory);
    CheckMemory("buffer_copy", args.buffer->context(), args.memory);
    Ref<Contents> contents = args.buffer->Require("buffer_copy");
    const Shape& shape = args.buffer->shape;
    if (args.buffer->memory->accelerator != nullptr || args.memory->accelerator != nullptr) {
      args.copy = new Buffer(args.memory, shape, CopyBuffer(args.buffer->memory, contents, args.memory, shape.bytes));
      return;
    }
    Ref<Block> block = Block::Allocate(args.memory, shape.bytes);
    ThreadPool* pool = args.buffer->context()->transfers.get();
    Ref<Event> done =
        Transfer(args.memory->device, contents->ready, shape.bytes, "buffer_copy", [contents, block, shape, pool] {
          CopyElements(shape, block->data(), nullptr, contents->block().data(), nullptr, pool);
        });
    args.copy = new Buffer(args.memory, shape, Make<Contents>(args.buffer->context(), done, std::move(block)));
  });
}

}  // namespace api
}  // namespace flagos
