// SPDX-License-Identifier: Apache-2.0
// SIMD registers of fp32 by vector extensions of the compiler, so that one source serves AVX-512,
// AVX2, NEON and SSE2. All arithmetic is fp32, except for the products of a prompt's bf16 rows
// (panel.h). bf16 and fp16 are storage formats.
#pragma once

#include <cstdint>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct bf16 {
  uint16_t bits;
};
#if defined(__ARM_FP16_FORMAT_IEEE)  // GCC 12 has no _Float16 on AArch64
typedef __fp16 fp16;
#define HAS_FP16 1
#elif defined(__FLT16_MAX__)
typedef _Float16 fp16;
#define HAS_FP16 1
#endif

static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

template <class V, class P>
static inline V load_as(const P* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

static inline vf splat(float x) { return x - vf{}; }
static inline vi splat_int(int32_t x) { return x - vi{}; }
template <int... Lane>
static inline vi lanes(std::integer_sequence<int, Lane...>) {
  return vi{Lane...};
}
static inline vi lanes() { return lanes(std::make_integer_sequence<int, W>()); }
// Whether any lane of a mask is set.
static inline bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  int32_t set = 0;
  for (int i = 0; i < W; i++) set |= mask[i];
  return set != 0;
#endif
}
static inline vf load(const float* from) { return load_as<vf>(from); }
static inline vf load(const bf16* from) {
#if defined(__AVX512F__)  // GCC splits a convertvector into two halves and a shuffle here
  return (vf)((vu)_mm512_maskz_cvtepu16_epi32(0xFFFF, load_as<__m256i>(from)) << 16);
#else
  return (vf)(__builtin_convertvector(load_as<vh>(from), vu) << 16);
#endif
}
#ifdef HAS_FP16
// fp16's bits as fp32.
static inline vf widen_halves(vh bits) {
#if defined(__AVX512F__)  // GCC converts the numbers of a convertvector one by one
  return (vf)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__) && defined(__AVX__)
  return (vf)_mm256_cvtph_ps((__m128i)bits);
#else
  typedef fp16 v16 __attribute__((vector_size(2 * W)));
  return __builtin_convertvector((v16)bits, vf);
#endif
}
static inline vf load(const fp16* from) { return widen_halves(load_as<vh>(from)); }
#endif
// Keeps a loaded value in its register; GCC would load it again for each use.
template <class V>
static inline V held(V v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__SSE2__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}
static inline void store(float* to, vf v) { std::memcpy(to, &v, sizeof(v)); }

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
template <class T>
static inline T narrow(float x) {
  return (T)x;
}
template <>
inline bf16 narrow<bf16>(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return bf16{(uint16_t)(x != x ? 0x7FC0 : rounded)};
}
#ifdef HAS_FP16
static inline float widen(fp16 x) { return (float)x; }
#endif

// Stores fp32 numbers times a factor. Rounds to nearest, ties to even; NaN stays NaN.
template <class T>
static inline void narrow_row(T* to, const float* from, float factor, int64_t n) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, bf16>) {
    for (; i + W <= n; i += W) {
      vf x = load(from + i) * factor;
      vu bits = (vu)x;
      bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
      vh half = __builtin_convertvector(x != x ? (vu)splat_int(0x7FC0) : bits, vh);
      std::memcpy(to + i, &half, sizeof(half));
    }
  }
  for (; i < n; i++) to[i] = narrow<T>(from[i] * factor);
}

// Loads `n` stored numbers as fp32, padded with zeros to a whole register.
template <class T>
static inline void widen_row(float* to, const T* from, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  if (i < n) {
    store(to + i, vf{});
    for (; i < n; i++) to[i] = widen(from[i]);
  }
}

