// What the child asks of its host: the functions of a context that the host answers, and what comes back.
#include <cstring>
#include <utility>

#include "server.h"

namespace flagos_isolation {
namespace {

// The bytes of an answer's message beside the contents of arrays.
constexpr size_t kMaxContents = (size_t{1} << 32) - (size_t{1} << 20);

HostArray Describe(const FlagosHostArray& array) {
  HostArray described;
  described.element_type = array.element_type;
  described.dims.assign(array.dims, array.dims + array.rank);
  return described;
}

Status TooLarge(size_t size) {
  return MakeStatus(FLAGOS_RESOURCE_EXHAUSTED, "arrays of " + std::to_string(size) +
                                                   " bytes of a callback do not fit into a message between the "
                                                   "backend's process and its host. Pass less, or set "
                                                   "FLAGOS_ISOLATION=none.");
}

}  // namespace

Call Server::AskHost(Ask ask) {
  uint64_t id = 0;
  {
    const std::lock_guard<std::mutex> lock(questions_mutex_);
    id = ++last_question_;
    questions_[id] = nullptr;
  }
  ask.id = id;
  {
    const std::lock_guard<std::mutex> lock(done_mutex_);
    done_.emplace_back().ask = std::move(ask);
    done_changed_.notify_one();
  }
  std::unique_lock<std::mutex> lock(questions_mutex_);
  answers_changed_.wait(lock, [this, id] { return questions_[id] != nullptr; });
  const auto found = questions_.find(id);
  Call answer = std::move(*found->second);
  questions_.erase(found);
  return answer;
}

void Server::TakeAnswer(const Call& call) {
  const std::lock_guard<std::mutex> lock(questions_mutex_);
  const auto found = questions_.find(call.object);
  if (found == questions_.end() || found->second != nullptr) End(kBadHost, "the host answered what nobody asked");
  found->second = std::make_unique<Call>(call);
  answers_changed_.notify_all();
}

FlagosError* Server::HostCallback(void* user_data, int64_t id, const FlagosHostArray* arguments, size_t num_arguments,
                                  FlagosHostArray* results, size_t num_results) {
  Server& server = *static_cast<Server*>(user_data);
  Ask ask;
  ask.question = Question::kHostCallback;
  ask.number = id;
  size_t size = 0;
  for (size_t i = 0; i < num_arguments; ++i) size += arguments[i].size_bytes;
  if (size > kMaxContents) return server.Make(TooLarge(size));
  for (size_t i = 0; i < num_arguments; ++i) {
    HostArray described = Describe(arguments[i]);
    if (arguments[i].size_bytes != 0) {
      described.data.assign(static_cast<const char*>(arguments[i].data), arguments[i].size_bytes);
    }
    ask.arguments.push_back(std::move(described));
  }
  for (size_t i = 0; i < num_results; ++i) ask.results.push_back(Describe(results[i]));
  const Call answer = server.AskHost(std::move(ask));
  if (answer.error != nullptr) return server.Make(answer.error);
  if (answer.contents.size() != num_results) End(kBadHost, "the host gave other results than were asked for");
  for (size_t i = 0; i < num_results; ++i) {
    if (answer.contents[i].size() != results[i].size_bytes) End(kBadHost, "the host gave a result of another size");
    if (results[i].size_bytes != 0) std::memcpy(results[i].data, answer.contents[i].data(), results[i].size_bytes);
  }
  return nullptr;
}

int32_t Server::KeyValueGet(void* user_data, const char* key, size_t key_size, int64_t timeout_ms, FlagosBytesSink sink,
                            void* sink_data) {
  Ask ask;
  ask.question = Question::kKeyValueGet;
  ask.key.assign(key, key_size);
  ask.number = timeout_ms;
  const Call answer = static_cast<Server*>(user_data)->AskHost(std::move(ask));
  if (answer.number == FLAGOS_OK) sink(sink_data, answer.data.data(), answer.data.size());
  return static_cast<int32_t>(answer.number);
}

int32_t Server::KeyValuePut(void* user_data, const char* key, size_t key_size, const void* value, size_t value_size) {
  if (value_size > kMaxContents) return FLAGOS_RESOURCE_EXHAUSTED;
  Ask ask;
  ask.question = Question::kKeyValuePut;
  ask.key.assign(key, key_size);
  ask.value.assign(static_cast<const char*>(value), value_size);
  return static_cast<int32_t>(static_cast<Server*>(user_data)->AskHost(std::move(ask)).number);
}

Status Server::ProfilerCall(const Call& call, Reply* reply) {
  if (call.method == Method::kProfilerStart) {
    FlagosProfilerStartArgs args{};
    args.struct_size = sizeof(args);
    args.context = context_;
    return Take(api_.profiler_start(&args));
  }
  FlagosProfilerStopArgs args{};
  args.struct_size = sizeof(args);
  args.context = context_;
  args.sink = [](void* sink_data, const void* bytes, size_t size) {
    static_cast<std::string*>(sink_data)->append(static_cast<const char*>(bytes), size);
  };
  args.sink_data = &reply->data;
  return Take(api_.profiler_stop(&args));
}

}  // namespace flagos_isolation
