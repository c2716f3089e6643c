// SPDX-License-Identifier: Apache-2.0
// A stride of one request, after its attention: scores, then its tokens' rules, one after another
// with these scores, and the insertion of the survivors.
#pragma once

#include "attend_stride.h"
#include "rules.h"

namespace {

// The scores after this stride: what its queries gave, reduced over a set's heads, on decayed ones.
template <class T>
void new_scores(const Work<T>& work, const Packed& packed, int64_t set, float* scores) {
  const Layer& layer = work.layer;
  const Stride& stride = work.stride;
  const int64_t cached = work.cached, heads = layer.num_queries() / layer.num_sets;
  const float decay = work.scored() ? std::pow((double)work.step.decay(), work.num_tokens) : 1.0f;
  std::vector<float> reduced(packed.padded), old(work.old_slots);
  for (int64_t j = 0; j < packed.padded && work.scored(); j += W) {
    vf column[256];
    for (int64_t q = 0; q < heads; q++) {
      const float* mass = packed.mass + (set * heads + q) * packed.tiles * packed.padded + j;
      column[q] = load(mass);
      for (int64_t t = 1; t < packed.tiles; t++) column[q] += load(mass + t * packed.padded);
    }
    store(reduced.data() + j, reduce_heads(layer.reduction, column, heads));
  }
  gather(layer, stride.pages, set, (const float*)layer.score, old.data(), 0, work.old_slots);
  for (int64_t j = 0; j < cached; j++)
    scores[packed.rank[set * cached + j]] =
        old[packed.slot[set * cached + j]] * decay + reduced[j];
  for (int64_t t = 0; t < work.num_tokens; t++)
    scores[cached + t] = reduced[cached + t];
  for (int64_t t = 0; t < work.num_tokens && stride.given; t++)
    if (stride.scored + t >= 0) scores[stride.scored + t] = stride.given[t];
}

// Scores to scores per query that saw the token.
template <class T>
void divide_by_age(const Work<T>& work, const Packed& packed, int64_t set, float* scores) {
  const int64_t cached = work.cached, end = work.stream + work.num_tokens;
  std::vector<int32_t> token(work.old_slots);
  gather(work.layer, work.stride.pages, set, (const int32_t*)work.layer.token, token.data(), 0,
         work.old_slots);
  for (int64_t j = set * cached; j < (set + 1) * cached; j++)
    scores[packed.rank[j]] /= std::max<int64_t>(end - token[packed.slot[j]], 1);
  for (int64_t t = 0; t < work.num_tokens; t++) scores[cached + t] /= work.num_tokens - t;
}

// Run every token's rules. The line's columns are ranks before the stride, the new tokens behind.
template <class T>
void run_rules(const Work<T>& work, Line& line) {
  const Stride& stride = work.stride;
  for (int64_t t = 0; t < work.num_tokens; t++) {
    const int64_t at = work.stream + t, past = at - stride.transient;
    const int32_t* first = stride.first + (past < 0 ? at : stride.transient + past % stride.period);
    line.append(work.cached + t);
    for (int64_t i = first[0]; i < first[1]; i++)
      line.apply(Step::rule_at(stride.rules + i * RULE_COLUMNS));
  }
}

// Renumber one set's survivors; the k-th surviving new token takes the k-th free slot.
template <class T>
void insert(Work<T> work, const Packed& packed, int64_t set) {
  static thread_local Scratch scratch;
  Layer& layer = work.layer;
  const int32_t* pages = work.stride.pages;
  const int64_t total = work.total, padded = round_up(total, W);
  float *scores = scratch.take(4 * padded), *values = scores + padded;
  int32_t *columns = (int32_t*)(values + padded), *place = columns + padded;
  std::fill(scores, scores + total, 0.0f);
  if (layer.uses_scores) new_scores(work, packed, set, scores);
  std::copy(scores, scores + total, values);
  if (work.step[PER_AGE]) divide_by_age(work, packed, set, values);
  for (int64_t i = 0; i < total; i++) columns[i] = (int32_t)i;
  Line line{values, columns, 0, work.cached, work.step[NEWEST_STAYS] != 0};
  run_rules(work, line);

  std::fill(place, place + total, -1);
  for (int64_t i = line.begin; i < line.end; i++) place[columns[i]] = (int32_t)(i - line.begin);
  std::vector<int32_t> rank(work.new_slots, -1);
  std::vector<float> score(work.new_slots, 0.0f);
  gather(layer, pages, set, (const int32_t*)layer.rank, rank.data(), 0, work.old_slots);
  for (int64_t slot = 0; slot < work.old_slots; slot++) {
    const int32_t old = rank[slot];
    if (old < 0) continue;
    rank[slot] = place[old];
    score[slot] = scores[old];
  }
  const int64_t begin = layer.num_sets == 1 ? 0 : set;
  const int64_t end = layer.num_sets == 1 ? layer.num_heads : set + 1;
  int64_t slot = 0;
  for (int64_t t = 0; t < work.num_tokens; t++) {
    if (place[work.cached + t] < 0) continue;
    while (slot < work.new_slots && rank[slot] >= 0) slot++;
    if (slot == work.new_slots) break;  // the policy's count says that this cannot be
    rank[slot] = place[work.cached + t];
    score[slot] = scores[work.cached + t];
    const int64_t word = layer.word(pages[slot / layer.block_size], set) + slot % layer.block_size;
    layer.born[word] = (int32_t)(work.cached + t);
    if (layer.token) layer.token[word] = (int32_t)(work.stream + t);
    for (int64_t head = begin; head < end; head++) {
      T* row = work.slot_row(slot, head);
      std::memcpy(row, work.key(t, head), layer.head_size * sizeof(T));
      std::memcpy(row + layer.head_size, work.value(t, head), layer.head_size * sizeof(T));
    }
  }
  scatter(layer, pages, set, layer.rank, (const int32_t*)rank.data(), 0, work.new_slots);
  if (layer.uses_scores)
    scatter(layer, pages, set, layer.score, (const float*)score.data(), 0, work.new_slots);
}

}  // namespace
