// A child as a process: how it is started, what holds it to its host, and what it wrote last.
#ifndef FLAGOS_ISOLATION_PROCESS_H_
#define FLAGOS_ISOLATION_PROCESS_H_

#include <sys/types.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "frames.h"

namespace flagos_isolation {

// How children of one backend are started and watched; FlagosIsolateArgs says what each field means.
struct Settings {
  std::vector<std::string> command;
  bool whole_environment = true;
  std::vector<std::string> environment;
  int start_ms = 0, silence_ms = 0, hang_ms = 0;
};

// What a child writes to its standard error: handed on to that of this process, and the end of it kept.
class ChildLog : public std::enable_shared_from_this<ChildLog> {
 public:
  explicit ChildLog(Descriptor reading) : reading_(std::move(reading)) {}
  // Reads in a thread of its own until no process holds the other end.
  void Start();
  // Adds a line of the host's, as if the child had written it.
  void Add(std::string_view line);
  // The last lines in quotes, without anything that a terminal would act on; "" where there is none. Called after the
  // child has ended; waits a moment for what it wrote last.
  std::string LastLines();

 private:
  void Read();
  void Keep(std::string_view text);

  Descriptor reading_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_at_end_ = false;
  std::string kept_;
};

// Starts a child in a process group of its own, with the number of `socket` there as its last argument. It has an empty
// standard input, `errors` as standard error, the socket and no other file; no core file; no privilege that a program
// could give it; and it is killed when the calling thread ends, however that ends. 0, or an errno.
int StartProcess(const Settings& settings, int socket, int errors, pid_t* process);

// Waits for the end of a child that is about to end, kills it where it does not, and with it what it has started. How it
// ended, in words.
std::string AwaitEnd(pid_t process);

// Whether the environment of a child has the variable `name`: patterns are names, or what names begin with and "*".
bool IsPassedOn(std::string_view name, const std::vector<std::string>& patterns);

}  // namespace flagos_isolation

#endif  // FLAGOS_ISOLATION_PROCESS_H_
