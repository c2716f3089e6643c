// SPDX-License-Identifier: Apache-2.0
// Rows as pages have them: in the type of new tokens' rows, in another one, or as codes of 8 bits
// and a scale, which vllm_cascade/cache/quantised.py explains. What is read is fp32.
#pragma once

#include "layer.h"

struct int8 {
  int8_t bits;
};
struct e4m3 {  // sign, 4 bits of exponent, 3 of mantissa; the largest is 448
  uint8_t bits;
};
struct e5m2 {  // the upper half of an fp16
  uint8_t bits;
};

constexpr float LEAST_SCALE = 1e-6f;
template <class Code>
inline constexpr float LARGEST = 127;
template <>
inline constexpr float LARGEST<e4m3> = 448;
template <>
inline constexpr float LARGEST<e5m2> = 57344;

typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vc __attribute__((vector_size(W)));

static inline vf load(const int8* from) {
  return __builtin_convertvector(__builtin_convertvector(load_as<vc>(from), vi), vf);
}
static inline float widen(int8 x) { return x.bits; }
#ifdef HAS_FP16
// Processors convert fp16, so codes become such: exponents of an e4m3 are 8 smaller there.
// Bits of a sign-extended e4m3 as an fp16's. The shift copies the sign to the exponent's highest bit,
// where `^` clears it. Only of a NaN all lower bits are set: the sum carries into that bit, which `^` then
// sets, and the exponent is fp16's largest.
template <class Bits>
static inline Bits half_bits(Bits code) {
  const Bits bits = code << 7;
  return bits ^ ((bits + 0x80) & 0x4000);
}
static inline vf load(const e5m2* from) {
  return widen_halves(__builtin_convertvector(load_as<vb>(from), vh) << 8);
}
static inline vf load(const e4m3* from) {
  const vh code = __builtin_convertvector(load_as<vc>(from), vh);
  return widen_halves(half_bits(code)) * 256.0f;
}
static inline float widen_bits(uint16_t bits) {
  fp16 x;
  std::memcpy(&x, &bits, 2);
  return (float)x;
}
static inline float widen(e5m2 x) { return widen_bits(x.bits << 8); }
static inline float widen(e4m3 x) {
  return widen_bits(half_bits((uint16_t)(int8_t)x.bits)) * 256.0f;
}
#endif

// An fp32 number within the largest ones as a code, to nearest, ties to even. Integers have no NaN:
// the scale of such a row is one.
static inline void narrow_code(float x, int8* to) { to->bits = (int8_t)std::rint(x == x ? x : 0); }
// Of `Mantissa` bits and exponents that are `Bias` smaller. Below the least normal number codes are
// multiples of one step, which is what fp32 numbers near `magic` are rounded to.
template <int Mantissa, int Bias>
static inline uint8_t narrow_float(float x) {
  constexpr int DROP = 23 - Mantissa;
  uint32_t bits, sum;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7FFFFFFF;
  const uint32_t magic = (uint32_t)(Bias + 1 + DROP) << 23, least = (uint32_t)(Bias + 1) << 23;
  float a, b;
  std::memcpy(&a, &size, 4);
  std::memcpy(&b, &magic, 4);
  a += b;
  std::memcpy(&sum, &a, 4);
  const uint32_t half = (1u << (DROP - 1)) - 1 + (size >> DROP & 1);
  const uint32_t normal = ((size + half) >> DROP) - ((uint32_t)Bias << Mantissa);
  const uint32_t code = size < least ? sum - magic : size > 0x7F800000 ? 0x7F : normal;
  return (uint8_t)(sign | code);
}
static inline void narrow_code(float x, e4m3* to) { to->bits = narrow_float<3, 120>(x); }
static inline void narrow_code(float x, e5m2* to) { to->bits = narrow_float<2, 112>(x); }

// Codes of numbers that are in steps of their scale. Not inlined: as one product and sum with what
// made these, they would be rounded once instead of twice, and differ from PyTorch's.
template <class Code>
static __attribute__((noinline)) void narrow_codes(const float* from, int64_t n, Code* to) {
  for (int64_t i = 0; i < n; i++) narrow_code(from[i], to + i);
}

