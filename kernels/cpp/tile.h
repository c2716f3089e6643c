// SPDX-License-Identifier: Apache-2.0
// Products of a tile of one KV head's cached tokens with the queries that share the head.
#pragma once

#include "stored.h"

constexpr int64_t TILE = 32;                   // tokens
constexpr int64_t KEY_STRIDE = (TILE + 1) * W;  // one more token, to spread rows over L1's sets

// The stored rows of slots [from, from + n) of a head.
template <class T>
static inline void tile_rows(const Layer& layer, const int32_t* pages, int64_t head, int64_t from,
                             int64_t n, const T** row) {
  const int64_t step = layer.row_size;
  int64_t page = from / layer.block_size, offset = from % layer.block_size;
  for (int64_t i = 0; i < n; page++, offset = 0) {
    const T* at = (const T*)layer.row(pages[page], head, offset);
    const int64_t end = std::min(n, i + layer.block_size - offset);
    for (; i < end; i++, at += step) row[i] = at;
  }
}

// The same, decoded to fp32 (rows are 2 D apart), if pages store another type than that of new rows.
static inline void decoded_rows(const Layer& layer, const int32_t* pages, int64_t head,
                                int64_t from, int64_t n, float* to, const float** row) {
  const int64_t size = layer.head_size;
  for (int64_t i = 0; i < n; i++, to += 2 * size) {
    const int64_t page = pages[(from + i) / layer.block_size];
    const int64_t offset = (from + i) % layer.block_size;
    const float* scale = layer.row_scale ? layer.scale_of(page, head, offset) : nullptr;
    decode(layer, layer.row(page, head, offset), scale, layer.block_size, to, to + layer.value_at);
    row[i] = to;
  }
}

// Ranks of a tile's slots (-1: empty), and the distance that each key has moved since its write.
// A position is rank + `shift`. The newest unit of the `cached` tokens may be incomplete.
static inline void tile_words(const Layer& layer, const int32_t* pages, int64_t set, int64_t from,
                              int64_t n, int64_t cached, int32_t shift, bool moved, int32_t* rank,
                              int32_t* distance) {
  const int64_t unit = layer.unit, begin = from / unit, end = (from + n + unit - 1) / unit;
  int32_t of_unit[TILE], born[TILE];
  gather(layer, pages, set, (const int32_t*)layer.rank, of_unit, begin, end);
  if (moved) gather(layer, pages, set, (const int32_t*)layer.born, born, begin, end);
  for (int64_t i = n; i < TILE; i++) rank[i] = -1;
  for (int64_t i = 0; i < n && unit == 1; i++) {
    rank[i] = of_unit[i];
    if (moved) distance[i] = rank[i] < 0 ? 0 : born[i] - rank[i] - shift;
  }
  if (unit == 1) return;
  for (int64_t u = begin; u < end; u++) {
    const int64_t first = std::max(from, u * unit), last = std::min(from + n, (u + 1) * unit);
    const int32_t held = of_unit[u - begin], at = held * (int32_t)unit;
    for (int64_t slot = first; slot < last; slot++) {
      const int32_t place = at + (int32_t)(slot - u * unit);
      rank[slot - from] = held < 0 || place >= cached ? -1 : place;
      if (moved) distance[slot - from] = held < 0 ? 0 : born[u - begin] - at - shift;
    }
  }
}

// Lists the cos and sin that rotate a tile's rows by `distance` (null: no rotation). Pads both
// arrays to whole registers with readable addresses.
template <class T>
static inline void tile_rotation(const Layer& layer, const int32_t* distance, int64_t n,
                                 const T** row, const float** rotation) {
  const int64_t step = 2 * layer.half;
  for (int64_t i = 0; i < n && distance; i++) rotation[i] = layer.rotation + distance[i] * step;
  for (int64_t i = n; i < round_up(n, W); i++) row[i] = row[0], rotation[i] = layer.rotation;
}

// Prefetches `n` elements into L1.
template <class T>
static inline void prefetch(const T* from, int64_t n) {
  for (int64_t byte = 0; byte < (int64_t)sizeof(T) * n; byte += 64)
    __builtin_prefetch((const char*)from + byte);
}
// Prefetches K and V of a row.
template <class T>
static inline void prefetch_row(const T* row, int64_t head_size) {
  prefetch(row, 2 * head_size);
}

