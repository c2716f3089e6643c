// SPDX-License-Identifier: Apache-2.0
// Draft tokens (speculative decoding): saves what inserting one changes, and undoes rejected ones.
//
// A request's drafts have consecutive places, `drafts` of them at most. Version `place % drafts` on
// the request's pages has all ranks and scores before the draft. Its slot changes one row per head
// and the words of one unit, which are saved by place.
#pragma once

#include "layer.h"

// Rejected drafts of `count` requests over at most `num_pages` pages each.
struct Undone {
  int64_t count, num_pages;
  const int32_t *rows, *pages;  // [count, UNDONE_COLUMNS], [count, num_pages]
};

// First rejected draft's place, number of rejected drafts, and slots in use before the first.
enum UndoneColumn : int64_t { PLACE = 0, NUM_DRAFTS = 1, SLOTS = 2, UNDONE_COLUMNS = 4 };

namespace {

// Copies a set's units [0, units) of a word from one place in the pages to another.
inline void copy_words(const Layer& layer, const int32_t* pages, int64_t set, int64_t units,
                       const int32_t* from, int32_t* to) {
  each_page(layer, pages, set, from, 0, units, [=](int64_t, const int32_t* page, int64_t n) {
    std::memcpy(to + (page - from), page, 4 * n);
  });
}

// Version `draft` of ranks (0) or scores (1).
inline int32_t* version(const Layer& layer, int64_t place, int64_t which) {
  const int64_t number = place % layer.drafts * 2 + which;
  return layer.versions + number * layer.num_sets * layer.page_units;
}

inline void save_words(const Layer& layer, const int32_t* pages, int64_t set, int64_t place,
                       int64_t units) {
  copy_words(layer, pages, set, units, layer.rank, version(layer, place, 0));
  if (layer.uses_scores)
    copy_words(layer, pages, set, units, (int32_t*)layer.score, version(layer, place, 1));
}

// Calls each(head, row, saved row, scale or null, saved scale) for the rows of a set's slot.
template <class Each>
void each_row(const Layer& layer, int64_t page, int64_t set, int64_t place, int64_t slot,
              Each each) {
  const int64_t offset = slot % layer.block_size;
  for (int64_t head = layer.first_head(set); head < layer.first_head(set + 1); head++) {
    const int64_t saved = place * layer.num_heads + head;
    float* scale = layer.row_scale ? layer.scale_of(page, head, offset) : nullptr;
    each(layer.row(page, head, offset), layer.draft_rows + saved * layer.row_bytes(), scale,
         layer.draft_scales + 2 * saved);
  }
}

inline void save_slot(const Layer& layer, const int32_t* pages, int64_t set, int64_t place,
                      int64_t slot) {
  int32_t* words = layer.draft_words + place * 3 * layer.num_sets + set;
  words[0] = (int32_t)slot;
  if (slot < 0) return;
  const int64_t page = pages[slot / layer.block_size];
  const int64_t word = layer.word(page, set) + slot % layer.block_size / layer.unit;
  words[layer.num_sets] = layer.born[word];
  words[2 * layer.num_sets] = layer.token ? layer.token[word] : 0;
  each_row(layer, page, set, place, slot, [&](char* row, char* saved, float* scale, float* two) {
    std::memcpy(saved, row, layer.row_bytes());
    if (scale) two[0] = scale[0], two[1] = scale[layer.block_size];
  });
}

inline void restore_slot(const Layer& layer, const int32_t* pages, int64_t set, int64_t place) {
  const int32_t* words = layer.draft_words + place * 3 * layer.num_sets + set;
  const int64_t slot = words[0];
  if (slot < 0) return;
  const int64_t page = pages[slot / layer.block_size];
  const int64_t word = layer.word(page, set) + slot % layer.block_size / layer.unit;
  layer.born[word] = words[layer.num_sets];
  if (layer.token) layer.token[word] = words[2 * layer.num_sets];
  each_row(layer, page, set, place, slot, [&](char* row, char* saved, float* scale, float* two) {
    std::memcpy(row, saved, layer.row_bytes());
    if (scale) scale[0] = two[0], scale[layer.block_size] = two[1];
  });
}

// Restores a set of one request as it was before its first rejected draft: the last row first.
inline void undo(const Layer& layer, const int32_t* row, const int32_t* pages, int64_t set) {
  const int64_t place = row[PLACE], units = row[SLOTS] / layer.unit;
  for (int64_t i = row[NUM_DRAFTS]; i-- > 0;) restore_slot(layer, pages, set, place + i);
  copy_words(layer, pages, set, units, version(layer, place, 0), layer.rank);
  if (layer.uses_scores)
    copy_words(layer, pages, set, units, version(layer, place, 1), (int32_t*)layer.score);
}

}  // namespace
