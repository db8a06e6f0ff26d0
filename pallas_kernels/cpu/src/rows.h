// What happens to rows before they are multiplied: RMS norm, rounding, quantisation.
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

// Symmetric 8-bit form with the largest magnitude at 127, stored 128 too high: the product
// instructions take one unsigned side, and the weights' offsets take the 128 out again.  Returns
// the scale.  A row that is not finite has a scale that is not, and so has all that follows.
template <class Row>
float write_8bit(const Row& row, uint8_t* out, int padded, float* wide) {
  F16 most = zero_f(), odd = zero_f();
  for (int k = 0; k < row.size; k += kLanes) {
    const F16 v = row(k);
    store(wide + k, v);
    most = max(most, abs(v));
    odd = odd + (v - v);  // NaN if any is not finite
  }
  const float scale = largest(most) / 127.f + sum(odd);
  const F16 inverse = all(scale > 0.f ? 1.f / scale : 0.f);
  for (int k = 0; k < padded; k += kLanes) {
    const F16 v = k < row.size ? load(wide + k) : zero_f();
    store_bytes(out + k, to_i(v * inverse) + all_i(128));
  }
  return scale;
}

// Rows in the type of `weights`, in scratch memory unless they can be used where they are.
template <class MakeRow>
Rows prepare(xla::ffi::ThreadPool& pool, int count, const Weights& weights, const MakeRow& row) {
  const int padded = weights.steps * kStepBytes / (weights.is_8bit() ? 1 : 2);
  const long stride = long(weights.steps) * kStepBytes;
  uint8_t* data = scratch<uint8_t, 2>(size_t(count) * stride);
  float* scales = scratch<float, 3>(count);
  const int parts = count < 32 ? 1 : int(pool.num_threads()) * 4;
  Team::instance().each(pool, parts, [&](int part) {
    const int end = int(long(count) * (part + 1) / parts);
    for (int m = int(long(count) * part / parts); m < end; m++) {
      uint8_t* out = data + m * stride;
      if (weights.is_8bit()) {
        scales[m] = write_8bit(row(m), out, padded, scratch<float, 4>(padded + kLanes));
      } else {
        write_bf16(row(m), reinterpret_cast<bf16*>(out), padded);
      }
    }
  });
  return {data, stride, count, scales};
}

inline Rows prepare(xla::ffi::ThreadPool& pool, const bf16* x, int count, const Weights& weights) {
  const bool fits = !weights.is_8bit() && weights.inputs * 2 == weights.steps * kStepBytes;
  if (fits) return {reinterpret_cast<const uint8_t*>(x), weights.inputs * 2L, count, nullptr};
  return prepare(pool, count, weights,
                 [&](int m) { return Bf16Row{x + long(m) * weights.inputs, weights.inputs}; });
}

}  // namespace jaxserve
