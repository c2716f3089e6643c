// SPDX-License-Identifier: Apache-2.0
// Which stored units one token asks for most. Keys are in 8 bits, before rotation, each with a scale
// of its own; a unit is worth its keys' largest exponential and their mean.
#include <functional>

#include "layer.h"

// A request's stored units, in chunks that hold all layers, and the token that asks.
struct Store {
  const int64_t *codes, *scales;  // [num_chunks] addresses of [layers, H, chunk_units, unit, D]
                                  // int8 and [layers, H, chunk_units, unit] fp32
  int64_t num_chunks, chunk_units, begin, end;  // units begin .. end - 1 of all chunks' are there
  int64_t place, position;                      // of the token: in the step, and its query's
  int64_t num;                                  // units to choose
};

namespace {

typedef int8_t vb __attribute__((vector_size(W)));

struct Judge {
  const Layer& layer;
  const Store& store;
  int64_t index;  // of the layer
  int64_t of_chunk() const { return store.chunk_units * layer.unit; }
  int64_t keys() const { return store.num_chunks * of_chunk(); }
  int64_t num_units() const { return store.end - store.begin; }
  int64_t width() const { return round_up(layer.head_size, W); }
};

// W keys of 8 bits as fp32 rows of `width` channels, zeros behind.
inline void widen_codes(float* to, const int8_t* from, int64_t size, int64_t width) {
  for (int64_t i = 0; i < W; i++, from += size, to += width) {
    int64_t c = 0;
    for (; c + W <= size; c += W)
      store(to + c, __builtin_convertvector(__builtin_convertvector(load_as<vb>(from + c), vi), vf));
    for (; c < width; c++) to[c] = c < size ? from[c] : 0;
  }
}

// Products of one query and W rows.
inline vf products(const float* query, const float* rows, int64_t width) {
  vf sums[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) sums[i] = load(query) * load(rows + i * width);
  for (int64_t c = W; c < width; c += W) {
    const vf x = load(query + c);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) sums[i] += x * load(rows + i * width + c);
  }
  fold_within<W>(sums);
  return sums[0];
}

// The token's query heads before rotation, times the scale of logits.
template <class T>
void plain_queries(const Judge& judge, const Rows& rows, float* queries) {
  const Layer& layer = judge.layer;
  for (int64_t q = 0; q < layer.num_queries(); q++) {
    float* query = queries + q * judge.width();
    widen_row(query, (const T*)rows.query + judge.store.place * rows.query_stride +
                         q * layer.head_size, layer.head_size);
    if (layer.rotation) rotate(layer, query, judge.store.position);
    for (int64_t c = 0; c < judge.width(); c++) query[c] *= layer.scale;
  }
}

// Logits of one KV head's queries for one chunk, in whole registers of keys.
void chunk_logits(const Judge& judge, const float* queries, int64_t head, int64_t chunk,
                  float* logits) {
  static thread_local Scratch scratch;
  const Layer& layer = judge.layer;
  const int64_t size = layer.head_size, width = judge.width(), of_chunk = judge.of_chunk();
  const int64_t first = chunk * of_chunk, row = (judge.index * layer.num_heads + head) * of_chunk;
  const int64_t low = std::max<int64_t>(judge.store.begin * layer.unit - first, 0) / W * W;
  const int64_t high = std::min(judge.store.end * layer.unit - first, of_chunk);
  const int8_t* codes = (const int8_t*)judge.store.codes[chunk] + row * size;
  const float* scales = (const float*)judge.store.scales[chunk] + row;
  float* rows = scratch.take(W * width);
  for (int64_t k = low; k < high; k += W) {
    widen_codes(rows, codes + k * size, size, width);
    for (int64_t q = head * layer.group; q < (head + 1) * layer.group; q++)
      store(logits + q * judge.keys() + first + k,
            products(queries + q * width, rows, width) * load(scales + k));
  }
}

