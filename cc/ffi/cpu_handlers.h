// The handlers of all custom calls on XLA's "cpu" platform: they hand each virtual device's part to the host executor.
#pragma once

#include <nanobind/nanobind.h>

namespace entwine {

// {target: {stage: capsule}}, as jax.ffi.register_ffi_target takes it.
nanobind::dict cpu_registrations();

}  // namespace entwine
