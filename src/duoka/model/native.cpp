// Parts of a training step on CPUs with bf16 arithmetic, in one pass over memory each. native.py compiles this file once
// per machine with a plain compiler (no header of torch), calls it with addresses, and has torch's form beside each
// function: that is the fallback where there is no compiler, and the oracle in tests.
//
// Every number of a result is computed by one thread in one order, so the count of threads changes no bit.

#include <cstdlib>

#include "native.h"

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

}  // namespace

// Gates are x * sigmoid(z(x)): SiLU, and GELU by its tanh, which is a sigmoid of twice as much.
struct Silu {
  static float within(float x) { return x; }
  static float z(float x) { return x; }
  static float slope(float) { return 1.0f; }
};

struct Gelu {
  static constexpr float once = 1.5957691216f, cubic = 0.044715f;  // 2 * sqrt(2 / pi)
  static float within(float x) { return x < -20.0f ? -20.0f : x > 20.0f ? 20.0f : x; }  // flat there; 0 * inf is not 0
  static float z(float x) { return once * (x + cubic * x * x * x); }
  static float slope(float x) { return once * (1.0f + 3.0f * cubic * x * x); }
};

// out = act(gate) * up, rows of `width`; those of gate, up and their gradients begin `stride` numbers apart.
template <class Act>
void gate_forward(const bf16* gate, const bf16* up, bf16* out, i64 rows, i64 width, i64 stride, int threads) {
  i64 blocks = (width + 4095) / 4096;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
  for (i64 row = 0; row < rows; ++row) {
    for (i64 block = 0; block < blocks; ++block) {
      const bf16 *from = gate + row * stride, *with = up + row * stride;
      bf16* to = out + row * width;
      i64 end = std::min(width, (block + 1) * 4096);
#pragma omp simd
      for (i64 i = block * 4096; i < end; ++i) {
        float x = wide(from[i]);
        to[i] = narrow(wide(narrow(x * sigmoid(Act::z(Act::within(x))))) * wide(with[i]));
      }
    }
  }
}

// The gradients of gate and up, and act(gate) * up again where `out` is given. Each may lie where `grad` does.
template <class Act>
void gate_backward(const bf16* grad, const bf16* gate, const bf16* up, bf16* gate_grad, bf16* up_grad, bf16* out,
                   i64 rows, i64 width, i64 stride, int threads) {
  i64 blocks = (width + 4095) / 4096;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
  for (i64 row = 0; row < rows; ++row) {
    for (i64 block = 0; block < blocks; ++block) {
      i64 apart = row * stride, at = row * width, end = std::min(width, (block + 1) * 4096);
#pragma omp simd
      for (i64 i = block * 4096; i < end; ++i) {
        float whole = wide(gate[apart + i]), u = wide(up[apart + i]), g = wide(grad[at + i]);
        float x = Act::within(whole), s = sigmoid(Act::z(x)), value = wide(narrow(whole * s));
        gate_grad[apart + i] = narrow(g * u * s * (1.0f + x * (1.0f - s) * Act::slope(x)));
        up_grad[apart + i] = narrow(g * value);
        if (out) out[at + i] = narrow(value * u);
      }
    }
  }
}

extern "C" {

int duoka_native_version() { return 1; }

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

void duoka_gate_forward(const bf16* gate, const bf16* up, bf16* out, i64 rows, i64 width, i64 stride, int gelu,
                        int threads) {
  if (gelu) gate_forward<Gelu>(gate, up, out, rows, width, stride, threads);
  else gate_forward<Silu>(gate, up, out, rows, width, stride, threads);
}

void duoka_gate_backward(const bf16* grad, const bf16* gate, const bf16* up, bf16* gate_grad, bf16* up_grad, bf16* out,
                         i64 rows, i64 width, i64 stride, int gelu, int threads) {
  if (gelu) gate_backward<Gelu>(grad, gate, up, gate_grad, up_grad, out, rows, width, stride, threads);
  else gate_backward<Silu>(grad, gate, up, gate_grad, up_grad, out, rows, width, stride, threads);
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

// Of each row of both (rows, width): the sum of products of their numbers. Then both are multiplied with its weight.
void duoka_weigh_rows(void* one, void* other, const float* weights, float* sums, i64 rows, i64 width, int is_wide,
                      int threads) {
  auto run = [&](auto kind) {
    using T = decltype(kind);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 row = 0; row < rows; ++row) {
      T *x = (T*)one + row * width, *y = (T*)other + row * width;
      float sum = 0, times = weights[row];
#pragma omp simd reduction(+ : sum)
      for (i64 i = 0; i < width; ++i) {
        sum += wide(x[i]) * wide(y[i]);
        put(x + i, times * wide(x[i]));
        put(y + i, times * wide(y[i]));
      }
      sums[row] = sum;
    }
  };
  is_wide ? run(float()) : run(bf16());
}

// Row r of `to` is the sum of rows order[begins[r]] to order[begins[r + 1]] of `from`, each of `width` numbers.
void duoka_sum_rows(const void* from, const i64* order, const i64* begins, const float* weights, void* to, i64 rows,
                    i64 width, int is_wide, int threads) {
  auto run = [&](auto kind) {
    using T = decltype(kind);
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> sum(width);
#pragma omp for schedule(static)
      for (i64 row = 0; row < rows; ++row) {
        T* here = (T*)to + row * width;
        if (!weights && begins[row + 1] - begins[row] == 1) {  // as most have
          std::memcpy(here, (const T*)from + order[begins[row]] * width, width * sizeof(T));
          continue;
        }
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (i64 at = begins[row]; at < begins[row + 1]; ++at) {
          const T* one = (const T*)from + order[at] * width;
          const float times = weights ? weights[at] : 1.0f;
#pragma omp simd
          for (i64 i = 0; i < width; ++i) sum[i] += times * wide(one[i]);
        }
        for (i64 i = 0; i < width; ++i) put(here + i, sum[i]);
      }
    }
  };
  is_wide ? run(float()) : run(bf16());
}
}
