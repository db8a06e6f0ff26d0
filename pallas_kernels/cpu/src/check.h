// A product small enough to be exact, done by the kernels and by hand.
#pragma once
#include "matmul.h"

namespace jaxserve {

// Products of small integers: float32 sums of them are exact in any order.
inline bool products_are_right() {
  constexpr int kRows = 3, kInputs = kTileSteps * 2;
  alignas(64) uint8_t weights[kTileSteps * kPanelStep], rows[kRows * kTileSteps * kStepBytes];
  alignas(64) float sums[kRows * kPanel];
  auto weight = [](int n, int k) { return (n * 5 + k * 3) % 7 - 3; };
  auto row = [](int m, int k) { return (m * 2 + k * 5) % 5; };
  auto put = [](uint8_t* at, int index, int value) {  // the upper half of a float is its bfloat16
    const float wide = float(value);
    memcpy(at + index * 2, reinterpret_cast<const char*>(&wide) + 2, 2);
  };
  for (int k = 0; k < kInputs; k++) {
    for (int n = 0; n < kPanel; n++)
      put(weights + k / 2 * kPanelStep + n * kStepBytes, k % 2, weight(n, k));
    for (int m = 0; m < kRows; m++)
      put(rows + (m * kTileSteps + k / 2) * kStepBytes, k % 2, row(m, k));
  }
  bool right = true;
  auto compare = [&](int first, int last, const float* values) {
    for (int m = first; m < last; m++) {
      for (int n = 0; n < kPanel; n++) {
        int exact = 0;
        for (int k = 0; k < kInputs; k++) exact += weight(n, k) * row(m, k);
        right &= values[(m - first) * kPanel + n] == float(exact);
      }
    }
  };
  panel_product(Rows{rows, kTileSteps * kStepBytes, kRows}, weights, kTileSteps, sums, compare);
  panels_done();
  return right;
}

}  // namespace jaxserve
