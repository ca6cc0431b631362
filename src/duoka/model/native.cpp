// Parts of a training step on CPUs with bf16 arithmetic, in one pass over memory each. native.py compiles this file once
// per machine with a plain compiler (no header of torch), calls it with addresses, and has torch's form beside each
// function: that is the fallback where there is no compiler, and the oracle in tests.
//
// Every number of a result is computed by one thread in one order, so the count of threads changes no bit.

#include <cstdlib>

#include "native.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

// --- RMS norm: out = x * weight / rms(x), rows of `dim` ---

template <class X, class W>
void norm_forward(const X* x, const W* weight, bf16* out, float* inverse, i64 rows, i64 dim, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 row = 0; row < rows; ++row) {
    const X* from = x + row * dim;
    bf16* to = out + row * dim;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (i64 i = 0; i < dim; ++i) sum += wide(from[i]) * wide(from[i]);
    float factor = 1.0f / std::sqrt(sum / float(dim) + eps);
    inverse[row] = factor;
#pragma omp simd
    for (i64 i = 0; i < dim; ++i) put(to + i, wide(from[i]) * factor * wide(weight[i]));
  }
}

// The gradient of x, added to `more` where that is given; that of the weight in `parts` sums of rows, which are added
// up in their order. How many parts there are does not depend on the threads.
template <class X, class W>
void norm_backward(const bf16* grad, const X* x, const W* weight, const float* inverse, X* x_grad, float* weight_sums,
                   i64 rows, i64 dim, i64 parts, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 part = 0; part < parts; ++part) {
    float* sums = weight_sums ? weight_sums + part * dim : nullptr;
    if (sums) std::fill(sums, sums + dim, 0.0f);
    for (i64 row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
      const X* from = x + row * dim;
      const bf16* g = grad + row * dim;
      float factor = inverse[row], along = 0;
#pragma omp simd reduction(+ : along)
      for (i64 i = 0; i < dim; ++i) along += wide(g[i]) * wide(weight[i]) * wide(from[i]);
      if (sums) {
#pragma omp simd
        for (i64 i = 0; i < dim; ++i) sums[i] += wide(g[i]) * wide(from[i]) * factor;
      }
      if (x_grad) {
        X* to = x_grad + row * dim;
        float shrink = along * factor * factor * factor / float(dim);
#pragma omp simd
        for (i64 i = 0; i < dim; ++i) put(to + i, wide(g[i]) * wide(weight[i]) * factor - wide(from[i]) * shrink);
      }
    }
  }
}

// --- rotary embedding: (tokens, heads, dim) by tables of (tokens, dim); `sign` -1 turns back ---

template <class T>
void rotate(const bf16* x, const T* cos, const T* sin, bf16* out, i64 tokens, i64 heads, i64 dim, i64 stride, float sign,
            int threads) {
  i64 half = dim / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 token = 0; token < tokens; ++token) {
    const T *c = cos + token * dim, *s = sin + token * dim;
    for (i64 head = 0; head < heads; ++head) {
      const bf16* from = x + token * stride + head * dim;
      bf16* to = out + (token * heads + head) * dim;
#pragma omp simd
      for (i64 i = 0; i < half; ++i) {
        float a = wide(from[i]), b = wide(from[i + half]);
        // Turned back by what stands beside the other half: the tables' halves need not be alike.
        float first = sign > 0 ? wide(s[i]) : -wide(s[i + half]), second = sign > 0 ? wide(s[i + half]) : -wide(s[i]);
        put(to + i, a * wide(c[i]) - b * first);
        put(to + i + half, b * wide(c[i + half]) + a * second);
      }
    }
  }
}

#ifdef __AVX512BF16__

// --- attention: causal, each document for itself ---

struct Tile {  // of fp32 sums, on their way between memory and registers
  float* at;
  i64 stride;
  bool adds;
};