// sums + products of the four unsigned bytes in each lane with the four signed bytes of `four`.
static inline vi add_products(vi sums, vi bytes, int32_t four) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, _mm512_set1_epi32(four));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const int32_t even = (int32_t)((uint16_t)(int8_t)four | (uint32_t)(int8_t)(four >> 16) << 16);
  const int32_t odd = (int32_t)((uint16_t)(int8_t)(four >> 8) | (uint32_t)(int8_t)(four >> 24) << 16);
  const __m256i low = _mm256_and_si256((__m256i)bytes, _mm256_set1_epi16(255));
  const __m256i high = _mm256_srli_epi16((__m256i)bytes, 8);
  return sums + (vi)_mm256_madd_epi16(low, _mm256_set1_epi32(even)) +
         (vi)_mm256_madd_epi16(high, _mm256_set1_epi32(odd));
#else
#pragma GCC unroll 4
  for (int shift = 0; shift < 32; shift += 8)
    sums += (vi)((vu)bytes >> shift & 255) * (int32_t)(int8_t)(four >> shift);
  return sums;
#endif
}

#if defined(__AVX512BF16__)
#define HAS_BF16_PRODUCTS 1
// sums + products of the two bf16 numbers in each lane with the two numbers of `pair`.
static inline vf add_bf16_products(vf sums, uint32_t pair, vu pairs) {
  return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32((int)pair),
                              (__m512bh)pairs);
}
// Rounds two registers to bf16 (nearest, ties to even) and pairs their lanes.
static inline vu pairs_of(vf low, vf high) {
  const vu first = (vu)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)low));
  return first | (vu)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)high)) << 16;
}
// Stores one register as W bf16 numbers.
static inline void store_bf16(uint16_t* to, vf x) {
  const __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &half, sizeof(half));
}
#endif

static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vf vmin(vf a, vf b) { return a < b ? a : b; }

// exp(x) for x up to 88, to about 2 ulp. Exactly 0 below -87, and for masked logits (-inf).
static inline vf vexp(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
  vf shifted = x * 1.44269504f + magic;
  vf n = shifted - magic;
  vf r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vu bits = (vu)p + ((vu)shifted << 23);  // magic's own bits are shifted out
  return x < splat(-87.0f) ? vf{} : (vf)bits;
}

// 2**x for x up to 127, to about 2 ulp. 0 below -126.
static inline vf vexp2(vf x) {
#if defined(__AVX512F__)
  const vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vf magic = splat(12582912.0f);  // as in vexp
  const vf shifted = x + magic, n = shifted - magic;
#endif
  const vf r = x - n;
  vf p = splat(1.3333558e-3f);
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return x < splat(-126.0f) ? vf{} : (vf)((vu)p + ((vu)shifted << 23));
#endif
}

// Lanes of two registers, selected by constants; W and up are lanes of the second.
template <int... Lanes>
static inline vf shuffle(vf x, vf y) {
#if defined(__clang__)
  return __builtin_shufflevector(x, y, Lanes...);
#else
  return __builtin_shuffle(x, y, vi{Lanes...});
#endif
}

struct Sum {
  static vf of(vf a, vf b) { return a + b; }
};
struct Max {
  static vf of(vf a, vf b) { return vmax(a, b); }
};
// Sums lanes that are `Half` apart, or takes their maxima. Those of `x` and `y` alternate in groups of
// `Half` lanes.
template <int Half, class Op, int... Lane>
static inline vf fold(vf x, vf y, std::integer_sequence<int, Lane...>) {
  return Op::of(shuffle<(Lane & Half ? W + Lane : Lane)...>(x, y),
                shuffle<(Lane & Half ? W + Lane - Half : Lane + Half)...>(x, y));
}
template <int Half, class Op = Sum>
static inline vf fold(vf x, vf y) {
  return fold<Half, Op>(x, y, std::make_integer_sequence<int, W>());
}

