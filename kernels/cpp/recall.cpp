// SPDX-License-Identifier: Apache-2.0
// Which stored units some tokens attend to most. Keys have 8 bits, before rotation, each with its own
// scale, and so do queries: products are integers. A query attends to the judged units and the sinks. A
// unit is worth the probability of its keys together. Of many units, only the candidates are judged.
//
// W units lie side by side, one per lane. Largest logits and sums over a unit's keys then need no
// exchange between lanes.
#include <algorithm>
#include <optional>
#include <utility>

#include "candidates.h"
#include "sinks.h"

namespace {

constexpr int KEYS = W == 16 ? 4 : 2;     // of each of W units that are multiplied at once
constexpr int QUERIES = W == 16 ? 6 : 3;  // that share their loads
constexpr int FEW = 8;                    // queries, for which turning all keys around costs more
constexpr int VECTORS = 4;                // of keys that few queries multiply at once
constexpr float LAST = 8;                 // times that a head's last query counts
constexpr float NEXT = 0.125;             // of a unit's worth that the next unit is worth, at least

// What is found of each query, relative to the largest logit of each panel.
struct Found {
  float* sums;   // [H, rows, columns], of exponentials; 0 where no unit is
  float* most;   // [H, rows, panels]
};

// --- all keys of the judged units ----------------------------------------------------------------

// W rows of n 4-byte numbers to n rows of W. `flip`: bits that are inverted.
template <class Number>
void across(const Number* const* from, int64_t n, int32_t flip, Number* to) {
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    vf square[W];
#pragma GCC unroll 16
    for (int u = 0; u < W; u++) square[u] = load_as<vf>(from[u] + i);
    transpose(square);
#pragma GCC unroll 16
    for (int u = 0; u < W; u++) {
      const vi column = (vi)square[u] ^ flip;
      std::memcpy(to + (i + u) * W, &column, sizeof(column));
    }
  }
  for (; i < n; i++)
    for (int u = 0; u < W; u++) {
      int32_t bits;
      std::memcpy(&bits, from[u] + i, sizeof(bits));
      bits ^= flip;
      std::memcpy(to + i * W + u, &bits, sizeof(bits));
    }
}

// Logits, without the queries' steps, of `Rows` queries for `Keys` keys of each unit, `[Rows, unit, W]`;
// `top`: the largest of each lane so far, `[Rows, W]`.
template <int Rows, int Keys>
inline void multiply_keys(const Judge& judge, const int32_t* query, const int32_t* less,
                          const int32_t* keys, const float* scale, float* x, float* top) {
  const int64_t unit = judge.layer.unit;
  vi sums[Rows][Keys];
  multiply(query, less, judge.words(), sums, [&](int64_t word, int k) {
    return load_as<vi>(keys + (word * unit + k) * W);
  });
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    vf most = load(top + r * W);
#pragma GCC unroll 4
    for (int k = 0; k < Keys; k++) {
      const vf logit = __builtin_convertvector(sums[r][k], vf) * load(scale + k * W);
      store(x + (r * unit + k) * W, logit);
      most = vmax(logit, most);
    }
    store(top + r * W, most);
  }
}

// A panel's keys: as they are stored, of each unit; and with the units in lanes, or null. `next`: what
// is fetched meanwhile, a panel ahead.
struct Keys {
  const int32_t *codes[W], *next[W], *turned;
  const float *scales[W], *turned_scales;
};

