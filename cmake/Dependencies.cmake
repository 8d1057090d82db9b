# SPDX-License-Identifier: Apache-2.0
# Defines lf_deps, an interface target with every C library the core needs.
# The files themselves are looked for, first under CMAKE_PREFIX_PATH (the offline bundle has no .pc files and needs no
# pkg-config); libraries in unusual places are found through pkg-config.
set(LF_DEPENDENCIES # pkg-config name | library | header | Debian package
  "lmdb|lmdb|lmdb.h|liblmdb-dev"
  "libturbojpeg|turbojpeg|turbojpeg.h|libturbojpeg0-dev"
  "libjpeg|jpeg|jpeglib.h|libjpeg-dev"
  "libzstd|zstd|zstd.h|libzstd-dev"
  "libxxhash|xxhash|xxhash.h|libxxhash-dev"
  "jansson|jansson|jansson.h|libjansson-dev")

add_library(lf_deps INTERFACE)
add_library(PkgConfig::LF_DEPS ALIAS lf_deps)
set(LF_DEPENDENCIES_MISSING "")
foreach(row ${LF_DEPENDENCIES})
  string(REPLACE "|" ";" row ${row})
  list(GET row 0 pc)
  list(GET row 1 library)
  list(GET row 2 header)
  list(GET row 3 package)
  find_path(LF_${library}_INCLUDE NAMES ${header})
  find_library(LF_${library}_LIBRARY NAMES ${library})
  mark_as_advanced(LF_${library}_INCLUDE LF_${library}_LIBRARY)
  if(LF_${library}_INCLUDE AND LF_${library}_LIBRARY)
    # A full path makes CMake put the bundle's folder into the build's run path.
    target_link_libraries(lf_deps INTERFACE ${LF_${library}_LIBRARY})
    target_include_directories(lf_deps SYSTEM INTERFACE ${LF_${library}_INCLUDE})
    continue()
  endif()
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(LF_PC_${library} QUIET IMPORTED_TARGET ${pc})
  endif()
  if(TARGET PkgConfig::LF_PC_${library})
    target_link_libraries(lf_deps INTERFACE PkgConfig::LF_PC_${library})
  else()
    list(APPEND LF_DEPENDENCIES_MISSING ${package})
  endif()
endforeach()
if(LF_DEPENDENCIES_MISSING)
  list(JOIN LF_DEPENDENCIES_MISSING " " missing)
  message(FATAL_ERROR "missing: ${missing} - run scripts/setup.sh, or install these packages, or bring the offline bundle")
endif()
