// Products of bf16 numbers, summed in fp32, on CPUs with bf16 arithmetic: AMX's where the processor has it, AVX-512's
// elsewhere. A left side is rows of pairs of bf16, a right side pairs of rows (pack_across, pack_down).

#pragma once

#include "native.h"

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

// MR rows by 16 * C columns: sums over `pairs` of A (rows of pairs of bf16) times B (pairs, packed by column). All sums
// stay in registers, for which compilers want the loops unrolled early.
template <int MR, int C>
inline void multiply(const u32* a, i64 a_stride, const u32* b, i64 b_stride, i64 pairs, Tile out) {
  __mmask16 adds = out.adds ? 0xffff : 0;
  __m512 sums[MR][C];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[r][c] = _mm512_setzero_ps();
  for (i64 p = 0; p < pairs; ++p) {
    __m512bh columns[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) columns[c] = (__m512bh)_mm512_loadu_si512(b + p * b_stride + 16 * c);
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      __m512bh both = (__m512bh)_mm512_set1_epi32(int(a[r * a_stride + p]));
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], both, columns[c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      float* at = out.at + r * out.stride + 16 * c;
      _mm512_storeu_ps(at, _mm512_mask_add_ps(sums[r][c], adds, sums[r][c], _mm512_loadu_ps(at)));
    }
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
  for (; columns > 0; columns -= 64, b += 64, out.at += 64) {
    if (columns >= 64) multiply_rows<4>(rows, a, a_stride, b, b_stride, pairs, out);
    if (columns == 48) multiply_rows<3>(rows, a, a_stride, b, b_stride, pairs, out);
    if (columns == 32) multiply_rows<2>(rows, a, a_stride, b, b_stride, pairs, out);
    if (columns == 16) multiply_rows<1>(rows, a, a_stride, b, b_stride, pairs, out);
  }
}

inline __mmask16 first_of(i64 count) { return count >= 16 ? 0xffff : __mmask16((1u << count) - 1); }  // lanes, one at least

// Sixteen rows of sixteen numbers become columns.
inline void turn_block(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // of four rows, column 4 * lane + k is in x[i + k]
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int k = 0; k < 4; ++k) {
    __m512i even = _mm512_shuffle_i32x4(x[k], x[4 + k], 0x88), odd = _mm512_shuffle_i32x4(x[k], x[4 + k], 0xdd);
    __m512i even_below = _mm512_shuffle_i32x4(x[8 + k], x[12 + k], 0x88);
    __m512i odd_below = _mm512_shuffle_i32x4(x[8 + k], x[12 + k], 0xdd);
    y[k] = _mm512_shuffle_i32x4(even, even_below, 0x88);
    y[4 + k] = _mm512_shuffle_i32x4(odd, odd_below, 0x88);
    y[8 + k] = _mm512_shuffle_i32x4(even, even_below, 0xdd);
    y[12 + k] = _mm512_shuffle_i32x4(odd, odd_below, 0xdd);
  }
  std::copy(y, y + 16, x);
}

// The transpose of (rows, columns): whole blocks of `to` are written, zeros beyond the last row.
void turn(const u32* from, i64 rows, i64 columns, i64 stride, u32* to, i64 to_stride) {
  for (i64 row = 0; row < rows; row += 16)
    for (i64 column = 0; column < columns; column += 16) {
      __mmask16 mask = first_of(columns - column);
      __m512i block[16];
      for (i64 i = 0; i < 16; ++i)
        block[i] = _mm512_maskz_loadu_epi32(row + i < rows ? mask : 0, from + (row + i) * stride + column);
      turn_block(block);
      for (i64 i = 0; i < std::min<i64>(16, columns - column); ++i)
        _mm512_storeu_si512(to + (column + i) * to_stride + row, block[i]);
    }
}

// Of a (rows, dim) matrix of bf16 whose rows lie `stride` apart: pairs along dim, column = row (to sum over dim).
void pack_across(const bf16* x, i64 rows, i64 dim, i64 stride, u32* out, i64 out_stride) {
  turn((const u32*)x, rows, dim / 2, stride / 2, out, out_stride);
}

// Pairs of rows, column = dim (to sum over rows); zeros behind the rows, up to an even count.
void pack_down(const bf16* x, i64 rows, i64 rows_up, i64 dim, i64 stride, u32* out) {
  for (i64 row = 0; row < rows_up; row += 2, x += 2 * stride, out += dim)
    for (i64 i = 0; i < dim; i += 16) {
      __m512i both = _mm512_setzero_si512();
      if (row < rows) both = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(x + i)));
      if (row + 1 < rows) {
        __m512i second = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(x + stride + i)));
        both = _mm512_or_si512(both, _mm512_slli_epi32(second, 16));
      }
      _mm512_storeu_si512(out + i, both);
    }
}

inline void narrow_row(const float* from, float factor, bf16* to, i64 count) {
  __m512 times = _mm512_set1_ps(factor);
  for (i64 i = 0; i < count; i += 16)
    _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(from + i), times)));
}

}  // namespace
#endif