// The same of a panel's W units with whole vectors of keys, which are multiplied as they are stored;
// only the logits are turned around.
template <int Rows>
void multiply_stored(const Judge& judge, const int32_t* query, const int32_t* less, const Keys& keys,
                     float* x, float* top) {
  static thread_local Scratch scratch;
  const int64_t unit = judge.layer.unit, parts = unit / W;
  float* found = scratch.take(Rows * unit * W);  // [Rows, parts, W units, W keys]
  for (int64_t part = 0; part < parts; part++)
    for (int u = 0; u < W; u += VECTORS) {
      vi sums[Rows][VECTORS];
      multiply(query, less, judge.words(), sums, [&](int64_t word, int v) {
        const int64_t at = word * unit + part * W;
        __builtin_prefetch(keys.next[u + v] + at, 0, 2);
        return load_as<vi>(keys.codes[u + v] + at) ^ SIGNS;
      });
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
          const vf logit =
              __builtin_convertvector(sums[r][v], vf) * load(keys.scales[u + v] + part * W);
          store(found + ((r * parts + part) * W + u + v) * W, logit);
        }
    }
  for (int64_t at = 0; at < Rows * parts; at++) {
    vf square[W];
#pragma GCC unroll 16
    for (int u = 0; u < W; u++) square[u] = load(found + (at * W + u) * W);
    transpose(square);
    float* largest = top + at / parts * W;
    vf most = load(largest);
#pragma GCC unroll 16
    for (int k = 0; k < W; k++) {
      store(x + (at * W + k) * W, square[k]);
      most = vmax(square[k], most);
    }
    store(largest, most);
  }
}

// Sums of a panel's units for `Rows` queries. `valid`: lanes that hold a unit.
template <int Rows>
void judge_rows(const Judge& judge, const Queries& queries, int64_t row, const Keys& keys, vi valid,
                int64_t panel, const Found& found) {
  static thread_local Scratch scratch;
  const int64_t unit = judge.layer.unit, words = judge.words();
  float* top = scratch.take(Rows * (unit + 1) * W);
  float* x = top + Rows * W;
  for (int r = 0; r < Rows; r++) store(top + r * W, splat(-INFINITY));
  const int32_t *query = queries.words + row * words, *less = queries.less + row;
  if (!keys.turned) multiply_stored<Rows>(judge, query, less, keys, x, top);
  int64_t k = keys.turned ? 0 : unit;
  for (; k + KEYS <= unit; k += KEYS)
    multiply_keys<Rows, KEYS>(judge, query, less, keys.turned + k * W, keys.turned_scales + k * W,
                              x + k * W, top);
  for (; k < unit; k++)
    multiply_keys<Rows, 1>(judge, query, less, keys.turned + k * W, keys.turned_scales + k * W,
                           x + k * W, top);
  for (int r = 0; r < Rows; r++) {
    const float most = largest(valid ? load(top + r * W) : splat(-INFINITY));
    const float factor = queries.step[row + r] * LOG2E;
    vf all = vf{};
    for (int64_t i = 0; i < unit; i++)
      all += vexp2(load(x + (r * unit + i) * W) * factor - most * factor);
    store(found.sums + (row + r) * judge.columns() + panel * W, valid ? all : vf{});
    found.most[(row + r) * judge.panels() + panel] = most * queries.step[row + r];
  }
}

// Where a panel of judged units is stored; what is left of its last lanes repeats the last unit.
inline void locate(const Judge& judge, int64_t head, int64_t panel, const int64_t* units,
                   const int32_t** codes, const float** scales) {
  for (int u = 0; u < W; u++) {
    const int64_t number = judge.units.begin + units[std::min(panel * W + u, judge.judged() - 1)];
    codes[u] = (const int32_t*)judge.stored().codes(head, number);
    scales[u] = judge.stored().scales(head, number);
  }
}

