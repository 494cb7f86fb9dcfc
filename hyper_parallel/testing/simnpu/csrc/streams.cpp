#include "streams.h"

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "gil.h"

namespace simnpu {
namespace {

constexpr uint64_t kEverything = std::numeric_limits<uint64_t>::max();

// Held while commands run and while they are published. One lock for all queues, because queues
// wait for each other in any direction: with a lock each, two threads that drain two such queues
// would take the locks in opposite order. Recursive, because a command that waits for another
// queue executes that queue.
std::recursive_mutex& ExecutionMutex() {
  static auto* const mutex = new std::recursive_mutex;
  return *mutex;
}

Clock::duration MicrosecondsToDuration(double us) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double, std::micro>(us));
}

}  // namespace

void CommandQueue::Push(Command command, double cost_us) {
  std::lock_guard<std::mutex> lock(mutex_);
  tail_time_ = std::max(tail_time_, Clock::now()) + MicrosecondsToDuration(cost_us);
  pending_.push_back({++last_pushed_, std::move(command)});
}

void CommandQueue::WaitFor(const Marker& marker) {
  if (marker.queue == nullptr || marker.queue.get() == this) {
    return;
  }
  {
    std::lock_guard<std::mutex> lock(marker.queue->mutex_);
    if (marker.queue->last_published_ >= marker.sequence) {
      return;
    }
  }
  Command wait;
  wait.run = [marker] { marker.queue->Execute(marker.sequence); };
  wait.publish = [marker] { marker.queue->Publish(marker.sequence); };
  wait.ready = [marker] { return marker.queue->CanExecuteWithoutBlocking(marker.sequence); };
  Push(std::move(wait), 0);
  std::lock_guard<std::mutex> lock(mutex_);
  tail_time_ = std::max(tail_time_, marker.finish_time);
}

Marker CommandQueue::Mark() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {shared_from_this(), last_pushed_, std::max(tail_time_, Clock::now())};
}

void CommandQueue::ExecuteAll() { Execute(kEverything); }

void CommandQueue::Execute(uint64_t sequence) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (last_executed_ >= std::min(sequence, last_pushed_)) {
      return;
    }
  }
  ReleaseGil no_gil;
  std::lock_guard<std::recursive_mutex> execution(ExecutionMutex());
  Pending next;
  while (PopPending(sequence, &next)) {
    try {
      if (next.command.run) {
        next.command.run();
      }
    } catch (...) {
      next.command.publish = nullptr;  // there is no result to show
      FinishExecution(std::move(next));
      throw;
    }
    FinishExecution(std::move(next));
  }
}

bool CommandQueue::PopPending(uint64_t sequence, Pending* next) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (pending_.empty() || pending_.front().sequence > sequence) {
    return false;
  }
  *next = std::move(pending_.front());
  pending_.pop_front();
  return true;
}

void CommandQueue::FinishExecution(Pending executed) {
  // Frees what the command held (tensors) before the lock is taken: a deleter may take locks.
  executed.command.run = nullptr;
  executed.command.ready = nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  last_executed_ = executed.sequence;
  if (executed.command.publish) {
    unpublished_.push_back(std::move(executed));
  }
}

void CommandQueue::Publish(uint64_t sequence) {
  std::lock_guard<std::recursive_mutex> execution(ExecutionMutex());
  for (;;) {
    Pending next;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      last_published_ = std::max(last_published_, std::min(sequence, last_executed_));
      if (unpublished_.empty() || unpublished_.front().sequence > sequence) {
        return;
      }
      next = std::move(unpublished_.front());
      unpublished_.pop_front();
    }
    next.command.publish();
  }
}

void CommandQueue::Synchronize(const Marker& marker) {
  ReleaseGil no_gil;
  std::this_thread::sleep_until(marker.finish_time);
  // Held across both, so that no other thread executes more in between and has it published here.
  std::lock_guard<std::recursive_mutex> execution(ExecutionMutex());
  Execute(marker.sequence);
  Publish(marker.sequence);
}

bool CommandQueue::Query(const Marker& marker) {
  if (Clock::now() < marker.finish_time || !CanExecuteWithoutBlocking(marker.sequence)) {
    return false;
  }
  Synchronize(marker);
  return true;
}

bool CommandQueue::CanExecuteWithoutBlocking(uint64_t sequence) {
  // Asked outside the lock: a wait asks its other queue.
  std::vector<std::function<bool()>> questions;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Pending& pending : pending_) {
      if (pending.sequence <= sequence && pending.command.ready) {
        questions.push_back(pending.command.ready);
      }
    }
  }
  return std::all_of(questions.begin(), questions.end(),
                     [](const std::function<bool()>& is_ready) { return is_ready(); });
}

}  // namespace simnpu
