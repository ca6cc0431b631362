// The delta rules (delta_rule.py, kimi_delta.py): each head's state, a column for each number of its values, decays at
// each token, and is written what it misses of the value at the token's key. Columns know nothing of each other.
//
// Every number of a result is computed by one thread in one order, so the count of threads changes no bit.

#include "native.h"

namespace {

constexpr i64 MOST = 256;    // numbers of a key
constexpr i64 CHUNK = 16;    // tokens whose states the backward pass keeps at once
constexpr i64 TOGETHER = 4;  // columns
constexpr float EPSILON = 1e-6f;  // of the norms of queries and keys

struct Sizes {
  i64 rows, tokens, key_heads, heads, dim, value_dim, decays;  // decays: of a token, `dim` or one
};

template <class T>
struct Inputs {
  const T *query, *key, *value;  // (rows, tokens, key_heads or heads, dim or value_dim)
  const float *decay, *beta;     // logarithms (rows, tokens, heads, decays), and (rows, tokens, heads)
};

// Queries or keys of a head: (tokens, dim), each times what is kept of it: 1 / its length, or 1, times `scale`.
template <class T>
struct Units {
  std::vector<float> at, lengths;

  Units(const T* from, const Sizes& n, float scale, bool has_norms) : at(n.tokens * n.dim), lengths(n.tokens) {
    for (i64 token = 0; token < n.tokens; ++token, from += n.key_heads * n.dim) {
      float sum = 0, *to = at.data() + token * n.dim;
#pragma omp simd reduction(+ : sum)
      for (i64 i = 0; i < n.dim; ++i) sum += wide(from[i]) * wide(from[i]);
      lengths[token] = (has_norms ? 1.0f / std::sqrt(sum + EPSILON) : 1.0f) * scale;
#pragma omp simd
      for (i64 i = 0; i < n.dim; ++i) to[i] = wide(from[i]) * lengths[token];
    }
  }

  // The gradient of what was read, from that of what is here.
  void put_slopes(const std::vector<float>& slopes, const Sizes& n, float scale, bool has_norms, T* to) const {
    for (i64 token = 0; token < n.tokens; ++token, to += n.key_heads * n.dim) {
      const float *unit = at.data() + token * n.dim, *slope = slopes.data() + token * n.dim;
      float along = 0;
#pragma omp simd reduction(+ : along)
      for (i64 i = 0; i < n.dim; ++i) along += unit[i] * slope[i];
      along = has_norms ? along / (scale * scale) : 0.0f;
#pragma omp simd
      for (i64 i = 0; i < n.dim; ++i) put(to + i, (slope[i] - unit[i] * along) * lengths[token]);
    }
  }
};

// A head's columns, over all tokens of a row. V: vectors of a key, where compilers are to know it.
template <class T, int V>
struct Head {
  const Sizes& n;
  const float *query, *key;  // (tokens, dim)
  const T* value;            // tokens lie `stride` apart
  const float* beta;         // `heads` apart
  std::vector<float> decay = std::vector<float>(n.tokens * n.dim);
  const i64 stride = n.heads * n.value_dim, vectors = V ? V : n.dim / LANES;

  struct State {
    Vector at[TOGETHER][V ? V : MOST / LANES];
  };

  void read_decay(const float* logs) {
    for (i64 token = 0; token < n.tokens; ++token, logs += n.heads * n.decays) {
      float *to = decay.data() + token * n.dim, one = exponential(logs[0]);
      if (n.decays == 1) {
        std::fill(to, to + n.dim, one);
        continue;
      }
#pragma omp simd
      for (i64 i = 0; i < n.dim; ++i) to[i] = exponential(logs[i]);
    }
  }

  // One token: decays the state, and finds what it misses of the value, times beta.
  inline void decay_state(State& state, i64 token, i64 column, float* found, float* missed) const {
    const float *k = key + token * n.dim, *over = decay.data() + token * n.dim;
    Vector sums[TOGETHER] = {};
    for (i64 j = 0; j < vectors; ++j) {
      Vector one = load(k + j * LANES), left = load(over + j * LANES);
      for (i64 c = 0; c < TOGETHER; ++c) {
        state.at[c][j] *= left;
        sums[c] += one * state.at[c][j];
      }
    }
    for (i64 c = 0; c < TOGETHER; ++c) {
      missed[c] = wide(value[token * stride + column + c]) - total(sums[c]);
      found[c] = beta[token * n.heads] * missed[c];
    }
  }

  inline void write_state(State& state, i64 token, const float* written) const {
    const float* k = key + token * n.dim;
    for (i64 j = 0; j < vectors; ++j) {
      Vector one = load(k + j * LANES);
      for (i64 c = 0; c < TOGETHER; ++c) state.at[c][j] += one * written[c];
    }
  }

