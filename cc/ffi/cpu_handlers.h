// The handlers of all custom calls on XLA's "cpu" platform: they hand each virtual device's part to the host executor.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "team/team_memory.h"

namespace entwine {

// {target: {stage: capsule}}, as jax.ffi.register_ffi_target takes it.
nanobind::dict cpu_registrations();

// Of the host executor's teams.
std::vector<team::TeamMemory> cpu_memory();

}  // namespace entwine
