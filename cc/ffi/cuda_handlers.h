// The custom calls on XLA's platform "CUDA".
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

namespace entwine {

// {target: {"prepare": capsule, "initialize": capsule, "execute": capsule}}
nanobind::dict cuda_registrations();

// "" if these local GPUs are all sm_90, else why not.
std::string hopper(std::vector<int> const& ordinals);

// "" if these local GPUs are all sm_90 and see each other's memory, else why not.
std::string peer_access(std::vector<int> const& ordinals);

}  // namespace entwine
