// Eight lanes with AVX2 and F16C. Same names and same results as lanes_portable.h.
namespace lazytrain {
namespace avx2 {

constexpr int W = 8;
typedef __m256 V;
typedef __m256i I;
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
LT_FN I bits(V a) { return _mm256_castps_si256(a); }
LT_FN I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
LT_FN D dset(double f) { return {_mm256_set1_pd(f), _mm256_set1_pd(f)}; }
LT_FN D dadd(D a, D b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
LT_FN D dsub(D a, D b) { return {_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)}; }
LT_FN D dmul(D a, D b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
LT_FN D ddiv(D a, D b) { return {_mm256_div_pd(a.low, b.low), _mm256_div_pd(a.high, b.high)}; }
LT_FN D droot(D a) { return {_mm256_sqrt_pd(a.low), _mm256_sqrt_pd(a.high)}; }
LT_FN D widen(V a) { return {_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))}; }
LT_FN V narrow(D a) { return _mm256_set_m128(_mm256_cvtpd_ps(a.high), _mm256_cvtpd_ps(a.low)); }
LT_FN I imin(I a, I b) { return _mm256_min_epi32(a, b); }
LT_FN I imax(I a, I b) { return _mm256_max_epi32(a, b); }
LT_FN I zero_where_zero(I k, V a) {
  return _mm256_and_si256(k, _mm256_castps_si256(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_UQ)));
}
LT_FN V look_up(const float* t, const uint8_t* code) {
  uint64_t c;
  memcpy(&c, code, 8);
  return _mm256_setr_ps(t[c & 255], t[(c >> 8) & 255], t[(c >> 16) & 255], t[(c >> 24) & 255], t[(c >> 32) & 255],
                        t[(c >> 40) & 255], t[(c >> 48) & 255], t[c >> 56]);
}
// Scalar loads: faster than a gather on AMD and on processors whose microcode slows gathers down.
LT_FN I look_up(const uint32_t* t, I place) {
  const int* e = reinterpret_cast<const int*>(t);
  const __m128i low = _mm256_castsi256_si128(place), high = _mm256_extracti128_si256(place, 1);
  const uint64_t a = _mm_cvtsi128_si64(low), b = _mm_extract_epi64(low, 1);
  const uint64_t c = _mm_cvtsi128_si64(high), d = _mm_extract_epi64(high, 1);
  return _mm256_setr_epi32(e[static_cast<uint32_t>(a) >> 16], e[a >> 48], e[static_cast<uint32_t>(b) >> 16], e[b >> 48],
                           e[static_cast<uint32_t>(c) >> 16], e[c >> 48], e[static_cast<uint32_t>(d) >> 16], e[d >> 48]);
}
LT_FN I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
LT_FN I upper_half(I a) { return _mm256_srli_epi32(a, 16); }
LT_FN I pack(I a, I b, I c, I d, bool is_signed) {
  const I order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), ab = _mm256_packs_epi32(a, b), cd = _mm256_packs_epi32(c, d);
  return _mm256_permutevar8x32_epi32(is_signed ? _mm256_packs_epi16(ab, cd) : _mm256_packus_epi16(ab, cd), order);
}
LT_FN void store_codes(uint8_t* p, const I* k) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack(k[0], k[1], k[2], k[3], false));
}
LT_FN void store_signed_codes(uint8_t* p, const I* k, const float* x) {
  const I middle = _mm256_set1_epi8(127), n = pack(k[0], k[1], k[2], k[3], false);
  const I sign = pack(bits(load(x)), bits(load(x + 8)), bits(load(x + 16)), bits(load(x + 24)), true);
  const I up = _mm256_add_epi8(middle, n), down = _mm256_subs_epu8(middle, n);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_blendv_epi8(up, down, sign));
}
LT_FN float largest(V a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  x = _mm_max_ss(x, _mm_shuffle_ps(x, x, 1));
  return _mm_cvtss_f32(x);
}
LT_FN V load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
LT_FN V load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
LT_FN void put(uint16_t* p, I packed, bool stream) {
  if (stream) _mm256_stream_si256(reinterpret_cast<__m256i*>(p), packed);
  else _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
LT_FN I round_to_bf16(V a) {
  const I u = _mm256_castps_si256(a);
  const I lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const I rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), lsb), 16);
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}
LT_FN void store_bf16(uint16_t* p, V a, V b, bool stream) {
  put(p, _mm256_permute4x64_epi64(_mm256_packus_epi32(round_to_bf16(a), round_to_bf16(b)), 0xd8), stream);
}
LT_FN void store_half(uint16_t* p, V a, V b, bool stream) {
  put(p, _mm256_set_m128i(_mm256_cvtps_ph(b, 0), _mm256_cvtps_ph(a, 0)), stream);
}
LT_FN void store_fence() { _mm_sfence(); }
#include "kernels.h"
#undef LT_FN
#undef LT_TARGET
#undef LT_REGISTER_TABLES

}  // namespace avx2
}  // namespace lazytrain
