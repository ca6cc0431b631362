// Attention of bf16 on CPUs with bf16 arithmetic (attention_wide.cpp: on others): causal, each document for itself.
// native.py compiles it beside native.cpp, and calls it with addresses.
//
// Every number of a result is computed by one thread in one order, so the count of threads changes no bit.

#include "attention.h"
#include "narrow_products.h"

extern "C" int duoka_has_narrow_attention() {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}

#ifdef __AVX512BF16__
namespace {

constexpr float LOG2_E = 1.44269504f;

// 2 to the power of x, to 2 units in the last place; NaN stays.
inline __m512 power(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
  __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), rest = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(1.535336188e-4f);
  for (float next : {1.339887441e-3f, 9.618437357e-3f, 5.550332472e-2f, 2.402264791e-1f, 6.931472029e-1f, 1.0f})
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(next));
  return _mm512_scalef_ps(p, whole);
}

// Of one query: `last` keys count, the others up to `columns` become 0. Weights are parts of the largest, and `share` is
// what their sums are to be multiplied by. Returns the logarithm to base 2 of the sum of exponentials.
inline float soften(const float* scores, bf16* weights, i64 last, i64 columns, float scale, float* share) {
  __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), times = _mm512_set1_ps(scale * LOG2_E);
  for (i64 i = 0; i < last; i += 16) {
    __mmask16 mask = first_of(last - i);
    most = _mm512_mask_max_ps(most, mask, most, _mm512_loadu_ps(scores + i));
  }
  float top = _mm512_reduce_max_ps(most) * scale * LOG2_E;
  __m512 less = _mm512_set1_ps(top);
  for (i64 i = 0; i < last; i += 16) {
    __m512 one = power(_mm512_fmsub_ps(_mm512_loadu_ps(scores + i), times, less));
    one = _mm512_maskz_mov_ps(first_of(last - i), one);
    sum = _mm512_add_ps(sum, one);
    _mm256_storeu_si256((__m256i*)(weights + i), (__m256i)_mm512_cvtneps_pbh(one));
  }
  for (i64 i = up(last, 16); i < columns; i += 16) _mm256_storeu_si256((__m256i*)(weights + i), _mm256_setzero_si256());
  float total = _mm512_reduce_add_ps(sum);
  *share = 1.0f / total;
  return top + std::log2(total);
}

struct Row {  // of one query, in the backward pass: `inner` are its weights' slopes
  const float *scores, *inner;
  float log_sum, delta;
  bf16* slopes;  // of its scores
};

// Weights again, and their scores' slopes, of a query and of the next one (if `two`), as pairs by key and as rows. `last`
// keys count of the first, one more of the second; pairs are `written` up to where others of their block end.
inline void soften_back(Row one, Row other, bool two, i64 last, i64 columns, i64 written, float scale, u32* pairs,
                        u32* slope_pairs) {
  const __m512i mixed = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512 times = _mm512_set1_ps(scale * LOG2_E), plain = _mm512_set1_ps(scale);
  auto weigh = [&](const Row& row, i64 i, __mmask16 mask, __m512* slope) {
    __m512 log = _mm512_fmsub_ps(_mm512_loadu_ps(row.scores + i), times, _mm512_set1_ps(row.log_sum));
    __m512 weight = _mm512_maskz_mov_ps(mask, power(log));
    __m512 inner = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(row.inner + i), _mm512_set1_ps(row.delta)), plain);
    *slope = _mm512_maskz_mul_ps(mask, weight, inner);
    return weight;
  };
  for (i64 i = 0; i < columns; i += 16) {
    __m512 first = _mm512_setzero_ps(), second = first, first_slope = first, second_slope = first;
    if (i < last) first = weigh(one, i, first_of(last - i), &first_slope);
    if (two && i < last + 1) second = weigh(other, i, first_of(last + 1 - i), &second_slope);
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    __m512i slopes = (__m512i)_mm512_cvtne2ps_pbh(second_slope, first_slope);
    _mm512_storeu_si512(pairs + i, _mm512_permutexvar_epi16(mixed, both));
    _mm512_storeu_si512(slope_pairs + i, _mm512_permutexvar_epi16(mixed, slopes));
    _mm256_storeu_si256((__m256i*)(one.slopes + i), _mm512_castsi512_si256(slopes));
    if (two) _mm256_storeu_si256((__m256i*)(other.slopes + i), _mm512_extracti64x4_epi64(slopes, 1));
  }
  std::fill(pairs + columns, pairs + written, 0u);
  std::fill(slope_pairs + columns, slope_pairs + written, 0u);
}

inline float dot(const bf16* x, const bf16* y, i64 count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (i64 i = 0; i < count; ++i) sum += wide(x[i]) * wide(y[i]);
  return sum;
}

