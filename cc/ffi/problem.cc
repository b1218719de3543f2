#include "ffi/problem.h"

#include <initializer_list>
#include <sstream>

namespace entwine {

namespace ffi = xla::ffi;

namespace {

// "op: words" as an error; the values are streamed in order.
template <typename... Words>
ffi::Unexpected<ffi::Error> invalid(schedule::Op op, Words const&... words) {
  std::ostringstream text;
  text << "entwine_jax." << op_name(op) << ": ";
  (text << ... << words);
  return ffi::Unexpected(ffi::Error::InvalidArgument(text.str()));
}

// Of a dimension, and of each number of a plan.
constexpr int64_t kLimit = int64_t{1} << 31;
// Row blocks of what is gathered are numbered in 24 bits.
constexpr uint32_t kMaxGatheredBlocks = 1u << 24;
// More than any machine has: of any one array, so that staging of it for all ranks is a 64-bit number; of what is gathered from
// all ranks, so that the units in which it is pushed are numbered in 32 bits.
constexpr double kMaxElements = double(int64_t{1} << 48), kMaxGatheredBytes = double(int64_t{1} << 46);

// Several elements share a byte of these, or they have none.
bool whole_bytes(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::S1:
    case ffi::DataType::S2:
    case ffi::DataType::S4:
    case ffi::DataType::U1:
    case ffi::DataType::U2:
    case ffi::DataType::U4:
    case ffi::DataType::F4E2M1FN:
      return false;
    default:
      return ffi::ByteWidth(type) != 0;
  }
}

// What is gathered: x of all-gather, with or without its whole as a result; z beside reduce-scatter.
ffi::ErrorOr<schedule::Gathering> decode_gathering(schedule::Op op, schedule::Geometry const& g, Buffers const& buffers) {
  bool gather = op == schedule::Op::kAllGatherMatmul;
  auto const& z = buffers.z;
  if (gather && z) return invalid(op, "it gathers x and no other array");
  if (op == schedule::Op::kMatmulAllReduce && (z || buffers.gathered)) return invalid(op, "it gathers nothing beside");
  if (!gather && z.has_value() != buffers.gathered.has_value())
    return invalid(op, "z and its gathered whole come together, not one of them");
  if (!gather && !z) return schedule::Gathering{};
  ffi::AnyBuffer own = gather ? buffers.x : *z;
  auto d = own.dimensions();
  if (d.size() != 3) return invalid(op, "z must have rank 3, not ", d.size());
  for (int64_t size : d)
    if (size < 1 || size >= (int64_t{1} << 31))
      return invalid(op, "z has a dimension of size ", size, ", which can't be gathered");
  if (!whole_bytes(own.element_type()))
    return invalid(op, "elements of ", own.element_type(), ", which aren't whole bytes, can't be gathered");
  double bytes = double(g.ranks) * double(d[0]) * double(d[1]) * double(d[2]) * double(ffi::ByteWidth(own.element_type()));
  if (bytes >= kMaxGatheredBytes) return invalid(op, "an array of ", bytes, " bytes is too large to be gathered");
  if (buffers.gathered) {
    auto whole = buffers.gathered->dimensions();
    if (whole.size() != 3 || whole[0] != d[0] || whole[1] != d[1] * g.ranks || whole[2] != d[2] ||
        buffers.gathered->element_type() != own.element_type())
      return invalid(op, "the gathered array must be (", d[0], ", ", d[1] * g.ranks, ", ", d[2], ") of the chunk's dtype");
  }
  schedule::Gathering gathering{static_cast<uint32_t>(d[0]), static_cast<uint32_t>(d[1]),
                                static_cast<uint64_t>(d[2]) * ffi::ByteWidth(own.element_type()), g.tile_m};
  if (uint64_t(gathering.batch) * gathering.batch_blocks() >= kMaxGatheredBlocks)
    return invalid(op, "the gathered chunk has more row blocks than the limit of ", kMaxGatheredBlocks);
  return gathering;
}

std::optional<ffi::AnyBuffer> optional_buffer(ffi::RemainingArgs arguments, size_t index) {
  auto buffer = arguments.get<ffi::AnyBuffer>(index);
  return buffer ? std::optional(*buffer) : std::nullopt;
}
std::optional<ffi::AnyBuffer> optional_buffer(ffi::RemainingRets results, size_t index) {
  auto buffer = results.get<ffi::AnyBuffer>(index);
  return buffer ? std::optional(**buffer) : std::nullopt;
}

bool is_float8(ffi::DataType type) { return type == ffi::DataType::F8E4M3FN || type == ffi::DataType::F8E5M2; }

}  // namespace

