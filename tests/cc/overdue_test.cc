// What is said to be overdue, and when: a stream's numbers are what the test says they are.
#include "team/overdue.h"

#include "check.h"

namespace entwine {
namespace {

using team::Overdue;
using team::Patience;

constexpr Patience kTwoSeconds{schedule::Op::kMatmulReduceScatter, 2'000'000'000}, kForEver{schedule::Op::kAllGatherMatmul, 0};

void late() {
  Overdue overdue;
  uint32_t first = overdue.begin(kTwoSeconds, "first"), end = overdue.end(), second = overdue.begin(kTwoSeconds, "second");
  CHECK(!overdue.look(0, 5000));      // the stream hasn't come to the first
  CHECK(!overdue.look(first, 5000));  // it may have begun just now
  for (int i = 0; i < 20; ++i) CHECK(!overdue.look(first, 100));
  auto found = overdue.look(first, 100);
  CHECK(found && found->what == "first" && found->patience.op == schedule::Op::kMatmulReduceScatter);
  CHECK(!overdue.look(first, 5000));  // that was said
  CHECK(!overdue.look(end, 5000));
  CHECK(!overdue.look(second, 0));
  found = overdue.look(second, 2001);
  CHECK(found && found->what == "second");
}

void in_time() {
  Overdue overdue;
  for (int i = 0; i < 100; ++i) {
    uint32_t begun = overdue.begin(kTwoSeconds, "one of many"), end = overdue.end();
    CHECK(!overdue.look(begun, 2000));
    CHECK(!overdue.look(begun, 2000));
    CHECK(!overdue.look(end, 2000));
    CHECK(!overdue.look(end, 60'000));  // what comes between isn't waited for
    CHECK(overdue.end() == end);        // a second end changes nothing
  }
}

void unseen() {
  Overdue overdue;
  uint32_t last = 0;
  for (int i = 0; i < 1000; ++i) last = overdue.begin(kTwoSeconds, std::to_string(i)), overdue.end();
  CHECK(!overdue.look(last, 100));  // what ended between two looks is forgotten
  auto found = overdue.look(last, 2001);
  CHECK(found && found->what == "999");
}

void without_end() {
  Overdue overdue;
  uint32_t begun = overdue.begin(kForEver, "for ever");
  for (int i = 0; i < 100; ++i) CHECK(!overdue.look(begun, 1'000'000));
}

void wraps_around() {
  Overdue overdue{0x7fffffffu};  // the next number is 2^31, twice that is 0
  for (int i = 0; i < 3; ++i) {
    uint32_t before = overdue.end(), begun = overdue.begin(kTwoSeconds, "around");
    CHECK(!overdue.look(before, 5000));
    CHECK(!overdue.look(begun, 5000));
    auto found = overdue.look(begun, 2001);
    CHECK(found && found->what == "around");
    CHECK(!overdue.look(overdue.end(), 5000));
  }
}

}  // namespace
}  // namespace entwine

int main() {
  return check::run({{"what takes longer than its bound", entwine::late},
                     {"what doesn't", entwine::in_time},
                     {"what ends unseen", entwine::unseen},
                     {"no bound", entwine::without_end},
                     {"numbers wrap around", entwine::wraps_around}});
}