// MR rows by 16 * C columns: sums over `pairs` of A (rows of pairs of bf16) times B (pairs, packed by column).
template <int MR, int C>
inline void multiply(const u32* a, i64 a_stride, const u32* b, i64 b_stride, i64 pairs, Tile out) {
  __m512 sums[MR][C];
  for (int r = 0; r < MR; ++r)
    for (int c = 0; c < C; ++c)
      sums[r][c] = out.adds ? _mm512_loadu_ps(out.at + r * out.stride + 16 * c) : _mm512_setzero_ps();
  for (i64 p = 0; p < pairs; ++p) {
    __m512bh columns[C];
    for (int c = 0; c < C; ++c) columns[c] = (__m512bh)_mm512_loadu_si512(b + p * b_stride + 16 * c);
    for (int r = 0; r < MR; ++r) {
      __m512bh both = (__m512bh)_mm512_set1_epi32(int(a[r * a_stride + p]));
      for (int c = 0; c < C; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], both, columns[c]);
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int c = 0; c < C; ++c) _mm512_storeu_ps(out.at + r * out.stride + 16 * c, sums[r][c]);
}

template <int C>
inline void multiply_rows(i64 rows, const u32* a, i64 a_stride, const u32* b, i64 b_stride, i64 pairs, Tile out) {
  for (; rows >= 6; rows -= 6, a += 6 * a_stride, out.at += 6 * out.stride)
    multiply<6, C>(a, a_stride, b, b_stride, pairs, out);
  if (rows >= 4) {
    multiply<4, C>(a, a_stride, b, b_stride, pairs, out);
    rows -= 4, a += 4 * a_stride, out.at += 4 * out.stride;
  }
  if (rows >= 2) {
    multiply<2, C>(a, a_stride, b, b_stride, pairs, out);
    rows -= 2, a += 2 * a_stride, out.at += 2 * out.stride;
  }
  if (rows) multiply<1, C>(a, a_stride, b, b_stride, pairs, out);
}

// rows x columns (a multiple of 16).
void product(i64 rows, i64 columns, i64 pairs, const u32* a, i64 a_stride, const u32* b, i64 b_stride, Tile out) {
  i64 at = 0;
  for (; at + 64 <= columns; at += 64)
    multiply_rows<4>(rows, a, a_stride, b + at, b_stride, pairs, {out.at + at, out.stride, out.adds});
  if (at + 32 <= columns) {
    multiply_rows<2>(rows, a, a_stride, b + at, b_stride, pairs, {out.at + at, out.stride, out.adds});
    at += 32;
  }
  if (at < columns) multiply_rows<1>(rows, a, a_stride, b + at, b_stride, pairs, {out.at + at, out.stride, out.adds});
}

inline u32 pair(bf16 first, bf16 second) { return u32(first) | u32(second) << 16; }

// Two rows of fp32 as pairs of bf16, column by column.
inline void pack_two(const float* first, const float* second, u32* out, i64 count) {
#pragma omp simd
  for (i64 i = 0; i < count; ++i) out[i] = (rounded(first[i]) >> 16) | (rounded(second[i]) & 0xffff0000u);
}

inline void narrow_row(const float* from, bf16* to, i64 count) {
#pragma omp simd
  for (i64 i = 0; i < count; ++i) to[i] = narrow(from[i]);
}

// Of a (rows, dim) matrix whose rows lie `stride` apart: pairs along dim, column = row (for products that sum over dim).
void pack_across(const bf16* x, i64 rows, i64 dim, i64 stride, u32* out, i64 out_stride) {
  for (i64 row = 0; row < rows; ++row)
    for (i64 p = 0; p < dim / 2; ++p) {
      u32 both;
      std::memcpy(&both, x + row * stride + 2 * p, 4);
      out[p * out_stride + row] = both;
    }
  for (i64 p = 0; p < dim / 2; ++p) std::fill(out + p * out_stride + rows, out + (p + 1) * out_stride, 0u);
}

