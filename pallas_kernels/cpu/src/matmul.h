// Products of rows with packed weights: x [M, K] times w [N, K] transposed, panel by panel.
//
// A panel is 32 outputs wide: [steps, 32, 2], where a step is two inputs of each output, so that a
// register holds one step of 16 outputs and a broadcast of a pair of a row meets it.  The same
// bytes are what AMX tiles want.  K is padded with zeros to 16 steps.  A result is a chain of
// accumulations over k in order, one output of one row in one lane or tile element: its bits do not
// depend on how many rows there are.
//
// Weights of 8 bits with a scale per 32 inputs of each output lie in groups: 32 scales, then 16
// steps of 64 bytes.  A panel of them is turned into a bfloat16 panel when it is used.
#pragma once
#include <cstring>
#include <vector>

#include "simd.h"
#include "team.h"
#if defined(JAXSERVE_AMX)
#include "amx.h"
#endif

namespace jaxserve {

constexpr int kPanel = 32;           // outputs of a panel
constexpr int kStepBytes = 4;        // of one row or one output
constexpr int kTileSteps = 16;       // K is padded to a multiple of this
constexpr int kPanelStep = kPanel * kStepBytes;

constexpr int kGroupBytes = kPanel * 2 + kTileSteps * kPanel * 2;

struct Weights {
  const uint8_t* data = nullptr;
  bool grouped = false;               // 8 bits with scales of groups
  int outputs = 0, inputs = 0, steps = 0;

  int panels() const { return (outputs + kPanel - 1) / kPanel; }
  size_t panel_bytes() const {
    return size_t(steps) * (grouped ? kGroupBytes / kTileSteps : kPanelStep);
  }
  const uint8_t* panel(int p) const { return data + p * panel_bytes(); }
};

// The rows on the other side of a product: bfloat16, padded like the weights.
struct Rows {
  const uint8_t* data = nullptr;
  long stride = 0;                    // bytes
  int count = 0;
  int first = 0;                      // of the rows that these are some of

  Rows part(int part, int parts) const {
    const int begin = int(long(count) * part / parts), end = int(long(count) * (part + 1) / parts);
    return {data + begin * stride, stride, end - begin, begin};
  }
};

#if defined(__AVX512F__)
constexpr int kTileRows = 12;  // 24 accumulators of 32 registers
#else
constexpr int kTileRows = 2;   // 8 accumulators of 16 registers
#endif
constexpr int kBlockSteps = 1024;     // of K at once: 128 KiB of a panel, well within L2
constexpr int kNearSteps = 96;        // of K at once where memory is waited for: 12 KiB, within L1
constexpr int kNearBytes = 4096;      // how far ahead a stream is brought near

// c [rows, 32] = a [rows, steps] times one panel, added to what c holds if `kAdd`.  With each step
// `kLines` cache lines from `ahead` on are brought near, unless it is null: all of a stream, which
// is read once and does not have to stay, or half of what is used more than once.
template <int kRows, bool kAdd, int kLines>
void tile(const uint8_t* a, long stride, const uint8_t* w, int steps, const uint8_t* ahead,
          float* c) {
  F16 sum[kRows][2];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; m++) {
    sum[m][0] = kAdd ? load(c + m * kPanel) : zero_f();
    sum[m][1] = kAdd ? load(c + m * kPanel + kLanes) : zero_f();
  }
  for (int s = 0; s < steps; s++) {
    const Packed low = load_packed(w + s * kPanelStep), high = load_packed(w + s * kPanelStep + 64);
    if (ahead)
      for (int i = 0; i < kLines; i++)
        _mm_prefetch((const char*)ahead + (s * kLines + i) * 64,
                     kLines == 2 ? _MM_HINT_NTA : _MM_HINT_T0);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; m++) {
      const Packed x = all_packed(a + m * stride + s * kStepBytes);
      sum[m][0] = dot(sum[m][0], x, low);
      sum[m][1] = dot(sum[m][1], x, high);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; m++) {
    store(c + m * kPanel, sum[m][0]);
    store(c + m * kPanel + kLanes, sum[m][1]);
  }
}

template <int kRows, bool kAdd, int kLines>
void tile_of(int rows, const uint8_t* a, long stride, const uint8_t* w, int steps,
             const uint8_t* ahead, float* c) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return tile<kRows, kAdd, kLines>(a, stride, w, steps, ahead, c);
    tile_of<kRows - 1, kAdd, kLines>(rows, a, stride, w, steps, ahead, c);
  }
}

