// SPDX-License-Identifier: Apache-2.0
// Units of a request's store of evicted units, in chunks that each hold some units of all layers.
#pragma once

#include "layer.h"

// Tensors of a chunk (vllm_cascade/recall/log.py), in the order of their addresses.
enum Tensor { ROWS_, ROW_SCALES, CODES, SCALES, CENTRES, CENTRE_SCALES, SPREADS, BORN, TOKEN };

constexpr int64_t CHUNK_UNITS = 16;  // units per chunk, as in vllm_cascade/recall/chain.py

struct Units {
  const int64_t* chunks;   // [num_chunks], addresses of their memory
  const int64_t* offsets;  // [9], of the tensors in it
  int64_t num_chunks, begin, end;  // units begin .. end - 1 of all chunks' are there
  int64_t in_8_bits;  // whether rows are values in 8 bits; keys are then `codes`
};

// Selected units, which take the ranks behind the sinks.
struct Exchange {
  const int32_t* pages;   // block numbers
  const int64_t* chosen;  // [S, now], units, counted from the first candidate
  int32_t* shown;  // [layers, S, shown_stride], first tokens of the recalled units, ascending
  int64_t shown_layer, shown_stride, num_units;  // units in the pages
  int64_t before, now, sinks;
};

// Units that a single token evicted. Their slots are free and still hold the rows.
struct Freed {
  const int32_t* pages;
  int32_t* before;  // [S, num_before], ranks before the token
  int64_t num_before, num_units;  // units in the pages before the token and now
};

// Where one layer's units lie. `head` is a KV head, `set` a head set, `number` a unit's number,
// counted from the first unit of all chunks.
struct LayerUnits {
  const Layer& layer;
  const Units& units;
  int64_t index;  // the layer's in the chunks

  int64_t count() const { return units.end - units.begin; }
  char* chunk(Tensor tensor, int64_t number) const {
    return (char*)units.chunks[number / CHUNK_UNITS] + units.offsets[tensor];
  }
  int64_t at(int64_t part, int64_t parts, int64_t number) const {
    return (index * parts + part) * CHUNK_UNITS + number % CHUNK_UNITS;
  }
  int64_t of_head(int64_t head, int64_t number) const { return at(head, layer.num_heads, number); }

  // [D / 4, unit, 4] int8, keys before rotation
  int8_t* codes(int64_t head, int64_t number) const {
    return (int8_t*)chunk(CODES, number) + of_head(head, number) * layer.head_size * layer.unit;
  }
  // [unit] fp32
  float* scales(int64_t head, int64_t number) const {
    return (float*)chunk(SCALES, number) + of_head(head, number) * layer.unit;
  }
  // [D / 4, CHUNK_UNITS, 4] int8: four channels of a mean key, the next ones 4 * CHUNK_UNITS further
  int8_t* centre(int64_t head, int64_t number) const {
    const int64_t first = (index * layer.num_heads + head) * layer.head_size * CHUNK_UNITS;
    return (int8_t*)chunk(CENTRES, number) + first + number % CHUNK_UNITS * 4;
  }
  float* centre_scale(int64_t head, int64_t number) const {
    return (float*)chunk(CENTRE_SCALES, number) + of_head(head, number);
  }
  // Variance of a unit's keys around their mean, as a mean over channels.
  float* spread(int64_t head, int64_t number) const {
    return (float*)chunk(SPREADS, number) + of_head(head, number);
  }
  // Bytes of a row: as it is in pages, or a value in 8 bits.
  int64_t row_bytes() const { return units.in_8_bits ? layer.head_size : layer.row_bytes(); }
  // [unit, row_bytes]
  char* rows(int64_t head, int64_t number) const {
    return chunk(ROWS_, number) + of_head(head, number) * layer.unit * row_bytes();
  }
  int64_t num_scales() const { return units.in_8_bits ? 1 : layer.row_scale ? 2 : 0; }
  // [unit, num_scales] fp32
  float* row_scales(int64_t head, int64_t number) const {
    return (float*)chunk(ROW_SCALES, number) + of_head(head, number) * layer.unit * num_scales();
  }
  int32_t* born(int64_t set, int64_t number) const {
    return (int32_t*)chunk(BORN, number) + at(set, layer.num_sets, number);
  }
  int32_t* token(int64_t set, int64_t number) const {
    return (int32_t*)chunk(TOKEN, number) + at(set, layer.num_sets, number);
  }
};
