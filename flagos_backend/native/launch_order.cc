#include "launch_order.h"

#include <algorithm>

namespace flagos {

void LaunchOrder::Enter(uint64_t number, std::vector<std::pair<DeviceQueue*, Task>> tasks,
                        const std::vector<DeviceQueue*>& all) {
  const bool is_latest = number > latest_entered_;
  latest_entered_ = std::max(latest_entered_, number);
  if (tasks.size() == 1) {
    tasks[0].first->Push(std::move(tasks[0].second), {number, nullptr});
    return;
  }
  auto gang = std::make_shared<Gang>(number, tasks.size());
  gangs_.remove_if([](const std::shared_ptr<Gang>& other) { return other->waiting == 0; });
  if (is_latest) {
    gangs_.push_back(gang);
    for (auto& [queue, task] : tasks) queue->Push(std::move(task), {number, gang});
    return;
  }
  // Its place is the same for all queues, so none may begin anything meanwhile.
  std::vector<std::unique_lock<std::mutex>> locks;
  locks.reserve(all.size());
  for (DeviceQueue* queue : all) locks.push_back(queue->Lock());
  // What has begun on one device is waited for there by what comes before it on the others: all of those stay before it.
  auto free = gangs_.end();
  while (free != gangs_.begin() && !(*std::prev(free))->begun()) --free;
  std::for_each(gangs_.begin(), free, [](const std::shared_ptr<Gang>& other) { other->fixed = true; });
  gangs_.insert(std::find_if(free, gangs_.end(), [number](const auto& other) { return other->number > number; }), gang);
  for (auto& [queue, task] : tasks) queue->PushLocked(std::move(task), {number, gang});
}

}  // namespace flagos
