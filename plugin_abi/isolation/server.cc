// Channels, events and the end of the child; what a call does is in server_buffers.cc and server_programs.cc.
#include "server.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <thread>

#include "flagos/isolation.h"

namespace flagos_isolation {
namespace {

constexpr std::chrono::milliseconds kSignOfLife{1000};

// Ends this process with its parent, also where a process that the parent forked keeps the sockets open.
void WatchParent(pid_t parent) {
#ifdef SYS_pidfd_open
  Descriptor watched(static_cast<int>(syscall(SYS_pidfd_open, parent, 0)));
#else
  Descriptor watched;
#endif
  pollfd entry{watched.get(), POLLIN, 0};
  while (getppid() == parent) poll(&entry, 1, 1000);
  End(kWellEnded, nullptr);
}

}  // namespace

void End(int status, const char* why) {
  if (why != nullptr) std::fprintf(stderr, "flagos: the backend's process ends: %s\n", why);
  // Neither the backend's destructors nor Python's end: nobody is there any more who waits for them.
  _exit(status);
}

// What waits for one event.
struct Server::Pending {
  Server* server;
  uint64_t id;
  std::shared_ptr<Contents> contents;
  std::shared_ptr<Pin> pin;
};

void Server::Run() {
  std::thread([this] { SendEvents(); }).detach();
  Frame frame;
  while (true) {
    const Receipt receipt = ReceiveFrame(events_.get(), &frame);
    if (receipt == Receipt::kEnd) End(kWellEnded, nullptr);
    if (receipt != Receipt::kFrame || !frame.descriptor.valid())
      End(kBadHost, "the host offered a channel that is none");
    std::thread([this, number = frame.descriptor.Release()] { ServeChannel(Descriptor(number)); }).detach();
  }
}

namespace {

// False when the host is gone.
bool Answer(Channel* channel, uint64_t sequence, const Reply& reply) {
  std::string message = Encode(reply);
  if (message.size() > UINT32_MAX) {
    Reply refused;
    refused.error =
        MakeStatus(FLAGOS_RESOURCE_EXHAUSTED, "an answer of " + std::to_string(message.size()) +
                                                  " bytes does not fit into a message of the backend's process");
    message = Encode(refused);
  }
  const Receipt receipt = channel->Send(sequence, message);
  if (receipt == Receipt::kMalformed) End(kBadHost, "the host spoiled its channel");
  return receipt == Receipt::kFrame;
}

}  // namespace

void Server::ServeChannel(Descriptor socket) {
  std::unique_ptr<Channel> channel;
  const Receipt joined = Channel::Join(std::move(socket), &channel);
  if (joined == Receipt::kEnd) return;  // the host is gone
  if (joined != Receipt::kFrame) End(kBadHost, "the host offered a channel that is none");
  Frame frame;
  while (true) {
    const Receipt receipt = channel->Receive(&frame);
    if (receipt == Receipt::kEnd) return;  // the event socket says whether the host is gone
    Call call;
    if (receipt != Receipt::kFrame || !Decode(frame.message, &call)) End(kBadHost, "the host sent a call that is none");
    if (frame.descriptor.valid()) {
      std::shared_ptr<Segment> segment = Segment::Map(call.segment, std::move(frame.descriptor));
      if (segment == nullptr) End(kBadHost, "the host sent shared memory that is none, or that does not fit");
      const std::lock_guard<std::mutex> lock(mutex_);
      segments_[call.segment] = std::move(segment);
    }
    Reply reply;
    reply.error = Handle(call, &reply);
    if (HasReply(call.method) && !Answer(channel.get(), frame.sequence, reply)) return;
  }
}

void Server::SendEvents() {
  std::vector<Done> done;
  while (true) {
    {
      std::unique_lock<std::mutex> lock(done_mutex_);
      done_changed_.wait_for(lock, kSignOfLife, [this] { return !done_.empty(); });
      done.swap(done_);
      if (done.empty()) done.emplace_back();  // nothing has completed: a sign of life
    }
    for (const Done& event : done) {
      if (!SendFrame(events_.get(), 0, Encode(event))) return;
    }
    done.clear();
  }
}

// ---- Errors and events ----------------------------------------------------------------------------------------------

Status Server::Take(FlagosError* error) {
  if (error == nullptr) return nullptr;
  FlagosErrorDescribeArgs args{};
  args.struct_size = sizeof(args);
  args.error = error;
  api_.error_describe(&args);
  auto data = std::make_shared<ErrorData>();
  data->code = args.code == FLAGOS_OK ? int32_t{FLAGOS_UNKNOWN} : args.code;
  data->message.assign(args.message, args.message_size);
  for (size_t i = 0; i < args.num_payloads; ++i) {
    const FlagosNamedValue& payload = args.payloads[i];
    data->payloads.emplace_back(std::string(payload.name, payload.name_size),
                                std::string(payload.string_value, payload.value_size));
  }
  api_.error_destroy(error);
  return data;
}

FlagosError* Server::Make(const Status& status) {
  if (status == nullptr) return nullptr;
  FlagosErrorCreateArgs args{};
  args.struct_size = sizeof(args);
  args.message = status->message.data();
  args.message_size = status->message.size();
  args.code = status->code;
  // What the host says is an error stays one, whatever keeps the backend from making it.
  FlagosError* failed = api_.error_create(&args);
  return failed != nullptr ? failed : args.error;
}

bool Server::HasCompletedWell(FlagosEvent* event) {
  FlagosEventQueryArgs query{};
  query.struct_size = sizeof(query);
  query.event = event;
  if (FlagosError* error = api_.event_query(&query); error != nullptr) {
    api_.error_destroy(error);
    return false;
  }
  if (query.error != nullptr) api_.error_destroy(query.error);
  return query.is_ready != 0 && query.error == nullptr;
}

void Server::Tell(FlagosEvent* event, uint64_t id, std::shared_ptr<Contents> contents, Reply* reply,
                  std::shared_ptr<Pin> pin) {
  auto held = std::make_shared<Event>(api_, event);
  // Where an address cannot be told, OnReady says why.
  if (HasCompletedWell(event) && (pin == nullptr || Address(pin->view, pin->offset, &reply->address) == nullptr)) {
    reply->ready.push_back(static_cast<int64_t>(id));
    if (contents != nullptr && contents->is_for_host) reply->data = std::move(contents->bytes);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    pending_events_[id] = held;
  }
  FlagosEventOnReadyArgs args{};
  args.struct_size = sizeof(args);
  args.event = event;
  args.callback = OnReady;
  args.user_data = new Pending{this, id, std::move(contents), std::move(pin)};
  FlagosError* failed = api_.event_on_ready(&args);
  if (failed != nullptr) OnReady(args.user_data, failed);
}

void Server::OnReady(void* user_data, FlagosError* error) {
  const std::unique_ptr<Pending> pending(static_cast<Pending*>(user_data));
  Server& server = *pending->server;
  Done done;
  done.event = pending->id;
  done.error = server.Take(error);
  const bool carries = pending->contents != nullptr && pending->contents->is_for_host;
  if (carries && done.error == nullptr) done.data = std::move(pending->contents->bytes);
  if (pending->pin != nullptr && done.error == nullptr) {
    done.error = server.Address(pending->pin->view, pending->pin->offset, &done.address);
  }
  if (pending->pin != nullptr && done.error != nullptr) server.Unpin(pending->pin->id);
  {
    const std::lock_guard<std::mutex> lock(server.done_mutex_);
    server.done_.push_back(std::move(done));
    ++server.num_told_;
    server.done_changed_.notify_one();
  }
  std::shared_ptr<Event> forgotten;  // destroyed without the lock
  const std::lock_guard<std::mutex> lock(server.mutex_);
  const auto found = server.pending_events_.find(pending->id);
  if (found == server.pending_events_.end()) return;
  forgotten = std::move(found->second);
  server.pending_events_.erase(found);
  server.pending_changed_.notify_all();
}

uint64_t Server::NumTold() {
  std::unordered_map<uint64_t, std::shared_ptr<Event>> pending;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    pending = pending_events_;
  }
  for (auto at = pending.begin(); at != pending.end();) {
    FlagosEventQueryArgs query{};
    query.struct_size = sizeof(query);
    query.event = at->second->handle;
    const bool has_completed = Take(api_.event_query(&query)) == nullptr && query.is_ready != 0;
    if (has_completed && query.error != nullptr) api_.error_destroy(query.error);
    at = has_completed ? std::next(at) : pending.erase(at);
  }
  {
    std::unique_lock<std::mutex> lock(mutex_);
    pending_changed_.wait(lock, [&] {
      return std::none_of(pending.begin(), pending.end(),
                          [this](const auto& entry) { return pending_events_.count(entry.first) != 0; });
    });
  }
  const std::lock_guard<std::mutex> lock(done_mutex_);
  return num_told_;
}

