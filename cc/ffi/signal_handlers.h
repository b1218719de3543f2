// The custom calls of strategy "signal" on XLA's platform "CUDA".
#pragma once

#include <nanobind/nanobind.h>

namespace entwine {

// {target: {"prepare": capsule, "initialize": capsule, "execute": capsule}}
nanobind::dict signal_registrations();

}  // namespace entwine
