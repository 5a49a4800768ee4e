// 9.7.15 (PTX ISA 9.0) wgmma: MMAs of a whole warpgroup (4 consecutive warps, the first a multiple of 4), executed asynchronously
// by the tensor cores. D (64 × N, FP32, in registers) = A (64 × K) · B (K × N), or D += A · B; K is 32 bytes of A: 16 elements
// of 16 bits, or 32 of 8 bits. Section numbers refer to the PTX ISA 9.0.
//
// Lane l of warp w of the warpgroup holds of D: d[4·j + 2·h + e] is row 16·w + l / 4 + 8·h, column
// 8·j + 2·(l % 4) + e.
// Of A in registers: a[i] is row 16·w + l / 4 + 8·(i % 2), and the 4 bytes from byte 4·(l % 4) + 16·(i / 2) of that row.
#pragma once

struct __half;
struct __nv_bfloat16;
struct __nv_fp8_e4m3;
struct __nv_fp8_e5m2;

namespace ptx {

// The contiguous dimension of an operand in shared memory. 8-bit types must be K-major.
enum class Major { K = 0, MN = 1 };

// 9.7.15.5.1.2.2 How the 16-byte pieces of rows of 32, 64 or 128 bytes are permuted (bits 62 and 63 of a descriptor).
enum class Swizzle { none = 0, b128 = 1, b64 = 2, b32 = 3 };

// 9.7.15.5.1.2.2 Matrix descriptor of an operand in shared memory; addresses and offsets are multiples of 16 bytes. Its 16-byte pieces:
//   K-major:  piece (8·i + r, c), of row (of A; column of B) 8·i + r and its bytes from 16·c on, at
//             none:    r · 16 + i · stride_bytes + c · leading_bytes
//             swizzle: r · swizzle span + i · stride_bytes + c · 16          (leading_bytes is not used)
//   MN-major: piece (c, 8·i + r), of rows 8·c to 8·c + 7 (16 bytes) and k = 8·i + r, at
//             none:    r · 16 + i · leading_bytes + c · stride_bytes
//             swizzle: r · swizzle span + i · stride_bytes + (c % pieces a span) · 16 + c / pieces a span · leading_bytes
// A swizzle permutes the pieces by their address: log2(span / 16) bits from bit 4 on are XORed with as many from bit 7 on
// (3, 2, 1 for 128, 64, 32 bytes). Swizzle patterns of 1024, 512 or 256 bytes start at multiples of their size.
__device__ __forceinline__ unsigned long long make_descriptor(const void* smem, unsigned leading_bytes, unsigned stride_bytes,
                                                              Swizzle swizzle) {
  constexpr unsigned ADDRESS_BITS = 0x3ffff;
  const unsigned start = static_cast<unsigned>(__cvta_generic_to_shared(smem));
  return static_cast<unsigned long long>((start & ADDRESS_BITS) >> 4) |
         static_cast<unsigned long long>((leading_bytes & ADDRESS_BITS) >> 4) << 16 |
         static_cast<unsigned long long>((stride_bytes & ADDRESS_BITS) >> 4) << 32 |
         static_cast<unsigned long long>(swizzle) << 62;
}

// 9.7.15.7.1 wgmma.fence: required before a warpgroup's first wgmma, and between an access to registers and a wgmma that uses them as
// D or A.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// 9.7.15.7.2 wgmma.commit_group: the wgmma that this warp issued since the last commit become one group.
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// 9.7.15.7.3 wgmma.wait_group: waits until at most NUM_PENDING of this warp's most recent groups are pending. The registers and the
// shared memory of the older groups may then be accessed again.
template <int NUM_PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  static_assert(NUM_PENDING >= 0 && NUM_PENDING <= 7, "NUM_PENDING must be from 0 to 7");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NUM_PENDING) : "memory");
}

