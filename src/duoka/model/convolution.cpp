// A short causal convolution of each channel, with SiLU behind it or nothing: (rows, tokens, channels), in fp32 or bf16.
// The last of `taps` weights of a channel is that of the token itself.

#include "native.h"

namespace {

constexpr i64 BLOCK = 64, LARGEST = 8;  // channels that go together; taps

struct Convolution {
  const float *weight, *bias;  // (channels, taps)
  i64 rows, tokens, channels, taps, row_step, token_step;
  bool is_silu;
};

// Before SiLU, of one token in a block of channels.
template <class T>
void convolve(const Convolution& is, const T* row, i64 token, i64 first, i64 count, const float (*weight)[BLOCK],
              float* sums) {
  for (i64 i = 0; i < count; ++i) sums[i] = is.bias ? is.bias[first + i] : 0.0f;
  for (i64 tap = std::max<i64>(0, is.taps - 1 - token); tap < is.taps; ++tap) {
    const T* from = row + (token - is.taps + 1 + tap) * is.token_step + first;
#pragma omp simd
    for (i64 i = 0; i < count; ++i) sums[i] += wide(from[i]) * weight[tap][i];
  }
}

void read_weight(const Convolution& is, i64 first, i64 count, float (*weight)[BLOCK]) {
  for (i64 tap = 0; tap < is.taps; ++tap)
    for (i64 i = 0; i < count; ++i) weight[tap][i] = is.weight[(first + i) * is.taps + tap];
}

template <class T>
void convolve_forward(const Convolution& is, const T* x, T* out, int threads) {
  const i64 blocks = up(is.channels, BLOCK) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 place = 0; place < is.rows * blocks; ++place) {
    const i64 row = place / blocks, first = place % blocks * BLOCK, count = std::min(BLOCK, is.channels - first);
    float weight[LARGEST][BLOCK], sums[BLOCK];
    read_weight(is, first, count, weight);
    for (i64 token = 0; token < is.tokens; ++token) {
      convolve(is, x + row * is.row_step, token, first, count, weight, sums);
      T* to = out + (row * is.tokens + token) * is.channels + first;
      if (is.is_silu) {
#pragma omp simd
        for (i64 i = 0; i < count; ++i) put(to + i, sums[i] * sigmoid(sums[i]));
      } else {
#pragma omp simd
        for (i64 i = 0; i < count; ++i) put(to + i, sums[i]);
      }
    }
  }
}

// `slope` as `out`; a block of channels is one thread's in all rows, so their weights' gradients are added in one order.
template <class T>
void convolve_backward(const Convolution& is, const T* x, const T* slope, T* of_x, float* of_weight, float* of_bias,
                       int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 first = 0; first < is.channels; first += BLOCK) {
    const i64 count = std::min(BLOCK, is.channels - first);
    float weight[LARGEST][BLOCK], learned[LARGEST][BLOCK] = {}, sums[BLOCK], own[BLOCK], all[BLOCK] = {};
    std::vector<float> found((is.tokens + is.taps) * BLOCK);
    read_weight(is, first, count, weight);
    for (i64 row = 0; row < is.rows; ++row) {
      std::fill(found.begin(), found.end(), 0.0f);
      for (i64 token = 0; token < is.tokens; ++token) {
        const T* from = slope + (row * is.tokens + token) * is.channels + first;
        for (i64 i = 0; i < count; ++i) own[i] = wide(from[i]);
        if (is.is_silu) {
          convolve(is, x + row * is.row_step, token, first, count, weight, sums);
#pragma omp simd
          for (i64 i = 0; i < count; ++i) {
            float share = sigmoid(sums[i]);
            own[i] *= share * (1.0f + sums[i] * (1.0f - share));
          }
        }
        for (i64 i = 0; i < count; ++i) all[i] += own[i];
        for (i64 tap = std::max<i64>(0, is.taps - 1 - token); tap < is.taps; ++tap) {
          const i64 before = token - is.taps + 1 + tap;
          const T* read = x + row * is.row_step + before * is.token_step + first;
          float* to = found.data() + before * BLOCK;
#pragma omp simd
          for (i64 i = 0; i < count; ++i) {
            learned[tap][i] += own[i] * wide(read[i]);
            to[i] += own[i] * weight[tap][i];
          }
        }
      }
      for (i64 token = 0; token < is.tokens; ++token) {
        T* to = of_x + (row * is.tokens + token) * is.channels + first;
#pragma omp simd
        for (i64 i = 0; i < count; ++i) put(to + i, found[token * BLOCK + i]);
      }
    }
    for (i64 i = 0; i < count; ++i) {
      of_bias[first + i] = all[i];
      for (i64 tap = 0; tap < is.taps; ++tap) of_weight[(first + i) * is.taps + tap] = learned[tap][i];
    }
  }
}

}  // namespace

extern "C" {

void duoka_convolve_forward(const void* x, const float* weight, const float* bias, void* out, i64 rows, i64 tokens,
                            i64 channels, i64 taps, i64 row_step, i64 token_step, int is_silu, int is_wide,
                            int threads) {
  Convolution is = {weight, bias, rows, tokens, channels, taps, row_step, token_step, is_silu != 0};
  is_wide ? convolve_forward(is, (const float*)x, (float*)out, threads)
          : convolve_forward(is, (const bf16*)x, (bf16*)out, threads);
}

void duoka_convolve_backward(const void* x, const float* weight, const float* bias, const void* slope, void* of_x,
                             float* of_weight, float* of_bias, i64 rows, i64 tokens, i64 channels, i64 taps,
                             i64 row_step, i64 token_step, int is_silu, int is_wide, int threads) {
  Convolution is = {weight, bias, rows, tokens, channels, taps, row_step, token_step, is_silu != 0};
  if (is_wide)
    convolve_backward(is, (const float*)x, (const float*)slope, (float*)of_x, of_weight, of_bias, threads);
  else
    convolve_backward(is, (const bf16*)x, (const bf16*)slope, (bf16*)of_x, of_weight, of_bias, threads);
}
}
