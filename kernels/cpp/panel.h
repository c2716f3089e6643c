// SPDX-License-Identifier: Apache-2.0
// C = A B or C += A B for a handful of rows of A: the register-blocked core of both products of
// attention. B's rows are read once for all rows of A, C stays in registers.
#pragma once

#include "vec.h"

constexpr int ROWS = 6;                // of A at once
constexpr int PARTS = W == 8 ? 2 : 4;  // registers of B's row at once: AVX2 has half as many
constexpr int COLUMNS = PARTS * W;

template <int Rows, int Parts>
static inline void panel(const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                         int64_t ldc, int64_t depth, bool add) {
  vf sum[Rows][Parts];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int p = 0; p < Parts; p++) sum[r][p] = add ? load(c + r * ldc + p * W) : vf{};
  for (int64_t k = 0; k < depth; k++) {
    vf row[Parts];
#pragma GCC unroll 4
    for (int p = 0; p < Parts; p++) row[p] = load(b + k * ldb + p * W);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      vf x = splat(a[r * lda + k]);
#pragma GCC unroll 4
      for (int p = 0; p < Parts; p++) sum[r][p] += x * row[p];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int p = 0; p < Parts; p++) store(c + r * ldc + p * W, sum[r][p]);
}

template <int Parts>
static inline void panel_rows(int64_t rows, const float* a, int64_t lda, const float* b,
                              int64_t ldb, float* c, int64_t ldc, int64_t depth, bool add) {
  for (; rows >= ROWS; rows -= ROWS, a += ROWS * lda, c += ROWS * ldc)
    panel<ROWS, Parts>(a, lda, b, ldb, c, ldc, depth, add);
  switch (rows) {
    case 5: return panel<5, Parts>(a, lda, b, ldb, c, ldc, depth, add);
    case 4: return panel<4, Parts>(a, lda, b, ldb, c, ldc, depth, add);
    case 3: return panel<3, Parts>(a, lda, b, ldb, c, ldc, depth, add);
    case 2: return panel<2, Parts>(a, lda, b, ldb, c, ldc, depth, add);
    case 1: return panel<1, Parts>(a, lda, b, ldb, c, ldc, depth, add);
  }
}

// C [rows, columns] (+)= A [rows, depth] B [depth, columns]; columns a multiple of W.
static inline void multiply(int64_t rows, int64_t columns, const float* a, int64_t lda,
                            const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth,
                            bool add) {
  int64_t left = columns / W, at = 0;
  while (left > 0) {
    // Five registers are three and two, not four and one: a narrow panel wastes B's loads.
    int64_t parts = left <= PARTS ? left : left < 2 * PARTS ? (left + 1) / 2 : PARTS;
    switch (parts) {
      case 4: panel_rows<4>(rows, a, lda, b + at, ldb, c + at, ldc, depth, add); break;
      case 3: panel_rows<3>(rows, a, lda, b + at, ldb, c + at, ldc, depth, add); break;
      case 2: panel_rows<2>(rows, a, lda, b + at, ldb, c + at, ldc, depth, add); break;
      case 1: panel_rows<1>(rows, a, lda, b + at, ldb, c + at, ldc, depth, add); break;
    }
    at += parts * W;
    left -= parts;
  }
}