// Pairs of rows, column = dim (for products that sum over rows). `rows_up`: an even count, zeros behind the rows.
void pack_down(const bf16* x, i64 rows, i64 rows_up, i64 dim, i64 stride, u32* out) {
  for (i64 p = 0; p < rows_up / 2; ++p)
    for (i64 i = 0; i < dim; ++i)
      out[p * dim + i] = pair(2 * p < rows ? x[2 * p * stride + i] : 0, 2 * p + 1 < rows ? x[(2 * p + 1) * stride + i] : 0);
}

// (dim) rows of pairs of the matrix's rows: its transpose as the left side of a product.
void transpose_pairs(const bf16* x, i64 rows, i64 rows_up, i64 dim, i64 stride, u32* out) {
  for (i64 i = 0; i < dim; ++i)
    for (i64 p = 0; p < rows_up / 2; ++p)
      out[i * (rows_up / 2) + p] =
          pair(2 * p < rows ? x[2 * p * stride + i] : 0, 2 * p + 1 < rows ? x[(2 * p + 1) * stride + i] : 0);
}

constexpr i64 QUERIES = 48;  // at once: a multiple of the tile's rows
inline i64 up(i64 x, i64 to) { return (x + to - 1) / to * to; }

struct Attention {
  const bf16 *query, *key, *value;  // (tokens, heads or groups, dim), tokens `*_stride` apart
  i64 query_stride, key_stride, value_stride;
  i64 heads, groups, dim, tokens;
  float scale;
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

void attend_forward(const Attention& a, i64 start, i64 count, i64 group, bf16* out, float* sums) {
  i64 dim = a.dim, many = a.heads / a.groups, keys_up = up(count, 64);
  std::vector<u32> keys(dim / 2 * keys_up), values(keys_up / 2 * dim);
  pack_across(a.key + start * a.key_stride + group * dim, count, dim, a.key_stride, keys.data(), keys_up);
  pack_down(a.value + start * a.value_stride + group * dim, count, keys_up, dim, a.value_stride, values.data());
  std::vector<float> scores(QUERIES * keys_up), answers(QUERIES * dim);
  std::vector<bf16> weights(QUERIES * keys_up);
  for (i64 head = group * many; head < (group + 1) * many; ++head)
    for (i64 first = 0; first < count; first += QUERIES) {
      i64 rows = std::min(QUERIES, count - first), columns = up(first + rows, 64);
      const bf16* query = a.query + (start + first) * a.query_stride + head * dim;
      product(rows, columns, dim / 2, (const u32*)query, a.query_stride / 2, keys.data(), keys_up,
              {scores.data(), keys_up, false});
      for (i64 row = 0; row < rows; ++row) {
        float* one = scores.data() + row * keys_up;
        sums[head * a.tokens + start + first + row] = soften(one, first + row + 1, columns, a.scale);
        narrow_row(one, weights.data() + row * keys_up, columns);
      }
      product(rows, dim, columns / 2, (const u32*)weights.data(), keys_up / 2, values.data(), dim,
              {answers.data(), dim, false});
      for (i64 row = 0; row < rows; ++row)
        narrow_row(answers.data() + row * dim, out + ((start + first + row) * a.heads + head) * dim, dim);
    }
}

struct Slopes {  // of queries, keys and values: (tokens, heads or groups, dim), without gaps
  bf16 *query, *key, *value;
};

void attend_backward(const Attention& a, i64 start, i64 count, i64 group, const bf16* out, const bf16* grad,
                     const float* sums, Slopes slopes) {
  i64 dim = a.dim, many = a.heads / a.groups, keys_up = up(count, 64), out_stride = a.heads * dim;
  std::vector<u32> keys(dim / 2 * keys_up), values(dim / 2 * keys_up), keys_down(keys_up / 2 * dim);
  const bf16 *key = a.key + start * a.key_stride + group * dim, *value = a.value + start * a.value_stride + group * dim;
  pack_across(key, count, dim, a.key_stride, keys.data(), keys_up);
  pack_across(value, count, dim, a.value_stride, values.data(), keys_up);
  pack_down(key, count, keys_up, dim, a.key_stride, keys_down.data());
  std::vector<float> weights(QUERIES * keys_up), inner(QUERIES * keys_up), answers(QUERIES * dim);
  std::vector<bf16> slope_rows(QUERIES * keys_up);
  std::vector<u32> pairs(QUERIES / 2 * keys_up), slope_pairs(QUERIES / 2 * keys_up), turned(dim * QUERIES / 2);
  std::vector<float> key_sums(dim * keys_up, 0.0f), value_sums(dim * keys_up, 0.0f);  // (dim, keys)
  for (i64 head = group * many; head < (group + 1) * many; ++head)
    for (i64 first = 0; first < count; first += QUERIES) {
      i64 rows = std::min(QUERIES, count - first), columns = up(first + rows, 64), rows_up = up(rows, 2);
      const bf16* query = a.query + (start + first) * a.query_stride + head * dim;
      i64 place = (start + first) * out_stride + head * dim;
      product(rows, columns, dim / 2, (const u32*)query, a.query_stride / 2, keys.data(), keys_up,
              {weights.data(), keys_up, false});
      product(rows, columns, dim / 2, (const u32*)(grad + place), out_stride / 2, values.data(), keys_up,
              {inner.data(), keys_up, false});
      if (rows_up > rows) {
        std::fill(weights.data() + rows * keys_up, weights.data() + rows_up * keys_up, 0.0f);
        std::fill(inner.data() + rows * keys_up, inner.data() + rows_up * keys_up, 0.0f);
      }
      for (i64 row = 0; row < rows; ++row) {
        float *w = weights.data() + row * keys_up, *d = inner.data() + row * keys_up;
        const bf16 *o = out + place + row * out_stride, *g = grad + place + row * out_stride;
        float log_sum = sums[head * a.tokens + start + first + row], delta = 0;
#pragma omp simd reduction(+ : delta)
        for (i64 i = 0; i < dim; ++i) delta += wide(o[i]) * wide(g[i]);
        i64 last = first + row + 1;
#pragma omp simd
        for (i64 i = 0; i < last; ++i) {
          w[i] = exponential(w[i] * a.scale - log_sum);
          d[i] = w[i] * (d[i] - delta) * a.scale;
        }
        std::fill(w + last, w + columns, 0.0f);
        std::fill(d + last, d + columns, 0.0f);
        narrow_row(d, slope_rows.data() + row * keys_up, columns);
      }
      for (i64 p = 0; p < rows_up / 2; ++p) {
        pack_two(weights.data() + 2 * p * keys_up, weights.data() + (2 * p + 1) * keys_up, pairs.data() + p * keys_up, columns);
        pack_two(inner.data() + 2 * p * keys_up, inner.data() + (2 * p + 1) * keys_up, slope_pairs.data() + p * keys_up, columns);
      }
      product(rows, dim, columns / 2, (const u32*)slope_rows.data(), keys_up / 2, keys_down.data(), dim,
              {answers.data(), dim, false});
      for (i64 row = 0; row < rows; ++row)
        narrow_row(answers.data() + row * dim, slopes.query + place + row * out_stride, dim);
      transpose_pairs(grad + place, rows, rows_up, dim, out_stride, turned.data());
      product(dim, columns, rows_up / 2, turned.data(), rows_up / 2, pairs.data(), keys_up, {value_sums.data(), keys_up, true});
      transpose_pairs(query, rows, rows_up, dim, a.query_stride, turned.data());
      product(dim, columns, rows_up / 2, turned.data(), rows_up / 2, slope_pairs.data(), keys_up, {key_sums.data(), keys_up, true});
    }
  for (i64 row = 0; row < count; ++row) {
    i64 place = ((start + row) * a.groups + group) * dim;
    for (i64 i = 0; i < dim; ++i) {
      slopes.key[place + i] = narrow(key_sums[i * keys_up + row]);
      slopes.value[place + i] = narrow(value_sums[i * keys_up + row]);
    }
  }
}

#endif

}  // namespace

