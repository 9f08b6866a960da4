// Entries of backends in processes of their own. An entry has no argument that tells which, and neither has
// context_create: there is a fixed number of each.
#include <array>
#include <utility>

#include "flagos/isolation.h"
#include "flagos/plugin_abi_layout.h"
#include "objects.h"

namespace flagos_isolation {
namespace {

constexpr size_t kNumSlots = 64;

// One isolated backend: how its children are started, and what they say of it.
struct Slot {
  Settings settings;
  std::mutex mutex;
  bool is_known = false;  // whether `hello` and what points into it are there
  Hello hello;
  FlagosPluginInfo info{};
  FlagosApi api{};
  std::shared_ptr<Link> idle;  // a child without a context
  std::string message;         // what the last entry that failed said
};

// Never destroyed: threads of a host may call to its end.
std::array<Slot, kNumSlots>& Slots() {
  static auto* slots = new std::array<Slot, kNumSlots>;
  return *slots;
}
std::atomic<size_t> num_slots{0};

Hello HostHello(uint32_t version_min, uint32_t version_max) {
  Hello hello;
  hello.wire_version = kWireVersion;
  hello.version_min = version_min;
  hello.version_max = version_max;
  return hello;
}

void Describe(Slot* slot) {
  const Hello& hello = slot->hello;
  FlagosPluginInfo& info = slot->info;
  info.struct_size = sizeof(info);
  info.name = hello.name.c_str();
  info.platform = hello.platform.c_str();
  info.version = hello.backend_version.c_str();
  info.git_revision = hello.git_revision.c_str();
  info.compiler = hello.compiler.c_str();
  info.glibc = hello.glibc.c_str();
  info.build_id = hello.build_id.c_str();
  info.cxx11_abi = static_cast<int32_t>(hello.cxx11_abi);
  info.python_abi = static_cast<int32_t>(hello.python_abi);
  slot->api.version = hello.version;
}

// A child of the slot that has no context: the idle one, or a new one.
std::shared_ptr<Link> TakeLink(Slot* slot, std::string* why) {
  Hello own;
  {
    const std::lock_guard<std::mutex> lock(slot->mutex);
    std::shared_ptr<Link> idle = std::exchange(slot->idle, nullptr);
    if (idle != nullptr && idle->IsUsable()) return idle;
    own = HostHello(slot->hello.version, slot->hello.version);
  }
  Hello hello;
  return Link::Start(slot->settings, own, &hello, why);
}

template <size_t N>
void GiveLink(std::shared_ptr<Link> link) {
  Slot& slot = Slots()[N];
  {
    const std::lock_guard<std::mutex> lock(slot.mutex);
    if (slot.idle == nullptr || !slot.idle->IsUsable()) std::swap(slot.idle, link);
  }
  if (link != nullptr) link->Close();
}

template <size_t N>
FlagosError* ContextCreate(FlagosContextCreateArgs* args) {
  return Enter("context_create", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("context_create", context);
    std::string why;
    std::shared_ptr<Link> link = TakeLink(&Slots()[N], &why);
    if (link == nullptr) return MakeStatus(FLAGOS_UNAVAILABLE, why);
    std::unique_ptr<FlagosContext> context;
    if (Status status = CreateContext(link, args, &context); status != nullptr) {
      GiveLink<N>(std::move(link));
      return status;
    }
    context->give_back = GiveLink<N>;
    args->context = context.release();
    return nullptr;
  });
}

template <size_t N>
int32_t Entry(FlagosEntryArgs* args) {
  Slot& slot = Slots()[N];
  const std::lock_guard<std::mutex> lock(slot.mutex);
  try {
    if (!slot.is_known) {
      const Hello own = HostHello(args->host_version_min, args->host_version_max);
      slot.idle = Link::Start(slot.settings, own, &slot.hello, &slot.message);
      if (slot.idle == nullptr) {
        args->message = slot.message.c_str();
        return FLAGOS_ENTRY_FAILED;
      }
      slot.api = CommonTable();
      slot.api.context_create = ContextCreate<N>;
      Describe(&slot);
      slot.is_known = true;
    }
    args->plugin_version_min = slot.hello.version_min;
    args->plugin_version_max = slot.hello.version_max;
    args->info = &slot.info;
    if (slot.hello.version < args->host_version_min || slot.hello.version > args->host_version_max) {
      args->message = "the backend's process was asked for another version before";
      return FLAGOS_ENTRY_INCOMPATIBLE;
    }
    args->version = slot.hello.version;
    args->api = &slot.api;
    return FLAGOS_ENTRY_OK;
  } catch (const std::exception&) {
    args->message = "no memory for another process is left";
    return FLAGOS_ENTRY_FAILED;
  }
}

template <size_t... N>
constexpr std::array<FlagosPluginEntry, sizeof...(N)> Entries(std::index_sequence<N...> /*numbers*/) {
  return {Entry<N>...};
}
constexpr auto kEntries = Entries(std::make_index_sequence<kNumSlots>());

}  // namespace
}  // namespace flagos_isolation

extern "C" __attribute__((visibility("default"))) FlagosPluginEntry FlagosIsolate(const FlagosIsolateArgs* args) {
  using namespace flagos_isolation;
  if (args == nullptr || args->struct_size < sizeof(FlagosIsolateArgs) || args->num_words == 0) return nullptr;
  size_t number = num_slots.load();
  do {
    if (number == kNumSlots) return nullptr;
  } while (!num_slots.compare_exchange_weak(number, number + 1));
  Settings& settings = Slots()[number].settings;
  settings.command.assign(args->command, args->command + args->num_words);
  settings.whole_environment = args->environment == nullptr;
  if (args->environment != nullptr) {
    settings.environment.assign(args->environment, args->environment + args->num_environment);
  }
  settings.start_ms = args->start_ms;
  settings.silence_ms = args->silence_ms;
  settings.hang_ms = args->hang_ms;
  return kEntries[number];
}
