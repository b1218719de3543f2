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

// A model whose agents, some for each rank, each make steps in an order that is known beforehand; state.ranks[rank].at[agent]
// counts them.
template <class State, class Step>
class InOrder {
 public:
  virtual ~InOrder() = default;

  // "" or what went wrong first.
  std::string explore() {
    return all_states<State>(
        static_cast<uint32_t>(steps_.size()), fault_, states_, [&](State& s, uint32_t i) { return move(s, i); },
        [&](State const& s) { return finished(s); });
  }
  size_t states() const { return states_; }

 protected:
  InOrder(uint32_t ranks, uint32_t each) : each_(each), steps_(ranks * each) {}
  std::vector<Step>& steps(uint32_t rank, uint32_t agent) { return steps_[rank * each_ + agent]; }
  // One step; false if it can't be made yet.
  virtual bool make(State& s, uint32_t rank, uint32_t agent, Step const& step) = 0;

  std::string fault_;

 private:
  bool move(State& s, uint32_t i) {
    uint8_t& at = s.ranks[i / each_].at[i % each_];
    if (at == steps_[i].size() || !make(s, i / each_, i % each_, steps_[i][at])) return false;
    ++at;
    return true;
  }
  bool finished(State const& s) const {
    for (uint32_t i = 0; i < steps_.size(); ++i)
      if (s.ranks[i / each_].at[i % each_] < steps_[i].size()) return false;
    return true;
  }

  uint32_t each_;
  std::vector<std::vector<Step>> steps_;
  size_t states_ = 0;
};

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
