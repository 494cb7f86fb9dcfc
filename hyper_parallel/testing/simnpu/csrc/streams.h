// Streams that are lazy on purpose.
//
// A real device runs queued work some time between the call and the next synchronisation, so a
// missing synchronisation is wrong only now and then. Here queued work runs as late as the program
// permits, so it is wrong every time. Three moments are kept apart:
//
//   push     the host queues a command; nothing happens to any byte.
//   execute  device order demands the command (a kernel on the same stream, or on one that waits
//            for it, needs its result): its effect on device memory happens. The host waits for
//            no simulated time.
//   publish  the host synchronised with the command: the effect on host memory happens (the bytes
//            of a device-to-host copy arrive). Before that, host memory keeps its old bytes even
//            if the command has been executed.
//
// Simulated time is bookkeeping: every command has a finish time, and only a synchronising host
// sleeps until then.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace simnpu {

using Clock = std::chrono::steady_clock;

class CommandQueue;

// A point in a queue: everything pushed up to `sequence`. What an event records.
struct Marker {
  std::shared_ptr<CommandQueue> queue;
  uint64_t sequence = 0;
  Clock::time_point finish_time{};
};

struct Command {
  // Executes; may block on a peer and may throw. Empty: nothing to do.
  std::function<void()> run;
  // Publishes. Empty: the host can see nothing of this command.
  std::function<void()> publish;
  // Whether `run` would return without blocking. Empty: always.
  std::function<bool()> ready;
};

// The work of one stream, in order. Thread safe.
class CommandQueue : public std::enable_shared_from_this<CommandQueue> {
 public:
  // Queues `command`, which takes `cost_us` of simulated time after what is queued before it.
  void Push(Command command, double cost_us);

  // Makes what is pushed from now on run after `marker`.
  void WaitFor(const Marker& marker);

  // The point after everything pushed so far.
  Marker Mark();

  // Executes up to and including `sequence`. If a command throws, that command counts as executed
  // and the exception goes to the caller: it is the first to learn of the failure.
  void Execute(uint64_t sequence);
  void ExecuteAll();

  // The host waits for `marker`, which must be of this queue: sleeps, executes, publishes.
  void Synchronize(const Marker& marker);

  // Whether `marker` has finished. A true answer is knowledge of the host, so it publishes.
  bool Query(const Marker& marker);

 private:
  struct Pending {
    uint64_t sequence;
    Command command;
  };

  void Publish(uint64_t sequence);
  bool CanExecuteWithoutBlocking(uint64_t sequence);
  bool PopPending(uint64_t sequence, Pending* next);
  void FinishExecution(Pending executed);

  std::mutex mutex_;  // guards what follows; never held while a command runs
  std::deque<Pending> pending_;
  std::deque<Pending> unpublished_;  // executed; `publish` still to run
  uint64_t last_pushed_ = 0;
  uint64_t last_executed_ = 0;
  uint64_t last_published_ = 0;
  Clock::time_point tail_time_{};  // finish time of the last command
};

}  // namespace simnpu