// Rotates one key in fp32, into blocks of W channels. `Parts` is half / W if known, else 0.
template <int Parts, class T>
static inline void turn_key(const T* from, const float* rotation, int64_t half, float* to) {
  const int64_t parts = Parts ? Parts : half / W;
#pragma GCC unroll 4
  for (int64_t p = 0; p < parts; p++) {
    vf x = held(load(from + p * W)), y = held(load(from + half + p * W));
    vf cos = held(load(rotation + p * W)), sin = held(load(rotation + half + p * W));
    store(to + p * KEY_STRIDE, x * cos - y * sin);
    store(to + (parts + p) * KEY_STRIDE, y * cos + x * sin);
  }
}

// Rotates keys to their present positions: fp32 [width / W, TILE + 1, W], in blocks of W channels.
// `next` are rows of the next tile to prefetch, or null.
template <int Parts, class T>
static inline void turned_keys(const Layer& layer, const T* const* row, const T* const* next,
                               const int32_t* distance, int64_t n, float* keys) {
  const int64_t half = Parts ? Parts * W : layer.half;
  for (int64_t i = 0; i < n; i++) {
    if (next) prefetch_row(next[i], 2 * half);
    turn_key<Parts>(row[i], layer.rotation + (int64_t)distance[i] * 2 * half, half, keys + i * W);
  }
}
// Rotates keys as fp32 rows of `width`, listed in `turned` and padded like `row`.
template <class T>
static inline void turned_rows(const Layer& layer, const T* const* row, const T* const* next,
                               const int32_t* distance, int64_t n, int64_t width, float* keys,
                               const float** turned) {
  for (int64_t i = 0; i < n; i++) {
    float* to = keys + i * width;
    if (next) prefetch(next[i], layer.row_size);
    widen_row(to, row[i], layer.head_size);
    rotate(layer, to, distance[i]);
    turned[i] = to;
  }
  for (int64_t i = n; i < round_up(n, W); i++) turned[i] = turned[0];
}
template <class T>
static inline void tile_keys(const Layer& layer, const T* const* row, const T* const* next,
                             const int32_t* distance, int64_t n, int64_t width, float* keys) {
  static thread_local Scratch scratch;
  const int64_t size = layer.head_size, half = layer.half;
  if (distance && layer.turns_by_registers()) {
    if (half == 2 * W) return turned_keys<2>(layer, row, next, distance, n, keys);
    if (half == 4 * W) return turned_keys<4>(layer, row, next, distance, n, keys);
    return turned_keys<0>(layer, row, next, distance, n, keys);
  }
  float* plain = scratch.take(width);
  for (int64_t i = 0; i < n; i++) {
    float* to = keys + i * W;
    if (next) prefetch(next[i], layer.row_size);
    if (!distance && size == width) {
      for (int64_t c = 0; c < width; c += W, to += KEY_STRIDE) store(to, load(row[i] + c));
      continue;
    }
    widen_row(plain, row[i], size);
    if (distance) rotate(layer, plain, distance[i]);
    for (int64_t c = 0; c < width; c += W, to += KEY_STRIDE) store(to, load(plain + c));
  }
}

// Folds one register of products per query and key into one lane per key, `Keys` keys at a time.
template <int Queries, int Keys>
struct Folded {
  vf part[Queries][W / Keys];
  void take(int k, vf (*sum)[Keys]) {
#pragma GCC unroll 4
    for (int q = 0; q < Queries; q++) {
      fold_within<Keys>(sum[q]);
      part[q][k] = sum[q][0];
    }
  }
  void give(vf* result) {
#pragma GCC unroll 4
    for (int q = 0; q < Queries; q++) {
      fold_across<Keys>(part[q]);
      result[q] = part[q][0];
    }
  }
};

// Dot products of `Queries` queries with W keys.
template <int Queries, int Keys>
static inline void dots(const float* query, int64_t width, const float* keys, vf* result) {
  Folded<Queries, Keys> folded;
#pragma GCC unroll 16
  for (int k = 0; k < W / Keys; k++) {
    vf sum[Queries][Keys];
#pragma GCC unroll 4
    for (int q = 0; q < Queries; q++)
#pragma GCC unroll 16
      for (int i = 0; i < Keys; i++) sum[q][i] = vf{};
    const float* block = keys + k * Keys * W;
    for (int64_t c = 0; c < width; c += W, block += KEY_STRIDE) {
      vf x[Queries];
#pragma GCC unroll 4
      for (int q = 0; q < Queries; q++) x[q] = held(load(query + q * width + c));
#pragma GCC unroll 16
      for (int i = 0; i < Keys; i++) {
        vf key = held(load(block + i * W));
#pragma GCC unroll 4
        for (int q = 0; q < Queries; q++) sum[q][i] += x[q] * key;
      }
    }
    folded.take(k, sum);
  }
  folded.give(result);
}