extern "C" {

int duoka_native_version() { return 1; }

int duoka_has_attention() {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}

// x_wide, weight_wide: fp32, else bf16.
void duoka_norm_forward(const void* x, const void* weight, void* out, float* inverse, i64 rows, i64 dim, float eps,
                        int x_wide, int weight_wide, int threads) {
  bf16* to = (bf16*)out;
  if (x_wide && weight_wide) norm_forward((const float*)x, (const float*)weight, to, inverse, rows, dim, eps, threads);
  else if (x_wide) norm_forward((const float*)x, (const bf16*)weight, to, inverse, rows, dim, eps, threads);
  else if (weight_wide) norm_forward((const bf16*)x, (const float*)weight, to, inverse, rows, dim, eps, threads);
  else norm_forward((const bf16*)x, (const bf16*)weight, to, inverse, rows, dim, eps, threads);
}

void duoka_norm_backward(const void* grad, const void* x, const void* weight, const float* inverse, void* x_grad,
                         float* weight_sums, i64 rows, i64 dim, i64 parts, int x_wide, int weight_wide, int threads) {
  const bf16* g = (const bf16*)grad;
  if (x_wide && weight_wide)
    norm_backward(g, (const float*)x, (const float*)weight, inverse, (float*)x_grad, weight_sums, rows, dim, parts, threads);
  else if (x_wide)
    norm_backward(g, (const float*)x, (const bf16*)weight, inverse, (float*)x_grad, weight_sums, rows, dim, parts, threads);
  else if (weight_wide)
    norm_backward(g, (const bf16*)x, (const float*)weight, inverse, (bf16*)x_grad, weight_sums, rows, dim, parts, threads);
  else
    norm_backward(g, (const bf16*)x, (const bf16*)weight, inverse, (bf16*)x_grad, weight_sums, rows, dim, parts, threads);
}

// out = silu(gate) * up
void duoka_silu_forward(const bf16* gate, const bf16* up, bf16* out, i64 count, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (i64 i = 0; i < count; ++i) {
    float x = wide(gate[i]);
    out[i] = narrow(wide(narrow(x * sigmoid(x))) * wide(up[i]));
  }
}

// The gradients of gate and up, and silu(gate) * up again where `out` is given. Each may lie where `grad` does.
void duoka_silu_backward(const bf16* grad, const bf16* gate, const bf16* up, bf16* gate_grad, bf16* up_grad, bf16* out,
                         i64 count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 block = 0; block < (count + 4095) / 4096; ++block) {
    i64 end = std::min(count, (block + 1) * 4096);
#pragma omp simd
    for (i64 i = block * 4096; i < end; ++i) {
      float x = wide(gate[i]), u = wide(up[i]), g = wide(grad[i]), s = sigmoid(x);
      float silu = wide(narrow(x * s));
      gate_grad[i] = narrow(g * u * s * (1.0f + x * (1.0f - s)));
      up_grad[i] = narrow(g * silu);
      if (out) out[i] = narrow(silu * u);
    }
  }
}

