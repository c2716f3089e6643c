// SPDX-License-Identifier: Apache-2.0
// Attention for one request's stride, as products of dense matrices. The products are in bf16 if
// rows are bf16 and the processor supports it, which rounds keys and probabilities once more; else
// in fp32. Logits, softmax and sums are fp32.
#pragma once

#include "panel.h"
#include "stored.h"

struct Stride {
  const int32_t *step, *pages;
  int64_t moved;
  const float* logit_scale;      // one per token, or null: all 1
  const float* given;            // scores that do not come from attention, or null
  int64_t scored;                // rank of the first token with one; negative ranks get none
  int64_t shift;                 // positions beyond ranks
  const int32_t *rules, *first;  // [any, RULE_COLUMNS]; row i applies first[i] .. first[i + 1] - 1
  int64_t transient, period;     // rows that apply once, and rows that repeat
  // Recalled units in the cache; the ranks of rules start behind them. `recalls_more` units are
  // added after this stride's evictions.
  int64_t recalled, recalls_more;
  // Buffers for evicted units, or null: rows [H, num_evicted, unit, 2 D], scales
  // [H, num_evicted, unit, 2], and two words [S, num_evicted].
  int64_t num_evicted;
  char* evicted_rows;
  float* evicted_scale;
  int32_t *evicted_born, *evicted_token;
};

namespace {

constexpr int64_t LOGITS = 1 << 16;  // fp32 logits per tile and thread: a quarter of an L2 cache
constexpr int64_t DEPTH = 128;       // keys whose values stay in L1 over a tile's rows
constexpr int64_t MASSES = 1 << 22;  // fp32 sums of all heads' runs: 16 MiB, more for `RUNS` of them
constexpr int64_t RUNS = 512;        // of all heads: enough for threads to finish together

// The cache and the stride as dense matrices: cached tokens in slot order, then new ones. A number
// holds `DEPTHS` channels of a key, or one channel of `DEPTHS` tokens' values.
template <class T>
struct Packed {
  typedef typename Numbers<T>::Number Number;
  int64_t padded;                // keys, rounded up to COLUMNS
  int64_t width, value_width;    // channels of keys and of values, rounded up to W
  int64_t tile, tiles;           // queries per tile; tiles
  int64_t run, runs;             // tiles per run, one after the other by one thread; runs
  int64_t depth;                 // numbers per query
  Number* keys;                  // [H, padded / COLUMNS, depth, COLUMNS], transposed blocks
  Number* values;                // [H, padded / DEPTHS, value_width]
  float* mass;                   // [H * G, runs, padded]
  int32_t *slot, *rank;          // [S, cached], slots and ranks of the keys, unit by unit
};

template <class T>
struct Work {
  typedef Numbers<T> N;
  typedef typename N::Number Number;
  Layer layer;
  const Stride& stride;
  const Rows& rows;
  const Step step{stride.step};
  const int64_t stream = step[STREAM], start = step[START], num_tokens = step[LENGTH];
  const int64_t cached = step[CACHED], old_slots = step[OLD_SLOTS], new_slots = step[NEW_SLOTS];
  const int64_t total = cached + num_tokens;
  // Units: cached, begun by the stride, and completed by it.
  const int64_t unit = layer.unit, old_units = cached / unit;
  const int64_t new_units = (num_tokens + unit - 1) / unit, complete = num_tokens / unit;

  // Whether attention updates scores.
  bool scored() const { return layer.uses_scores && step.weight() != 0; }

