#pragma once
// Keeps exceptions from reaching a C caller: a function's exception becomes a status, and the calling thread can ask for its text.
#include <string_view>

#include "core/check.h"
#include "imbrex/imbrex.h"

namespace imbrex::api {

// An error with a status of its own: what a backend from outside returned.
class StatusError : public Error {
 public:
  StatusError(imbrex_status status, std::string_view code, const std::string& message) : Error(code, message), status_(status) {}
  imbrex_status status() const { return status_; }

 private:
  imbrex_status status_;
};

imbrex_status handle_current_exception() noexcept;  // sets the thread's last error

template <class Body>
imbrex_status guarded(const Body& body) noexcept {
  try {
    body();
    return IMBREX_OK;
  } catch (...) {
    return handle_current_exception();
  }
}

// An argument that must not be NULL.
template <class T>
T& deref(T* argument, const char* name) {
  check(argument != nullptr, "api.null", "{}: expected a pointer, got NULL", name);
  return *argument;
}

// Makes a handle for the caller; `out` is not written when making it fails.
template <class Handle, class Make>
imbrex_status create(Handle** out, const Make& make) noexcept {
  return guarded([&] {
    Handle*& place = deref(out, "out");
    place = make().release();
  });
}

}  // namespace imbrex::api
