// What both attentions share: how their inputs lie, a query's softmax, and who computes what.

#pragma once

#include "native.h"

// What becomes of a query's products with keys.
struct Scoring {
  i64 window;            // so many keys count at most, the query's own among them; all where it is 0
  const float* sinks;    // of each head a score that is no key's, or nothing
  float scale, softcap;  // softcap * tanh(product * scale / softcap), where it is not 0

  i64 lowest(i64 place) const { return window > 0 ? std::max<i64>(0, place + 1 - window) : 0; }  // key that it sees
};

// What a caller hands over (compiled_attention.py has the same fields).
struct Inputs {
  const void *query, *key, *value;  // (tokens, heads or groups, dim or value_dim), tokens `*_stride` apart
  i64 query_stride, key_stride, value_stride;
  const std::int32_t *query_edges, *key_edges;  // where documents begin, and the end; of keys there may be more
  i64 documents, heads, groups, dim, value_dim, tokens;
  Scoring how;
};

template <class T>
struct Attention : Inputs {
  const T *query, *key, *value;
  explicit Attention(const Inputs& given)
      : Inputs(given), query((const T*)given.query), key((const T*)given.key), value((const T*)given.value) {}

  const float* sink(i64 head) const { return how.sinks ? how.sinks + head : nullptr; }
};

template <class T>
struct Slopes {  // of queries, keys and values: (tokens, heads or groups, dim or value_dim), without gaps
  T *query, *key, *value;
  float* sinks;  // (heads, tokens), where there are sinks
};

// Of a row of numbers by key, which begins at a multiple of some keys: [first, last) count.
struct Seen {
  i64 first, last;
};

// By the query at `place` among all keys, of a row that begins at key `low`.
inline Seen seen_from(const Scoring& how, i64 place, i64 low) { return {how.lowest(place) - low, place + 1 - low}; }

// To some units in the last place, also near 0, where soft caps have most scores and 1 - 2 / (1 + exp 2x) few digits.
inline float tanh_of(float x) {
  float z = x * x, far = 1.0f - 2.0f / (1.0f + exponential(2.0f * x));
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  return std::fabs(x) < 0.625f ? p * z * x + x : far;
}

template <bool BENDS>
inline float bent(float score, const Scoring& how, float* slope) {  // and what its slope is by the product
  if (!BENDS) {
    *slope = how.scale;
    return score * how.scale;
  }
  float t = tanh_of(score * (how.scale / how.softcap));
  *slope = how.scale * (1.0f - t * t);
  return how.softcap * t;
}

// Of one query: the keys that do not count become 0. Returns log(sum of exponentials), the sink's among them.
template <bool BENDS>
inline float soften_as(float* scores, Seen seen, i64 columns, const Scoring& how, const float* sink) {
  float most = -INFINITY, slope;
#pragma omp simd reduction(max : most)
  for (i64 i = seen.first; i < seen.last; ++i) most = scores[i] > most ? scores[i] : most;
  most = bent<BENDS>(most, how, &slope);
  if (sink) most = std::max(most, *sink);
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (i64 i = seen.first; i < seen.last; ++i) {
    float unused, one = exponential(bent<BENDS>(scores[i], how, &unused) - most);
    scores[i] = one;
    sum += one;
  }
  if (sink) sum += exponential(*sink - most);
  std::fill(scores, scores + seen.first, 0.0f);
  std::fill(scores + seen.last, scores + columns, 0.0f);
  float share = 1.0f / sum;
#pragma omp simd
  for (i64 i = seen.first; i < seen.last; ++i) scores[i] *= share;
  return most + std::log(sum);
}

inline float soften(float* scores, Seen seen, i64 columns, const Scoring& how, const float* sink) {
  auto run = how.softcap > 0 ? soften_as<true> : soften_as<false>;
  return run(scores, seen, columns, how, sink);
}

// Again, from its scores and the logarithm; `inner` (slopes of weights) become slopes of scores.
template <bool BENDS>
inline void soften_back_as(float* weights, float* inner, Seen seen, i64 columns, const Scoring& how, float log_sum,
                           float delta) {
#pragma omp simd
  for (i64 i = seen.first; i < seen.last; ++i) {
    float slope;
    weights[i] = exponential(bent<BENDS>(weights[i], how, &slope) - log_sum);
    inner[i] = weights[i] * (inner[i] - delta) * slope;
  }
  for (float* row : {weights, inner}) {
    std::fill(row, row + seen.first, 0.0f);
    std::fill(row + seen.last, row + columns, 0.0f);
  }
}

inline void soften_back(float* weights, float* inner, Seen seen, i64 columns, const Scoring& how, float log_sum,
                        float delta) {
  auto run = how.softcap > 0 ? soften_back_as<true> : soften_back_as<false>;
  run(weights, inner, seen, columns, how, log_sum, delta);
}

// Of one document: its last `queries` tokens ask, all of its `keys` answer. Both end together.
struct Document {
  i64 first_query, queries, first_key, keys;
  i64 before() const { return keys - queries; }
};

// Every document's heads of one group are one thread's work.
template <class Work>
void each_document(const Inputs& a, int threads, Work work) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (i64 task = 0; task < a.documents * a.groups; ++task) {
    const std::int32_t *asking = a.query_edges + task / a.groups, *held = a.key_edges + task / a.groups;
    Document one{asking[0], asking[1] - asking[0], held[0], held[1] - held[0]};
    if (one.queries > 0) work(one, task % a.groups);
  }
}