// Memory of the calling thread that grows and stays: allocating megabytes anew in every call would
// fault in every page of them.
template <class T, int kWhich = 0>
T* scratch(size_t count) {
  thread_local std::vector<uint8_t> memory;
  const size_t bytes = count * sizeof(T) + 128;
  if (memory.size() < bytes) memory.resize(bytes + bytes / 2);
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
}

// Steps of grouped weights as bfloat16, each rounded once from its 8 bits times the scale.
// Meanwhile what lies `ahead` bytes after them is brought near.
inline const uint8_t* expanded(const uint8_t* packed, int steps, size_t ahead) {
  bf16* panel = scratch<bf16, 10>(size_t(steps) * kPanel * 2);
  bf16* out = panel;
  for (int group = 0; group < steps / kTileSteps; group++, packed += kGroupBytes) {
    const bf16* scales = reinterpret_cast<const bf16*>(packed);
    F16 scale[4];
    for (int i = 0; i < 4; i++)
      scale[i] = doubled(load_bf16(scales + i / 2 * kLanes), i % 2);
    const int8_t* from = reinterpret_cast<const int8_t*>(packed + kPanel * 2);
    for (int step = 0; step < kTileSteps; step++, from += kPanel * 2, out += kPanel * 2) {
      _mm_prefetch((const char*)from + ahead, _MM_HINT_T0);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        store_bf16(out + i * kLanes, load_int8(from + i * kLanes) * scale[i]);
    }
  }
  return reinterpret_cast<const uint8_t*>(panel);
}

#if defined(JAXSERVE_AMX)

template <bool kTwo>
void amx_tile(const uint8_t* a, long stride, const uint8_t* w, int steps, uint8_t* c) {
  constexpr long kRow = kPanel * 4, kTileBytes = kTileSteps * kStepBytes;
  tile_zero<0>();
  tile_zero<1>();
  if (kTwo) {
    tile_zero<2>();
    tile_zero<3>();
  }
  for (int s = 0; s < steps; s += kTileSteps) {
    const uint8_t *b = w + s * kPanelStep, *x = a + s * kStepBytes;
    for (int i = 0; i < kTileSteps * 2; i++)
      _mm_prefetch((const char*)b + 4096 + i * kTileBytes, _MM_HINT_T0);
    tile_load<4>(x, stride);
    tile_load<6>(b, kPanelStep);
    tile_load<7>(b + 64, kPanelStep);
    tile_dot_bf16<0, 4, 6>();
    tile_dot_bf16<1, 4, 7>();
    if constexpr (kTwo) {
      tile_load<5>(x + 16 * stride, stride);
      tile_dot_bf16<2, 5, 6>();
      tile_dot_bf16<3, 5, 7>();
    }
  }
  tile_store<0>(c, kRow);
  tile_store<1>(c + 64, kRow);
  if (kTwo) {
    tile_store<2>(c + 16 * kRow, kRow);
    tile_store<3>(c + 16 * kRow + 64, kRow);
  }
}

inline void amx_shapes(int first, int second) {
  TileShapes shapes;
  for (int tile : {0, 1, 4}) shapes.set(tile, first);
  for (int tile : {2, 3, 5}) shapes.set(tile, second);
  for (int tile : {6, 7}) shapes.set(tile, 16);
  tile_shapes(shapes);
}

// Rows times one panel; 32 rows at a time, the last ones with smaller tiles.
template <class Finish>
void panel_product(const Rows& rows, const uint8_t* w, int steps, float* c, const Finish& finish) {
  for (int m = 0; m < rows.count; m += 32) {
    const int left = rows.count - m, first = std::min(left, 16);
    const int second = std::max(0, std::min(left - 16, 16));
    if (m == 0 || left < 32) amx_shapes(first, second);
    const uint8_t* a = rows.data + m * rows.stride;
    uint8_t* out = reinterpret_cast<uint8_t*>(c);
    if (second) {
      amx_tile<true>(a, rows.stride, w, steps, out);
    } else {
      amx_tile<false>(a, rows.stride, w, steps, out);
    }
    finish(m, m + first + second, c);
  }
}
template <class Finish>
void grouped_product(const Rows& rows, const uint8_t* packed, int steps, float* c,
                     const Finish& finish) {
  const size_t panel_bytes = size_t(steps / kTileSteps) * kGroupBytes;
  panel_product(rows, expanded(packed, steps, panel_bytes), steps, c, finish);
}
inline void panels_done() { tile_release(); }

#else

// Some steps of the inputs: all of them at once, or one part after the other.
struct Steps {
  int begin, count;
  bool first, last;

