# jaxlib_headers: XLA's FFI headers, which lie inside the jaxlib wheel of the Python that builds.
set(python_components Interpreter)
if(ENTWINE_MODULE)
  list(APPEND python_components Development.Module Development.SABIModule)
endif()
find_package(Python 3.12 REQUIRED COMPONENTS ${python_components})

# Finds the package without importing it: jaxlib takes its time, and its dependencies aren't needed here.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "
import importlib.metadata, importlib.util, pathlib
spec = importlib.util.find_spec('jaxlib')
if spec is None: raise SystemExit('no jaxlib')
print(importlib.metadata.version('jaxlib'), pathlib.Path(spec.origin).parent / 'include', sep=';', end='')"
  OUTPUT_VARIABLE jaxlib RESULT_VARIABLE jaxlib_missing ERROR_QUIET)
if(jaxlib_missing)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no jaxlib, whose XLA FFI headers this build needs: pip install jaxlib==0.11.2")
endif()
list(POP_FRONT jaxlib jaxlib_version)
if(NOT EXISTS "${jaxlib}/xla/ffi/api/collectives_api.h")
  message(FATAL_ERROR "jaxlib ${jaxlib_version} has no xla/ffi/api/collectives_api.h; install jaxlib==0.11.2 to build")
endif()
if(jaxlib_version VERSION_GREATER 0.11.2)
  message(WARNING "Building on jaxlib ${jaxlib_version}: jaxlib 0.11.2 to ${jaxlib_version}, which this project supports, "
                  "may reject the extension. Build on jaxlib==0.11.2.")
endif()
message(STATUS "XLA FFI headers of jaxlib ${jaxlib_version}: ${jaxlib}")

add_library(jaxlib_headers INTERFACE)
target_include_directories(jaxlib_headers SYSTEM INTERFACE "${jaxlib}")
