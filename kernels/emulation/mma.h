// In the place of CUDA's <mma.h>: nvcuda::wmma for __half and __nv_bfloat16 (CUDA C++ Programming Guide, "Warp matrix
// functions"), in the shapes 16×16×16, 32×8×16 and 8×32×16.
//
// CUDA does not say which lane holds what. Here it is what sm_80 and newer do for 16×16×16, so that memory is touched as it is
// there: operands are 8×8 matrices, loaded like ldmatrix does (9.7.14.5.15); an accumulator lies like those of mma.m16n8k16
// (9.7.14.5.8), two side by side. Element 2 · i and the next are a lane's share of the fragment's matrix i.
//
// Loads and stores wait for nobody: each lane moves its own elements when it comes to them, so that a __syncwarp that is
// missing before or after is not made good for. Only mma_sync brings the warp together.
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
struct fragment;   // only what follows exists

}  // namespace nvcuda::wmma

namespace emu {

template <typename T>
constexpr bool IS_OPERAND = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;
template <int M, int N, int K>
constexpr bool IS_WMMA_SHAPE = K == K_STEP && ((M == 16 && N == 16) || (M == 32 && N == 8) || (M == 8 && N == 32));

// A matrix of a fragment starts at (line, position): a lane has two neighbouring positions of a line. Positions are k for
// operands, and lines m or n; accumulators have lines m and positions n.
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
  static constexpr int ABOVE = LINES >= 16 ? 2 : 1;   // matrices that make the height of one instruction's tile
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
// As in CUDA, operands of __half always have 16 elements: where a lane's share is smaller, it is repeated.
template <typename T, int SHARE>
using Operand = Fragment<T, std::is_same_v<T, __half> ? 16 : SHARE>;

constexpr unsigned WMMA_ALIGNMENT = 32;   // bytes, of a matrix
constexpr unsigned WMMA_LDM_BYTES = 16;   // a row's distance is a multiple
template <typename T>
__forceinline__ void check_matrix(const T* matrix, unsigned ldm, const char* name) {
  const unsigned past = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(matrix) % WMMA_ALIGNMENT);
  if (past != 0) fail("%s: wanted a matrix that starts on a 32-byte boundary, got %p, %u bytes past one", name, matrix, past);
  if (ldm * sizeof(T) % WMMA_LDM_BYTES != 0) {
    fail("%s: wanted a leading dimension that is a multiple of %u elements (16 bytes), got %u", name,
         static_cast<unsigned>(WMMA_LDM_BYTES / sizeof(T)), ldm);
  }
}

// A lane's elements, to or from memory where line and position are `line_stride` and `position_stride` elements apart.
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

// Tell the detector of a lane's accesses: two elements at once where they are neighbours.
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

// An operand from shared memory is loaded with ldmatrix, four matrices an instruction: lanes 8 · i and on name the rows of
// matrix i. A row is 16 bytes that are neighbours in memory, so the matrices come transposed where lines are.
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

// d = a · b + c, added up in float.
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
