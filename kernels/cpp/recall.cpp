// SPDX-License-Identifier: Apache-2.0
// Which stored units some tokens attend to most. Keys have 8 bits, before rotation, each with its own
// scale, and so do queries: products are integers, so every machine chooses alike. A unit is worth its
// keys' largest exponential and their mean.
//
// Of many units, a few queries first select candidates by the mean of each unit's keys, its centre.
// Only candidates are judged by all of their keys.
//
// W units lie side by side, one per lane. Largest logits and sums over a unit's keys then need no
// exchange between lanes.
#include <functional>

#include "units.h"

// The tokens that ask, and for what.
struct Asking {
  const int64_t *places, *positions;  // [num_asking], of tokens in the step, and of their queries
  int64_t num;             // of these tokens
  int64_t num_candidates;  // units that are judged by all of their keys, at most
  int64_t num_filtering;   // queries that select them, evenly spread, at most
  int64_t num_chosen;
};

namespace {

constexpr int KEYS = W == 16 ? 4 : 2;     // of each of W units that are multiplied at once
constexpr int QUERIES = W == 16 ? 6 : 3;  // that share their loads
constexpr int64_t LEVELS = 127;           // a query's channels are -LEVELS .. LEVELS
constexpr int32_t SIGNS = (int32_t)0x80808080;
constexpr float LOG2E = 1.44269504f;
constexpr int64_t BLOCK = 16;  // panels that a thread takes at once
constexpr int64_t AHEAD = 2;   // panels that are fetched before they are read


struct Judge {
  const Layer& layer;
  const Units& units;
  const Asking& asking;
  int64_t index;  // of the layer
  LayerUnits stored() const { return {layer, units, index}; }
  int64_t num_units() const { return units.end - units.begin; }
  int64_t words() const { return layer.head_size / 4; }
  // Queries of one KV head: those of a query head follow each other.
  int64_t rows() const { return layer.group * asking.num; }
  // Units that are judged by all of their keys, in panels of W.
  int64_t judged() const { return std::min(num_units(), asking.num_candidates); }
  int64_t panels() const { return (judged() + W - 1) / W; }
  int64_t columns() const { return panels() * W; }
  // Panels of all units' centres, from the first unit of all chunks on.
  int64_t centre_panels() const { return units.num_chunks * units.chunk_units / W; }
  int64_t centre_columns() const { return centre_panels() * W; }
  // Queries of a query head that select candidates.
  int64_t filtering() const { return std::min(asking.num, asking.num_filtering); }
  int64_t filtering_row(int64_t i) const {
    return (i + 1) * asking.num / filtering() - 1;
  }
  // Of all query heads.
  int64_t filtering_rows() const { return layer.num_queries() * filtering(); }
  int64_t blocks() const { return (centre_panels() + BLOCK - 1) / BLOCK; }
  // Scratch memory of `list_candidates`.
  int64_t filter_size() const {
    const int64_t panels = centre_panels() + blocks();
    return filtering_rows() * (panels * W + 2 * blocks() + 1) + layer.num_sets * centre_columns();
  }
  int64_t heads_of_set() const { return layer.num_heads / layer.num_sets; }
};

// Queries as integers; what makes up for keys that count from 128.
struct Queries {
  int32_t* words;  // [H, rows, D / 4], four channels each
  int32_t* less;   // [H, rows]
  float* step;     // [H, rows]
};

// What is found of each query, relative to the largest logit of each panel.
struct Found {
  float* worth;  // [H, rows, columns]; 0 where no unit is
  float* most;   // [H, rows, panels]
};

// One fp32 query as integers.
inline void round_query(const Judge& judge, const float* query, int32_t* words, int32_t* less,
                        float* step) {
  const float most = largest_magnitude(query, judge.layer.head_size);
  *step = most / LEVELS;
  const float levels = most > 0 ? LEVELS / most : 0;
  *less = 0;
  for (int64_t word = 0; word < judge.words(); word++) {
    int8_t part[4];
    for (int64_t i = 0; i < 4; i++) {
      part[i] = (int8_t)std::rint(query[word * 4 + i] * levels);
      *less -= 128 * part[i];
    }
    std::memcpy(words + word, part, sizeof(part));
  }
}

// The tokens' query heads, turned back by their positions, times the scale of logits.
template <class T>
void plain_queries(const Judge& judge, const Rows& rows, const Queries& queries) {
  static thread_local Scratch scratch;
  const Layer& layer = judge.layer;
  const int64_t size = layer.head_size;
  float* query = scratch.take(round_up(size, W));
  int64_t row = 0;
  for (int64_t head = 0; head < layer.num_queries(); head++)
    for (int64_t i = 0; i < judge.asking.num; i++, row++) {
      const T* from = (const T*)rows.query + judge.asking.places[i] * rows.query_stride;
      widen_row(query, from + head * size, size);
      if (layer.rotation) rotate(layer, query, judge.asking.positions[i]);
      for (int64_t c = 0; c < size; c++) query[c] *= layer.scale;
      round_query(judge, query, queries.words + row * judge.words(), queries.less + row,
                  queries.step + row);
    }
}

// --- candidates ----------------------------------------------------------------------------------

// Results for a block of panels of centres. R is the number of filtering queries of all query heads.
struct Block {
  int64_t first, last;  // panels
  float* logits;        // [panels, R, W]
  float* most;          // [R, W], the largest of each lane
  float *top, *sum;     // [R], the largest, times log2(e), and the sum of exponentials beside it
};

// Computes the logits of W centres for `Rows` filtering queries of one query head, from number `first`
// on. `row` is the head's first row in `queries`. `most` becomes the larger of itself and the logits.
template <int Rows>
inline void multiply_centres(const Judge& judge, const Queries& queries, int64_t row, int64_t first,
                             const int32_t* centre, vf scale, vi valid, float* logits,
                             float* most) {
  const int64_t words = judge.words(), units = judge.units.chunk_units;
  int64_t at[Rows];
  vi sums[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    at[r] = row + judge.filtering_row(first + r);
    sums[r] = splat_int(queries.less[at[r]]);
  }
  for (int64_t word = 0; word < words; word++) {
    const vi here = load_as<vi>(centre + word * units) ^ SIGNS;
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
      sums[r] = add_products(sums[r], here, queries.words[at[r] * words + word]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    const vf logit = __builtin_convertvector(sums[r], vf) * scale * queries.step[at[r]];
    const vf there = valid ? logit : splat(-INFINITY);
    store(logits + r * W, there);
    store(most + r * W, vmax(there, load(most + r * W)));
  }
}

// One panel's centres under the filtering queries of all heads.
void judge_centres(const Judge& judge, const Queries& queries, int64_t panel, float* logits,
                   float* most) {
  const Layer& layer = judge.layer;
  const vi number = lanes() + (int32_t)(panel * W);
  const vi valid = (number >= (int32_t)judge.units.begin) & (number < (int32_t)judge.units.end);
  const int64_t num = judge.filtering();
  for (int64_t q = 0; q < layer.num_queries(); q++) {
    const int64_t head = q / layer.group, row = q * judge.asking.num;
    const auto* centre = (const int32_t*)judge.stored().centre(head, panel * W);
    const vf scale = load(judge.stored().centre_scale(head, panel * W));
    int64_t i = 0;
    for (; i + 8 <= num; i += 8, logits += 8 * W, most += 8 * W)
      multiply_centres<8>(judge, queries, row, i, centre, scale, valid, logits, most);
    for (; i < num; i++, logits += W, most += W)
      multiply_centres<1>(judge, queries, row, i, centre, scale, valid, logits, most);
  }
}

// Prefetches a panel's centres; those of all heads are adjacent.
inline void prefetch_centres(const Judge& judge, int64_t panel) {
  const int64_t bytes = judge.layer.num_heads * judge.layer.head_size * judge.units.chunk_units;
  const int8_t* centre = judge.stored().centre(0, panel * W);
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(centre + at);
  for (int64_t head = 0; head < judge.layer.num_heads; head++)
    __builtin_prefetch(judge.stored().centre_scale(head, panel * W));
}

// Computes a block's logits, then their sums while the logits are still in the processor's cache.
void judge_block(const Judge& judge, const Queries& queries, const Block& block) {
  const int64_t rows = judge.filtering_rows();
  std::fill(block.most, block.most + rows * W, -INFINITY);
  for (int64_t panel = block.first; panel < block.last; panel++) {
    if (panel + AHEAD < judge.centre_panels()) prefetch_centres(judge, panel + AHEAD);
    float* logits = block.logits + (panel - block.first) * rows * W;
    judge_centres(judge, queries, panel, logits, block.most);
  }
  for (int64_t r = 0; r < rows; r++) {
    const float top = block.top[r] = largest(load(block.most + r * W)) * LOG2E;
    vf sums = vf{};
    for (int64_t panel = 0; panel < block.last - block.first && top > -INFINITY; panel++)
      sums += vexp2(load(block.logits + (panel * rows + r) * W) * LOG2E - top);
    block.sum[r] = sum(sums);
  }
}

// log2 of the sum of a query's exponentials over all blocks.
float log_sum(const float* tops, const float* sums, int64_t blocks, int64_t rows) {
  float top = -INFINITY, total = 0;
  for (int64_t i = 0; i < blocks; i++) top = std::max(top, tops[i * rows]);
  for (int64_t i = 0; i < blocks; i++)
    if (sums[i * rows] > 0) total += sums[i * rows] * std::exp2(tops[i * rows] - top);
  return top + std::log2(total);
}

// log2 of the largest probability that any query of a set gives each unit; `most`: [S, centre
// columns].
void largest_shares(const Judge& judge, const float* sums, const Block& block, float* most) {
  const int64_t rows = judge.filtering_rows(), of_set = rows / judge.layer.num_sets;
  for (int64_t panel = block.first; panel < block.last; panel++) {
    const float* at = block.logits + (panel - block.first) * rows * W;
    for (int64_t set = 0; set < judge.layer.num_sets; set++) {
      vf share = splat(-INFINITY);
      for (int64_t r = set * of_set; r < (set + 1) * of_set; r++)
        share = vmax(load(at + r * W) * LOG2E - sums[r], share);
      store(most + set * judge.centre_columns() + panel * W, share);
    }
  }
}

// --- all keys of the judged units ----------------------------------------------------------------

// W rows of n 4-byte numbers to n rows of W.
inline void across(const int32_t* const* from, int64_t n, int32_t flip, int32_t* to) {
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
    for (int u = 0; u < W; u++) to[i * W + u] = from[u][i] ^ flip;
}

// Logits, without the queries' steps, of `Rows` queries for `Keys` keys of each unit, `[Rows, unit, W]`;
// `top`: the largest of each unit so far, `[Rows, W]`.
template <int Rows, int Keys>
inline void multiply_keys(const Judge& judge, const int32_t* query, const int32_t* less,
                          const int32_t* keys, const float* scale, float* x, float* top) {
  const int64_t words = judge.words(), unit = judge.layer.unit;
  vi sums[Rows][Keys];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
    for (int k = 0; k < Keys; k++) sums[r][k] = splat_int(less[r]);
  for (int64_t word = 0; word < words; word++) {
    vi key[Keys];
#pragma GCC unroll 4
    for (int k = 0; k < Keys; k++) key[k] = load_as<vi>(keys + (word * unit + k) * W);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int k = 0; k < Keys; k++)
        sums[r][k] = add_products(sums[r][k], key[k], query[r * words + word]);
  }
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

// What the units of a panel are worth to `Rows` queries. `valid`: lanes that hold a unit.
template <int Rows>
void judge_rows(const Judge& judge, const Queries& queries, int64_t row, const int32_t* keys,
                const float* scale, vi valid, int64_t panel, const Found& found) {
  static thread_local Scratch scratch;
  const int64_t unit = judge.layer.unit, words = judge.words();
  float* top = scratch.take(Rows * (unit + 1) * W);
  float* x = top + Rows * W;
  for (int r = 0; r < Rows; r++) store(top + r * W, splat(-INFINITY));
  const int32_t *query = queries.words + row * words, *less = queries.less + row;
  int64_t k = 0;
  for (; k + KEYS <= unit; k += KEYS)
    multiply_keys<Rows, KEYS>(judge, query, less, keys + k * W, scale + k * W, x + k * W, top);
  for (; k < unit; k++)
    multiply_keys<Rows, 1>(judge, query, less, keys + k * W, scale + k * W, x + k * W, top);
  for (int r = 0; r < Rows; r++) {
    const vf best = valid ? load(top + r * W) : splat(-INFINITY);
    const float most = largest(best), factor = queries.step[row + r] * LOG2E;
    vf all = vf{};
    for (int64_t i = 0; i < unit; i++)
      all += vexp2(load(x + (r * unit + i) * W) * factor - most * factor);
    const vf worth = vexp2(best * factor - most * factor) + all * (1.0f / unit);
    store(found.worth + (row + r) * judge.columns() + panel * W, valid ? worth : vf{});
    found.most[(row + r) * judge.panels() + panel] = most * queries.step[row + r];
  }
}

// Prefetches the keys and scales that `judge_panel` will read.
inline void prefetch_panel(const Judge& judge, int64_t head, int64_t panel, const int64_t* units) {
  const int64_t unit = judge.layer.unit, end = std::min((panel + 1) * W, judge.judged());
  for (int64_t u = panel * W; u < end; u++) {
    const int64_t number = judge.units.begin + units[u];
    const int8_t* codes = judge.stored().codes(head, number);
    const float* scales = judge.stored().scales(head, number);
    for (int64_t at = 0; at < judge.layer.head_size * unit; at += 64)
      __builtin_prefetch(codes + at, 0, 2);
    for (int64_t at = 0; at < unit; at += 16) __builtin_prefetch(scales + at, 0, 2);
  }
}

// One panel of judged units, `units`, under all queries of one KV head.
void judge_panel(const Judge& judge, const Found& found, const Queries& queries, int64_t head,
                 int64_t panel, const int64_t* units) {
  static thread_local Scratch scratch;
  const int64_t unit = judge.layer.unit, words = judge.words();
  const vi valid = lanes() + (int32_t)(panel * W) < (int32_t)judge.judged();
  const int32_t *codes[W], *scales[W];
  for (int u = 0; u < W; u++) {
    const int64_t number = judge.units.begin + units[std::min(panel * W + u, judge.judged() - 1)];
    codes[u] = (const int32_t*)judge.stored().codes(head, number);
    scales[u] = (const int32_t*)judge.stored().scales(head, number);
  }
  if (panel + 1 < judge.panels()) prefetch_panel(judge, head, panel + 1, units);
  float* scale = scratch.take((words + 1) * unit * W);
  int32_t* keys = (int32_t*)(scale + unit * W);
  across(scales, unit, 0, (int32_t*)scale);
  across(codes, words * unit, SIGNS, keys);
  int64_t row = head * judge.rows();
  const int64_t end = row + judge.rows();
  for (; row + QUERIES <= end; row += QUERIES)
    judge_rows<QUERIES>(judge, queries, row, keys, scale, valid, panel, found);
  for (; row + 3 <= end; row += 3)
    judge_rows<3>(judge, queries, row, keys, scale, valid, panel, found);
  for (; row < end; row++) judge_rows<1>(judge, queries, row, keys, scale, valid, panel, found);
}

// One query's worths as shares of all of them; `asked` becomes the larger.
void share_row(const Judge& judge, float* worth, const float* most, float* asked) {
  const float largest_logit = *std::max_element(most, most + judge.panels());
  vf sums = vf{};
  for (int64_t panel = 0; panel < judge.panels(); panel++) {
    const vf here = load(worth + panel * W) * std::exp(most[panel] - largest_logit);
    store(worth + panel * W, here);
    sums += here;
  }
  const vf total = splat(sum(sums));
  for (int64_t at = 0; at < judge.columns(); at += W)
    store(asked + at, vmax(load(worth + at) / total, load(asked + at)));
}

// --- both ------------------------------------------------------------------------------------------

// The `num` of `n` units with the largest numbers, ascending; of equal ones the first.
void choose(const float* most, int64_t n, int64_t num, int64_t* chosen) {
  static thread_local std::vector<float> sorted;
  sorted.assign(most, most + n);
  std::nth_element(sorted.begin(), sorted.begin() + num - 1, sorted.end(), std::greater<float>());
  const float least = sorted[num - 1];
  int64_t equal = num;
  for (int64_t u = 0; u < n; u++) equal -= most[u] > least;
  for (int64_t u = 0, at = 0; u < n && at < num; u++)
    if (most[u] > least || (most[u] == least && equal-- > 0)) chosen[at++] = u;
}

// The most that any of a set's query heads asks for each unit; `asked`: [H * G, n].
void over_heads(const Judge& judge, const float* asked, int64_t n, int64_t set, float* most) {
  const int64_t heads = judge.layer.num_queries() / judge.layer.num_sets;
  std::fill(most, most + n, 0.0f);
  for (int64_t q = set * heads; q < (set + 1) * heads; q++)
    for (int64_t u = 0; u < n; u++) most[u] = std::max(most[u], asked[q * n + u]);
}

// Lists the units that are judged by all of their keys. Called by all threads of a team.
void list_candidates(const Judge& judge, const Queries& queries, float* scratch, int64_t* listed) {
  const Layer& layer = judge.layer;
  const int64_t rows = judge.filtering_rows(), panels = judge.centre_panels();
  const int64_t blocks = judge.blocks(), columns = judge.centre_columns();
  float *maxima = scratch + panels * rows * W, *most = maxima + blocks * rows * W;
  float *tops = most + layer.num_sets * columns, *sums = tops + blocks * rows;
  float* all = sums + blocks * rows;
  auto block = [=](int64_t i) -> Block {
    const int64_t first = i * BLOCK;
    return {first, std::min(first + BLOCK, panels), scratch + first * rows * W,
            maxima + i * rows * W, tops + i * rows, sums + i * rows};
  };
#pragma omp for schedule(static)
  for (int64_t i = 0; i < blocks; i++) judge_block(judge, queries, block(i));
#pragma omp single
  for (int64_t r = 0; r < rows; r++) all[r] = log_sum(tops + r, sums + r, blocks, rows);
#pragma omp for schedule(static)
  for (int64_t i = 0; i < blocks; i++) largest_shares(judge, all, block(i), most);
#pragma omp for schedule(static)
  for (int64_t set = 0; set < layer.num_sets; set++)
    choose(most + set * columns + judge.units.begin, judge.num_units(), judge.judged(),
           listed + set * judge.judged());
}

template <class T>
void run(const Judge& judge, const Rows& rows, float* asked, int64_t* listed, int64_t* chosen) {
  static thread_local Scratch scratch;
  const Layer& layer = judge.layer;
  const int64_t heads = layer.num_heads, n = judge.judged(), asking = judge.asking.num;
  const int64_t columns = judge.columns(), queries = heads * judge.rows();
  const bool filters = n < judge.num_units();
  float* worth = scratch.take(queries * (columns + judge.panels() + judge.words() + 2) +
                              layer.num_queries() * columns + layer.num_sets * n +
                              filters * judge.filter_size());
  float* shares = worth + queries * columns;  // [H * G, columns]
  const Found found{worth, shares + layer.num_queries() * columns};
  float* step = found.most + queries * judge.panels();
  int32_t* less = (int32_t*)(step + queries);
  int32_t* words = less + queries;
  float* most = (float*)(words + queries * judge.words());
  const Queries asked_by{words, less, step};
  plain_queries<T>(judge, rows, asked_by);
  if (!filters)
    for (int64_t i = 0; i < layer.num_sets * n; i++) listed[i] = i % n;
#pragma omp parallel if (omp_get_max_threads() > 1)
  {
    if (filters) list_candidates(judge, asked_by, most + layer.num_sets * n, listed);
#pragma omp for schedule(static) collapse(2)
    for (int64_t head = 0; head < heads; head++)
      for (int64_t panel = 0; panel < judge.panels(); panel++)
        judge_panel(judge, found, asked_by, head, panel,
                    listed + head / judge.heads_of_set() * n);
#pragma omp for schedule(static)
    for (int64_t q = 0; q < layer.num_queries(); q++) {
      float* share = shares + q * columns;
      std::fill(share, share + columns, 0.0f);
      for (int64_t r = q * asking; r < (q + 1) * asking; r++)
        share_row(judge, worth + r * columns, found.most + r * judge.panels(), share);
      std::memcpy(asked + q * n, share, n * sizeof(float));
    }
#pragma omp for schedule(static)
    for (int64_t set = 0; set < layer.num_sets; set++) {
      int64_t* mine = chosen + set * judge.asking.num_chosen;
      over_heads(judge, asked, n, set, most + set * n);
      choose(most + set * n, n, judge.asking.num_chosen, mine);
      for (int64_t i = 0; i < judge.asking.num_chosen; i++) mine[i] = listed[set * n + mine[i]];
    }
  }
}

}  // namespace

extern "C" int64_t asking_size() { return sizeof(Asking); }

// `asked`: [H * G, judged], the most that any token asks of `listed`: [S, judged], where all units or
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
