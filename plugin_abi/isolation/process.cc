#include "process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

extern "C" char** environ;

namespace flagos_isolation {
namespace {

// Where the child finds its socket, and a number above it for ours, so that dup2 is never of a number to itself.
constexpr int kChildSocket = 3, kAboveChildSocket = 10;
// How long a child whose sockets are closed may take to end by itself.
constexpr int kEndMilliseconds = 2000;
// How long what it wrote last may take to be read; a process that it has left behind may hold the pipe open.
constexpr std::chrono::milliseconds kLogPatience{200};
constexpr size_t kMaxKept = 4096, kMaxShown = 800, kMaxLines = 6;
constexpr char kModeVariable[] = "FLAGOS_ISOLATION";
constexpr unsigned kLastDescriptor = ~0U;

std::vector<char*> Pointers(std::vector<std::string>* strings) {
  std::vector<char*> pointers;
  for (std::string& string : *strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::vector<std::string> Environment(const Settings& settings) {
  std::vector<std::string> environment;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view whole = *variable;
    const std::string_view name = whole.substr(0, whole.find('='));
    if (name == kModeVariable) continue;
    if (settings.whole_environment || IsPassedOn(name, settings.environment)) environment.emplace_back(whole);
  }
  environment.push_back(std::string(kModeVariable) + "=none");  // what the child loads stays in it
  return environment;
}

struct NewProcess {
  char** command;
  char** environment;
  pid_t host;
  int socket, errors;
};

// In the child of vfork, which has the memory of its parent: system calls alone. Returns an errno where it fails.
int Become(const NewProcess& is) {
  // Handlers are the host's; what it ignores stays ignored.
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action{};
    if (sigaction(number, nullptr, &action) != 0 || action.sa_handler == SIG_IGN) continue;
    action.sa_handler = SIG_DFL;
    action.sa_flags = 0;
    sigaction(number, &action, nullptr);
  }
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return errno;
  if (getppid() != is.host) _exit(0);  // it ended before it could be watched
  setpgid(0, 0);
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  const int empty = open("/dev/null", O_RDONLY);
  if (empty < 0 || dup2(empty, 0) < 0 || dup2(is.errors, 2) < 0 || dup2(is.socket, kChildSocket) < 0) return errno;
#ifdef SYS_close_range
  const bool closed = syscall(SYS_close_range, kChildSocket + 1, kLastDescriptor, 0) == 0;
#else
  const bool closed = false;
#endif
  if (!closed) {  // before Linux 5.9
    const long last = sysconf(_SC_OPEN_MAX);
    for (long number = kChildSocket + 1; number < last; ++number) close(static_cast<int>(number));
  }
  sigset_t nothing;
  sigemptyset(&nothing);
  sigprocmask(SIG_SETMASK, &nothing, nullptr);
  execvpe(is.command[0], is.command, is.environment);
  return errno;
}

std::string Describe(int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    const int number = WTERMSIG(wait_status);
    return "was ended by signal " + std::to_string(number) + " (" + strsignal(number) + ")";
  }
  return "ended with exit status " + std::to_string(WEXITSTATUS(wait_status));
}

void AppendPrintable(char byte, std::string* text) {
  const auto value = static_cast<unsigned char>(byte);
  if (value >= 0x20 && value < 0x7f && value != '\\') {
    text->push_back(byte);
    return;
  }
  char escaped[5];
  std::snprintf(escaped, sizeof(escaped), "\\x%02x", value);
  text->append(escaped);
}

}  // namespace

bool IsPassedOn(std::string_view name, const std::vector<std::string>& patterns) {
  return std::any_of(patterns.begin(), patterns.end(), [name](std::string_view pattern) {
    if (pattern.empty() || pattern.back() != '*') return name == pattern;
    pattern.remove_suffix(1);
    return name.substr(0, pattern.size()) == pattern;
  });
}

// ---- Start ----------------------------------------------------------------------------------------------------------