// One panel of judged units, `units`, under all queries of one KV head.
void judge_panel(const Judge& judge, const Found& found, const Queries& queries, int64_t head,
                 int64_t panel, const int64_t* units) {
  static thread_local Scratch scratch;
  const int64_t unit = judge.layer.unit, words = judge.words();
  const vi valid = lanes() + (int32_t)(panel * W) < (int32_t)judge.judged();
  Keys keys{};
  const float* next_scales[W];
  locate(judge, head, panel, units, keys.codes, keys.scales);
  locate(judge, head, std::min(panel + 1, judge.panels() - 1), units, keys.next, next_scales);
  for (int u = 0; u < W; u++) __builtin_prefetch(next_scales[u], 0, 2);
  int64_t row = head * judge.rows();
  const int64_t end = row + judge.rows();
  if (judge.rows() > FEW || unit % W) {
    for (int u = 0; u < W; u++)
      for (int64_t at = 0; at < words * unit; at += 16) __builtin_prefetch(keys.next[u] + at, 0, 2);
    float* scale = scratch.take((words + 1) * unit * W);
    int32_t* turned = (int32_t*)(scale + unit * W);
    across(keys.scales, unit, 0, scale);
    across(keys.codes, words * unit, SIGNS, turned);
    keys.turned = turned, keys.turned_scales = scale;
    for (; row + QUERIES <= end; row += QUERIES)
      judge_rows<QUERIES>(judge, queries, row, keys, valid, panel, found);
  }
  for (; row + 3 <= end; row += 3)
    judge_rows<3>(judge, queries, row, keys, valid, panel, found);
  for (; row < end; row++) judge_rows<1>(judge, queries, row, keys, valid, panel, found);
}

// One query's sums as probabilities, whose squares are added to `asked`, `times` times. `sinks`: its
// `Queries::sinks`. Nothing is added for a query that is not finite.
void share_row(const Judge& judge, float* sums, const float* most, float sinks, float times,
               float* asked) {
  const float top = std::max(*std::max_element(most, most + judge.panels()), sinks);
  vf all = vf{};
  for (int64_t panel = 0; panel < judge.panels(); panel++) {
    const vf here = load(sums + panel * W) * std::exp(most[panel] - top);
    store(sums + panel * W, here);
    all += here;
  }
  const float total = sum(all) + std::exp(sinks - top);
  if (std::isnan(total)) return;
  for (int64_t at = 0; at < judge.columns(); at += W) {
    const vf share = load(sums + at) / splat(total);
    store(asked + at, load(asked + at) + times * share * share);
  }
}

// The most that any of a set's query heads asks for each unit; `asked`: [H * G, n].
void over_heads(const Judge& judge, const float* asked, int64_t n, int64_t set, float* most) {
  const int64_t heads = judge.layer.num_queries() / judge.layer.num_sets;
  std::fill(most, most + n, 0.0f);
  for (int64_t q = set * heads; q < (set + 1) * heads; q++)
    for (int64_t u = 0; u < n; u++) most[u] = std::max(most[u], asked[q * n + u]);
}

// The units of a set with the most worth, ascending. A unit that was stored after another and continues its
// text is worth at least `NEXT` of it. So only units behind those that are chosen without this can take a
// place. `listed`: [judged]; `most`: [judged + num_chosen], the worth of these units, then room.
void choose_units(const Judge& judge, int64_t set, const int64_t* listed, float* most,
                  int64_t* chosen) {
  const int64_t n = judge.judged(), num = judge.asking.num_chosen;
  std::vector<std::pair<int64_t, float>> all;  // units and their worth
  choose(most, n, num, chosen);
  for (int64_t i = num - 1; i >= 0; i--) {  // last first, so that no worth is handed on twice
    const int64_t at = chosen[i], next = listed[at] + 1;
    if (next == judge.num_units() || !judge.goes_on(set, listed[at])) continue;
    const float worth = NEXT * most[at];
    if (at + 1 < n && listed[at + 1] == next) most[at + 1] = std::max(most[at + 1], worth);
    else all.emplace_back(next, worth);
  }
  for (int64_t i = 0; i < n; i++) all.emplace_back(listed[i], most[i]);
  std::sort(all.begin(), all.end());  // of units with equal worth, the first one is chosen
  for (size_t i = 0; i < all.size(); i++) most[i] = all[i].second;
  choose(most, all.size(), num, chosen);
  std::sort(chosen, chosen + num);
  for (int64_t i = 0; i < num; i++) chosen[i] = all[chosen[i]].first;
}