Buffers all_buffers(schedule::Op op, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer y, CallAttributes const& attributes,
                    ffi::RemainingArgs more, ffi::RemainingRets also, size_t first_more, size_t first_also) {
  Buffers buffers{x, w, y, {}, {}, {}, {}, {}};
  bool gather = op == schedule::Op::kAllGatherMatmul;
  int64_t others = attributes.products - 1;
  if (others < 0 || others >= schedule::kMaxProducts) others = 0;  // decode_problem() says so
  for (int64_t i = 0; i < others; ++i) {
    if (!gather) buffers.more[i].x = optional_buffer(more, first_more++);
    buffers.more[i].w = optional_buffer(more, first_more++);
    if (gather && attributes.gated == 0) buffers.more[i].y = optional_buffer(also, first_also++);
  }
  if ((attributes.biased & 1) != 0) buffers.bias = optional_buffer(more, first_more++);
  for (int64_t i = 0; i < others; ++i)
    if ((attributes.biased >> (i + 1) & 1) != 0) buffers.more[i].bias = optional_buffer(more, first_more++);
  if (attributes.scaled != 0) buffers.scale = optional_buffer(more, first_more++);
  buffers.z = optional_buffer(more, first_more);
  buffers.gathered = optional_buffer(also, first_also);
  return buffers;
}

namespace {

// The products after the first, which is right: what differs from it are the columns of an all-gather's, else the contraction.
ffi::ErrorOr<schedule::Products> decode_products(schedule::Op op, CallAttributes const& a, Buffers const& buffers, int64_t n,
                                                 int64_t k) {
  bool gather = op == schedule::Op::kAllGatherMatmul, gated = a.gated != 0;
  schedule::Products products{static_cast<uint32_t>(a.products), {static_cast<uint32_t>(gather ? n : k)}, gated};
  auto x = buffers.x.dimensions(), y = buffers.y.dimensions();
  for (uint32_t i = 1; i < products.count; ++i) {
    Buffers::More const& more = buffers.more[i - 1];
    if (!more.w || more.x.has_value() == gather || more.y.has_value() != (gather && !gated))
      return invalid(op, "attribute products is ", a.products, ", but product ", i, " lacks an operand or a result");
    auto wd = more.w->dimensions();
    if (wd.size() != 2 || more.w->element_type() != buffers.w.element_type())
      return invalid(op, "w of product ", i, " must be a matrix of the first w's dtype");
    int64_t its_k = wd[a.transpose_w ? 1 : 0], its_n = wd[a.transpose_w ? 0 : 1], size = gather ? its_n : its_k;
    if (gather ? its_k != k : its_n != n)
      return invalid(op, "w of product ", i, " has ", gather ? "contraction" : "column", " size ", gather ? its_k : its_n,
                     ", the first ", gather ? k : n);
    if (gated && its_n != n) return invalid(op, "gated w have ", n, " and ", its_n, " columns, not as many");
    ffi::AnyBuffer its = gated ? buffers.y : gather ? *more.y : *more.x;
    auto d = its.dimensions(), first = gather ? y : x;
    bool turned = a.transpose_x != 0;  // no all-gather then
    int64_t second = turned ? size : first[1], third = turned ? first[2] : size;
    if (d.size() != 3 || d[0] != first[0] || d[1] != second || d[2] != third ||
        its.element_type() != (gather ? buffers.y : buffers.x).element_type())
      return invalid(op, gather ? "the result" : "x", " of product ", i, " must be (", first[0], ", ", second, ", ", third,
                     ") of the first one's dtype");
    if (size < 1 || size >= kLimit) return invalid(op, "a dimension of size ", size, " can't be tiled");
    products.sizes[i] = static_cast<uint32_t>(size);
  }
  return products;
}

// One for each result; a single one of any shape.
std::optional<ffi::Unexpected<ffi::Error>> scale_fault(schedule::Op op, Buffers::Optional const& scale, int64_t results) {
  if (!scale) return std::nullopt;
  auto d = scale->dimensions();
  bool fits = scale->element_type() == ffi::DataType::F32 && (results == 1 || (d.size() == 1 && d[0] == results));
  for (int64_t size : d) fits = fits && size == results;
  if (!fits) return invalid(op, "the scale must hold one float32 number for each result, ", results, " in all");
  return std::nullopt;
}

std::optional<ffi::Unexpected<ffi::Error>> bias_fault(schedule::Op op, Buffers::Optional const& bias, bool biased, int64_t n,
                                                      int64_t attribute) {
  if (biased != bias.has_value())
    return invalid(op, "attribute biased is ", attribute, ", but there is ", bias ? "a" : "no", " bias");
  if (!bias) return std::nullopt;
  auto d = bias->dimensions();
  if (d.size() != 1 || d[0] != n || bias->element_type() != ffi::DataType::F32)
    return invalid(op, "bias must be float32 of shape (", n, "), one number for each column of the result");
  return std::nullopt;
}

}  // namespace

