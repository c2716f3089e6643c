// SPDX-License-Identifier: Apache-2.0
// How much queries attend to the sinks, which may be a kept prompt of thousands of keys: the logarithms of
// sums of exponentials. Threads share the sinks in parts of a fixed size, so that sums do not depend on how
// many threads there are.
#pragma once

#include <cfloat>

#include "judge.h"
#include "panel.h"

namespace {

constexpr int64_t PART = 512;  // keys, a multiple of COLUMNS

// What is found of each query in each part of the sinks.
struct SinkSums {
  float* top;   // [H * G * num, parts], the largest logit
  float* sums;  // [H * G * num, parts], of exponentials relative to it

  static int64_t parts(const Judge& judge) { return (judge.num_sinks() + PART - 1) / PART; }
};

// `n` keys of a KV head from slot `from` on, transposed: [D, COLUMNS]. They fill whole registers, with the last
// one repeated; further columns are not written.
inline void transposed_sinks(const Judge& judge, int64_t head, int64_t from, int64_t n, float* keys) {
  static thread_local Scratch scratch;
  const Layer& layer = judge.layer;
  const int64_t size = layer.head_size, width = round_up(size, W);
  float* rows = scratch.take(W * width);
  for (int64_t i = 0; i < n; i += W) {
    for (int64_t k = 0; k < W; k++) {
      const int64_t slot = from + std::min(i + k, n - 1), offset = slot % layer.block_size;
      const int64_t page = judge.asking.pages[slot / layer.block_size];
      const float* scale = layer.row_scale ? layer.scale_of(page, head, offset) : nullptr;
      float* key = rows + k * width;
      decode(layer, layer.row(page, head, offset), scale, layer.block_size, key,
             layer.latent() ? key + layer.value_at : nullptr);
    }
    for (int64_t c = 0; c < size; c += W) {
      vf square[W];
#pragma GCC unroll 16
      for (int k = 0; k < W; k++) square[k] = load(rows + k * width + c);
      pack_keys(square, size - c, keys + c * COLUMNS + i);
    }
  }
}

// Adds the exponentials of one query's products with COLUMNS keys, of which `n` count, lane by lane.
inline void add_sinks(const float* products, float scale, int64_t n, float* top, float* sums) {
  const vf before = load(top);
  vf x[PARTS], most = before;
#pragma GCC unroll 4
  for (int p = 0; p < PARTS; p++) {
    x[p] = lanes() + p * W < (int32_t)n ? load(products + p * W) * scale : splat(-INFINITY);
    most = vmax(x[p], most);
  }
  vf all = load(sums) * vexp(before - most);
#pragma GCC unroll 4
  for (int p = 0; p < PARTS; p++) all += vexp(x[p] - most);
  store(top, most);
  store(sums, all);
}

// One part of the sinks under all queries of one KV head.
template <class T>
void sum_part(const Judge& judge, const Rows& rows, int64_t head, int64_t part,
              const SinkSums& found) {
  static thread_local Scratch scratch;
  const int64_t size = judge.layer.head_size, num = judge.layer.group * judge.asking.num;
  const int64_t first = head * num, parts = SinkSums::parts(judge);
  float* top = scratch.take(num * (2 * W + COLUMNS + size) + W + size * COLUMNS);  // [num, W]
  float* sums = top + num * W;                  // [num, W]
  float* products = sums + num * W;             // [num, COLUMNS]
  float* keys = products + num * COLUMNS;       // [D, COLUMNS]
  float* queries = keys + size * COLUMNS;       // [num, D], each widened to whole registers
  for (int64_t i = 0; i < num; i++) {
    widen_row(queries + i * size, judge.query<T>(rows, first + i), size);
    store(top + i * W, splat(-FLT_MAX));
    store(sums + i * W, vf{});
  }
  const int64_t end = std::min((part + 1) * PART, judge.num_sinks());
  for (int64_t at = part * PART; at < end; at += COLUMNS) {
    const int64_t n = std::min<int64_t>(COLUMNS, end - at);
    transposed_sinks(judge, head, at, n, keys);
    panel_rows<Single, PARTS>(num, queries, size, keys, COLUMNS, products, COLUMNS, size, false);
    for (int64_t i = 0; i < num; i++)
      add_sinks(products + i * COLUMNS, judge.layer.scale, n, top + i * W, sums + i * W);
  }
  for (int64_t i = 0; i < num; i++) {
    const float most = largest(load(top + i * W));
    found.top[(first + i) * parts + part] = most;
    found.sums[(first + i) * parts + part] = sum(load(sums + i * W) * vexp(load(top + i * W) - most));
  }
}

// The logarithm of a query's sum of exponentials over all parts; -inf without any.
inline float log_sum(const SinkSums& found, int64_t row, int64_t parts) {
  const float *top = found.top + row * parts, *sums = found.sums + row * parts;
  float most = -FLT_MAX, all = 0;
  for (int64_t part = 0; part < parts; part++) most = std::max(most, top[part]);
  for (int64_t part = 0; part < parts; part++) all += sums[part] * std::exp(top[part] - most);
  return most + std::log(all);
}

}  // namespace
