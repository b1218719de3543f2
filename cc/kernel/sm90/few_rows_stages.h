// How a CTA for few rows divides its shared memory: stages of w, then those of x, or all of its slice of x; sums at the end.
#pragma once

#include "kernel/sm90/shape.h"
#include "schedule/few_rows.h"

namespace entwine::sm90 {

constexpr uint32_t kFewRowsBytes = 229376, kFewRowsStagesMost = 12;
constexpr uint32_t kFewRowsWBytes = schedule::kFewRowsTileN * kBlockBytes;            // of a k block
constexpr uint32_t kOctetSumsBytes = schedule::kOctet * schedule::kFewRowsTileN * 4;  // of a slice

// Each octet's sums of all slices meet in one CTA; the one of most octets has ceil(octets / slices).
ENTWINE_HOST_DEVICE constexpr uint32_t few_rows_sums_bytes(uint32_t room, uint32_t slices) {
  return schedule::larger(room / schedule::kOctet, slices) * kOctetSumsBytes;
}

// As many stages as there is room for; `resident`: k blocks of x that stay, or none.
constexpr uint32_t few_rows_stages(uint32_t room, uint32_t slices, uint32_t resident) {
  uint32_t x = room * kBlockBytes, left = kFewRowsBytes - few_rows_sums_bytes(room, slices) - resident * x;
  return schedule::smaller(kFewRowsStagesMost, left / (kFewRowsWBytes + (resident == 0 ? x : 0)));
}
// Loads of w on their way at once: 64 KB a multiprocessor keep memory busy. With 12 stages of them x takes 1.5 us longer.
constexpr uint32_t kFewRowsInFlight = 4;

static_assert(few_rows_stages(schedule::kResidentRows, schedule::kFewRowsSlicesMost, schedule::kResidentBlocks) >=
              kFewRowsInFlight);
static_assert(few_rows_stages(schedule::kFewRowsMost, 1, 0) >= kFewRowsInFlight);

}  // namespace entwine::sm90
