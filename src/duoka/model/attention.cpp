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

// What becomes of products, as logarithms to base 2.
struct Bend {
  __m512 times, inner, cap;
  explicit Bend(const Scoring& how)
      : times(_mm512_set1_ps(how.scale * LOG2_E)),
        inner(_mm512_set1_ps(2 * LOG2_E * how.scale / how.softcap)),
        cap(_mm512_set1_ps(how.softcap * LOG2_E)) {}

  __m512 tanh(__m512 x) const {
    __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
    return _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(one, power(_mm512_mul_ps(x, inner)))));
  }
};

inline __mmask16 between(Seen seen, i64 i) {  // lanes from `i` on that count
  __mmask16 ends = seen.last > i ? first_of(seen.last - i) : 0;
  return seen.first > i ? ends & ~first_of(seen.first - i) : ends;
}

// Of one query: the keys up to `columns` that do not count become 0. Weights are parts of the largest, and `share` is
// what their sums are to be multiplied by. Returns the logarithm to base 2 of the sum of exponentials, the sink's too.
template <bool BENDS>
inline float soften_as(const float* scores, bf16* weights, Seen seen, i64 columns, const Scoring& how, const float* sink,
                       float* share) {
  const Bend bend(how);
  const i64 begin = seen.first / 16 * 16;
  auto logarithm = [&](i64 i, __m512 less) {
    __m512 x = _mm512_loadu_ps(scores + i);
    return BENDS ? _mm512_fmsub_ps(bend.tanh(x), bend.cap, less) : _mm512_fmsub_ps(x, bend.times, less);
  };
  __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
  for (i64 i = begin; i < seen.last; i += 16)
    most = _mm512_mask_max_ps(most, between(seen, i), most, _mm512_loadu_ps(scores + i));
  float top = _mm512_reduce_max_ps(most);
  top = BENDS ? how.softcap * LOG2_E * std::tanh(top * how.scale / how.softcap) : top * how.scale * LOG2_E;
  if (sink) top = std::max(top, *sink * LOG2_E);
  __m512 less = _mm512_set1_ps(top);
  for (i64 i = 0; i < begin; i += 16) _mm256_storeu_si256((__m256i*)(weights + i), _mm256_setzero_si256());
  for (i64 i = begin; i < seen.last; i += 16) {
    __m512 one = _mm512_maskz_mov_ps(between(seen, i), power(logarithm(i, less)));
    sum = _mm512_add_ps(sum, one);
    _mm256_storeu_si256((__m256i*)(weights + i), (__m256i)_mm512_cvtneps_pbh(one));
  }
  for (i64 i = up(seen.last, 16); i < columns; i += 16)
    _mm256_storeu_si256((__m256i*)(weights + i), _mm256_setzero_si256());
  float total = _mm512_reduce_add_ps(sum);
  if (sink) total += std::exp2(*sink * LOG2_E - top);
  *share = 1.0f / total;
  return top + std::log2(total);
}

struct Row {  // of one query, in the backward pass: `inner` are its weights' slopes
  const float *scores, *inner;
  Seen seen;
  float log_sum, delta;
  bf16* slopes;  // of its scores
};

