// One token each for a few sequences: products of few rows, and attention of every row over its own keys and values.
//
// A row is computed by itself, in one order, so its numbers are the same whoever stands in the other rows. Compiled with
// native.cpp; decode.py calls it, and torch has the same functions.

#include "native.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

template <class T>
struct Rows {
  const T *query, *key, *value;  // (rows, heads or groups, dim): the new token's
  T *const *keys, *const *values;  // of each row: (groups, capacity, dim), or nothing where the row is empty
  const i64 *capacity, *start;
  T* out;  // (rows, heads, dim)
  i64 rows, heads, groups, dim, window;
  float scale;
};

template <class T>
void attend_group(const Rows<T>& a, i64 row, i64 group, std::vector<float>& scores, std::vector<float>& sums) {
  i64 each = a.heads / a.groups, dim = a.dim, room = a.capacity[row], end = a.start[row] + 1;
  T* keys = a.keys[row] + group * room * dim;
  T* values = a.values[row] + group * room * dim;
  std::memcpy(keys + a.start[row] * dim, a.key + (row * a.groups + group) * dim, sizeof(T) * dim);
  std::memcpy(values + a.start[row] * dim, a.value + (row * a.groups + group) * dim, sizeof(T) * dim);
  i64 first = a.window > 0 && end > a.window ? end - a.window : 0, seen = end - first;
  scores.resize(each * seen);
  sums.assign(each * dim, 0.0f);
  const T* query = a.query + (row * a.heads + group * each) * dim;
  for (i64 at = 0; at < seen; ++at) {
    const T* one = keys + (first + at) * dim;
    for (i64 head = 0; head < each; ++head) {
      float sum = 0;
      const T* asked = query + head * dim;
#pragma omp simd reduction(+ : sum)
      for (i64 i = 0; i < dim; ++i) sum += wide(asked[i]) * wide(one[i]);
      scores[head * seen + at] = sum * a.scale;
    }
  }
  for (i64 head = 0; head < each; ++head) {
    float *share = scores.data() + head * seen, most = -INFINITY, total = 0;
    for (i64 at = 0; at < seen; ++at) most = std::max(most, share[at]);
#pragma omp simd reduction(+ : total)
    for (i64 at = 0; at < seen; ++at) {
      share[at] = exponential(share[at] - most);
      total += share[at];
    }
#pragma omp simd
    for (i64 at = 0; at < seen; ++at) share[at] /= total;
  }
  for (i64 at = 0; at < seen; ++at) {
    const T* one = values + (first + at) * dim;
    for (i64 head = 0; head < each; ++head) {
      float share = scores[head * seen + at], *sum = sums.data() + head * dim;
#pragma omp simd
      for (i64 i = 0; i < dim; ++i) sum[i] += share * wide(one[i]);
    }
  }
  T* out = a.out + (row * a.heads + group * each) * dim;
  for (i64 i = 0; i < each * dim; ++i) put(out + i, sums[i]);
}

template <class T>
void attend_rows(const Rows<T>& a, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scores, sums;
#pragma omp for schedule(dynamic)
    for (i64 task = 0; task < a.rows * a.groups; ++task) {
      i64 row = task / a.groups, group = task % a.groups, each = a.heads / a.groups * a.dim;
      if (a.keys[row]) attend_group(a, row, group, scores, sums);
      else std::memset(a.out + (row * a.heads) * a.dim + group * each, 0, sizeof(T) * each);
    }
  }
}

// Products of ROWS rows of x with `count` rows of the weight, which are read once: sums[row * count + at].
template <int ROWS, class T, class W>
void multiply(const T* x, const W* weight, float* sums, i64 in, i64 count) {
  constexpr int LANES = 16;
  for (i64 at = 0; at < count; ++at) {
    const W* one = weight + at * in;
    float lanes[ROWS][LANES] = {};
    i64 i = 0;
    for (; i + LANES <= in; i += LANES)
      for (int row = 0; row < ROWS; ++row) {
#pragma omp simd
        for (int lane = 0; lane < LANES; ++lane) lanes[row][lane] += wide(x[row * in + i + lane]) * wide(one[i + lane]);
      }
    for (int row = 0; row < ROWS; ++row) {
      float sum = 0;
      for (float lane : lanes[row]) sum += lane;
      for (i64 rest = i; rest < in; ++rest) sum += wide(x[row * in + rest]) * wide(one[rest]);
      sums[row * count + at] = sum;
    }
  }
}