// One query head's logits to what it asks of each unit, which add up to 1.
void unit_shares(const Judge& judge, float* x, float* asked) {
  const int64_t unit = judge.layer.unit, num = judge.num_units();
  const int64_t begin = judge.store.begin * unit, end = judge.store.end * unit;
  const int64_t low = begin / W * W, high = round_up(end, W);
  for (int64_t k = low; k < begin; k++) x[k] = -INFINITY;
  for (int64_t k = end; k < high; k++) x[k] = -INFINITY;
  vf top = splat(-INFINITY);
  for (int64_t k = low; k < high; k += W) top = vmax(load(x + k), top);
  const float most = largest(top), each = 1.0f / unit;
  for (int64_t k = low; k < high; k += W) store(x + k, vexp(load(x + k) - most));
  float total = 0;
  for (int64_t u = 0; u < num; u++) {
    const float* keys = x + begin + u * unit;
    float best = keys[0], all = 0;
    int64_t i = 0;
    if (unit >= W) {
      vf high_ = load(keys), sums = load(keys);
      for (i = W; i + W <= unit; i += W) {
        high_ = vmax(load(keys + i), high_);
        sums += load(keys + i);
      }
      best = largest(high_);
      all = sum(sums);
    }
    for (; i < unit; i++) {
      best = std::max(best, keys[i]);
      all += keys[i];
    }
    asked[u] = best + all * each;
    total += asked[u];
  }
  for (int64_t u = 0; u < num; u++) asked[u] /= total;
}

// The units that one head set's query heads ask for most on average; of equal ones the first.
void choose(const Judge& judge, const float* asked, int64_t set, int64_t* chosen) {
  const int64_t heads = judge.layer.num_queries() / judge.layer.num_sets, n = judge.num_units();
  std::vector<float> mean(n, 0.0f);
  for (int64_t q = set * heads; q < (set + 1) * heads; q++)
    for (int64_t u = 0; u < n; u++) mean[u] += asked[q * n + u];
  std::vector<float> sorted = mean;
  const int64_t num = judge.store.num;
  std::nth_element(sorted.begin(), sorted.begin() + num - 1, sorted.end(), std::greater<float>());
  const float least = sorted[num - 1];
  int64_t equal = num;
  for (int64_t u = 0; u < n; u++) equal -= mean[u] > least;
  for (int64_t u = 0, at = 0; u < n && at < num; u++)
    if (mean[u] > least || (mean[u] == least && equal-- > 0)) chosen[set * num + at++] = u;
}

template <class T>
void run(const Judge& judge, const Rows& rows, float* asked, int64_t* chosen) {
  static thread_local Scratch scratch;
  const Layer& layer = judge.layer;
  const int64_t queries = layer.num_queries();
  float* plain = scratch.take(queries * (judge.width() + judge.keys()));
  float* logits = plain + queries * judge.width();
  plain_queries<T>(judge, rows, plain);
#pragma omp parallel if (omp_get_max_threads() > 1)
  {
#pragma omp for schedule(static) collapse(2)
    for (int64_t head = 0; head < layer.num_heads; head++)
      for (int64_t chunk = 0; chunk < judge.store.num_chunks; chunk++)
        chunk_logits(judge, plain, head, chunk, logits);
#pragma omp for schedule(static)
    for (int64_t q = 0; q < queries; q++)
      unit_shares(judge, logits + q * judge.keys(), asked + q * judge.num_units());
#pragma omp for schedule(static)
    for (int64_t set = 0; set < layer.num_sets; set++) choose(judge, asked, set, chosen);
  }
}

}  // namespace

extern "C" int64_t store_size() { return sizeof(Store); }

// `asked`: [H * G, end - begin], and `chosen`: [S, num], units counted from `begin`, ascending.
extern "C" void recall_units(const Layer* layer, const Rows* rows, const Store* store,
                             int64_t index, float* asked, int64_t* chosen) {
  const Judge judge{*layer, *store, index};
  if (layer->dtype == FP32) run<float>(judge, *rows, asked, chosen);
  if (layer->dtype == BF16) run<bf16>(judge, *rows, asked, chosen);
#ifdef HAS_FP16
  if (layer->dtype == FP16) run<fp16>(judge, *rows, asked, chosen);
#endif
}
