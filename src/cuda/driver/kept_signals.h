#pragma once
// A compiler that changes the process's signal handlers, and what undoes that.

namespace imbrex::cuda {

// While one lives, a library may change signal handlers; when the last one goes, they are again what they were before the first.
//
// NVRTC puts handlers of its own in place of those for SIGINT, SIGTERM and SIGXFSZ, and the old ones back with signal(), which adds
// SA_RESTART and drops SA_ONSTACK. The kernel then goes on with the wait that a signal has interrupted: a Python program whose main thread
// waits for a lock does not notice SIGTERM any more. A handler that the program itself sets meanwhile is left in place.
class KeptSignals {
 public:
  explicit KeptSignals(const void* library);  // any address inside the library
  ~KeptSignals();
  KeptSignals(const KeptSignals&) = delete;
  KeptSignals& operator=(const KeptSignals&) = delete;
};

}  // namespace imbrex::cuda