// Weights again, and their scores' slopes, of a query and of the next one (if `two`), as pairs by key and as rows.
template <bool BENDS>
inline void soften_back_as(Row one, Row other, bool two, i64 columns, const Scoring& how, u32* pairs, u32* slope_pairs) {
  const Bend bend(how);
  const __m512i mixed = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512 plain = _mm512_set1_ps(how.scale);
  auto weigh = [&](const Row& row, i64 i, __m512* slope) {
    __mmask16 mask = between(row.seen, i);
    __m512 x = _mm512_loadu_ps(row.scores + i), less = _mm512_set1_ps(row.log_sum), steep = plain, log;
    if (BENDS) {
      __m512 t = bend.tanh(x);
      log = _mm512_fmsub_ps(t, bend.cap, less);
      steep = _mm512_fnmadd_ps(_mm512_mul_ps(t, t), plain, plain);
    } else {
      log = _mm512_fmsub_ps(x, bend.times, less);
    }
    __m512 weight = _mm512_maskz_mov_ps(mask, power(log));
    __m512 inner = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(row.inner + i), _mm512_set1_ps(row.delta)), steep);
    *slope = _mm512_maskz_mul_ps(mask, weight, inner);
    return weight;
  };
  for (i64 i = 0; i < columns; i += 16) {
    __m512 first = _mm512_setzero_ps(), second = first, first_slope = first, second_slope = first;
    if (between(one.seen, i)) first = weigh(one, i, &first_slope);
    if (two && between(other.seen, i)) second = weigh(other, i, &second_slope);
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    __m512i slopes = (__m512i)_mm512_cvtne2ps_pbh(second_slope, first_slope);
    _mm512_storeu_si512(pairs + i, _mm512_permutexvar_epi16(mixed, both));
    _mm512_storeu_si512(slope_pairs + i, _mm512_permutexvar_epi16(mixed, slopes));
    _mm256_storeu_si256((__m256i*)(one.slopes + i), _mm512_castsi512_si256(slopes));
    if (two) _mm256_storeu_si256((__m256i*)(other.slopes + i), _mm512_extracti64x4_epi64(slopes, 1));
  }
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
constexpr i64 KEYS = 32;     // scores of some queries begin and end at a multiple of so many

inline i64 lowest_keys(const Scoring& how, i64 place) { return how.lowest(place) / KEYS * KEYS; }

