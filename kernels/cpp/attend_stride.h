// SPDX-License-Identifier: Apache-2.0
// A stride of one request: attention of its tokens, as products of plain fp32 matrices.
#pragma once

#include "panel.h"
#include "stored.h"

struct Stride {
  const int32_t *step, *pages;
  int64_t moved;
  const float* logit_scale;      // one a token, or null: all 1
  const float* given;            // scores that attention doesn't make, or null
  int64_t scored;                // rank of the first token that gets one; those below 0 get none
  int64_t shift;                 // positions beyond ranks
  const int32_t *rules, *first;  // [any, RULE_COLUMNS]; row i applies first[i] .. first[i + 1] - 1
  int64_t transient, period;     // rows that occur once, and rows that repeat for ever
  // Units among the cached ones that were recalled; rules are about ranks behind them. So many more
  // will be, when this stride's evictions are done.
  int64_t recalled, recalls_more;
  // Room for units that leave: [H, num_evicted, unit, 2 D], their scales [H, num_evicted, unit, 2]
  // and, twice, [S, num_evicted]; or null.
  int64_t num_evicted;
  char* evicted_rows;
  float* evicted_scale;
  int32_t *evicted_born, *evicted_token;
};

namespace {

constexpr int64_t LOGITS = 1 << 16;  // fp32 logits at once and thread: a quarter of an L2 cache
constexpr int64_t DEPTH = 128;       // keys whose values stay in L1 over a tile's rows

// The cache and the stride as plain fp32 matrices, in slot order, the new tokens behind.
struct Packed {
  int64_t padded, width;         // keys, rounded up to COLUMNS; channels, rounded up to W
  int64_t tile, tiles;           // queries at once
  float* keys;                   // [H, padded / COLUMNS, D, COLUMNS], transposed blocks
  float* values;                 // [H, padded, width]
  float* mass;                   // [H * G, tiles, padded]
  int32_t *slot, *rank;          // [S, cached], of the keys in this order, unit after unit
};

template <class T>
struct Work {
  Layer layer;
  const Stride& stride;
  const Rows& rows;
  const Step step{stride.step};
  const int64_t stream = step[STREAM], start = step[START], num_tokens = step[LENGTH];
  const int64_t cached = step[CACHED], old_slots = step[OLD_SLOTS], new_slots = step[NEW_SLOTS];
  const int64_t total = cached + num_tokens;
  // Units: cached ones, those that the stride begins, and those of them that it completes.
  const int64_t unit = layer.unit, old_units = cached / unit;
  const int64_t new_units = (num_tokens + unit - 1) / unit, complete = num_tokens / unit;

  // Whether attention makes scores here.
  bool scored() const { return layer.uses_scores && step.weight() != 0; }

