# How every target of kvtamp is compiled, and the functions that declare one.
#
#   kvtamp_library(NAME SOURCES a.cc b.cc [DEPS base codec hwy::hwy] [SLOW])
#     a static library NAME, also known as kvtamp::NAME; header-only if it has no .cc
#   kvtamp_test(NAME SOURCES a_test.cc [DEPS …] [LABELS unit] [SLOW])
#     a GoogleTest program in tests/ of the build folder, one ctest per TEST; label `unit` if none
#   kvtamp_test_on_older(NAME FILTER)
#     where qemu runs the tests, what GoogleTest's filter leaves of the program, once more on each of
#     two processors that lack something
#
# SLOW: its speed does not matter but that of compiling it: it is optimised less, not at all with
# sanitizers, and several files are compiled as one (so names in their anonymous namespaces must differ).
#
# A dependency is a layer's plain name, or any other CMake target.

include(GoogleTest)

set(KVTAMP_TEST_LIMIT 600)  # seconds for one test
if(CMAKE_CROSSCOMPILING_EMULATOR)
  set(KVTAMP_TEST_LIMIT 3600)
endif()

# What was compiled once is not compiled again, in whatever checkout: paths are taken from its root.
find_program(KVTAMP_CCACHE ccache)
mark_as_advanced(KVTAMP_CCACHE)
if(KVTAMP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
      CCACHE_NOHASHDIR=1 ${KVTAMP_CCACHE})
endif()

add_library(kvtamp_options INTERFACE)
add_library(kvtamp::options ALIAS kvtamp_options)
target_compile_features(kvtamp_options INTERFACE cxx_std_20)
target_include_directories(kvtamp_options INTERFACE ${PROJECT_SOURCE_DIR})
# No -march: what runs is chosen at run time, or a binary would die on an older processor.
target_compile_options(kvtamp_options INTERFACE
  -Wall -Wextra -Wpedantic)
if(KVTAMP_SANITIZE)
  # -O1: unoptimised vector code under a sanitizer is too slow to test with.
  set(flags -fsanitize=${KVTAMP_SANITIZE} -fno-sanitize-recover=all)
  target_compile_options(kvtamp_options INTERFACE ${flags} -fno-omit-frame-pointer -g1
                         $<IF:$<BOOL:$<TARGET_PROPERTY:KVTAMP_SLOW>>,-O0,-O1>)
  target_link_options(kvtamp_options INTERFACE ${flags})
endif()
if(KVTAMP_FUZZER)
  # Coverage to steer by; the targets themselves link the driver.
  target_compile_options(kvtamp_options INTERFACE -fsanitize=fuzzer-no-link)
  target_compile_definitions(kvtamp_options INTERFACE KVTAMP_FUZZER)
  target_link_options(kvtamp_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

# Every layer may end up in the plug-in, which must export its entry points and nothing else: the
# host may hold other copies of the same libraries.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

function(kvtamp_speed name slow)
  set_target_properties(${name} PROPERTIES KVTAMP_SLOW ${slow})
  if(slow)
    target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
    set_target_properties(${name} PROPERTIES UNITY_BUILD ${KVTAMP_UNITY} UNITY_BUILD_BATCH_SIZE 9)
  endif()
endfunction()

function(kvtamp_resolve out)
  set(targets)
  foreach(name IN LISTS ARGN)
    if(TARGET ${name})
      list(APPEND targets ${name})
    else()
      message(FATAL_ERROR "'${name}' is no target here. A layer can link only layers that come "
                          "before it in CMakeLists.txt; libraries are in KvtampDependencies.cmake.")
    endif()
  endforeach()
  set(${out} ${targets} PARENT_SCOPE)
endfunction()

function(kvtamp_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SLOW" "" "SOURCES;DEPS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "kvtamp_library(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  kvtamp_resolve(deps ${arg_DEPS})
  if(arg_SOURCES)
    add_library(${name} STATIC ${arg_SOURCES})
    kvtamp_speed(${name} ${arg_SLOW})
    set_target_properties(${name} PROPERTIES OUTPUT_NAME kvtamp_${name})
    target_link_libraries(${name} PUBLIC kvtamp::options ${deps})
  else()
    add_library(${name} INTERFACE)
    target_link_libraries(${name} INTERFACE kvtamp::options ${deps})
  endif()
  add_library(kvtamp::${name} ALIAS ${name})
endfunction()

function(kvtamp_test name)
  if(NOT KVTAMP_BUILD_TESTS)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 1 arg "SLOW" "" "SOURCES;DEPS;LABELS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "kvtamp_test(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  kvtamp_resolve(deps ${arg_DEPS})
  add_executable(${name} ${arg_SOURCES})
  kvtamp_speed(${name} ${arg_SLOW})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  target_link_libraries(${name} PRIVATE kvtamp::options ${deps} GTest::gmock GTest::gtest_main)
  # The list passes through one more script before ctest sees it, hence the escape.
  string(REPLACE ";" "\\\\;" labels "${arg_LABELS}")
  gtest_discover_tests(${name} TEST_PREFIX ${name}. DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
                       PROPERTIES LABELS "${labels}" TIMEOUT ${KVTAMP_TEST_LIMIT})
endfunction()

function(kvtamp_test_on_older name filter)
  if(NOT KVTAMP_BUILD_TESTS OR NOT CMAKE_CROSSCOMPILING_EMULATOR)
    return()
  endif()
  foreach(pair IN ITEMS "cortex-a53 neon" "neoverse-n1 neon_dotprod")
    separate_arguments(pair)
    list(GET pair 0 processor)
    list(GET pair 1 isa)
    add_test(NAME ${name}.${processor} COMMAND ${name} --gtest_filter=${filter})
    set_tests_properties(${name}.${processor} PROPERTIES LABELS unit TIMEOUT ${KVTAMP_TEST_LIMIT}
                         ENVIRONMENT "QEMU_CPU=${processor};KVTAMP_TEST_ISA=${isa}")
  endforeach()
endfunction()
