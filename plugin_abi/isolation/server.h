// The child's end: takes calls from channels, makes them through the backend's own table, and says what has completed.
#ifndef FLAGOS_ISOLATION_SERVER_H_
#define FLAGOS_ISOLATION_SERVER_H_

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "channel.h"
#include "flagos/plugin_abi.h"
#include "frames.h"
#include "segment.h"
#include "status.h"
#include "wire.h"

namespace flagos_isolation {

constexpr int kWellEnded = 0, kBadHost = 2;
// Ends this process; `why` not NULL: says so.
[[noreturn]] void End(int status, const char* why);

class Server {
 public:
  Server(const FlagosApi& api, Descriptor events) : api_(api), events_(std::move(events)) {}

  // Serves until the host goes away, and ends the process.
  [[noreturn]] void Run();

 private:
  // An event of the backend's, destroyed when nobody uses it any more.
  struct Event {
    Event(const FlagosApi& of, FlagosEvent* taken) : api(of), handle(taken) {}
    ~Event() { api.event_destroy(handle); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    const FlagosApi& api;
    FlagosEvent* handle;
  };
  // What a transfer needs until it has completed: memory, and whether the event carries it to the host.
  struct Contents {
    std::shared_ptr<Segment> segment;
    std::string bytes;
    bool is_for_host = false;
    char* data() { return segment != nullptr ? segment->data() : bytes.data(); }
  };
  struct Pending;
  // Memory of an array that the host reads: nothing writes there, and it stays, until the host lets go of it.
  struct Pin {
    Pin(const FlagosApi& of, FlagosBuffer* taken, uint64_t name, int64_t from)
        : api(of), view(taken), id(name), offset(from) {}
    ~Pin() { api.buffer_destroy(view); }
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;
    const FlagosApi& api;
    FlagosBuffer* view;
    const uint64_t id;
    const int64_t offset;
  };
  struct Program {
    FlagosExecutable* handle = nullptr;
    size_t num_outputs = 0;
    std::vector<int64_t> aliases;
  };

  void ServeChannel(Descriptor socket);
  void SendEvents();
  Status Handle(const Call& call, Reply* reply);
  Status HandleInContext(const Call& call, Reply* reply);

  Status ContextCreate(const Call& call, Reply* reply);
  Status DescribeContext(Context* described);
  void ContextDestroy();
  Status DeviceCall(const Call& call, Reply* reply);
  Status EventCall(const Call& call, Reply* reply);
  Status MakeBuffer(const Call& call, Reply* reply);
  Status BufferCall(const Call& call, Reply* reply);
  Status FromHost(const Call& call, Reply* reply);
  Status ToHost(const Call& call, Reply* reply);
  Status WriteRaw(const Call& call, Reply* reply);
  Status PinBuffer(const Call& call, FlagosBuffer* buffer, Reply* reply);
  void Unpin(uint64_t id);
  Status Donate(const Call& call, Reply* reply);
  Status MakeProgram(const Call& call, Reply* reply);
  Status DescribeProgram(FlagosExecutable* executable, Executable* described);
  Status Artifact(const Call& call, Reply* reply);
  Status Execute(const Call& call, Reply* reply);

  // The backend's error as a value; NULL is success.
  Status Take(FlagosError* error);
  FlagosError* Make(const Status& status);
  // Tells the host when `event` has completed: in the reply where it has already, well.
  // What the host waits for is then there: `contents` in shared memory or the message, `pin` in memory of this process.
  void Tell(FlagosEvent* event, uint64_t id, std::shared_ptr<Contents> contents, Reply* reply,
            std::shared_ptr<Pin> pin = nullptr);
  // How many events the host has been told of, or will be, when it has been told of all that have completed by now.
  uint64_t NumTold();
  Status Address(FlagosBuffer* buffer, int64_t offset, uint64_t* address);
  static void OnReady(void* user_data, FlagosError* error);
  // What the backend asks of its host, which the host's own functions answer: server_host.cc.
  Call AskHost(Ask ask);
  void TakeAnswer(const Call& call);
  static FlagosError* HostCallback(void* user_data, int64_t id, const FlagosHostArray* arguments, size_t num_arguments,
                                   FlagosHostArray* results, size_t num_results);
  static int32_t KeyValueGet(void* user_data, const char* key, size_t key_size, int64_t timeout_ms,
                             FlagosBytesSink sink, void* sink_data);
  static int32_t KeyValuePut(void* user_data, const char* key, size_t key_size, const void* value, size_t value_size);
  Status ProfilerCall(const Call& call, Reply* reply);
  bool HasCompletedWell(FlagosEvent* event);

  Status AddBuffer(FlagosBuffer* buffer, const Call& call, size_t index, Reply* reply);
  FlagosBuffer* FindBuffer(uint64_t id);
  void DestroyBuffer(uint64_t id);
  Program FindProgram(uint64_t id);
  std::shared_ptr<Event> FindEvent(uint64_t id);
  FlagosDevice* FindDevice(int64_t index) const;  // 1 + index; NULL for none
  FlagosMemory* FindMemory(int64_t index) const;
  Status FindContents(const Call& call, std::shared_ptr<Contents>* contents);

  const FlagosApi& api_;
  Descriptor events_;

  // Calls that are under way; a context is made and ended when there are none.
  std::mutex life_;
  std::condition_variable calls_changed_;
  size_t num_calls_ = 0;
  FlagosContext* context_ = nullptr;
  std::vector<FlagosDevice*> devices_;
  std::vector<FlagosMemory*> memories_;

  std::mutex mutex_;  // of the maps
  std::condition_variable pending_changed_;
  std::unordered_map<uint64_t, FlagosBuffer*> buffers_;
  std::unordered_map<uint64_t, Program> programs_;
  std::unordered_map<uint64_t, std::shared_ptr<Event>> own_events_;  // of event_create
  std::unordered_map<uint64_t, std::shared_ptr<Event>> pending_events_;
  std::unordered_map<uint64_t, std::shared_ptr<Segment>> segments_;
  std::unordered_map<uint64_t, std::shared_ptr<Pin>> pins_;

  // Callbacks of the backend do not wait for the socket: a host that is slow to read would hold the backend up.
  std::mutex done_mutex_;
  std::condition_variable done_changed_;
  std::vector<Done> done_;
  uint64_t num_told_ = 0;  // events that have ever been in done_

  std::mutex questions_mutex_;
  std::condition_variable answers_changed_;
  uint64_t last_question_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<Call>> questions_;  // by id; NULL: not answered yet
};

}  // namespace flagos_isolation

#endif  // FLAGOS_ISOLATION_SERVER_H_
