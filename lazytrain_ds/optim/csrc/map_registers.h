// The map as piecewise linear functions with tables in registers. Included by kernels.h.

struct Dequantizer {
  Table slope, offset;
};
struct Quantizer {
  Table next, slope, offset;
  ITable cap;
};
LT_FN Dequantizer dequantizer(const Map& m) { return {table(m.value_slope), table(m.value_offset)}; }
LT_FN Quantizer quantizer(const Map& m) {
  return {table(m.next), table(m.code_slope), table(m.code_offset), itable(m.cap)};
}

// Codes to values in [-1, 1].
LT_FN V value_signed(const Dequantizer& d, const uint8_t* code) {
  const V k = to_float(isub(load_codes(code), iset(127))), size = magnitude(k);
  const I piece = exponent(add(size, set(0.5f)));
  return with_sign_of(add(mul(size, look(d.slope, piece)), look(d.offset, piece)), k);
}
LT_FN V value_unsigned(const Dequantizer& d, const uint8_t* code) {
  const V k = to_float(load_codes(code));
  const I piece = exponent(add(k, set(1.0f)));
  return add(mul(k, look(d.slope, piece)), look(d.offset, piece));
}

// |value| / absmax to the magnitude of the nearest code.
LT_FN I nearest(const Quantizer& q, V a, int32_t middle) {
  const V magic = set(kPieceMagic);
  const I candidate = bits(maxf(add(mul(to_float(bits(a)), set(kPieceSlope)), set(kPieceOffset)), magic));
  const I piece = add_one_where_ge(candidate, a, look(q.next, candidate));
  const I rounded = bits(add(add(mul(a, look(q.slope, piece)), look(q.offset, piece)), magic));
  return iadd(imin(rounded, look(q.cap, piece)), iset(middle - kMagicBits));
}

constexpr float kLargestPlainUnsigned = 0x1p100f;
constexpr int kCodesAtOnce = 4 * W;

// kCodesAtOnce codes of x / absmax.
template <bool Signed>
LT_FN void quantize_some(const Quantizer& q, const float* x, V inverse, uint8_t* code) {
  I k[4];
  for (int u = 0; u < 4; u++) {
    const V raw = load(x + u * W), a = mul(raw, inverse);
    if (Signed) {
      // -1 is not in the map: its nearest code is 0, hence the max.
      k[u] = imax(iadd(negate_where_negative(nearest(q, magnitude(a), kMiddleSigned), a), iset(127)), iset(0));
    } else {
      // A second moment that is not zero never becomes zero: the next step would divide by eps.
      k[u] = zero_where_zero(imax(nearest(q, a, kMiddleUnsigned), iset(1)), raw);
    }
  }
  store_codes(code, k);
}
