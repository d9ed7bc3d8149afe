# Text inside the binary, made at build time from files. The bytes are written as numbers: string literals are limited by some compilers.

# embed_text(target name file): `extern const std::string_view name` (namespace imbrex) with the file's bytes.
function(embed_text target name file)
  embed_command(${target} ${name} "" "${file}")
endfunction()

# embed_texts(target name root files...): `extern const std::span<const EmbeddedText> name` (src/core/embedded_text.h), one element a
# file: a header with its path below one of the folders in the list `root`, any other text with its name.
function(embed_texts target name root)
  embed_command(${target} ${name} "${root}" "${ARGN}")
endfunction()

function(embed_command target name root files)
  set(out ${CMAKE_CURRENT_BINARY_DIR}/embedded_${name}.cpp)
  set(script ${PROJECT_SOURCE_DIR}/cmake/embed_script.cmake)
  add_custom_command(OUTPUT ${out} DEPENDS ${files} ${script} VERBATIM
    COMMAND ${CMAKE_COMMAND} -DNAME=${name} "-DFILES=${files}" "-DROOT=${root}" -DOUT=${out} -P ${script})
  target_sources(${target} PRIVATE ${out})
  set_source_files_properties(${out} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)  # clang-tidy reads the others before it is made
endfunction()