  void answer(i64 column, T* out) const {
    State state = {};
    for (i64 token = 0; token < n.tokens; ++token) {
      float written[TOGETHER], missed[TOGETHER];
      decay_state(state, token, column, written, missed);
      const float *k = key + token * n.dim, *q = query + token * n.dim;
      Vector sums[TOGETHER] = {};
      for (i64 j = 0; j < vectors; ++j) {
        Vector one = load(k + j * LANES), asks = load(q + j * LANES);
        for (i64 c = 0; c < TOGETHER; ++c) {
          state.at[c][j] += one * written[c];
          sums[c] += asks * state.at[c][j];
        }
      }
      for (i64 c = 0; c < TOGETHER; ++c) put(out + token * stride + column + c, total(sums[c]));
    }
  }
};

struct Slopes {  // sums over columns: (tokens, dim), and (tokens,)
  std::vector<float> query, key, decay, beta;
};

template <class T, int V>
struct Backward {
  using State = typename Head<T, V>::State;
  const Head<T, V>& head;
  const T* grad;
  T* value_grad;  // both lie as values do
  Slopes& slopes;
  std::vector<State> begins = std::vector<State>((head.n.tokens + CHUNK - 1) / CHUNK);
  State states[CHUNK];  // decayed, before each token writes
  float written[CHUNK][TOGETHER], missed[CHUNK][TOGETHER];

  void run(i64 column) {
    const i64 tokens = head.n.tokens, chunks = i64(begins.size());
    State state = {};
    for (i64 token = 0; token < tokens; ++token) {
      float found[TOGETHER], unused[TOGETHER];
      if (token % CHUNK == 0) begins[token / CHUNK] = state;
      head.decay_state(state, token, column, found, unused);
      head.write_state(state, token, found);
    }
    State slope = {};
    for (i64 chunk = chunks - 1; chunk >= 0; --chunk) {
      const i64 first = chunk * CHUNK, count = std::min(CHUNK, tokens - first);
      state = begins[chunk];
      for (i64 at = 0; at < count; ++at) {
        head.decay_state(state, first + at, column, written[at], missed[at]);
        states[at] = state;
        head.write_state(state, first + at, written[at]);
      }
      for (i64 at = count - 1; at >= 0; --at) step_back(slope, at, first + at, column);
    }
  }

  // `slope`: of the state behind the token, which becomes that of the one before it.
  inline void step_back(State& slope, i64 at, i64 token, i64 column) {
    const Sizes& n = head.n;
    const float *k = head.key + token * n.dim, *q = head.query + token * n.dim, *over = head.decay.data() + token * n.dim;
    float *of_query = slopes.query.data() + token * n.dim, *of_key = slopes.key.data() + token * n.dim;
    float *of_decay = slopes.decay.data() + token * n.dim, own[TOGETHER], *wrote = written[at];
    const State& before = states[at];
    for (i64 c = 0; c < TOGETHER; ++c) own[c] = wide(grad[token * head.stride + column + c]);
    Vector sums[TOGETHER] = {};
    for (i64 j = 0; j < head.vectors; ++j) {
      Vector one = load(k + j * LANES), asks = load(q + j * LANES);
      Vector to_query = load(of_query + j * LANES), to_key = load(of_key + j * LANES);
      for (i64 c = 0; c < TOGETHER; ++c) {
        slope.at[c][j] += asks * own[c];
        sums[c] += one * slope.at[c][j];
        to_query += (before.at[c][j] + one * wrote[c]) * own[c];
        to_key += slope.at[c][j] * wrote[c];
      }
      store(of_query + j * LANES, to_query);
      store(of_key + j * LANES, to_key);
    }
    float through[TOGETHER], strength = head.beta[token * n.heads];
    for (i64 c = 0; c < TOGETHER; ++c) {
      float of_written = total(sums[c]);
      slopes.beta[token] += of_written * missed[at][c];
      through[c] = of_written * strength;
      put(value_grad + token * head.stride + column + c, through[c]);
    }
    for (i64 j = 0; j < head.vectors; ++j) {
      Vector one = load(k + j * LANES), left = load(over + j * LANES);
      Vector to_key = load(of_key + j * LANES), to_decay = load(of_decay + j * LANES);
      for (i64 c = 0; c < TOGETHER; ++c) {
        Vector now = slope.at[c][j] - one * through[c];
        to_key -= before.at[c][j] * through[c];
        to_decay += now * before.at[c][j];
        slope.at[c][j] = now * left;
      }
      store(of_key + j * LANES, to_key);
      store(of_decay + j * LANES, to_decay);
    }
  }
};

// Work on each head of keys: its units, and where its numbers and those of its values' heads begin.
template <class T, class Work>
void each_key_head(const Inputs<T>& in, const Sizes& n, bool has_norms, int threads, Work work) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (i64 task = 0; task < n.rows * n.key_heads; ++task) {
    i64 row = task / n.key_heads, head = task % n.key_heads, at = (row * n.tokens * n.key_heads + head) * n.dim;
    Units<T> query(in.query + at, n, 1.0f / std::sqrt(float(n.dim)), has_norms), key(in.key + at, n, 1.0f, has_norms);
    work(query, key, at, row * n.tokens * n.heads + head * (n.heads / n.key_heads));
  }
}

