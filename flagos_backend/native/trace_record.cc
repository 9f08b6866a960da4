#include "trace_record.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>

namespace flagos {
namespace {

// Mapped at a time: large enough to make system calls rare, small enough to be given to each context that records.
constexpr uint64_t kBlockRecords = 4096;
constexpr size_t kBlockBytes = kBlockRecords * sizeof(TraceRecord);
constexpr size_t kHeaderBytes = 4096;  // a page

// NULL: errno says why.
void* Map(int file, size_t offset, size_t bytes) noexcept {
  // Space that is there: a write to a mapped page that finds no disk is a SIGBUS.
  if (const int code = posix_fallocate(file, static_cast<off_t>(offset), static_cast<off_t>(bytes)); code != 0) {
    errno = code;
    return nullptr;
  }
  void* const mapped =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, static_cast<off_t>(offset));
  return mapped == MAP_FAILED ? nullptr : mapped;
}

}  // namespace

// What the processes of a file share.
struct RecordFile::Header {
  char magic[16] = "flagos trace 1";
  std::atomic<uint64_t> records{0};
  std::atomic<uint32_t> texts{0}, programs{0};
};

RecordFile::~RecordFile() {
  if (block_ != nullptr) munmap(block_, kBlockBytes);
  if (header_ != nullptr) munmap(header_, kHeaderBytes);
  if (file_ >= 0) close(file_);
}

bool RecordFile::Open(const std::string& path) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) return false;
  void* const mapped = Map(file, 0, kHeaderBytes);
  if (mapped == nullptr) {
    const int reason = errno;
    close(file);
    unlink(path.c_str());
    errno = reason;
    return false;
  }
  file_ = file;
  header_ = new (mapped) Header;
  return true;
}

TraceRecord* RecordFile::At(uint64_t index) noexcept {
  const uint64_t first = index - index % kBlockRecords;
  if (block_ == nullptr || first != first_) {
    if (block_ != nullptr) munmap(block_, kBlockBytes);
    block_ = static_cast<TraceRecord*>(Map(file_, kHeaderBytes + first * sizeof(TraceRecord), kBlockBytes));
    if (block_ == nullptr) return nullptr;
    first_ = first;
  }
  return block_ + (index - first);
}

bool RecordFile::Append(const TraceRecord* records, size_t count) noexcept {
  uint64_t index = header_->records.fetch_add(count, std::memory_order_relaxed);
  for (size_t i = 0; i < count; ++i) {
    TraceRecord* const place = At(index + i);
    if (place == nullptr) return false;
    // The kind comes last: a process that is killed here leaves no half of a record.
    std::memcpy(reinterpret_cast<char*>(place) + sizeof(place->kind),
                reinterpret_cast<const char*>(&records[i]) + sizeof(place->kind),
                sizeof(TraceRecord) - sizeof(place->kind));
    std::atomic_signal_fence(std::memory_order_release);
    *static_cast<volatile RecordKind*>(&place->kind) = records[i].kind;
  }
  return true;
}

uint32_t RecordFile::NewTextNumber() noexcept { return header_->texts.fetch_add(1, std::memory_order_relaxed) + 1; }

uint32_t RecordFile::NewProgramNumber() noexcept { return header_->programs.fetch_add(1, std::memory_order_relaxed); }

}  // namespace flagos
