// Replaces CUDA's <mma.h>: nvcuda::wmma for __half and __nv_bfloat16 (CUDA C++ Programming Guide, "Warp matrix functions"), in the
// shapes 16×16×16, 32×8×16 and 8×32×16.
//
// CUDA does not specify which lane holds which elements. Here it is the mapping of sm_80 and newer for 16×16×16, so that memory
// accesses are the same: operands are 8×8 matrices, loaded as by ldmatrix (9.7.14.5.15); an accumulator has the layout of two
// mma.m16n8k16 accumulators (9.7.14.5.8) side by side. Elements 2 · i and 2 · i + 1 are a lane's part of the fragment's matrix i.
//
// Loads and stores do not synchronise: each lane moves its own elements when it reaches the call, so that a missing __syncwarp
// before or after is not hidden. Only mma_sync synchronises the warp.
#pragma once
#include "matrix.h"

namespace nvcuda::wmma {

struct row_major;
struct col_major;
struct matrix_a;
struct matrix_b;
struct accumulator;
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment;   // only the specialisations below exist

}  // namespace nvcuda::wmma

namespace emu {

template <typename T>
constexpr bool IS_OPERAND = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;
template <int M, int N, int K>
constexpr bool IS_WMMA_SHAPE = K == K_STEP && ((M == 16 && N == 16) || (M == 32 && N == 8) || (M == 8 && N == 32));

// A matrix of a fragment starts at (line, position): a lane holds two adjacent positions of a line. For operands, positions are
// along k and lines along m or n; for accumulators, lines are along m and positions along n.
struct Start {
  int line, position;
};
template <int LINES, int POSITIONS>
struct OperandLayout {
  static constexpr int MATRICES = LINES * POSITIONS / (MATRIX_ROWS * MATRIX_ROWS);
  static constexpr Start start(int i) { return {i / 2 * MATRIX_ROWS, i % 2 * MATRIX_ROWS}; }
};
template <int LINES, int POSITIONS>
struct AccumulatorLayout {
  static constexpr int MATRICES = LINES * POSITIONS / (MATRIX_ROWS * MATRIX_ROWS);
  static constexpr int ABOVE = LINES >= 16 ? 2 : 1;   // 8×8 matrices in the height of one instruction's tile
  static constexpr Start start(int i) {
    return {(i % ABOVE + i / ABOVE * 8 / POSITIONS * ABOVE) * MATRIX_ROWS, i / ABOVE * MATRIX_ROWS % POSITIONS};
  }
};

template <typename T, int NUM_ELEMENTS>
struct Fragment {
  using element_type = T;
  using storage_element_type = T;
  static constexpr int num_elements = NUM_ELEMENTS;
  static constexpr int num_storage_elements = NUM_ELEMENTS;
  T x[NUM_ELEMENTS];
};
// As in CUDA, operands of __half always have 16 elements: a lane's elements are repeated if there are fewer.
template <typename T, int SHARE>
using Operand = Fragment<T, std::is_same_v<T, __half> ? 16 : SHARE>;

constexpr unsigned WMMA_ALIGNMENT = 32;   // of a matrix in memory, in bytes
constexpr unsigned WMMA_LDM_BYTES = 16;   // the leading dimension must be a multiple of this
template <typename T>
__forceinline__ void check_matrix(const T* matrix, unsigned ldm, const char* name) {
  const unsigned past = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(matrix) % WMMA_ALIGNMENT);
  if (past != 0) fail("%s: wanted a matrix that starts on a 32-byte boundary, got %p, %u bytes past one", name, matrix, past);
  if (ldm * sizeof(T) % WMMA_LDM_BYTES != 0) {
    fail("%s: wanted a leading dimension that is a multiple of %u elements (16 bytes), got %u", name,
         static_cast<unsigned>(WMMA_LDM_BYTES / sizeof(T)), ldm);
  }
}

// Copies a lane's elements from or to memory in which lines and positions are `line_stride` and `position_stride` elements apart.
template <typename Layout, typename T>
EMULATED inline void read_share(T* x, const T* matrix, unsigned line_stride, unsigned position_stride, int lane) {
  for (int i = 0; i < Layout::MATRICES; ++i) {
    const T* source = matrix + static_cast<std::size_t>(Layout::start(i).line + row_of(lane)) * line_stride +
                      static_cast<std::size_t>(Layout::start(i).position + column_of(lane)) * position_stride;
    x[2 * i] = source[0];
    x[2 * i + 1] = source[position_stride];
  }
}
template <typename Layout, typename T>
EMULATED inline void write_share(const T* x, T* matrix, unsigned line_stride, unsigned position_stride, int lane) {
  for (int i = 0; i < Layout::MATRICES; ++i) {
    T* target = matrix + static_cast<std::size_t>(Layout::start(i).line + row_of(lane)) * line_stride +
                static_cast<std::size_t>(Layout::start(i).position + column_of(lane)) * position_stride;
    target[0] = x[2 * i];
    target[position_stride] = x[2 * i + 1];
  }
}