template <class T, int V>
Head<T, V> head_at(const Inputs<T>& in, const Sizes& n, const Units<T>& query, const Units<T>& key, i64 head) {
  Head<T, V> own{n, query.at.data(), key.at.data(), in.value + head * n.value_dim, in.beta + head};
  own.read_decay(in.decay + head * n.decays);
  return own;
}

template <class T, int V>
void forward(const Inputs<T>& in, const Sizes& n, T* out, bool has_norms, int threads) {
  each_key_head(in, n, has_norms, threads, [&](const Units<T>& query, const Units<T>& key, i64, i64 first) {
    for (i64 head = first; head < first + n.heads / n.key_heads; ++head) {
      auto own = head_at<T, V>(in, n, query, key, head);
      for (i64 column = 0; column < n.value_dim; column += TOGETHER) own.answer(column, out + head * n.value_dim);
    }
  });
}

template <class T>
struct Gradients {
  T *query, *key, *value;
  float *decay, *beta;
};

template <class T, int V>
void backward(const Inputs<T>& in, const Sizes& n, const T* grad, Gradients<T> to, bool has_norms, int threads) {
  each_key_head(in, n, has_norms, threads, [&](const Units<T>& query, const Units<T>& key, i64 at, i64 first) {
    std::vector<float> zeros(n.tokens * n.dim, 0.0f);
    Slopes slopes{zeros, zeros, zeros, {}};
    for (i64 head = first; head < first + n.heads / n.key_heads; ++head) {
      auto own = head_at<T, V>(in, n, query, key, head);
      slopes.decay = zeros;
      slopes.beta.assign(n.tokens, 0.0f);
      Backward<T, V> back{own, grad + head * n.value_dim, to.value + head * n.value_dim, slopes};
      for (i64 column = 0; column < n.value_dim; column += TOGETHER) back.run(column);
      for (i64 token = 0; token < n.tokens; ++token) {
        float *decay = to.decay + (head + token * n.heads) * n.decays, *sums = slopes.decay.data() + token * n.dim;
        std::copy(sums, sums + n.decays, decay);
        if (n.decays == 1)
          for (i64 i = 1; i < n.dim; ++i) *decay += sums[i];
        to.beta[head + token * n.heads] = slopes.beta[token];
      }
    }
    query.put_slopes(slopes.query, n, 1.0f / std::sqrt(float(n.dim)), has_norms, to.query + at);
    key.put_slopes(slopes.key, n, 1.0f, has_norms, to.key + at);
  });
}

// `run` with the type of numbers, and with the vectors of a key where most models have so many.
template <class Run>
void dispatch(i64 dim, int is_wide, Run run) {
  auto sized = [&](auto kind) {
    if (dim == 64) return run(kind, std::integral_constant<int, 64 / LANES>());
    if (dim == 128) return run(kind, std::integral_constant<int, 128 / LANES>());
    return run(kind, std::integral_constant<int, 0>());
  };
  is_wide ? sized(float()) : sized(bf16());
}

}  // namespace

extern "C" {

void duoka_delta_forward(const void* query, const void* key, const void* value, const float* decay, const float* beta,
                         void* out, i64 rows, i64 tokens, i64 key_heads, i64 heads, i64 dim, i64 value_dim, i64 decays,
                         int has_norms, int is_wide, int threads) {
  Sizes n{rows, tokens, key_heads, heads, dim, value_dim, decays};
  dispatch(dim, is_wide, [&](auto kind, auto vectors) {
    using T = decltype(kind);
    Inputs<T> in{(const T*)query, (const T*)key, (const T*)value, decay, beta};
    forward<T, vectors.value>(in, n, (T*)out, has_norms, threads);
  });
}

void duoka_delta_backward(const void* query, const void* key, const void* value, const float* decay, const float* beta,
                          const void* grad, void* query_grad, void* key_grad, void* value_grad, float* decay_grad,
                          float* beta_grad, i64 rows, i64 tokens, i64 key_heads, i64 heads, i64 dim, i64 value_dim,
                          i64 decays, int has_norms, int is_wide, int threads) {
  Sizes n{rows, tokens, key_heads, heads, dim, value_dim, decays};
  dispatch(dim, is_wide, [&](auto kind, auto vectors) {
    using T = decltype(kind);
    Inputs<T> in{(const T*)query, (const T*)key, (const T*)value, decay, beta};
    Gradients<T> to{(T*)query_grad, (T*)key_grad, (T*)value_grad, decay_grad, beta_grad};
    backward<T, vectors.value>(in, n, (const T*)grad, to, has_norms, threads);
  });
}

}
