#include "answerer.h"

#include <chrono>
#include <exception>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "link.h"
#include "objects.h"

namespace flagos_isolation {
namespace {

constexpr size_t kMaxThreads = 64;
constexpr size_t kMaxAsked = 4096;
constexpr std::chrono::seconds kIdle{5};
// Whose function the thread runs, if any.
thread_local const Answerer* t_running = nullptr;

// The arrays of a question as the host's function takes them. `data`: memory for each. False where a shape is none, or
// contents are not of its size.
bool Lay(const std::vector<HostArray>& described, bool with_contents, std::vector<std::string>* data,
         std::vector<FlagosHostArray>* arrays) {
  for (size_t i = 0; i < described.size(); ++i) {
    const HostArray& array = described[i];
    int64_t size = 0;
    if (DenseSize(array.dims.data(), array.dims.size(), array.element_type, &size) != nullptr) return false;
    if (array.data.size() != (with_contents ? static_cast<uint64_t>(size) : 0)) return false;
    if (!with_contents) data->emplace_back(static_cast<size_t>(size), '\0');
    FlagosHostArray& made = arrays->emplace_back();
    made = FlagosHostArray{};
    made.struct_size = sizeof(made);
    made.data = const_cast<char*>(with_contents ? array.data.data() : data->back().data());
    made.size_bytes = static_cast<size_t>(size);
    made.dims = array.dims.data();
    made.rank = array.dims.size();
    made.element_type = static_cast<int32_t>(array.element_type);
  }
  return true;
}

// False where the question is none.
bool AnswerCallback(const HostFunctions& functions, const Ask& ask, Call* answer) {
  std::vector<FlagosHostArray> arguments;
  std::vector<FlagosHostArray> results;
  answer->contents.reserve(ask.results.size());  // `results` points into it
  if (!Lay(ask.arguments, /*with_contents=*/true, nullptr, &arguments) ||
      !Lay(ask.results, /*with_contents=*/false, &answer->contents, &results)) {
    return false;
  }
  answer->error = functions.callback == nullptr
                      ? MakeStatus(FLAGOS_FAILED_PRECONDITION, "the host gave no host_callback with its context")
                      : TakeError(functions.callback(functions.callback_user_data, ask.number, arguments.data(),
                                                     arguments.size(), results.data(), results.size()));
  if (answer->error != nullptr) answer->contents.clear();
  return true;
}

void TakeBytes(void* sink_data, const void* bytes, size_t size) {
  static_cast<std::string*>(sink_data)->assign(static_cast<const char*>(bytes), size);
}

bool AnswerAny(const HostFunctions& functions, const Ask& ask, Call* answer) {
  switch (ask.question) {
    case Question::kHostCallback:
      return AnswerCallback(functions, ask, answer);
    case Question::kKeyValueGet:
      answer->number = functions.get == nullptr ? int32_t{FLAGOS_FAILED_PRECONDITION}
                                                : functions.get(functions.store_user_data, ask.key.data(),
                                                                ask.key.size(), ask.number, TakeBytes, &answer->data);
      return true;
    case Question::kKeyValuePut:
      answer->number = functions.put == nullptr ? int32_t{FLAGOS_FAILED_PRECONDITION}
                                                : functions.put(functions.store_user_data, ask.key.data(),
                                                                ask.key.size(), ask.value.data(), ask.value.size());
      return true;
    default:
      return false;
  }
}

void Answer(const HostFunctions& functions, Link* link, const Ask& ask) {
  Call answer;
  bool is_one = true;
  try {
    is_one = AnswerAny(functions, ask, &answer);
  } catch (const std::bad_alloc&) {  // of results as large as the child says
    answer.contents.clear();
    answer.error = MakeStatus(FLAGOS_RESOURCE_EXHAUSTED, "the host has no memory for the results of a callback");
    answer.number = FLAGOS_RESOURCE_EXHAUSTED;
  } catch (const std::length_error&) {
    is_one = false;
  }
  if (!is_one) {
    link->Malformed("a question that is none");
    return;
  }
  answer.method = Method::kAnswer;
  answer.object = ask.id;
  Status failed = link->Post(answer);
  if (failed != nullptr && failed->code == FLAGOS_RESOURCE_EXHAUSTED && link->alive()) {
    Call refused;
    refused.method = Method::kAnswer;
    refused.object = ask.id;
    refused.number = failed->code;
    refused.error = failed;
    failed = link->Post(refused);
  }
  if (failed != nullptr && link->alive()) link->GiveUp("could not be answered (" + failed->message + ")");
}

}  // namespace

void Answerer::Begin(const HostFunctions& functions) {
  const std::lock_guard<std::mutex> lock(mutex_);
  functions_ = functions;
  is_open_ = true;
}

void Answerer::End() {
  std::deque<Asked> dropped;
  std::unique_lock<std::mutex> lock(mutex_);
  is_open_ = false;
  dropped.swap(asked_);
  asked_changed_.notify_all();
  const size_t own = t_running == this ? 1 : 0;
  running_changed_.wait(lock, [&] { return num_running_ <= own; });
  lock.unlock();
  for (const Asked& asked : dropped) asked.link->Owe(-1);
}

bool Answerer::Take(std::shared_ptr<Link> link, Ask ask) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_open_) return true;  // of a context that has ended: nobody waits for an answer
  if (asked_.size() >= kMaxAsked) return false;
  link->Owe(1);
  asked_.push_back({link, std::move(ask)});
  if (num_idle_ < asked_.size() && num_threads_ < kMaxThreads) {
    ++num_threads_;
    std::thread([link] { link->answerer().Work(); }).detach();
  }
  asked_changed_.notify_one();
  return true;
}

void Answerer::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    ++num_idle_;
    const bool is_asked = asked_changed_.wait_for(lock, kIdle, [this] { return !asked_.empty() || !is_open_; });
    --num_idle_;
    if (!is_asked || asked_.empty()) break;
    Asked asked = std::move(asked_.front());
    asked_.pop_front();
    const HostFunctions functions = functions_;
    ++num_running_;
    lock.unlock();
    t_running = this;
    if (asked.link->alive()) Answer(functions, asked.link.get(), asked.ask);
    t_running = nullptr;
    asked.link->Owe(-1);
    lock.lock();
    --num_running_;
    running_changed_.notify_all();
  }
  --num_threads_;
}

}  // namespace flagos_isolation
