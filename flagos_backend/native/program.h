// A compiled program as the runtime sees it: facts, and a way to run one device's share of a launch.
#ifndef FLAGOS_NATIVE_PROGRAM_H_
#define FLAGOS_NATIVE_PROGRAM_H_

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "buffer.h"

namespace flagos {

class Profiler;

struct ProgramInfo {
  std::string name;
  std::string fingerprint;
  int64_t num_replicas = 1;
  int64_t num_partitions = 1;
  std::vector<int64_t> device_assignment;  // ids, [num_replicas][num_partitions]
  std::vector<Shape> arguments;
  std::vector<Shape> outputs;
  std::vector<std::string> argument_memory_kinds;  // empty string: the device's default
  std::vector<std::string> output_memory_kinds;
  std::vector<std::string> argument_shardings;  // empty list: not sharded
  std::vector<std::string> output_shardings;
  std::vector<int64_t> argument_aliases;  // [num_arguments], output index or -1
  std::vector<int64_t> donors;            // arguments that the program may use up, aliased or not
  size_t generated_code_bytes = 0;
  size_t temporary_bytes = 0;
  size_t peak_bytes = 0;
  std::vector<std::pair<std::string, double>> costs;
  // Short enough to run in the caller's thread, and calls nobody who may wait.
  bool is_small = false;
  // Its results are its arguments, at most of another type or shape.
  bool only_copies = false;
  // It has host callbacks.
  bool calls_host = false;
};

struct Argument {
  Ref<Contents> contents;
  const Shape* shape;
  bool donated;
};

// What all devices of one launch share: where their collectives meet. Made by Program::Begin.
class LaunchState {
 public:
  virtual ~LaunchState() = default;
  // A participant failed: whoever waits for it must give up. Any thread, any number of times.
  virtual void Abort(const Status& status) noexcept = 0;
};

// Where and as which participant a program runs.
struct Place {
  Device* device;
  int64_t replica;
  int64_t partition;
};

// What profilers say of a program: a JSON object, and the names of its native steps, by number.
struct ProgramNotes {
  std::string facts;
  std::vector<std::string> steps;
};

class Program {
 public:
  virtual ~Program() = default;

  // Called before the shares of a launch over several devices, of which this process has so many; may return NULL.
  virtual std::unique_ptr<LaunchState> Begin(size_t shares) = 0;

  // Runs one share. Arguments are ready; it may take their contents away. `memories` has one entry for each output,
  // where its block is accounted. Returns the outputs' blocks, shared with nobody else. Throws Failure.
  virtual std::vector<Ref<Block>> Run(const Place& place, LaunchState* state, std::vector<Argument>& arguments,
                                      const std::vector<Memory*>& memories) = 0;

  // Whether a run on `device` only enqueues, without a plan of the interpreter's: it may take place in the thread that launches it.
  virtual bool Immediate(const Device&) { return false; }

  // One of FLAGOS_ARTIFACT_*. Throws Failure.
  virtual std::string Artifact(int32_t kind) = 0;

  // Asked for while a profiler listens; NULL where there is nothing to say.
  virtual std::shared_ptr<const ProgramNotes> Notes() noexcept { return nullptr; }

  const ProgramInfo& info() const noexcept { return info_; }
  // The number under which the spans of `profiler`, its context's, name this program, which is described to it once.
  int64_t NumberIn(Profiler& profiler);

 protected:
  ProgramInfo info_;

 private:
  std::atomic<int64_t> number_{-1};  // once asked for
};

// Compiles a serialized flagos.Program.
std::unique_ptr<Program> CompileProgram(Context* context, const void* program, size_t size);
// Restores what Artifact(FLAGOS_ARTIFACT_SERIALIZED) gave; `assignment` replaces the device assignment unless empty.
std::unique_ptr<Program> LoadProgram(Context* context, const void* serialized, size_t size,
                                     const std::vector<int64_t>& assignment);

// Says for the length of a scope whose task runs in this thread: a queue's, or, within a host callback, nobody's.
class QueueScope {
 public:
  // `nested`: the task was launched from within a host callback, and so must not wait for the ticket of the one it is
  // in.
  QueueScope(DeviceQueue* queue, bool nested) noexcept;
  ~QueueScope();
  QueueScope(const QueueScope&) = delete;
  QueueScope& operator=(const QueueScope&) = delete;

  // Whether this thread is in a host callback.
  static bool InCallback() noexcept;

 private:
  friend class CallbackScope;
  DeviceQueue* queue_;
  bool nested_;
  bool has_ticket_ = false;
  QueueScope* outer_;
};

// Around a call of the host: its function may run programs on this very device, so another thread serves the queue.
class CallbackScope {
 public:
  CallbackScope();
  ~CallbackScope();
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;

 private:
  QueueScope* task_;
  QueueScope outside_;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_PROGRAM_H_
