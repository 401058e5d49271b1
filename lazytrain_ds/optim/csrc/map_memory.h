// The map as tables in memory. Same results as map_registers.h, bit for bit. Included by kernels.h.

struct Dequantizer {
  const float* value;
};
LT_FN Dequantizer dequantizer(const Map& m) { return {m.value}; }
LT_FN V value_signed(const Dequantizer& d, const uint8_t* code) { return look_up(d.value, code); }
LT_FN V value_unsigned(const Dequantizer& d, const uint8_t* code) { return look_up(d.value, code); }

// A value's place is |value| / absmax in bits, counted from the first cell; zero itself has place 0 in the unsigned map.
// entry_of_cell[place >> 16] + place carries into the upper half exactly from the boundary inside the cell on.
template <bool Signed, bool Rescale>
LT_FN void quantize_with(const Map& map, const float* x, float absmax, float rescale, uint8_t* code) {
  if (Rescale) absmax *= rescale;
  const V inverse = set(absmax > 0.0f ? 1.0f / absmax : 0.0f), factor = set(rescale);
  for (int i = 0; i < kBlock; i += 4 * W) {
    I k[4];
    for (int u = 0; u < 4; u++) {
      const V raw = load(x + i + u * W);
      const V a = mul(Rescale ? mul(raw, factor) : raw, inverse);
      // Clamped to the cells: below the first boundary, and above 1 (which only rounding and NaN reach).
      I place = imin(imax(bits(magnitude(a)), iset(kFirstCell + 0x10000)), iset(0x3f80ffff));
      place = isub(place, iset(kFirstCell));
      if (!Signed) place = zero_where_zero(place, raw);
      k[u] = upper_half(iadd(look_up(map.entry_of_cell, place), place));
    }
    if (Signed) store_signed_codes(code + i, k, x + i);
    else store_codes(code + i, k);
  }
}
