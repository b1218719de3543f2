# entwine_warnings: what our own sources compile with. Headers of XLA, nanobind and CUDA are system headers and exempt.
add_library(entwine_warnings INTERFACE)
target_compile_options(entwine_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
if(ENTWINE_WERROR)
  target_compile_options(entwine_warnings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Werror;-Werror=all-warnings>)
endif()