// Pins accumulators to a point in the program. wgmma_wait_group does not name the registers that it waits for, so to the compiler
// a later use of them does not depend on it and may move ahead of it: a memory clobber orders accesses to memory, not to registers.
// This names them, in an empty asm statement that reads and writes each one. Use it after a wait, before the first use of the
// results that it waited for.
template <int N>
__device__ __forceinline__ void wgmma_pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

namespace wgmma_detail {

template <typename T, typename U>
constexpr bool SAME = false;
template <typename T>
constexpr bool SAME<T, T> = true;

template <int N>
struct Shape {
  static_assert(N < 0, "N must be a multiple of 8 from 8 to 256");
};

// Placeholders of a thread's N / 2 registers of D in the assembly, from %0 on …
#define FLASHLAB_NAMES_8 "%0, %1, %2, %3"
#define FLASHLAB_NAMES_16 FLASHLAB_NAMES_8 ", %4, %5, %6, %7"
#define FLASHLAB_NAMES_24 FLASHLAB_NAMES_16 ", %8, %9, %10, %11"
#define FLASHLAB_NAMES_32 FLASHLAB_NAMES_24 ", %12, %13, %14, %15"
#define FLASHLAB_NAMES_40 FLASHLAB_NAMES_32 ", %16, %17, %18, %19"
#define FLASHLAB_NAMES_48 FLASHLAB_NAMES_40 ", %20, %21, %22, %23"
#define FLASHLAB_NAMES_56 FLASHLAB_NAMES_48 ", %24, %25, %26, %27"
#define FLASHLAB_NAMES_64 FLASHLAB_NAMES_56 ", %28, %29, %30, %31"
#define FLASHLAB_NAMES_72 FLASHLAB_NAMES_64 ", %32, %33, %34, %35"
#define FLASHLAB_NAMES_80 FLASHLAB_NAMES_72 ", %36, %37, %38, %39"
#define FLASHLAB_NAMES_88 FLASHLAB_NAMES_80 ", %40, %41, %42, %43"
#define FLASHLAB_NAMES_96 FLASHLAB_NAMES_88 ", %44, %45, %46, %47"
#define FLASHLAB_NAMES_104 FLASHLAB_NAMES_96 ", %48, %49, %50, %51"
#define FLASHLAB_NAMES_112 FLASHLAB_NAMES_104 ", %52, %53, %54, %55"
#define FLASHLAB_NAMES_120 FLASHLAB_NAMES_112 ", %56, %57, %58, %59"
#define FLASHLAB_NAMES_128 FLASHLAB_NAMES_120 ", %60, %61, %62, %63"
#define FLASHLAB_NAMES_136 FLASHLAB_NAMES_128 ", %64, %65, %66, %67"
#define FLASHLAB_NAMES_144 FLASHLAB_NAMES_136 ", %68, %69, %70, %71"
#define FLASHLAB_NAMES_152 FLASHLAB_NAMES_144 ", %72, %73, %74, %75"
#define FLASHLAB_NAMES_160 FLASHLAB_NAMES_152 ", %76, %77, %78, %79"
#define FLASHLAB_NAMES_168 FLASHLAB_NAMES_160 ", %80, %81, %82, %83"
#define FLASHLAB_NAMES_176 FLASHLAB_NAMES_168 ", %84, %85, %86, %87"
#define FLASHLAB_NAMES_184 FLASHLAB_NAMES_176 ", %88, %89, %90, %91"
#define FLASHLAB_NAMES_192 FLASHLAB_NAMES_184 ", %92, %93, %94, %95"
#define FLASHLAB_NAMES_200 FLASHLAB_NAMES_192 ", %96, %97, %98, %99"
#define FLASHLAB_NAMES_208 FLASHLAB_NAMES_200 ", %100, %101, %102, %103"
#define FLASHLAB_NAMES_216 FLASHLAB_NAMES_208 ", %104, %105, %106, %107"
#define FLASHLAB_NAMES_224 FLASHLAB_NAMES_216 ", %108, %109, %110, %111"
#define FLASHLAB_NAMES_232 FLASHLAB_NAMES_224 ", %112, %113, %114, %115"
#define FLASHLAB_NAMES_240 FLASHLAB_NAMES_232 ", %116, %117, %118, %119"
#define FLASHLAB_NAMES_248 FLASHLAB_NAMES_240 ", %120, %121, %122, %123"
#define FLASHLAB_NAMES_256 FLASHLAB_NAMES_248 ", %124, %125, %126, %127"
// … and the operands.
#define FLASHLAB_D_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define FLASHLAB_D_16 FLASHLAB_D_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define FLASHLAB_D_24 FLASHLAB_D_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define FLASHLAB_D_32 FLASHLAB_D_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define FLASHLAB_D_40 FLASHLAB_D_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define FLASHLAB_D_48 FLASHLAB_D_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define FLASHLAB_D_56 FLASHLAB_D_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define FLASHLAB_D_64 FLASHLAB_D_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define FLASHLAB_D_72 FLASHLAB_D_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define FLASHLAB_D_80 FLASHLAB_D_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define FLASHLAB_D_88 FLASHLAB_D_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define FLASHLAB_D_96 FLASHLAB_D_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define FLASHLAB_D_104 FLASHLAB_D_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define FLASHLAB_D_112 FLASHLAB_D_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define FLASHLAB_D_120 FLASHLAB_D_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define FLASHLAB_D_128 FLASHLAB_D_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define FLASHLAB_D_136 FLASHLAB_D_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define FLASHLAB_D_144 FLASHLAB_D_136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define FLASHLAB_D_152 FLASHLAB_D_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define FLASHLAB_D_160 FLASHLAB_D_152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define FLASHLAB_D_168 FLASHLAB_D_160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define FLASHLAB_D_176 FLASHLAB_D_168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define FLASHLAB_D_184 FLASHLAB_D_176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define FLASHLAB_D_192 FLASHLAB_D_184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define FLASHLAB_D_200 FLASHLAB_D_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define FLASHLAB_D_208 FLASHLAB_D_200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define FLASHLAB_D_216 FLASHLAB_D_208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define FLASHLAB_D_224 FLASHLAB_D_216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define FLASHLAB_D_232 FLASHLAB_D_224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define FLASHLAB_D_240 FLASHLAB_D_232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define FLASHLAB_D_248 FLASHLAB_D_240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define FLASHLAB_D_256 FLASHLAB_D_248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// 9.7.15.5.2 wgmma.mma_async. setp turns `accumulate` into the predicate that the instruction takes; scales are 1 or -1.
#define FLASHLAB_WGMMA(N, INSTRUCTION, AFTER_D, ACCUMULATE, ...)                                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ACCUMULATE ", 0;\n"                                      \
               "wgmma.mma_async.sync.aligned.m64n" #N INSTRUCTION " {" FLASHLAB_NAMES_##N "}, " AFTER_D ";\n}" \
               : FLASHLAB_D_##N : __VA_ARGS__)

// One N. P0 to P8 are the numbers of the operands after the registers of D.
#define FLASHLAB_WGMMA_SHAPE(N, P0, P1, P2, P3, P4, P5, P6, P7, P8)                                                            \
  template <>                                                                                                                  \
  struct Shape<N> {                                                                                                            \
    template <class In, int TRANSPOSE_A, int TRANSPOSE_B, int SCALE_A, int SCALE_B>                                            \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], unsigned long long a, unsigned long long b, int accumulate) { \
      if constexpr (SAME<In, __half>)                                                                                          \
        FLASHLAB_WGMMA(N, "k16.f32.f16.f16", "%" #P0 ", %" #P1 ", p, %" #P3 ", %" #P4 ", %" #P5 ", %" #P6, P2, "l"(a), "l"(b), \
                       "r"(accumulate), "n"(SCALE_A), "n"(SCALE_B), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));                       \
      else if constexpr (SAME<In, __nv_bfloat16>)                                                                              \
        FLASHLAB_WGMMA(N, "k16.f32.bf16.bf16", "%" #P0 ", %" #P1 ", p, %" #P3 ", %" #P4 ", %" #P5 ", %" #P6, P2, "l"(a),       \
                       "l"(b), "r"(accumulate), "n"(SCALE_A), "n"(SCALE_B), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));               \
      else if constexpr (SAME<In, __nv_fp8_e4m3>)                                                                              \
        FLASHLAB_WGMMA(N, "k32.f32.e4m3.e4m3", "%" #P0 ", %" #P1 ", p, %" #P3 ", %" #P4, P2, "l"(a), "l"(b), "r"(accumulate),  \
                       "n"(SCALE_A), "n"(SCALE_B));                                                                            \
      else                                                                                                                     \
        FLASHLAB_WGMMA(N, "k32.f32.e5m2.e5m2", "%" #P0 ", %" #P1 ", p, %" #P3 ", %" #P4, P2, "l"(a), "l"(b), "r"(accumulate),  \
                       "n"(SCALE_A), "n"(SCALE_B));                                                                            \
    }                                                                                                                          \
    template <class In, int TRANSPOSE_B, int SCALE_A, int SCALE_B>                                                             \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b,                 \
                                              int accumulate) {                                                                \
      if constexpr (SAME<In, __half>)                                                                                          \
        FLASHLAB_WGMMA(N, "k16.f32.f16.f16",                                                                                   \
                       "{%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, %" #P6 ", %" #P7 ", %" #P8, P5, "r"(a[0]),      \
                       "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(SCALE_A), "n"(SCALE_B),                   \
                       "n"(TRANSPOSE_B));                                                                                      \
      else if constexpr (SAME<In, __nv_bfloat16>)                                                                              \
        FLASHLAB_WGMMA(N, "k16.f32.bf16.bf16",                                                                                 \
                       "{%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, %" #P6 ", %" #P7 ", %" #P8, P5, "r"(a[0]),      \
                       "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(SCALE_A), "n"(SCALE_B),                   \
                       "n"(TRANSPOSE_B));                                                                                      \
      else if constexpr (SAME<In, __nv_fp8_e4m3>)                                                                              \
        FLASHLAB_WGMMA(N, "k32.f32.e4m3.e4m3",                                                                                 \
                       "{%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, %" #P6 ", %" #P7, P5, "r"(a[0]), "r"(a[1]),     \
                       "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(SCALE_A), "n"(SCALE_B));                             \
      else                                                                                                                     \
        FLASHLAB_WGMMA(N, "k32.f32.e5m2.e5m2",                                                                                 \
                       "{%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, %" #P6 ", %" #P7, P5, "r"(a[0]), "r"(a[1]),     \
                       "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(SCALE_A), "n"(SCALE_B));                             \
    }                                                                                                                          \
  };
FLASHLAB_WGMMA_SHAPE(8, 4, 5, 6, 7, 8, 9, 10, 11, 12)
FLASHLAB_WGMMA_SHAPE(16, 8, 9, 10, 11, 12, 13, 14, 15, 16)
FLASHLAB_WGMMA_SHAPE(24, 12, 13, 14, 15, 16, 17, 18, 19, 20)
FLASHLAB_WGMMA_SHAPE(32, 16, 17, 18, 19, 20, 21, 22, 23, 24)
FLASHLAB_WGMMA_SHAPE(40, 20, 21, 22, 23, 24, 25, 26, 27, 28)
FLASHLAB_WGMMA_SHAPE(48, 24, 25, 26, 27, 28, 29, 30, 31, 32)
FLASHLAB_WGMMA_SHAPE(56, 28, 29, 30, 31, 32, 33, 34, 35, 36)
FLASHLAB_WGMMA_SHAPE(64, 32, 33, 34, 35, 36, 37, 38, 39, 40)
FLASHLAB_WGMMA_SHAPE(72, 36, 37, 38, 39, 40, 41, 42, 43, 44)
FLASHLAB_WGMMA_SHAPE(80, 40, 41, 42, 43, 44, 45, 46, 47, 48)
FLASHLAB_WGMMA_SHAPE(88, 44, 45, 46, 47, 48, 49, 50, 51, 52)
FLASHLAB_WGMMA_SHAPE(96, 48, 49, 50, 51, 52, 53, 54, 55, 56)
FLASHLAB_WGMMA_SHAPE(104, 52, 53, 54, 55, 56, 57, 58, 59, 60)
FLASHLAB_WGMMA_SHAPE(112, 56, 57, 58, 59, 60, 61, 62, 63, 64)
FLASHLAB_WGMMA_SHAPE(120, 60, 61, 62, 63, 64, 65, 66, 67, 68)
FLASHLAB_WGMMA_SHAPE(128, 64, 65, 66, 67, 68, 69, 70, 71, 72)
FLASHLAB_WGMMA_SHAPE(136, 68, 69, 70, 71, 72, 73, 74, 75, 76)
FLASHLAB_WGMMA_SHAPE(144, 72, 73, 74, 75, 76, 77, 78, 79, 80)
FLASHLAB_WGMMA_SHAPE(152, 76, 77, 78, 79, 80, 81, 82, 83, 84)
FLASHLAB_WGMMA_SHAPE(160, 80, 81, 82, 83, 84, 85, 86, 87, 88)
FLASHLAB_WGMMA_SHAPE(168, 84, 85, 86, 87, 88, 89, 90, 91, 92)
FLASHLAB_WGMMA_SHAPE(176, 88, 89, 90, 91, 92, 93, 94, 95, 96)
FLASHLAB_WGMMA_SHAPE(184, 92, 93, 94, 95, 96, 97, 98, 99, 100)
FLASHLAB_WGMMA_SHAPE(192, 96, 97, 98, 99, 100, 101, 102, 103, 104)
FLASHLAB_WGMMA_SHAPE(200, 100, 101, 102, 103, 104, 105, 106, 107, 108)
FLASHLAB_WGMMA_SHAPE(208, 104, 105, 106, 107, 108, 109, 110, 111, 112)
FLASHLAB_WGMMA_SHAPE(216, 108, 109, 110, 111, 112, 113, 114, 115, 116)
FLASHLAB_WGMMA_SHAPE(224, 112, 113, 114, 115, 116, 117, 118, 119, 120)
FLASHLAB_WGMMA_SHAPE(232, 116, 117, 118, 119, 120, 121, 122, 123, 124)
FLASHLAB_WGMMA_SHAPE(240, 120, 121, 122, 123, 124, 125, 126, 127, 128)
FLASHLAB_WGMMA_SHAPE(248, 124, 125, 126, 127, 128, 129, 130, 131, 132)
FLASHLAB_WGMMA_SHAPE(256, 128, 129, 130, 131, 132, 133, 134, 135, 136)
#undef FLASHLAB_NAMES_8
#undef FLASHLAB_NAMES_16
#undef FLASHLAB_NAMES_24
#undef FLASHLAB_NAMES_32
#undef FLASHLAB_NAMES_40
#undef FLASHLAB_NAMES_48
#undef FLASHLAB_NAMES_56
#undef FLASHLAB_NAMES_64
#undef FLASHLAB_NAMES_72
#undef FLASHLAB_NAMES_80
#undef FLASHLAB_NAMES_88
#undef FLASHLAB_NAMES_96
#undef FLASHLAB_NAMES_104
#undef FLASHLAB_NAMES_112
#undef FLASHLAB_NAMES_120
#undef FLASHLAB_NAMES_128
#undef FLASHLAB_NAMES_136
#undef FLASHLAB_NAMES_144
#undef FLASHLAB_NAMES_152
#undef FLASHLAB_NAMES_160
#undef FLASHLAB_NAMES_168
#undef FLASHLAB_NAMES_176
#undef FLASHLAB_NAMES_184
#undef FLASHLAB_NAMES_192
#undef FLASHLAB_NAMES_200
#undef FLASHLAB_NAMES_208
#undef FLASHLAB_NAMES_216
#undef FLASHLAB_NAMES_224
#undef FLASHLAB_NAMES_232
#undef FLASHLAB_NAMES_240
#undef FLASHLAB_NAMES_248
#undef FLASHLAB_NAMES_256
#undef FLASHLAB_D_8
#undef FLASHLAB_D_16
#undef FLASHLAB_D_24
#undef FLASHLAB_D_32
#undef FLASHLAB_D_40
#undef FLASHLAB_D_48
#undef FLASHLAB_D_56
#undef FLASHLAB_D_64
#undef FLASHLAB_D_72
#undef FLASHLAB_D_80
#undef FLASHLAB_D_88
#undef FLASHLAB_D_96
#undef FLASHLAB_D_104
#undef FLASHLAB_D_112
#undef FLASHLAB_D_120
#undef FLASHLAB_D_128
#undef FLASHLAB_D_136
#undef FLASHLAB_D_144
#undef FLASHLAB_D_152
#undef FLASHLAB_D_160
#undef FLASHLAB_D_168
#undef FLASHLAB_D_176
#undef FLASHLAB_D_184
#undef FLASHLAB_D_192
#undef FLASHLAB_D_200
#undef FLASHLAB_D_208
#undef FLASHLAB_D_216
#undef FLASHLAB_D_224
#undef FLASHLAB_D_232
#undef FLASHLAB_D_240
#undef FLASHLAB_D_248
#undef FLASHLAB_D_256
#undef FLASHLAB_WGMMA
#undef FLASHLAB_WGMMA_SHAPE

template <class In, Major A, Major B, int SCALE_A, int SCALE_B>
__device__ constexpr void check() {
  constexpr bool BITS_16 = SAME<In, __half> || SAME<In, __nv_bfloat16>;
  static_assert(BITS_16 || SAME<In, __nv_fp8_e4m3> || SAME<In, __nv_fp8_e5m2>,
                "wgmma takes __half, __nv_bfloat16, __nv_fp8_e4m3 and __nv_fp8_e5m2");
  static_assert(BITS_16 || (A == Major::K && B == Major::K), "wgmma takes 8-bit types K-major only");
  static_assert((SCALE_A == 1 || SCALE_A == -1) && (SCALE_B == 1 || SCALE_B == -1), "SCALE_A and SCALE_B must be 1 or -1");
}

}  // namespace wgmma_detail

