// SPDX-License-Identifier: Apache-2.0
// Copies units between a request's pages and its store: selected units to the pages, evicted units
// to the store. vllm_cascade/attention/cpu/recall.py is the PyTorch reference; the bytes are equal.

#include "stored.h"
#include "units.h"

// Evicted units, in the order of their numbers.
struct Gone {
  const char* rows;    // [H, num, unit, row bytes]
  const float* scale;  // [H, num, unit, 2], or null
  const int32_t *born, *token;  // [S, num]
  int64_t num;
};

namespace {

constexpr float KEY_LEVELS = 127;

// Rotates as `rotate`, each product rounded before the sum, as in PyTorch.
template <int Sign>
void rotate_apart(const Layer& layer, float* x, int64_t distance) {
  if (!layer.rotation) return;
  const int64_t half = layer.half, step = layer.is_neox ? 1 : 2, other = layer.is_neox ? half : 1;
  const float* cos = layer.rotation + distance * 2 * half;
  const float* sin = cos + half;
  int64_t i = 0;
  for (; layer.is_neox && i + W <= half; i += W) {
    const vf a = load(x + i), b = load(x + half + i), c = load(cos + i);
    const vf s = load(sin + i) * (float)Sign;
    store(x + i, held(a * c) - held(b * s));
    store(x + half + i, held(b * c) + held(a * s));
  }
  for (; i < half; i++) {
    float &a = x[i * step], &b = x[i * step + other];
    const vf both[2] = {splat(a), splat(b)};
    const float s = sin[i] * Sign;
    const vf first = held(both[0] * cos[i]) - held(both[1] * s);
    const vf second = held(both[1] * cos[i]) + held(both[0] * s);
    a = first[0], b = second[0];
  }
}

// A vector in 8 bits, in steps of a 127th of its largest number.
float encode_vector(const float* from, int64_t size, int8_t* to) {
  const float scale = largest_magnitude(from, size) / KEY_LEVELS, step = std::max(scale, __FLT_MIN__);
  for (int64_t c = 0; c < size; c++) to[c] = (int8_t)std::rint(from[c] / step);
  return scale;
}

// --- into pages ----------------------------------------------------------------------------------

// Rows of a unit that is stored in 8 bits, [unit, 2 D] in the pages' type.
void decode_unit(const LayerUnits& units, int64_t head, int64_t number, int32_t born, char* to) {
  static thread_local Scratch scratch;
  const Layer& layer = units.layer;
  const int64_t size = layer.head_size, unit = layer.unit;
  float* row = scratch.take(2 * size + W);
  const int8_t* codes = units.codes(head, number);
  const auto* values = (const int8_t*)units.rows(head, number);
  const float *scale = units.scales(head, number), *of_value = units.row_scales(head, number);
  std::vector<int8_t> code(size);
  for (int64_t k = 0; k < unit; k++) {
    for (int64_t c = 0; c < size; c += 4) std::memcpy(code.data() + c, codes + c * unit + 4 * k, 4);
    for (int64_t c = 0; c < size; c++) row[c] = (float)code[c] * scale[k];
    rotate_apart<-1>(layer, row, born + k);
    for (int64_t c = 0; c < size; c++) row[size + c] = (float)values[k * size + c] * of_value[k];
    as_stored(layer.stored, [&](auto* kind) {
      if constexpr (!is_code<std::remove_pointer_t<decltype(kind)>>)
        narrow_row((decltype(kind))to + k * 2 * size, row, 1.0f, 2 * size);
    });
  }
}

// One unit from the store to a place in the pages.
void place_unit(const LayerUnits& units, const Exchange& exchange, int64_t set, int64_t number,
                int64_t place) {
  const Layer& layer = units.layer;
  const int64_t page = exchange.pages[place / layer.page_units], unit = layer.unit;
  const int64_t offset = place % layer.page_units, word = layer.word(page, set) + offset;
  const int32_t born = *units.born(set, number);
  for (int64_t head = layer.first_head(set); head < layer.first_head(set + 1); head++) {
    char* to = layer.row(page, head, offset * unit);
    if (units.units.in_8_bits) {
      decode_unit(units, head, number, born, to);
      continue;
    }
    std::memcpy(to, units.rows(head, number), unit * layer.row_bytes());
    if (!layer.row_scale) continue;
    const float* scale = units.row_scales(head, number);
    float* of_key = layer.scale_of(page, head, offset * unit);
    for (int64_t k = 0; k < unit; k++) {
      of_key[k] = scale[2 * k];
      of_key[layer.block_size + k] = scale[2 * k + 1];
    }
  }
  layer.born[word] = born;
  layer.token[word] = *units.token(set, number);
  layer.score[word] = 0;
}

// Replaces one head set's recalled units. Returns how many came, or -1 if ranks are not as planned.
int64_t exchange_set(const LayerUnits& units, const Exchange& exchange, int64_t set) {
  const Layer& layer = units.layer;
  const int64_t now = exchange.now, before = exchange.before, n = exchange.num_units;
  const int32_t sinks = exchange.sinks;
  std::vector<int64_t> numbers(exchange.chosen + set * now, exchange.chosen + (set + 1) * now);
  for (int64_t& number : numbers) number += units.units.begin;
  auto first = [&](int64_t number) { return *units.token(set, number); };
  std::sort(numbers.begin(), numbers.end(),
            [&](int64_t a, int64_t b) { return first(a) < first(b); });
  std::vector<int32_t> wanted(now), rank(n);
  std::transform(numbers.begin(), numbers.end(), wanted.begin(), first);
  int32_t* shown =
      exchange.shown + units.index * exchange.shown_layer + set * exchange.shown_stride;
  if (before == now && std::equal(wanted.begin(), wanted.end(), shown)) return 0;

  gather(layer, exchange.pages, set, layer.rank, rank.data(), 0, n);
  std::vector<int64_t> place_of(before, -1);
  for (int64_t place = 0; place < n; place++) {
    if (rank[place] >= sinks + before) rank[place] += now - before;
    else if (rank[place] >= sinks) place_of[rank[place] - sinks] = place;
  }
  std::vector<char> is_there(now, 0);
  for (int64_t i = 0; i < before; i++) {
    if (place_of[i] < 0) return -1;
    const int64_t at = std::lower_bound(wanted.begin(), wanted.end(), shown[i]) - wanted.begin();
    const bool stays = at < now && wanted[at] == shown[i];
    rank[place_of[i]] = stays ? sinks + at : -1;
    if (stays) is_there[at] = 1;
  }
  int64_t place = 0, came = 0;
  for (int64_t at = 0; at < now; at++) {
    if (is_there[at]) continue;
    while (place < n && rank[place] >= 0) place++;
    if (place == n) return -1;
    rank[place] = sinks + at;
    place_unit(units, exchange, set, numbers[at], place);
    came++;
  }
  scatter(layer, exchange.pages, set, layer.rank, rank.data(), 0, n);
  std::copy(wanted.begin(), wanted.end(), shown);
  return came;
}

// --- into the store ------------------------------------------------------------------------------

// One evicted unit of one KV head: its rows, and what the judge reads of its keys.
void store_unit(const LayerUnits& units, const Gone& gone, int64_t head, int64_t i) {
  static thread_local Scratch scratch;
  const Layer& layer = units.layer;
  const int64_t size = layer.head_size, unit = layer.unit, number = units.units.begin + i;
  const int64_t set = layer.set_of(head), at = head * gone.num + i;
  const int64_t width = round_up(std::max(size, layer.row_size), W);
  float* key = scratch.take(2 * width);
  float* value = layer.latent() ? key + layer.value_at : key + width;
  const char* rows = gone.rows + at * unit * layer.row_bytes();
  const float* scale = gone.scale ? gone.scale + at * unit * 2 : nullptr;
  int8_t* codes = units.codes(head, number);
  float *key_scales = units.scales(head, number), *row_scales = units.row_scales(head, number);
  std::vector<int8_t> code(size);
  std::vector<double> sums(size, 0.0);  // in fp64, so that their order does not matter
  double squares = 0, of_mean = 0;
  for (int64_t k = 0; k < unit; k++) {
    decode(layer, rows + k * layer.row_bytes(), scale ? scale + 2 * k : nullptr, 1, key, value);
    rotate_apart<1>(layer, key, gone.born[set * gone.num + i] + k);
    const float step = key_scales[k] = encode_vector(key, size, code.data());
    for (int64_t c = 0; c < size; c += 4)
      std::memcpy(codes + (c * unit + 4 * k), code.data() + c, 4);
    for (int64_t c = 0; c < size; c++) {
      const double channel = (double)code[c] * step;
      sums[c] += channel, squares += channel * channel;
    }
    if (units.units.in_8_bits)
      row_scales[k] = encode_vector(value, size, (int8_t*)units.rows(head, number) + k * size);
  }
  if (!units.units.in_8_bits) {
    std::memcpy(units.rows(head, number), rows, unit * layer.row_bytes());
    if (scale) std::memcpy(row_scales, scale, unit * 2 * sizeof(float));
  }
  for (int64_t c = 0; c < size; c++) {
    const double mean = sums[c] / (double)unit;
    key[c] = (float)mean, of_mean += mean * mean;
  }
  const double spread = squares / (double)(unit * size) - of_mean / (double)size;
  *units.spread(head, number) = (float)std::max(spread, 0.0);
  *units.centre_scale(head, number) = encode_vector(key, size, code.data());
  int8_t* centre = units.centre(head, number);
  for (int64_t c = 0; c < size; c += 4)
    std::memcpy(centre + c * CHUNK_UNITS, code.data() + c, 4);
}

void store_all(const LayerUnits& units, const Gone& gone) {
  const Layer& layer = units.layer;
#pragma omp parallel for schedule(static) collapse(2) if (omp_get_max_threads() > 1)
  for (int64_t head = 0; head < layer.num_heads; head++)
    for (int64_t i = 0; i < gone.num; i++) store_unit(units, gone, head, i);
  for (int64_t set = 0; set < layer.num_sets; set++)
    for (int64_t i = 0; i < gone.num; i++) {
      *units.born(set, units.units.begin + i) = gone.born[set * gone.num + i];
      *units.token(set, units.units.begin + i) = gone.token[set * gone.num + i];
    }
}

// Copies a freed unit's rows and words from its place in the pages to number `i` of `gone`.
void take_unit(const Layer& layer, const Freed& freed, int64_t set, int64_t place, int64_t i,
               const Gone& gone, char* rows, float* scale, int32_t* born, int32_t* token) {
  const int64_t page = freed.pages[place / layer.page_units], unit = layer.unit;
  const int64_t offset = place % layer.page_units, word = layer.word(page, set) + offset;
  for (int64_t head = layer.first_head(set); head < layer.first_head(set + 1); head++) {
    const int64_t at = (head * gone.num + i) * unit;
    std::memcpy(rows + at * layer.row_bytes(), layer.row(page, head, offset * unit),
                unit * layer.row_bytes());
    for (int64_t k = 0; scale && k < unit; k++) {
      const float* of_key = layer.scale_of(page, head, offset * unit + k);
      scale[(at + k) * 2] = of_key[0];
      scale[(at + k) * 2 + 1] = of_key[layer.block_size];
    }
  }
  born[set * gone.num + i] = layer.born[word];
  token[set * gone.num + i] = layer.token[word];
}

}  // namespace

