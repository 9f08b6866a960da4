#include "testing/test_program.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <thread>

namespace flagos::testing {
namespace {

// Adds up one number of each device, as an all-reduce would.
class Meeting final : public LaunchState {
 public:
  explicit Meeting(int64_t expected) : expected_(expected) {}

  float Sum(float value) {
    std::unique_lock<std::mutex> lock(mutex_);
    sum_ += value;
    if (++arrived_ == expected_) changed_.notify_all();
    changed_.wait(lock, [this] { return arrived_ == expected_ || !aborted_.ok(); });
    if (arrived_ != expected_) throw Failure(aborted_);
    return sum_;
  }

  void Abort(const Status& status) noexcept override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_.ok()) aborted_ = status;
    changed_.notify_all();
  }

 private:
  const int64_t expected_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t arrived_ = 0;
  float sum_ = 0;
  Status aborted_;
};

class TestProgram final : public Program {
 public:
  TestProgram(int devices, int elements, int sleep_us, bool donate, bool small) : sleep_us_(sleep_us) {
    const int64_t dims[] = {elements};
    info_.name = "test_program";
    info_.fingerprint = "0";
    info_.num_partitions = devices;
    for (int i = 0; i < devices; ++i) info_.device_assignment.push_back(i);
    info_.arguments = {MakeShape("test", FLAGOS_TYPE_F32, dims, 1)};
    info_.outputs = info_.arguments;
    info_.argument_memory_kinds = {""};
    info_.output_memory_kinds = {""};
    info_.argument_aliases = {donate ? 0 : -1};
    if (donate) info_.donors = {0};
    info_.is_small = small;
  }

  std::unique_ptr<LaunchState> Begin(size_t) override { return std::make_unique<Meeting>(info_.num_partitions); }

  std::vector<Ref<Block>> Run(const Place&, LaunchState* state, std::vector<Argument>& arguments,
                              const std::vector<Memory*>& memories) override {
    Argument& argument = arguments[0];
    const bool in_place = argument.donated && argument.contents->SoleOwner();
    Ref<Block> source = argument.contents->shared_block();
    Ref<Block> result = in_place ? source : Block::Allocate(memories[0], source->bytes());
    const auto* from = static_cast<const float*>(source->data());
    auto* to = static_cast<float*>(result->data());
    if (sleep_us_ > 0) std::this_thread::sleep_for(std::chrono::microseconds(sleep_us_));
    if (from[0] < 0) Fail(FLAGOS_OUT_OF_RANGE, "the first element is negative");
    const float more = state ? static_cast<Meeting*>(state)->Sum(from[0]) : 0;
    for (size_t i = 0; i < source->bytes() / sizeof(float); ++i) to[i] = from[i] + 1 + more;
    std::vector<Ref<Block>> results;
    results.push_back(std::move(result));
    return results;
  }

  std::string Artifact(int32_t) override { Fail(FLAGOS_UNIMPLEMENTED, "a test program has no artifacts"); }

 private:
  int sleep_us_;
};

}  // namespace

std::unique_ptr<Program> CompileTestProgram(const void* program, size_t size) {
  const std::string text(static_cast<const char*>(program), size);
  int devices, elements, sleep_us, donate, small;
  if (std::sscanf(text.c_str(), "flagos-test-program devices=%d elements=%d sleep_us=%d donate=%d small=%d", &devices,
                  &elements, &sleep_us, &donate, &small) != 5) {
    return nullptr;
  }
  return std::make_unique<TestProgram>(devices, elements, sleep_us, donate != 0, small != 0);
}

}  // namespace flagos::testing
