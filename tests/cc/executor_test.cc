// The host executor: teams of 1 to 8 ranks, exact on small integers, with few and many workers, stalls and failures.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "host/team.h"

namespace entwine::host {
namespace {

using schedule::Geometry;
using schedule::Op;
using schedule::Transport;

float to_float8(uint8_t bits, Element e) { return e == Element::kE4m3 ? to_float(E4m3{bits}) : to_float(E5m2{bits}); }

// What w is made of beside an x of these.
Element of_w(Element x) { return x == Element::kE5m2 ? Element::kE4m3 : x; }

// Of 8 bits only what they hold exactly.
std::vector<std::byte> encode(std::vector<float> const& values, Element e) {
  std::vector<std::byte> bytes(values.size() * element_bytes(e));
  for (size_t i = 0; i < values.size(); ++i) {
    if (is_float8(e)) {
      uint32_t bits = 0;
      while (to_float8(static_cast<uint8_t>(bits), e) != values[i]) ++bits;
      bytes[i] = static_cast<std::byte>(bits);
      continue;
    }
    if (e == Element::kF32) std::memcpy(bytes.data() + 4 * i, &values[i], 4);
    uint16_t narrow = e == Element::kBf16 ? from_float<Bf16>(values[i]).bits : from_float<F16>(values[i]).bits;
    if (e != Element::kF32) std::memcpy(bytes.data() + 2 * i, &narrow, 2);
  }
  return bytes;
}

float decode(std::vector<std::byte> const& bytes, size_t i, Element e) {
  if (is_float8(e)) return to_float8(static_cast<uint8_t>(bytes[i]), e);
  if (e == Element::kF32) {
    float v;
    std::memcpy(&v, bytes.data() + 4 * i, 4);
    return v;
  }
  uint16_t narrow;
  std::memcpy(&narrow, bytes.data() + 2 * i, 2);
  return e == Element::kBf16 ? to_float(Bf16{narrow}) : to_float(F16{narrow});
}

// One call with the operands and results of all its ranks.
class Product {
 public:
  // `draw` gives the elements of x and w. If spec says that something is gathered, all-gather returns the gathered x, and
  // reduce-scatter gathers bytes of that shape beside. With an activation it has a bias too.
  template <typename Draw>
  Product(CallSpec const& spec, Draw draw) : spec_(spec), g_(spec.geometry) {
    size_t x_rows = replicate() ? g_.all_rows() : size_t(g_.batch) * g_.m_shard * (gather() ? 1 : g_.ranks);
    size_t y_rows = replicate() ? g_.all_rows() : size_t(g_.batch) * g_.m_shard * (gather() ? g_.ranks : 1);
    gathers_ = spec.gathering.any() && g_.ranks > 1 && !replicate();
    schedule::Gathering& z = spec_.gathering;
    if (gather()) z = {g_.batch, g_.m_shard, uint64_t(g_.k) * element_bytes(spec.in), g_.tile_m};
    if (!gather()) z.block_rows = g_.tile_m;
    if (!gather() && !gathers_) z = {};
    for (uint32_t r = 0; r < g_.ranks; ++r) {
      for (uint32_t p = 0; p < spec.products.count; ++p) {
        std::vector<float> x(gather() && p > 0 ? 0 : x_rows * spec.k(p)), w(size_t(spec.k(p)) * spec.n(p));
        for (float& v : x) v = draw();
        for (float& v : w) v = draw();
        x_.push_back(encode(x, spec.in));
        w_.push_back(encode(w, of_w(spec.in)));
        y_.emplace_back(p >= results() ? 0 : y_rows * spec.n(p) * element_bytes(spec.out), std::byte{0xff});
        bias_.emplace_back();
        bool biased =
            spec.activation[p] != schedule::Activation::kNone || (spec.products.gated && p == 1 && spec.k(p) % 2 != 0);
        if (biased && (p == 0 || gather()))
          for (uint32_t j = 0; j < spec.n(p); ++j)  // that of an all-reduce is the same on all ranks
            bias_.back().push_back(r == 0 || !replicate() ? static_cast<float>(noise() % 64) - 32 : bias_[0][j]);
      }
      if (gathers_ && gather()) z_.push_back(x_[at(r, 0)]);
      if (gathers_ && !gather()) {
        z_.emplace_back(z.chunk_bytes());
        for (std::byte& b : z_.back()) b = static_cast<std::byte>(noise());
      }
      if (gathers_) whole_.emplace_back(z.chunk_bytes() * g_.ranks, std::byte{0xff});
      uint64_t scratch = 0;
      if (spec.grouped)
        scratch = schedule::scratch_bytes(spec.op, schedule::grouped(spec.op, g_), element_bytes(spec.in), gathers_);
      scratch_.emplace_back(scratch, std::byte{0xff});
    }
  }

