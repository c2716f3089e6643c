// SPDX-License-Identifier: Apache-2.0
// The arguments of the library's calls. library.py repeats these structures field by field.
//
// Sizes: H KV heads, G query heads per KV head, D channels, S head sets (1 or H), N slots.
// A page is [H, block_size, row_size]: rows of K then V, or rows that are K, whose last channels are
// V (multi-head latent attention). A unit is a group of slots with consecutive tokens. Each
// unit has its own words, [S, page_units] per page. Scores, logits and sums are fp32. New rows and
// rows in pages may have different types (stored.h).
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "step.h"
#include "vec.h"

enum Dtype : int64_t { FP32 = 0, BF16 = 1, FP16 = 2, INT8 = 3, E4M3 = 4, E5M2 = 5 };
enum Reduction : int64_t { MEAN = 0, MAX = 1, MEDIAN = 2 };

// One layer's cache. No step changes these fields.
struct Layer {
  char* kv;
  int32_t *rank, *born;
  float* score;
  int32_t* token;         // null: not kept
  const float* slopes;    // [H * G] of ALiBi, or null
  const float* rotation;  // [distance, 2, half]: cos and sin of a rotation back, or null
  const float* sinks;     // [H * G] learned sink logits, or null
  const float* scales;    // of all stored keys and of all values; null: row scales, or no codes
  float* row_scale;       // [H, 2, block_size] per page, keys then values; null: no row scales
  const uint32_t* salts;  // [S], hashed into scores from the host; null: used as they are
  int32_t* versions;      // [drafts, 2, S, page_units] per page: ranks and scores before each draft
  char* draft_rows;       // [places, H, row bytes] that draft tokens replaced; null: no drafts
  float* draft_scales;    // [places, H, 2], their scales; null: no row scales
  int32_t* draft_words;   // [places, 3, S]: the slot, -1 for none, its unit's `born` and `token`
  int64_t page_bytes;     // from one page's K/V to the next
  int64_t page_words;     // from one page's words to the next
  int64_t num_heads, group, head_size, num_sets, block_size;
  int64_t value_size, value_at, row_size;  // channels of V, V's first one in a row, and a row's
  int64_t unit, page_units;  // slots per unit, units per page
  int64_t half;  // rotary_dim / 2
  int64_t is_neox;
  int64_t dtype, stored;  // types of new rows and of rows in pages
  int64_t stored_bytes;   // bytes of a stored channel
  int64_t uses_scores;  // whether pages hold scores
  int64_t reduction;
  int64_t window;  // tokens that a query sees, itself included; 0: all cached ones
  int64_t chunked;  // whether it sees its chunk of `window` tokens; chunks begin at multiples
  int64_t attends, inserts;  // whether calls write outputs and scores, and whether they insert
  int64_t drafts;  // most draft tokens of a request in a step
  float scale, softcap;

  // They are read at each call: weights that change while a model is served change them.
  float key_scale() const { return scales ? scales[0] : 1.0f; }
  float value_scale() const { return scales ? scales[1] : 1.0f; }
  int64_t num_queries() const { return num_heads * group; }
  // The score that a set makes of one that is given: a whole number with as many bits, 24 at most,
  // as keep the sum of a unit's scores exact.
  float own_score(int64_t set, float given) const {
    if (!salts) return given;
    uint32_t x = (uint32_t)given ^ salts[set];
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    int64_t dropped = 8;
    while (unit > int64_t{1} << (dropped - 8)) dropped++;
    return (float)((x ^ x >> 16) >> dropped);
  }
  // Whether a row's V is part of its K.
  bool latent() const { return value_at < head_size; }
  int64_t set_of(int64_t head) const { return num_sets == 1 ? 0 : head; }
  // Whether pages store rows in the type of new rows.
  bool plain() const { return stored == dtype; }
  int64_t row_bytes() const { return row_size * stored_bytes; }
  char* row(int64_t page, int64_t head, int64_t offset) const {
    return kv + page * page_bytes + (head * block_size + offset) * row_bytes();
  }
  // The scale of a row's key. The scale of its value is `block_size` further.
  float* scale_of(int64_t page, int64_t head, int64_t offset) const {
    return row_scale + page * page_words + head * 2 * block_size + offset;
  }
  // Whether the whole key is rotary and each half fills whole registers.
  bool turns_by_registers() const {
    return rotation && is_neox && half % W == 0 && 2 * half == head_size;
  }
  // The sink's term in a query's softmax, relative to logit `most`.
  float sink(int64_t head, float most) const { return sinks ? std::exp(sinks[head] - most) : 0; }
  float soft_cap(float x) const { return softcap ? softcap * std::tanh(x / softcap) : x; }
  vf soft_cap(vf x) const {
    for (int i = 0; i < W; i++) x[i] = soft_cap(x[i]);
    return x;
  }
  int64_t word(int64_t page, int64_t set) const { return page * page_words + set * page_units; }
  // The heads of a set: from first_head(set) to first_head(set + 1).
  int64_t first_head(int64_t set) const { return num_sets == 1 ? set * num_heads : set; }
};

