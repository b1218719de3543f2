// XLA lends its communicator to custom calls: the Collectives extension of the FFI (API 0.4).
//
// A call requests the clique in Prepare; XLA acquires it, with its lock and rendezvous, before Initialize.
#pragma once

#include <cstdint>
#include <vector>

#include "xla/ffi/api/collectives_api.h"
#include "xla/ffi/api/ffi.h"

namespace entwine::team {

// Keeps this library's communicators apart from those that XLA's own collectives run on.
constexpr int64_t kCommunicationId = 0x656e;
// And of strategy "signal", whose collectives run on a stream of their own: a communicator must not be on two at once.
constexpr int64_t kSignalCommunicationId = 0x656f;

using CliqueContext = xla::ffi::internal::CommunicatorContextBase<xla::ffi::internal::ErrorPolicy>;

struct Collectives : xla::ffi::internal::CollectivesExtensionBase<CliqueContext> {
  static bool Support(int32_t major, int32_t) { return major == kMajorVersion; }
};

using Groups = std::vector<std::vector<int64_t>>;

inline Groups make_groups(xla::ffi::Span<const int64_t> ids, int64_t team_size) {
  Groups groups;
  for (size_t i = 0; i < ids.size(); i += static_cast<size_t>(team_size))
    groups.emplace_back(ids.begin() + i, ids.begin() + i + team_size);
  return groups;
}

inline xla::ffi::Error request_clique(CliqueContext clique, Groups const& groups, int64_t id = kCommunicationId) {
  return clique.RequestCommunicator(xla::ffi::GroupMode::kFlattenedId, groups, id);
}

// The communicator of the executing device's group.
inline xla::ffi::ErrorOr<XLA_FFI_Communicator*> get_clique(CliqueContext clique, Groups const& groups,
                                                           int64_t id = kCommunicationId) {
  return clique.GetCommunicator(xla::ffi::GroupMode::kFlattenedId, groups, id);
}

}  // namespace entwine::team
