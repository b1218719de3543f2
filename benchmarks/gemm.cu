// The matmul under the fused kernels, alone: all_gather_matmul in a team of one against cuBLAS, bfloat16, w as (k, n).
//
//   gemm [--tile 256x224 | --sums | --transposed-x] [M N K ...]
//
// By default the plan's tile and the shapes below; JSON on stdout. --sums times the matmul of strategy "signal" instead, whose
// tiles lie in scratch when it is done: the loop over k is that of the ops which sum over ranks, without peers. --transposed-x
// is that of an x stored (k, m), with cuBLAS reading the same.
//
// Each round takes one sample of either in random order, for the reason that benchmarks/rounds.py gives; ratios are taken
// within rounds. Operands rotate through several sets, so that w comes from memory as it does in a model. cuBLAS is found by
// dlopen, so LD_LIBRARY_PATH must name its folder.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "kernel/signal.h"
#include "kernel/sm90.h"
#include "schedule/few_rows.h"
#include "schedule/make_plan.h"

namespace {

using namespace entwine;
using bf16 = __nv_bfloat16;

#define CHECK_CUDA(call)                                                                             \
  do {                                                                                               \
    if (cudaError_t error = (call); error != cudaSuccess) {                                          \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error)); \
      std::exit(1);                                                                                  \
    }                                                                                                \
  } while (0)

constexpr int kSets = 4, kRounds = 24;
constexpr double kSampleMs = 20;

__global__ void fill(bf16* values, size_t count, float scale, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed * 40503u;
    h = (h ^ h >> 15) * 2246822519u;
    h = (h ^ h >> 13) * 3266489917u;
    h ^= h >> 16;
    // Nearly normal: power depends on the bits.
    float sum = float(h & 255) + float(h >> 8 & 255) + float(h >> 16 & 255) + float(h >> 24);
    values[i] = __float2bfloat16((sum - 510.0f) / 147.8f * scale);
  }
}

__global__ void compare(bf16 const* a, bf16 const* b, size_t count, double* sums) {
  double difference = 0, norm = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    double x = __bfloat162float(a[i]), y = __bfloat162float(b[i]);
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  atomicAdd(&sums[0], difference);
  atomicAdd(&sums[1], norm);
}

template <class Function>
Function symbol(void* library, char const* name) {
  void* found = dlsym(library, name);
  if (found == nullptr) {
    std::fprintf(stderr, "no %s in cuBLAS\n", name);
    std::exit(2);
  }
  return reinterpret_cast<Function>(found);
}

// The row-major product by cuBLAS, which is column-major: y^T = w^T x^T.
class Cublas {
 public:
  explicit Cublas(cudaStream_t stream) {
    void* library = dlopen("libcublas.so.13", RTLD_NOW);
    if (library == nullptr) {
      std::fprintf(stderr, "%s\n", dlerror());
      std::exit(2);
    }
    symbol<int (*)(void**)>(library, "cublasCreate_v2")(&handle_);
    void* workspace = nullptr;
    CHECK_CUDA(cudaMalloc(&workspace, 64u << 20));
    symbol<int (*)(void*, void*)>(library, "cublasSetStream_v2")(handle_, stream);
    symbol<int (*)(void*, void*, size_t)>(library, "cublasSetWorkspace_v2")(handle_, workspace, 64u << 20);
    gemm_ = symbol<Gemm>(library, "cublasGemmEx");
  }
  void multiply(int m, int n, int k, bf16 const* x, bool transposed_x, bf16 const* w, bf16* y) const {
    constexpr int kBf16 = 14, kFloat32 = 68;
    float one = 1, zero = 0;
    int turn = transposed_x ? 1 : 0, pitch = transposed_x ? m : k;
    if (gemm_(handle_, 0, turn, n, m, k, &one, w, kBf16, n, x, kBf16, pitch, &zero, y, kBf16, n, kFloat32, -1) != 0)
      std::exit(2);
  }

 private:
  using Gemm = int (*)(void*, int, int, int, int, int, void const*, void const*, int, int, void const*, int, int, void const*,
                       void*, int, int, int, int);
  void* handle_ = nullptr;
  Gemm gemm_;
};

struct Set {
  bf16 *x, *w, *y;
};