void duoka_rotate(const bf16* x, const void* cos, const void* sin, bf16* out, i64 tokens, i64 heads, i64 dim, i64 stride,
                  float sign, int wide_tables, int threads) {
  if (wide_tables) rotate(x, (const float*)cos, (const float*)sin, out, tokens, heads, dim, stride, sign, threads);
  else rotate(x, (const bf16*)cos, (const bf16*)sin, out, tokens, heads, dim, stride, sign, threads);
}

// Logits become softmax - (1 at the target); returns each row's -log p of its target.
void duoka_cross_entropy(bf16* logits, const i64* targets, double* losses, i64 rows, i64 words, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 row = 0; row < rows; ++row) {
    bf16* at = logits + row * words;
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (i64 i = 0; i < words; ++i) most = wide(at[i]) > most ? wide(at[i]) : most;
    float picked = wide(at[targets[row]]);
    double total = 0;
    for (i64 first = 0; first < words; first += 1024) {  // a float's digits do for so many
      i64 end = std::min(words, first + 1024);
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (i64 i = first; i < end; ++i) sum += exponential(wide(at[i]) - most);
      total += sum;
    }
    losses[row] = double(most) - double(picked) + std::log(total);
    float share = float(1.0 / total);
#pragma omp simd
    for (i64 i = 0; i < words; ++i) put(at + i, exponential(wide(at[i]) - most) * share);
    put(at + targets[row], float(std::exp(double(picked) - double(most)) / total - 1.0));
  }
}

