# embed_text(target name file): makes `extern const std::string_view name` (namespace imbrex) with the file's bytes, at build time.
# Raw string literals are limited to 64 KB by some compilers, so the text is cut into pieces.
function(embed_text target name file)
  set(out ${CMAKE_CURRENT_BINARY_DIR}/embedded_${name}.cpp)
  add_custom_command(OUTPUT ${out} DEPENDS ${file} ${PROJECT_SOURCE_DIR}/cmake/embed_script.cmake
    COMMAND ${CMAKE_COMMAND} -DNAME=${name} -DIN=${file} -DOUT=${out} -P ${PROJECT_SOURCE_DIR}/cmake/embed_script.cmake)
  target_sources(${target} PRIVATE ${out})
endfunction()
