// A product small enough to be exact, done by the kernels and by hand.
#pragma once
#include "matmul.h"

namespace jaxserve {

// Products of small integers: float32 and int32 sums of them are exact in any order.
template <class Lane>
bool products_are_right() {
  constexpr bool k8Bit = std::is_same_v<Lane, int32_t>;
  constexpr int kRows = 3, kPerStep = k8Bit ? 4 : 2, kInputs = kTileSteps * kPerStep;
  alignas(64) uint8_t weights[kTileSteps * kPanelStep], rows[kRows * kTileSteps * kStepBytes];
  alignas(64) Lane sums[kRows * kPanel];
  auto weight = [](int n, int k) { return (n * 5 + k * 3) % 7 - 3; };
  auto row = [](int m, int k) { return (m * 2 + k * 5) % 5; };
  auto put = [](uint8_t* at, int index, int value) {
    if (k8Bit) {
      at[index] = uint8_t(value);
    } else {
      const float wide = float(value);
      memcpy(at + index * 2, reinterpret_cast<const char*>(&wide) + 2, 2);
    }
  };
  for (int k = 0; k < kInputs; k++) {
    const int step = k / kPerStep, inside = k % kPerStep;
    for (int n = 0; n < kPanel; n++)
      put(weights + step * kPanelStep + n * kStepBytes, inside, weight(n, k));
    for (int m = 0; m < kRows; m++)
      put(rows + (m * kTileSteps + step) * kStepBytes, inside, row(m, k));
  }
  panel_product(Rows{rows, kTileSteps * kStepBytes, kRows, nullptr}, weights, kTileSteps, sums);
  panels_done();
  for (int m = 0; m < kRows; m++) {
    for (int n = 0; n < kPanel; n++) {
      int exact = 0;
      for (int k = 0; k < kInputs; k++) exact += weight(n, k) * row(m, k);
      if (sums[m * kPanel + n] != Lane(exact)) return false;
    }
  }
  return true;
}

}  // namespace jaxserve
