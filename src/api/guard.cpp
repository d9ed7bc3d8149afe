// See guard.h.
#include "api/guard.h"

#include <new>
#include <string>

namespace imbrex::api {
namespace {

thread_local std::string last_text, last_code;

void set_error(std::string_view code, std::string_view text) noexcept {
  try {
    last_code = code, last_text = text;
  } catch (...) {  // not even that much memory
    last_code.clear(), last_text.clear();
  }
}

imbrex_status status_of(std::string_view code) {
  if (code.ends_with(".memory") || code == "block_pool.exhausted") return IMBREX_OUT_OF_MEMORY;
  if (code.starts_with("cuda.") || code.starts_with("device.") || code == "backend.device_absent") return IMBREX_DEVICE;
  if (code == "backend.unsupported" || code == "select.forced" || code == "update.on_device") return IMBREX_UNSUPPORTED;
  return IMBREX_INVALID;
}

}  // namespace

imbrex_status handle_current_exception() noexcept {
  try {
    throw;
  } catch (const StatusError& error) {
    set_error(error.code(), error.what());
    return error.status();
  } catch (const Error& error) {
    set_error(error.code(), error.what());
    return status_of(error.code());
  } catch (const std::bad_alloc&) {
    set_error("api.memory", "the host has no such amount of memory left");
    return IMBREX_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    set_error("api.internal", error.what());
  } catch (...) {
    set_error("api.internal", "an unknown exception");
  }
  return IMBREX_INTERNAL;
}

}  // namespace imbrex::api

using namespace imbrex::api;

const char* imbrex_version() { return IMBREX_VERSION; }
uint32_t imbrex_abi_version() { return IMBREX_ABI_VERSION; }
const char* imbrex_last_error() { return last_text.c_str(); }
const char* imbrex_last_error_code() { return last_code.c_str(); }
