// What the compiled files share: bf16 numbers as 16 bits, exponentials that compilers vectorize, and vectors.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using i64 = std::int64_t;
using u64 = std::uint64_t;
using u32 = std::uint32_t;
using bf16 = std::uint16_t;

inline i64 up(i64 x, i64 to) { return (x + to - 1) / to * to; }

inline float wide(bf16 x) {
  u32 bits = u32(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline float wide(float x) { return x; }
inline float wide(int8_t x) { return x; }

inline u32 rounded(float x) {  // to the nearest bf16, ties to even, in the upper half
  u32 bits;
  std::memcpy(&bits, &x, 4);
  u32 up = bits + 0x7fff + ((bits >> 16) & 1);
  return x != x ? (bits | 0x00400000u) : up;
}
inline bf16 narrow(float x) { return bf16(rounded(x) >> 16); }
inline void put(bf16* at, float x) { *at = narrow(x); }
inline void put(float* at, float x) { *at = x; }

inline float exponential(float x) {  // to 2 units in the last place; 0 below -87, infinite above 88
  float y = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  float n = std::floor(y * 1.44269504f + 0.5f);
  float r = y - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  u32 bits = u32(std::int32_t(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return x < -87.0f ? 0.0f : x > 88.0f ? INFINITY : p * scale;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

#ifdef __AVX512F__
constexpr i64 LANES = 16;
#else
constexpr i64 LANES = 8;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));

inline Vector load(const float* at) {
  Vector x;
  std::memcpy(&x, at, sizeof x);
  return x;
}
inline void store(float* at, Vector x) { std::memcpy(at, &x, sizeof x); }
inline float total(Vector x) {  // always in the same order
  typedef float Four __attribute__((vector_size(16)));
  Four parts[LANES / 4];
  std::memcpy(parts, &x, sizeof x);
  Four sum = parts[0];
  for (i64 i = 1; i < LANES / 4; ++i) sum += parts[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}