template <class T>
void run(const Judge& judge, const Rows& rows, float* asked, int64_t* listed, int64_t* chosen) {
  static thread_local Scratch scratch, of_filter;
  const Layer& layer = judge.layer;
  const int64_t heads = layer.num_heads, n = judge.judged(), judging = judge.judging();
  const int64_t columns = judge.columns(), num = heads * judge.rows(), size = judge.words();
  const int64_t asking = judge.num_queries(), parts = SinkSums::parts(judge);
  const int64_t room = n + judge.asking.num_chosen;
  float* sums = scratch.take(num * (columns + judge.panels()) + layer.num_queries() * columns +
                             layer.num_sets * room + Queries::numbers(asking, size) +
                             Queries::numbers(num, size) + 2 * asking * parts);
  const Found found{sums, sums + num * columns};
  float* shares = found.most + num * judge.panels();  // [H * G, columns]
  float* most = shares + layer.num_queries() * columns;
  const Queries all(most + layer.num_sets * room, asking, size);
  const Queries few(most + layer.num_sets * room + Queries::numbers(asking, size), num, size);
  const Queries& some = judging < judge.asking.num ? few : all;
  float* top = few.sinks + num;
  const SinkSums of_sinks{top, top + asking * parts};
  std::optional<Filter> filter;
  if (judge.filters()) filter.emplace(Filter{judge, of_filter});
  else
    for (int64_t i = 0; i < layer.num_sets * n; i++) listed[i] = i % n;
#pragma omp parallel if (omp_get_max_threads() > 1)
  {
#pragma omp for schedule(static) collapse(2)
    for (int64_t head = 0; head < heads; head++)
      for (int64_t part = 0; part < parts; part++) sum_part<T>(judge, rows, head, part, of_sinks);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < asking; row++) {
      plain_query<T>(judge, rows, row, all);
      all.sinks[row] = log_sum(of_sinks, row, parts);
    }
    if (judging < judge.asking.num)
#pragma omp single
      take_largest(judge, all, judging, [=](int64_t query) { return query * judging; }, few);
    if (filter) list_candidates(*filter, all, listed);
#pragma omp for schedule(static) collapse(2)
    for (int64_t head = 0; head < heads; head++)
      for (int64_t panel = 0; panel < judge.panels(); panel++)
        judge_panel(judge, found, some, head, panel,
                    listed + head / judge.heads_of_set() * n);
#pragma omp for schedule(static)
    for (int64_t q = 0; q < layer.num_queries(); q++) {
      float* share = shares + q * columns;
      std::fill(share, share + columns, 0.0f);
      for (int64_t r = q * judging, last = r + judging - 1; r <= last; r++)
        share_row(judge, sums + r * columns, found.most + r * judge.panels(), some.sinks[r],
                  r == last ? LAST : 1.0f, share);
      std::memcpy(asked + q * n, share, n * sizeof(float));
    }
#pragma omp for schedule(static)
    for (int64_t set = 0; set < layer.num_sets; set++) {
      over_heads(judge, asked, n, set, most + set * room);
      choose_units(judge, set, listed + set * n, most + set * room,
                   chosen + set * judge.asking.num_chosen);
    }
  }
}

}  // namespace

extern "C" int64_t asking_size() { return sizeof(Asking); }

// `asked`: [H * G, judged], what all tokens ask of `listed`: [S, judged], where all units or
// `num_candidates` are judged; and `chosen`: [S, num_chosen]. Units count from `begin` and ascend.
extern "C" void recall_units(const Layer* layer, const Rows* rows, const Units* units,
                             const Asking* asking, int64_t index, float* asked, int64_t* listed,
                             int64_t* chosen) {
  const Judge judge{*layer, *units, *asking, index};
  if (layer->dtype == FP32) run<float>(judge, *rows, asked, listed, chosen);
  if (layer->dtype == BF16) run<bf16>(judge, *rows, asked, listed, chosen);
#ifdef HAS_FP16
  if (layer->dtype == FP16) run<fp16>(judge, *rows, asked, listed, chosen);
#endif
}
