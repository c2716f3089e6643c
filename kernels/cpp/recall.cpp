// SPDX-License-Identifier: Apache-2.0
// Which stored units some tokens ask for most. Keys are in 8 bits, before rotation, each with a scale
// of its own, queries in 15: products are of integers, so that every machine chooses alike. A unit is
// worth its keys' largest exponential and their mean, among the candidates that filter.h leaves.
#include "filter.h"

namespace {

// What is found of each query, relative to a largest logit of each panel of candidates.
struct Found {
  const int64_t* candidates;  // [S, n] units counted from the store's first
  float* worth;               // [H, rows, n]
  float* most;                // [H, rows, panels]
};

// Whole units that are judged at once, and their keys in whole registers.
int64_t panel_units(const Judge& judge) {
  return std::max<int64_t>(COLUMNS / judge.layer.unit, 1);
}
int64_t panel_columns(const Judge& judge) {
  return round_up(panel_units(judge) * judge.layer.unit, COLUMNS);
}
int64_t panels(const Judge& judge) {
  return (judge.num_candidates() + panel_units(judge) - 1) / panel_units(judge);
}

// One fp32 query as integers.
inline void round_query(const Judge& judge, const float* query, int32_t* words, int32_t* less,
                        float* step) {
  float most = 0;
  for (int64_t c = 0; c < judge.layer.head_size; c++) most = std::max(most, std::fabs(query[c]));
  *step = most / LEVELS;
  const float divisor = *step > 0 ? *step : 1;
  less[0] = less[1] = 0;
  for (int64_t word = 0; word < judge.words(); word++, words += 2) {
    int8_t part[2][4];
    for (int64_t i = 0; i < 4; i++) {
      const int32_t x = (int32_t)std::nearbyint(query[word * 4 + i] / divisor);
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

// The keys of `n` candidates side by side, their channels counted from 128: [D / 4, columns] words; and
// their scales. What is behind them is 0. `next`: `n_next` candidates to prefetch.
void pack_panel(const Judge& judge, int64_t head, const int64_t* units, int64_t n,
                const int64_t* next, int64_t num_next, int32_t* keys, float* scale) {
  const int64_t unit = judge.layer.unit, words = judge.words(), columns = panel_columns(judge);
  const auto at = [&](int64_t candidate) {
    const int64_t number = judge.store.begin + candidate;
    return judge.chunk(number).codes + judge.place(head, number) * words * unit;
  };
  for (int64_t u = 0; u < n; u++) {
    const int64_t number = judge.store.begin + units[u];
    const float* scales = judge.chunk(number).scale + judge.place(head, number) * unit;
    std::memcpy(scale + u * unit, scales, unit * sizeof(float));
    const int32_t *from = at(units[u]), *follows = u < num_next ? at(next[u]) : nullptr;
    for (int64_t word = 0; word < words; word++, from += unit) {
      int32_t* to = keys + word * columns + u * unit;
      int64_t i = 0;
      for (; i + W <= unit; i += W) {
        if (follows) __builtin_prefetch(follows + word * unit + i);
        const vi four = load_as<vi>(from + i) ^ SIGNS;
        std::memcpy(to + i, &four, sizeof(four));
      }
      for (; i < unit; i++) to[i] = from[i] ^ SIGNS;
    }
  }
  std::fill(scale + n * unit, scale + columns, 0.0f);
  for (int64_t word = 0; word < words; word++)
    std::fill(keys + word * columns + n * unit, keys + (word + 1) * columns, 0);
}

// Logits of `Rows` queries for a panel's keys.
template <int Rows>
void multiply_rows(const Judge& judge, const Queries& queries, int64_t row, const int32_t* keys,
                   const float* scale, float* x) {
  const int64_t words = judge.words(), columns = panel_columns(judge);
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

void multiply_panel(const Judge& judge, const Queries& queries, int64_t row, const int32_t* keys,
                    const float* scale, float* x) {
  const int64_t end = row + judge.rows(), columns = panel_columns(judge);
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

// One query's logits for a panel of `n` units to what these are worth; returns the largest logit.
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

// One panel of a head's candidates under all queries of its KV head.
void judge_panel(const Judge& judge, const Found& found, const Queries& queries, int64_t head,
                 int64_t panel) {
  static thread_local Scratch scratch;
  const int64_t rows = judge.rows(), columns = panel_columns(judge), row = head * rows;
  const int64_t num = judge.num_candidates(), at = panel * panel_units(judge);
  const int64_t next = std::min(at + panel_units(judge), num), n = next - at;
  const int64_t num_next = std::min(num - next, panel_units(judge));
  const int64_t* units = found.candidates + judge.layer.set_of(head) * num;
  float* scale = scratch.take((judge.words() + 1 + rows) * columns);
  float* x = scale + columns;
  int32_t* keys = (int32_t*)(x + rows * columns);
  pack_panel(judge, head, units + at, n, units + next, num_next, keys, scale);
  multiply_panel(judge, queries, row, keys, scale, x);
  for (int64_t r = 0; r < rows; r++)
    found.most[(row + r) * panels(judge) + panel] =
        judge_row(judge, n, x + r * columns, found.worth + (row + r) * num + at);
}

// One query's worths as shares of all of them; `asked` becomes the larger.
void share_row(const Judge& judge, float* worth, const float* most, float* asked) {
  const int64_t n = judge.num_candidates(), each = panel_units(judge);
  const float largest_logit = *std::max_element(most, most + panels(judge));
  float total = 0;
  for (int64_t panel = 0; panel < panels(judge); panel++) {
    const float factor = std::exp(most[panel] - largest_logit);
    for (int64_t u = panel * each; u < std::min((panel + 1) * each, n); u++)
      total += worth[u] *= factor;
  }
  for (int64_t u = 0; u < n; u++) asked[u] = std::max(asked[u], worth[u] / total);
}

// The units that one head set's query heads ask for most on average.
void choose(const Judge& judge, const Found& found, const float* asked, int64_t set,
            int64_t* chosen) {
  const int64_t heads = judge.layer.num_queries() / judge.layer.num_sets;
  const int64_t n = judge.num_candidates(), num = judge.store.num;
  std::vector<float> sums(n, 0.0f);
  for (int64_t q = set * heads; q < (set + 1) * heads; q++)
    for (int64_t u = 0; u < n; u++) sums[u] += asked[q * n + u];
  best(sums.data(), n, num, chosen);
  for (int64_t i = 0; i < num; i++) chosen[i] = found.candidates[set * n + chosen[i]];
}

template <class T>
void run(const Judge& judge, const Rows& rows, int64_t* candidates, float* asked,
         int64_t* chosen) {
  static thread_local Scratch scratch;
  const Layer& layer = judge.layer;
  const int64_t heads = layer.num_heads, n = judge.num_candidates();
  const int64_t asking = judge.store.num_asking, num = judge.store.num;
  const int64_t queries = heads * judge.rows(), words = judge.words() * 2;
  const filter::Filter filter(judge);
  const bool filters = n < judge.num_units();
  float* worth =
      scratch.take(queries * (n + panels(judge) + words + 3) + filters * (filter.floats() + 16));
  const Found found{candidates, worth, worth + queries * n};
  float* step = found.most + queries * panels(judge);
  int32_t* less = (int32_t*)(step + queries);
  const Queries asked_by{less + queries * 2, less, step};
  float* more = worth + round_up(queries * (n + panels(judge) + words + 3), 16);
  plain_queries<T>(judge, rows, asked_by);
#pragma omp parallel if (omp_get_max_threads() > 1)
  {
    if (filters) {
      filter.run(asked_by, more, candidates);
    } else {
#pragma omp for schedule(static)
      for (int64_t set = 0; set < layer.num_sets; set++)
        for (int64_t i = 0; i < n; i++) candidates[set * n + i] = i;
    }
#pragma omp for schedule(static) collapse(2)
    for (int64_t head = 0; head < heads; head++)
      for (int64_t panel = 0; panel < panels(judge); panel++)
        judge_panel(judge, found, asked_by, head, panel);
#pragma omp for schedule(static)
    for (int64_t q = 0; q < layer.num_queries(); q++) {
      std::fill(asked + q * n, asked + (q + 1) * n, 0.0f);
      for (int64_t r = q * asking; r < (q + 1) * asking; r++)
        share_row(judge, worth + r * n, found.most + r * panels(judge), asked + q * n);
    }
#pragma omp for schedule(static)
    for (int64_t set = 0; set < layer.num_sets; set++)
      choose(judge, found, asked, set, chosen + set * num);
  }
}

}  // namespace

extern "C" int64_t store_size() { return sizeof(Store); }

// `candidates`: [S, n] units counted from `begin`, ascending, that are judged key by key; `asked`:
// [H * G, n], the most that any token asks; and `chosen`: [S, num] of them, ascending.
extern "C" void recall_units(const Layer* layer, const Rows* rows, const Store* store,
                             int64_t index, int64_t* candidates, float* asked, int64_t* chosen) {
  const Judge judge{*layer, *store, index};
  if (layer->dtype == FP32) run<float>(judge, *rows, candidates, asked, chosen);
  if (layer->dtype == BF16) run<bf16>(judge, *rows, candidates, asked, chosen);
#ifdef HAS_FP16
  if (layer->dtype == FP16) run<fp16>(judge, *rows, candidates, asked, chosen);
#endif
}
