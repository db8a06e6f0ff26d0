// Sixteen lanes at a time, whatever the instruction set: one 512-bit register or two of 256 bits.
//
// Everything else in this folder is written with these types, so a kernel exists once.  A product
// of bfloat16 pairs is one instruction where the CPU has it (AVX512-BF16), and two fused
// multiply-adds where it has not.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace jaxserve {

using bf16 = uint16_t;
constexpr int kLanes = 16;

inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float out;
  __builtin_memcpy(&out, &bits, 4);
  return out;
}

#if defined(__AVX512F__)

struct F16 {
  __m512 v;
};
struct I16 {
  __m512i v;
};

inline F16 zero_f() { return {_mm512_setzero_ps()}; }
inline F16 all(float x) { return {_mm512_set1_ps(x)}; }
inline I16 all_i(int x) { return {_mm512_set1_epi32(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline I16 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline void store(int32_t* p, I16 a) { _mm512_storeu_si512(p, a.v); }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline I16 operator+(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 round(F16 a) { return {_mm512_roundscale_ps(a.v, 8)}; }
inline float sum(F16 a) { return _mm512_reduce_add_ps(a.v); }
// The largest lane, in every lane.
inline F16 largest_everywhere(F16 a) {
  __m512 m = _mm512_max_ps(a.v, _mm512_shuffle_f32x4(a.v, a.v, _MM_SHUFFLE(1, 0, 3, 2)));
  m = _mm512_max_ps(m, _mm512_shuffle_f32x4(m, m, _MM_SHUFFLE(2, 3, 0, 1)));
  m = _mm512_max_ps(m, _mm512_permute_ps(m, _MM_SHUFFLE(1, 0, 3, 2)));
  return {_mm512_max_ps(m, _mm512_permute_ps(m, _MM_SHUFFLE(2, 3, 0, 1)))};
}
inline void store_first(float* p, F16 a) { *p = _mm512_cvtss_f32(a.v); }
// a * 2 ** n of integral n.
inline F16 scaled(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// a where x < y, else b.
inline F16 where_less(F16 x, F16 y, F16 a, F16 b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), b.v, a.v)};
}
inline I16 where_less(F16 x, F16 y, I16 a, I16 b) {
  return {_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), b.v, a.v)};
}
// The smaller of a and b where x == y, else a.
inline I16 min_where_equal(F16 x, F16 y, I16 a, I16 b) {
  return {_mm512_mask_min_epi32(a.v, _mm512_cmp_ps_mask(x.v, y.v, _CMP_EQ_OQ), a.v, b.v)};
}
// The first n lanes of a, the others of b.
inline F16 first(int n, F16 a, F16 b) {
  return {_mm512_mask_blend_ps(__mmask16((1u << n) - 1), b.v, a.v)};
}
// a where a bit is set, lane 0 the lowest, else b.
inline F16 where_bits(uint16_t bits, F16 a, F16 b) {
  return {_mm512_mask_blend_ps(__mmask16(bits), b.v, a.v)};
}
inline F16 load_bf16(const bf16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline F16 load_int8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
// Lanes 0 to 7, or 8 to 15, each twice.
inline F16 doubled(F16 a, bool upper) {
  const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  const __m512i index = upper ? _mm512_add_epi32(low, _mm512_set1_epi32(8)) : low;
  return {_mm512_permutexvar_ps(index, a.v)};
}
inline __m256i round_bf16(F16 a) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(a.v);
#else
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  near = _mm512_mask_blend_epi32(nan, near, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16));
#endif
}
// Pairs of neighbouring rows: lane i holds element i of `low` and, above it, of `high`.
inline void store_pairs(bf16* p, F16 low, F16 high) {
  __m512i a = _mm512_cvtepu16_epi32(round_bf16(low)), b = _mm512_cvtepu16_epi32(round_bf16(high));
  _mm512_storeu_si512(p, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
}

// 16 lanes of 32 bits that hold bfloat16 pairs.
struct Packed {
  __m512i v;
};
inline Packed load_packed(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Packed all_packed(const void* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, 4);
  return {_mm512_set1_epi32(bits)};
}
inline Packed low_half(Packed a) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi32(0xffff))};
}