struct Kernel {
  bool sums, transposed_x;
  schedule::TileShape tile;  // {}: the plan's
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void measure(int m, int n, int k, Kernel kernel, Cublas const& cublas, cudaStream_t stream, bool last) {
  size_t x_count = size_t(m) * k, w_count = size_t(k) * n, y_count = size_t(m) * n;
  std::vector<Set> sets(kSets);
  for (uint32_t i = 0; i < kSets; ++i) {
    CHECK_CUDA(cudaMalloc(&sets[i].x, x_count * 2));
    CHECK_CUDA(cudaMalloc(&sets[i].w, w_count * 2));
    CHECK_CUDA(cudaMalloc(&sets[i].y, y_count * 2));
    fill<<<1024, 256, 0, stream>>>(sets[i].x, x_count, 1, 2 * i + 1);
    fill<<<1024, 256, 0, stream>>>(sets[i].w, w_count, 1 / std::sqrt(float(k)), 2 * i + 2);
  }

  sm90::Call call{};
  call.op = schedule::Op::kAllGatherMatmul;
  call.geometry = {1, 1, uint32_t(m), uint32_t(n), uint32_t(k), 1, 1};
  call.plan = schedule::make_plan(call.op, schedule::Target::kSm90, call.geometry, 2);
  if (kernel.tile.m != 0) {
    call.plan = schedule::plan_of_tile(call.op, call.geometry, kernel.tile, 2, 2, false);
    call.plan.form = schedule::Form::kTiles;
  }
  call.geometry.tile_m = call.plan.tile_m;
  call.geometry.tile_n = call.plan.tile_n;
  schedule::ArenaDemand demand = schedule::call_demand(call.op, call.plan.form, call.geometry, schedule::kSm90Parts, 2);
  call.arena = {1, demand.words_per_source, demand.staging_half};
  uint8_t* arena = nullptr;
  CHECK_CUDA(cudaMalloc(&arena, call.arena.bytes() + 4096));
  CHECK_CUDA(cudaMemsetAsync(arena, 0, call.arena.bytes(), stream));
  call.arenas = &arena;
  int device = 0, multiprocessors = 0;
  CHECK_CUDA(cudaGetDevice(&device));
  CHECK_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  call.multiprocessors = uint32_t(multiprocessors);
  sm90::SignalCall sums{};
  if (kernel.sums) {
    call.plan.form = schedule::Form::kTiles;
    if (!schedule::is_signal_tile(call.plan.tile_m, call.plan.tile_n)) call.plan.tile_m = call.plan.tile_n = 256;
    sums.op = schedule::Op::kMatmulAllReduce;
    sums.geometry = call.geometry;
    sums.geometry.tile_m = call.plan.tile_m;
    sums.geometry.tile_n = call.plan.tile_n;
    sums.raster = 4;
    sums.operands = Operands::kBf16;
    sums.transposed_x = kernel.transposed_x;
    schedule::SignalPlan plan{2, 0, false};
    sums.groups =
        schedule::make_groups(sums.op, schedule::Target::kSm90, sums.geometry, plan, schedule::kSm90Multiprocessors, 2).groups;
    CHECK_CUDA(cudaMalloc(&sums.scratch, schedule::scratch_bytes(sums.op, sums.geometry, 2, false)));
    sums.ranks = 1;
    CHECK_CUDA(sm90::load_signal_kernels());
    if (std::string why = sm90::unsupported(sums); !why.empty()) {
      std::fprintf(stderr, "%d %d %d: %s\n", m, n, k, why.c_str());
      std::exit(1);
    }
  }
  int turn = 0;
  auto run = [&](bool ours) {
    Set const& set = sets[turn++ % kSets];
    if (!ours) return cublas.multiply(m, n, k, set.x, kernel.transposed_x, set.w, set.y);
    if (kernel.sums) {
      sums.x = set.x;
      sums.w = set.w;
      sums.y = set.y;
      CHECK_CUDA(cudaMemsetAsync(sums.scratch, 0, schedule::kScratchHead, stream));
      CHECK_CUDA(sm90::launch_sums(sums, call.multiprocessors / 2, stream));
      return;
    }
    call.x[0] = set.x;
    call.w[0] = set.w;
    call.y[0] = set.y;
    CHECK_CUDA(sm90::launch(call, stream));
  };
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  auto sample = [&](bool ours, int repeats) {
    CHECK_CUDA(cudaEventRecord(begin, stream));
    for (int i = 0; i < repeats; ++i) run(ours);
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    return double(ms) / repeats;
  };

  // The same product of the first set, before anything is timed.
  bf16* want = nullptr;
  double *errors = nullptr, found[2];
  CHECK_CUDA(cudaMalloc(&want, y_count * 2));
  CHECK_CUDA(cudaMalloc(&errors, sizeof found));
  CHECK_CUDA(cudaMemsetAsync(errors, 0, sizeof found, stream));
  run(true);
  if (kernel.sums) CHECK_CUDA(sm90::launch_finish(sums, 0, sums.groups.count, call.multiprocessors, stream));
  cublas.multiply(m, n, k, sets[0].x, kernel.transposed_x, sets[0].w, want);
  compare<<<256, 256, 0, stream>>>(sets[0].y, want, y_count, errors);
  CHECK_CUDA(cudaMemcpyAsync(found, errors, sizeof found, cudaMemcpyDeviceToHost, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  double error = std::sqrt(found[0] / found[1]);
  if (!(error < 4e-3)) {
    std::fprintf(stderr, "%d %d %d: ||ours - cuBLAS|| / ||cuBLAS|| is %g\n", m, n, k, error);
    std::exit(1);
  }

  sample(true, 2);
  sample(false, 2);
  int repeats = std::max(1, int(kSampleMs / sample(false, 4)));
  std::vector<double> ours, theirs, ratios;
  std::minstd_rand random(uint32_t(m + n + k));
  for (int round = 0; round < kRounds; ++round) {
    bool first = random() >> 8 & 1;
    double ms[2];
    for (bool which : {first, !first}) ms[which] = sample(which, repeats);
    ours.push_back(ms[1]);
    theirs.push_back(ms[0]);
    ratios.push_back(ms[0] / ms[1]);
  }
  std::printf(
      "  {\"m\": %d, \"n\": %d, \"k\": %d, \"tile_m\": %u, \"tile_n\": %u, \"few_rows\": %s, \"ours_ms\": %.5f, "
      "\"cublas_ms\": %.5f, \"cublas_over_ours\": %.4f, \"tflops\": %.1f, \"error\": %.2e}%s\n",
      m, n, k, call.plan.tile_m, call.plan.tile_n, call.plan.form == schedule::Form::kFewRows ? "true" : "false", median(ours),
      median(theirs), median(ratios), 2e-9 * m * n * k / median(ours), error, last ? "" : ",");
  std::fflush(stdout);

  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
  for (Set const& set : sets)
    for (bf16* each : {set.x, set.w, set.y}) CHECK_CUDA(cudaFree(each));
  CHECK_CUDA(cudaFree(arena));
  CHECK_CUDA(cudaFree(sums.scratch));
  CHECK_CUDA(cudaFree(want));
  CHECK_CUDA(cudaFree(errors));
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<int> sizes = {8192, 8192, 8192, 8192, 4096, 7168,  8192, 8192, 3584, 4096, 8192, 2048, 4096,
                            3584, 8192, 4096, 1792, 4096, 1024,  6656, 16384, 2048, 5120, 3456, 512, 8192,
                            3584, 512,  3584, 8192, 512,  5120,  8192, 1024, 8192, 3584, 1024, 3584, 8192};
  Kernel kernel{};
  std::vector<std::string> given(arguments + 1, arguments + count);
  size_t first = 0;
  if (given.size() > 1 && given[0] == "--tile") {
    bool read = std::sscanf(given[1].c_str(), "%ux%u", &kernel.tile.m, &kernel.tile.n) == 2;
    if (!read || !schedule::is_sm90_tile(kernel.tile, 2)) {
      std::fprintf(stderr, "--tile %s: there is no such tile\n", given[1].c_str());
      return 2;
    }
    first = 2;
  } else if (!given.empty() && (given[0] == "--sums" || given[0] == "--transposed-x")) {
    kernel.sums = true;
    kernel.transposed_x = given[0] == "--transposed-x";
    first = 1;
  }
  if (given.size() > first) sizes.clear();
  for (size_t i = first; i < given.size(); ++i) sizes.push_back(std::atoi(given[i].c_str()));
  if (sizes.size() % 3 != 0 || *std::min_element(sizes.begin(), sizes.end()) < 1) {
    std::fprintf(stderr, "usage: gemm [--tile MxN | --sums | --transposed-x] [M N K ...]\n");
    return 2;
  }
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(sm90::load_kernels());
  Cublas cublas(stream);
  std::printf("[\n");
  for (size_t i = 0; i < sizes.size(); i += 3)
    measure(sizes[i], sizes[i + 1], sizes[i + 2], kernel, cublas, stream, i + 3 == sizes.size());
  std::printf("]\n");
  return 0;
}