// How many queries a product has at once, and what its sums over keys are a multiple of.
struct Steps {
  i64 rows = 12, keys = 2;
#ifdef TILES
  Steps() {
    if (has_tiles()) rows = keys = 32;
  }
#endif
};

constexpr i64 QUERIES = 96;  // whose weights wait for the products that sum over queries

void attend_forward(const Attention<bf16>& a, Document here, i64 group, bf16* out, float* sums) {
  [[maybe_unused]] TilesOn tiles;
  const Steps steps;
  i64 dim = a.dim, many = a.heads / a.groups, count = here.keys, keys_up = up(count, 32);
  i64 start = here.first_key, asking = here.first_query, before = here.before();
  std::vector<u32> keys(dim / 2 * keys_up), values(keys_up / 2 * dim);
  pack_across(a.key + start * a.key_stride + group * dim, count, dim, a.key_stride, keys.data(), keys_up);
  pack_down(a.value + start * a.value_stride + group * dim, count, keys_up, dim, a.value_stride, values.data());
  std::vector<float> scores(steps.rows * keys_up), answers(steps.rows * dim), shares(steps.rows);
  std::vector<bf16> weights(steps.rows * keys_up);
  for (i64 head = group * many; head < (group + 1) * many; ++head)
    for (i64 first = 0; first < here.queries; first += steps.rows) {
      i64 rows = std::min(steps.rows, here.queries - first), seen = before + first + rows, columns = up(seen, 32);
      const bf16* query = a.query + (asking + first) * a.query_stride + head * dim;
      product(rows, columns, dim / 2, (const u32*)query, a.query_stride / 2, keys.data(), keys_up,
              {scores.data(), keys_up, false});
      for (i64 row = 0; row < rows; ++row)
        sums[head * a.tokens + asking + first + row] = soften(scores.data() + row * keys_up, weights.data() + row * keys_up,
                                                              before + first + row + 1, columns, a.scale, &shares[row]);
      product(rows, dim, up(seen, steps.keys) / 2, (const u32*)weights.data(), keys_up / 2, values.data(), dim,
              {answers.data(), dim, false});
      for (i64 row = 0; row < rows; ++row)
        narrow_row(answers.data() + row * dim, shares[row], out + ((asking + first + row) * a.heads + head) * dim, dim);
    }
}

// The backward pass of one document's heads of one group.
struct Backward {
  const Attention<bf16>& a;
  Document here;
  i64 group;
  const bf16 *out, *grad;
  const float* logs;
  Slopes<bf16> slopes;
  const Steps steps = {};
  i64 dim = a.dim, keys_up = up(here.keys, 32), out_stride = a.heads * dim;
  std::vector<u32> keys = std::vector<u32>(dim / 2 * keys_up), values = keys, keys_down = keys;
  std::vector<float> scores = std::vector<float>(steps.rows * keys_up), inner = scores;
  std::vector<float> answers = std::vector<float>(steps.rows * dim);
  std::vector<bf16> slope_rows = std::vector<bf16>(steps.rows * keys_up);
  std::vector<u32> weight_pairs = std::vector<u32>(QUERIES / 2 * keys_up), slope_pairs = weight_pairs;  // (queries, keys)
  std::vector<u32> down = std::vector<u32>(QUERIES / 2 * dim), turned = down;
  std::vector<float> key_sums = std::vector<float>(dim * keys_up), value_sums = key_sums;  // (dim, keys)

  void run() {
    const bf16* key = a.key + here.first_key * a.key_stride + group * dim;
    pack_across(key, here.keys, dim, a.key_stride, keys.data(), keys_up);
    const bf16* value = a.value + here.first_key * a.value_stride + group * dim;
    pack_across(value, here.keys, dim, a.value_stride, values.data(), keys_up);
    pack_down(key, here.keys, keys_up, dim, a.key_stride, keys_down.data());
    i64 many = a.heads / a.groups;
    for (i64 head = group * many; head < (group + 1) * many; ++head)
      for (i64 first = 0; first < here.queries; first += QUERIES) add_block(head, first);
    put_turned(key_sums, slopes.key);
    put_turned(value_sums, slopes.value);
  }

  void add_block(i64 head, i64 first) {
    i64 rows = std::min(QUERIES, here.queries - first), rows_up = up(rows, steps.keys), before = here.before() + first;
    for (i64 at = 0; at < rows; at += steps.rows)
      weigh(head, first + at, std::min(steps.rows, rows - at), up(before + rows, 32), at / 2 * keys_up);
    for (i64 pair = up(rows, 2) / 2; pair < rows_up / 2; ++pair)
      for (auto* pairs : {&weight_pairs, &slope_pairs})
        std::fill_n(pairs->begin() + pair * keys_up, up(before + rows, 32), 0u);
    i64 token = here.first_query + first;
    add_products(grad + token * out_stride + head * dim, out_stride, rows, before, weight_pairs, value_sums);
    add_products(a.query + token * a.query_stride + head * dim, a.query_stride, rows, before, slope_pairs, key_sums);
  }

