#include "program.h"

#ifdef FLAGOS_TEST_PROGRAMS
#include "testing/test_program.h"
#endif
#include "profiler.h"
#include "python_program.h"

namespace flagos {
namespace {

thread_local QueueScope* t_scope = nullptr;

}  // namespace

int64_t Program::NumberIn(Profiler& profiler) {
  const int64_t number = profiler.NumberOf(info_.fingerprint);
  if (number >= 0) return number;
  const std::shared_ptr<const ProgramNotes> notes = Notes();
  return profiler.Describe(info_.fingerprint, notes ? notes->facts : "{\"name\":" + Quoted(info_.name) + "}");
}

std::unique_ptr<Program> CompileProgram(Context* context, const void* program, size_t size) {
#ifdef FLAGOS_TEST_PROGRAMS
  if (auto test = testing::CompileTestProgram(program, size)) return test;
#endif
  return CompilePythonProgram(context, program, size);
}

std::unique_ptr<Program> LoadProgram(Context* context, const void* serialized, size_t size,
                                     const std::vector<int64_t>& assignment) {
  return LoadPythonProgram(context, serialized, size, assignment);
}

QueueScope::QueueScope(DeviceQueue* queue, bool nested) noexcept
    : queue_(queue), nested_(nested), outer_(std::exchange(t_scope, this)) {}

QueueScope::~QueueScope() {
  t_scope = outer_;
  if (has_turn_) queue_->EndTurn();
}

bool QueueScope::InCallback() noexcept { return t_scope != nullptr && t_scope->queue_ == nullptr; }

CallbackScope::CallbackScope() : task_(t_scope), outside_(nullptr, false) {
  if (task_ == nullptr || task_->queue_ == nullptr) return;
  const bool takes_turn = !task_->nested_ && !task_->has_turn_;
  const DeviceQueue::Turn turn = takes_turn ? task_->queue_->TakeTurn() : 0;
  task_->queue_->BeginBlocking();
  if (!takes_turn) return;
  task_->queue_->AwaitTurn(turn);
  task_->has_turn_ = true;
}

CallbackScope::~CallbackScope() {
  if (task_ != nullptr && task_->queue_ != nullptr) task_->queue_->EndBlocking();
}

}  // namespace flagos
