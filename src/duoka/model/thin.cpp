// Thin products of adapters, of rows (n, width) and a matrix (rank, width): sums in fp32, by vectors, without a program
// for each number of rows, as oneDNN writes them in milliseconds.

#include "native.h"

namespace {

constexpr i64 ROWS = 4, RANKS = LANES == 16 ? 4 : 2;  // what stays in registers: so many sums of LANES numbers
constexpr i64 PANEL = 128;                             // rows that are widened at once

struct Shape {
  i64 rows, stride, width, rank;
  float scale;
};

template <class T>
void widen(const T* from, i64 count, float* to) {
#pragma omp simd
  for (i64 i = 0; i < count; ++i) to[i] = wide(from[i]);
}

// The matrix in fp32, with ranks of zeros up to a whole number of RANKS.
template <class T>
std::vector<float> whole(const T* matrix, Shape n) {
  std::vector<float> found(up(n.rank, RANKS) * n.width, 0.0f);
  widen(matrix, n.rank * n.width, found.data());
  return found;
}

// (rows, rank): each row with each of the matrix.
template <class T>
void squeeze(const T* rows, const T* matrix, T* out, Shape n, int threads) {
  std::vector<float> held = whole(matrix, n);
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> near(ROWS * n.width);
#pragma omp for schedule(static)
    for (i64 first = 0; first < n.rows; first += ROWS) {
      i64 count = std::min(ROWS, n.rows - first);
      for (i64 r = 0; r < count; ++r) widen(rows + (first + r) * n.stride, n.width, near.data() + r * n.width);
      for (i64 low = 0; low < n.rank; low += RANKS) {
        Vector sums[ROWS][RANKS] = {};
        const float *x = near.data(), *m = held.data() + low * n.width;
        for (i64 i = 0; i < n.width; i += LANES) {
          Vector each[RANKS];
#pragma GCC unroll 4
          for (i64 k = 0; k < RANKS; ++k) each[k] = load(m + k * n.width + i);
#pragma GCC unroll 4
          for (i64 r = 0; r < ROWS; ++r) {
            Vector one = load(x + r * n.width + i);
#pragma GCC unroll 4
            for (i64 k = 0; k < RANKS; ++k) sums[r][k] += one * each[k];
          }
        }
        for (i64 r = 0; r < count; ++r)
          for (i64 k = 0; k < std::min(RANKS, n.rank - low); ++k)
            put(out + (first + r) * n.rank + low + k, n.scale * total(sums[r][k]));
      }
    }
  }
}

// Of each row its thin numbers times the scale, with zeros up to a whole number of RANKS.
template <class T>
std::vector<float> scaled(const T* thin, Shape n) {
  i64 ranks = up(n.rank, RANKS);
  std::vector<float> found(up(n.rows, ROWS) * ranks, 0.0f);
  for (i64 row = 0; row < n.rows; ++row)
    for (i64 k = 0; k < n.rank; ++k) found[row * ranks + k] = n.scale * wide(thin[row * n.rank + k]);
  return found;
}

// Added to rows: (rows, rank) times the matrix.
template <class T>
void spread(T* rows, const T* thin, const T* matrix, Shape n, int threads) {
  constexpr i64 COLUMNS = RANKS, BLOCK = COLUMNS * LANES;
  i64 ranks = up(n.rank, RANKS), width = up(n.width, BLOCK);
  std::vector<float> held(n.rank * width, 0.0f), factors = scaled(thin, n);
  for (i64 k = 0; k < n.rank; ++k) widen(matrix + k * n.width, n.width, held.data() + k * width);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 first = 0; first < n.rows; first += ROWS) {
    i64 count = std::min(ROWS, n.rows - first);
    for (i64 at = 0; at < n.width; at += BLOCK) {
      Vector sums[ROWS][COLUMNS] = {};
      const float *m = held.data() + at, *times = factors.data() + first * ranks;
      for (i64 k = 0; k < n.rank; ++k, m += width) {
        Vector each[COLUMNS];
#pragma GCC unroll 4
        for (i64 c = 0; c < COLUMNS; ++c) each[c] = load(m + c * LANES);
#pragma GCC unroll 4
        for (i64 r = 0; r < ROWS; ++r) {
          float by = times[r * ranks + k];
#pragma GCC unroll 4
          for (i64 c = 0; c < COLUMNS; ++c) sums[r][c] += each[c] * by;
        }
      }
      float found[ROWS][BLOCK];
      std::memcpy(found, sums, sizeof found);
      i64 columns = std::min(BLOCK, n.width - at);
      for (i64 r = 0; r < count; ++r) {
        T* to = rows + (first + r) * n.stride + at;
#pragma omp simd
        for (i64 i = 0; i < columns; ++i) put(to + i, wide(to[i]) + found[r][i]);
      }
    }
  }
}