  // Weights and slopes of some queries, into the block's pairs behind `pair`, and the queries' own gradients.
  void weigh(i64 head, i64 first, i64 rows, i64 written, i64 pair) {
    i64 token = here.first_query + first, place = token * out_stride + head * dim;
    i64 seen = here.before() + first + rows, columns = up(seen, 32);
    const bf16 *o = out + place, *g = grad + place, *query = a.query + token * a.query_stride + head * dim;
    product(rows, columns, dim / 2, (const u32*)query, a.query_stride / 2, keys.data(), keys_up,
            {scores.data(), keys_up, false});
    product(rows, columns, dim / 2, (const u32*)g, out_stride / 2, values.data(), keys_up, {inner.data(), keys_up, false});
    auto row = [&](i64 at) -> Row {
      return {scores.data() + at * keys_up, inner.data() + at * keys_up, logs[head * a.tokens + token + at],
              dot(o + at * out_stride, g + at * out_stride, dim), slope_rows.data() + at * keys_up};
    };
    for (i64 at = 0; at < rows; at += 2, pair += keys_up) {
      bool two = at + 1 < rows;
      soften_back(row(at), two ? row(at + 1) : Row{}, two, seen - rows + at + 1, columns, written, a.scale,
                  weight_pairs.data() + pair, slope_pairs.data() + pair);
    }
    product(rows, dim, up(seen, steps.keys) / 2, (const u32*)slope_rows.data(), keys_up / 2, keys_down.data(), dim,
            {answers.data(), dim, false});
    for (i64 at = 0; at < rows; ++at)
      narrow_row(answers.data() + at * dim, 1.0f, slopes.query + place + at * out_stride, dim);
  }

  // Sums (dim, keys) += x (a block's queries, dim), turned, times pairs of them; the first sees `before` keys and itself.
  void add_products(const bf16* x, i64 stride, i64 rows, i64 before, const std::vector<u32>& pairs,
                    std::vector<float>& sums) {
    i64 rows_up = up(rows, steps.keys), columns = up(before + rows, 32);
    pack_down(x, rows, rows_up, dim, stride, down.data());
    turn(down.data(), rows_up / 2, dim, dim, turned.data(), QUERIES / 2);
    for (i64 at = 0; at < columns; at += 64) {
      i64 first = std::max<i64>(0, at - before) / steps.keys * steps.keys / 2;  // pairs of queries before it see no such key
      product(dim, std::min<i64>(64, columns - at), rows_up / 2 - first, turned.data() + first, QUERIES / 2,
              pairs.data() + first * keys_up + at, keys_up, {sums.data() + at, keys_up, true});
    }
  }

  void put_turned(const std::vector<float>& sums, bf16* to) {
    std::vector<float> rows(dim * keys_up);
    turn((const u32*)sums.data(), dim, here.keys, keys_up, (u32*)rows.data(), dim);
    for (i64 at = 0; at < here.keys; ++at)
      narrow_row(rows.data() + at * dim, 1.0f, to + ((here.first_key + at) * a.groups + group) * dim, dim);
  }
};

}  // namespace

extern "C" {

// Query and the others: (tokens, heads, dim) of bf16; keys may be of more tokens than queries (attention.h).
// out: (tokens, heads, dim); sums: (heads, tokens), what the backward pass needs.
void duoka_attention_forward(const bf16* query, const bf16* key, const bf16* value, i64 query_stride, i64 key_stride,
                             i64 value_stride, const std::int32_t* query_edges, const std::int32_t* key_edges,
                             i64 documents, i64 heads, i64 groups, i64 dim, i64 tokens, float scale, bf16* out,
                             float* sums, int threads) {
  Attention<bf16> a{query, key, value, query_stride, key_stride, value_stride, heads, groups, dim, tokens, scale};
  each_document(query_edges, key_edges, documents, groups, threads, [&](Document here, i64 group) {
    attend_forward(a, here, group, out, sums);
  });
}

void duoka_attention_backward(const bf16* query, const bf16* key, const bf16* value, i64 query_stride, i64 key_stride,
                              i64 value_stride, const std::int32_t* query_edges, const std::int32_t* key_edges,
                              i64 documents, i64 heads, i64 groups, i64 dim, i64 tokens, float scale, const bf16* out,
                              const bf16* grad, const float* sums, bf16* query_grad, bf16* key_grad, bf16* value_grad,
                              int threads) {
  Attention<bf16> a{query, key, value, query_stride, key_stride, value_stride, heads, groups, dim, tokens, scale};
  each_document(query_edges, key_edges, documents, groups, threads, [&](Document here, i64 group) {
    [[maybe_unused]] TilesOn tiles;
    Backward{a, here, group, out, grad, sums, {query_grad, key_grad, value_grad}}.run();
  });
}

}
#endif
