// Attention on any CPU, multiplied in fp32 by vectors as long as the processor has: causal, each document for itself, of
// fp32 and of bf16. native.py compiles it beside native.cpp, and calls it with addresses.
//
// Every number of a result is computed by one thread in one order, so the count of threads changes no bit.

#include "attention.h"

namespace {

constexpr i64 WIDTH = 2, PANEL = LANES * WIDTH;  // columns of a tile: with six rows, most of 16 registers
constexpr i64 QUERIES = 24;                      // at once: whole tiles, and few scores beyond the diagonal

struct Left {  // of a product: number (row, p) lies at row * row_step + p * sum_step
  const float* at;
  i64 row_step, sum_step;
};
struct Right {  // number (p, column) lies at p * sum_step + column, of the first panel; others `panel_step` behind
  const float* at;
  i64 sum_step, panel_step;
};
struct Sums {
  float* at;
  i64 row_step;
  bool adds;
};

// R rows by C vectors of columns.
template <int R, int C>
inline void multiply(i64 count, Left a, Right b, Sums out) {
  Vector sums[R][C] = {};
  for (i64 p = 0; p < count; ++p, a.at += a.sum_step, b.at += b.sum_step) {
    Vector columns[C];
    for (int c = 0; c < C; ++c) columns[c] = load(b.at + LANES * c);
    for (int r = 0; r < R; ++r) {
      float one = a.at[r * a.row_step];
      for (int c = 0; c < C; ++c) sums[r][c] += one * columns[c];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      float* at = out.at + r * out.row_step + LANES * c;
      store(at, out.adds ? load(at) + sums[r][c] : sums[r][c]);
    }
}

template <int C>
inline void multiply_rows(i64 rows, i64 count, Left a, Right b, Sums out) {
  for (; rows >= 6; rows -= 6, a.at += 6 * a.row_step, out.at += 6 * out.row_step) multiply<6, C>(count, a, b, out);
  if (rows >= 4) {
    multiply<4, C>(count, a, b, out);
    rows -= 4, a.at += 4 * a.row_step, out.at += 4 * out.row_step;
  }
  if (rows >= 2) {
    multiply<2, C>(count, a, b, out);
    rows -= 2, a.at += 2 * a.row_step, out.at += 2 * out.row_step;
  }
  if (rows) multiply<1, C>(count, a, b, out);
}

// rows x columns (a multiple of LANES), each a sum over `count`.
void product(i64 rows, i64 columns, i64 count, Left a, Right b, Sums out) {
  for (; columns >= PANEL; columns -= PANEL, b.at += b.panel_step, out.at += PANEL)
    multiply_rows<WIDTH>(rows, count, a, b, out);
  if (columns > 0) multiply_rows<1>(rows, count, a, b, out);
}

template <class T>
void widen_rows(const T* from, i64 rows, i64 dim, i64 stride, float* to) {
  for (i64 row = 0; row < rows; ++row, from += stride, to += dim) {
#pragma omp simd
    for (i64 i = 0; i < dim; ++i) to[i] = wide(from[i]);
  }
}

template <class T>
void put_rows(const float* from, i64 rows, i64 dim, i64 stride, T* to) {
  for (i64 row = 0; row < rows; ++row, from += dim, to += stride) {
#pragma omp simd
    for (i64 i = 0; i < dim; ++i) put(to + i, from[i]);
  }
}

// The transpose of (rows, dim), in panels of PANEL columns; zeros behind the last row.
std::vector<float> turned(const std::vector<float>& x, i64 rows, i64 dim) {
  std::vector<float> out(up(rows, PANEL) * dim, 0.0f);
  for (i64 row = 0; row < rows; ++row) {
    float* to = out.data() + row / PANEL * PANEL * dim + row % PANEL;
    for (i64 i = 0; i < dim; ++i) to[i * PANEL] = x[row * dim + i];
  }
  return out;
}

// Where scores of a block of queries begin: a whole panel of keys.
inline i64 lowest_panel(const Scoring& how, i64 place) { return how.lowest(place) / PANEL * PANEL; }

template <class T>
void attend_forward(const Attention<T>& a, Document here, i64 group, T* out, float* sums) {
  i64 dim = a.dim, value_dim = a.value_dim, many = a.heads / a.groups, count = here.keys, room = up(count, LANES);
  i64 start = here.first_key, asking = here.first_query, before = here.before();
  std::vector<float> keys(count * dim), values(count * value_dim);
  widen_rows(a.key + start * a.key_stride + group * dim, count, dim, a.key_stride, keys.data());
  widen_rows(a.value + start * a.value_stride + group * value_dim, count, value_dim, a.value_stride, values.data());
  std::vector<float> panels = turned(keys, count, dim);
  std::vector<float> queries(QUERIES * dim), scores(QUERIES * room), answers(QUERIES * value_dim);
  for (i64 head = group * many; head < (group + 1) * many; ++head)
    for (i64 first = 0; first < here.queries; first += QUERIES) {
      i64 rows = std::min(QUERIES, here.queries - first), place = before + first, low = lowest_panel(a.how, place);
      i64 seen = place + rows - low, columns = up(seen, LANES);
      Right by_keys{panels.data() + low * dim, PANEL, PANEL * dim};
      Right by_values{values.data() + low * value_dim, value_dim, PANEL};
      widen_rows(a.query + (asking + first) * a.query_stride + head * dim, rows, dim, a.query_stride, queries.data());
      product(rows, columns, dim, {queries.data(), dim, 1}, by_keys, {scores.data(), room, false});
      for (i64 row = 0; row < rows; ++row)
        sums[head * a.tokens + asking + first + row] =
            soften(scores.data() + row * room, seen_from(a.how, place + row, low), columns, a.how, a.sink(head));
      product(rows, value_dim, seen, {scores.data(), room, 1}, by_values, {answers.data(), value_dim, false});
      put_rows(answers.data(), rows, value_dim, a.heads * value_dim,
               out + ((asking + first) * a.heads + head) * value_dim);
    }
}

template <class T>
void attend_backward(const Attention<T>& a, Document here, i64 group, const T* out, const T* grad, const float* sums,
                     Slopes<T> slopes) {
  i64 dim = a.dim, value_dim = a.value_dim, many = a.heads / a.groups, count = here.keys, room = up(count, LANES);
  i64 start = here.first_key, asking = here.first_query, before = here.before(), out_stride = a.heads * value_dim;
  std::vector<float> keys(count * dim), values(count * value_dim), key_sums(count * dim), value_sums(count * value_dim);
  widen_rows(a.key + start * a.key_stride + group * dim, count, dim, a.key_stride, keys.data());
  widen_rows(a.value + start * a.value_stride + group * value_dim, count, value_dim, a.value_stride, values.data());
  std::vector<float> key_panels = turned(keys, count, dim), value_panels = turned(values, count, value_dim);
  std::vector<float> queries(QUERIES * dim), grads(QUERIES * value_dim), answers(QUERIES * std::max(dim, value_dim));
  std::vector<float> weights(QUERIES * room), inner(QUERIES * room);
  for (i64 head = group * many; head < (group + 1) * many; ++head)
    for (i64 first = 0; first < here.queries; first += QUERIES) {
      i64 rows = std::min(QUERIES, here.queries - first), place = before + first, low = lowest_panel(a.how, place);
      i64 seen = place + rows - low, columns = up(seen, LANES), at = (asking + first) * out_stride + head * value_dim;
      Right by_keys{key_panels.data() + low * dim, PANEL, PANEL * dim};
      Right by_values{value_panels.data() + low * value_dim, PANEL, PANEL * value_dim};
      widen_rows(a.query + (asking + first) * a.query_stride + head * dim, rows, dim, a.query_stride, queries.data());
      widen_rows(grad + at, rows, value_dim, out_stride, grads.data());
      widen_rows(out + at, rows, value_dim, out_stride, answers.data());
      product(rows, columns, dim, {queries.data(), dim, 1}, by_keys, {weights.data(), room, false});
      product(rows, columns, value_dim, {grads.data(), value_dim, 1}, by_values, {inner.data(), room, false});
      for (i64 row = 0; row < rows; ++row) {
        float delta = 0;
#pragma omp simd reduction(+ : delta)
        for (i64 i = row * value_dim; i < (row + 1) * value_dim; ++i) delta += answers[i] * grads[i];
        i64 query = head * a.tokens + asking + first + row;
        soften_back(weights.data() + row * room, inner.data() + row * room, seen_from(a.how, place + row, low), columns,
                    a.how, sums[query], delta);
        if (a.how.sinks) slopes.sinks[query] = -delta * exponential(*a.sink(head) - sums[query]);
      }
      product(rows, dim, seen, {inner.data(), room, 1}, {keys.data() + low * dim, dim, PANEL},
              {answers.data(), dim, false});
      put_rows(answers.data(), rows, dim, a.heads * dim, slopes.query + ((asking + first) * a.heads + head) * dim);
      product(seen, value_dim, rows, {weights.data(), 1, room}, {grads.data(), value_dim, PANEL},
              {value_sums.data() + low * value_dim, value_dim, true});
      product(seen, dim, rows, {inner.data(), 1, room}, {queries.data(), dim, PANEL},
              {key_sums.data() + low * dim, dim, true});
    }
  put_rows(key_sums.data(), count, dim, a.groups * dim, slopes.key + (start * a.groups + group) * dim);
  put_rows(value_sums.data(), count, value_dim, a.groups * value_dim,
           slopes.value + (start * a.groups + group) * value_dim);
}

}  // namespace

extern "C" {

// Of fp32 or bf16. out: (tokens, heads, value_dim); sums: (heads, tokens), what the backward pass needs.
void duoka_wide_attention_forward(const Inputs* inputs, void* out, float* sums, int is_wide, int threads) {
  auto run = [&](auto kind) {
    using T = decltype(kind);
    Attention<T> a(*inputs);
    each_document(a, threads, [&](Document here, i64 group) { attend_forward(a, here, group, (T*)out, sums); });
  };
  is_wide ? run(float()) : run(bf16());
}

void duoka_wide_attention_backward(const Inputs* inputs, const void* out, const void* grad, const float* sums,
                                   void* query_grad, void* key_grad, void* value_grad, float* sink_grad, int is_wide,
                                   int threads) {
  auto run = [&](auto kind) {
    using T = decltype(kind);
    Attention<T> a(*inputs);
    Slopes<T> slopes{(T*)query_grad, (T*)key_grad, (T*)value_grad, sink_grad};
    each_document(a, threads, [&](Document here, i64 group) {
      attend_backward(a, here, group, (const T*)out, (const T*)grad, sums, slopes);
    });
  };
  is_wide ? run(float()) : run(bf16());
}

}
