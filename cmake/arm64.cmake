# For the preset `arm64`: Debian's cross compiler, its libraries as `scripts/fetch arm64` unpacked them
# (the system's own packages stay of one machine), and qemu for the tests.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

execute_process(COMMAND ${CMAKE_CURRENT_LIST_DIR}/../scripts/fetch --cached arm64
                OUTPUT_VARIABLE kvtamp_arm64_root OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT kvtamp_arm64_root)
  message(FATAL_ERROR "Run make arm64, or first what it runs: scripts/deps --arm64, scripts/fetch arm64.")
endif()
set(CMAKE_FIND_ROOT_PATH ${kvtamp_arm64_root})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

# QEMU_CPU chooses the processor; without it, it is one that has everything.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L ${kvtamp_arm64_root})
