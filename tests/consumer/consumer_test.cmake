# Installs the build BUILD to a fresh prefix, then builds and runs the consumer project against it, and the README's example too.
# {fmt} and nlohmann-json are hidden from the consumer: the installed library must not need them.
set(work ${BUILD}/consumer)
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

file(READ ${ROOT}/README.md readme)
string(FIND "${readme}" "```cpp\n" begin)
if(begin EQUAL -1)
  message(FATAL_ERROR "README.md has no C++ example")
endif()
math(EXPR begin "${begin} + 7")
string(SUBSTRING "${readme}" ${begin} -1 example)
string(FIND "${example}" "```" end)
string(SUBSTRING "${example}" 0 ${end} example)
file(WRITE ${work}/readme_example.cpp "${example}")

step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix --component library)
step(${CMAKE_COMMAND} -S ${ROOT}/tests/consumer -B ${work}/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_FLAGS=${FLAGS}
  -DCMAKE_PREFIX_PATH=${work}/prefix -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON
  -DEXTRA_SOURCES=${work}/readme_example.cpp)
step(${CMAKE_COMMAND} --build ${work}/build)
step(${work}/build/consumer)
message(STATUS "${output}")
step(${work}/build/readme_example)
message(STATUS "${output}")