extern "C" int64_t gone_size() { return sizeof(Gone); }

// Returns how many units came back to the pages, or -1 if their ranks are not as planned.
extern "C" int64_t exchange_units(const Layer* layer, const Units* units, int64_t index,
                                  const Exchange* exchange) {
  const LayerUnits mine{*layer, *units, index};
  int64_t came = 0;
  for (int64_t set = 0; set < layer->num_sets; set++) {
    const int64_t of_set = exchange_set(mine, *exchange, set);
    if (of_set < 0) return -1;
    came += of_set;
  }
  return came;
}

extern "C" void store_units(const Layer* layer, const Units* units, int64_t index,
                            const Gone* gone) {
  store_all({*layer, *units, index}, *gone);
}

// Returns how many units of a head set were freed, or -1 if that is not how many there must be.
extern "C" int64_t store_freed_units(const Layer* layer, const Units* units, int64_t index,
                                     const Freed* freed) {
  const LayerUnits mine{*layer, *units, index};
  const int64_t num = mine.count(), keys = layer->num_heads * num * layer->unit;
  std::vector<char> rows(keys * layer->row_bytes());
  std::vector<float> scale(layer->row_scale ? keys * 2 : 0);
  std::vector<int32_t> words(2 * layer->num_sets * num), rank(freed->num_units);
  int32_t *born = words.data(), *token = born + layer->num_sets * num;
  const Gone gone{rows.data(), scale.empty() ? nullptr : scale.data(), born, token, num};
  for (int64_t set = 0; set < layer->num_sets; set++) {
    const int32_t* was = freed->before + set * freed->num_before;
    gather(*layer, freed->pages, set, layer->rank, rank.data(), 0, freed->num_units);
    std::vector<int64_t> places;
    for (int64_t place = 0; place < freed->num_before; place++)
      if (was[place] >= 0 && rank[place] < 0) places.push_back(place);
    if ((int64_t)places.size() != num) return -1;
    std::sort(places.begin(), places.end(), [=](int64_t a, int64_t b) { return was[a] < was[b]; });
    for (int64_t i = 0; i < num; i++)
      take_unit(*layer, *freed, set, places[i], i, gone, rows.data(),
                scale.empty() ? nullptr : scale.data(), born, token);
  }
  store_all(mine, gone);
  return num;
}
