// Sixteen lanes with AVX-512 F, BW, DQ and VL. Same names and same results as lanes_portable.h.
// (The bf16 conversion instruction is not used: it flushes subnormals, which torch and the other paths do not.)
namespace lazytrain {
namespace avx512 {

constexpr int W = 16;
typedef __m512 V;
typedef __m512i I;
struct D {
  __m512d low, high;
};
typedef __m512 Table;
typedef __m512i ITable;

#define LT_REGISTER_TABLES 1
#define LT_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))
#define LT_FN LT_TARGET LT_INLINE
LT_FN V load(const float* p) { return _mm512_loadu_ps(p); }
LT_FN void store(float* p, V a) { _mm512_storeu_ps(p, a); }
LT_FN V set(float f) { return _mm512_set1_ps(f); }
LT_FN I iset(int32_t k) { return _mm512_set1_epi32(k); }
LT_FN V add(V a, V b) { return _mm512_add_ps(a, b); }
LT_FN V sub(V a, V b) { return _mm512_sub_ps(a, b); }
LT_FN V mul(V a, V b) { return _mm512_mul_ps(a, b); }
LT_FN V div(V a, V b) { return _mm512_div_ps(a, b); }
LT_FN V root(V a) { return _mm512_sqrt_ps(a); }
LT_FN V maxf(V a, V b) { return _mm512_max_ps(a, b); }
LT_FN V minf(V a, V b) { return _mm512_min_ps(a, b); }
LT_FN V magnitude(V a) { return _mm512_and_ps(a, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff))); }
LT_FN V as_float(I a) { return _mm512_castsi512_ps(a); }
LT_FN I bits(V a) { return _mm512_castps_si512(a); }
LT_FN V with_sign_of(V a, V s) { return _mm512_or_ps(a, _mm512_and_ps(s, _mm512_set1_ps(-0.0f))); }
LT_FN V to_float(I k) { return _mm512_cvtepi32_ps(k); }
LT_FN I exponent(V a) { return _mm512_srli_epi32(_mm512_castps_si512(a), 23); }
LT_FN I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
LT_FN I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
LT_FN D dset(double f) { return {_mm512_set1_pd(f), _mm512_set1_pd(f)}; }
LT_FN D dadd(D a, D b) { return {_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)}; }
LT_FN D dsub(D a, D b) { return {_mm512_sub_pd(a.low, b.low), _mm512_sub_pd(a.high, b.high)}; }
LT_FN D dmul(D a, D b) { return {_mm512_mul_pd(a.low, b.low), _mm512_mul_pd(a.high, b.high)}; }
LT_FN D ddiv(D a, D b) { return {_mm512_div_pd(a.low, b.low), _mm512_div_pd(a.high, b.high)}; }
LT_FN D droot(D a) { return {_mm512_sqrt_pd(a.low), _mm512_sqrt_pd(a.high)}; }
LT_FN D widen(V a) { return {_mm512_cvtps_pd(_mm512_castps512_ps256(a)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1))}; }
LT_FN V narrow(D a) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(a.low)), _mm512_cvtpd_ps(a.high), 1);
}
LT_FN I imin(I a, I b) { return _mm512_min_epi32(a, b); }
LT_FN I imax(I a, I b) { return _mm512_max_epi32(a, b); }
LT_FN I negate_where_negative(I k, V s) {
  return _mm512_mask_sub_epi32(k, _mm512_movepi32_mask(_mm512_castps_si512(s)), _mm512_setzero_si512(), k);
}
LT_FN I add_one_where_ge(I k, V a, V b) {
  return _mm512_mask_add_epi32(k, _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), k, _mm512_set1_epi32(1));
}
LT_FN I zero_where_zero(I k, V a) { return _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_UQ), k); }
// Eight entries twice, so that a lookup by the low four bits reads the low three.
LT_FN Table table(const float* p) {
  return _mm512_castsi512_ps(_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
LT_FN ITable itable(const int32_t* p) { return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
LT_FN V look(Table t, I k) { return _mm512_permutexvar_ps(k, t); }
LT_FN I look(ITable t, I k) { return _mm512_permutexvar_epi32(k, t); }
LT_FN I load_codes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
LT_FN void store_codes(uint8_t* p, const I* k) {
  const I packed = _mm512_packus_epi16(_mm512_packs_epi32(k[0], k[1]), _mm512_packs_epi32(k[2], k[3]));
  const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, packed));
}
LT_FN float largest(V a) { return _mm512_reduce_max_ps(a); }
LT_FN V load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
LT_FN V load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
LT_FN void put(uint16_t* p, __m256i low, __m256i high, bool stream) {
  const I both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  if (stream) _mm512_stream_si512(reinterpret_cast<__m512i*>(p), both);
  else _mm512_storeu_si512(p, both);
}
LT_FN __m256i round_to_bf16(V a) {
  const I u = _mm512_castps_si512(a);
  const I lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const I rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), lsb), 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0)));
}
LT_FN void store_bf16(uint16_t* p, V a, V b, bool stream) { put(p, round_to_bf16(a), round_to_bf16(b), stream); }
LT_FN void store_half(uint16_t* p, V a, V b, bool stream) { put(p, _mm512_cvtps_ph(a, 0), _mm512_cvtps_ph(b, 0), stream); }
LT_FN void store_fence() { _mm_sfence(); }
#include "kernels.h"
#undef LT_FN
#undef LT_TARGET
#undef LT_REGISTER_TABLES

}  // namespace avx512
}  // namespace lazytrain
