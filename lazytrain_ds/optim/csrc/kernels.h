// The kernels, written once over the lanes of the including header (no include guard on purpose).

template <int T>
LT_FN V load_as(const void* p, int64_t i) {
  if (T == kF32) return load(static_cast<const float*>(p) + i);
  if (T == kBF16) return load_bf16(static_cast<const uint16_t*>(p) + i);
  return load_half(static_cast<const uint16_t*>(p) + i);
}

#if LT_REGISTER_TABLES
#include "map_registers.h"
#else
#include "map_memory.h"
#endif
// Whether x * (1 / absmax) is good enough as it stands: 1 / absmax is a normal number, and see kLargestPlainUnsigned.
template <bool Signed>
LT_FN bool is_plain(float absmax) {
  return !((absmax < 0x1p-100f && absmax > 0.0f) || absmax > (Signed ? 0x1p100f : kLargestPlainUnsigned));
}
LT_FN V inverse_of(float absmax) { return set(absmax > 0.0f ? 1.0f / absmax : 0.0f); }

template <bool Signed>
LT_FN void quantize_block(const Map& map, const float* x, float absmax, uint8_t* code) {
  const Quantizer q = quantizer(map);
  alignas(64) float scaled[kBlock];
  V inverse = inverse_of(absmax);
  if (__builtin_expect(!is_plain<Signed>(absmax), 0)) {
    // Bring the block closer to 1 by a power of two first if need be, and keep what is not zero from becoming zero.
    const float rescale = absmax < 0x1p-100f ? 0x1p64f : absmax > 0x1p100f ? 0x1p-64f : 1.0f;
    const V factor = set(rescale);
    inverse = inverse_of(absmax * rescale);
    for (int i = 0; i < kBlock; i += W) {
      const V raw = load(x + i);
      V a = mul(mul(raw, factor), inverse);
      if (!Signed) a = as_float(zero_where_zero(imax(bits(magnitude(a)), iset(1)), raw));
      store(scaled + i, a);
    }
    inverse = set(1.0f);
    x = scaled;
  }
  for (int i = 0; i < kBlock; i += kCodesAtOnce) quantize_some<Signed>(q, x + i, inverse, code + i);
}

template <int Out>
LT_FN void write_copy(const float* p, uint16_t* out, bool stream) {
  for (int i = 0; i < kBlock; i += 2 * W) {
    if (Out == kBF16) store_bf16(out + i, load(p + i), load(p + i + W), stream);
    else store_half(out + i, load(p + i), load(p + i + W), stream);
  }
}

// With fp32 moments, in fp64 throughout: the only roundings are those of the three results. The memory traffic hides most
// of the cost, and near-cancelling sums stay as accurate as the data.
template <int T>
LT_FN void adam_fp32(float* p, const void* grad, float* m, float* v, const CoefficientsOf<double>& c) {
  const D scale = dset(c.grad_scale), l2 = dset(c.l2), beta1 = dset(c.beta1), one_minus_beta1 = dset(c.one_minus_beta1),
          beta2 = dset(c.beta2), one_minus_beta2 = dset(c.one_minus_beta2), eps = dset(c.eps),
          step_size = dset(c.step_size), decay = dset(c.decay);
  const bool with_l2 = c.l2 != 0.0;
  for (int i = 0; i < kBlock; i += W) {
    const D pi = widen(load(p + i));
    D g = dmul(widen(load_as<T>(grad, i)), scale);
    if (with_l2) g = dadd(g, dmul(pi, l2));
    const D mi = dadd(dmul(widen(load(m + i)), beta1), dmul(g, one_minus_beta1));
    const D vi = dadd(dmul(widen(load(v + i)), beta2), dmul(dmul(g, g), one_minus_beta2));
    const D update = dmul(ddiv(mi, dadd(droot(vi), eps)), step_size);
    store(m + i, narrow(mi));
    store(v + i, narrow(vi));
    store(p + i, narrow(dsub(dmul(pi, decay), update)));
  }
}

