// SPDX-License-Identifier: Apache-2.0
// Which stored units some tokens ask for most. Keys are in 8 bits, before rotation, each with a scale
// of its own, queries in 15: products are of integers, so that every machine chooses alike. A unit is
// worth its keys' largest exponential and their mean.
#include <functional>

#include "layer.h"

// A request's stored units, in chunks that hold all layers, and the tokens that ask.
struct Store {
  const int64_t *codes, *scales;  // [num_chunks] addresses of [layers, H, chunk_units, D/4, unit, 4]
                                  // int8 and [layers, H, chunk_units, unit] fp32
  int64_t num_chunks, chunk_units, begin, end;  // units begin .. end - 1 of all chunks' are there
  const int64_t *places, *positions;  // [num_asking], of tokens in the step, and of their queries
  int64_t num_asking;
  int64_t num;  // units to choose
};

namespace {

constexpr int PARTS = W == 16 ? 4 : 2;  // registers of keys at once
constexpr int64_t COLUMNS = PARTS * W;
constexpr int64_t LEVELS = 127 * 128;   // a query's channels are -LEVELS .. LEVELS
constexpr int32_t SIGNS = (int32_t)0x80808080;

struct Judge {
  const Layer& layer;
  const Store& store;
  int64_t index;  // of the layer
  int64_t num_units() const { return store.end - store.begin; }
  int64_t width() const { return round_up(layer.head_size, W); }
  int64_t words() const { return layer.head_size / 4; }
  // Queries of one KV head: those of a query head follow each other.
  int64_t rows() const { return layer.group * store.num_asking; }
  // Whole units that are judged at once, and their keys in whole panels.
  int64_t block() const { return std::max<int64_t>(COLUMNS / layer.unit, 1); }
  int64_t columns() const { return round_up(block() * layer.unit, COLUMNS); }
  int64_t blocks_of_chunk() const { return (store.chunk_units + block() - 1) / block(); }
  int64_t blocks() const { return store.num_chunks * blocks_of_chunk(); }
  // The units of a block that are there, of all chunks'; maybe none.
  int64_t low(int64_t at) const { return std::max(first(at), store.begin); }
  int64_t high(int64_t at) const {
    const int64_t chunk_end = (at / blocks_of_chunk() + 1) * store.chunk_units;
    return std::min(std::min(first(at) + block(), chunk_end), store.end);
  }
  int64_t first(int64_t at) const {
    return at / blocks_of_chunk() * store.chunk_units + at % blocks_of_chunk() * block();
  }
};

// Queries as integers, each channel 128 * high + low; what makes up for keys that count from 128.
struct Queries {
  int32_t* words;  // [H, rows, D / 4, 2], four channels' high parts and low ones
  int32_t* less;   // [H, rows, 2]
  float* step;     // [H, rows]
};

// What is found of each query, relative to a largest logit of each block.
struct Found {
  float* worth;  // [H, rows, units]
  float* most;   // [H, rows, blocks]
};

// One fp32 query as integers.
inline void round_query(const Judge& judge, const float* query, int32_t* words, int32_t* less,
                        float* step) {
  float most = 0;
  for (int64_t c = 0; c < judge.layer.head_size; c++) most = std::max(most, std::fabs(query[c]));
  *step = most / LEVELS;
  const float levels = most > 0 ? LEVELS / most : 0;
  less[0] = less[1] = 0;
  for (int64_t word = 0; word < judge.words(); word++, words += 2) {
    int8_t part[2][4];
    for (int64_t i = 0; i < 4; i++) {
      const int32_t x = (int32_t)std::nearbyint(query[word * 4 + i] * levels);
      const int32_t high = (x + 64) >> 7;
      part[0][i] = (int8_t)high, part[1][i] = (int8_t)(x - high * 128);
      less[0] -= 128 * part[0][i], less[1] -= 128 * part[1][i];
    }
    std::memcpy(words, part, sizeof(part));
  }
}

// The tokens' query heads, turned back by their positions, times the scale of logits.
template <class T>
void plain_queries(const Judge& judge, const Rows& rows, const Queries& queries) {
  static thread_local Scratch scratch;
  const Layer& layer = judge.layer;
  const int64_t size = layer.head_size;
  float* query = scratch.take(judge.width());
  int64_t row = 0;
  for (int64_t head = 0; head < layer.num_queries(); head++)
    for (int64_t i = 0; i < judge.store.num_asking; i++, row++) {
      const T* from = (const T*)rows.query + judge.store.places[i] * rows.query_stride;
      widen_row(query, from + head * size, size);
      if (layer.rotation) rotate(layer, query, judge.store.positions[i]);
      for (int64_t c = 0; c < size; c++) query[c] *= layer.scale;
      round_query(judge, query, queries.words + row * judge.words() * 2, queries.less + row * 2,
                  queries.step + row);
    }
}

// `n` units' keys side by side, their channels counted from 128: [D / 4, columns] words; and their
// scales. What is behind them is 0. `next`: codes to prefetch, those of the block that follows, or null:
// blocks are about as large as memory's pages, at whose ends a processor's own prefetching stops.
void pack_block(const Judge& judge, const int32_t* codes, const float* scales, int64_t n,
                const int32_t* next, int32_t* keys, float* scale) {
  const int64_t unit = judge.layer.unit, words = judge.words(), columns = judge.columns();
  std::fill(scale + n * unit, scale + columns, 0.0f);
  std::memcpy(scale, scales, n * unit * sizeof(float));
  for (int64_t word = 0; word < words; word++) {
    int32_t* to = keys + word * columns;
    for (int64_t u = 0; u < n; u++, to += unit) {
      const int32_t* from = codes + (u * words + word) * unit;
      int64_t i = 0;
      for (; i + W <= unit; i += W) {
        if (next) __builtin_prefetch(next + (from - codes) + i);
        const vi four = load_as<vi>(from + i) ^ SIGNS;
        std::memcpy(to + i, &four, sizeof(four));
      }
      for (; i < unit; i++) to[i] = from[i] ^ SIGNS;
    }
    std::fill(to, keys + (word + 1) * columns, 0);
  }
}

// Logits of `Rows` queries for a block's keys.
template <int Rows>
void multiply_rows(const Judge& judge, const Queries& queries, int64_t row, const int32_t* keys,
                   const float* scale, float* x) {
  const int64_t words = judge.words(), columns = judge.columns();
  const int32_t *query = queries.words + row * words * 2, *less = queries.less + row * 2;
  for (int64_t at = 0; at < columns; at += COLUMNS) {
    vi high[Rows][PARTS], low[Rows][PARTS];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int p = 0; p < PARTS; p++) {
        high[r][p] = splat_int(less[r * 2]);
        low[r][p] = splat_int(less[r * 2 + 1]);
      }
    for (int64_t word = 0; word < words; word++) {
      vi key[PARTS];
#pragma GCC unroll 4
      for (int p = 0; p < PARTS; p++) key[p] = load_as<vi>(keys + word * columns + at + p * W);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; r++) {
        const int32_t* four = query + (r * words + word) * 2;
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) {
          high[r][p] = add_products(high[r][p], key[p], four[0]);
          low[r][p] = add_products(low[r][p], key[p], four[1]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int p = 0; p < PARTS; p++) {
        const vf product = __builtin_convertvector(high[r][p] * 128 + low[r][p], vf);
        store(x + r * columns + at + p * W,
              product * (load(scale + at + p * W) * queries.step[row + r]));
      }
  }
}

void multiply_block(const Judge& judge, const Queries& queries, int64_t row, const int32_t* keys,
                    const float* scale, float* x) {
  const int64_t end = row + judge.rows(), columns = judge.columns();
  for (; row + 3 <= end; row += 3, x += 3 * columns)
    multiply_rows<3>(judge, queries, row, keys, scale, x);
  if (row + 2 == end) multiply_rows<2>(judge, queries, row, keys, scale, x);
  if (row + 1 == end) multiply_rows<1>(judge, queries, row, keys, scale, x);
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

// One query's logits for a block of `n` units to what these are worth; returns the largest logit.
float judge_row(const Judge& judge, int64_t n, float* x, float* worth) {
  const int64_t unit = judge.layer.unit, keys = n * unit, end = round_up(keys, W);
  vf top = splat(-INFINITY);
  for (int64_t i = keys; i < end; i++) x[i] = -INFINITY;
  for (int64_t i = 0; i < end; i += W) top = vmax(load(x + i), top);
  const float most = largest(top);
  for (int64_t i = 0; i < end; i += W) store(x + i, vexp(load(x + i) - most));
  for (int64_t u = 0; u < n; u++) worth[u] = worth_of(x + u * unit, unit);
  return most;
}

// One block of a chunk under all queries of one KV head.
void judge_block(const Judge& judge, const Found& found, const Queries& queries, int64_t head,
                 int64_t block) {
  static thread_local Scratch scratch;
  const Layer& layer = judge.layer;
  const int64_t chunk_units = judge.store.chunk_units, per_chunk = judge.blocks_of_chunk();
  const int64_t chunk = block / per_chunk, low = judge.low(block), n = judge.high(block) - low;
  const int64_t rows = judge.rows(), columns = judge.columns(), row = head * rows;
  float* most = found.most + row * judge.blocks() + block;
  for (int64_t r = 0; r < rows && n <= 0; r++) most[r * judge.blocks()] = -INFINITY;
  if (n <= 0) return;
  const int64_t of_head = (judge.index * layer.num_heads + head) * chunk_units;
  const int64_t at = of_head + low - chunk * chunk_units;
  float* scale = scratch.take((judge.words() + 1 + rows) * columns);
  float* x = scale + columns;
  int32_t* keys = (int32_t*)(x + rows * columns);
  const int64_t unit_words = judge.words() * layer.unit, follows = block + 1;
  const int32_t *codes = (const int32_t*)judge.store.codes[chunk] + at * unit_words, *next = nullptr;
  if (follows % per_chunk)
    next = codes + judge.block() * unit_words;
  else if (follows < judge.blocks())
    next = (const int32_t*)judge.store.codes[chunk + 1] + of_head * unit_words;
  pack_block(judge, codes, (const float*)judge.store.scales[chunk] + at * layer.unit, n, next, keys,
             scale);
  multiply_block(judge, queries, row, keys, scale, x);
  float* worth = found.worth + row * judge.num_units() + low - judge.store.begin;
  for (int64_t r = 0; r < rows; r++)
    most[r * judge.blocks()] = judge_row(judge, n, x + r * columns, worth + r * judge.num_units());
}

// One query's worths as shares of all of them; `asked` becomes the larger.
void share_row(const Judge& judge, float* worth, const float* most, float* asked) {
  const int64_t n = judge.num_units(), begin = judge.store.begin;
  const float largest_logit = *std::max_element(most, most + judge.blocks());
  float total = 0;
  for (int64_t block = 0; block < judge.blocks(); block++) {
    const float factor = std::exp(most[block] - largest_logit);
    for (int64_t u = judge.low(block); u < judge.high(block); u++)
      total += worth[u - begin] *= factor;
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
  const int64_t queries = heads * judge.rows(), words = judge.words() * 2;
  float* worth = scratch.take(queries * (n + judge.blocks() + words + 3));
  const Found found{worth, worth + queries * n};
  float* step = found.most + queries * judge.blocks();
  int32_t* less = (int32_t*)(step + queries);
  const Queries asked_by{less + queries * 2, less, step};
  plain_queries<T>(judge, rows, asked_by);
#pragma omp parallel if (omp_get_max_threads() > 1)
  {
#pragma omp for schedule(static) collapse(2)
    for (int64_t head = 0; head < heads; head++)
      for (int64_t block = 0; block < judge.blocks(); block++)
        judge_block(judge, found, asked_by, head, block);
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
