// SPDX-License-Identifier: Apache-2.0
// One new token for each of many requests: scores after its query, what its rules delete, its slot.
#pragma once

#include "attend_tokens.h"
#include "rules.h"

namespace {

// scores = decay * scores + weight * probability, reduced over the heads of a set; the new token's.
float update_scores(const Layer& layer, const Step& step, const Mass& mass, int64_t set,
                    float* scores) {
  const int64_t slots = step[OLD_SLOTS];
  const float decay = step.decay(), weight = step.weight();
  const int64_t heads = layer.num_queries() / layer.num_sets, first = set * heads;
  vf column[256];
  for (int64_t q = first; q < first + heads; q++) {  // what turns a tile's exps into probabilities
    float* factor = mass.tile_max + q * mass.tiles;
    for (int64_t tile = 0; tile * TILE < slots; tile += W)
      store(factor + tile, vexp(load(factor + tile) - mass.row_max[q]) * mass.row_scale[q]);
  }
  for (int64_t i = 0; i < slots; i += W) {
    const float* exps = mass.exps + first * mass.padded + i;
    const float* factor = mass.tile_max + first * mass.tiles + i / TILE;
    for (int64_t q = 0; q < heads; q++)
      column[q] = load(exps + q * mass.padded) * factor[q * mass.tiles];
    vf reduced = reduce_heads(layer.reduction, column, heads);
    store(scores + i, load(scores + i) * decay + reduced * weight);
  }
  for (int64_t q = 0; q < heads; q++) column[q] = splat(mass.own[first + q]);
  return reduce_heads(layer.reduction, column, heads)[0] * weight;
}

// Scores of the cached tokens after this query; the new token's.
template <class T>
float new_scores(const Request<T>& request, const Mass& mass, int64_t set, const int32_t* rank,
                 float* scores) {
  const Tokens& batch = request.batch;
  const Step step = request.step();
  const int32_t scored = batch.given ? batch.scored[request.b] : -1;
  for (int64_t i = 0; i < step[OLD_SLOTS] && scored >= 0; i++)
    if (rank[i] == scored) scores[i] = batch.given[request.b];
  return step.weight() ? update_scores(request.layer, step, mass, set, scores) : 0;
}

// Run the rules of one head set, put the new token in the first free slot.
template <class T>
void insert(const Request<T>& request, const Mass& mass, int64_t set) {
  static thread_local Scratch scratch;
  Layer layer = request.layer;
  if (request.is_padding()) return;
  const Step step = request.step();
  const int64_t old_slots = step[OLD_SLOTS], slots = step[NEW_SLOTS];
  const int32_t* pages = request.pages();
  const int64_t padded = round_up(slots + 1, BLOCK), last = padded - 1;  // where the new token is
  float* score = scratch.take(3 * padded);
  int32_t* rank = (int32_t*)(score + padded);
  int32_t* token = rank + padded;
  gather(layer, pages, set, (const int32_t*)layer.rank, rank, 0, old_slots);
  std::fill(rank + old_slots, rank + last, -1);
  rank[last] = step[CACHED];
  if (layer.uses_scores) {
    gather(layer, pages, set, (const float*)layer.score, score, 0, old_slots);
    std::fill(score + old_slots, score + padded, 0.0f);
    score[last] = new_scores(request, mass, set, rank, score);
  }
  if (step[PER_AGE]) {
    gather(layer, pages, set, (const int32_t*)layer.token, token, 0, old_slots);
    token[last] = (int32_t)step[STREAM];
  }
  Places places{padded, rank, score, step[PER_AGE] ? token : nullptr, step[STREAM] + 1,
                step[NEWEST_STAYS] != 0};
  step.each_rule(request.batch.rules, [&](const Rule& rule) { places.apply(rule); });

  const int64_t target = rank[last] < 0 ? -1 : places.free(slots);
  if (target >= 0) {
    rank[target] = rank[last];
    score[target] = score[last];
    int64_t page = pages[target / layer.block_size], offset = target % layer.block_size;
    int64_t word = layer.word(page, set) + offset;
    layer.born[word] = (int32_t)step[CACHED];
    if (layer.token) layer.token[word] = (int32_t)step[STREAM];
    const int64_t begin = layer.num_sets == 1 ? 0 : set;
    const int64_t end = layer.num_sets == 1 ? layer.num_heads : set + 1;
    for (int64_t head = begin; head < end; head++) {
      T* row = layer.template row<T>(page, head, offset);
      std::memcpy(row, request.key(head), layer.head_size * sizeof(T));
      std::memcpy(row + layer.head_size, request.value(head), layer.head_size * sizeof(T));
    }
  }
  scatter(layer, pages, set, layer.rank, (const int32_t*)rank, 0, slots);
  if (layer.uses_scores) scatter(layer, pages, set, layer.score, (const float*)score, 0, slots);
}

}  // namespace