  const T* query(int64_t t, int64_t head) const {
    return (const T*)rows.query + (start + t) * rows.query_stride + head * layer.head_size;
  }
  const T* key(int64_t t, int64_t head) const {
    return (const T*)rows.key + (start + t) * rows.key_stride + head * layer.head_size;
  }
  const T* value(int64_t t, int64_t head) const {
    return (const T*)rows.value + (start + t) * rows.value_stride + head * layer.head_size;
  }
  T* output(int64_t t, int64_t head) const {
    return (T*)rows.output + (start + t) * rows.output_stride + head * layer.head_size;
  }
  char* slot_row(int64_t slot, int64_t head) const {
    return layer.row(stride.pages[slot / layer.block_size], head, slot % layer.block_size);
  }
  // Its key's scale; null where rows have none of their own.
  float* slot_scale(int64_t slot, int64_t head) const {
    if (!layer.row_scale) return nullptr;
    return layer.scale_of(stride.pages[slot / layer.block_size], head, slot % layer.block_size);
  }
};

// Slots that hold a token, and their ranks. Returns how many: `work.cached`.
template <class T>
void list_slots(const Work<T>& work, const Packed& packed, int64_t set) {
  const Stride& stride = work.stride;
  const int64_t unit = work.unit, places = work.old_slots / unit;
  std::vector<int32_t> rank(places);
  gather(work.layer, stride.pages, set, (const int32_t*)work.layer.rank, rank.data(), 0, places);
  int64_t n = set * work.cached;
  const int64_t end = n + work.cached;
  for (int64_t place = 0; place < places && n < end; place++)
    for (int64_t i = 0; rank[place] >= 0 && i < unit; i++) {
      packed.slot[n] = (int32_t)(place * unit + i);
      packed.rank[n++] = (int32_t)(rank[place] * unit + i);
    }
}

// One cached token's key at its present position, and its value.
template <class T>
void unpack_cached(Work<T>& work, const Packed& packed, int64_t head, int64_t j, float* key,
                   float* value) {
  const Layer& layer = work.layer;
  const Stride& stride = work.stride;
  const int64_t size = layer.head_size, set = layer.set_of(head);
  const int64_t slot = packed.slot[set * work.cached + j];
  const char* row = work.slot_row(slot, head);
  if (layer.plain()) {
    widen_row(key, (const T*)row, size);
    widen_row(value, (const T*)row + size, size);
  } else {
    std::fill(key + size / W * W, key + packed.width, 0.0f);
    std::fill(value + size / W * W, value + packed.width, 0.0f);
    decode(layer, row, work.slot_scale(slot, head), key, value);
  }
  if (!stride.moved || !layer.rotation) return;
  const int64_t page = stride.pages[slot / layer.block_size], within = slot % layer.unit;
  const int64_t born = layer.born[layer.word(page, set) + slot % layer.block_size / layer.unit];
  rotate(layer, key, born + within - packed.rank[set * work.cached + j] - stride.shift);
}

// Keys (rotated to where they are now, transposed) and values of one block of COLUMNS tokens.
template <class T>
void pack(Work<T>& work, const Packed& packed, int64_t head, int64_t block) {
  static thread_local Scratch scratch;
  const int64_t size = work.layer.head_size, width = packed.width;
  float* rows = scratch.take(W * width);
  float* keys = packed.keys + (head * packed.padded + block * COLUMNS) * size;
  float* values = packed.values + (head * packed.padded + block * COLUMNS) * width;
  for (int64_t i = 0; i < COLUMNS; i++) {
    const int64_t j = block * COLUMNS + i;
    float *key = rows + i % W * width, *value = values + i * width;
    if (j >= work.total) {
      std::fill(key, key + width, 0.0f);
      std::fill(value, value + width, 0.0f);
    } else if (j >= work.cached) {
      widen_row(key, work.key(j - work.cached, head), size);
      widen_row(value, work.value(j - work.cached, head), size);
    } else {
      unpack_cached(work, packed, head, j, key, value);
    }
    if (i % W < W - 1) continue;
    float* column = keys + i - (W - 1);
    for (int64_t c = 0; c < width; c += W) {
      vf square[W];
#pragma GCC unroll 16
      for (int k = 0; k < W; k++) square[k] = load(rows + k * width + c);
      transpose(square);
#pragma GCC unroll 16
      for (int k = 0; k < W; k++)
        if (c + k < size) store(column + (c + k) * COLUMNS, square[k]);
    }
  }
}

// Masks the keys that a query at `position` has behind its window.
template <class T>
void mask_window(const Work<T>& work, const int32_t* rank, int64_t position, float* x) {
  const int64_t first = position - work.layer.window + 1;  // the oldest that it sees
  if (first <= 0) return;
  for (int64_t j = 0; j < work.cached; j++) x[j] = rank[j] < first ? -INFINITY : x[j];
  for (int64_t j = work.cached; j < first; j++) x[j] = -INFINITY;
}

// Logits of one query to exponentials; returns 1 / their sum, with what nothing gets in it.
// `visible` keys, then masked ones.
inline float softmax_row(const Layer& layer, int64_t head, float* x, int64_t visible, int64_t end) {
  vf top = splat(-INFINITY);
  for (int64_t j = visible; j < end; j++) x[j] = -INFINITY;
  for (int64_t j = 0; j < end; j += W) top = vmax(top, load(x + j));
  const float most = largest(top);
  vf total{};
  for (int64_t j = 0; j < end; j += W) {
    vf e = vexp(load(x + j) - most);
    store(x + j, e);
    total += e;
  }
  return 1.0f / (sum(total) + layer.sink(head, most));
}

// Attention of one query head over a tile of the stride's queries.
template <class T>
void attend(const Work<T>& work, const Packed& packed, const float* weights, int64_t head,
            int64_t tile) {
  static thread_local Scratch scratch;
  const Layer& layer = work.layer;
  const Stride& stride = work.stride;
  const int64_t size = layer.head_size, width = packed.width, kv_head = head / layer.group;
  const int64_t begin = tile * packed.tile;
  const int64_t n = std::min(packed.tile, work.num_tokens - begin);
  const int64_t first = work.cached + begin;       // position of the tile's first query
  const int64_t end = round_up(first + n, W);      // later keys are not seen
  float* query = scratch.take(n * (2 * width + end));
  float* acc = query + n * width;
  float* logits = acc + n * width;
  for (int64_t r = 0; r < n; r++) {
    const float factor = stride.logit_scale ? stride.logit_scale[begin + r] : 1.0f;
    widen_row(query + r * width, work.query(begin + r, head), size);
    for (int64_t c = 0; c < width; c += W)
      store(query + r * width + c, load(query + r * width + c) * (layer.scale * factor));
  }
  for (int64_t j = 0; j < end; j += COLUMNS) {
    const int64_t r = std::max<int64_t>(j - first, 0) / ROWS * ROWS;  // those before do not see it
    multiply(n - r, std::min<int64_t>(COLUMNS, end - j), query + r * width, width,
             packed.keys + (kv_head * packed.padded + j) * size, COLUMNS, logits + r * end + j, end,
             size, false);
  }
  float* mass = packed.mass + (head * packed.tiles + tile) * packed.padded;
  if (weights) std::fill(mass, mass + packed.padded, 0.0f);
  float inverse[LOGITS / COLUMNS];
  for (int64_t r = 0; r < n; r++) {
    float* x = logits + r * end;
    const int64_t position = first + r;
    if (layer.softcap)
      for (int64_t j = 0; j < end; j++) x[j] = layer.soft_cap(x[j]);
    if (layer.slopes) {
      const int32_t* rank = packed.rank + layer.set_of(kv_head) * work.cached;
      const float slope = layer.slopes[head];
      for (int64_t j = 0; j < work.cached; j++) x[j] += slope * (rank[j] - position);
      for (int64_t j = work.cached; j < end; j++) x[j] += slope * (j - position);
    }
    if (layer.window)
      mask_window(work, packed.rank + layer.set_of(kv_head) * work.cached, position, x);
    inverse[r] = softmax_row(layer, head, x, position + 1, end);
    if (!weights || ((r + 1) % ROWS && r + 1 < n)) continue;
    const int64_t group = r / ROWS * ROWS;  // rows that are still in L1
    float weight[ROWS];
    for (int64_t k = group; k <= r; k++) weight[k - group] = weights[begin + k] * inverse[k];
    for (int64_t j = 0; j < end; j += W) {
      vf sum = load(mass + j);
      for (int64_t k = group; k <= r; k++) sum += load(logits + k * end + j) * weight[k - group];
      store(mass + j, sum);
    }
  }
  for (int64_t j = 0; j < end; j += DEPTH)
    for (int64_t r = 0; r < n; r += ROWS) {
      const int64_t rows = std::min<int64_t>(ROWS, n - r), seen = first + r + rows - j;
      if (seen > 0)
        multiply(rows, width, logits + r * end + j, end,
                 packed.values + (kv_head * packed.padded + j) * width, width, acc + r * width,
                 width, std::min(DEPTH, seen), j > 0);
    }
  for (int64_t r = 0; r < n; r++) {
    T* to = work.output(begin + r, head);
    narrow_row(to, acc + r * width, inverse[r], size);
  }
}

}  // namespace