void attend_forward(const Attention<bf16>& a, Document here, i64 group, bf16* out, float* sums) {
  [[maybe_unused]] TilesOn tiles;
  const Steps steps;
  i64 dim = a.dim, value_dim = a.value_dim, many = a.heads / a.groups, count = here.keys, keys_up = up(count, KEYS);
  i64 start = here.first_key, asking = here.first_query, before = here.before();
  std::vector<u32> keys(dim / 2 * keys_up), values(keys_up / 2 * value_dim);
  pack_across(a.key + start * a.key_stride + group * dim, count, dim, a.key_stride, keys.data(), keys_up);
  pack_down(a.value + start * a.value_stride + group * value_dim, count, keys_up, value_dim, a.value_stride,
            values.data());
  std::vector<float> scores(steps.rows * keys_up), answers(steps.rows * value_dim), shares(steps.rows);
  std::vector<bf16> weights(steps.rows * keys_up);
  auto soften = a.how.softcap > 0 ? soften_as<true> : soften_as<false>;
  for (i64 head = group * many; head < (group + 1) * many; ++head)
    for (i64 first = 0; first < here.queries; first += steps.rows) {
      i64 rows = std::min(steps.rows, here.queries - first), place = before + first, low = lowest_keys(a.how, place);
      i64 seen = place + rows - low, columns = up(seen, KEYS);
      const bf16* query = a.query + (asking + first) * a.query_stride + head * dim;
      product(rows, columns, dim / 2, (const u32*)query, a.query_stride / 2, keys.data() + low, keys_up,
              {scores.data(), keys_up, false});
      for (i64 row = 0; row < rows; ++row)
        sums[head * a.tokens + asking + first + row] =
            soften(scores.data() + row * keys_up, weights.data() + row * keys_up, seen_from(a.how, place + row, low),
                   columns, a.how, a.sink(head), &shares[row]);
      product(rows, value_dim, up(seen, steps.keys) / 2, (const u32*)weights.data(), keys_up / 2,
              values.data() + low / 2 * value_dim, value_dim, {answers.data(), value_dim, false});
      for (i64 row = 0; row < rows; ++row)
        narrow_row(answers.data() + row * value_dim, shares[row],
                   out + ((asking + first + row) * a.heads + head) * value_dim, value_dim);
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
  i64 dim = a.dim, value_dim = a.value_dim, keys_up = up(here.keys, KEYS), out_stride = a.heads * value_dim;
  i64 widest = std::max(dim, value_dim);
  std::vector<u32> keys = std::vector<u32>(dim / 2 * keys_up), keys_down = keys;
  std::vector<u32> values = std::vector<u32>(value_dim / 2 * keys_up);
  std::vector<float> scores = std::vector<float>(steps.rows * keys_up), inner = scores;
  std::vector<float> answers = std::vector<float>(steps.rows * dim);
  std::vector<bf16> slope_rows = std::vector<bf16>(steps.rows * keys_up);
  std::vector<u32> weight_pairs = std::vector<u32>(QUERIES / 2 * keys_up), slope_pairs = weight_pairs;  // (queries, keys)
  std::vector<u32> down = std::vector<u32>(QUERIES / 2 * widest), turned = down;
  std::vector<float> key_sums = std::vector<float>(dim * keys_up);  // (dim, keys)
  std::vector<float> value_sums = std::vector<float>(value_dim * keys_up);

  void run() {
    const bf16* key = a.key + here.first_key * a.key_stride + group * dim;
    pack_across(key, here.keys, dim, a.key_stride, keys.data(), keys_up);
    const bf16* value = a.value + here.first_key * a.value_stride + group * value_dim;
    pack_across(value, here.keys, value_dim, a.value_stride, values.data(), keys_up);
    pack_down(key, here.keys, keys_up, dim, a.key_stride, keys_down.data());
    i64 many = a.heads / a.groups;
    for (i64 head = group * many; head < (group + 1) * many; ++head)
      for (i64 first = 0; first < here.queries; first += QUERIES) add_block(head, first);
    put_turned(key_sums, dim, slopes.key);
    put_turned(value_sums, value_dim, slopes.value);
  }

  void add_block(i64 head, i64 first) {
    i64 rows = std::min(QUERIES, here.queries - first), rows_up = up(rows, steps.keys), before = here.before() + first;
    const Seen block{lowest_keys(a.how, before), up(before + rows, KEYS)};
    for (i64 at = 0; at < rows; at += steps.rows) weigh(head, first + at, std::min(steps.rows, rows - at), block, at / 2);
    for (i64 pair = up(rows, 2) / 2; pair < rows_up / 2; ++pair) clear(pair, block.first, block.last);
    i64 token = here.first_query + first;
    add_products({grad + token * out_stride + head * value_dim, value_dim, out_stride}, rows, before, weight_pairs,
                 value_sums);
    add_products({a.query + token * a.query_stride + head * dim, dim, a.query_stride}, rows, before, slope_pairs, key_sums);
  }

  void clear(i64 pair, i64 from, i64 to) {
    for (auto* pairs : {&weight_pairs, &slope_pairs})
      std::fill(pairs->begin() + pair * keys_up + from, pairs->begin() + pair * keys_up + to, 0u);
  }

  // Weights and slopes of some queries, into pairs from `pair` on, which span the block's keys; and these queries' own
  // gradients.
  void weigh(i64 head, i64 first, i64 rows, Seen block, i64 pair) {
    i64 token = here.first_query + first, from = token * out_stride + head * value_dim, log = head * a.tokens + token;
    i64 place = here.before() + first, low = lowest_keys(a.how, place), seen = place + rows - low, columns = up(seen, KEYS);
    const bf16 *o = out + from, *g = grad + from, *query = a.query + token * a.query_stride + head * dim;
    product(rows, columns, dim / 2, (const u32*)query, a.query_stride / 2, keys.data() + low, keys_up,
            {scores.data(), keys_up, false});
    product(rows, columns, value_dim / 2, (const u32*)g, out_stride / 2, values.data() + low, keys_up,
            {inner.data(), keys_up, false});
    auto row = [&](i64 at) -> Row {
      float delta = dot(o + at * out_stride, g + at * out_stride, value_dim);
      if (a.how.sinks) slopes.sinks[log + at] = -delta * std::exp2(*a.sink(head) * LOG2_E - logs[log + at]);
      return {scores.data() + at * keys_up, inner.data() + at * keys_up, seen_from(a.how, place + at, low), logs[log + at],
              delta, slope_rows.data() + at * keys_up};
    };
    auto soften_back = a.how.softcap > 0 ? soften_back_as<true> : soften_back_as<false>;
    for (i64 at = 0; at < rows; at += 2, ++pair) {
      bool two = at + 1 < rows;
      clear(pair, block.first, low);
      soften_back(row(at), two ? row(at + 1) : Row{}, two, columns, a.how, weight_pairs.data() + pair * keys_up + low,
                  slope_pairs.data() + pair * keys_up + low);
      clear(pair, low + columns, block.last);
    }
    product(rows, dim, up(seen, steps.keys) / 2, (const u32*)slope_rows.data(), keys_up / 2,
            keys_down.data() + low / 2 * dim, dim, {answers.data(), dim, false});
    for (i64 at = 0; at < rows; ++at)
      narrow_row(answers.data() + at * dim, 1.0f, slopes.query + ((token + at) * a.heads + head) * dim, dim);
  }

  struct Rows {  // of a block's queries: `dim` numbers each, `stride` apart
    const bf16* at;
    i64 dim, stride;
  };

  // Sums (dim, keys) += x (a block's queries, dim), turned, times pairs of them; the first sees `before` keys and itself.
  void add_products(Rows x, i64 rows, i64 before, const std::vector<u32>& pairs, std::vector<float>& sums) {
    i64 rows_up = up(rows, steps.keys), columns = up(before + rows, KEYS);
    pack_down(x.at, rows, rows_up, x.dim, x.stride, down.data());
    turn(down.data(), rows_up / 2, x.dim, x.dim, turned.data(), QUERIES / 2);
    for (i64 at = lowest_keys(a.how, before); at < columns; at += 64) {
      // Pairs of queries before the first, and after the last, see no such key.
      i64 width = std::min<i64>(64, columns - at), first = std::max<i64>(0, at - before) / steps.keys * steps.keys / 2;
      i64 last = a.how.window > 0 ? std::min(rows_up, up(at + width - 1 + a.how.window - before, steps.keys)) : rows_up;
      product(x.dim, width, last / 2 - first, turned.data() + first, QUERIES / 2, pairs.data() + first * keys_up + at,
              keys_up, {sums.data() + at, keys_up, true});
    }
  }

  void put_turned(const std::vector<float>& sums, i64 size, bf16* to) {
    std::vector<float> rows(size * keys_up);
    turn((const u32*)sums.data(), size, here.keys, keys_up, (u32*)rows.data(), size);
    for (i64 at = 0; at < here.keys; ++at)
      narrow_row(rows.data() + at * size, 1.0f, to + ((here.first_key + at) * a.groups + group) * size, size);
  }
};

}  // namespace

extern "C" {

// All of bf16. out: (tokens, heads, value_dim); sums: (heads, tokens), what the backward pass needs.
void duoka_attention_forward(const Inputs* inputs, bf16* out, float* sums, int threads) {
  Attention<bf16> a(*inputs);
  each_document(a, threads, [&](Document here, i64 group) { attend_forward(a, here, group, out, sums); });
}

void duoka_attention_backward(const Inputs* inputs, const bf16* out, const bf16* grad, const float* sums,
                              bf16* query_grad, bf16* key_grad, bf16* value_grad, float* sink_grad, int threads) {
  Attention<bf16> a(*inputs);
  each_document(a, threads, [&](Document here, i64 group) {
    [[maybe_unused]] TilesOn tiles;
    Backward{a, here, group, out, grad, sums, {query_grad, key_grad, value_grad, sink_grad}}.run();
  });
}

}
#endif