#ifdef __AVX512BF16__
template <int ROWS>
void multiply(const bf16* x, const bf16* weight, float* sums, i64 in, i64 count) {
  for (i64 at = 0; at < count; ++at) {
    const bf16* one = weight + at * in;
    __m512 lanes[ROWS];
    for (int row = 0; row < ROWS; ++row) lanes[row] = _mm512_setzero_ps();
    i64 i = 0;
    for (; i + 32 <= in; i += 32) {
      __m512bh part = (__m512bh)_mm512_loadu_si512(one + i);
      for (int row = 0; row < ROWS; ++row)
        lanes[row] = _mm512_dpbf16_ps(lanes[row], (__m512bh)_mm512_loadu_si512(x + row * in + i), part);
    }
    for (int row = 0; row < ROWS; ++row) {
      float sum = _mm512_reduce_add_ps(lanes[row]);
      for (i64 rest = i; rest < in; ++rest) sum += wide(x[row * in + rest]) * wide(one[rest]);
      sums[row * count + at] = sum;
    }
  }
}
#endif

template <class T, class W>
void multiply_some(int rows, const T* x, const W* weight, float* sums, i64 in, i64 count) {
  switch (rows) {
    case 1: return multiply<1>(x, weight, sums, in, count);
    case 2: return multiply<2>(x, weight, sums, in, count);
    case 3: return multiply<3>(x, weight, sums, in, count);
    case 4: return multiply<4>(x, weight, sums, in, count);
    case 5: return multiply<5>(x, weight, sums, in, count);
    case 6: return multiply<6>(x, weight, sums, in, count);
    case 7: return multiply<7>(x, weight, sums, in, count);
    default: return multiply<8>(x, weight, sums, in, count);
  }
}

// `scales`: what a row of the weight is multiplied with, where it is codes.
template <class T, class W, class Out>
void multiply_rows(const T* x, const W* weight, const float* scales, const Out* bias, Out* out, i64 rows, i64 in,
                   i64 outs, int threads) {
  constexpr i64 BLOCK = 16, MOST = 8;  // of the weight's rows, which stay in the cache, and of x's, in registers
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 first = 0; first < outs; first += BLOCK) {
    float sums[BLOCK * MOST];
    i64 count = std::min(BLOCK, outs - first);
    for (i64 row = 0; row < rows; row += MOST) {
      i64 some = std::min(MOST, rows - row);
      multiply_some(int(some), x + row * in, weight + first * in, sums, in, count);
      for (i64 r = 0; r < some; ++r)
        for (i64 at = 0; at < count; ++at)
          put(out + (row + r) * outs + first + at, sums[r * count + at] * (scales ? scales[first + at] : 1.0f) +
                                                       (bias ? wide(bias[first + at]) : 0.0f));
    }
  }
}

}  // namespace

extern "C" {

// out (rows, outs) = x (rows, in) by weight (outs, in), with a bias where there is one.
void duoka_multiply_rows(const void* x, const void* weight, const void* bias, void* out, i64 rows, i64 in, i64 outs,
                         int is_wide, int threads) {
  if (is_wide)
    multiply_rows((const float*)x, (const float*)weight, nullptr, (const float*)bias, (float*)out, rows, in, outs,
                  threads);
  else
    multiply_rows((const bf16*)x, (const bf16*)weight, nullptr, (const bf16*)bias, (bf16*)out, rows, in, outs, threads);
}

// The same by codes of 8 bits and a scale for each of their rows; x is fp32, out and bias are of one type.
void duoka_multiply_codes(const float* x, const int8_t* codes, const float* scales, const void* bias, void* out,
                          i64 rows, i64 in, i64 outs, int is_wide, int threads) {
  if (is_wide) multiply_rows(x, codes, scales, (const float*)bias, (float*)out, rows, in, outs, threads);
  else multiply_rows(x, codes, scales, (const bf16*)bias, (bf16*)out, rows, in, outs, threads);
}

// places: (4, rows): addresses of each row's keys and of its values, its capacity, and where its new token stands.
void duoka_attend_rows(const void* query, const void* key, const void* value, const i64* places, void* out, i64 rows,
                       i64 heads, i64 groups, i64 dim, i64 window, float scale, int is_wide, int threads) {
  if (is_wide)
    attend_rows(Rows<float>{(const float*)query, (const float*)key, (const float*)value, (float* const*)places,
                            (float* const*)(places + rows), places + 2 * rows, places + 3 * rows, (float*)out, rows,
                            heads, groups, dim, window, scale}, threads);
  else
    attend_rows(Rows<bf16>{(const bf16*)query, (const bf16*)key, (const bf16*)value, (bf16* const*)places,
                           (bf16* const*)(places + rows), places + 2 * rows, places + 3 * rows, (bf16*)out, rows,
                           heads, groups, dim, window, scale}, threads);
}
}
