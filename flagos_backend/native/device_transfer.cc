#include "device_transfer.h"

#include "copy.h"
#include "log.h"

namespace flagos {
namespace {

ThreadPool* PoolOf(const Memory* memory) { return memory->context->transfers.get(); }

// Contents that are issued and ready at once, or by whoever completes both.
Ref<Contents> Later(Memory* memory) { return Make<Contents>(memory->context, Make<Event>(), Make<Event>(), nullptr); }

// Runs `work` once `after` is there: in this thread if that is now and `here`, else on a transfer thread. `fail` hears
// why it did not run, or did not end well.
void RunAfter(Device* device, const Ref<Event>& after, bool here, size_t bytes, const char* name,
              std::function<void()> work, std::function<void(const Status&)> fail) {
  auto guarded = [device, bytes, name, keep = Ref<Context>::Share(device->context), work = std::move(work),
                  fail](const Status& before) {
    Status status = before;
    if (status.ok()) {
      try {
        ScopedSpan span(keep->profiler, SpanCategory::kTransfer, name, {device->id, static_cast<int64_t>(bytes)});
        work();
      } catch (...) {
        status = StatusOfException(name);
      }
    }
    if (!status.ok()) fail(status);
  };
  if (here && after->ready()) {
    python::ReleaseGil released;
    guarded(after->status());
    return;
  }
  after->OnReady([context = device->context, guarded = std::move(guarded)](const Status& status) {
    context->transfers->Submit([guarded, status] { guarded(status); });
  });
}

// The elements go to the device by way of pinned memory; strided ones are gathered first.
Ref<Point> UploadElements(Memory* memory, const Shape& shape, void* to, const void* data, const Strides& strides) {
  Accelerator& accelerator = *memory->accelerator;
  ThreadPool* pool = PoolOf(memory);
  if (strides.get() == nullptr || IsDense(shape, strides.get())) {
    return accelerator.Upload(to, data, shape.bytes, shape.type, pool);
  }
  const std::unique_ptr<char[]> dense(new char[shape.bytes]);
  CopyElements(shape, dense.get(), nullptr, data, strides.get(), pool);
  return accelerator.Upload(to, dense.get(), shape.bytes, shape.type, pool);
}

void DownloadElements(Memory* memory, const Shape& shape, const void* from, Point* after, void* data,
                      const Strides& strides) {
  Accelerator& accelerator = *memory->accelerator;
  ThreadPool* pool = PoolOf(memory);
  if (strides.get() == nullptr || IsDense(shape, strides.get())) {
    accelerator.Download(data, from, shape.bytes, after, pool);
    return;
  }
  const std::unique_ptr<char[]> dense(new char[shape.bytes]);
  accelerator.Download(dense.get(), from, shape.bytes, after, pool);
  CopyElements(shape, data, strides.get(), dense.get(), nullptr, pool);
}

}  // namespace

Ref<Contents> UploadBuffer(Memory* memory, const Shape& shape, const void* data, const Strides& strides, bool now,
                           Ref<Event>& done) {
  done = Event::Ready();
  if (shape.bytes == 0) return Make<Contents>(memory->context, done, Block::Allocate(memory, 0));
  Ref<Block> block = memory->accelerator->Allocate(memory, shape.bytes, Stream::kToDevice);
  Ref<Contents> contents = Later(memory);
  now = now || shape.bytes <= kInlineBytes;
  if (!now) done = Make<Event>();
  memory->device->Track(contents->issued);
  auto work = [memory, shape, data, strides, block, contents, done] {
    Ref<Point> point = UploadElements(memory, shape, block->data(), data, strides);
    contents->FulfillAt(block, std::move(point));
    done->Complete(Status());
  };
  RunAfter(memory->device, Event::Ready(), now, shape.bytes, "buffer_from_host", std::move(work),
           [contents, done](const Status& status) {
             contents->Abandon(status);
             done->Complete(Status());  // the host's memory is not used any more
           });
  return contents;
}

Ref<Event> DownloadBuffer(Memory* memory, const Ref<Contents>& contents, size_t offset, const Shape& shape, void* data,
                          const Strides& strides) {
  if (shape.bytes == 0) return contents->ready;
  Ref<Event> done = Make<Event>();
  if (shape.bytes <= kInlineBytes && contents->issued->ready()) {
    if (!contents->issued->status().ok()) return contents->issued;
    Accelerator* const accelerator = memory->accelerator;
    python::ReleaseGil released;
    ScopedSpan span(memory->context->profiler, SpanCategory::kTransfer, "buffer_to_host",
                    {memory->device->id, static_cast<int64_t>(shape.bytes)});
    auto reading = std::make_shared<Accelerator::Reading>(accelerator->BeginDownload(
        static_cast<const char*>(contents->block().data()) + offset, shape.bytes, contents->point()));
    Ref<Point> point = reading->point;
    done->CompleteAt(std::move(point), [accelerator, reading, contents, shape, data, strides] {
      CopyElements(shape, data, strides.get(), reading->stage->data(), nullptr, nullptr);
      accelerator->EndDownload(std::move(*reading));
    });
    memory->device->Track(done);
    return done;
  }
  memory->device->Track(done);
  auto work = [memory, contents, offset, shape, data, strides, done] {
    const void* from = static_cast<const char*>(contents->block().data()) + offset;
    DownloadElements(memory, shape, from, contents->point(), data, strides);
    done->Complete(Status());
  };
  RunAfter(memory->device, contents->issued, false, shape.bytes, "buffer_to_host", std::move(work),
           [done](const Status& status) { done->Complete(status); });
  return done;
}

Ref<Event> WriteBuffer(Memory* memory, const Ref<Contents>& contents, size_t offset, const void* data, size_t bytes) {
  if (bytes == 0) return contents->ready;
  Ref<Event> done = Make<Event>();
  auto work = [memory, contents, offset, data, bytes, done] {
    Accelerator& accelerator = *memory->accelerator;
    if (contents->point() != nullptr) accelerator.streams().Await(Stream::kToDevice, *contents->point());
    void* const to = static_cast<char*>(contents->block().data()) + offset;
    done->CompleteAt(accelerator.Upload(to, data, bytes, FLAGOS_TYPE_U8, PoolOf(memory)));
  };
  RunAfter(memory->device, contents->issued, bytes <= kInlineBytes, bytes, "buffer_write_raw", std::move(work),
           [done](const Status& status) { done->Complete(status); });
  memory->device->Track(done);
  return done;
}

void CopyContents(Memory* from, Contents& contents, Memory* to, Contents& copy) {
  const Block& source = contents.block();
  const size_t bytes = source.bytes();
  if (bytes == 0) {
    copy.Fulfill(Block::Allocate(to, 0));
    return;
  }
  if (to->accelerator == nullptr) {
    Ref<Block> block = Block::Allocate(to, bytes);
    from->accelerator->Download(block->data(), source.data(), bytes, contents.point(), PoolOf(to));
    copy.Fulfill(std::move(block));
    return;
  }
  Accelerator& accelerator = *to->accelerator;
  if (from->accelerator == nullptr) {
    Ref<Block> block = accelerator.Allocate(to, bytes, Stream::kToDevice);
    Ref<Point> point = accelerator.Upload(block->data(), source.data(), bytes, FLAGOS_TYPE_U8, PoolOf(to));
    copy.FulfillAt(std::move(block), std::move(point));
    return;
  }
  const Stream stream = from->accelerator == &accelerator ? Stream::kCompute : Stream::kToDevice;
  Ref<Block> block = accelerator.Allocate(to, bytes, stream);
  if (contents.point() != nullptr && !contents.point()->Precedes(&accelerator, stream)) {
    accelerator.streams().Await(stream, *contents.point());
  }
  accelerator.streams().Copy(stream, {block->data(), &accelerator}, {source.data(), from->accelerator}, bytes);
  Ref<Point> point = accelerator.streams().Record(stream);
  copy.FulfillAt(std::move(block), std::move(point));
}

Ref<Contents> CopyBuffer(Memory* from, const Ref<Contents>& contents, Memory* to, size_t bytes) {
  Ref<Contents> copy = Later(to);
  to->device->Track(copy->issued);
  const bool waits = to->accelerator == nullptr;
  RunAfter(
      to->device, contents->issued, bytes <= kInlineBytes && !waits, bytes, "buffer_copy",
      [from, contents, to, copy] {
        CopyContents(from, *contents, to, *copy);
        // The source stays until the device has read it.
        copy->ready->OnReady([contents](const Status&) {});
      },
      [copy](const Status& status) { copy->Abandon(status); });
  return copy;
}

}  // namespace flagos
