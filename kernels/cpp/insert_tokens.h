// SPDX-License-Identifier: Apache-2.0
// Insertion of one new token of each of many requests: scores, rules and its slot.
#pragma once

#include <numeric>

#include "attend_tokens.h"
#include "drafts.h"
#include "rules.h"

namespace {

// Replaces the reference logits with the factors that turn exponentials into probabilities.
inline void make_factors(const Mass& mass, int64_t query, int64_t slots) {
  float* factor = mass.relative + query * mass.blocks;
  for (int64_t block = 0; block * W < slots; block += W)
    store(factor + block, vexp(load(factor + block) - mass.row_max[query]) * mass.row_scale[query]);
}

// scores = decay * scores + weight * probability, reduced over the heads of a set. The new
// token's own probability is the score at `entry`.
inline void update_scores(const Layer& layer, const Step& step, const Mass& mass, int64_t set,
                          int64_t entry, float* scores) {
  const int64_t slots = step[OLD_SLOTS], heads = layer.num_queries() / layer.num_sets;
  const int64_t first = set * heads;
  const float decay = step.decay(), weight = step.weight();
  vf column[256];
  for (int64_t q = first; q < first + heads; q++) make_factors(mass, q, slots);
  for (int64_t i = 0; i < slots; i += W) {
    const float* exps = mass.exps + first * mass.padded + i;
    const float* factor = mass.relative + first * mass.blocks + i / W;
    for (int64_t q = 0; q < heads; q++)
      column[q] = load(exps + q * mass.padded) * factor[q * mass.blocks];
    vf reduced = reduce_heads(layer.reduction, column, heads);
    store(scores + i, load(scores + i) * decay + reduced * weight);
  }
  for (int64_t q = 0; q < heads; q++) column[q] = splat(mass.own[first + q]);
  scores[entry] = reduce_heads(layer.reduction, column, heads)[0] * weight;
}

// The probability of W units from place `from` on, summed over `count` queries. `rank` is the rank
// of each place, or -1 if it is empty.
inline vf unit_mass(const Layer& layer, const Mass& mass, int64_t query, int64_t count,
                    int64_t cached, const int32_t* rank, int64_t from, int64_t end) {
  const int64_t unit = layer.unit;
  const vi inside = lanes() < (int32_t)unit;
  vf sums[W] = {};
  for (int64_t i = 0; i < std::min<int64_t>(W, end - from); i++) {
    if (rank[from + i] < 0) continue;
    const int64_t begin = (from + i) * unit;
    const int64_t slots = begin + std::min(unit, cached - rank[from + i] * unit);
    vf sum{};
    for (int64_t slot = begin; slot < slots; slot += W) {
      const float* exps = mass.exps + query * mass.padded + slot;
      const float* factor = mass.relative + query * mass.blocks + slot / W;
      for (int64_t q = 0; q < count; q++)
        sum += load(exps + q * mass.padded) * factor[q * mass.blocks];
    }
    sums[i] = inside ? sum : vf{};
  }
  fold_within<W>(sums);
  return sums[0];
}

// The same for units of several tokens, W units per register. For a mean, heads are summed first,
// because summing the lanes of a register is the slowest part.
inline void update_units(const Layer& layer, const Step& step, const Mass& mass, int64_t set,
                         const int32_t* rank, int64_t entry, float* scores) {
  const int64_t slots = step[OLD_SLOTS], units = slots / layer.unit, cached = step[CACHED];
  const int64_t heads = layer.num_queries() / layer.num_sets, first = set * heads;
  const int64_t each = layer.reduction == MEAN ? heads : 1, columns = heads / each;
  const float decay = step.decay(), weight = step.weight() / (float)each;
  vf column[256];
  for (int64_t q = first; q < first + heads; q++) make_factors(mass, q, slots);
  for (int64_t u = 0; u <= std::max(entry, units - 1); u += W) {
    if (u >= units && u + W <= entry) continue;  // a new unit's `entry` is behind all others
    const vi at_entry = lanes() == (int32_t)(entry - u);
    for (int64_t i = 0; i < columns; i++) {
      const float* own = mass.own + first + i * each;
      column[i] = unit_mass(layer, mass, first + i * each, each, cached, rank, u, units);
      column[i] += at_entry ? splat(std::accumulate(own, own + each, 0.0f)) : vf{};
    }
    vf reduced = reduce_heads(layer.reduction, column, columns);
    store(scores + u, load(scores + u) * decay + reduced * weight);
  }
}

// Updates the scores of units after this query. `entry` is the new token's unit.
template <class T>
void new_scores(const Request<T>& request, const Mass& mass, int64_t set, const int32_t* rank,
                int64_t entry, float* scores) {
  const Tokens& batch = request.batch;
  const Step step = request.step();
  const int32_t scored = batch.given ? batch.scored[request.b] : -1;
  const int64_t units = step[OLD_SLOTS] / request.layer.unit;
  for (int64_t i = 0; i < units && scored >= 0; i++)
    if (rank[i] == scored) scores[i] += request.layer.own_score(set, batch.given[request.b]);
  if (!step.weight()) return;
  if (request.layer.unit == 1) return update_scores(request.layer, step, mass, set, entry, scores);
  update_units(request.layer, step, mass, set, rank, entry, scores);
}

// The place of the unit with rank `wanted`.
inline int64_t place_of(const int32_t* rank, int64_t units, int64_t wanted) {
  int64_t place = 0;
  while (place < units && rank[place] != wanted) place++;
  return place;
}

// Writes the new token's row in every head of a set.
template <class T>
void write_slot(const Request<T>& request, const Layer& layer, int64_t set, int64_t slot) {
  const int64_t page = request.pages()[slot / layer.block_size], offset = slot % layer.block_size;
  for (int64_t head = layer.first_head(set); head < layer.first_head(set + 1); head++) {
    float* scale = layer.row_scale ? layer.scale_of(page, head, offset) : nullptr;
    write_row<T>(layer, request.key(head), request.value(head), nullptr,
                 layer.row(page, head, offset), scale, layer.block_size);
  }
}

// Puts the new token into the next slot of its unit, or begins a unit in the first free place, and
// applies the rules of one head set. Only changed ranks are written.
template <class T>
void insert(const Request<T>& request, const Mass& mass, int64_t set) {
  static thread_local Scratch scratch;
  Layer layer = request.layer;
  if (request.is_padding()) return;
  const Step step = request.step();
  const int64_t unit = layer.unit, offset = step[STREAM] % unit;
  const int64_t old_units = step[OLD_SLOTS] / unit, units = step[NEW_SLOTS] / unit;
  const int32_t* pages = request.pages();
  const int64_t padded = round_up(units + 1, BLOCK), last = padded - 1;  // entry of a new unit
  float* score = scratch.take(3 * padded);
  int32_t* rank = (int32_t*)(score + padded);
  int32_t* token = rank + padded;
  const int64_t place = request.batch.saves ? request.batch.saves[request.b] : -1;
  if (place >= 0) save_words(layer, pages, set, place, old_units);
  gather(layer, pages, set, (const int32_t*)layer.rank, rank, 0, old_units);
  std::fill(rank + old_units, rank + padded, -1);
  const int32_t filling = (int32_t)(step[CACHED] / unit);
  const int64_t entry = offset ? place_of(rank, old_units, filling) : last;
  rank[entry] = filling;
  if (layer.uses_scores) {
    gather(layer, pages, set, (const float*)layer.score, score, 0, old_units);
    std::fill(score + old_units, score + padded, 0.0f);
    new_scores(request, mass, set, rank, entry, score);
  }
  if (step[PER_AGE]) {
    gather(layer, pages, set, (const int32_t*)layer.token, token, 0, old_units);
    token[last] = (int32_t)step[STREAM];
  }
  Places places{padded, rank, score, step[PER_AGE] ? token : nullptr, step[STREAM] + 1,
                step[NEWEST_STAYS] != 0};
  bool evicts = false;
  step.each_rule(request.batch.rules, [&](const Rule& rule) {
    evicts |= rule.evicts > 0;
    places.apply(rule);
  });

  const int64_t target = entry < last ? entry : rank[last] < 0 ? -1 : places.free(units);
  if (place >= 0) save_slot(layer, pages, set, place, target < 0 ? -1 : target * unit + offset);
  if (target >= 0) write_slot(request, layer, set, target * unit + offset);
  if (target >= 0 && entry == last) {
    rank[target] = rank[last];
    score[target] = score[last];
    const int64_t page = pages[target / layer.page_units];
    const int64_t word = layer.word(page, set) + target % layer.page_units;
    layer.born[word] = (int32_t)step[CACHED] + request.shift();
    if (layer.token) layer.token[word] = (int32_t)step[STREAM];
  }
  if (evicts || units > old_units)
    scatter(layer, pages, set, layer.rank, (const int32_t*)rank, 0, units);
  else if (target >= 0 && entry == last)
    scatter(layer, pages, set, layer.rank, (const int32_t*)rank + target, target, target + 1);
  if (layer.uses_scores) scatter(layer, pages, set, layer.score, (const float*)score, 0, units);
}

}  // namespace
