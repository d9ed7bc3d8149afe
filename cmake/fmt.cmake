# imbrex_fmt: the headers of {fmt}. Its functions are compiled once, in src/core/fmt_library.cpp, and become a part of our archive:
# header-only, they cost three seconds in every file that formats a message. They get an inline namespace of their own, so that a
# program that links imbrex may link any {fmt} of its own.
find_package(fmt 9 REQUIRED)
add_library(imbrex_fmt INTERFACE)
target_include_directories(imbrex_fmt SYSTEM INTERFACE $<TARGET_PROPERTY:fmt::fmt-header-only,INTERFACE_INCLUDE_DIRECTORIES>)
target_compile_definitions(imbrex_fmt INTERFACE
  "FMT_BEGIN_NAMESPACE=namespace fmt { inline namespace in_imbrex {" "FMT_END_NAMESPACE=}}")