ffi::ErrorOr<Problem> decode_problem(schedule::Op op, schedule::Target target, CallAttributes const& a,
                                     Buffers const& buffers) {
  ffi::AnyBuffer x = buffers.x, w = buffers.w, y = buffers.y;
  auto xd = x.dimensions(), wd = w.dimensions(), yd = y.dimensions();
  if (xd.size() != 3 || wd.size() != 2 || yd.size() != 3)
    return invalid(op, "x, w and the result must have ranks 3, 2 and 3, not ", xd.size(), ", ", wd.size(), " and ", yd.size());
  if (a.team_size < 2 || a.team_size > schedule::kMaxRanks)
    return invalid(op, "a team must have 2 to ", schedule::kMaxRanks, " ranks, not ", a.team_size);
  if (a.groups.size() == 0 || a.groups.size() % a.team_size != 0)
    return invalid(op, "groups holds ", a.groups.size(), " ids, not a multiple of the team's ", a.team_size);
  int64_t k = wd[a.transpose_w ? 1 : 0], n = wd[a.transpose_w ? 0 : 1];
  bool gather = op == schedule::Op::kAllGatherMatmul, replicate = op == schedule::Op::kMatmulAllReduce;
  bool turned = a.transpose_x != 0;
  if (turned && gather) return invalid(op, "attribute transpose_x is ", a.transpose_x, ", but what is gathered are rows");
  if (turned && a.few_rows != 0) return invalid(op, "attributes transpose_x and few_rows don't go together");
  if (turned && replicate && xd[0] != 1)
    return invalid(op, "x is stored transposed, so its rows must be of one batch, not of ", xd[0]);
  int64_t its_k = xd[turned ? 1 : 2], rows = xd[turned ? 2 : 1];
  if (its_k != k) return invalid(op, "x has contraction size ", its_k, " but w has ", k);
  int64_t m_shard = gather ? rows : yd[1], whole = gather ? yd[1] : rows;
  if (replicate && whole != m_shard) return invalid(op, "x has ", whole, " rows, but the result ", m_shard);
  if (!replicate && (whole % a.team_size != 0 || whole / a.team_size != m_shard))
    return invalid(op, gather ? "the result has " : "x has ", whole, " rows, not the team's ", a.team_size, " times ", m_shard);
  if (yd[0] != xd[0] || yd[2] != n)
    return invalid(op, "the result is (", yd[0], ", ", yd[1], ", ", yd[2], ") but x and w give (", xd[0], ", *, ", n, ")");
  bool float8 = is_float8(x.element_type());
  if (turned && float8) return invalid(op, "float8 x must be contiguous in the contraction, but attribute transpose_x is set");
  if (float8 ? w.element_type() != ffi::DataType::F8E4M3FN : x.element_type() != w.element_type())
    return invalid(op, "x and w must have one dtype, or w float8_e4m3fn beside x of float8_e5m2");
  if (a.scaled < 0 || a.scaled > 1 || (a.scaled != 0) != float8 || float8 != buffers.scale.has_value())
    return invalid(op, "float8 operands have a scale, others have none; attribute scaled is ", a.scaled, ", and there is ",
                   buffers.scale ? "a" : "no", " scale");
  if (a.products < 1 || a.products > schedule::kMaxProducts)
    return invalid(op, "products must be 1 to ", schedule::kMaxProducts, ", not ", a.products);
  if (a.gated < 0 || a.gated > 1 || (a.gated != 0 && !(gather && a.products == 2)))
    return invalid(op, "two products of an all-gather can be gated, but attribute gated is ", a.gated, " of ", a.products);
  if (a.gated != 0 && float8) return invalid(op, "gated products have no float8 operands");
  int64_t finished = gather ? a.products : 1;  // sums that have a scale, a bias, and an activation but for a gated second one
  if (auto fault = scale_fault(op, buffers.scale, finished)) return *fault;
  if (a.biased < 0 || a.biased >> finished != 0)
    return invalid(op, "attribute biased is ", a.biased, ", but there are ", finished, " results");
  if (a.activation < 0 || a.activation >> (8 * (finished - a.gated)) != 0)
    return invalid(op, "there is no activation ", a.activation);
  for (int64_t d : {xd[0], m_shard, n, k})
    if (d < 1 || d >= kLimit) return invalid(op, "a dimension of size ", d, " can't be tiled");
  if (replicate && xd[0] * m_shard >= kLimit) return invalid(op, "a dimension of size ", xd[0] * m_shard, " can't be tiled");
  ffi::ErrorOr<schedule::Products> products = decode_products(op, a, buffers, n, k);
  if (products.has_error()) return ffi::Unexpected(products.error());
  bool fits = a.lead >= 0 && a.transport >= 0 && a.transport <= 1 && a.few_rows >= 0 && a.few_rows <= 1 && a.movers >= 0 &&
              a.movers <= schedule::kMaxMovers && (a.movers == 0 || a.few_rows == 0);
  for (int64_t v : {a.tile_m, a.tile_n, a.raster, a.pushers, a.copiers}) fits = fits && v >= 1;
  for (int64_t v : {a.tile_m, a.tile_n, a.raster, a.pushers, a.copiers, a.lead}) fits = fits && v < kLimit;
  if (!fits)
    return invalid(op, "the plan (tile_m ", a.tile_m, ", tile_n ", a.tile_n, ", raster ", a.raster, ", lead ", a.lead,
                   ", transport ", a.transport, ", pushers ", a.pushers, ", copiers ", a.copiers, ", few_rows ", a.few_rows,
                   ", movers ", a.movers, ") is out of range");
  for (int64_t v : {a.timeout_ms, a.stall_us})
    if (v < 0 || v >= kLimit)
      return invalid(op, "timeout and stall must be 0 to ", kLimit - 1, ", not ", a.timeout_ms, " ms and ", a.stall_us, " us");
  auto u32 = [](int64_t v) { return static_cast<uint32_t>(v); };
  uint32_t tile_m = u32(a.tile_m), tile_n = u32(a.tile_n);
  if (target == schedule::Target::kHost) {
    // A worker holds a tile; what is larger than the result is as one that isn't.
    uint32_t widest = u32(n);
    for (uint32_t i = 1; gather && i < products->count; ++i) widest = schedule::larger(widest, products->sizes[i]);
    if (products->gated) {
      tile_n = (tile_n + 1) & ~1u;  // halves of whole columns
      widest *= 2;
    }
    tile_n = schedule::smaller(tile_n, schedule::larger(widest, schedule::kHostTileN));
  }
  if (products->count > 1) {
    uint64_t joined = products->joined(gather ? tile_n : 1);
    if (joined >= uint64_t{kLimit}) return invalid(op, "a dimension of size ", joined, " can't be tiled");
    (gather ? n : k) = static_cast<int64_t>(joined);
  }
  double all_rows = double(xd[0]) * double(m_shard) * (replicate ? 1 : double(a.team_size));
  for (double elements : {all_rows * double(k), all_rows * double(n), double(n) * double(k)})
    if (elements >= kMaxElements) return invalid(op, "an array of ", elements, " elements is larger than any memory");
  schedule::Geometry g{u32(a.team_size), u32(xd[0]), u32(m_shard), u32(n), u32(k), tile_m, tile_n};
  if (replicate)
    g = schedule::all_reduce_geometry(g.ranks, g.batch * g.m_shard, g.n, g.k, g.tile_m, g.tile_n, schedule::chunk_unit(target));
  if (target == schedule::Target::kHost)
    g.tile_m = schedule::smaller(g.tile_m, schedule::larger(g.m_shard, schedule::kHostTileM));
  // Positions and words are 32-bit; leave room for the parts of a tile and the claims past the end of the queue.
  if (double(g.ranks) * g.batch * g.row_blocks() * g.cols() * schedule::kSm90Parts >= double(1u << 31))
    return invalid(op, "the product has more tiles than a 32-bit queue can number");
  if (a.movers != 0 && double(g.tiles()) * schedule::kSm90Parts * g.ranks >= double(1u << 31))
    return invalid(op, "the product has more tiles than movers' flags can be numbered for in 32 bits");
  schedule::Plan plan{g.tile_m,
                      g.tile_n,
                      schedule::smaller(u32(a.raster), g.chunk_rows()),  // so that a group's tiles are a 32-bit number
                      u32(a.lead),
                      static_cast<schedule::Transport>(a.transport),
                      u32(a.pushers),
                      static_cast<schedule::Form>(a.few_rows),
                      u32(a.copiers),
                      u32(a.movers)};
  ffi::ErrorOr<schedule::Gathering> gathering = decode_gathering(op, g, buffers);
  if (gathering.has_error()) return ffi::Unexpected(gathering.error());
  Problem problem{op, g, plan, a.transpose_w != 0, turned, *products, {}, x.element_type(), y.element_type(), *gathering};
  for (uint32_t i = 0; i < finished; ++i) {
    int64_t activation = a.activation >> (8 * i) & 0xff;
    if (activation >= schedule::kActivations) return invalid(op, "there is no activation ", activation);
    problem.activation[i] = static_cast<schedule::Activation>(activation);
    Buffers::Optional const& bias = i == 0 ? buffers.bias : buffers.more[i - 1].bias;
    int64_t columns = gather ? products->sizes[i] : n;
    if (auto fault = bias_fault(op, bias, (a.biased >> i & 1) != 0, columns, a.biased)) return *fault;
  }
  return problem;
}

}  // namespace entwine
