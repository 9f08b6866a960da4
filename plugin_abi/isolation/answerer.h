// The host's side of what a child asks: callbacks of programs, and the key-value store. The host's functions may block and
// may themselves use the device, so that threads of their own call them.
#ifndef FLAGOS_ISOLATION_ANSWERER_H_
#define FLAGOS_ISOLATION_ANSWERER_H_

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>

#include "flagos/plugin_abi.h"
#include "wire.h"

namespace flagos_isolation {

class Link;

// What a host gave with its context. NULL: it gave none.
struct HostFunctions {
  FlagosHostCallback callback = nullptr;
  void* callback_user_data = nullptr;
  FlagosKeyValueGet get = nullptr;
  FlagosKeyValuePut put = nullptr;
  void* store_user_data = nullptr;
};

class Answerer {
 public:
  // From here on questions are answered by `functions`.
  void Begin(const HostFunctions& functions);
  // No function is called any more once it returns. Waits for those that run, but for one that this thread itself runs.
  void End();
  // False where more questions wait than any backend asks at once.
  bool Take(std::shared_ptr<Link> link, Ask ask);

 private:
  struct Asked {
    std::shared_ptr<Link> link;
    Ask ask;
  };
  void Work();

  std::mutex mutex_;
  std::condition_variable asked_changed_, running_changed_;
  HostFunctions functions_;
  bool is_open_ = false;
  std::deque<Asked> asked_;
  size_t num_threads_ = 0, num_idle_ = 0, num_running_ = 0;
};

}  // namespace flagos_isolation

#endif  // FLAGOS_ISOLATION_ANSWERER_H_