// Leaves partial sums (or maxima) of the N registers of `a` in `a[0]`, in each group of N lanes.
template <int N, class Op = Sum>
static inline void fold_within(vf* a) {
  if constexpr (N > 1) {
#pragma GCC unroll 16
    for (int i = 0; i < N / 2; i++) a[i] = fold<N / 2, Op>(a[i], a[i + N / 2]);
    fold_within<N / 2, Op>(a);
  }
}
// The largest number of each of W rows of W.
static inline vf largest_of_each(const float* rows) {
  vf all[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) all[i] = load(rows + i * W);
  fold_within<W, Max>(all);
  return all[0];
}
// Leaves one sum per lane in `a[0]`, from the W / N registers of `fold_within<N>`.
template <int N, int Half = W / 2>
static inline void fold_across(vf* a) {
  if constexpr (Half >= N) {
#pragma GCC unroll 16
    for (int i = 0; i < Half / N; i++) a[i] = fold<Half>(a[i], a[i + Half / N]);
    fold_across<N, Half / 2>(a);
  }
}

// Transposes a square of W registers.
template <int Half, int... Lane>
static inline void exchange(vf& x, vf& y, std::integer_sequence<int, Lane...>) {
  const vf upper = shuffle<(Lane & Half ? W + Lane - Half : Lane)...>(x, y);
  y = shuffle<(Lane & Half ? W + Lane : Lane + Half)...>(x, y);
  x = upper;
}
template <int Half = W / 2>
static inline void transpose(vf* rows) {
  if constexpr (Half > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++)
      if (!(i & Half)) exchange<Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, W>());
    transpose<Half / 2>(rows);
  }
}

// Loads 2 W stored numbers into two registers: the first and second half or, for bf16, even and odd
// numbers, which takes only a shift and a mask.
template <class T>
static inline void load_two(const T* from, vf* x) {
  x[0] = load(from);
  x[1] = load(from + W);
}
static inline void load_two(const bf16* from, vf* x) {
  const vu both = held(load_as<vu>(from));
  x[0] = (vf)(both << 16);
  x[1] = (vf)(both & 0xFFFF0000u);
}
template <int... Lane>
static inline void unzip(float* x, std::integer_sequence<int, Lane...>) {
  const vf low = load(x), high = load(x + W);
  store(x, shuffle<2 * Lane...>(low, high));
  store(x + W, shuffle<(2 * Lane + 1)...>(low, high));
}
template <int... Lane>
static inline void zip(float* x, std::integer_sequence<int, Lane...>) {
  const vf even = load(x), odd = load(x + W);
  store(x, shuffle<(Lane / 2 + Lane % 2 * W)...>(even, odd));
  store(x + W, shuffle<(Lane / 2 + W / 2 + Lane % 2 * W)...>(even, odd));
}
// Reorders fp32 numbers to the order of `load_two`, and back.
template <class T>
static inline void to_loaded_order(float* x, int64_t n) {
  if constexpr (std::is_same_v<T, bf16>)
    for (int64_t i = 0; i + 2 * W <= n; i += 2 * W)
      unzip(x + i, std::make_integer_sequence<int, W>());
}
template <class T>
static inline void from_loaded_order(float* x, int64_t n) {
  if constexpr (std::is_same_v<T, bf16>)
    for (int64_t i = 0; i + 2 * W <= n; i += 2 * W)
      zip(x + i, std::make_integer_sequence<int, W>());
}

// Sums and maxima over all lanes, in log2(W) rounds.
template <int Half, int... Lane>
static inline vf swapped(vf x, std::integer_sequence<int, Lane...>) {
  return shuffle<(Lane ^ Half)...>(x, x);
}
template <int Half = W / 2>
static inline float sum(vf x) {
  if constexpr (Half == 0)
    return x[0];
  else
    return sum<Half / 2>(x + swapped<Half>(x, std::make_integer_sequence<int, W>()));
}
template <int Half = W / 2>
static inline float largest(vf x) {
  if constexpr (Half == 0)
    return x[0];
  else
    return largest<Half / 2>(vmax(x, swapped<Half>(x, std::make_integer_sequence<int, W>())));
}
// The largest magnitude of `n` numbers.
static inline float largest_magnitude(const float* from, int64_t n) {
  vf most = vf{};
  int64_t i = 0;
  for (; i + W <= n; i += W) most = vmax(vmax(load(from + i), -load(from + i)), most);
  float found = largest(most);
  for (; i < n; i++) found = found > std::fabs(from[i]) ? found : std::fabs(from[i]);
  return found;
}
