# A sanitizer has to see all code of a program: it is switched on for everything, and only the C++ tests are such programs.
if(NOT ENTWINE_SANITIZE)
  return()
endif()
if(ENTWINE_MODULE)
  message(FATAL_ERROR "ENTWINE_SANITIZE=${ENTWINE_SANITIZE} is for the C++ tests: add -DENTWINE_MODULE=OFF -DENTWINE_TESTS=ON")
endif()

if(ENTWINE_SANITIZE STREQUAL "thread")
  set(kinds thread)
elseif(ENTWINE_SANITIZE STREQUAL "address")
  set(kinds address,undefined)
else()
  message(FATAL_ERROR "ENTWINE_SANITIZE=${ENTWINE_SANITIZE}: choose thread or address, or leave it empty")
endif()
# -O1, as the sanitizers' own manuals ask for, and half the time of -O2 to compile.
add_compile_options(-fsanitize=${kinds} -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g1)
add_link_options(-fsanitize=${kinds})
