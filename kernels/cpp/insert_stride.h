// SPDX-License-Identifier: Apache-2.0
// Insertion of one request's stride after attention: updates scores, applies the rules of every
// token in order, and inserts the survivors.
#pragma once

#include <cassert>

#include "attend_stride.h"
#include "rules.h"

namespace {

// Attention that each unit received from the stride's queries, reduced over the heads of a set.
template <class T>
void unit_masses(const Work<T>& work, const Packed<T>& packed, int64_t set, float* reduced) {
  const Layer& layer = work.layer;
  const int64_t heads = layer.num_queries() / layer.num_sets, unit = work.unit;
  const int64_t units = round_up(work.old_units + work.new_units, W);
  std::vector<float> of_token(round_up(packed.padded + unit, W)), of_unit(heads * units);
  for (int64_t q = 0; q < heads; q++) {
    const float* mass = packed.mass + (set * heads + q) * packed.runs * packed.padded;
    for (int64_t j = 0; j < packed.padded; j += W) {
      vf sum = load(mass + j);
      for (int64_t r = 1; r < packed.runs; r++) sum += load(mass + r * packed.padded + j);
      store(of_token.data() + j, sum);
    }
    for (int64_t u = 0; u < work.old_units + work.new_units; u++) {
      float sum = of_token[u * unit];
      for (int64_t i = 1; i < unit; i++) sum += of_token[u * unit + i];
      of_unit[q * units + u] = sum;
    }
  }
  for (int64_t u = 0; u < units; u += W) {
    vf column[256];
    for (int64_t q = 0; q < heads; q++) column[q] = load(of_unit.data() + q * units + u);
    store(reduced + u, reduce_heads(layer.reduction, column, heads));
  }
}

// Scores after this stride, by rank, new units last: decayed scores plus new attention.
template <class T>
void new_scores(const Work<T>& work, const Packed<T>& packed, int64_t set, float* scores) {
  const Layer& layer = work.layer;
  const Stride& stride = work.stride;
  const int64_t unit = work.unit, places = work.old_slots / unit;
  const float decay = work.scored() ? std::pow((double)work.step.decay(), work.num_tokens) : 1.0f;
  std::vector<float> reduced(round_up(work.old_units + work.new_units, W)), old(places);
  if (work.scored()) unit_masses(work, packed, set, reduced.data());
  gather(layer, stride.pages, set, (const float*)layer.score, old.data(), 0, places);
  for (int64_t u = 0; u < work.old_units; u++) {
    const int64_t j = set * work.cached + u * unit;
    scores[packed.rank[j] / unit] = old[packed.slot[j] / unit] * decay + reduced[u];
  }
  for (int64_t u = work.old_units; u < work.old_units + work.new_units; u++)
    scores[u] = reduced[u];
  for (int64_t t = 0; t < work.num_tokens && stride.given; t++)
    if (stride.scored + t >= 0)
      scores[(stride.scored + t) / unit] += layer.own_score(set, stride.given[t]);
}

// Divides scores by the number of queries that saw the unit's first token.
template <class T>
void divide_by_age(const Work<T>& work, const Packed<T>& packed, int64_t set, float* scores) {
  const int64_t unit = work.unit, places = work.old_slots / unit;
  const int64_t end = work.stream + work.num_tokens;
  std::vector<int32_t> token(places);
  gather(work.layer, work.stride.pages, set, (const int32_t*)work.layer.token, token.data(), 0,
         places);
  for (int64_t j = set * work.cached; j < (set + 1) * work.cached; j += unit)
    scores[packed.rank[j] / unit] /= std::max<int64_t>(end - token[packed.slot[j] / unit], 1);
  for (int64_t u = 0; u < work.new_units; u++)
    scores[work.old_units + u] /= work.num_tokens - u * unit;
}

// Applies the rules of every new unit. Columns of the line are ranks before the stride, then new
// units. An incomplete unit joins without rules.
template <class T>
void run_rules(const Work<T>& work, Line& line) {
  const Stride& stride = work.stride;
  for (int64_t u = 0; u < work.new_units; u++) {
    line.append(work.old_units + u);
    if (u == work.complete) return;
    const int64_t at = work.stream / work.unit + u, past = at - stride.transient;
    const int32_t* first = stride.first + (past < 0 ? at : stride.transient + past % stride.period);
    for (int64_t i = first[0]; i < first[1]; i++) {
      Rule rule = Step::rule_at(stride.rules + i * RULE_COLUMNS);
      rule.lo += stride.recalled;
      rule.hi += stride.recalled;
      line.apply(rule);
    }
  }
}

// Writes the rows of a new unit in every head of a set. Keys of an incomplete unit are rotated by
// the distance that this stride's evictions moved it, because its later tokens get new positions.
template <class T>
void write_unit(Work<T>& work, int64_t set, int64_t unit, int64_t place, int64_t distance) {
  static thread_local Scratch scratch;
  const Layer& layer = work.layer;
  const int64_t size = layer.head_size, begin = unit * work.unit;
  const int64_t end = std::min(begin + work.unit, work.num_tokens);
  for (int64_t head = layer.first_head(set); head < layer.first_head(set + 1); head++)
    for (int64_t t = begin; t < end; t++) {
      const int64_t slot = place * work.unit + t - begin;
      float* turned = nullptr;
      if (distance && layer.rotation) {
        turned = scratch.take(round_up(size, W));
        widen_row(turned, work.key(t, head), size);
        rotate(layer, turned, distance);
      }
      write_row(layer, work.key(t, head), work.value(t, head), turned, work.slot_row(slot, head),
                work.slot_scale(slot, head), layer.block_size);
    }
}

// Copies a set's evicted units before their slots are overwritten: cached units in order of rank,
// then units of the stride. `rank` holds the ranks of places before the stride.
template <class T>
void take_evicted(Work<T>& work, int64_t set, const int32_t* rank, const int32_t* left) {
  const Layer& layer = work.layer;
  const Stride& stride = work.stride;
  const int64_t old = work.old_units, places = work.old_slots / work.unit, unit = work.unit;
  const int64_t row_bytes = layer.row_bytes();
  std::vector<int32_t> place_of(old);
  for (int64_t place = 0; place < places; place++)
    if (rank[place] >= 0) place_of[rank[place]] = (int32_t)place;
  int64_t n = 0;
  for (int64_t i = 0; i < old + work.complete && n < stride.num_evicted; i++) {
    if (left[i] >= 0) continue;
    const int64_t place = i < old ? place_of[i] : 0, u = i - old;
    int32_t *born = stride.evicted_born + set * stride.num_evicted + n;
    int32_t *token = stride.evicted_token + set * stride.num_evicted + n;
    const int64_t word = layer.word(stride.pages[place / layer.page_units], set) +
                         place % layer.page_units;
    *born = i < old ? layer.born[word] : (int32_t)(work.cached + u * unit);
    *token = i < old ? layer.token[word] : (int32_t)(work.stream + u * unit);
    for (int64_t head = layer.first_head(set); head < layer.first_head(set + 1); head++) {
      const int64_t first = (head * stride.num_evicted + n) * unit;
      char* to = stride.evicted_rows + first * row_bytes;
      float* scale = layer.row_scale ? stride.evicted_scale + first * 2 : nullptr;
      for (int64_t t = 0; t < unit; t++, to += row_bytes, scale += scale ? 2 : 0) {
        if (i >= old) {
          const int64_t at = u * unit + t;
          write_row(layer, work.key(at, head), work.value(at, head), nullptr, to, scale, 1);
          continue;
        }
        std::memcpy(to, work.slot_row(place * unit + t, head), row_bytes);
        const float* held = work.slot_scale(place * unit + t, head);
        if (held) scale[0] = held[0], scale[1] = held[layer.block_size];
      }
    }
    n++;
  }
}

// Renumbers the survivors of one set. The k-th surviving new unit takes the k-th free place.
template <class T>
void insert(Work<T> work, const Packed<T>& packed, int64_t set) {
  static thread_local Scratch scratch;
  Layer& layer = work.layer;
  const int32_t* pages = work.stride.pages;
  const int64_t old = work.old_units, total = old + work.new_units, padded = round_up(total, W);
  const int64_t old_places = work.old_slots / work.unit, places = work.new_slots / work.unit;
  float *scores = scratch.take(4 * padded), *values = scores + padded;
  int32_t *columns = (int32_t*)(values + padded), *left = columns + padded;
  std::fill(scores, scores + total, 0.0f);
  if (layer.uses_scores) new_scores(work, packed, set, scores);
  std::copy(scores, scores + total, values);
  if (work.step[PER_AGE]) divide_by_age(work, packed, set, values);
  for (int64_t i = 0; i < total; i++) columns[i] = (int32_t)i;
  Line line{values, columns, 0, old, work.step[NEWEST_STAYS] != 0};
  run_rules(work, line);

  std::fill(left, left + total, -1);
  for (int64_t i = line.begin; i < line.end; i++) left[columns[i]] = (int32_t)(i - line.begin);
  std::vector<int32_t> rank(places, -1);
  std::vector<float> score(places, 0.0f);
  gather(layer, pages, set, (const int32_t*)layer.rank, rank.data(), 0, old_places);
  if (work.stride.num_evicted) take_evicted(work, set, rank.data(), left);
  for (int64_t place = 0; place < old_places; place++) {
    const int32_t before = rank[place];
    if (before < 0) continue;
    rank[place] = left[before];
    score[place] = scores[before];
  }
  int64_t place = 0;
  for (int64_t u = 0; u < work.new_units; u++) {
    if (left[old + u] < 0) continue;
    while (place < places && rank[place] >= 0) place++;
    assert(place < places);  // the policy bounds the count
    rank[place] = left[old + u];
    score[place] = scores[old + u];
    const int64_t at = work.cached + u * work.unit, settled = left[old + u] + work.stride.recalls_more;
    const int64_t born = u == work.complete ? settled * work.unit : at;
    const int64_t page = pages[place / layer.page_units];
    const int64_t word = layer.word(page, set) + place % layer.page_units;
    layer.born[word] = (int32_t)(born + work.stride.shift);
    if (layer.token) layer.token[word] = (int32_t)(work.stream + u * work.unit);
    write_unit(work, set, u, place, at - born);
  }
  scatter(layer, pages, set, layer.rank, (const int32_t*)rank.data(), 0, places);
  if (layer.uses_scores)
    scatter(layer, pages, set, layer.score, (const float*)score.data(), 0, places);
}

}  // namespace