  CallSpec const& spec() const { return spec_; }
  Operands operands(uint32_t rank) {
    uint32_t i = at(rank, 0);
    auto bias = [&](uint32_t i) { return bias_[i].empty() ? nullptr : bias_[i].data(); };
    Operands operands{x_[i].data(),
                      w_[i].data(),
                      y_[i].data(),
                      gathers_ && !gather() ? z_[rank].data() : nullptr,
                      gathers_ ? whole_[rank].data() : nullptr,
                      bias(i),
                      is_float8(spec_.in) ? scale_ : nullptr,
                      scratch_[rank].data()};
    for (uint32_t p = 1; p < spec_.products.count; ++p) {
      ++i;
      operands.more[p - 1] = {x_[i].data(), w_[i].data(), y_[i].data(), bias(i)};
    }
    return operands;
  }
  std::vector<std::byte> const& y(uint32_t rank) const { return y_[at(rank, 0)]; }

  bool exact() const { return worst(0) == 0 && gathered(); }

  // Whether every rank has every rank's chunk, byte for byte.
  bool gathered() const {
    if (!gathers_) return true;
    schedule::Gathering const& z = spec_.gathering;
    size_t batch_bytes = z.rows * z.row_bytes;
    for (auto const& whole : whole_)
      for (uint32_t b = 0; b < z.batch; ++b)
        for (uint32_t r = 0; r < g_.ranks; ++r)
          if (std::memcmp(&whole[(size_t(b) * g_.ranks + r) * batch_bytes], &z_[r][b * batch_bytes], batch_bytes) != 0)
            return false;
    return true;
  }

  // The largest error of a result, less `relative` times the sum of the absolute values of its terms.
  double worst(double relative) const {
    double worst = 0;
    uint32_t rows = replicate() ? g_.all_rows() : gather() ? g_.ranks * g_.m_shard : g_.m_shard;
    for (uint32_t r = 0; r < g_.ranks; ++r)
      for (uint32_t p = 0; p < results(); ++p)
        for (uint32_t b = 0; b < g_.batch; ++b)
          for (uint32_t i = 0; i < rows; ++i)
            for (uint32_t j = 0; j < spec_.n(p); ++j) {
              double want = 0, size = 0;
              if (gather()) {
                add(i / g_.m_shard, 0, size_t(b) * g_.m_shard + i % g_.m_shard, r, p, j, want, size);
              } else {
                size_t first = replicate() ? 0 : (size_t(b) * g_.ranks + r) * g_.m_shard;
                for (uint32_t q = 0; q < g_.ranks; ++q)
                  for (uint32_t pair = 0; pair < spec_.products.count; ++pair) add(q, pair, first + i, q, pair, j, want, size);
              }
              if (is_float8(spec_.in)) want *= scale_[p];  // a sum has the first
              if (!bias_[at(r, p)].empty()) want += bias_[at(r, p)][j];
              if (spec_.activation[p] == schedule::Activation::kRelu) want = std::max(want, 0.0);
              if (spec_.products.gated) {
                double up = bias_[at(r, 1)].empty() ? 0 : bias_[at(r, 1)][j];
                add(i / g_.m_shard, 0, size_t(b) * g_.m_shard + i % g_.m_shard, r, 1, j, up, size);
                want = decode(encode({static_cast<float>(want * up)}, spec_.out), 0, spec_.out);  // too large to be exact
              }
              double error = std::abs(decode(y_[at(r, p)], (size_t(b) * rows + i) * spec_.n(p) + j, spec_.out) - want);
              if (!(error <= relative * size)) worst = std::max(worst, error == error ? error - relative * size : 1e30);
            }
    return worst;
  }

 private:
  bool gather() const { return spec_.op == Op::kAllGatherMatmul; }
  bool replicate() const { return spec_.op == Op::kMatmulAllReduce; }
  uint32_t results() const { return gather() ? spec_.products.results() : 1; }
  // Of one product of a rank: all-gather has one x.
  uint32_t at(uint32_t rank, uint32_t product) const { return rank * spec_.products.count + product; }
  // `x_product` of x_rank's x's row times column `col` of `product` of w_rank's w.
  void add(uint32_t x_rank, uint32_t x_product, size_t x_row, uint32_t w_rank, uint32_t product, uint32_t col, double& sum,
           double& size) const {
    uint32_t k = spec_.k(product), n = spec_.n(product);
    for (uint32_t p = 0; p < k; ++p) {
      size_t place = spec_.transpose_w ? size_t(col) * k + p : size_t(p) * n + col;
      double term = double(decode(x_[at(x_rank, x_product)], x_row * k + p, spec_.in)) *
                    decode(w_[at(w_rank, product)], place, of_w(spec_.in));
      sum += term;
      size += std::abs(term);
    }
  }

  // Another byte each time, so that no call's array is another's.
  static uint32_t noise() {
    static thread_local std::minstd_rand engine{5};
    return engine() >> 8;
  }

