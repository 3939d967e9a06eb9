# The libraries, all Debian packages (scripts/deps installs them):
#   hwy::hwy  tomlplusplus::tomlplusplus  nlohmann_json::nlohmann_json  CLI11::CLI11  fmt::fmt
#   spdlog::spdlog  xxhash::xxhash  Threads::Threads, and for tests and benchmarks
#   GTest::gtest  GTest::gmock  benchmark::benchmark

set(packages hwy tomlplusplus nlohmann_json CLI11 fmt spdlog Threads)
if(KVTAMP_BUILD_TESTS)
  list(APPEND packages GTest)
endif()
if(KVTAMP_BUILD_BENCH)
  list(APPEND packages benchmark)
endif()

set(missing)
foreach(package IN LISTS packages)
  find_package(${package} QUIET)
  if(NOT ${package}_FOUND)
    list(APPEND missing ${package})
  endif()
endforeach()

# Inlined, and so no library is needed when the plug-in is loaded.
find_path(KVTAMP_XXHASH_INCLUDE_DIR xxhash.h)
mark_as_advanced(KVTAMP_XXHASH_INCLUDE_DIR)
if(KVTAMP_XXHASH_INCLUDE_DIR)
  add_library(xxhash::xxhash INTERFACE IMPORTED)
  target_include_directories(xxhash::xxhash INTERFACE ${KVTAMP_XXHASH_INCLUDE_DIR})
  target_compile_definitions(xxhash::xxhash INTERFACE XXH_INLINE_ALL)
else()
  list(APPEND missing xxhash)
endif()

if(missing)
  list(JOIN missing ", " missing)
  message(FATAL_ERROR "Not found: ${missing}. On Debian run scripts/deps, which installs them.")
endif()
