// What the model checks of protocols share: going through all states, and counting for reports.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

#include "check.h"

namespace explore {

// Depth first through every state that steps lead to from one of zeros. `move(state, agent)` makes an agent's next step in it,
// false if it has none to make, and says what goes wrong in `fault`. "", or what went wrong first; a deadlock if nobody can go
// on in a state that isn't `finished`.
template <class State, class Move, class Finished>
std::string all_states(uint32_t agents, std::string& fault, size_t& states, Move move, Finished finished) {
  auto key = [](State const& s) { return std::string(reinterpret_cast<char const*>(&s), sizeof s); };
  State start;
  std::memset(static_cast<void*>(&start), 0, sizeof start);  // gaps between members too: they are part of the key
  std::unordered_set<std::string> seen{key(start)};
  std::vector<State> open{start};
  while (!open.empty() && fault.empty()) {
    State state = open.back();
    open.pop_back();
    bool moved = false;
    for (uint32_t agent = 0; agent < agents && fault.empty(); ++agent) {
      State next = state;
      if (!move(next, agent)) continue;
      moved = true;
      if (seen.insert(key(next)).second) open.push_back(next);
    }
    if (!moved && fault.empty() && !finished(state)) fault = "deadlock";
  }
  states = seen.size();
  return fault;
}

// Programs that nothing is wrong with, one Model each.
template <class Model, class Program>
void nothing_goes_wrong(std::vector<Program> const& programs, size_t least_states) {
  size_t states = 0;
  for (Program const& program : programs) {
    Model model(program);
    std::string fault = model.explore();
    states += model.states();
    CHECK_THAT(fault.empty(), program << ": " << fault);
  }
  check::count("protocol_programs", programs.size());
  check::count("protocol_states", states);
  CHECK_THAT(states > least_states, states << " states");
}

inline uint64_t broken_variants = 0, found_variants = 0;

// Whether one of these programs, which have the same fault, goes wrong with these words.
template <class Model, class Program>
bool goes_wrong(std::vector<Program> const& programs, std::string const& words) {
  ++broken_variants;
  for (Program const& program : programs)
    if (Model(program).explore().find(words) != std::string::npos) return ++found_variants, true;
  return false;
}

inline int report(int failed) {
  check::count("protocol_broken_variants", broken_variants);
  check::count("protocol_broken_variants_found", found_variants);
  return failed;
}

}  // namespace explore