// With 8-bit moments, in two passes over a block: moments and their absmax first, then codes and parameters together, so
// that the divisions and square roots of these are under way while the table lookups of those fill the other units.
template <int Out, bool Codes>
LT_FN void finish_8bit(float* p, const float* m, const float* v, float m_absmax, float v_absmax, uint8_t* m_code,
                       uint8_t* v_code, const Map* maps, const CoefficientsOf<float>& c, uint16_t* out, bool stream) {
  const Quantizer qm = quantizer(maps[0]), qv = quantizer(maps[1]);
  const V m_inverse = inverse_of(m_absmax), v_inverse = inverse_of(v_absmax), eps = set(c.eps), step_size = set(c.step_size),
          decay = set(c.decay);
  constexpr int n = kCodesAtOnce / W;
  for (int i = 0; i < kBlock; i += kCodesAtOnce) {
    V x[n];
    for (int u = 0; u < n; u++) x[u] = add(root(load(v + i + u * W)), eps);
    if (Codes) quantize_some<true>(qm, m + i, m_inverse, m_code + i);
    for (int u = 0; u < n; u++) x[u] = div(load(m + i + u * W), x[u]);
    if (Codes) quantize_some<false>(qv, v + i, v_inverse, v_code + i);
    for (int u = 0; u < n; u++) {
      x[u] = sub(mul(load(p + i + u * W), decay), mul(x[u], step_size));
      store(p + i + u * W, x[u]);
    }
    for (int u = 0; u < n; u += 2) {
      if (Out == kBF16) store_bf16(out + i + u * W, x[u], x[u + 1], stream);
      if (Out == kF16) store_half(out + i + u * W, x[u], x[u + 1], stream);
    }
  }
}
template <int T, int Out>
LT_FN void adam_8bit(float* p, const void* grad, uint8_t* m_code, uint8_t* v_code, float* m_absmax, float* v_absmax,
                     const Map* maps, const CoefficientsOf<float>& c, uint16_t* out, bool stream) {
  alignas(64) float m[kBlock], v[kBlock];
  const Dequantizer dm = dequantizer(maps[0]), dv = dequantizer(maps[1]);
  const V m_scale = set(*m_absmax * c.beta1), v_scale = set(*v_absmax * c.beta2), one_minus_beta1 = set(c.one_minus_beta1),
          one_minus_beta2 = set(c.one_minus_beta2), scale = set(c.grad_scale), l2 = set(c.l2),
          largest_finite = set(0x1.fffffep127f);
  const bool with_l2 = c.l2 != 0.0f;
  V m_top = set(0.0f), v_top = set(0.0f);
  for (int i = 0; i < kBlock; i += W) {
    V gi = mul(load_as<T>(grad, i), scale);
    if (with_l2) gi = add(gi, mul(load(p + i), l2));
    const V mi = add(mul(value_signed(dm, m_code + i), m_scale), mul(gi, one_minus_beta1));
    // Capped, because an infinite absmax would make the whole block undefined.
    const V vi = minf(add(mul(value_unsigned(dv, v_code + i), v_scale), mul(mul(gi, gi), one_minus_beta2)), largest_finite);
    store(m + i, mi);
    store(v + i, vi);
    m_top = maxf(m_top, magnitude(mi));
    v_top = maxf(v_top, vi);
  }
  const float mt = *m_absmax = largest(m_top), vt = *v_absmax = largest(v_top);
  if (__builtin_expect(is_plain<true>(mt) && is_plain<false>(vt), 1)) {
    finish_8bit<Out, true>(p, m, v, mt, vt, m_code, v_code, maps, c, out, stream);
  } else {
    quantize_block<true>(maps[0], m, mt, m_code);
    quantize_block<false>(maps[1], v, vt, v_code);
    finish_8bit<Out, false>(p, m, v, mt, vt, m_code, v_code, maps, c, out, stream);
  }
}

// Elements [begin, end) of a segment; begin is a multiple of kBlock, and so is end unless it is the segment's.
template <int T, int Out>
LT_FN void step_range_as(const Buffers& b, const Segment& s, int64_t begin, int64_t end, const Map* maps,
                         const Coefficients& c) {
  alignas(64) float p_pad[kBlock], m_pad[kBlock], v_pad[kBlock];
  alignas(64) uint8_t m_code_pad[kBlock], v_code_pad[kBlock];
  alignas(64) uint32_t grad_pad[kBlock];
  alignas(64) uint16_t out_pad[kBlock];
  const int64_t grad_bytes = T == kF32 ? 4 : 2;
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = end - at < kBlock ? end - at : kBlock, flat = s.offset + at, state = s.state_offset + at;
    const bool whole = count == kBlock;
    float *p = b.param + flat, *m = b.m32 + state, *v = b.v32 + state;
    uint8_t *m_code = b.m_code + state, *v_code = b.v_code + state;
    const void* grad = static_cast<const char*>(b.grad) + flat * grad_bytes;
    uint16_t* out = static_cast<uint16_t*>(b.out) + flat;
    if (!whole) {  // the last block of a segment: the same code on copies padded with zeros
      memset(p_pad, 0, sizeof p_pad), memcpy(p_pad, p, count * 4);
      memset(grad_pad, 0, sizeof grad_pad), memcpy(grad_pad, grad, count * grad_bytes);
      if (s.quantized) {
        memset(m_code_pad, 127, sizeof m_code_pad), memcpy(m_code_pad, m_code, count);
        memset(v_code_pad, 0, sizeof v_code_pad), memcpy(v_code_pad, v_code, count);
        m_code = m_code_pad, v_code = v_code_pad;
      } else {
        memset(m_pad, 0, sizeof m_pad), memcpy(m_pad, m, count * 4);
        memset(v_pad, 0, sizeof v_pad), memcpy(v_pad, v, count * 4);
        m = m_pad, v = v_pad;
      }
      p = p_pad, grad = grad_pad, out = out_pad;
    }
    const bool stream = whole && b.stream_out && (reinterpret_cast<uintptr_t>(out) & 63) == 0;
    if (s.quantized) {
      const int64_t block = s.absmax_offset + at / kBlock;
      adam_8bit<T, Out>(p, grad, m_code, v_code, b.m_absmax + block, b.v_absmax + block, maps, c.rounded, out, stream);
    } else {
      adam_fp32<T>(p, grad, m, v, c.exact);
      if (Out != kNone) write_copy<Out>(p, out, stream);
    }
    if (!whole) {
      memcpy(b.param + flat, p, count * 4);
      if (s.quantized) {
        memcpy(b.m_code + state, m_code, count), memcpy(b.v_code + state, v_code, count);
      } else {
        memcpy(b.m32 + state, m, count * 4), memcpy(b.v32 + state, v, count * 4);
      }
      if (Out != kNone) memcpy(static_cast<uint16_t*>(b.out) + flat, out, count * 2);
    }
  }
  if (b.stream_out) store_fence();
}
LT_TARGET static void step_range(const Buffers& b, const Segment& s, int64_t begin, int64_t end, const Map* maps,
                                 const Coefficients& c) {
#define LT_CASE(T, Out) if (b.grad_type == T && b.out_type == Out) step_range_as<T, Out>(b, s, begin, end, maps, c);
  LT_CASE(kF32, kNone) LT_CASE(kF32, kBF16) LT_CASE(kF32, kF16)
  LT_CASE(kBF16, kNone) LT_CASE(kBF16, kBF16) LT_CASE(kBF16, kF16)
  LT_CASE(kF16, kNone) LT_CASE(kF16, kBF16) LT_CASE(kF16, kF16)
#undef LT_CASE
}