std::shared_ptr<Server::Event> Server::FindEvent(uint64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto* map : {&own_events_, &pending_events_}) {
    const auto found = map->find(id);
    if (found != map->end()) return found->second;
  }
  return nullptr;
}

Status Server::EventCall(const Call& call, Reply* reply) {
  if (call.method == Method::kEventDestroy) {
    std::shared_ptr<Event> forgotten;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = own_events_.find(call.object);
    if (found == own_events_.end()) return nullptr;
    forgotten = std::move(found->second);
    own_events_.erase(found);
    return nullptr;
  }
  if (call.method == Method::kEventSet) {
    const std::shared_ptr<Event> event = FindEvent(call.object);
    if (event == nullptr) return MakeStatus(FLAGOS_NOT_FOUND, "event_set: no such event");
    FlagosEventSetArgs args{};
    args.struct_size = sizeof(args);
    args.event = event->handle;
    args.error = Make(call.error);
    return Take(api_.event_set(&args));
  }
  FlagosEventCreateArgs args{};
  args.struct_size = sizeof(args);
  args.context = context_;
  if (Status status = Take(api_.event_create(&args)); status != nullptr) return status;
  const std::lock_guard<std::mutex> lock(mutex_);
  own_events_[call.event] = std::make_shared<Event>(api_, args.event);
  (void)reply;
  return nullptr;
}

