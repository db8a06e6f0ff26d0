// What happens to rows before they are multiplied: RMS norm, rounding, padding.
#pragma once
#include <cmath>

#include "matmul.h"

namespace jaxserve {

// Up to 16 values of a row that ends at p + left; zeros beyond.
inline F16 load_some(const float* p, int left) {
  if (left >= kLanes) return load(p);
  alignas(64) float part[kLanes] = {};
  memcpy(part, p, left * sizeof(float));
  return load(part);
}
inline F16 load_some(const bf16* p, int left) {
  if (left >= kLanes) return load_bf16(p);
  alignas(64) bf16 part[kLanes] = {};
  memcpy(part, p, left * sizeof(bf16));
  return load_bf16(part);
}
inline void store_some(float* p, int left, F16 x) {
  if (left >= kLanes) return store(p, x);
  alignas(64) float part[kLanes];
  store(part, x);
  if (left > 0) memcpy(p, part, left * sizeof(float));
}
inline void store_some(bf16* p, int left, F16 x) {
  if (left >= kLanes) return store_bf16(p, x);
  alignas(64) bf16 part[kLanes];
  store_bf16(part, x);
  if (left > 0) memcpy(p, part, left * sizeof(bf16));
}

// x / rms(x) * gain in float32 (arXiv:1910.07467), 16 elements at a time.
struct NormedRow {
  const float* x;
  const bf16* gain;
  int size;
  F16 factor;

  NormedRow(const float* x, const bf16* gain, int size, float eps) : x(x), gain(gain), size(size) {
    F16 squares = zero_f();
    for (int k = 0; k < size; k += kLanes) {
      const F16 v = load_some(x + k, size - k);
      squares = fma(v, v, squares);
    }
    factor = all(1.f / std::sqrt(sum(squares) / size + eps));
  }
  F16 operator()(int k) const {
    return load_some(x + k, size - k) * factor * load_some(gain + k, size - k);
  }
};

struct Bf16Row {
  const bf16* x;
  int size;
  F16 operator()(int k) const { return load_some(x + k, size - k); }
};

template <class Row>
void write_bf16(const Row& row, bf16* out, int padded) {
  for (int k = 0; k < padded; k += kLanes)
    store_bf16(out + k, k < row.size ? row(k) : zero_f());
}

// Rows as bfloat16, in scratch memory.
template <class MakeRow>
Rows prepare(xla::ffi::ThreadPool& pool, int count, const Weights& weights, const MakeRow& row) {
  const int padded = weights.steps * 2;
  bf16* data = scratch<bf16, 2>(size_t(count) * padded);
  const int workers = Team::workers(pool), parts = count < 4 ? 1 : count < 32 ? workers : workers * 4;
  Team::instance().each(pool, parts, [&](int part) {
    const int end = int(long(count) * (part + 1) / parts);
    for (int m = int(long(count) * part / parts); m < end; m++)
      write_bf16(row(m), data + long(m) * padded, padded);
  });
  return {reinterpret_cast<const uint8_t*>(data), long(padded) * 2, count};
}

// The rows where they are, unless the weights are padded.
inline Rows prepare(xla::ffi::ThreadPool& pool, const bf16* x, int count, const Weights& weights) {
  if (weights.inputs == weights.steps * 2)
    return {reinterpret_cast<const uint8_t*>(x), weights.inputs * 2L, count};
  return prepare(pool, count, weights,
                 [&](int m) { return Bf16Row{x + long(m) * weights.inputs, weights.inputs}; });
}

}  // namespace jaxserve