  float const scale_[schedule::kMaxProducts] = {0.25f, 2, 0.5f, 4};
  CallSpec spec_;
  Geometry g_;
  bool gathers_ = false;
  std::vector<std::vector<std::byte>> x_, w_, y_;            // by rank and product
  std::vector<std::vector<float>> bias_;                     // likewise
  std::vector<std::vector<std::byte>> z_, whole_, scratch_;  // by rank
};

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

struct Random {
  std::minstd_rand engine;
  explicit Random(uint32_t seed) : engine(seed * 2 + 1) {}
  uint32_t below(uint32_t n) { return engine() % n; }
  uint32_t upto(uint32_t most) { return 1 + below(most); }
  float integer() { return static_cast<float>(below(3)) - 1; }  // sums of a few hundred stay exact in every type
  float real() { return static_cast<float>(below(2000001)) / 1e6f - 1; }
};

// Several products in place of one, up to as wide or as deep each.
void become_several(CallSpec& spec, Random& random) {
  Geometry& g = spec.geometry;
  uint32_t& size = spec.gather() ? g.n : g.k;
  spec.products.count = 2 + random.below(schedule::kMaxProducts - 1);
  for (uint32_t i = 0; i < spec.products.count; ++i) spec.products.sizes[i] = random.upto(size);
  size = static_cast<uint32_t>(spec.products.joined(spec.gather() ? g.tile_n : 1));
  for (uint32_t i = 1; i < schedule::kMaxProducts; ++i)
    if (random.below(2) == 0) spec.activation[i] = schedule::Activation::kRelu;
}

// Two products of as many columns, and one y, whose tile is half as wide.
void become_gated(CallSpec& spec) {
  Geometry& g = spec.geometry;
  spec.products = {2, {g.n, g.n}, true};
  g.n *= 2;
  g.tile_n = spec.plan.tile_n = g.tile_n + g.tile_n % 2;
}

// Strategy "signal": one product of operands of 16 or 32 bits and a result of the same, and nothing is gathered beside.
void become_grouped(CallSpec& spec, Random& random) {
  spec.grouped = true;
  spec.signal = {1, random.below(2) == 0 ? 0 : random.upto(3), false};
  if (is_float8(spec.in)) spec.in = Element::kBf16;
  spec.out = spec.in;
  if (spec.products.count > 1) (spec.gather() ? spec.geometry.n : spec.geometry.k) = spec.products.sizes[0];
  spec.products = {};
  if (!spec.gather()) spec.gathering = {};
}

// A call of random shape and plan, small, with tails.
CallSpec random_spec(Random& random, uint32_t ranks) {
  static constexpr Element kTypes[][2] = {
      {Element::kBf16, Element::kBf16}, {Element::kBf16, Element::kF32},  {Element::kF16, Element::kF16},
      {Element::kF16, Element::kF32},   {Element::kF32, Element::kF32},   {Element::kE4m3, Element::kBf16},
      {Element::kE4m3, Element::kF32},  {Element::kE5m2, Element::kBf16}, {Element::kE5m2, Element::kF32}};
  auto const& types = kTypes[random.below(std::size(kTypes))];
  Op op = static_cast<Op>(random.below(3));
  uint32_t tile_m = random.upto(12), tile_n = random.upto(12);
  CallSpec spec{schedule::op_name(op),
                op,
                {ranks, random.upto(2), random.upto(3 * tile_m), random.upto(3 * tile_n), random.upto(24), tile_m, tile_n},
                {tile_m, tile_n, random.upto(4), random.below(40), random.below(2) == 0 ? Transport::kPull : Transport::kPush,
                 random.upto(3)},
                random.below(2) == 0,
                types[0],
                types[1]};
  spec.plan.copiers = random.upto(3);
  if (random.below(2) == 0) spec.gathering = {random.upto(2), random.upto(3 * tile_m), random.upto(40)};
  spec.workers = random.upto(4);
  if (random.below(3) == 0) spec.activation[0] = schedule::Activation::kRelu;
  spec.timeout = Timeout(60000);
  if (op == Op::kMatmulAllReduce) {  // any number of rows, in chunks of a multiple of some
    Geometry& g = spec.geometry;
    uint32_t rows = random.upto(ranks * g.m_shard);
    g = schedule::all_reduce_geometry(ranks, rows, g.n, g.k, tile_m, tile_n, random.upto(3));
  }
  if (random.below(2) == 0) {
    become_several(spec, random);
  } else if (spec.gather() && !is_float8(spec.in) && random.below(2) == 0) {
    become_gated(spec);
  }
  if (ranks > 1 && random.below(3) == 0) become_grouped(spec, random);
  return spec;
}

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
                                        << (p.spec().products.gated ? ", gated" : "") << (p.spec().grouped ? ", grouped" : ""));
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
  for (int64_t run = 0; run < 4; ++run) {
    uint32_t i = 0;
    auto products = integer_products(random, 2, 6, [&](CallSpec& spec) {
      Geometry& g = spec.geometry;
      if (i >= 2 && i <= 4) spec.products = {};
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