// Reports a lane's accesses to the detector: two elements together where they are adjacent.
template <typename Layout, typename T, typename Report>
__forceinline__ void report_share(T* matrix, unsigned line_stride, unsigned position_stride, int lane, Report report) {
  for (int i = 0; i < Layout::MATRICES; ++i) {
    T* first = matrix + static_cast<std::size_t>(Layout::start(i).line + row_of(lane)) * line_stride +
               static_cast<std::size_t>(Layout::start(i).position + column_of(lane)) * position_stride;
    if (position_stride == 1) {
      report(first, 2 * sizeof(T));
    } else {
      report(first, sizeof(T));
      report(first + position_stride, sizeof(T));
    }
  }
}

// An operand in shared memory is loaded with ldmatrix, four matrices per instruction: lanes 8 · i to 8 · i + 7 supply the row addresses
// of matrix i. A row is 16 contiguous bytes; where memory is contiguous along lines, the matrices are loaded transposed.
template <typename Layout, typename T>
__forceinline__ void report_operand(const T* matrix, unsigned line_stride, unsigned position_stride, int lane) {
  if (!is_shared(matrix)) {
    report_share<Layout>(matrix, line_stride, position_stride, lane,
                         [](const T* p, unsigned bytes) __attribute__((always_inline)) { on_read(p, bytes); });
    return;
  }
  constexpr int AN_INSTRUCTION = 4;
  for (int first = 0; first < Layout::MATRICES; first += AN_INSTRUCTION) {
    const int i = first + lane / MATRIX_ROWS;
    if (i >= Layout::MATRICES) continue;
    const T* row = matrix + static_cast<std::size_t>(Layout::start(i).line) * line_stride +
                   static_cast<std::size_t>(Layout::start(i).position) * position_stride +
                   static_cast<std::size_t>(lane % MATRIX_ROWS) * (position_stride == 1 ? line_stride : position_stride);
    on_read(row, ROW_BYTES, Kind::matrix);
  }
}

template <typename Layout, typename T, int NUM_ELEMENTS>
__forceinline__ void load_operand(Fragment<T, NUM_ELEMENTS>& fragment, const T* matrix, unsigned ldm,
                                  bool positions_are_neighbours) {
  check_matrix(matrix, ldm, "wmma::load_matrix_sync");
  const int lane = lane_id();
  const unsigned line_stride = positions_are_neighbours ? ldm : 1;
  const unsigned position_stride = positions_are_neighbours ? 1 : ldm;
  if (detecting()) report_operand<Layout>(matrix, line_stride, position_stride, lane);
  read_share<Layout>(fragment.x, matrix, line_stride, position_stride, lane);
  constexpr int SHARE = 2 * Layout::MATRICES;
  for (int i = SHARE; i < NUM_ELEMENTS; ++i) fragment.x[i] = fragment.x[i - SHARE];
}

template <typename A, typename B, typename C, typename D>
struct WmmaRegisters {
  const A* a;
  const B* b;
  const C* c;
  D* d;
};

template <typename T, int M, int N, typename A, typename B, typename C, typename D>
EMULATED inline void wmma_of_warp(void* const (&of_lane)[WARP]) {
  using LayoutA = OperandLayout<M, K_STEP>;
  using LayoutB = OperandLayout<N, K_STEP>;
  using LayoutC = AccumulatorLayout<M, N>;
  using Registers = WmmaRegisters<A, B, C, D>;
  Operands<M, N> operands;
  for (int lane = 0; lane < WARP; ++lane) {
    const Registers& mine = *static_cast<const Registers*>(of_lane[lane]);
    for (int i = 0; i < LayoutA::MATRICES; ++i) {
      const Start start = LayoutA::start(i);
      unsigned short* pair = &operands.a[start.line + row_of(lane)][start.position + column_of(lane)];
      __builtin_memcpy(pair, &mine.a->x[2 * i], 2 * sizeof(T));
    }
    for (int i = 0; i < LayoutB::MATRICES; ++i) {
      const Start start = LayoutB::start(i);
      const int n = start.line + row_of(lane);
      const int k = start.position + column_of(lane);
      for (int j = 0; j < 2; ++j) operands.b[k + j][n] = bits_as<unsigned short>(mine.b->x[2 * i + j]);
    }
  }
  alignas(16) float sum[M][N];
  multiply<T>(operands, sum);
  for (int lane = 0; lane < WARP; ++lane) {
    const Registers& mine = *static_cast<const Registers*>(of_lane[lane]);
    for (int i = 0; i < LayoutC::MATRICES; ++i) {
      const Start start = LayoutC::start(i);
      for (int j = 0; j < 2; ++j) {
        const float product = sum[start.line + row_of(lane)][start.position + column_of(lane) + j];
        mine.d->x[2 * i + j] = static_cast<float>(mine.c->x[2 * i + j]) + product;
      }
    }
  }
}

}  // namespace emu

