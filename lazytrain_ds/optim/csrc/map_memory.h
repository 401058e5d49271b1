// The map as tables in memory. Same results as map_registers.h, bit for bit. Included by kernels.h.

struct Dequantizer {
  const float* value;
};
struct Quantizer {
  const uint32_t* entry_of_cell;
};
LT_FN Dequantizer dequantizer(const Map& m) { return {m.value}; }
LT_FN Quantizer quantizer(const Map& m) { return {m.entry_of_cell}; }

LT_FN V value_signed(const Dequantizer& d, const uint8_t* code) { return look_up(d.value, code); }
LT_FN V value_unsigned(const Dequantizer& d, const uint8_t* code) { return look_up(d.value, code); }

// Above, a second moment that is not zero could become zero when divided by absmax, and get code 0 from its cell.
constexpr float kLargestPlainUnsigned = 1.0f;

// kCodesAtOnce codes of x / absmax.
template <bool Signed>
LT_FN void quantize_some(const Quantizer& q, const float* x, V inverse, uint8_t* code) {
  store_codes_of(q.entry_of_cell, x, inverse, code);
}
