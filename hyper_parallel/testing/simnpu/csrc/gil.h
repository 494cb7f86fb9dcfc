// Python's global interpreter lock, given up for as long as this thread may have to wait.
#pragma once

#include <Python.h>

namespace simnpu {

// Queued work waits for peers, and frees tensors whose Python halves need the lock. A thread that
// waited while holding it would stop the very thread it waits for.
class ReleaseGil {
 public:
  ReleaseGil() {
    if (Py_IsInitialized() && PyGILState_Check()) {
      state_ = PyEval_SaveThread();
    }
  }
  ~ReleaseGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace simnpu