inline F16 dot(F16 c, Packed a, Packed b) {
#if defined(__AVX512BF16__)
  return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
  const __m512i high = _mm512_set1_epi32(0xffff0000);
  __m512 a0 = _mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16));
  __m512 b0 = _mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16));
  __m512 a1 = _mm512_castsi512_ps(_mm512_and_si512(a.v, high));
  __m512 b1 = _mm512_castsi512_ps(_mm512_and_si512(b.v, high));
  return {_mm512_fmadd_ps(a1, b1, _mm512_fmadd_ps(a0, b0, c.v))};
#endif
}
#else  // AVX2 and FMA

struct F16 {
  __m256 a, b;
};
struct I16 {
  __m256i a, b;
};

#define JS_EACH_F(expression_a, expression_b) return {expression_a, expression_b};
inline F16 zero_f() { JS_EACH_F(_mm256_setzero_ps(), _mm256_setzero_ps()) }
inline F16 all(float x) { JS_EACH_F(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
inline I16 all_i(int x) { JS_EACH_F(_mm256_set1_epi32(x), _mm256_set1_epi32(x)) }
inline F16 load(const float* p) { JS_EACH_F(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)) }
inline I16 load(const int32_t* p) {
  JS_EACH_F(_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8)))
}
inline void store(float* p, F16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void store(int32_t* p, I16 x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
inline F16 operator+(F16 x, F16 y) { JS_EACH_F(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)) }
inline F16 operator-(F16 x, F16 y) { JS_EACH_F(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)) }
inline F16 operator*(F16 x, F16 y) { JS_EACH_F(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)) }
inline F16 operator/(F16 x, F16 y) { JS_EACH_F(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)) }
inline I16 operator+(I16 x, I16 y) {
  JS_EACH_F(_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b))
}
inline F16 fma(F16 x, F16 y, F16 z) {
  JS_EACH_F(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b))
}
inline F16 max(F16 x, F16 y) { JS_EACH_F(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)) }
inline F16 round(F16 x) { JS_EACH_F(_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)) }
inline float sum(F16 x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline F16 largest_everywhere(F16 x) {
  __m256 m = _mm256_max_ps(x.a, x.b);
  m = _mm256_max_ps(m, _mm256_permute2f128_ps(m, m, 1));
  m = _mm256_max_ps(m, _mm256_permute_ps(m, _MM_SHUFFLE(1, 0, 3, 2)));
  m = _mm256_max_ps(m, _mm256_permute_ps(m, _MM_SHUFFLE(2, 3, 0, 1)));
  JS_EACH_F(m, m)
}
inline void store_first(float* p, F16 x) { *p = _mm256_cvtss_f32(x.a); }
inline __m256 power_of_two_8(__m256 n) {
  __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
inline __m256 scaled_8(__m256 a, __m256 n) {  // 0 where 2 ** n is no normal number
  const __m256 least = _mm256_set1_ps(-126.f), most = _mm256_set1_ps(127.f);
  const __m256 power = power_of_two_8(_mm256_min_ps(most, _mm256_max_ps(least, n)));
  return _mm256_andnot_ps(_mm256_cmp_ps(n, least, _CMP_LT_OQ), _mm256_mul_ps(a, power));
}
inline F16 scaled(F16 x, F16 n) { JS_EACH_F(scaled_8(x.a, n.a), scaled_8(x.b, n.b)) }
inline F16 where_less(F16 x, F16 y, F16 p, F16 q) {
  JS_EACH_F(_mm256_blendv_ps(q.a, p.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(q.b, p.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)))
}
inline I16 where_less(F16 x, F16 y, I16 p, I16 q) {
  F16 chosen = where_less(x, y, F16{_mm256_castsi256_ps(p.a), _mm256_castsi256_ps(p.b)},
                          F16{_mm256_castsi256_ps(q.a), _mm256_castsi256_ps(q.b)});
  JS_EACH_F(_mm256_castps_si256(chosen.a), _mm256_castps_si256(chosen.b))
}
inline __m256i min_where_equal_8(__m256 x, __m256 y, __m256i p, __m256i q) {
  const __m256 least = _mm256_castsi256_ps(_mm256_min_epi32(p, q));
  const __m256 equal = _mm256_cmp_ps(x, y, _CMP_EQ_OQ);
  return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(p), least, equal));
}
inline I16 min_where_equal(F16 x, F16 y, I16 p, I16 q) {
  JS_EACH_F(min_where_equal_8(x.a, y.a, p.a, q.a), min_where_equal_8(x.b, y.b, p.b, q.b))
}
inline __m256 set_bits_8(int bits) {
  const __m256i each = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
  const __m256i those = _mm256_and_si256(_mm256_set1_epi32(bits), each);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(those, each));
}
inline F16 where_bits(uint16_t bits, F16 x, F16 y) {
  JS_EACH_F(_mm256_blendv_ps(y.a, x.a, set_bits_8(bits)),
            _mm256_blendv_ps(y.b, x.b, set_bits_8(bits >> 8)))
}
inline F16 first(int n, F16 p, F16 q) {
  const F16 lane = {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7),
                    _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
  return where_less(lane, all(float(n)), p, q);
}
inline __m256 widen_8(const bf16* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F16 load_bf16(const bf16* p) { JS_EACH_F(widen_8(p), widen_8(p + 8)) }
inline __m256 int8_to_float_8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline F16 load_int8(const int8_t* p) { JS_EACH_F(int8_to_float_8(p), int8_to_float_8(p + 8)) }
inline F16 doubled(F16 x, bool upper) {
  const __m256i low = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  const __m256i high = _mm256_add_epi32(low, _mm256_set1_epi32(4));
  const __m256 from = upper ? x.b : x.a;
  JS_EACH_F(_mm256_permutevar8x32_ps(from, low), _mm256_permutevar8x32_ps(from, high))
}
inline __m256i round_bf16_8(__m256 x) {  // in the low half of each lane
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  near = _mm256_blendv_epi8(near, _mm256_set1_epi32(0x7fc00000), nan);
  return _mm256_srli_epi32(near, 16);
}
inline __m256i round_bf16(F16 x) {
  __m256i packed = _mm256_packus_epi32(round_bf16_8(x.a), round_bf16_8(x.b));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}
inline void store_pairs(bf16* p, F16 low, F16 high) {
  __m256i a = _mm256_or_si256(round_bf16_8(low.a), _mm256_slli_epi32(round_bf16_8(high.a), 16));
  __m256i b = _mm256_or_si256(round_bf16_8(low.b), _mm256_slli_epi32(round_bf16_8(high.b), 16));
  _mm256_storeu_si256((__m256i*)p, a);
  _mm256_storeu_si256((__m256i*)(p + 16), b);
}

struct Packed {
  __m256i a, b;
};
inline Packed load_packed(const void* p) {
  JS_EACH_F(_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1))
}
inline Packed all_packed(const void* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, 4);
  JS_EACH_F(_mm256_set1_epi32(bits), _mm256_set1_epi32(bits))
}
inline Packed low_half(Packed x) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  JS_EACH_F(_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask))
}
inline __m256 dot_8(__m256 c, __m256i a, __m256i b) {
  const __m256i high = _mm256_set1_epi32(0xffff0000);
  __m256 a0 = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
  __m256 b0 = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
  __m256 a1 = _mm256_castsi256_ps(_mm256_and_si256(a, high));
  __m256 b1 = _mm256_castsi256_ps(_mm256_and_si256(b, high));
  return _mm256_fmadd_ps(a1, b1, _mm256_fmadd_ps(a0, b0, c));
}
inline F16 dot(F16 c, Packed x, Packed y) {
  JS_EACH_F(dot_8(c.a, x.a, y.a), dot_8(c.b, x.b, y.b))
}
#undef JS_EACH_F

#endif

inline void store_bf16(bf16* p, F16 a) { _mm256_storeu_si256((__m256i*)p, round_bf16(a)); }

// 2 ** x to about 2e-7 of its value; 0 well below -126, where float32 runs out of normal numbers.
// NaN gives NaN.  Polynomial on [-1/2, 1/2] after taking the integral power apart.
inline F16 exp2(F16 x) {
  const F16 y = max(all(-151.f), x);  // in this order NaN stays
  const F16 n = round(y), t = y - n;
  F16 p = all(1.54035304e-4f);
  p = fma(p, t, all(1.33335581e-3f));
  p = fma(p, t, all(9.61812911e-3f));
  p = fma(p, t, all(5.55041087e-2f));
  p = fma(p, t, all(2.40226507e-1f));
  p = fma(p, t, all(6.93147181e-1f));
  p = fma(p, t, all(1.f));
  return scaled(p, n);
}
inline F16 exp(F16 x) { return exp2(x * all(1.44269504089f)); }

}  // namespace jaxserve
