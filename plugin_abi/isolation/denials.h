// What a child tried and was denied: system calls that its seccomp filter hands to the host, which refuses each of them.
#ifndef FLAGOS_ISOLATION_DENIALS_H_
#define FLAGOS_ISOLATION_DENIALS_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "frames.h"

namespace flagos_isolation {

class Denials : public std::enable_shared_from_this<Denials> {
 public:
  // Told of the name of a call, when it is denied for the first time.
  using Report = std::function<void(const std::string& name)>;

  // `calls`: the number and the name of each call that the filter denies, as "41 socket".
  Denials(Descriptor listener, const std::vector<std::string>& calls);
  // Refuses calls in a thread of its own until no process has the filter, or Close(). The listener stays open as long:
  // without one the child might set a filter with a listener of its own, and answer itself.
  void Start(Report report);
  // The child has ended.
  void Close();
  // The names of all calls that were denied so far, each once, in order.
  std::vector<std::string> Names();

 private:
  void Refuse(const Report& report);

  const Descriptor listener_;
  Descriptor closing_, wakes_;
  std::map<int, std::string> known_;
  std::mutex mutex_;
  std::vector<std::string> names_;
};

}  // namespace flagos_isolation

#endif  // FLAGOS_ISOLATION_DENIALS_H_
