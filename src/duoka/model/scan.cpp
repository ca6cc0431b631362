// The scan of Mamba 1: each channel keeps a state of `size` numbers, which decays and is written to at each token.
// Tensors are fp32: (rows, channels, tokens), (channels, size) and (rows, tokens, size).

#include "native.h"

namespace {

constexpr i64 LARGEST = 256;  // state of a channel: selective_scan.py asks for no larger one

struct Scan {
  const float *x, *steps, *decay, *in, *out;
  i64 rows, channels, tokens, size;
};

// `size` is known to the compiler where that is what most models have.
template <int KNOWN>
void scan_forward(const Scan& scan, float* answers, int threads) {
  const i64 size = KNOWN ? KNOWN : scan.size;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 place = 0; place < scan.rows * scan.channels; ++place) {
    i64 row = place / scan.channels, from = place * scan.tokens;
    const float* decay = scan.decay + place % scan.channels * size;
    float state[KNOWN ? KNOWN : LARGEST] = {};
    for (i64 token = 0; token < scan.tokens; ++token) {
      const float *in = scan.in + (row * scan.tokens + token) * size, *out = scan.out + (in - scan.in);
      float step = scan.steps[from + token], written = step * scan.x[from + token], sum = 0;
#pragma omp simd reduction(+ : sum)
      for (i64 i = 0; i < size; ++i) {
        state[i] = exponential(step * decay[i]) * state[i] + written * in[i];
        sum += state[i] * out[i];
      }
      answers[from + token] = sum;
    }
  }
}

struct Learned {
  float *answers, *x, *steps, *decay, *in, *out;  // `in` and `out`: as many sums of channels as there are parts
};

template <int KNOWN>
void scan_backward(const Scan& scan, const float* grad, const Learned& to, i64 parts, int threads) {
  const i64 size = KNOWN ? KNOWN : scan.size, tokens = scan.tokens, both = scan.rows * tokens * size;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 part = 0; part < parts; ++part) {
    std::vector<float> states((tokens + 1) * size), kept(tokens * size);
    std::fill(to.in + part * both, to.in + (part + 1) * both, 0.0f);
    std::fill(to.out + part * both, to.out + (part + 1) * both, 0.0f);
    for (i64 channel = scan.channels * part / parts; channel < scan.channels * (part + 1) / parts; ++channel) {
      const float* decay = scan.decay + channel * size;
      float* of_decay = to.decay + channel * size;
      std::fill(of_decay, of_decay + size, 0.0f);
      for (i64 row = 0; row < scan.rows; ++row) {
        const i64 from = (row * scan.channels + channel) * tokens;
        const float *in = scan.in + row * tokens * size, *out = scan.out + row * tokens * size;
        std::fill(states.begin(), states.begin() + size, 0.0f);
        for (i64 token = 0; token < tokens; ++token) {
          const i64 at = token * size;
          float step = scan.steps[from + token], written = step * scan.x[from + token], sum = 0;
#pragma omp simd reduction(+ : sum)
          for (i64 i = 0; i < size; ++i) {
            float left = exponential(step * decay[i]);
            kept[at + i] = left;
            states[at + size + i] = left * states[at + i] + written * in[at + i];
            sum += states[at + size + i] * out[at + i];
          }
          to.answers[from + token] = sum;
        }
        float of_state[KNOWN ? KNOWN : LARGEST] = {};
        float *of_in = to.in + part * both + row * tokens * size, *of_out = to.out + part * both + row * tokens * size;
        for (i64 token = tokens - 1; token >= 0; --token) {
          const i64 at = token * size;
          float own = grad[from + token], step = scan.steps[from + token], x = scan.x[from + token];
          float through = 0, read = 0;
#pragma omp simd reduction(+ : through, read)
          for (i64 i = 0; i < size; ++i) {
            float now = of_state[i] + own * out[at + i], before = now * kept[at + i];
            of_out[at + i] += own * states[at + size + i];
            of_in[at + i] += now * (step * x);
            of_decay[i] += before * states[at + i] * step;
            through += before * states[at + i] * decay[i];
            read += now * in[at + i];
            of_state[i] = before;
          }
          to.x[from + token] = read * step;
          to.steps[from + token] = through + read * x;
        }
      }
    }
  }
}

}  // namespace

extern "C" {

void duoka_scan_forward(const float* x, const float* steps, const float* decay, const float* in, const float* out,
                        float* answers, i64 rows, i64 channels, i64 tokens, i64 size, int threads) {
  Scan scan = {x, steps, decay, in, out, rows, channels, tokens, size};
  size == 16 ? scan_forward<16>(scan, answers, threads) : scan_forward<0>(scan, answers, threads);
}

void duoka_scan_backward(const float* x, const float* steps, const float* decay, const float* in, const float* out,
                         const float* grad, float* answers, float* of_x, float* of_steps, float* of_decay, float* of_in,
                         float* of_out, i64 rows, i64 channels, i64 tokens, i64 size, i64 parts, int threads) {
  Scan scan = {x, steps, decay, in, out, rows, channels, tokens, size};
  Learned to = {answers, of_x, of_steps, of_decay, of_in, of_out};
  size == 16 ? scan_backward<16>(scan, grad, to, parts, threads) : scan_backward<0>(scan, grad, to, parts, threads);
}
}
