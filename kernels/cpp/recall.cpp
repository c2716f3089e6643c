// SPDX-License-Identifier: Apache-2.0
// Which stored units some tokens ask for most. Keys are in 8 bits, before rotation, each with a scale
// of its own; a unit is worth its keys' largest exponential and their mean.
#include <functional>

#include "layer.h"
#include "panel.h"

// A request's stored units, in chunks that hold all layers, and the tokens that ask.
struct Store {
  const int64_t *codes, *scales;  // [num_chunks] addresses of [layers, H, chunk_units, D, unit]
                                  // int8 and [layers, H, chunk_units, unit] fp32
  int64_t num_chunks, chunk_units, begin, end;  // units begin .. end - 1 of all chunks' are there
  const int64_t *places, *positions;  // [num_asking], of tokens in the step, and of their queries
  int64_t num_asking;
  int64_t num;  // units to choose
};

namespace {

typedef int8_t vb __attribute__((vector_size(W)));

struct Judge {
  const Layer& layer;
  const Store& store;
  int64_t index;  // of the layer
  int64_t num_units() const { return store.end - store.begin; }
  int64_t width() const { return round_up(layer.head_size, W); }
  // Queries of one KV head: those of a query head follow each other.
  int64_t rows() const { return layer.group * store.num_asking; }
  // Whole units that are judged at once, and their keys in whole registers.
  int64_t block() const { return std::max<int64_t>(COLUMNS / layer.unit, 1); }
  int64_t columns() const { return round_up(block() * layer.unit, W); }
  int64_t blocks_of_chunk() const { return (store.chunk_units + block() - 1) / block(); }
  int64_t blocks() const { return store.num_chunks * blocks_of_chunk(); }
};

// What is found of each query, relative to a largest logit of each block.
struct Found {
  float* worth;  // [H, rows, units]
  float* most;   // [H, rows, blocks]
};

// The tokens' query heads before rotation, times the scale of logits: [H, G, asking, width].
template <class T>
void plain_queries(const Judge& judge, const Rows& rows, float* query) {
  const Layer& layer = judge.layer;
  const int64_t size = layer.head_size;
  for (int64_t head = 0; head < layer.num_queries(); head++)
    for (int64_t i = 0; i < judge.store.num_asking; i++, query += judge.width()) {
      const T* from = (const T*)rows.query + judge.store.places[i] * rows.query_stride;
      widen_row(query, from + head * size, size);
      if (layer.rotation) rotate(layer, query, judge.store.positions[i]);
      for (int64_t c = 0; c < judge.width(); c++) query[c] *= layer.scale;
    }
}

// `n` units' keys as fp32, a row a channel: [D, columns], and their scales.
void widen_block(const Judge& judge, const int8_t* codes, const float* scales, int64_t n,
                 float* keys, float* scale) {
  const int64_t unit = judge.layer.unit, size = judge.layer.head_size, columns = judge.columns();
  std::fill(scale + n * unit, scale + columns, 0.0f);
  std::memcpy(scale, scales, n * unit * sizeof(float));
  for (int64_t u = 0; u < n; u++)
    for (int64_t c = 0; c < size; c++, codes += unit) {
      float* to = keys + c * columns + u * unit;
      int64_t i = 0;
      for (; i + W <= unit; i += W) {
        const vi wide = __builtin_convertvector(load_as<vb>(codes + i), vi);
        store(to + i, __builtin_convertvector(wide, vf));
      }
      for (; i < unit; i++) to[i] = codes[i];
    }
  for (int64_t c = 0; c < size && n * unit < columns; c++)
    std::fill(keys + c * columns + n * unit, keys + (c + 1) * columns, 0.0f);
}

// A unit's largest exponential and the mean of all of them.
inline float worth_of(const float* exps, int64_t unit) {
  float best = exps[0], all = 0;
  int64_t i = 0;
  if (unit >= W) {
    vf top = load(exps), sums = load(exps);
    for (i = W; i + W <= unit; i += W) {
      top = vmax(load(exps + i), top);
      sums += load(exps + i);
    }
    best = largest(top);
    all = sum(sums);
  }
  for (; i < unit; i++) {
    best = std::max(best, exps[i]);
    all += exps[i];
  }
  return best + all / unit;
}

// One query's products with a block of `n` units to what these are worth; returns the largest logit.
float judge_row(const Judge& judge, const float* scale, int64_t n, float* x, float* worth) {
  const int64_t unit = judge.layer.unit, keys = n * unit, end = round_up(keys, W);
  vf top = splat(-INFINITY);
  for (int64_t i = 0; i < end; i += W) store(x + i, load(x + i) * load(scale + i));
  for (int64_t i = keys; i < end; i++) x[i] = -INFINITY;
  for (int64_t i = 0; i < end; i += W) top = vmax(load(x + i), top);
  const float most = largest(top);
  for (int64_t i = 0; i < end; i += W) store(x + i, vexp(load(x + i) - most));
  for (int64_t u = 0; u < n; u++) worth[u] = worth_of(x + u * unit, unit);
  return most;
}

// One block of a chunk under all queries of one KV head.
void judge_block(const Judge& judge, const Found& found, const float* queries, int64_t head,
                 int64_t block) {
  static thread_local Scratch scratch;
  const Layer& layer = judge.layer;
  const int64_t chunk_units = judge.store.chunk_units, per_chunk = judge.blocks_of_chunk();
  const int64_t chunk = block / per_chunk, first = chunk * chunk_units;
  const int64_t from = first + block % per_chunk * judge.block();
  const int64_t low = std::max(from, judge.store.begin);
  const int64_t to = std::min(from + judge.block(), first + chunk_units);
  const int64_t n = std::min(to, judge.store.end) - low;
  const int64_t rows = judge.rows(), size = layer.head_size, columns = judge.columns();
  float* most = found.most + head * rows * judge.blocks() + block;
  for (int64_t r = 0; r < rows && n <= 0; r++) most[r * judge.blocks()] = -INFINITY;
  if (n <= 0) return;
  const int64_t at = ((judge.index * layer.num_heads + head) * chunk_units + low - first);
  float* keys = scratch.take((size + 1 + rows) * columns);
  float *scale = keys + size * columns, *x = scale + columns;
  widen_block(judge, (const int8_t*)judge.store.codes[chunk] + at * size * layer.unit,
              (const float*)judge.store.scales[chunk] + at * layer.unit, n, keys, scale);
  multiply(rows, columns, queries + head * rows * judge.width(), judge.width(), keys, columns, x,
           columns, size, false);
  float* worth = found.worth + head * rows * judge.num_units() + low - judge.store.begin;
  for (int64_t r = 0; r < rows; r++)
    most[r * judge.blocks()] = judge_row(judge, scale, n, x + r * columns,
                                         worth + r * judge.num_units());
}

// One query's worths as shares of all of them; `asked` becomes the larger.
void share_row(const Judge& judge, float* worth, const float* most, float* asked) {
  const int64_t n = judge.num_units(), chunk_units = judge.store.chunk_units;
  const float largest_logit = *std::max_element(most, most + judge.blocks());
  float total = 0;
  for (int64_t block = 0; block < judge.blocks(); block++) {
    const int64_t first = block / judge.blocks_of_chunk() * chunk_units;
    const int64_t from = first + block % judge.blocks_of_chunk() * judge.block();
    const int64_t to = std::min(from + judge.block(), first + chunk_units);
    const int64_t low = std::max<int64_t>(from - judge.store.begin, 0);
    const int64_t high = std::min(to - judge.store.begin, n);
    if (low >= high) continue;
    const float factor = std::exp(most[block] - largest_logit);
    for (int64_t u = low; u < high; u++) total += worth[u] *= factor;
  }
  for (int64_t u = 0; u < n; u++) asked[u] = std::max(asked[u], worth[u] / total);
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
  const int64_t heads = layer.num_heads, n = judge.num_units(), asking = judge.store.num_asking;
  const int64_t queries = heads * judge.rows();
  float* plain = scratch.take(queries * (judge.width() + n + judge.blocks()));
  float* worth = plain + queries * judge.width();
  const Found found{worth, worth + queries * n};
  plain_queries<T>(judge, rows, plain);
#pragma omp parallel if (omp_get_max_threads() > 1)
  {
#pragma omp for schedule(static) collapse(2)
    for (int64_t head = 0; head < heads; head++)
      for (int64_t block = 0; block < judge.blocks(); block++)
        judge_block(judge, found, plain, head, block);
#pragma omp for schedule(static)
    for (int64_t q = 0; q < layer.num_queries(); q++) {
      std::fill(asked + q * n, asked + (q + 1) * n, 0.0f);
      for (int64_t r = q * asking; r < (q + 1) * asking; r++)
        share_row(judge, worth + r * n, found.most + r * judge.blocks(), asked + q * n);
    }
#pragma omp for schedule(static)
    for (int64_t set = 0; set < layer.num_sets; set++) choose(judge, asked, set, chosen);
  }
}

}  // namespace

extern "C" int64_t store_size() { return sizeof(Store); }

// `asked`: [H * G, end - begin], the most that any token asks, and `chosen`: [S, num], units counted
// from `begin`, ascending.
extern "C" void recall_units(const Layer* layer, const Rows* rows, const Store* store,
                             int64_t index, float* asked, int64_t* chosen) {
  const Judge judge{*layer, *store, index};
  if (layer->dtype == FP32) run<float>(judge, *rows, asked, chosen);
  if (layer->dtype == BF16) run<bf16>(judge, *rows, asked, chosen);
#ifdef HAS_FP16
  if (layer->dtype == FP16) run<fp16>(judge, *rows, asked, chosen);
#endif
}
