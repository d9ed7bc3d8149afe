# Installs the build BUILD to the fresh prefix BUILD/installed.
file(REMOVE_RECURSE ${BUILD}/installed)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${BUILD}/installed --component library COMMAND_ERROR_IS_FATAL ANY)
