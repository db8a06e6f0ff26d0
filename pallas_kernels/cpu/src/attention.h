// Attention of rows to one sequence's keys in the paged cache, and the writing of cells.
//
// Pages are [pages, kv_heads, keys then values]: keys as [head_dim / 2, page_size, 2], values as
// [page_size / 2, head_dim, 2].  A register then holds one pair of dimensions of 16 keys, or one
// pair of tokens of 16 dimensions of their values, which is what a product of pairs wants of both
// products of attention.
//
// Keys are visited in blocks of 64 cut at fixed positions with a running softmax
// (FlashAttention, arXiv:2205.14135).  Decode and chunk rows run the same code, in which a row
// never meets another one, so neither neighbours nor chunk borders can change a bit of a result.
#pragma once
#include <cfloat>
#include <cmath>
#include <limits>

#include "rows.h"

namespace jaxserve {

constexpr int kBlock = 64;          // keys at once
constexpr int kGroups = kBlock / kLanes;
constexpr float kInfinity = std::numeric_limits<float>::infinity(), kLog2E = 1.44269504089f;

struct Pages {
  bf16* cells;
  int kv_heads, page_size, head_dim;

  long head_size() const { return 2L * page_size * head_dim; }
  bf16* keys(int page, int head) const {
    return cells + (long(page) * kv_heads + head) * head_size();
  }
  bf16* values(int page, int head) const { return keys(page, head) + page_size * head_dim; }
};

struct Softmax {
  float scale, soft_cap;  // no cap if 0
  int window;             // all keys if 0
};

// Up to 64 keys of one head and their values, 16 by 16; groups beyond the last repeat it.
struct Block {
  const bf16 *keys[kGroups], *values[kGroups];
  int start, count;

  Block(const Pages& pages, const int* table, int head, int start, int length)
      : start(start), count(std::min(kBlock, length - start)) {
    for (int g = 0; g < kGroups; g++) {
      const int t = start + std::min(g, (count - 1) / kLanes) * kLanes;
      const int page = table[t / pages.page_size], in_page = t % pages.page_size;
      keys[g] = pages.keys(page, head) + in_page * 2;
      values[g] = pages.values(page, head) + in_page * pages.head_dim;
    }
  }
};

#if defined(__AVX512F__)
constexpr int kScoreRows = 6, kOutGroups = 4;   // 24 accumulators
#else
constexpr int kScoreRows = 1, kOutGroups = 4;
#endif

// The keys of `next` are brought near meanwhile: pages lie anywhere, so no hardware would guess them.
struct Visit {
  const Block& block;
  const Block* next;
  int seen;  // the first keys of the block, up to the last that any of the rows sees
  int head_dim, page_size;
};

// out [kRows, 64] = q [kRows, head_dim] times the block's first 16 * kWide keys.
template <int kRows, int kWide>
void score(const bf16* q, const Visit& visit, float* out) {
  const int head_dim = visit.head_dim, page_size = visit.page_size;
  F16 sums[kRows][kWide];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int g = 0; g < kWide; g++) sums[r][g] = zero_f();
  for (int d = 0; d < head_dim; d += 2) {
    Packed k[kWide];
#pragma GCC unroll 4
    for (int g = 0; g < kWide; g++) k[g] = load_packed(visit.block.keys[g] + d * page_size);
    if (visit.next) {
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; g++)
        _mm_prefetch((const char*)(visit.next->keys[g] + d * page_size), _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const Packed x = all_packed(q + r * head_dim + d);
#pragma GCC unroll 4
      for (int g = 0; g < kWide; g++) sums[r][g] = dot(sums[r][g], x, k[g]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int g = 0; g < kWide; g++) store(out + r * kBlock + g * kLanes, sums[r][g]);
}

// out [kRows, 16 * kWide of head_dim] = itself times `decay` + p [kRows, 64] times the block's
// values.  The upper element of the last pair is no part of the sequence if the count is odd, and
// may be anything.
template <int kRows, int kWide>
void gather_values(const bf16* p, const float* decay, const Visit& visit, int column, float* out) {
  const int head_dim = visit.head_dim, count = visit.seen;
  F16 sums[kRows][kWide];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int g = 0; g < kWide; g++)
      sums[r][g] = load(out + r * head_dim + column + g * kLanes) * all(decay[r]);
  auto step = [&](int pair, bool half) {
    const long at = (pair % 8) * head_dim * 2 + column * 2;
    Packed v[kWide];
#pragma GCC unroll 4
    for (int g = 0; g < kWide; g++) {
      v[g] = load_packed(visit.block.values[pair / 8] + at + g * kLanes * 2);
      if (half) v[g] = low_half(v[g]);
      if (visit.next)
        _mm_prefetch((const char*)(visit.next->values[pair / 8] + at + g * kLanes * 2),
                     _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const Packed x = all_packed(p + r * kBlock + pair * 2);
#pragma GCC unroll 4
      for (int g = 0; g < kWide; g++) sums[r][g] = dot(sums[r][g], x, v[g]);
    }
  };
  for (int pair = 0; pair < count / 2; pair++) step(pair, false);
  if (count % 2) step(count / 2, true);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int g = 0; g < kWide; g++) store(out + r * head_dim + column + g * kLanes, sums[r][g]);
}

inline F16 cap(F16 x, float bound) {  // bound * tanh(x / bound)
  const F16 e = exp(x * all(2.f / bound));
  const F16 tanh = all(1.f) - all(2.f) / (e + all(1.f));
  return all(bound) * tanh;
}

struct alignas(64) RowState {
  float total[kLanes];  // sums of the exponentials, lane by lane
  float most;           // running maximum of the logits, which are to base 2
  int first, last;      // keys it sees: [first, last)

