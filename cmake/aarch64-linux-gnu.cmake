# Builds for aarch64 with Debian's cross compiler; programs of the build (its tests too) run under qemu. Libraries that are only headers
# come from the host's /usr/include, which is the last folder where the cross compiler looks; GoogleTest is built from Debian's sources.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
# The description of {fmt} lies with its library, of which nothing is taken but the headers.
set(fmt_DIR /usr/lib/${CMAKE_HOST_SYSTEM_PROCESSOR}-linux-gnu/cmake/fmt)
