# SPDX-License-Identifier: Apache-2.0
# libloongforge_cuda.so: the device table, and each crew's kernels.
if(LF_NVCC AND NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER ${LF_NVCC})
endif()
# "80;90a": machine code for each, and PTX of the newest plain one for what comes later.
set(CMAKE_CUDA_ARCHITECTURES "")
foreach(arch ${LOONGFORGE_CUDA_ARCHS})
  list(APPEND CMAKE_CUDA_ARCHITECTURES ${arch}-real)
  string(REGEX REPLACE "[a-z]+$" "" plain ${arch})
endforeach()
list(APPEND CMAKE_CUDA_ARCHITECTURES ${plain}-virtual)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

file(GLOB LF_CUDA_SOURCES CONFIGURE_DEPENDS src/device/cuda/*.c src/loom/cuda/*.c src/loom/cuda/*.cu
  src/nexus/cuda/*.c src/nexus/cuda/*.cu src/scope/cuda/*.c src/scope/cuda/*.cu)
add_library(loongforge_cuda SHARED ${LF_CUDA_SOURCES})
target_include_directories(loongforge_cuda PRIVATE include src)
target_include_directories(loongforge_cuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(loongforge_cuda PRIVATE lf_flags CUDA::cudart_static Threads::Threads)
set_target_properties(loongforge_cuda PROPERTIES CUDA_STANDARD 17 CUDA_VISIBILITY_PRESET hidden CUDA_RUNTIME_LIBRARY Static)
target_compile_options(loongforge_cuda PRIVATE $<$<COMPILE_LANGUAGE:C>:-Wno-pedantic> $<$<COMPILE_LANGUAGE:CUDA>:-O3>)
if(LF_PYTHON)
  install(TARGETS loongforge_cuda LIBRARY DESTINATION loongforge COMPONENT python)
endif()