  bool sees_all(const Block& block) const {
    return first <= block.start && last >= block.start + kBlock && block.count == kBlock;
  }
};

// Scores of 16 keys to logits to base 2, those of keys that the row does not see to -infinity.
inline F16 logits_of(F16 x, int t, int end, const Softmax& softmax, const RowState& state) {
  if (softmax.soft_cap > 0) {
    x = cap(x * all(softmax.scale), softmax.soft_cap) * all(kLog2E);
  } else {
    x = x * all(softmax.scale * kLog2E);
  }
  end = std::min(state.last, end) - t;
  const int begin = state.first - t;
  if (end < kLanes) x = first(std::max(end, 0), x, all(-kInfinity));
  if (begin > 0) x = first(std::min(begin, kLanes), all(-kInfinity), x);
  return x;
}

// Some rows of one block with their running softmax.  Rows are independent and nothing branches on
// their values, so that the processor works on several at a time.
template <int kRows, int kWide>
void attend_block(const bf16* q, const Visit& visit, const Softmax& softmax, RowState* states,
                  float* out) {
  alignas(64) float scores[kRows * kBlock];
  alignas(64) bf16 weights[kRows * kBlock];
  float decay[kRows];
  const Block& block = visit.block;
  score<kRows, kWide>(q, visit, scores);
  bool plain = softmax.soft_cap == 0;
  for (int r = 0; r < kRows; r++) plain &= states[r].sees_all(block);
  const F16 scale = all(softmax.scale * kLog2E);
  for (int r = 0; r < kRows; r++) {
    const float* row = scores + r * kBlock;
    RowState& state = states[r];
    F16 x[kWide];
    if (plain) {
#pragma GCC unroll 4
      for (int g = 0; g < kWide; g++) x[g] = load(row + g * kLanes) * scale;
    } else {
#pragma GCC unroll 4
      for (int g = 0; g < kWide; g++)
        x[g] = logits_of(load(row + g * kLanes), block.start + g * kLanes,
                         block.start + block.count, softmax, state);
    }
    F16 most = x[0];
#pragma GCC unroll 4
    for (int g = 1; g < kWide; g++) most = max(x[g], most);
    // Finite even where nothing was seen yet, so that its difference to -infinity is -infinity.
    most = max(all(-FLT_MAX), max(all(state.most), largest_everywhere(most)));
    const F16 factor = exp2(all(state.most) - most);
    store_first(&state.most, most);
    store_first(decay + r, factor);
    F16 total = load(state.total) * factor;
#pragma GCC unroll 4
    for (int g = 0; g < kWide; g++) {
      const F16 p = exp2(x[g] - most);
      total = total + p;
      store_bf16(weights + r * kBlock + g * kLanes, p);
    }
    store(state.total, total);
  }
  int column = 0;
  for (; column + kOutGroups * kLanes <= visit.head_dim; column += kOutGroups * kLanes)
    gather_values<kRows, kOutGroups>(weights, decay, visit, column, out);
  for (; column < visit.head_dim; column += kLanes)
    gather_values<kRows, 1>(weights, decay, visit, column, out);
}

template <int kRows, int kWide, class... Arguments>
void attend_groups(int groups, const Arguments&... arguments) {
  if constexpr (kWide > 0) {
    if (groups == kWide) return attend_block<kRows, kWide>(arguments...);
    attend_groups<kRows, kWide - 1>(groups, arguments...);
  }
}

template <int kRows, class... Arguments>
void attend_rows(int rows, int groups, const Arguments&... arguments) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return attend_groups<kRows, kGroups>(groups, arguments...);
    attend_rows<kRows - 1>(rows, groups, arguments...);
  }
}

