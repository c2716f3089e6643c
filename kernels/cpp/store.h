// SPDX-License-Identifier: Apache-2.0
// A request's stored units as the judge and its filter read them, and the queries that ask.
#pragma once

#include <functional>

#include "layer.h"

// Addresses of a chunk's memory, for all layers (vllm_cascade/recall/log.py):
struct ChunkMemory {
  void *rows, *row_scale;  // [layers, H, units, unit, 2 D] and [..., scales] fp32
  int32_t* codes;          // [layers, H, units, D / 4, unit] words of four channels of 8 bits
  float* scale;            // [layers, H, units, unit]
  int32_t *born, *token;   // [layers, S, units]
  int32_t* bounds;         // [layers, H, blocks, 2, D / 4, block_units]; null: there are none
  float* bounds_scale;     // [layers, H, units]
};

// Addresses of a group's memory: bounds of blocks.
struct GroupMemory {
  int32_t* bounds;      // [layers, H, 2, D / 4, blocks]
  float* bounds_scale;  // [layers, H, blocks]
};

struct Store {
  const ChunkMemory* chunks;
  const GroupMemory* groups;
  int64_t chunk_units, num_groups, block_units;
  int64_t begin, end;  // units begin .. end - 1 are there, counted from the chunks' first
  int64_t skipped;     // units of the groups before it
  int64_t most_blocks, most_candidates, most_filtering;  // limits of the filter
  const int64_t *places, *positions;  // [num_asking], of tokens in the step, and of their queries
  int64_t num_asking;
  int64_t num;  // units to choose
};

constexpr int PARTS = W == 16 ? 4 : 2;  // registers of keys at once
constexpr int64_t COLUMNS = PARTS * W;
constexpr int64_t LEVELS = 127 * 128;  // a query's channels are -LEVELS .. LEVELS
constexpr int32_t SIGNS = (int32_t)0x80808080;

struct Judge {
  const Layer& layer;
  const Store& store;
  int64_t index;  // of the layer
  int64_t num_units() const { return store.end - store.begin; }
  int64_t num_candidates() const { return std::min(num_units(), store.most_candidates); }
  int64_t width() const { return round_up(layer.head_size, W); }
  int64_t words() const { return layer.head_size / 4; }
  // Queries of one KV head: those of a query head follow each other.
  int64_t rows() const { return layer.group * store.num_asking; }
  // A head's part of memory for all layers, in heads.
  int64_t of_head(int64_t head) const { return index * layer.num_heads + head; }
  const ChunkMemory& chunk(int64_t unit) const { return store.chunks[unit / store.chunk_units]; }
  // A unit's place among those of one head, counted from the chunks' first unit.
  int64_t place(int64_t head, int64_t unit) const {
    return of_head(head) * store.chunk_units + unit % store.chunk_units;
  }
};

// Queries as integers, each channel 128 * high + low; what makes up for keys that count from 128.
struct Queries {
  int32_t* words;  // [H, rows, D / 4, 2], four channels' high parts and low ones
  int32_t* less;   // [H, rows, 2]
  float* step;     // [H, rows]
};

// Of `num` tokens or rows that are evenly spread to the last one, the `i`-th of at most `most`.
static inline int64_t spread(int64_t i, int64_t num, int64_t most) {
  return num <= most ? i : (i + 1) * num / most - 1;
}

// The `num` largest of `n` values, ascending by place; of equal ones the first.
static inline void best(const float* values, int64_t n, int64_t num, int64_t* found) {
  static thread_local Scratch scratch;
  float* sorted = scratch.take(n);
  std::copy(values, values + n, sorted);
  std::nth_element(sorted, sorted + num - 1, sorted + n, std::greater<float>());
  const float least = sorted[num - 1];
  int64_t equal = num;
  for (int64_t i = 0; i < n; i++) equal -= values[i] > least;
  for (int64_t i = 0, at = 0; i < n && at < num; i++)
    if (values[i] > least || (values[i] == least && equal-- > 0)) found[at++] = i;
}
