// C ABI of LazyTrain's CPU optimizer kernels: no torch headers, one translation unit, run-time choice of instruction set.
#include <atomic>
#include <thread>
#include <vector>

#include "common.h"
#include "lanes_portable.h"
#if LT_X86
#include "lanes_avx2.h"
#include "lanes_avx512.h"
#endif

using namespace lazytrain;

namespace {

int best_isa() {
#if LT_X86
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
  __builtin_cpu_init();
  if (f16c && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) return kAvx512;
  if (f16c && __builtin_cpu_supports("avx2")) return kAvx2;
#endif
  return kPortable;
}

const Kernels* kernels(int isa) {
  static const int best = best_isa();
  if (isa == kAuto) isa = best;
  if (isa > best) return nullptr;
#if LT_X86
  if (isa == kAvx512) return &avx512::kKernels;
  if (isa == kAvx2) return &avx2::kKernels;
#endif
  return isa == kPortable ? &portable::kKernels : nullptr;
}

// Runs work(task) for every task, each exactly once, on the calling thread and up to threads - 1 others. Threads live for
// the call only: a pool would not survive fork(), and starting one costs microseconds against milliseconds of work.
template <class Work>
void for_each_task(int64_t tasks, int threads, const Work& work) {
  std::atomic<int64_t> next{0};
  auto loop = [&] {
    DefaultFloatMode mode;
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) work(t);
  };
  std::vector<std::thread> others;
  const int64_t extra = (threads < tasks ? threads : tasks) - 1;
  for (int64_t i = 0; i < extra; i++) {
    try {
      others.emplace_back(loop);
    } catch (...) {
      break;  // no more threads to be had: those we have do the work
    }
  }
  loop();
  for (auto& t : others) t.join();
}

int64_t tasks_of(int64_t count) { return (count + kTask - 1) / kTask; }

}  // namespace

