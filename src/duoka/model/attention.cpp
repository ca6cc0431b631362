// Attention of bf16 on CPUs with bf16 arithmetic (attention_wide.cpp: on others): causal, each document for itself. Products are AMX's where the processor has
// it, AVX-512's elsewhere. native.py compiles it beside native.cpp, and calls it with addresses.
//
// Every number of a result is computed by one thread in one order, so the count of threads changes no bit.

#include "attention.h"

extern "C" int duoka_has_narrow_attention() {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}

#ifdef __AVX512BF16__
#include <immintrin.h>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILES
#endif

namespace {

#ifdef TILES
// Whether the kernel lets this process have AMX's registers.
bool has_tiles() {
  constexpr long ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, ask, tile_data) == 0;
  return granted;
}

// While it lives, this thread's tiles are 16 rows of 64 bytes. Left behind is nothing: other libraries set their own.
struct TilesOn {
  TilesOn() {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    if (has_tiles()) _tile_loadconfig(&shape);
  }
  ~TilesOn() {
    if (has_tiles()) _tile_release();
  }
};
#else
struct TilesOn {};
#endif

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

#ifdef TILES
// The same in AMX's tiles, where rows and columns come in 16s or 32s and pairs in 16s: C tiles of R x K.
template <int R, int K>
inline void multiply_tiles(const u32* a, i64 a_stride, const u32* b, i64 b_stride, i64 pairs, Tile out) {
  i64 a_bytes = 4 * a_stride, b_bytes = 4 * b_stride, out_bytes = 4 * out.stride;
  float* below = out.at + 16 * out.stride;
  if (out.adds) {
    _tile_loadd(0, out.at, out_bytes);
    if (K > 1) _tile_loadd(1, out.at + 16, out_bytes);
    if (R > 1) _tile_loadd(2, below, out_bytes);
    if (R > 1 && K > 1) _tile_loadd(3, below + 16, out_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (i64 p = 0; p < pairs; p += 16) {
    _tile_loadd(6, b + p * b_stride, b_bytes);
    _tile_loadd(4, a + p, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (R > 1) {
      _tile_loadd(5, a + 16 * a_stride + p, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (K > 1) {
      _tile_loadd(7, b + p * b_stride + 16, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
      if (R > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out.at, out_bytes);
  if (K > 1) _tile_stored(1, out.at + 16, out_bytes);
  if (R > 1) _tile_stored(2, below, out_bytes);
  if (R > 1 && K > 1) _tile_stored(3, below + 16, out_bytes);
}

template <int R>
inline void multiply_bands(i64 columns, const u32* a, i64 a_stride, const u32* b, i64 b_stride, i64 pairs, Tile out) {
  i64 at = 0;
  for (; at + 32 <= columns; at += 32)
    multiply_tiles<R, 2>(a, a_stride, b + at, b_stride, pairs, {out.at + at, out.stride, out.adds});
  if (at < columns) multiply_tiles<R, 1>(a, a_stride, b + at, b_stride, pairs, {out.at + at, out.stride, out.adds});
}
#endif

// rows x columns (a multiple of 16).
void product(i64 rows, i64 columns, i64 pairs, const u32* a, i64 a_stride, const u32* b, i64 b_stride, Tile out) {
#ifdef TILES
  if (has_tiles() && pairs % 16 == 0) {  // what is left are rows of no whole tile
    for (; rows >= 32; rows -= 32, a += 32 * a_stride, out.at += 32 * out.stride)
      multiply_bands<2>(columns, a, a_stride, b, b_stride, pairs, out);
    for (; rows >= 16; rows -= 16, a += 16 * a_stride, out.at += 16 * out.stride)
      multiply_bands<1>(columns, a, a_stride, b, b_stride, pairs, out);
  }
#endif
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

#ifdef TILES
constexpr i64 QUERIES = 64;  // at once: pairs of them fill tiles too
#else
constexpr i64 QUERIES = 48;  // at once: a multiple of the tile's rows
#endif

void attend_forward(const Attention<bf16>& a, Document here, i64 group, bf16* out, float* sums) {
  [[maybe_unused]] TilesOn tiles;
  i64 dim = a.dim, many = a.heads / a.groups, count = here.keys, keys_up = up(count, 64);
  i64 start = here.first_key, asking = here.first_query, before = here.before();
  std::vector<u32> keys(dim / 2 * keys_up), values(keys_up / 2 * dim);
  pack_across(a.key + start * a.key_stride + group * dim, count, dim, a.key_stride, keys.data(), keys_up);
  pack_down(a.value + start * a.value_stride + group * dim, count, keys_up, dim, a.value_stride, values.data());
  std::vector<float> scores(QUERIES * keys_up), answers(QUERIES * dim);
  std::vector<bf16> weights(QUERIES * keys_up);
  for (i64 head = group * many; head < (group + 1) * many; ++head)
    for (i64 first = 0; first < here.queries; first += QUERIES) {
      i64 rows = std::min(QUERIES, here.queries - first), columns = up(before + first + rows, 64);
      const bf16* query = a.query + (asking + first) * a.query_stride + head * dim;
      product(rows, columns, dim / 2, (const u32*)query, a.query_stride / 2, keys.data(), keys_up,
              {scores.data(), keys_up, false});
      for (i64 row = 0; row < rows; ++row) {
        float* one = scores.data() + row * keys_up;
        sums[head * a.tokens + asking + first + row] = soften(one, before + first + row + 1, columns, a.scale);
        narrow_row(one, weights.data() + row * keys_up, columns);
      }
      product(rows, dim, columns / 2, (const u32*)weights.data(), keys_up / 2, values.data(), dim,
              {answers.data(), dim, false});
      for (i64 row = 0; row < rows; ++row)
        narrow_row(answers.data() + row * dim, out + ((asking + first + row) * a.heads + head) * dim, dim);
    }
}

void attend_backward(const Attention<bf16>& a, Document here, i64 group, const bf16* out, const bf16* grad,
                     const float* sums, Slopes<bf16> slopes) {
  [[maybe_unused]] TilesOn tiles;
  i64 dim = a.dim, many = a.heads / a.groups, count = here.keys, keys_up = up(count, 64), out_stride = a.heads * dim;
  i64 start = here.first_key, asking = here.first_query, before = here.before();
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
    for (i64 first = 0; first < here.queries; first += QUERIES) {
      i64 rows = std::min(QUERIES, here.queries - first), columns = up(before + first + rows, 64), rows_up = up(rows, 2);
      const bf16* query = a.query + (asking + first) * a.query_stride + head * dim;
      i64 place = (asking + first) * out_stride + head * dim;
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
        float log_sum = sums[head * a.tokens + asking + first + row], delta = 0;
#pragma omp simd reduction(+ : delta)
        for (i64 i = 0; i < dim; ++i) delta += wide(o[i]) * wide(g[i]);
        soften_back(w, d, before + first + row + 1, columns, a.scale, log_sum, delta);
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
    attend_backward(a, here, group, out, grad, sums, {query_grad, key_grad, value_grad});
  });
}

}
#endif