namespace nvcuda::wmma {

template <int M, int N, int K, typename T, typename Layout>
  requires(emu::IS_WMMA_SHAPE<M, N, K> && emu::IS_OPERAND<T>)
struct fragment<matrix_a, M, N, K, T, Layout> : emu::Operand<T, M * K / emu::WARP> {};
template <int M, int N, int K, typename T, typename Layout>
  requires(emu::IS_WMMA_SHAPE<M, N, K> && emu::IS_OPERAND<T>)
struct fragment<matrix_b, M, N, K, T, Layout> : emu::Operand<T, N * K / emu::WARP> {};
template <int M, int N, int K, typename T>
  requires(emu::IS_WMMA_SHAPE<M, N, K> && (std::is_same_v<T, float> || std::is_same_v<T, __half>))
struct fragment<accumulator, M, N, K, T> : emu::Fragment<T, M * N / emu::WARP> {};

template <typename T, int NUM_ELEMENTS>
__forceinline__ void fill_fragment(emu::Fragment<T, NUM_ELEMENTS>& fragment, std::type_identity_t<T> value) {
  for (int i = 0; i < NUM_ELEMENTS; ++i) fragment.x[i] = value;
}

template <int M, int N, int K, typename T, typename Layout>
__forceinline__ void load_matrix_sync(fragment<matrix_a, M, N, K, T, Layout>& a, const T* matrix, unsigned ldm) {
  emu::load_operand<emu::OperandLayout<M, K>>(a, matrix, ldm, std::is_same_v<Layout, row_major>);
}
template <int M, int N, int K, typename T, typename Layout>
__forceinline__ void load_matrix_sync(fragment<matrix_b, M, N, K, T, Layout>& b, const T* matrix, unsigned ldm) {
  emu::load_operand<emu::OperandLayout<N, K>>(b, matrix, ldm, std::is_same_v<Layout, col_major>);
}
template <int M, int N, int K, typename T>
__forceinline__ void load_matrix_sync(fragment<accumulator, M, N, K, T>& c, const T* matrix, unsigned ldm, layout_t layout) {
  using Layout = emu::AccumulatorLayout<M, N>;
  emu::check_matrix(matrix, ldm, "wmma::load_matrix_sync");
  const int lane = emu::lane_id();
  const unsigned line_stride = layout == mem_row_major ? ldm : 1;
  const unsigned position_stride = layout == mem_row_major ? 1 : ldm;
  if (emu::detecting()) {
    emu::report_share<Layout>(matrix, line_stride, position_stride, lane,
                              [](const T* p, unsigned bytes) __attribute__((always_inline)) { emu::on_read(p, bytes); });
  }
  emu::read_share<Layout>(c.x, matrix, line_stride, position_stride, lane);
}
template <int M, int N, int K, typename T>
__forceinline__ void store_matrix_sync(T* matrix, const fragment<accumulator, M, N, K, T>& c, unsigned ldm, layout_t layout) {
  using Layout = emu::AccumulatorLayout<M, N>;
  emu::check_matrix(matrix, ldm, "wmma::store_matrix_sync");
  const int lane = emu::lane_id();
  const unsigned line_stride = layout == mem_row_major ? ldm : 1;
  const unsigned position_stride = layout == mem_row_major ? 1 : ldm;
  if (emu::detecting()) {
    emu::report_share<Layout>(matrix, line_stride, position_stride, lane,
                              [](T* p, unsigned bytes) __attribute__((always_inline)) { emu::on_write(p, bytes); });
  }
  emu::write_share<Layout>(c.x, matrix, line_stride, position_stride, lane);
}

// d = a · b + c, accumulated in float.
template <int M, int N, int K, typename T, typename LayoutA, typename LayoutB, typename TC, typename TD>
__forceinline__ void mma_sync(fragment<accumulator, M, N, K, TD>& d, const fragment<matrix_a, M, N, K, T, LayoutA>& a,
                              const fragment<matrix_b, M, N, K, T, LayoutB>& b, const fragment<accumulator, M, N, K, TC>& c) {
  using A = emu::Operand<T, M * K / emu::WARP>;
  using B = emu::Operand<T, N * K / emu::WARP>;
  using C = emu::Fragment<TC, M * N / emu::WARP>;
  using D = emu::Fragment<TD, M * N / emu::WARP>;
  emu::WmmaRegisters<A, B, C, D> mine = {&a, &b, &c, &d};
  emu::warp_collective(emu::FULL_WARP, &mine, emu::wmma_of_warp<T, M, N, A, B, C, D>, "wmma::mma_sync");
}

}  // namespace nvcuda::wmma