extern "C" {

// 1 portable, 2 AVX2, 3 AVX-512: the best this processor has.
int lt_best_isa() { return best_isa(); }

// One AdamW step over `segments` (count x 5 int64, see Segment). Returns 0, or 1 if the instruction set is not available.
int lt_step(float* param, const void* grad, int grad_type, float* m32, float* v32, uint8_t* m_code, uint8_t* v_code,
            float* m_absmax, float* v_absmax, void* out, int out_type, const int64_t* segments, int64_t count,
            const double* coefficients, const void* maps, int isa, int threads) {
  const Kernels* k = kernels(isa);
  if (!k) return 1;
  static_assert(sizeof(CoefficientsOf<double>) == 9 * sizeof(double), "kernels.py passes nine doubles");
  Coefficients c;
  memcpy(&c.exact, coefficients, sizeof c.exact);
  const CoefficientsOf<double>& e = c.exact;
  auto f = [](double x) { return static_cast<float>(x); };
  c.rounded = {f(e.grad_scale), f(e.l2), f(e.beta1), f(e.one_minus_beta1), f(e.beta2), f(e.one_minus_beta2), f(e.eps),
               f(e.step_size), f(e.decay)};
  static_assert(sizeof(Map) == 4 * (48 + 256 + kCells), "quantization.py writes this layout: signed, then unsigned");
  static_assert(sizeof(Segment) == 5 * sizeof(int64_t), "kernels.py passes five int64 per segment");
  const Segment* list = reinterpret_cast<const Segment*>(segments);
  std::vector<int64_t> first(count + 1, 0);
  int64_t numel = 0;
  for (int64_t i = 0; i < count; i++) first[i + 1] = first[i] + tasks_of(list[i].numel), numel += list[i].numel;
  // Past the caches only when the copy is too large to be found there by whoever reads it next.
  const Buffers b{param, grad, grad_type, m32, v32, m_code, v_code, m_absmax, v_absmax, out, out_type, numel >= (4 << 20)};
  for_each_task(first[count], threads, [&](int64_t task) {
    int64_t lo = 0, hi = count - 1;
    while (lo < hi) {
      const int64_t mid = (lo + hi + 1) / 2;
      if (first[mid] <= task) lo = mid; else hi = mid - 1;
    }
    const int64_t begin = (task - first[lo]) * kTask, end = begin + kTask;
    k->step_range(b, list[lo], begin, end < list[lo].numel ? end : list[lo].numel, static_cast<const Map*>(maps), c);
  });
  return 0;
}

// Sum of squares of one parameter's gradient (DESIGN.md section 5); *finite is 0 if any element is NaN or infinite.
int lt_squared_norm(const void* grad, int type, int64_t numel, int isa, int threads, double* sum, int* finite) {
  const Kernels* k = kernels(isa);
  if (!k) return 1;
  const int64_t chunks = (numel + kNormChunk - 1) / kNormChunk, size = type == kF32 ? 4 : 2;
  std::vector<double> sums(chunks);
  std::atomic<int> all_finite{1};
  for_each_task(tasks_of(numel), threads, [&](int64_t task) {
    const int64_t last = (task + 1) * (kTask / kNormChunk);
    for (int64_t i = task * (kTask / kNormChunk); i < last && i < chunks; i++) {
      const int64_t at = i * kNormChunk, count = numel - at < kNormChunk ? numel - at : kNormChunk;
      const char* x = static_cast<const char*>(grad) + at * size;
      const float s = k->chunk_sum(x, type, count);
      sums[i] = s;
      if (std::isfinite(s)) continue;
      for (int64_t j = 0; j < count; j++) {  // the squares may have overflowed although every element is finite
        uint32_t u = 0;
        memcpy(&u, x + j * size, size);
        const uint32_t exponent = type == kF32 ? 0x7f800000u : type == kBF16 ? 0x7f80u : 0x7c00u;
        if ((u & exponent) == exponent) all_finite = 0;
      }
    }
  });
  // Halving tree, as chunk_sum does it: the same on a device, without a synchronization per chunk.
  int64_t width = 1;
  while (width < chunks) width *= 2;
  for (int64_t half = width / 2; half > 0; half /= 2) {
    for (int64_t j = 0; j < half && j + half < static_cast<int64_t>(sums.size()); j++) sums[j] += sums[j + half];
    if (static_cast<int64_t>(sums.size()) > half) sums.resize(half);
  }
  *sum = chunks ? sums[0] : 0.0;
  *finite = all_finite;
  return 0;
}

// dst += src; types as in DType.
int lt_accumulate(void* dst, int dst_type, const void* src, int src_type, int64_t numel, int isa, int threads) {
  const Kernels* k = kernels(isa);
  if (!k) return 1;
  const int64_t dst_size = dst_type == kF32 ? 4 : 2, src_size = src_type == kF32 ? 4 : 2;
  for_each_task(tasks_of(numel), threads, [&](int64_t task) {
    const int64_t at = task * kTask, count = numel - at < kTask ? numel - at : kTask;
    char* d = static_cast<char*>(dst) + at * dst_size;
    const char* s = static_cast<const char*>(src) + at * src_size;
    const int64_t main = count - count % k->accumulate_step, rest = count - main;
    k->accumulate(d, dst_type, s, src_type, main);
    if (rest) {
      float dst_pad[64] = {}, src_pad[64] = {};
      memcpy(dst_pad, d + main * dst_size, rest * dst_size);
      memcpy(src_pad, s + main * src_size, rest * src_size);
      k->accumulate(dst_pad, dst_type, src_pad, src_type, k->accumulate_step);
      memcpy(d + main * dst_size, dst_pad, rest * dst_size);
    }
  });
  return 0;
}

// Blockwise quantization to the nearest code (a non-zero unsigned value never to code 0).
int lt_quantize(const float* x, float* absmax, uint8_t* code, int64_t numel, const void* maps, int is_signed, int isa,
                int threads) {
  const Kernels* k = kernels(isa);
  if (!k) return 1;
  for_each_task(tasks_of(numel), threads, [&](int64_t task) {
    const int64_t end = (task + 1) * kTask < numel ? (task + 1) * kTask : numel;
    for (int64_t at = task * kTask; at < end; at += kBlock) {
      float pad[kBlock] = {};
      uint8_t code_pad[kBlock];
      const int64_t count = end - at < kBlock ? end - at : kBlock;
      const bool whole = count == kBlock;
      if (!whole) memcpy(pad, x + at, count * 4);
      k->quantize_one(whole ? x + at : pad, absmax + at / kBlock, whole ? code + at : code_pad, static_cast<const Map*>(maps)[!is_signed], is_signed);
      if (!whole) memcpy(code + at, code_pad, count);
    }
  });
  return 0;
}

int lt_dequantize(const uint8_t* code, const float* absmax, float* x, int64_t numel, const void* maps, int is_signed, int isa,
                int threads) {
  const Kernels* k = kernels(isa);
  if (!k) return 1;
  for_each_task(tasks_of(numel), threads, [&](int64_t task) {
    const int64_t end = (task + 1) * kTask < numel ? (task + 1) * kTask : numel;
    for (int64_t at = task * kTask; at < end; at += kBlock) {
      float pad[kBlock];
      uint8_t code_pad[kBlock] = {};
      const int64_t count = end - at < kBlock ? end - at : kBlock;
      const bool whole = count == kBlock;
      if (!whole) memcpy(code_pad, code + at, count);
      k->dequantize_one(whole ? code + at : code_pad, absmax[at / kBlock], whole ? x + at : pad, static_cast<const Map*>(maps)[!is_signed], is_signed);
      if (!whole) memcpy(x + at, pad, count * 4);
    }
  });
  return 0;
}

}  // extern "C"
