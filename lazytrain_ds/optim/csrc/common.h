// Types and constants shared by every instruction set. Nothing here depends on one.
//
// Numerics, the whole room relies on them: every arithmetic step is one IEEE-754 operation (add, sub, mul, div, sqrt; round
// to nearest even), in one written order; fp64 where the moments are fp32, fp32 where they are 8-bit. No fused multiply-add
// and no contraction (-ffp-contract=off), so AVX-512, AVX2, the portable path and torch operations agree bit for bit.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#define LT_X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define LT_X86 0
#endif

#define LT_INLINE inline __attribute__((always_inline))

namespace lazytrain {

constexpr int64_t kBlock = 256;        // elements that share one absmax; also the unit of every split
constexpr int64_t kNormChunk = 4096;   // elements summed in fp32 before fp64 takes over
constexpr int kNormLanes = 64;         // fp32 partial sums inside a chunk
constexpr int64_t kTask = 1 << 16;     // elements a thread takes at once; a multiple of kBlock and kNormChunk

enum DType : int { kF32 = 0, kBF16 = 1, kF16 = 2, kNone = 3 };
enum Isa : int { kAuto = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3 };

// What one step needs of its hyper-parameters, computed in fp64 by the caller (kernels.py).
template <class Real>
struct CoefficientsOf {
  Real grad_scale;      // gradient * grad_scale = the gradient AdamW sees
  Real l2;              // added as l2 * parameter to the gradient; 0 with decoupled decay
  Real beta1, one_minus_beta1, beta2, one_minus_beta2;
  Real eps;             // eps * sqrt(bias correction 2)
  Real step_size;       // lr * sqrt(bias correction 2) / bias correction 1
  Real decay;           // 1 - lr * weight_decay; 1 with L2
};
struct Coefficients {
  CoefficientsOf<double> exact;    // fp32 moments
  CoefficientsOf<float> rounded;   // 8-bit moments
};

// A run of elements of one precision inside a flat parameter. Offsets count elements of the tensor they index.
struct Segment {
  int64_t offset;         // into parameter, gradient and copy-out
  int64_t numel;
  int64_t quantized;      // 0: fp32 moments, 1: 8-bit blockwise moments
  int64_t state_offset;   // into the fp32 moments, or into the codes
  int64_t absmax_offset;  // into the absmax arrays (quantized only)
};

// A dynamic map in two equivalent forms; quantization.py computes both (and says how), this is the layout it writes.
constexpr int64_t kCells = 65536;      // a cell holds the floats whose bits have the same upper half: 1/128 of an octave

struct Map {
  // As piecewise linear functions of eight pieces, so that one eight-entry register holds a table (AVX-512).
  // code -> value: piece chosen by the low three exponent bits of the (shifted) code, value = code * slope + offset
  float value_slope[8], value_offset[8];
  // value -> nearest code: piece = candidate, +1 if value >= next[candidate]; code = min(round(value*slope+offset), cap)
  float next[8], code_slope[8], code_offset[8];
  int32_t cap[8];
  // As tables in memory (AVX2, whose eight-entry lookups are slow on some processors, and the portable path): the value of
  // each code; and per cell of values, which holds at most one boundary between codes, 65536 * (code at its start - its
  // number) + 65536 - (boundary's distance from its start): added to a value's bits, it carries into the upper half exactly
  // from the boundary on, and the upper half is the code. Negative values of the signed map have -code there, for the code
  // falls where the bits rise. Every float has a cell, so that nothing needs clamping; only a few kilobytes are ever read.
  float value[256];
  uint32_t entry_of_cell[kCells];
};

// The candidate piece is round((bits / 2^23) / 3.25 - 33): the bits of a float grow almost like its log2 (within 0.09),
// a piece spans about 3.3 octaves, and any candidate in {piece - 1, piece} is made exact by one comparison with `next`.
// Candidates change at 2^-18.125, 2^-14.875, ... 2^-1.875, which lie inside the pieces of both maps. Rounding is done
// by adding 1.5 * 2^23, after which the integer sits in the low bits, where table lookups read it.
constexpr float kPieceMagic = 12582912.0f;
constexpr float kPieceSlope = 1.0f / (3.25f * 8388608.0f);
constexpr float kPieceOffset = kPieceMagic - 33.0f;
// Codes are rounded in the same way; `offset` and `cap` count from the middle code, which halves the rounding errors.
constexpr int32_t kMagicBits = 0x4b400000;
constexpr int32_t kMiddleSigned = 64, kMiddleUnsigned = 128;

struct Buffers {
  float* param;
  const void* grad;
  int grad_type;
  float *m32, *v32;
  uint8_t *m_code, *v_code;
  float *m_absmax, *v_absmax;
  void* out;
  int out_type;
  bool stream_out;  // write the copy past the caches (large outputs only)
};

LT_INLINE float bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
LT_INLINE uint32_t float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

LT_INLINE float bf16_to_float(uint16_t h) { return bits_to_float(static_cast<uint32_t>(h) << 16); }
LT_INLINE uint16_t float_to_bf16(float f) {
  const uint32_t u = float_to_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // torch's NaN
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
LT_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, body = h & 0x7fff;
  if (body >= 0x7c00) return bits_to_float(sign | 0x7f800000u | ((body & 0x3ff) << 13) | ((body & 0x3ff) ? 0x400000u : 0));
  if (body < 0x400) return bits_to_float(float_to_bits(static_cast<float>(body) * 0x1p-24f) | sign);
  return bits_to_float(sign | ((body << 13) + (112u << 23)));
}
LT_INLINE uint16_t float_to_half(float f) {
  const uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000u, body = u & 0x7fffffffu;
  if (body > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (body >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity from 65520 on
  if (body < 0x38800000u) {  // subnormal half: one rounding by adding 0.5, whose unit in the last place is 2^-24
    return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(body) + 0.5f) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((body - (112u << 23) + 0xfffu + ((body >> 13) & 1u)) >> 13));
}

// What one instruction set provides; kernels.h says what each entry does.
struct Kernels {
  void (*step_range)(const Buffers&, const Segment&, int64_t begin, int64_t end, const Map* maps, const Coefficients&);
  float (*chunk_sum)(const void* x, int type, int64_t count);
  void (*accumulate)(void* dst, int dst_type, const void* src, int src_type, int64_t count);
  int64_t accumulate_step;
  void (*quantize_one)(const float* x, float* absmax, uint8_t* code, const Map&, bool is_signed);
  void (*dequantize_one)(const uint8_t* code, float absmax, float* x, const Map&, bool is_signed);
};

// Flush-to-zero and rounding modes are a property of the calling thread; results must not depend on it.
class DefaultFloatMode {
#if LT_X86
  unsigned saved_ = _mm_getcsr();
 public:
  DefaultFloatMode() { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }
#endif
};

}  // namespace lazytrain
