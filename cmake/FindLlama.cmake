# Finds a llama.cpp that was built, and the sources it was built from.
#
# KVTAMP_LLAMA_DIR, as a CMake or an environment variable, is a llama.cpp source tree with its build
# folder inside, or a prefix with lib/ and the source tree as src/. If unset, what `scripts/fetch
# llama.cpp` left in the cache is taken. KVTAMP_LLAMA_LIB_DIR names the folder of the libraries where
# the build is elsewhere.
#
# Targets:    kvtamp::ggml_base (with ggml's private headers), kvtamp::ggml, kvtamp::llama
# Variables:  Llama_SOURCE_DIR, Llama_LIB_DIR, Llama_BIN_DIR (llama-server and the like; empty if
#             they were not built), Llama_GGML_VERSION

set(dir "${KVTAMP_LLAMA_DIR}")
if(NOT dir)
  set(dir "$ENV{KVTAMP_LLAMA_DIR}")
endif()
if(NOT dir)
  execute_process(COMMAND ${PROJECT_SOURCE_DIR}/scripts/fetch --cached llama.cpp
                  OUTPUT_VARIABLE dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()

set(problem)
if(NOT dir)
  set(problem "KVTAMP_LLAMA_DIR is not set, and scripts/fetch llama.cpp was not run yet. Run that, "
              "or point KVTAMP_LLAMA_DIR at a llama.cpp source tree that was built")
elseif(NOT IS_DIRECTORY "${dir}")
  set(problem "KVTAMP_LLAMA_DIR is ${dir}, which is not a folder")
endif()

if(NOT problem)
  find_path(Llama_SOURCE_DIR ggml/src/ggml-backend-impl.h
            PATHS "${dir}/src" "${dir}" NO_DEFAULT_PATH NO_CACHE)
  if(NOT Llama_SOURCE_DIR)
    set(problem "no ggml/src/ggml-backend-impl.h in ${dir}. A ggml backend needs ggml's private "
                "header ggml-backend-impl.h, which installed packages lack: point KVTAMP_LLAMA_DIR "
                "at a llama.cpp source tree that was built")
  endif()
endif()

if(NOT problem)
  set(library_dirs "${KVTAMP_LLAMA_LIB_DIR}")
  if(NOT library_dirs)
    file(GLOB library_dirs "${dir}/lib" "${dir}/lib64" "${dir}/build*/bin" "${dir}/build*/lib"
         "${dir}/build*/src" "${dir}/build*/ggml/src")
  endif()
  # Shared only: a host that has ggml inside its own binary cannot load a plug-in.
  set(suffixes ${CMAKE_FIND_LIBRARY_SUFFIXES})
  set(CMAKE_FIND_LIBRARY_SUFFIXES ${CMAKE_SHARED_LIBRARY_SUFFIX})
  foreach(library ggml-base ggml llama)
    find_library(Llama_${library}_LIBRARY ${library} PATHS ${library_dirs}
                 NO_DEFAULT_PATH NO_CACHE)
    if(NOT Llama_${library}_LIBRARY AND NOT problem)
      set(problem "no lib${library}${CMAKE_SHARED_LIBRARY_SUFFIX} in lib/ or build*/bin/ of ${dir}. "
                  "Build llama.cpp there with shared libraries (cmake -B build "
                  "-DBUILD_SHARED_LIBS=ON && cmake --build build), or name the folder of its "
                  "libraries as KVTAMP_LLAMA_LIB_DIR")
    endif()
  endforeach()
  set(CMAKE_FIND_LIBRARY_SUFFIXES ${suffixes})
endif()

# Structures of the private header are shared with the library: they must be of one version.
set(Llama_GGML_VERSION "")
if(NOT problem)
  file(STRINGS "${Llama_SOURCE_DIR}/ggml/CMakeLists.txt" lines
       REGEX "^set\\(GGML_VERSION_(MAJOR|MINOR|PATCH) [0-9]+\\)")
  set(parts)
  foreach(line IN LISTS lines)
    string(REGEX MATCH "[0-9]+" part "${line}")
    list(APPEND parts ${part})
  endforeach()
  list(JOIN parts . Llama_GGML_VERSION)
  get_filename_component(file "${Llama_ggml-base_LIBRARY}" REALPATH)
  if(Llama_GGML_VERSION MATCHES "^[0-9]+\\.[0-9]+\\.[0-9]+$"
     AND file MATCHES "\\.so\\.([0-9]+\\.[0-9]+\\.[0-9]+)$"
     AND NOT CMAKE_MATCH_1 STREQUAL Llama_GGML_VERSION)
    set(problem "${file} was not built from ${Llama_SOURCE_DIR}, whose ggml is "
                "${Llama_GGML_VERSION}. Build llama.cpp again")
  endif()
endif()

string(JOIN "" problem ${problem})
if(problem)
  set(Llama_FOUND FALSE)
  if(Llama_FIND_REQUIRED)
    message(FATAL_ERROR "llama.cpp: ${problem}.")
  endif()
  message(STATUS "llama.cpp: ${problem}.")
else()
  set(Llama_FOUND TRUE)
endif()

if(Llama_FOUND AND NOT TARGET kvtamp::ggml_base)
  get_filename_component(Llama_LIB_DIR "${Llama_llama_LIBRARY}" DIRECTORY)
  find_program(program llama-completion
               PATHS "${dir}/bin" "${Llama_LIB_DIR}" "${Llama_LIB_DIR}/../bin"
               NO_DEFAULT_PATH NO_CACHE)
  set(Llama_BIN_DIR "")
  if(program)
    get_filename_component(Llama_BIN_DIR "${program}" DIRECTORY)
  endif()

  function(kvtamp_import name library)
    add_library(kvtamp::${name} SHARED IMPORTED)
    set_target_properties(kvtamp::${name} PROPERTIES IMPORTED_LOCATION "${Llama_${library}_LIBRARY}")
  endfunction()
  kvtamp_import(ggml_base ggml-base)
  kvtamp_import(ggml ggml)
  kvtamp_import(llama llama)
  target_include_directories(kvtamp::ggml_base INTERFACE
    "${Llama_SOURCE_DIR}/ggml/include" "${Llama_SOURCE_DIR}/ggml/src")
  target_include_directories(kvtamp::llama INTERFACE "${Llama_SOURCE_DIR}/include")
  target_link_libraries(kvtamp::ggml INTERFACE kvtamp::ggml_base)
  target_link_libraries(kvtamp::llama INTERFACE kvtamp::ggml)
  message(STATUS "llama.cpp: ${dir} (ggml ${Llama_GGML_VERSION})")
endif()
