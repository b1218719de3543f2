// wgmma: warpgroup matrix products, D (64 x n, float32 registers) += A (64 x k, shared) B (k x n, shared), k being
// 32 bytes.
#pragma once

#include <cstdint>

#include "kernel/operands.h"

namespace entwine::ptx {

// Describes a 128-byte-swizzled operand. `leading` is the byte distance of repeating patterns along the contiguous dimension
// when that is not k (ignored when it is); `stride` that of groups of eight rows.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t(1) << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The accumulators, so many of them: as the instruction names them, and as operands.
// clang-format off
#define ENTWINE_NAMES_8 \
  "%0, %1, %2, %3, %4, %5, %6, %7"
#define ENTWINE_NAMES_16 ENTWINE_NAMES_8 ", " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define ENTWINE_NAMES_32 ENTWINE_NAMES_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ENTWINE_NAMES_64 ENTWINE_NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ENTWINE_NAMES_80 ENTWINE_NAMES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define ENTWINE_NAMES_96 ENTWINE_NAMES_80 ", " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define ENTWINE_NAMES_112 ENTWINE_NAMES_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define ENTWINE_NAMES_128 ENTWINE_NAMES_112 ", " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define ENTWINE_EIGHT(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define ENTWINE_OPERANDS_8 ENTWINE_EIGHT(0)
#define ENTWINE_OPERANDS_16 ENTWINE_OPERANDS_8, ENTWINE_EIGHT(8)
#define ENTWINE_OPERANDS_32 ENTWINE_OPERANDS_16, ENTWINE_EIGHT(16), ENTWINE_EIGHT(24)
#define ENTWINE_OPERANDS_64 ENTWINE_OPERANDS_32, ENTWINE_EIGHT(32), ENTWINE_EIGHT(40), ENTWINE_EIGHT(48), ENTWINE_EIGHT(56)
#define ENTWINE_OPERANDS_80 ENTWINE_OPERANDS_64, ENTWINE_EIGHT(64), ENTWINE_EIGHT(72)
#define ENTWINE_OPERANDS_96 ENTWINE_OPERANDS_80, ENTWINE_EIGHT(80), ENTWINE_EIGHT(88)
#define ENTWINE_OPERANDS_112 ENTWINE_OPERANDS_96, ENTWINE_EIGHT(96), ENTWINE_EIGHT(104)
#define ENTWINE_OPERANDS_128 ENTWINE_OPERANDS_112, ENTWINE_EIGHT(112), ENTWINE_EIGHT(120)
// clang-format on

// The instruction for n columns; `kind` is what follows n in its name. Operands are numbered: the accumulators, then A, whose
// number is that of these, and the others as said. Only of 16 bits has it `transposes`.
// clang-format off
#define ENTWINE_WGMMA(n, accumulators, kind, b_, accumulate_, transposes) \
  asm volatile( \
      "{\n" \
      ".reg .pred p;\n" \
      "setp.ne.b32 p, %" #accumulate_ ", 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n" #n kind " {" ENTWINE_NAMES_##accumulators "}, " \
      "%" #accumulators ", %" #b_ ", p, 1, 1" transposes ";\n" \
      "}" \
      : ENTWINE_OPERANDS_##accumulators \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposeB), "n"(kTransposeA))
// clang-format on

// One step of 32 bytes in k; n is twice the accumulators' count. `kTransposeB`: B's contiguous dimension is n (w stored [k, n])
// rather than k; 16-bit operands only. `kWFirst`: A is w and B x, else the other way round. D is overwritten unless
// `accumulate`.
#define ENTWINE_WGMMA_STEP(n, accumulators, b_, accumulate_, transpose_b, transpose_a)                             \
  template <Operands kOperands, int kTransposeB, int kTransposeA = 0, bool kWFirst = false>                        \
  __device__ __forceinline__ void wgmma_step(float (&d)[accumulators], uint64_t a, uint64_t b, bool accumulate) {  \
    if constexpr (kOperands == Operands::kBf16)                                                                    \
      ENTWINE_WGMMA(n, accumulators, "k16.f32.bf16.bf16", b_, accumulate_, ", %" #transpose_a ", %" #transpose_b); \
    else if constexpr (kOperands == Operands::kF16)                                                                \
      ENTWINE_WGMMA(n, accumulators, "k16.f32.f16.f16", b_, accumulate_, ", %" #transpose_a ", %" #transpose_b);   \
    else if constexpr (kOperands == Operands::kE4m3)                                                               \
      ENTWINE_WGMMA(n, accumulators, "k32.f32.e4m3.e4m3", b_, accumulate_, "");                                    \
    else if constexpr (kWFirst)                                                                                    \
      ENTWINE_WGMMA(n, accumulators, "k32.f32.e4m3.e5m2", b_, accumulate_, "");                                    \
    else                                                                                                           \
      ENTWINE_WGMMA(n, accumulators, "k32.f32.e5m2.e4m3", b_, accumulate_, "");                                    \
  }
ENTWINE_WGMMA_STEP(256, 128, 129, 130, 131, 132)
ENTWINE_WGMMA_STEP(224, 112, 113, 114, 115, 116)
ENTWINE_WGMMA_STEP(192, 96, 97, 98, 99, 100)
ENTWINE_WGMMA_STEP(160, 80, 81, 82, 83, 84)
ENTWINE_WGMMA_STEP(128, 64, 65, 66, 67, 68)
ENTWINE_WGMMA_STEP(64, 32, 33, 34, 35, 36)
ENTWINE_WGMMA_STEP(16, 8, 9, 10, 11, 12)

#undef ENTWINE_WGMMA_STEP
#undef ENTWINE_WGMMA
#undef ENTWINE_EIGHT
#undef ENTWINE_NAMES_8
#undef ENTWINE_OPERANDS_8
#undef ENTWINE_NAMES_16
#undef ENTWINE_OPERANDS_16
#undef ENTWINE_NAMES_32
#undef ENTWINE_OPERANDS_32
#undef ENTWINE_NAMES_64
#undef ENTWINE_OPERANDS_64
#undef ENTWINE_NAMES_80
#undef ENTWINE_OPERANDS_80
#undef ENTWINE_NAMES_96
#undef ENTWINE_OPERANDS_96
#undef ENTWINE_NAMES_112
#undef ENTWINE_OPERANDS_112
#undef ENTWINE_NAMES_128
#undef ENTWINE_OPERANDS_128

}  // namespace entwine::ptx
