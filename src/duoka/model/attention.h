// What both attentions share: how their inputs lie, a query's softmax, and who computes what.

#pragma once

#include "native.h"

template <class T>
struct Attention {
  const T *query, *key, *value;  // (tokens, heads or groups, dim), tokens `*_stride` apart
  i64 query_stride, key_stride, value_stride;
  i64 heads, groups, dim, tokens;
  float scale;
};

template <class T>
struct Slopes {  // of queries, keys and values: (tokens, heads or groups, dim), without gaps
  T *query, *key, *value;
};

// Of one query: `last` keys count; the others become 0. Returns log(sum of exponentials).
inline float soften(float* scores, i64 last, i64 columns, float scale) {
  float most = -INFINITY;
#pragma omp simd reduction(max : most)
  for (i64 i = 0; i < last; ++i) most = scores[i] > most ? scores[i] : most;
  most *= scale;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (i64 i = 0; i < last; ++i) {
    float one = exponential(scores[i] * scale - most);
    scores[i] = one;
    sum += one;
  }
  std::fill(scores + last, scores + columns, 0.0f);
  float share = 1.0f / sum;
#pragma omp simd
  for (i64 i = 0; i < last; ++i) scores[i] *= share;
  return most + std::log(sum);
}

// Again, from its scores and the logarithm; `inner` (slopes of weights) become slopes of scores.
inline void soften_back(float* weights, float* inner, i64 last, i64 columns, float scale, float log_sum, float delta) {
#pragma omp simd
  for (i64 i = 0; i < last; ++i) {
    weights[i] = exponential(weights[i] * scale - log_sum);
    inner[i] = weights[i] * (inner[i] - delta) * scale;
  }
  std::fill(weights + last, weights + columns, 0.0f);
  std::fill(inner + last, inner + columns, 0.0f);
}

// Of one document: its last `queries` tokens ask, all of its `keys` answer. Both end together.
struct Document {
  i64 first_query, queries, first_key, keys;
  i64 before() const { return keys - queries; }
};

// Every document's heads of one group are one thread's work. Edges have where documents begin, and the end.
template <class Work>
void each_document(const std::int32_t* query_edges, const std::int32_t* key_edges, i64 documents, i64 groups,
                   int threads, Work work) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (i64 task = 0; task < documents * groups; ++task) {
    const std::int32_t *asking = query_edges + task / groups, *held = key_edges + task / groups;
    Document one{asking[0], asking[1] - asking[0], held[0], held[1] - held[0]};
    if (one.queries > 0) work(one, task % groups);
  }
}