// ---- Which call it is -----------------------------------------------------------------------------------------------

Status Server::Handle(const Call& call, Reply* reply) {
  if (call.method == Method::kAnswer) {  // also while a context is made
    TakeAnswer(call);
    return nullptr;
  }
  if (!call.forgotten.empty()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const int64_t id : call.forgotten) segments_.erase(static_cast<uint64_t>(id));
  }
  std::unique_lock<std::mutex> life(life_);
  if (call.method == Method::kContextCreate || call.method == Method::kContextDestroy) {
    calls_changed_.wait(life, [this] { return num_calls_ == 0; });
    if (call.method == Method::kContextCreate) return ContextCreate(call, reply);
    ContextDestroy();
    return nullptr;
  }
  if (context_ == nullptr) return MakeStatus(FLAGOS_FAILED_PRECONDITION, "the backend's process has no context");
  ++num_calls_;
  life.unlock();
  Status status = HandleInContext(call, reply);
  life.lock();
  if (--num_calls_ == 0) calls_changed_.notify_all();
  return status;
}

Status Server::HandleInContext(const Call& call, Reply* reply) {
  for (const int64_t id : call.destroyed) DestroyBuffer(static_cast<uint64_t>(id));
  switch (call.method) {
    case Method::kDeviceMemoryStats:
    case Method::kDeviceSynchronize:
      return DeviceCall(call, reply);
    case Method::kEventCreate:
    case Method::kEventDestroy:
    case Method::kEventSet:
      return EventCall(call, reply);
    case Method::kBufferFromHost:
      return FromHost(call, reply);
    case Method::kBufferAllocate:
    case Method::kBufferPromise:
    case Method::kBufferCopy:
    case Method::kBufferBitcast:
      return MakeBuffer(call, reply);
    case Method::kBufferDestroy:
      return nullptr;  // of what `destroyed` names
    case Method::kBufferFulfill:
    case Method::kBufferReadyEvent:
    case Method::kBufferDelete:
    case Method::kBufferHold:
      return BufferCall(call, reply);
    case Method::kBufferToHost:
    case Method::kBufferReadRaw:
      return ToHost(call, reply);
    case Method::kBufferUnpin:
      Unpin(call.object);
      return nullptr;
    case Method::kBufferWriteRaw:
      return WriteRaw(call, reply);
    case Method::kBufferDonate:
      return Donate(call, reply);
    case Method::kCompile:
    case Method::kExecutableLoad:
      return MakeProgram(call, reply);
    case Method::kExecutableDestroy: {
      const Program program = FindProgram(call.object);
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        programs_.erase(call.object);
      }
      if (program.handle != nullptr) api_.executable_destroy(program.handle);
      return nullptr;
    }
    case Method::kExecutableArtifact:
      return Artifact(call, reply);
    case Method::kExecute:
      return Execute(call, reply);
    case Method::kProfilerStart:
    case Method::kProfilerStop:
      return ProfilerCall(call, reply);
    default:
      return MakeStatus(FLAGOS_UNIMPLEMENTED, "the backend's process has no call of the number " +
                                                  std::to_string(static_cast<uint32_t>(call.method)));
  }
}

}  // namespace flagos_isolation

extern "C" __attribute__((visibility("default"))) void FlagosServe(int32_t socket, const FlagosApi* api,
                                                                   uint32_t version, const FlagosPluginInfo* info,
                                                                   const char* refusal) {
  using namespace flagos_isolation;
  signal(SIGINT, SIG_IGN);  // a terminal sends it to host and child; it is the host's
  std::thread([parent = getppid()] { WatchParent(parent); }).detach();
  Descriptor events(socket);
  Frame frame;
  Hello host;
  if (ReceiveFrame(events.get(), &frame) != Receipt::kFrame || !Decode(frame.message, &host)) {
    End(kBadHost, "the host's greeting is none");
  }
  Hello own;
  own.wire_version = kWireVersion;
  static const char probe = 0;
  own.probe = reinterpret_cast<uintptr_t>(&probe);
  if (refusal != nullptr) {
    own.refusal = refusal;
  } else if (host.wire_version != kWireVersion) {
    own.refusal = "the host speaks version " + std::to_string(host.wire_version) +
                  " of the wire, the backend's process version " + std::to_string(kWireVersion) +
                  "; install both from one build";
  } else if (version < host.version_min || version > host.version_max) {
    own.refusal = "the backend speaks an ABI version that the host does not ask its process for";
  } else {
    own.version = own.version_min = own.version_max = version;
    own.name = info->name;
    own.platform = info->platform;
    own.backend_version = info->version;
    own.git_revision = info->git_revision;
    own.compiler = info->compiler;
    own.glibc = info->glibc;
    own.build_id = info->build_id;
    own.cxx11_abi = info->cxx11_abi;
    own.python_abi = info->python_abi;
  }
  SendFrame(events.get(), 0, Encode(own));
  if (!own.refusal.empty()) End(kBadHost, nullptr);
  (new Server(*api, std::move(events)))->Run();
}