// (rank, width), in fp32: the sum over rows of each one's thin numbers times the row.
template <class T>
void collect(const T* rows, const T* thin, float* out, Shape n, int threads) {
  constexpr i64 COLUMNS = ROWS;
  i64 ranks = up(n.rank, RANKS);
  std::vector<float> factors = scaled(thin, n);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 at = 0; at < n.width; at += COLUMNS * LANES) {
    i64 columns = std::min(COLUMNS * LANES, n.width - at);
    std::vector<float> near(PANEL * COLUMNS * LANES, 0.0f), found(ranks * COLUMNS * LANES, 0.0f);
    for (i64 first = 0; first < n.rows; first += PANEL) {
      i64 count = std::min(PANEL, n.rows - first);
      for (i64 r = 0; r < count; ++r)
        widen(rows + (first + r) * n.stride + at, columns, near.data() + r * COLUMNS * LANES);
      for (i64 low = 0; low < ranks; low += RANKS) {
        Vector sums[RANKS][COLUMNS];
        float* to = found.data() + low * COLUMNS * LANES;
#pragma GCC unroll 4
        for (i64 k = 0; k < RANKS; ++k)
#pragma GCC unroll 4
          for (i64 c = 0; c < COLUMNS; ++c) sums[k][c] = load(to + (k * COLUMNS + c) * LANES);
        for (i64 r = 0; r < count; ++r) {
          Vector each[COLUMNS];
#pragma GCC unroll 4
          for (i64 c = 0; c < COLUMNS; ++c) each[c] = load(near.data() + (r * COLUMNS + c) * LANES);
          const float* times = factors.data() + (first + r) * ranks + low;
#pragma GCC unroll 4
          for (i64 k = 0; k < RANKS; ++k)
#pragma GCC unroll 4
            for (i64 c = 0; c < COLUMNS; ++c) sums[k][c] += each[c] * times[k];
        }
#pragma GCC unroll 4
        for (i64 k = 0; k < RANKS; ++k)
#pragma GCC unroll 4
          for (i64 c = 0; c < COLUMNS; ++c) store(to + (k * COLUMNS + c) * LANES, sums[k][c]);
      }
    }
    for (i64 k = 0; k < n.rank; ++k)
      std::copy_n(found.data() + k * COLUMNS * LANES, columns, out + k * n.width + at);
  }
}

}  // namespace

extern "C" {

void duoka_thin_squeeze(const void* rows, const void* matrix, void* out, i64 count, i64 stride, i64 width, i64 rank,
                        float scale, int is_wide, int threads) {
  Shape n{count, stride, width, rank, scale};
  if (is_wide) squeeze((const float*)rows, (const float*)matrix, (float*)out, n, threads);
  else squeeze((const bf16*)rows, (const bf16*)matrix, (bf16*)out, n, threads);
}

void duoka_thin_spread(void* rows, const void* thin, const void* matrix, i64 count, i64 stride, i64 width, i64 rank,
                       float scale, int is_wide, int threads) {
  Shape n{count, stride, width, rank, scale};
  if (is_wide) spread((float*)rows, (const float*)thin, (const float*)matrix, n, threads);
  else spread((bf16*)rows, (const bf16*)thin, (const bf16*)matrix, n, threads);
}

void duoka_thin_collect(const void* rows, const void* thin, float* out, i64 count, i64 stride, i64 width, i64 rank,
                        float scale, int is_wide, int threads) {
  Shape n{count, stride, width, rank, scale};
  if (is_wide) collect((const float*)rows, (const float*)thin, out, n, threads);
  else collect((const bf16*)rows, (const bf16*)thin, out, n, threads);
}

}
