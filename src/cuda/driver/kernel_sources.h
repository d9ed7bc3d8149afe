#pragma once
// The text of every CUDA kernel and of the headers it may include, by the path an #include names it with. Made by cmake/embed.cmake.
#include "core/embedded_text.h"

namespace imbrex {

extern const std::span<const EmbeddedText> kernel_sources;

}  // namespace imbrex
