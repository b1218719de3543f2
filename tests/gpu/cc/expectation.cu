#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fill.cuh"

namespace teams {
namespace {

__global__ void put_x(uint8_t* x, Operands operands, uint32_t count, uint32_t seed) {
  for (uint32_t i = first_index(); i < count; i += index_step()) put(x, operands, i, element(seed, i));
}

__global__ void put_turned_x(uint8_t* x, Operands operands, uint32_t rows, uint32_t k, uint32_t batch, uint32_t seed) {
  for (uint32_t i = first_index(); i < batch * rows * k; i += index_step()) {
    uint32_t row = i / k, p = i - row * k, b = row / rows;
    put(x, operands, (b * k + p) * rows + row - b * rows, element(seed, i));
  }
}

__global__ void put_w(uint8_t* w, Operands operands, uint32_t n, uint32_t k, bool transposed, uint32_t seed) {
  for (uint32_t i = first_index(); i < n * k; i += index_step()) {
    uint32_t row = i / n, col = i - row * n;
    put(w, operands == Operands::kE5m2 ? Operands::kE4m3 : operands, transposed ? col * k + row : i, element(seed, i));
  }
}

__global__ void put_expected(float* want, Question q) {
  uint32_t count = y_elements(q.op, q.geometry);
  for (uint32_t i = first_index(); i < count; i += index_step()) want[i] = expected(q, i);
}

__global__ void put_bias(float* bias, uint32_t count, uint32_t seed) {
  for (uint32_t i = first_index(); i < count; i += index_step()) bias[i] = static_cast<float>(bias_element(seed, i));
}

__global__ void put_gathered(float* want, Op op, Chunk chunk, uint32_t ranks, uint32_t seed) {
  uint32_t part = chunk.rows * chunk.cols;
  for (uint32_t i = first_index(); i < chunk.elements() * ranks; i += index_step()) {
    uint32_t batch = i / part / ranks, source = i / part - batch * ranks;
    want[i] = static_cast<float>(element(gathered_seed(op, seed, source), batch * part + i % part));
  }
}

__device__ __forceinline__ uint32_t bits_of(float value, Result result) {
  if (result == Result::kFloat32) return __float_as_uint(value);
  if (result == Result::kE4m3 || result == Result::kE5m2) {  // -1, 0 and 1
    uint32_t one = result == Result::kE5m2 ? 0x3c : 0x38;
    return value == 0 ? 0 : value < 0 ? 0x80 | one : one;
  }
  return result == Result::kF16 ? __half_as_ushort(__float2half_rn(value)) : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

__device__ __forceinline__ float finished(Finish const& finish, float sum, uint32_t index) {
  sum *= finish.scale;
  return finish.columns == 0 ? sum : fmaxf(sum + static_cast<float>(bias_element(finish.seed, index % finish.columns)), 0);
}

// Bits is uint32_t for float32, uint16_t for 16-bit types, uint8_t for those of 8.
template <typename Bits>
__global__ void look(Bits const* guarded, float const* want, Finish finish, uint32_t count, Result result, Verdict* verdict) {
  constexpr uint32_t kGuard = kGuardBytes / sizeof(Bits);
  for (uint32_t i = first_index(); i < count + 2 * kGuard; i += index_step()) {
    bool inside = i >= kGuard && i < kGuard + count;
    uint32_t got = guarded[i], right = inside ? bits_of(finished(finish, want[i - kGuard], i - kGuard), result)
                                              : uint32_t{static_cast<Bits>(~Bits())};
    if (inside && got == 1u << (8 * sizeof(Bits) - 1)) got = 0;
    if (got == right) continue;
    unsigned long long position = static_cast<unsigned long long>(~i) << 32;
    atomicAdd(&verdict->bad, 1ull);
    atomicMax(&verdict->got, position | got);
    atomicMax(&verdict->want, position | right);
  }
}

__global__ void idle(uint64_t nanoseconds) {
  auto now = [] {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
  };
  for (uint64_t start = now(); now() - start < nanoseconds;) __nanosleep(500);
}

}  // namespace

void fill_x(Rank const& rank, uint8_t* x, Operands operands, uint32_t count, uint32_t seed) {
  put_x<<<blocks_for(count), kThreads, 0, rank.stream>>>(x, operands, count, seed);
  CHECK_CUDA(cudaGetLastError());
}

void fill_turned_x(Rank const& rank, uint8_t* x, Operands operands, uint32_t rows, uint32_t k, uint32_t batch, uint32_t seed) {
  put_turned_x<<<blocks_for(batch * rows * k), kThreads, 0, rank.stream>>>(x, operands, rows, k, batch, seed);
  CHECK_CUDA(cudaGetLastError());
}

void fill_w(Rank const& rank, uint8_t* w, Operands operands, uint32_t n, uint32_t k, bool transposed, uint32_t seed) {
  put_w<<<blocks_for(n * k), kThreads, 0, rank.stream>>>(w, operands, n, k, transposed, seed);
  CHECK_CUDA(cudaGetLastError());
}

void fill_bias(Rank const& rank, float* bias, uint32_t count, uint32_t seed) {
  put_bias<<<blocks_for(count), kThreads, 0, rank.stream>>>(bias, count, seed);
  CHECK_CUDA(cudaGetLastError());
}

void fill_expected(Rank const& rank, float* want, Question const& question) {
  put_expected<<<blocks_for(y_elements(question.op, question.geometry)), kThreads, 0, rank.stream>>>(want, question);
  CHECK_CUDA(cudaGetLastError());
}

void fill_gathered(Rank const& rank, float* want, Op op, Chunk const& chunk, uint32_t ranks, uint32_t seed) {
  put_gathered<<<blocks_for(chunk.elements() * ranks), kThreads, 0, rank.stream>>>(want, op, chunk, ranks, seed);
  CHECK_CUDA(cudaGetLastError());
}

void compare(Rank const& rank, Guarded const& y, float const* want, Finish finish, uint32_t count, Result result,
             Verdict* verdict) {
  uint32_t blocks = blocks_for(count), bytes = bytes_of(result);
  if (bytes == 4)
    look<<<blocks, kThreads, 0, rank.stream>>>(reinterpret_cast<uint32_t const*>(y.begin), want, finish, count, result,
                                               verdict);
  else if (bytes == 2)
    look<<<blocks, kThreads, 0, rank.stream>>>(reinterpret_cast<uint16_t const*>(y.begin), want, finish, count, result,
                                               verdict);
  else
    look<<<blocks, kThreads, 0, rank.stream>>>(y.begin, want, finish, count, result, verdict);
  CHECK_CUDA(cudaGetLastError());
}

void delay(Rank const& rank, uint64_t nanoseconds) {
  idle<<<1, 1, 0, rank.stream>>>(nanoseconds);
  CHECK_CUDA(cudaGetLastError());
}

}  // namespace teams
