// SPDX-License-Identifier: Apache-2.0
// Matrix products C = A B and C += A B for a few rows of A, blocked for registers: the core of both
// products of attention. Rows of B are read once for all rows of A; C stays in fp32 registers.
#pragma once

#include "vec.h"

constexpr int ROWS = 6;                // rows of A per block
constexpr int PARTS = W == 8 ? 2 : 4;  // registers of a row of B per block; AVX2 has half as many
constexpr int COLUMNS = PARTS * W;

// Elements of A and B: single fp32 numbers.
struct Single {
  typedef float Number;
  typedef vf Register;
  static constexpr int64_t DEPTHS = 1;  // depths of the product per number
  static vf add(vf sum, float a, vf b) { return sum + splat(a) * b; }
};
#ifdef HAS_BF16_PRODUCTS
// Elements of two bf16 numbers at consecutive depths: twice the products per instruction.
struct Pair {
  typedef uint32_t Number;
  typedef vu Register;
  static constexpr int64_t DEPTHS = 2;
  static vf add(vf sum, uint32_t a, vu b) { return add_bf16_products(sum, a, b); }
};
// bf16 rows are multiplied directly, all others in fp32.
template <class T>
using Numbers = std::conditional_t<std::is_same_v<T, bf16>, Pair, Single>;
#else
template <class T>
using Numbers = Single;
#endif

template <class N, int Rows, int Parts>
static inline void panel(const typename N::Number* a, int64_t lda, const typename N::Number* b,
                         int64_t ldb, float* c, int64_t ldc, int64_t depth, bool add) {
  typedef typename N::Register Register;
  vf sum[Rows][Parts];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int p = 0; p < Parts; p++) sum[r][p] = add ? load(c + r * ldc + p * W) : vf{};
  for (int64_t k = 0; k < depth; k++) {
    Register row[Parts];
#pragma GCC unroll 4
    for (int p = 0; p < Parts; p++) row[p] = load_as<Register>(b + k * ldb + p * W);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 4
      for (int p = 0; p < Parts; p++) sum[r][p] = N::add(sum[r][p], a[r * lda + k], row[p]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int p = 0; p < Parts; p++) store(c + r * ldc + p * W, sum[r][p]);
}

template <class N, int Parts>
static inline void panel_rows(int64_t rows, const typename N::Number* a, int64_t lda,
                              const typename N::Number* b, int64_t ldb, float* c, int64_t ldc,
                              int64_t depth, bool add) {
  for (; rows >= ROWS; rows -= ROWS, a += ROWS * lda, c += ROWS * ldc)
    panel<N, ROWS, Parts>(a, lda, b, ldb, c, ldc, depth, add);
  switch (rows) {
    case 5: return panel<N, 5, Parts>(a, lda, b, ldb, c, ldc, depth, add);
    case 4: return panel<N, 4, Parts>(a, lda, b, ldb, c, ldc, depth, add);
    case 3: return panel<N, 3, Parts>(a, lda, b, ldb, c, ldc, depth, add);
    case 2: return panel<N, 2, Parts>(a, lda, b, ldb, c, ldc, depth, add);
    case 1: return panel<N, 1, Parts>(a, lda, b, ldb, c, ldc, depth, add);
  }
}

// C [rows, columns] (+)= A [rows, depth] B [depth, columns]; `columns` is a multiple of W. `depth`
// and `lda` count numbers.
template <class N>
static inline void multiply(int64_t rows, int64_t columns, const typename N::Number* a,
                            int64_t lda, const typename N::Number* b, int64_t ldb, float* c,
                            int64_t ldc, int64_t depth, bool add) {
  int64_t left = columns / W, at = 0;
  while (left > 0) {
    // Split five registers into three and two: a panel of one would waste loads of B.
    int64_t parts = left <= PARTS ? left : left < 2 * PARTS ? (left + 1) / 2 : PARTS;
    switch (parts) {
      case 4: panel_rows<N, 4>(rows, a, lda, b + at, ldb, c + at, ldc, depth, add); break;
      case 3: panel_rows<N, 3>(rows, a, lda, b + at, ldb, c + at, ldc, depth, add); break;
      case 2: panel_rows<N, 2>(rows, a, lda, b + at, ldb, c + at, ldc, depth, add); break;
      case 1: panel_rows<N, 1>(rows, a, lda, b + at, ldb, c + at, ldc, depth, add); break;
    }
    at += parts * W;
    left -= parts;
  }
}

// Packs W channels of W keys, transposed, as a part of B [D, COLUMNS]; only `left` channels exist.
static inline void pack_keys(vf* square, int64_t left, float* to) {
  transpose(square);
#pragma GCC unroll 16
  for (int k = 0; k < W; k++)
    if (k < left) store(to + k * COLUMNS, square[k]);
}
#ifdef HAS_BF16_PRODUCTS
static inline void pack_keys(vf* square, int64_t left, uint32_t* to) {
  transpose(square);
#pragma GCC unroll 16
  for (int k = 0; k < W; k += 2) {
    const vu pairs = pairs_of(square[k], square[k + 1]);
    if (k < left) std::memcpy(to + k / 2 * COLUMNS, &pairs, sizeof(pairs));
  }
}
#endif
