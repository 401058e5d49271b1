// Eight lanes in plain C++; compilers turn the loops into whatever vectors the target has (SSE2, NEON, ...).
namespace lazytrain {
namespace portable {

constexpr int W = 8;
struct V { float v[W]; };
struct I { int32_t v[W]; };
struct D { double v[W]; };  // the same W elements

#define LT_REGISTER_TABLES 0
#define LT_TARGET
#define LT_FN LT_INLINE
#define LT_EACH for (int i = 0; i < W; i++)
LT_INLINE V load(const float* p) { V r; memcpy(r.v, p, sizeof r.v); return r; }
LT_INLINE void store(float* p, V a) { memcpy(p, a.v, sizeof a.v); }
LT_INLINE V set(float f) { V r; LT_EACH r.v[i] = f; return r; }
LT_INLINE I iset(int32_t k) { I r; LT_EACH r.v[i] = k; return r; }
LT_INLINE V add(V a, V b) { LT_EACH a.v[i] += b.v[i]; return a; }
LT_INLINE V sub(V a, V b) { LT_EACH a.v[i] -= b.v[i]; return a; }
LT_INLINE V mul(V a, V b) { LT_EACH a.v[i] *= b.v[i]; return a; }
LT_INLINE V div(V a, V b) { LT_EACH a.v[i] /= b.v[i]; return a; }
LT_INLINE V root(V a) { LT_EACH a.v[i] = __builtin_sqrtf(a.v[i]); return a; }
// As x86 does it: the second operand when either is NaN.
LT_INLINE V maxf(V a, V b) { LT_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
LT_INLINE V minf(V a, V b) { LT_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
LT_INLINE V magnitude(V a) { LT_EACH a.v[i] = bits_to_float(float_to_bits(a.v[i]) & 0x7fffffffu); return a; }
LT_INLINE V as_float(I a) { V r; memcpy(r.v, a.v, sizeof r.v); return r; }
LT_INLINE I bits(V a) { I r; memcpy(r.v, a.v, sizeof r.v); return r; }
LT_INLINE D dset(double f) { D r; LT_EACH r.v[i] = f; return r; }
LT_INLINE D dadd(D a, D b) { LT_EACH a.v[i] += b.v[i]; return a; }
LT_INLINE D dsub(D a, D b) { LT_EACH a.v[i] -= b.v[i]; return a; }
LT_INLINE D dmul(D a, D b) { LT_EACH a.v[i] *= b.v[i]; return a; }
LT_INLINE D ddiv(D a, D b) { LT_EACH a.v[i] /= b.v[i]; return a; }
LT_INLINE D droot(D a) { LT_EACH a.v[i] = __builtin_sqrt(a.v[i]); return a; }
LT_INLINE D widen(V a) { D r; LT_EACH r.v[i] = a.v[i]; return r; }
LT_INLINE V narrow(D a) { V r; LT_EACH r.v[i] = static_cast<float>(a.v[i]); return r; }
LT_INLINE I imax(I a, I b) { LT_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
LT_INLINE I zero_where_zero(I k, V a) { LT_EACH k.v[i] = a.v[i] == 0.0f ? 0 : k.v[i]; return k; }
// Table entries of W codes
LT_INLINE V look_up(const float* t, const uint8_t* code) { V r; LT_EACH r.v[i] = t[code[i]]; return r; }
// Codes of kCodesAtOnce values times `inverse`: see Map
constexpr int kCodesAtOnce = 2 * W;
LT_INLINE void store_codes_of(const uint32_t* t, const float* x, V inverse, uint8_t* code) {
  for (int i = 0; i < kCodesAtOnce; i++) {
    const uint32_t u = float_to_bits(x[i] * inverse.v[0]);
    const int32_t k = static_cast<int32_t>(t[u >> 16] + u) >> 16;
    code[i] = static_cast<uint8_t>(k < 0 ? -k : k);
  }
}
LT_INLINE float largest(V a) { float r = 0.0f; LT_EACH r = a.v[i] > r ? a.v[i] : r; return r; }
LT_INLINE V load_bf16(const uint16_t* p) { V r; LT_EACH r.v[i] = bf16_to_float(p[i]); return r; }
LT_INLINE V load_half(const uint16_t* p) { V r; LT_EACH r.v[i] = half_to_float(p[i]); return r; }
// 2 * W elements; `stream` may be ignored
LT_INLINE void store_bf16(uint16_t* p, V a, V b, bool) { LT_EACH { p[i] = float_to_bf16(a.v[i]); p[W + i] = float_to_bf16(b.v[i]); } }
LT_INLINE void store_half(uint16_t* p, V a, V b, bool) { LT_EACH { p[i] = float_to_half(a.v[i]); p[W + i] = float_to_half(b.v[i]); } }
LT_INLINE void store_fence() {}
#undef LT_EACH
#include "kernels.h"
#undef LT_FN
#undef LT_TARGET
#undef LT_REGISTER_TABLES

}  // namespace portable
}  // namespace lazytrain