int StartProcess(const Settings& settings, int socket, int errors, pid_t* process) {
  std::vector<std::string> command = settings.command;
  command.push_back(std::to_string(kChildSocket));
  std::vector<std::string> environment = Environment(settings);
  std::vector<char*> words = Pointers(&command);
  std::vector<char*> variables = Pointers(&environment);
  const Descriptor high_socket(fcntl(socket, F_DUPFD_CLOEXEC, kAboveChildSocket));
  const Descriptor high_errors(fcntl(errors, F_DUPFD_CLOEXEC, kAboveChildSocket));
  if (!high_socket.valid() || !high_errors.valid()) return errno;
  const NewProcess made{words.data(), variables.data(), getpid(), high_socket.get(), high_errors.get()};
  // No handler of the host may run in the child, which has the host's memory until it is another program.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  volatile int failure = 0;
  const pid_t child = vfork();
  if (child == 0) {
    failure = Become(made);
    _exit(127);
  }
  const int vfork_error = errno;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (child < 0) return vfork_error;
  if (failure != 0) {
    waitpid(child, nullptr, 0);
    return failure;
  }
  *process = child;
  return 0;
}

// ---- End ------------------------------------------------------------------------------------------------------------

std::string AwaitEnd(pid_t process) {
  // Its sockets are closed before it can be waited for.
  for (int waited = 0;; ++waited) {
    siginfo_t info{};
    const int failed = waitid(P_PID, static_cast<id_t>(process), &info, WEXITED | WNOHANG | WNOWAIT);
    if (failed == 0 && info.si_pid == process) {
      kill(-process, SIGKILL);  // what it has started, while the number of its group cannot be another's
      int status = 0;
      if (waitpid(process, &status, 0) == process) return Describe(status);
    }
    if (failed != 0 && errno != EINTR) return "ended, and somebody else was told how";
    if (waited == kEndMilliseconds) kill(process, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// ---- What it writes -------------------------------------------------------------------------------------------------

namespace {

// In a thread of ours: a standard error of the host that nobody reads is not to end the host.
void BlockBrokenPipe() {
  sigset_t broken_pipe;
  sigemptyset(&broken_pipe);
  sigaddset(&broken_pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &broken_pipe, nullptr);
}

}  // namespace

void ChildLog::Start() {
  std::thread([log = shared_from_this()] { log->Read(); }).detach();
}

void ChildLog::Keep(std::string_view text) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.append(text);
    if (kept_.size() > kMaxKept) kept_.erase(0, kept_.size() - kMaxKept);
  }
  while (!text.empty()) {
    const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) break;
    text.remove_prefix(static_cast<size_t>(written));
  }
}

void ChildLog::Add(std::string_view line) {
  BlockBrokenPipe();
  Keep(line);
}

void ChildLog::Read() {
  BlockBrokenPipe();
  char data[4096];
  while (true) {
    const ssize_t got = read(reading_.get(), data, sizeof(data));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    Keep({data, static_cast<size_t>(got)});
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  is_at_end_ = true;
  changed_.notify_all();
}

std::string ChildLog::LastLines() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, kLogPatience, [this] { return is_at_end_; });
  std::string_view kept = kept_;
  while (!kept.empty() && std::strchr(" \t\r\n", kept.back()) != nullptr) kept.remove_suffix(1);
  size_t from = kept.size() > kMaxShown ? kept.size() - kMaxShown : 0;
  size_t begin = kept.size();
  for (size_t lines = 0; begin > from && lines < kMaxLines; --begin) {
    if (kept[begin - 1] == '\n' && ++lines == kMaxLines) break;
  }
  std::string shown;
  for (const char byte : kept.substr(begin)) {
    if (byte == '\n') {
      shown += " | ";
    } else {
      AppendPrintable(byte, &shown);
    }
  }
  return shown.empty() ? "" : '"' + shown + '"';
}

}  // namespace flagos_isolation