// Rows of new tokens. Strides are elements between tokens; heads and channels are contiguous.
struct Rows {
  const void *query, *key, *value;
  void* output;
  int64_t query_stride, key_stride, value_stride, output_stride;
};

// Calls `each` on units [from, to) of one word, page by page.
template <class Word, class Each>
static inline void each_page(const Layer& layer, const int32_t* pages, int64_t set, Word* words,
                             int64_t from, int64_t to, Each each) {
  for (int64_t at = from; at < to;) {
    int64_t offset = at % layer.page_units;
    int64_t n = std::min(layer.page_units - offset, to - at);
    each(at - from, words + layer.word(pages[at / layer.page_units], set) + offset, n);
    at += n;
  }
}
template <class Word>
static inline void gather(const Layer& layer, const int32_t* pages, int64_t set, const Word* words,
                          Word* to, int64_t begin, int64_t end) {
  each_page(layer, pages, set, words, begin, end,
            [=](int64_t at, const Word* page, int64_t n) { std::memcpy(to + at, page, 4 * n); });
}
template <class Word>
static inline void scatter(const Layer& layer, const int32_t* pages, int64_t set, Word* words,
                           const Word* from, int64_t begin, int64_t end) {
  each_page(layer, pages, set, words, begin, end,
            [=](int64_t at, Word* page, int64_t n) { std::memcpy(page, from + at, 4 * n); });
}

// Rotates an fp32 row in place by `distance`: back (`Sign` 1: a key to its present position) or
// forward (-1: a query, by as much as the keys have moved). Non-rotary channels do not change.
template <int Sign = 1>
static inline void rotate(const Layer& layer, float* x, int64_t distance) {
  const int64_t half = layer.half;
  const float* cos = layer.rotation + distance * 2 * half;
  const float* sin = cos + half;
  if (layer.is_neox) {
    int64_t i = 0;
    for (; i + W <= half; i += W) {
      vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i) * (float)Sign;
      store(x + i, a * c - b * s);
      store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
      float a = x[i], b = x[half + i], s = sin[i] * Sign;
      x[i] = a * cos[i] - b * s;
      x[half + i] = b * cos[i] + a * s;
    }
  } else {
    for (int64_t i = 0; i < half; i++) {
      float a = x[2 * i], b = x[2 * i + 1], s = sin[i] * Sign;
      x[2 * i] = a * cos[i] - b * s;
      x[2 * i + 1] = b * cos[i] + a * s;
    }
  }
}

// Reduces `n` rows lane by lane. The median reorders `rows`.
static inline vf reduce_heads(int64_t reduction, vf* rows, int64_t n) {
  if (reduction == MEDIAN) {  // the lower one: bubble the k + 1 smallest to the front
    for (int64_t k = 0; k <= (n - 1) / 2; k++)
      for (int64_t i = n - 1; i > k; i--) {
        vf a = rows[i - 1], b = rows[i];
        rows[i - 1] = vmin(a, b);
        rows[i] = vmax(a, b);
      }
    return rows[(n - 1) / 2];
  }
  vf total = rows[0];
  for (int64_t i = 1; i < n; i++) total = reduction == MAX ? vmax(total, rows[i]) : total + rows[i];
  return reduction == MAX ? total : total * (1.0f / n);
}

// Memory that is reused between calls and only grows, aligned to registers.
struct Scratch {
  std::vector<float> memory;
  float* take(int64_t n) {
    if ((int64_t)memory.size() < n + 16) memory.resize(n + 16);
    return (float*)(((uintptr_t)memory.data() + 63) / 64 * 64);
  }
};
