// One token each for many sequences: attention of a decoding pass, every row over its own keys and values.
//
// A row is computed by itself, in one order, so its numbers are the same whoever stands in the other rows. Compiled with
// native.cpp; serve/batching/cache.py has torch's form.

#include "native.h"

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

}  // namespace

extern "C" {

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
