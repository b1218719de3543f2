// The host executor: teams of 1 to 8 ranks, exact on small integers, with few and many workers, stalls and failures.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "host/team.h"
#include "random_call.h"

namespace entwine::host {
namespace {

// Collects what the ranks report.
class Outcome {
 public:
  explicit Outcome(uint32_t expected) : left_(expected) {}
  Team::Done done() {
    return [this](std::string const* error) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (error != nullptr) errors_.push_back(*error);
      if (--left_ == 0) changed_.notify_all();
    };
  }
  std::vector<std::string> const& wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return left_ == 0; });
    return errors_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t left_;
  std::vector<std::string> errors_;
};

// Every rank submits all calls, each in an order of its own, from a thread of its own; then all results are checked.
void run_and_check(Team& team, std::vector<Product>& products, int64_t run, Random& random) {
  uint32_t ranks = products[0].spec().geometry.ranks;
  Outcome outcome(ranks * static_cast<uint32_t>(products.size()));
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < ranks; ++r) {
    std::vector<size_t> order(products.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::shuffle(order.begin(), order.end(), random.engine);
    threads.emplace_back([&, r, order] {
      for (size_t i : order) team.submit(r, {i, run, 0}, products[i].spec(), products[i].operands(r), outcome.done());
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::string const& error : outcome.wait()) CHECK_THAT(false, error);
  for (Product const& p : products) {
    Geometry const& g = p.spec().geometry;
    CHECK_THAT(p.exact(), p.spec().name << ", ranks " << g.ranks << ", batch " << g.batch << ", m_shard " << g.m_shard << ", n "
                                        << g.n << ", k " << g.k << ", tile " << g.tile_m << " x " << g.tile_n << ", workers "
                                        << p.spec().workers << ", products " << p.spec().products.count
                                        << (p.spec().products.gated ? ", gated" : "") << (p.spec().grouped ? ", grouped" : "")
                                        << ", movers " << p.spec().plan.movers);
  }
}

template <typename Change>
std::vector<Product> integer_products(Random& random, uint32_t ranks, uint32_t count, Change change) {
  std::vector<Product> products;
  for (uint32_t i = 0; i < count; ++i) {
    CallSpec spec = random_spec(random, ranks);
    change(spec);
    products.emplace_back(spec, [&] { return random.integer(); });
  }
  return products;
}

void exact_on_all_teams_and_types() {
  Random random(1);
  for (uint32_t ranks = 1; ranks <= schedule::kMaxRanks; ++ranks) {
    Team team(ranks);
    for (int64_t run = 0; run < 4; ++run) {
      auto products = integer_products(random, ranks, 12, [](CallSpec&) {});
      run_and_check(team, products, run, random);
    }
  }
}

void one_worker_a_rank_finishes() {
  Random random(2);
  for (uint32_t ranks : {2u, 3u, 5u, 8u}) {
    Team team(ranks);
    for (int64_t run = 0; run < 3; ++run) {
      auto products = integer_products(random, ranks, 10, [&](CallSpec& spec) {
        spec.workers = 1;
        spec.plan.lead = random.below(3);  // the schedule raises it to what progress needs
        spec.plan.pushers = spec.plan.copiers = 1;
      });
      run_and_check(team, products, run, random);
    }
  }
}

void many_workers_a_rank() {
  Random random(3);
  Team team(3);
  for (int64_t run = 0; run < 3; ++run) {
    auto products = integer_products(random, 3, 8, [&](CallSpec& spec) {
      spec.workers = 12;
      spec.plan.pushers = random.upto(12);
      spec.plan.copiers = random.upto(12);
    });
    run_and_check(team, products, run, random);
  }
}

void random_stalls() {
  Random random(4);
  for (uint32_t ranks : {2u, 4u, 7u}) {
    Team team(ranks);
    for (int64_t run = 0; run < 3; ++run) {
      auto products = integer_products(random, ranks, 8, [&](CallSpec& spec) {
        spec.workers = random.upto(3);
        spec.stall_us = 150;
        spec.stall_seed = random.engine();
      });
      run_and_check(team, products, run, random);
    }
  }
}

// One rank is slow to come; the others may not overwrite what it hasn't read.
void a_lagging_rank_is_not_overrun() {
  Random random(5);
  constexpr uint32_t kRanks = 3, kCalls = 60;
  Team team(kRanks);
  auto products = integer_products(random, kRanks, kCalls, [](CallSpec& spec) { spec.workers = 2; });
  Outcome outcome(kRanks * kCalls);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < kRanks; ++r)
    threads.emplace_back([&, r] {
      for (uint32_t i = 0; i < kCalls; ++i) {
        if (r == 1) std::this_thread::sleep_for(std::chrono::microseconds(500));
        team.submit(r, {i, 0, 0}, products[i].spec(), products[i].operands(r), outcome.done());
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(outcome.wait().empty());
  for (Product const& p : products) CHECK(p.exact());
}

// More signal words, or more staging, than the first arena has; then small calls, which go on in the first.
void arenas_grow() {
  Random random(6);
  Team team(2);
  for (int64_t run = 0; run < 2; ++run) {  // then those that were made are used again
    uint32_t i = 0;
    auto products = integer_products(random, 2, 6, [&](CallSpec& spec) {
      Geometry& g = spec.geometry;
      if (i >= 2 && i <= 4) {
        spec.products = {};
        spec.grouped = false;
      }
      if (i == 2) {  // 4900 tiles a chunk
        g = {2, 1, 70, 70, 3, 1, 1};
        spec.op = Op::kMatmulReduceScatter;
      }
      if (i == 3) {
        g = schedule::all_reduce_geometry(2, 139, 70, 3, 1, 1, 1);
        spec.op = Op::kMatmulAllReduce;
      }
      if (i == 4) {  // a chunk of 2 MiB and more
        g = {2, 1, 70, 5, 16384, 32, 8};
        spec.op = Op::kAllGatherMatmul;
        spec.in = Element::kBf16;
        spec.out = Element::kF32;
      }
      spec.plan.tile_m = g.tile_m;
      spec.plan.tile_n = g.tile_n;
      ++i;
    });
    run_and_check(team, products, run, random);
  }
}

void epochs_wrap_around() {
  Random random(7);
  for (uint32_t first_epoch : {0xfffffff8u, 0x7ffffff8u}) {
    Team team(3, first_epoch);
    for (int64_t run = 0; run < 3; ++run) {
      auto products = integer_products(random, 3, 10, [](CallSpec&) {});
      run_and_check(team, products, run, random);
    }
  }
}

// Sums are taken in rank order, whatever the timing; and once, for all ranks of an all-reduce.
void results_are_the_same_to_the_bit(Op op, bool grouped = false) {
  Random random(8);
  for (Element type : {Element::kBf16, Element::kF16, Element::kF32}) {
    Team team(4);
    Geometry g{4, 2, 21, 30, 77, 8, 8};
    if (op == Op::kMatmulAllReduce) g = schedule::all_reduce_geometry(4, 81, 30, 77, 8, 8, 1);
    CallSpec spec{schedule::op_name(op), op, g, {8, 8, 2, 5, Transport::kPull, 1}, false, type, type};
    spec.grouped = grouped;
    spec.signal.comm_sms = 1;
    std::unique_ptr<Product> first;
    for (int64_t run = 0; run < 12; ++run) {
      spec.workers = 1 + static_cast<uint32_t>(run % 4);
      spec.stall_us = run % 3 == 0 ? 50 : 0;
      spec.plan.lead = 3 + 5 * static_cast<uint32_t>(run % 5);
      spec.plan.transport = run % 2 == 0 ? Transport::kPull : Transport::kPush;
      Random same(9);
      auto product = std::make_unique<Product>(spec, [&] { return same.real(); });
      Outcome outcome(4);
      for (uint32_t r = 0; r < 4; ++r) team.submit(r, {0, run, 0}, product->spec(), product->operands(r), outcome.done());
      CHECK(outcome.wait().empty());
      if (!first) {
        // The result and each partial sum are rounded once: half a unit in the last place each, of less than the sum of all
        // terms.
        double unit = type == Element::kBf16 ? 0x1p-8 : type == Element::kF16 ? 0x1p-11 : 0x1p-18;
        CHECK_EQ(product->worst(2 * unit), 0);
        first = std::move(product);
      } else {
        for (uint32_t r = 0; r < 4; ++r) CHECK(product->y(r) == first->y(r));
      }
      for (uint32_t r = 1; r < 4 && op == Op::kMatmulAllReduce; ++r) CHECK(first->y(r) == first->y(0));
    }
  }
}

void groups_are_the_same_to_the_bit() {
  results_are_the_same_to_the_bit(Op::kMatmulReduceScatter, true);
  results_are_the_same_to_the_bit(Op::kMatmulAllReduce, true);
}
void reduce_scatter_is_the_same_to_the_bit() { results_are_the_same_to_the_bit(Op::kMatmulReduceScatter); }
void all_reduce_is_the_same_to_the_bit() { results_are_the_same_to_the_bit(Op::kMatmulAllReduce); }

void teams_do_not_disturb_each_other() {
  std::vector<std::thread> threads;
  std::mutex one_at_a_time;
  std::atomic<int> wrong{0};
  Team a(2), b(2);
  for (Team* team : {&a, &b})
    threads.emplace_back([&, team] {
      Random random(team == &a ? 10 : 11);
      for (int64_t run = 0; run < 20; ++run) {
        auto products = integer_products(random, 2, 1, [](CallSpec&) {});
        Outcome outcome(2);
        for (uint32_t r = 0; r < 2; ++r)
          team->submit(r, {0, run, 0}, products[0].spec(), products[0].operands(r), outcome.done());
        if (!outcome.wait().empty() || !products[0].exact()) ++wrong;
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
}

void a_rank_that_never_comes_ends_in_an_error() {
  Random random(12);
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce}) {
    Team team(3);
    auto healthy = integer_products(random, 3, 6, [](CallSpec&) {});
    run_and_check(team, healthy, 0, random);

    auto products = integer_products(random, 3, 2, [&](CallSpec& spec) {
      spec.op = op;
      spec.name = schedule::op_name(op);
      spec.products = {};
      Geometry& g = spec.geometry;
      g.missing = 0;
      if (op == Op::kMatmulAllReduce) g = schedule::all_reduce_geometry(3, 3 * g.m_shard, g.n, g.k, g.tile_m, g.tile_n, 1);
      spec.workers = 3;
      spec.timeout = Timeout(100);
      spec.absent = " Or it overslept.";
    });
    // Rank 1 comes to neither call in time.
    Outcome outcome(4), late(2);
    for (uint32_t i = 0; i < 2; ++i)
      for (uint32_t r : {0u, 2u}) team.submit(r, {i, 1, 0}, products[i].spec(), products[i].operands(r), outcome.done());
    CHECK_EQ(outcome.wait().size(), 4u);
    for (std::string const& error : outcome.wait()) {
      CHECK_THAT(error.find(std::string("entwine_jax.") + products[0].spec().name) == 0, error);
      for (char const* word : {"rank 1 has not come", "waited 0.1 s", "tile (row", "epoch", "ENTWINE_TIMEOUT_S",
                               "if it is only slow. Or it overslept."})
        CHECK_THAT(error.find(word) != std::string::npos, error);
    }
    // It hears of that at once when it comes.
    auto start = std::chrono::steady_clock::now();
    for (uint32_t i = 0; i < 2; ++i) team.submit(1, {i, 1, 0}, products[i].spec(), products[i].operands(1), late.done());
    CHECK_EQ(late.wait().size(), 2u);
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));

    // The team goes on.
    for (int64_t run = 2; run < 5; ++run) {
      auto after = integer_products(random, 3, 6, [](CallSpec&) {});
      run_and_check(team, after, run, random);
    }
  }
}

// Failing over and over, with calls of the same run under way, leaves nothing behind.
void failures_under_load() {
  Random random(13);
  Team team(4);
  for (int64_t run = 0; run < 10; ++run) {
    constexpr uint32_t kCalls = 4;
    auto products = integer_products(random, 4, kCalls, [&](CallSpec& spec) {
      spec.workers = random.upto(3);
      spec.timeout = Timeout(20);
    });
    uint32_t absent = random.below(4), from = random.below(kCalls);
    Outcome outcome(4 * from + 3 * (kCalls - from));
    for (uint32_t i = 0; i < kCalls; ++i)
      for (uint32_t r = 0; r < 4; ++r)
        if (i < from || r != absent)
          team.submit(r, {i, 2 * run, 0}, products[i].spec(), products[i].operands(r), outcome.done());
    CHECK(outcome.wait().size() >= 3 * (kCalls - from));
    auto after = integer_products(random, 4, 4, [](CallSpec&) {});
    run_and_check(team, after, 2 * run + 1, random);
  }
}

}  // namespace
}  // namespace entwine::host

int main() {
  using namespace entwine::host;
  return check::run({{"exact on all teams and types", exact_on_all_teams_and_types},
                     {"one worker a rank finishes", one_worker_a_rank_finishes},
                     {"many workers a rank", many_workers_a_rank},
                     {"random stalls", random_stalls},
                     {"a lagging rank is not overrun", a_lagging_rank_is_not_overrun},
                     {"arenas grow", arenas_grow},
                     {"epochs wrap around", epochs_wrap_around},
                     {"reduce-scatter is the same to the bit", reduce_scatter_is_the_same_to_the_bit},
                     {"all-reduce is the same to the bit, on all ranks", all_reduce_is_the_same_to_the_bit},
                     {"sums of groups are the same to the bit", groups_are_the_same_to_the_bit},
                     {"teams do not disturb each other", teams_do_not_disturb_each_other},
                     {"a rank that never comes ends in an error", a_rank_that_never_comes_ends_in_an_error},
                     {"failures under load", failures_under_load}});
}