// 9.7.15.5.2 wgmma.mma_async, A and B in shared memory: D = scale A · B, plus D if `accumulate`. It reads memory, yet its asm has
// no memory clobber, which would keep the compiler from scheduling other code between two of them: wgmma_fence before it and
// wgmma_commit_group after it have one, and accesses to its operands must stay outside of the two anyway.
template <int N, class In, Major A = Major::K, Major B = Major::K, int SCALE_A = 1, int SCALE_B = 1>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], unsigned long long desc_a, unsigned long long desc_b,
                                         bool accumulate) {
  wgmma_detail::check<In, A, B, SCALE_A, SCALE_B>();
  wgmma_detail::Shape<N>::template ss<In, static_cast<int>(A), static_cast<int>(B), SCALE_A, SCALE_B>(d, desc_a, desc_b,
                                                                                                      accumulate);
}

// A in registers.
template <int N, class In, Major B = Major::K, int SCALE_A = 1, int SCALE_B = 1>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long desc_b,
                                         bool accumulate) {
  wgmma_detail::check<In, Major::K, B, SCALE_A, SCALE_B>();
  wgmma_detail::Shape<N>::template rs<In, static_cast<int>(B), SCALE_A, SCALE_B>(d, a, desc_b, accumulate);
}

}  // namespace ptx