// Call `each` with a null pointer to what a channel is in pages.
template <class Each>
static inline void as_stored(int64_t stored, Each each) {
  if (stored == FP32) return each((float*)nullptr);
  if (stored == BF16) return each((bf16*)nullptr);
  if (stored == INT8) return each((int8*)nullptr);
#ifdef HAS_FP16
  if (stored == FP16) return each((fp16*)nullptr);
  if (stored == E4M3) return each((e4m3*)nullptr);
  if (stored == E5M2) return each((e5m2*)nullptr);
#endif
}

template <class Code>
inline constexpr bool is_code = std::is_same_v<Code, int8> || std::is_same_v<Code, e4m3> ||
                         std::is_same_v<Code, e5m2>;

// The largest magnitude of fp32 numbers, or NaN if one of them is. Bits of magnitudes are in the
// order of what they mean, and NaN's are the largest.
static inline float largest_or_nan(const float* from, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    most = std::max(most, bits & 0x7FFFFFFF);
  }
  float size;
  std::memcpy(&size, &most, 4);
  return size;
}

// fp32 numbers as codes or in another type; those with a `scale` of their own get it here.
template <class Code>
static inline void encode_row(const float* from, int64_t n, float shared, float* scale, Code* to) {
  if constexpr (!is_code<Code>) {
    narrow_row(to, from, 1.0f, n);
  } else {
    static thread_local Scratch scratch;
    constexpr float largest = LARGEST<Code>;
    float* steps = scratch.take(n);
    if (scale) {
      *scale = shared = std::max(largest_or_nan(from, n) / largest, LEAST_SCALE);  // or NaN
    }
    const float inverse = 1 / shared;
    for (int64_t i = 0; i < n; i++) {
      const float x = from[i] * inverse;
      steps[i] = x > largest ? largest : x < -largest ? -largest : x;
    }
    narrow_codes(steps, n, to);
  }
}

template <class Code>
static inline void decode_row(const Code* from, int64_t n, float scale, float* to) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i) * scale);
  for (; i < n; i++) to[i] = widen(from[i]) * scale;
}

// One stored row as fp32; `scales` apart are those of the channels before the value and of the value.
// A latent row's value is also the end of its key; of other rows it may be null.
static inline void decode(const Layer& layer, const char* row, const float* scale, int64_t scales,
                          float* key, float* value) {
  const int64_t at = layer.value_at, size = layer.value_size;
  as_stored(layer.stored, [&](auto* kind) {
    const auto* from = (decltype(kind))row;
    decode_row(from, at, scale ? scale[0] : layer.key_scale(), key);
    if (value) decode_row(from + at, size, scale ? scale[scales] : layer.value_scale(), value);
  });
  if (layer.latent() && value != key + at) std::memcpy(key + at, value, size * sizeof(float));
}

// A key and a value as a stored row; `scales` apart are those of the channels before the value and
// of the value.
static inline void encode(const Layer& layer, const float* key, const float* value, char* row,
                          float* scale, int64_t scales) {
  const int64_t at = layer.value_at, size = layer.value_size;
  as_stored(layer.stored, [&](auto* kind) {
    auto* to = (decltype(kind))row;
    encode_row(key, at, layer.key_scale(), scale, to);
    encode_row(value, size, layer.value_scale(), scale ? scale + scales : nullptr, to + at);
  });
}

// A new token's rows as a stored one. `turned`: its key in fp32 where that is another one by now.
template <class T>
static inline void write_row(const Layer& layer, const T* key, const T* value, const float* turned,
                             char* row, float* scale, int64_t scales) {
  static thread_local Scratch scratch;
  const int64_t size = layer.head_size, width = round_up(size, W);
  if (!layer.plain()) {
    float* wide = scratch.take(2 * width);
    if (!turned) widen_row(wide, key, size);
    widen_row(wide + width, value, layer.value_size);
    return encode(layer, turned ? turned : wide, wide + width, row, scale, scales);
  }
  if (turned)
    narrow_row((T*)row, turned, 1.0f, size);
  else
    std::memcpy(row, key, size * sizeof(T));
  std::memcpy(row + layer.value_at * sizeof(T), value, layer.value_size * sizeof(T));
}