// Some rows of one sequence for each of some neighbouring KV heads.
struct Query {
  const bf16* q;        // head h at q + h * head_stride, [rows, head_dim]
  long head_stride;
  int rows, first_head, heads;
};

// out [heads, rows, head_dim], not divided by the states' totals yet.  `states` [heads, rows] say
// what each row sees.  All heads of a block are visited together: they are one piece of memory.
inline void attend(const Query& query, const Pages& pages, const int* table, int length,
                   const Softmax& softmax, RowState* states, float* out) {
  const int rows = query.rows, head_dim = pages.head_dim;
  int low = length, high = 0;
  for (int r = 0; r < rows; r++) {
    low = std::min(low, states[r].first);
    high = std::max(high, states[r].last);
  }
  memset(out, 0, sizeof(float) * query.heads * rows * head_dim);
  const int parts = (rows + kScoreRows - 1) / kScoreRows;
  const int begin = low / kBlock * kBlock, end_head = query.first_head + query.heads;
  Block block(pages, table, query.first_head, begin, length);
  for (int start = begin; start < high; start += kBlock) {
    for (int head = query.first_head; head < end_head; head++) {
      const bool last_head = head + 1 == end_head;
      const int then = last_head ? start + kBlock : start;
      const bool more = then < high;
      const Block next = more ? Block(pages, table, last_head ? query.first_head : head + 1, then,
                                      length)
                              : block;
      const int at = (head - query.first_head) * rows;
      const Block* ahead = more ? &next : nullptr;  // for the first part that sees any of the block
      for (int part = 0; part < parts; part++) {
        const int first = rows * part / parts, count = rows * (part + 1) / parts - first;
        int seen = 0;
        for (int r = first; r < first + count; r++)
          seen = std::max(seen, std::min(states[r].last - start, block.count));
        if (seen <= 0) continue;
        attend_rows<kScoreRows>(count, (seen + kLanes - 1) / kLanes,
                                query.q + head * query.head_stride + first * head_dim,
                                Visit{block, ahead, seen, head_dim, pages.page_size}, softmax,
                                states + at + first, out + (at + first) * head_dim);
        ahead = nullptr;
      }
      block = next;
    }
  }
}

// Writes one token's key of one head into its cell; `key` and `value` are float32 [head_dim].
inline void write_cell(const Pages& pages, int cell, int head, const float* key,
                       const float* value) {
  const int page = cell / pages.page_size, t = cell % pages.page_size, dim = pages.head_dim;
  alignas(64) bf16 rounded[2][kLanes];
  bf16 *keys = pages.keys(page, head), *values = pages.values(page, head);
  for (int d = 0; d < dim; d += kLanes) {
    store_bf16(rounded[0], load(key + d));
    store_bf16(rounded[1], load(value + d));
    for (int i = 0; i < kLanes; i += 2)
      memcpy(keys + ((d + i) / 2 * pages.page_size + t) * 2, rounded[0] + i, 4);
    for (int i = 0; i < kLanes; i++)
      values[(t / 2 * dim + d + i) * 2 + t % 2] = rounded[1][i];
  }
}

// x rotated by half (arXiv:2104.09864); cos and sin are [head_dim / 2].
inline void rotate(const float* x, const float* cos, const float* sin, int dim, float* out) {
  const int half = dim / 2;
  for (int d = 0; d < half; d += kLanes) {
    const int left = half - d;
    const F16 a = load_some(x + d, left), b = load_some(x + half + d, left);
    const F16 c = load_some(cos + d, left), s = load_some(sin + d, left);
    store_some(out + d, left, a * c - b * s);
    store_some(out + half + d, left, b * c + a * s);
  }
}

}  // namespace jaxserve
