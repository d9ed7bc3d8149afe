# Builds examples/llama against BUILD/installed, at BUILD/llama/imbrex_llama, and runs llama_test.py on the program.
set(work ${BUILD}/llama)
function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    string(JOIN " " command ${ARGN})
    message(FATAL_ERROR "${command}\n${output}\nfailed: ${status}")
  endif()
endfunction()

# In one piece and at -O1, since building it takes longer than testing it.
step(${CMAKE_COMMAND} -S ${ROOT}/examples/llama -B ${work} -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${BUILD}/installed
  -DCMAKE_CXX_COMPILER=${COMPILER}
   "-DCMAKE_CXX_FLAGS=${FLAGS} -Werror" -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DCMAKE_UNITY_BUILD=ON)
step(${CMAKE_COMMAND} --build ${work})
step(${PYTHON} ${ROOT}/tests/llama/llama_test.py ${work}/imbrex_llama)
