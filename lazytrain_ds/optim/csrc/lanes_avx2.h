// Eight lanes with AVX2 and F16C. Same names and same results as lanes_portable.h.
namespace lazytrain {
namespace avx2 {

constexpr int W = 8;
typedef __m256 V;
typedef __m256i I;
typedef int32_t __attribute__((may_alias)) Word;
typedef uint16_t __attribute__((may_alias)) HalfWord;
struct D {
  __m256d low, high;
};

#define LT_REGISTER_TABLES 0
#define LT_TARGET __attribute__((target("avx2,f16c")))
#define LT_FN LT_TARGET LT_INLINE
LT_FN V load(const float* p) { return _mm256_loadu_ps(p); }
LT_FN void store(float* p, V a) { _mm256_storeu_ps(p, a); }
LT_FN V set(float f) { return _mm256_set1_ps(f); }
LT_FN I iset(int32_t k) { return _mm256_set1_epi32(k); }
LT_FN V add(V a, V b) { return _mm256_add_ps(a, b); }
LT_FN V sub(V a, V b) { return _mm256_sub_ps(a, b); }
LT_FN V mul(V a, V b) { return _mm256_mul_ps(a, b); }
LT_FN V div(V a, V b) { return _mm256_div_ps(a, b); }
LT_FN V root(V a) { return _mm256_sqrt_ps(a); }
LT_FN V maxf(V a, V b) { return _mm256_max_ps(a, b); }
LT_FN V minf(V a, V b) { return _mm256_min_ps(a, b); }
LT_FN V magnitude(V a) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }
LT_FN V as_float(I a) { return _mm256_castsi256_ps(a); }
LT_FN I bits(V a) { return _mm256_castps_si256(a); }
LT_FN D dset(double f) { return {_mm256_set1_pd(f), _mm256_set1_pd(f)}; }
LT_FN D dadd(D a, D b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
LT_FN D dsub(D a, D b) { return {_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)}; }
LT_FN D dmul(D a, D b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
LT_FN D ddiv(D a, D b) { return {_mm256_div_pd(a.low, b.low), _mm256_div_pd(a.high, b.high)}; }
LT_FN D droot(D a) { return {_mm256_sqrt_pd(a.low), _mm256_sqrt_pd(a.high)}; }
LT_FN D widen(V a) { return {_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))}; }
LT_FN V narrow(D a) { return _mm256_set_m128(_mm256_cvtpd_ps(a.high), _mm256_cvtpd_ps(a.low)); }
LT_FN I imax(I a, I b) { return _mm256_max_epi32(a, b); }
LT_FN I zero_where_zero(I k, V a) {
  return _mm256_and_si256(k, _mm256_castps_si256(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_UQ)));
}
// Scalar loads: faster than a gather on AMD and on processors whose microcode slows gathers down. Half a register at a
// time, because moving data between the halves is slow on some.
LT_FN __m128i four(const void* table, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const Word* t = static_cast<const Word*>(table);
  return _mm_insert_epi32(_mm_insert_epi32(_mm_insert_epi32(_mm_cvtsi32_si128(t[a]), t[b], 1), t[c], 2), t[d], 3);
}
LT_FN __m128i four_values(const float* t, const uint8_t* code) {
  uint32_t k;
  memcpy(&k, code, 4);
  return four(t, k & 255, (k >> 8) & 255, (k >> 16) & 255, k >> 24);
}
LT_FN V look_up(const float* t, const uint8_t* code) {
  return _mm256_castsi256_ps(_mm256_set_m128i(four_values(t, code + 4), four_values(t, code)));
}
// Codes of kCodesAtOnce values times `inverse`: see Map
constexpr int kCodesAtOnce = 2 * W;
LT_FN __m128i four_sums(const uint32_t* t, __m128 values) {
  const __m128i u = _mm_castps_si128(values);
  const uint64_t a = _mm_cvtsi128_si64(u), b = _mm_extract_epi64(u, 1);
  return _mm_add_epi32(u, four(t, static_cast<uint32_t>(a) >> 16, a >> 48, static_cast<uint32_t>(b) >> 16, b >> 48));
}
// Upper halves of the sums as words: elements 0, 4, 1, 5, 2, 6, 3, 7
LT_FN __m128i eight_codes(const uint32_t* t, const float* x, __m128 inverse) {
  const __m128i low = four_sums(t, _mm_mul_ps(_mm_loadu_ps(x), inverse));
  const __m128i high = four_sums(t, _mm_mul_ps(_mm_loadu_ps(x + 4), inverse));
  return _mm_abs_epi16(_mm_blend_epi16(_mm_srli_epi32(low, 16), high, 0xaa));
}
LT_FN void store_codes_of(const uint32_t* t, const float* x, V inverse, uint8_t* code) {
  const __m128 f = _mm256_castps256_ps128(inverse);
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  const __m128i packed = _mm_packus_epi16(eight_codes(t, x, f), eight_codes(t, x + 8, f));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(code), _mm_shuffle_epi8(packed, order));
}
LT_FN float largest(V a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  x = _mm_max_ss(x, _mm_shuffle_ps(x, x, 1));
  return _mm_cvtss_f32(x);
}
LT_FN V load_bf16(const uint16_t* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), zero = _mm_setzero_si128();
  return _mm256_castsi256_ps(_mm256_set_m128i(_mm_unpackhi_epi16(zero, h), _mm_unpacklo_epi16(zero, h)));
}
LT_FN V load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
LT_FN void put(uint16_t* p, __m128i low, __m128i high, bool stream) {
  __m128i* to = reinterpret_cast<__m128i*>(p);
  if (stream) _mm_stream_si128(to, low), _mm_stream_si128(to + 1, high);
  else _mm_storeu_si128(to, low), _mm_storeu_si128(to + 1, high);
}
// Rounded to bf16 in the upper half of each element; NaN is left to keep_nan.
LT_FN I round_to_bf16(V a) {
  const I u = _mm256_castps_si256(a);
  const I lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), lsb);
}
LT_FN I keep_nan(I rounded, V a) {
  const V nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(nan));
}
LT_FN __m128i upper_halves(I a) {
  const __m128i order = _mm_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm_unpacklo_epi64(_mm_shuffle_epi8(_mm256_castsi256_si128(a), order),
                            _mm_shuffle_epi8(_mm256_extracti128_si256(a, 1), order));
}
LT_FN void store_bf16(uint16_t* p, V a, V b, bool stream) {
  I x = round_to_bf16(a), y = round_to_bf16(b);
  if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0, 0)) {
    x = keep_nan(x, a);
    y = keep_nan(y, b);
  }
  put(p, upper_halves(x), upper_halves(y), stream);
}
LT_FN void store_half(uint16_t* p, V a, V b, bool stream) {
  put(p, _mm256_cvtps_ph(a, 0), _mm256_cvtps_ph(b, 0), stream);
}
LT_FN void store_fence() { _mm_sfence(); }
#include "kernels.h"
#undef LT_FN
#undef LT_TARGET
#undef LT_REGISTER_TABLES

}  // namespace avx2
}  // namespace lazytrain