// The same with stored keys, which are rotated in registers if `Turn`. Needs halves of heads that
// fill whole registers. `Width` is `width` if known at compile time, to unroll the loop; else 0.
// `next` are rows to prefetch, or null.
template <int Queries, int Keys, int Width, bool Turn, class T>
static __attribute__((noinline)) void row_dots(const float* query, int64_t width,
                                               const T* const* row, const T* const* next,
                                               const float* const* rotation, vf* result) {
  if (Width) width = Width;
  const int64_t half = width / 2;
  Folded<Queries, Keys> folded;
#pragma GCC unroll 16
  for (int k = 0; k < W / Keys; k++) {
    vf sum[Queries][Keys];
#pragma GCC unroll 4
    for (int q = 0; q < Queries; q++)
#pragma GCC unroll 16
      for (int i = 0; i < Keys; i++) sum[q][i] = vf{};
    for (int64_t c = 0; c < half; c += W) {
      vf low[Keys], high[Keys];
#pragma GCC unroll 16
      for (int i = 0; i < Keys; i++) {
        low[i] = held(load(row[k * Keys + i] + c));
        high[i] = held(load(row[k * Keys + i] + half + c));
        if constexpr (Turn) {
          const float* turn = rotation[k * Keys + i] + c;
          vf x = low[i], y = high[i], cos = held(load(turn)), sin = held(load(turn + half));
          low[i] = x * cos - y * sin;
          high[i] = y * cos + x * sin;
        }
      }
#pragma GCC unroll 4
      for (int q = 0; q < Queries; q++) {
        vf a = held(load(query + q * width + c)), b = held(load(query + q * width + half + c));
#pragma GCC unroll 16
        for (int i = 0; i < Keys; i++) sum[q][i] += a * low[i];
#pragma GCC unroll 16
        for (int i = 0; i < Keys; i++) sum[q][i] += b * high[i];
      }
    }
    if (next)
#pragma GCC unroll 16
      for (int i = 0; i < Keys; i++) prefetch_row(next[k * Keys + i], 2 * half);
    folded.take(k, sum);
  }
  folded.give(result);
}

// acc[q, c ..] += sum over a tile's slots of exps[q, slot] * V[slot, c ..].
template <int Queries, int Parts, class T>
static inline void add_values(float* acc, int64_t width, const float* exps, int64_t padded,
                       const T* const* stored, const int32_t* rank, int64_t n, int64_t channel) {
  vf sum[Queries][Parts];
#pragma GCC unroll 4
  for (int q = 0; q < Queries; q++)
#pragma GCC unroll 4
    for (int c = 0; c < Parts; c++) sum[q][c] = load(acc + q * width + channel + c * W);
  for (int64_t i = 0; i < n; i++) {
    if (rank[i] < 0) continue;  // probability 0, but the bytes may be NaN
    vf v[Parts];
#pragma GCC unroll 4
    for (int c = 0; c < Parts; c++) v[c] = load(stored[i] + channel + c * W);
#pragma GCC unroll 4
    for (int q = 0; q < Queries; q++) {
      vf p = splat(exps[q * padded + i]);
#pragma GCC unroll 4
      for (int c = 0; c < Parts; c++) sum[q][c] += p * v[c];
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < Queries; q++)
#pragma GCC unroll 4
    for (int c = 0; c < Parts; c++) store(acc + q * width + channel + c * W, sum[q][c]);
}

template <int Queries, class T>
static inline void add_tile(const Layer& layer, float* acc, int64_t width, const float* exps, int64_t padded,
              const T* const* stored, const int32_t* rank, int64_t n) {
  const int64_t size = layer.value_size;
  int64_t c = 0;
  for (; c + 4 * W <= size; c += 4 * W)
    add_values<Queries, 4>(acc, width, exps, padded, stored, rank, n, c);
  for (; c + W <= size; c += W)
    add_values<Queries, 1>(acc, width, exps, padded, stored, rank, n, c);
  if (c == size) return;
  for (int64_t i = 0; i < n; i++)
    if (rank[i] >= 0)
      for (int64_t k = c; k < size; k++)
        for (int q = 0; q < Queries; q++)
          acc[q * width + k] += exps[q * padded + i] * widen(stored[i][k]);
}
