#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>
#include <thread>

namespace hyper_parallel {
namespace {

// Pools are never destroyed: helpers may outlive static objects at exit, and in a forked child the
// parent's pool, whose locks may be held by threads that are not there, must not be touched.
std::atomic<ThreadPool*> pool{nullptr};
std::atomic<ThreadPool*> parents_pool{nullptr};  // so that leak checkers see it is meant

void AbandonInChild() { parents_pool = pool.exchange(nullptr); }

// Once, when the library is loaded; children inherit it.
const int fork_handler = pthread_atfork(nullptr, nullptr, &AbandonInChild);

// Helpers leave signals to the program's own threads.
class ScopedSignalBlock {
 public:
  ScopedSignalBlock() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~ScopedSignalBlock() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
  ScopedSignalBlock(const ScopedSignalBlock&) = delete;
  ScopedSignalBlock& operator=(const ScopedSignalBlock&) = delete;

 private:
  sigset_t saved_;
};

}  // namespace

ThreadPool& ThreadPool::Get() {
  static_cast<void>(fork_handler);
  ThreadPool* current = pool.load();
  if (current == nullptr) {
    auto* made = new ThreadPool;
    if (pool.compare_exchange_strong(current, made)) return *made;
    delete made;  // another thread was first; this one has no helpers yet
  }
  return *current;
}

void ThreadPool::Run(size_t num_tasks, size_t num_workers, const Task& task) {
  Job job{task, num_tasks, std::min(num_workers, num_tasks)};
  std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
  if (job.num_seats <= 1 || !turn.try_lock()) {
    TakeTasks(job, 0);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    StartHelpers(job.num_seats - 1);
    job_ = &job;
  }
  job_posted_.notify_all();
  TakeTasks(job, 0);
  std::unique_lock<std::mutex> lock(mutex_);
  job_ = nullptr;  // a helper that wakes up only now finds nothing to do
  helpers_done_.wait(lock, [this] { return num_busy_helpers_ == 0; });
}

void ThreadPool::TakeTasks(Job& job, size_t worker) {
  for (;;) {
    const size_t task = job.next_task.fetch_add(1, std::memory_order_relaxed);
    if (task >= job.num_tasks) return;
    job.task(task, worker);
  }
}

void ThreadPool::StartHelpers(size_t num_wanted) {
  const ScopedSignalBlock block;
  while (num_helpers_ < num_wanted) {
    try {
      std::thread(&ThreadPool::HelperMain, this).detach();
    } catch (const std::system_error&) {
      return;  // the system has no thread to give: fewer do the work
    }
    ++num_helpers_;
  }
}

void ThreadPool::HelperMain() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    job_posted_.wait(
        lock, [this] { return job_ != nullptr && job_->num_seated < job_->num_seats; });
    Job& job = *job_;
    const size_t worker = job.num_seated++;
    ++num_busy_helpers_;
    lock.unlock();
    TakeTasks(job, worker);
    lock.lock();
    if (--num_busy_helpers_ == 0) helpers_done_.notify_one();
  }
}

}  // namespace hyper_parallel
