// AdamW on weights, gradients and moments of bf16, in one pass over memory. native.py compiles this file with the others;
// optim/narrow.py has the same in torch's functions: its fallback and, in tests, what it is compared with.
//
// Results are rounded at random, by a hash of (key, place of the number in the whole tensor): so many threads, or ranks
// that each have a part, change no bit of the noise.

#include "native.h"

namespace {

// The upper 16 bits of x + noise / 65536 of a unit there: up or down by chance, right in the mean. Not of inf and NaN.
inline bf16 rounded_at_random(float x, u32 noise) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  bool is_finite = (bits & 0x7f800000u) != 0x7f800000u;
  return bf16((bits + (is_finite ? noise : 0u)) >> 16);
}

}  // namespace

extern "C" {

// `first`: where in the whole tensor these numbers begin. first_scale, second_scale: 1 / (1 - beta^step), the second's root.
void duoka_adamw(bf16* weight, const bf16* grad, bf16* average, bf16* square, i64 count, i64 first, i64 key, float lr,
                 float beta1, float beta2, float eps, float decay, float first_scale, float second_scale, int threads) {
  constexpr i64 BLOCK = 1024;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 block = 0; block < (count + BLOCK - 1) / BLOCK; ++block) {
    i64 start = block * BLOCK, size = std::min(BLOCK, count - start);
    u64 noise[BLOCK];
#pragma omp simd
    for (i64 i = 0; i < size; ++i) {
      u64 hash = u64(key) + u64(first + start + i) * 0x9E3779B97F4A7C15ull;
      hash = (hash ^ u64(i64(hash) >> 32)) * 0xBF58476D1CE4E5B9ull;
      noise[i] = (hash ^ u64(i64(hash) >> 29)) * 0x94D049BB133111EBull;
    }
    bf16 *w = weight + start, *m = average + start, *v = square + start;
    const bf16* g = grad + start;
#pragma omp simd
    for (i64 i = 0; i < size; ++i) {
      float slope = wide(g[i]);
      float one = wide(m[i]) * beta1 + slope * (1.0f - beta1), two = wide(v[i]) * beta2 + slope * slope * (1.0f - beta2);
      float moved = wide(w[i]) * (1.0f - lr * decay) - lr * (one * first_scale) / (std::sqrt(two) * second_scale + eps);
      w[i] = rounded_at_random(moved, u32(noise[i]) & 0xffffu);
      m[i] = rounded_at_random(one, u32(noise[i] >> 16) & 0xffffu);
      v[i] = rounded_at_random(two, u32(noise[i] >> 32) & 0xffffu);
    }
  }
}
}