// Sum of squares of up to kNormChunk elements: element i goes to partial sum i % 64, in order; the partial sums are
// halved pairwise (j += j + 32, then 16, ... 1). Missing elements are zeros.
template <int T>
LT_FN float chunk_sum_as(const void* x) {
  alignas(64) float lanes[kNormLanes];
  V sum[kNormLanes / W];
  for (int u = 0; u < kNormLanes / W; u++) sum[u] = set(0.0f);
  for (int64_t i = 0; i < kNormChunk; i += kNormLanes) {
    for (int u = 0; u < kNormLanes / W; u++) {
      const V a = load_as<T>(x, i + u * W);
      sum[u] = add(sum[u], mul(a, a));
    }
  }
  for (int u = 0; u < kNormLanes / W; u++) store(lanes + u * W, sum[u]);
  for (int half = kNormLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}
LT_TARGET static float chunk_sum(const void* x, int type, int64_t count) {
  alignas(64) uint32_t pad[kNormChunk];
  if (count < kNormChunk) {
    memset(pad, 0, sizeof pad);
    memcpy(pad, x, count * (type == kF32 ? 4 : 2));
    x = pad;
  }
  if (type == kF32) return chunk_sum_as<kF32>(x);
  return type == kBF16 ? chunk_sum_as<kBF16>(x) : chunk_sum_as<kF16>(x);
}

// dst += src in fp32, rounded to dst's type; 2 * W elements per turn, the rest by the caller.
template <int D, int S>
LT_FN void accumulate_as(void* dst, const void* src, int64_t count) {
  for (int64_t i = 0; i + 2 * W <= count; i += 2 * W) {
    const V a = add(load_as<D>(dst, i), load_as<S>(src, i)), b = add(load_as<D>(dst, i + W), load_as<S>(src, i + W));
    if (D == kF32) store(static_cast<float*>(dst) + i, a), store(static_cast<float*>(dst) + i + W, b);
    else if (D == kBF16) store_bf16(static_cast<uint16_t*>(dst) + i, a, b, false);
    else store_half(static_cast<uint16_t*>(dst) + i, a, b, false);
  }
}
LT_TARGET static void accumulate(void* dst, int dst_type, const void* src, int src_type, int64_t count) {
#define LT_CASE(D, S) if (dst_type == D && src_type == S) accumulate_as<D, S>(dst, src, count);
  LT_CASE(kF32, kF32) LT_CASE(kF32, kBF16) LT_CASE(kF32, kF16)
  LT_CASE(kBF16, kF32) LT_CASE(kBF16, kBF16) LT_CASE(kBF16, kF16)
  LT_CASE(kF16, kF32) LT_CASE(kF16, kBF16) LT_CASE(kF16, kF16)
#undef LT_CASE
}

LT_TARGET static void quantize_one(const float* x, float* absmax, uint8_t* code, const Map& map, bool is_signed) {
  V top = set(0.0f);
  for (int i = 0; i < kBlock; i += W) top = maxf(top, magnitude(load(x + i)));
  *absmax = largest(top);
  if (is_signed) quantize_block<true>(map, x, *absmax, code);
  else quantize_block<false>(map, x, *absmax, code);
}
LT_TARGET static void dequantize_one(const uint8_t* code, float absmax, float* x, const Map& map, bool is_signed) {
  const Dequantizer d = dequantizer(map);
  for (int i = 0; i < kBlock; i += W) {
    store(x + i, mul(is_signed ? value_signed(d, code + i) : value_unsigned(d, code + i), set(absmax)));
  }
}

static const Kernels kKernels = {step_range, chunk_sum, accumulate, 2 * W, quantize_one, dequantize_one};
