// Threads that help the calling one.
//
// Not OpenMP, whose threads do not survive a fork: a forked rank would wait for them forever.

#ifndef HYPER_PARALLEL_KERNELS_HOST_THREAD_POOL_H_
#define HYPER_PARALLEL_KERNELS_HOST_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>

namespace hyper_parallel {

class ThreadPool {
 public:
  // Calls with the number of a task and of the worker that runs it, below num_workers.
  // Must not throw.
  using Task = std::function<void(size_t task, size_t worker)>;

  // The process's pool. It is made at the first call, and anew in a forked child.
  static ThreadPool& Get();

  // Runs tasks 0 to num_tasks - 1, each once, in no promised order, and returns when all are done.
  // At most num_workers threads take part, the calling one included; it works alone if another
  // thread is using the pool, or if no thread can be started.
  void Run(size_t num_tasks, size_t num_workers, const Task& task);

 private:
  struct Job {
    const Task& task;
    size_t num_tasks;
    size_t num_seats;  // workers that may take part
    size_t num_seated = 1;
    std::atomic<size_t> next_task{0};
  };

  static void TakeTasks(Job& job, size_t worker);

  void StartHelpers(size_t num_wanted);
  void HelperMain();

  std::mutex turn_;  // held by the thread that uses the pool

  std::mutex mutex_;  // guards what follows
  std::condition_variable job_posted_;
  std::condition_variable helpers_done_;
  Job* job_ = nullptr;
  size_t num_helpers_ = 0;
  size_t num_busy_helpers_ = 0;
};

}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_THREAD_POOL_H_