  const T* query(int64_t t, int64_t head) const {
    return (const T*)rows.query + (start + t) * rows.query_stride + head * layer.head_size;
  }
  const T* key(int64_t t, int64_t head) const {
    return (const T*)rows.key + (start + t) * rows.key_stride + head * layer.head_size;
  }
  const T* value(int64_t t, int64_t head) const {
    return (const T*)rows.value + (start + t) * rows.value_stride + head * layer.value_size;
  }
  T* output(int64_t t, int64_t head) const {
    return (T*)rows.output + (start + t) * rows.output_stride + head * layer.value_size;
  }
  char* slot_row(int64_t slot, int64_t head) const {
    return layer.row(stride.pages[slot / layer.block_size], head, slot % layer.block_size);
  }
  // The key's scale; null without row scales.
  float* slot_scale(int64_t slot, int64_t head) const {
    if (!layer.row_scale) return nullptr;
    return layer.scale_of(stride.pages[slot / layer.block_size], head, slot % layer.block_size);
  }
};

// Tiles that add to one row of sums. Where keys are many, a row for each tile would take as much memory as
// a sixth of all logits. The number of threads has no part in it, because sums must not depend on that.
template <class T>
int64_t tiles_of_a_run(const Layer& layer, const Packed<T>& packed) {
  const int64_t heads = layer.num_queries();
  const int64_t most = std::max(MASSES / (heads * packed.padded), (RUNS + heads - 1) / heads);
  return (packed.tiles + most - 1) / most;
}

// Lists the slots that hold a token, and their ranks: `work.cached` of them.
template <class T>
void list_slots(const Work<T>& work, const Packed<T>& packed, int64_t set) {
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

// Reads one cached token's key, rotated to its present position, and its value.
template <class T>
void unpack_cached(Work<T>& work, const Packed<T>& packed, int64_t head, int64_t j, float* key,
                   float* value) {
  const Layer& layer = work.layer;
  const Stride& stride = work.stride;
  const int64_t size = layer.head_size, set = layer.set_of(head);
  const int64_t slot = packed.slot[set * work.cached + j];
  const char* row = work.slot_row(slot, head);
  if (layer.plain()) {
    widen_row(key, (const T*)row, size);
    widen_row(value, (const T*)row + layer.value_at, layer.value_size);
  } else {
    std::fill(key + size / W * W, key + packed.width, 0.0f);
    std::fill(value + layer.value_size / W * W, value + packed.value_width, 0.0f);
    decode(layer, row, work.slot_scale(slot, head), layer.block_size, key, value);
  }
  if (!stride.moved || !layer.rotation) return;
  const int64_t page = stride.pages[slot / layer.block_size], within = slot % layer.unit;
  const int64_t born = layer.born[layer.word(page, set) + slot % layer.block_size / layer.unit];
  rotate(layer, key, born + within - packed.rank[set * work.cached + j] - stride.shift);
}

// Packs fp32 values of W tokens into numbers.
inline void pack_values(const float* rows, int64_t width, float* to) {
  std::memcpy(to, rows, W * width * sizeof(float));
}
#ifdef HAS_BF16_PRODUCTS
inline void pack_values(const float* rows, int64_t width, uint32_t* to) {
  for (int64_t i = 0; i < W; i += 2, rows += 2 * width)
    for (int64_t c = 0; c < width; c += W, to += W) {
      const vu pairs = pairs_of(load(rows + c), load(rows + width + c));
      std::memcpy(to, &pairs, sizeof(pairs));
    }
}
#endif

// Packs keys (rotated to present positions, transposed) and values of COLUMNS tokens.
template <class T>
void pack(Work<T>& work, const Packed<T>& packed, int64_t head, int64_t block) {
  static thread_local Scratch scratch;
  typedef typename Work<T>::Number Number;
  const int64_t size = work.layer.head_size, width = packed.width, per = Work<T>::N::DEPTHS;
  const int64_t value_size = work.layer.value_size, value_width = packed.value_width;
  float *rows = scratch.take(W * (width + value_width)), *row_values = rows + W * width;
  const int64_t first = head * packed.padded + block * COLUMNS;
  Number *keys = packed.keys + first * packed.depth, *values = packed.values + first / per * value_width;
  for (int64_t i = 0; i < COLUMNS; i++) {
    const int64_t j = block * COLUMNS + i;
    float *key = rows + i % W * width, *value = row_values + i % W * value_width;
    if (j >= work.total) {
      std::fill(key, key + width, 0.0f);
      std::fill(value, value + value_width, 0.0f);
    } else if (j >= work.cached) {
      widen_row(key, work.key(j - work.cached, head), size);
      widen_row(value, work.value(j - work.cached, head), value_size);
    } else {
      unpack_cached(work, packed, head, j, key, value);
    }
    if (i % W < W - 1) continue;
    pack_values(row_values, value_width, values + (i - (W - 1)) / per * value_width);
    for (int64_t c = 0; c < width; c += W) {
      vf square[W];
#pragma GCC unroll 16
      for (int k = 0; k < W; k++) square[k] = load(rows + k * width + c);
      pack_keys(square, size - c, keys + c / per * COLUMNS + i - (W - 1));
    }
  }
}

// Masks the keys that are older than the window or chunk of a query at `position`.
template <class T>
void mask_window(const Work<T>& work, const int32_t* rank, int64_t position, float* x) {
  const int64_t window = work.layer.window;
  const int64_t first =  // the oldest that it sees
      work.layer.chunked ? position - position % window : position - window + 1;
  if (first <= 0) return;
  for (int64_t j = 0; j < work.cached; j++) x[j] = rank[j] < first ? -INFINITY : x[j];
  for (int64_t j = work.cached; j < first; j++) x[j] = -INFINITY;
}

// Turns one query's logits into exponentials. Returns 1 / their sum, which includes the sink.
// Keys from `visible` on are masked.
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

// Packs a query into numbers. Returns the factor that its logits still need.
template <class T>
float pack_query(const T* from, int64_t size, float scale, float* to) {
  widen_row(to, from, size);
  for (int64_t c = 0; c < size; c += W) store(to + c, load(to + c) * scale);
  return 1.0f;
}
#ifdef HAS_BF16_PRODUCTS
inline float pack_query(const bf16* from, int64_t size, float scale, uint32_t* to) {
  if (size % 2) to[size / 2] = 0;
  std::memcpy(to, from, size * sizeof(bf16));
  return scale;
}
#endif

// Packs exponentials into numbers, in place.
inline void pack_exponentials(float*, int64_t, float*) {}
#ifdef HAS_BF16_PRODUCTS
inline void pack_exponentials(float* x, int64_t end, uint32_t* to) {
  for (int64_t j = 0; j < end; j += W) store_bf16((uint16_t*)to + j, load(x + j));
}
#endif

// Attention of one query head for one tile of the stride's queries. What they give to keys is added to
// `mass`, with `weights`.
template <class T>
void attend(const Work<T>& work, const Packed<T>& packed, const float* weights, int64_t head,
            int64_t tile, float* mass) {
  static thread_local Scratch scratch;
  typedef typename Work<T>::N N;
  typedef typename N::Number Number;
  const Layer& layer = work.layer;
  const Stride& stride = work.stride;
  const int64_t size = layer.head_size, width = packed.width, kv_head = head / layer.group;
  const int64_t begin = tile * packed.tile, value_width = packed.value_width;
  const int64_t n = std::min(packed.tile, work.num_tokens - begin);
  const int64_t first = work.cached + begin;       // position of the tile's first query
  const int64_t end = round_up(first + n, W);      // later keys are masked for all
  float* acc = scratch.take(n * (width + value_width + end));
  float* logits = acc + n * value_width;
  Number *query = (Number*)(logits + n * end), *exponentials = (Number*)logits;
  float inverse[LOGITS / COLUMNS], factor[LOGITS / COLUMNS];
  for (int64_t r = 0; r < n; r++) {
    const float scale = layer.scale * (stride.logit_scale ? stride.logit_scale[begin + r] : 1.0f);
    factor[r] = pack_query(work.query(begin + r, head), size, scale, query + r * width);
  }
  for (int64_t j = 0; j < end; j += COLUMNS) {
    const int64_t r = std::max<int64_t>(j - first, 0) / ROWS * ROWS;  // earlier ones are masked
    multiply<N>(n - r, std::min<int64_t>(COLUMNS, end - j), query + r * width, width,
                packed.keys + (kv_head * packed.padded + j) * packed.depth, COLUMNS,
                logits + r * end + j, end, packed.depth, false);
  }
  for (int64_t r = 0; r < n; r++) {
    float* x = logits + r * end;
    const int64_t position = first + r;
    for (int64_t j = 0; j < end && factor[r] != 1; j += W) store(x + j, load(x + j) * factor[r]);
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
    if ((r + 1) % ROWS && r + 1 < n) continue;
    const int64_t group = r / ROWS * ROWS;  // rows that are still in L1
    if (weights) {
      float weight[ROWS];
      for (int64_t k = group; k <= r; k++) weight[k - group] = weights[begin + k] * inverse[k];
      for (int64_t j = 0; j < end; j += W) {
        vf sum = load(mass + j);
        for (int64_t k = group; k <= r; k++) sum += load(logits + k * end + j) * weight[k - group];
        store(mass + j, sum);
      }
    }
    for (int64_t k = group; k <= r; k++)
      pack_exponentials(logits + k * end, end, exponentials + k * end);
  }
  for (int64_t j = 0; j < end; j += DEPTH)
    for (int64_t r = 0; r < n; r += ROWS) {
      const int64_t rows = std::min<int64_t>(ROWS, n - r), seen = first + r + rows - j;
      if (seen > 0)
        multiply<N>(rows, value_width, exponentials + r * end + j / N::DEPTHS, end,
                    packed.values + (kv_head * packed.padded + j) / N::DEPTHS * value_width,
                    value_width, acc + r * value_width, value_width,
                    (std::min(DEPTH, seen) + N::DEPTHS - 1) / N::DEPTHS, j > 0);
    }
  for (int64_t r = 0; r < n; r++) {
    T* to = work.output(begin + r, head);
    narrow_row(to, acc + r * value_width, inverse[r], layer.value_size);
  }
}

// The same for the tiles of a run, in order.
template <class T>
void attend_run(const Work<T>& work, const Packed<T>& packed, const float* weights, int64_t head,
                int64_t run) {
  float* mass = weights ? packed.mass + (head * packed.runs + run) * packed.padded : nullptr;
  if (weights) std::fill(mass, mass + packed.padded, 0.0f);
  const int64_t end = std::min((run + 1) * packed.run, packed.tiles);
  for (int64_t tile = run * packed.run; tile < end; tile++)
    attend(work, packed, weights, head, tile, mass);
}

}  // namespace
