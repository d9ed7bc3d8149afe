# Builds and runs the consumer project against BUILD/installed, the programs of the docs, and the examples in C++, C and, where there is
# cargo, Rust.
# {fmt} and nlohmann-json are hidden from the consumer: the installed library must not need them.
include(${CMAKE_CURRENT_LIST_DIR}/snippets.cmake)
set(work ${BUILD}/consumer)
set(prefix ${BUILD}/installed)
file(REMOVE_RECURSE ${work})
file(MAKE_DIRECTORY ${work})

function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    string(JOIN " " command ${ARGN})
    message(FATAL_ERROR "${command}\n${output}\nfailed: ${status}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# Programs of the docs: that of README.md, the last one of adding-a-backend.md, and docs/cpp.md, whose pieces after the first are what
# main() does, with the CMakeLists.txt that it shows.
list_snippets(${ROOT}/README.md cpp readme)
file(WRITE ${work}/programs/readme_example.cpp "${readme_1}")
list_snippets(${ROOT}/docs/adding-a-backend.md cpp backend)
file(WRITE ${work}/programs/backend_example.cpp "${backend_${backend_COUNT}}")
list_snippets(${ROOT}/docs/cpp.md cmake lists)
file(WRITE ${work}/my_engine/CMakeLists.txt "${lists_1}")
list_snippets(${ROOT}/docs/cpp.md cpp page)
set(main "")
foreach(i RANGE 2 ${page_COUNT})
  string(APPEND main "${page_${i}}")
endforeach()
file(WRITE ${work}/my_engine/main.cpp "${page_1}\nint main() {\n${main}}\n")

step(${CMAKE_COMMAND} -S ${ROOT}/tests/consumer -B ${work}/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_FLAGS=${FLAGS}
  -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON
  -DPROGRAMS=${work}/programs -DEXAMPLES=${ROOT}/examples)
step(${CMAKE_COMMAND} --build ${work}/build)
step(${CMAKE_COMMAND} -S ${work}/my_engine -B ${work}/my_engine/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER}
  -DCMAKE_CXX_FLAGS=${FLAGS} -DCMAKE_PREFIX_PATH=${prefix})
step(${CMAKE_COMMAND} --build ${work}/my_engine/build)
foreach(program IN ITEMS build/consumer build/readme_example build/backend_example build/decode build/decode_c my_engine/build/my_engine)
  step(${work}/${program})
  message(STATUS "${output}")
endforeach()

set(ENV{PKG_CONFIG_PATH} ${prefix}/lib/pkgconfig)
find_program(PKG_CONFIG pkg-config)
if(PKG_CONFIG)
  step(${PKG_CONFIG} --cflags --libs imbrex)
  if(NOT output MATCHES "-limbrex")
    message(FATAL_ERROR "pkg-config says ${output}")
  endif()
endif()
find_program(CARGO cargo HINTS $ENV{HOME}/.cargo/bin)
if(CARGO)
  set(ENV{IMBREX_LIB_DIR} ${prefix}/lib)
  step(${CARGO} run --quiet --offline --manifest-path ${ROOT}/examples/rust/Cargo.toml --target-dir ${work}/rust)
  message(STATUS "${output}")
endif()