  Steps(int begin, int most, int all)
      : begin(begin), count(std::min(most, all - begin)), first(begin == 0),
        last(begin + count == all) {}
};

// In how many parts of at most `kTileRows` rows meet a panel.
inline int row_parts(const Rows& rows) { return (rows.count + kTileRows - 1) / kTileRows; }

template <bool kAdd>
void part_product(const Rows& some, const Steps& steps, const uint8_t* w, const uint8_t* ahead,
                  bool alone, float* sums) {
  const auto some_tile = alone ? tile_of<kTileRows, kAdd, 2> : tile_of<kTileRows, kAdd, 1>;
  some_tile(some.count, some.data + steps.begin * kStepBytes, some.stride, w, steps.count, ahead,
            sums);
}

// c [M, 32] += the rows times some steps of a panel; the rows in equal parts of at most `kTileRows`.
// Each part is finished as soon as it is complete: what its results miss in the cache is fetched
// while the next part is computed.  As many bytes as the steps have are brought near from `next` on
// meanwhile, all by one part or half by each of two.
template <class Finish>
void block_product(const Rows& rows, const Steps& steps, const uint8_t* w, const uint8_t* next,
                   float* c, const Finish& finish) {
  const int parts = row_parts(rows);
  for (int part = 0; part < parts; part++) {
    const Rows some = rows.part(part, parts);
    const uint8_t* ahead = next && part < 2 ? next + size_t(part) * steps.count * 64 : nullptr;
    float* sums = c + some.first * kPanel;
    const auto product = steps.first ? part_product<false> : part_product<true>;
    product(some, steps, w, ahead, parts == 1, sums);
    if (steps.last) finish(some.first, some.first + some.count, sums);
  }
}

// Rows times one panel.  Few rows wait for memory: one part of them reads a panel as a stream, two
// or three take turns at pieces that stay in L1.  Many wait for arithmetic: a panel is brought near
// while the one before it is used.
template <class Finish>
void panel_product(const Rows& rows, const uint8_t* w, int steps, float* c, const Finish& finish) {
  const int parts = row_parts(rows);
  const bool turns = parts == 2 || parts == 3;
  const int most = turns ? kNearSteps : kBlockSteps;
  const int distance = parts == 1 ? kNearBytes : (turns ? most : steps) * kPanelStep;
  for (int s = 0; s < steps; s += most) {
    const uint8_t* block = w + size_t(s) * kPanelStep;
    block_product(rows, Steps(s, most, steps), block, block + distance, c, finish);
  }
}

// The same of grouped weights, expanded a few groups at a time: what L1 holds.
template <class Finish>
void grouped_product(const Rows& rows, const uint8_t* packed, int steps, float* c,
                     const Finish& finish) {
  constexpr int kSteps = 4 * kTileSteps;
  const size_t panel_bytes = size_t(steps / kTileSteps) * kGroupBytes;
  for (int s = 0; s < steps; s += kSteps) {
    const Steps some(s, kSteps, steps);
    const uint8_t* groups = packed + size_t(s / kTileSteps) * kGroupBytes;
    block_product(rows, some, expanded(groups, some.count, panel_bytes), nullptr, c, finish);
  }
}
inline void panels_done() {}

#endif

// Results of rows [first, last) and one panel: lane group `half` of row m.
struct PanelValues {
  int panel, first, last;
  const float* sums;

  F16 operator()(int m, int half) const {
    return load(sums + (m - first) * kPanel + half * kLanes);
  }
};

constexpr long kBlockBytes = 256 << 10;  // of rows that stay in L2 while panels pass

// Calls finish(values, worker) for some rows of a panel at a time.
template <class Finish>
void product(xla::ffi::ThreadPool& pool, const Rows& rows, const Weights& weights,
             const Finish& finish) {
  const int blocks = int((rows.count * rows.stride + kBlockBytes - 1) / kBlockBytes);
  Team::instance().runs(pool, weights.panels(), [&](int begin, int end, int worker) {
    float* sums = scratch<float, 1>(size_t(rows.count) * kPanel);
    for (int block = 0; block < blocks; block++) {
      const Rows some = rows.part(block, blocks);
      for (int p = begin; p < end; p++) {
        const auto finish_rows = [&](int first, int last, const float* values) {
          const int base = some.first;
          finish(PanelValues{p, base + first, base + last, values}, worker);
        };
        if (weights.grouped) {
          grouped_product(some, weights.panel(p), weights.steps, sums, finish_rows);
        } else {
          panel_product(some, weights.panel(p), weights.steps, sums, finish_rows);
        }
      }
    }
    panels_done();
  });
}

}  // namespace jaxserve
