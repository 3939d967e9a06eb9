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
#
# KVTAMP_OTHER_LLAMA_DIR, if set, is one more, with another ggml: the plug-in is built for that too.
# Targets kvtamp::other_ggml_base, …, variables OtherLlama_SOURCE_DIR, ….

# Sets <prefix>_FOUND and the rest for the llama.cpp in `dir`, or <prefix>_PROBLEM. `name` is that of
# the variable the user gave, `target` what the targets' names begin with.
function(kvtamp_find_llama prefix target name dir)
  set(problem)
  if(NOT IS_DIRECTORY "${dir}")
    set(problem "${name} is ${dir}, which is not a folder")
  endif()

  if(NOT problem)
    find_path(source ggml/src/ggml-backend-impl.h
              PATHS "${dir}/src" "${dir}" NO_DEFAULT_PATH NO_CACHE)
    if(NOT source)
      set(problem "no ggml/src/ggml-backend-impl.h in ${dir}. A ggml backend needs ggml's private "
                  "header ggml-backend-impl.h, which installed packages lack: point ${name} "
                  "at a llama.cpp source tree that was built")
    endif()
  endif()

  if(NOT problem)
    set(folders ${ARGN})
    if(NOT folders)
      file(GLOB folders "${dir}/lib" "${dir}/lib64" "${dir}/build*/bin" "${dir}/build*/lib"
           "${dir}/build*/src" "${dir}/build*/ggml/src")
    endif()
    # Shared only: a host that has ggml inside its own binary cannot load a plug-in.
    set(CMAKE_FIND_LIBRARY_SUFFIXES ${CMAKE_SHARED_LIBRARY_SUFFIX})
    foreach(library ggml-base ggml llama)
      find_library(library_${library} ${library} PATHS ${folders} NO_DEFAULT_PATH NO_CACHE)
      if(NOT library_${library} AND NOT problem)
        set(problem "no lib${library}${CMAKE_SHARED_LIBRARY_SUFFIX} in lib/ or build*/bin/ of "
                    "${dir}. Build llama.cpp there with shared libraries (cmake -B build "
                    "-DBUILD_SHARED_LIBS=ON && cmake --build build), or name the folder of its "
                    "libraries as KVTAMP_LLAMA_LIB_DIR")
      endif()
    endforeach()
  endif()

  # Structures of the private header are shared with the library: they must be of one version.
  if(NOT problem)
    file(STRINGS "${source}/ggml/CMakeLists.txt" lines
         REGEX "^set\\(GGML_VERSION_(MAJOR|MINOR|PATCH) [0-9]+\\)")
    set(parts)
    foreach(line IN LISTS lines)
      string(REGEX MATCH "[0-9]+" part "${line}")
      list(APPEND parts ${part})
    endforeach()
    list(JOIN parts . version)
    get_filename_component(file "${library_ggml-base}" REALPATH)
    if(version MATCHES "^[0-9]+\\.[0-9]+\\.[0-9]+$"
       AND file MATCHES "\\.so\\.([0-9]+\\.[0-9]+\\.[0-9]+)$"
       AND NOT CMAKE_MATCH_1 STREQUAL version)
      set(problem "${file} was not built from ${source}, whose ggml is ${version}. "
                  "Build llama.cpp again")
    endif()
  endif()

  if(problem)
    string(JOIN "" problem ${problem})
    set(${prefix}_FOUND FALSE PARENT_SCOPE)
    set(${prefix}_PROBLEM "${problem}" PARENT_SCOPE)
    return()
  endif()

  get_filename_component(library_dir "${library_llama}" DIRECTORY)
  find_program(program llama-completion
               PATHS "${dir}/bin" "${library_dir}" "${library_dir}/../bin"
               NO_DEFAULT_PATH NO_CACHE)
  set(programs)
  if(program)
    get_filename_component(programs "${program}" DIRECTORY)
  endif()
  set(${prefix}_FOUND TRUE PARENT_SCOPE)
  set(${prefix}_SOURCE_DIR "${source}" PARENT_SCOPE)
  set(${prefix}_LIB_DIR "${library_dir}" PARENT_SCOPE)
  set(${prefix}_BIN_DIR "${programs}" PARENT_SCOPE)
  set(${prefix}_GGML_VERSION "${version}" PARENT_SCOPE)
  if(TARGET ${target}ggml_base)
    return()
  endif()

  foreach(library ggml-base ggml llama)
    string(REPLACE - _ part ${library})
    add_library(${target}${part} SHARED IMPORTED)
    set_target_properties(${target}${part} PROPERTIES IMPORTED_LOCATION "${library_${library}}")
  endforeach()
  target_include_directories(${target}ggml_base INTERFACE
    "${source}/ggml/include" "${source}/ggml/src")
  target_include_directories(${target}llama INTERFACE "${source}/include")
  target_link_libraries(${target}ggml INTERFACE ${target}ggml_base)
  target_link_libraries(${target}llama INTERFACE ${target}ggml)
  message(STATUS "llama.cpp: ${dir} (ggml ${version})")
endfunction()

set(dir "${KVTAMP_LLAMA_DIR}")
if(NOT dir)
  set(dir "$ENV{KVTAMP_LLAMA_DIR}")
endif()
if(NOT dir)
  execute_process(COMMAND ${PROJECT_SOURCE_DIR}/scripts/fetch --cached llama.cpp
                  OUTPUT_VARIABLE dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(dir)
  kvtamp_find_llama(Llama kvtamp:: KVTAMP_LLAMA_DIR "${dir}" ${KVTAMP_LLAMA_LIB_DIR})
else()
  set(Llama_FOUND FALSE)
  string(CONCAT Llama_PROBLEM
         "KVTAMP_LLAMA_DIR is not set, and scripts/fetch llama.cpp was not run yet. Run that, or "
         "point KVTAMP_LLAMA_DIR at a llama.cpp source tree that was built")
endif()
if(NOT Llama_FOUND)
  if(Llama_FIND_REQUIRED)
    message(FATAL_ERROR "llama.cpp: ${Llama_PROBLEM}.")
  endif()
  message(STATUS "llama.cpp: ${Llama_PROBLEM}.")
endif()

if(KVTAMP_OTHER_LLAMA_DIR)
  kvtamp_find_llama(OtherLlama kvtamp::other_ KVTAMP_OTHER_LLAMA_DIR "${KVTAMP_OTHER_LLAMA_DIR}")
  if(NOT OtherLlama_FOUND)
    message(FATAL_ERROR "llama.cpp: ${OtherLlama_PROBLEM}.")
  endif()
endif()