// sums += part, where sums are fp32 and part is bf16.
void duoka_add(float* sums, const bf16* part, i64 count, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (i64 i = 0; i < count; ++i) sums[i] += wide(part[i]);
}

// Counted dropout (model/dropout.py has the hash): units of (tokens, units) become 0 in `out`, which may be x itself.
void duoka_drop(const void* x, void* out, const i64* keys, i64 place, i64 tokens, i64 units, i64 level, int is_wide,
                int threads) {
  std::int16_t below = std::int16_t(level - 32768);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 token = 0; token < tokens; ++token) {
    u64 base = u64(keys[token]) + u64(place);
    const bf16* from = (const bf16*)x + token * units;
    bf16* to = (bf16*)out + token * units;
    const float* wide_from = (const float*)x + token * units;
    float* wide_to = (float*)out + token * units;
    std::int16_t bits[256];
    for (i64 first = 0; first < units; first += 256) {
      i64 count = std::min<i64>(256, units - first);
#pragma omp simd
      for (i64 n = 0; n < 64; ++n) {
        u64 hash = base + u64(first / 4 + n) * 0x9E3779B97F4A7C15ull;
        hash = (hash ^ u64(i64(hash) >> 32)) * 0xBF58476D1CE4E5B9ull;
        hash = (hash ^ u64(i64(hash) >> 29)) * 0x94D049BB133111EBull;
        std::memcpy(bits + 4 * n, &hash, 8);
      }
      if (is_wide) {
#pragma omp simd
        for (i64 i = 0; i < count; ++i) wide_to[first + i] = bits[i] < below ? 0.0f : wide_from[first + i];
      } else {
#pragma omp simd
        for (i64 i = 0; i < count; ++i) to[first + i] = bits[i] < below ? bf16(0) : from[first + i];
      }
    }
  }
}

#ifdef __AVX512BF16__
// Documents: `edges` has where each begins, and the end. Query and the others: (tokens, heads, dim) of bf16.
// out: (tokens, heads, dim); sums: (heads, tokens), what the backward pass needs.
void duoka_attention_forward(const bf16* query, const bf16* key, const bf16* value, i64 query_stride, i64 key_stride,
                             i64 value_stride, const std::int32_t* edges, i64 documents, i64 heads, i64 groups, i64 dim,
                             i64 tokens, float scale, bf16* out, float* sums, int threads) {
  Attention a{query, key, value, query_stride, key_stride, value_stride, heads, groups, dim, tokens, scale};
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (i64 task = 0; task < documents * groups; ++task) {
    i64 start = edges[task / groups], count = edges[task / groups + 1] - start;
    if (count > 0) attend_forward(a, start, count, task % groups, out, sums);
  }
}

void duoka_attention_backward(const bf16* query, const bf16* key, const bf16* value, i64 query_stride, i64 key_stride,
                              i64 value_stride, const std::int32_t* edges, i64 documents, i64 heads, i64 groups, i64 dim,
                              i64 tokens, float scale, const bf16* out, const bf16* grad, const float* sums,
                              bf16* query_grad, bf16* key_grad, bf16* value_grad, int threads) {
  Attention a{query, key, value, query_stride, key_stride, value_stride, heads, groups, dim, tokens, scale};
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (i64 task = 0; task < documents * groups; ++task) {
    i64 start = edges[task / groups], count = edges[task / groups + 1] - start;
    if (count > 0)
      attend_backward(a, start, count, task % groups, out, grad, sums, {query_grad, key_grad, value_grad});
  }
}
#endif
}
