// The operations as XLA custom calls; what they compute is said where Python calls them.
#include <algorithm>
#include <cfloat>
#include <vector>

#include "ask.h"
#include "attention.h"
#include "check.h"
#include "rows.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;
using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

template <class T>
T* data(const Buffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}
template <class T>
T* data(Result& result) {
  return static_cast<T*>(result->untyped_data());
}
int dim(const Buffer& buffer, int axis) { return int(buffer.dimensions()[axis]); }

// Rows to compute: those of x, or fewer if `used`, s32[], says so.  Nothing is written for others.
int used_rows(const Buffer& x, const Buffer& used) {
  return std::max(0, std::min(dim(x, 0), *data<const int32_t>(used)));
}

Weights weights_of(const Buffer& packed, int outputs, int inputs) {
  Weights weights;
  weights.data = data<const uint8_t>(packed);
  weights.outputs = outputs;
  weights.inputs = inputs;
  weights.grouped = packed.dimensions().size() == 3;
  weights.steps = dim(packed, 1) * (weights.grouped ? kTileSteps : 1);
  return weights;
}

Rows normed(ffi::ThreadPool& pool, const Buffer& x, const Buffer& used, const Buffer& gain,
            const Weights& weights, float eps) {
  const int size = dim(x, 1);
  const float* rows = data<const float>(x);
  const bf16* scale = data<const bf16>(gain);
  return prepare(pool, used_rows(x, used), weights, [=](int m) {
    return NormedRow(rows + long(m) * size, scale, size, eps);
  });
}

// out [M, N] = values, plus residual if there is one.
void store_product(ffi::ThreadPool& pool, const Rows& rows, const Weights& weights,
                   const float* residual, float* out) {
  const int width = weights.outputs;
  product(pool, rows, weights, [=](const PanelValues& values, int) {
            for (int half = 0; half < 2; half++) {
              const int n = values.panel * kPanel + half * kLanes, left = width - n;
              if (left <= 0) break;
              for (int m = values.first; m < values.last; m++) {
                const long at = long(m) * width + n;
                F16 y = values(m, half);
                if (residual) y = y + load_some(residual + at, left);
                store_some(out + at, left, y);
              }
            }
          });
}

ffi::Error Linear(ffi::ThreadPool pool, Buffer x, Buffer used, Buffer w, Result out) {
  const Weights weights = weights_of(w, int(out->dimensions()[1]), dim(x, 1));
  const Rows rows = prepare(pool, data<const bf16>(x), used_rows(x, used), weights);
  store_product(pool, rows, weights, nullptr, data<float>(out));
  return ffi::Error::Success();
}

ffi::Error LinearAdd(ffi::ThreadPool pool, Buffer x, Buffer used, Buffer w, Buffer residual,
                     Result out) {
  const Weights weights = weights_of(w, int(out->dimensions()[1]), dim(x, 1));
  const Rows rows = prepare(pool, data<const bf16>(x), used_rows(x, used), weights);
  store_product(pool, rows, weights, data<const float>(residual), data<float>(out));
  return ffi::Error::Success();
}

ffi::Error NormLinear(ffi::ThreadPool pool, Buffer x, Buffer used, Buffer gain, Buffer w,
                      Result out, float eps) {
  const Weights weights = weights_of(w, int(out->dimensions()[1]), dim(x, 1));
  const Rows rows = normed(pool, x, used, gain, weights, eps);
  store_product(pool, rows, weights, nullptr, data<float>(out));
  return ffi::Error::Success();
}

// Panels hold 16 gates, then the 16 ups that belong to them.
ffi::Error NormSwiglu(ffi::ThreadPool pool, Buffer x, Buffer used, Buffer gain, Buffer w,
                      Result out, float eps) {
  const int width = int(out->dimensions()[1]);
  const Weights weights = weights_of(w, dim(w, 0) * kPanel, dim(x, 1));
  const Rows rows = normed(pool, x, used, gain, weights, eps);
  bf16* hidden = data<bf16>(out);
  product(pool, rows, weights, [=](const PanelValues& values, int) {
            const int n = values.panel * kLanes;
            for (int m = values.first; m < values.last; m++) {
              const F16 gate = values(m, 0), up = values(m, 1);
              const F16 y = gate * up / (all(1.f) + exp(zero_f() - gate));
              store_some(hidden + long(m) * width + n, width - n, y);
            }
          });
  return ffi::Error::Success();
}

// The largest value of some columns of a row, lane by lane, and the lowest column that has it.
struct Best {
  F16 value = all(-kInfinity);
  I16 column = all_i(0);
  F16 odd = zero_f();  // NaN once a value was

  void see(F16 x, int first_column) {
    alignas(64) static constexpr int32_t kLane[] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                    8, 9, 10, 11, 12, 13, 14, 15};
    const I16 columns = load(kLane) + all_i(first_column);
    column = where_less(value, x, columns, min_where_equal(value, x, column, columns));
    value = where_less(value, x, x, value);
    const F16 clipped = max(all(-FLT_MAX), x);  // keeps NaN and +infinity
    odd = odd + (clipped - clipped);
  }
};

ffi::Error NormArgmax(ffi::ThreadPool pool, Buffer x, Buffer used, Buffer gain, Buffer w,
                      Buffer allowed, Result token, Result most, float eps, int32_t outputs) {
  // A panel's outputs are those of one word of the bits; without words all are allowed.
  static_assert(kPanel == 32);
  const int words = dim(allowed, 1);
  const int32_t* bits = data<int32_t>(allowed);
  const Weights weights = weights_of(w, outputs, dim(x, 1));
  const Rows rows = normed(pool, x, used, gain, weights, eps);
  const int count = rows.count, workers = Team::workers(pool);
  Best* best = scratch<Best, 5>(size_t(workers) * count);
  std::fill(best, best + size_t(workers) * count, Best());
  product(pool, rows, weights, [=](const PanelValues& values, int worker) {
    for (int half = 0; half < 2; half++) {
      const int n = values.panel * kPanel + half * kLanes, left = outputs - n;
      if (left <= 0) break;
      for (int m = values.first; m < values.last; m++) {
        F16 y = values(m, half);
        if (left < kLanes) y = first(left, y, all(-kInfinity));
        if (words > 0) {
          const uint32_t word = bits[size_t(m) * words + values.panel];
          if (word != ~0u) y = where_bits(word >> (half * kLanes), y, all(-kInfinity));
        }
        best[size_t(worker) * count + m].see(y, n);
      }
    }
  });
  std::fill_n(data<int32_t>(token), dim(x, 0), 0);
  std::fill_n(data<float>(most), dim(x, 0), 0.f);
  for (int m = 0; m < count; m++) {
    float value = -kInfinity;
    int32_t column = outputs;
    bool finite = true;
    for (int worker = 0; worker < workers; worker++) {
      const Best& part = best[size_t(worker) * count + m];
      alignas(64) float values[kLanes];
      alignas(64) int32_t columns[kLanes];
      store(values, part.value);
      store(columns, part.column);
      finite &= sum(part.odd) == 0.f;
      for (int i = 0; i < kLanes; i++) {
        if (values[i] > value || (values[i] == value && columns[i] < column)) {
          value = values[i];
          column = columns[i];
        }
      }
    }
    data<int32_t>(token)[m] = column < outputs ? column : 0;
    data<float>(most)[m] = finite ? value : std::numeric_limits<float>::quiet_NaN();
  }
  return ffi::Error::Success();
}

void grouped_row(const Weights& weights, int n, int inputs, float* row) {
  constexpr int kInputs = kTileSteps * 2;
  for (int k = 0; k < inputs; k++) {
    const uint8_t* group = weights.panel(n / kPanel) + k / kInputs * kGroupBytes;
    const float scale = to_float(reinterpret_cast<const bf16*>(group)[n % kPanel]);
    const int at = kPanel * 2 + (k % kInputs / 2 * kPanel + n % kPanel) * 2 + k % 2;
    row[k] = float(int8_t(group[at])) * scale;
  }
  for (int k = 0; k < inputs; k += kLanes) {  // rounded, as the weights of every product are
    alignas(64) bf16 rounded[kLanes];
    store_bf16(rounded, load_some(row + k, inputs - k));
    store_some(row + k, inputs - k, load_bf16(rounded));
  }
}

void plain_row(const Weights& weights, int n, int inputs, float* row) {
  const uint8_t* at = weights.panel(n / kPanel) + n % kPanel * kStepBytes;
  for (int k = 0; k < inputs; k++)
    row[k] = to_float(reinterpret_cast<const bf16*>(at + size_t(k / 2) * kPanelStep)[k % 2]);
}

// out f32[M, K]: row `tokens[m]` of the weights, which are packed as [N, K].
ffi::Error WeightRows(ffi::ThreadPool pool, Buffer tokens, Buffer w, Result out,
                      int32_t outputs) {
  const int count = dim(tokens, 0), inputs = int(out->dimensions()[1]);
  const Weights weights = weights_of(w, outputs, inputs);
  Team::instance().each(pool, count, [&](int m) {
    const int n = std::max(0, std::min(data<const int32_t>(tokens)[m], outputs - 1));
    float* row = data<float>(out) + long(m) * inputs;
    (weights.grouped ? grouped_row : plain_row)(weights, n, inputs, row);
  });
  return ffi::Error::Success();
}

Pages pages_of(void* cells, const Buffer& like, int head_dim) {
  return {static_cast<bf16*>(cells), dim(like, 1), dim(like, 3) / head_dim, head_dim};
}

// Some query tokens of one sequence, for some of the KV heads.
struct Item {
  int seq, first_head, heads, first_row, tokens, first_position;
};

struct Work {
  Pages pages;
  const int32_t* tables;
  int table_size;
  const bf16* q;    // [kv_heads, rows, group, head_dim]
  bf16* out;        // [rows, kv_heads, group, head_dim]
  const float* sinks;
  int rows, group;
  Softmax softmax;

  void run(const Item& item) const {
    const int count = item.tokens * group, head_dim = pages.head_dim;
    RowState* states = scratch<RowState, 6>(item.heads * count);
    float* sums = scratch<float, 7>(size_t(item.heads) * count * head_dim);
    for (int i = 0; i < item.heads * count; i++) {
      const int position = item.first_position + i % count / group;
      const int first = softmax.window ? std::max(0, position - softmax.window + 1) : 0;
      states[i] = {{}, -kInfinity, first, position + 1};
      if (sinks) {
        states[i].most = sinks[(item.first_head + i / count) * group + i % group] * kLog2E;
        states[i].total[0] = 1.f;
      }
    }
    const Query query{q + long(item.first_row) * group * head_dim, long(rows) * group * head_dim,
                      count, item.first_head, item.heads};
    attend(query, pages, tables + long(item.seq) * table_size, item.first_position + item.tokens,
           softmax, states, sums);
    for (int i = 0; i < item.heads * count; i++) {
      const long row = item.first_row + i % count / group, head = item.first_head + i / count;
      bf16* to = out + ((row * pages.kv_heads + head) * group + i % group) * head_dim;
      const F16 share = all(1.f / sum(load(states[i].total)));
      for (int d = 0; d < head_dim; d += kLanes)
        store_bf16(to + d, load(sums + i * head_dim + d) * share);
    }
  }
};

constexpr int kItemRows = 48;  // of queries: few enough to stay near, enough to reuse the keys

// Work of rows [base, ...) that belong to sequences by cumulative counts; longest first.
void add_chunks(const int32_t* kv_lens, const int32_t* cu, int seqs, int base, int rows, int group,
                int heads, std::vector<Item>& items) {
  const int most = std::max(1, kItemRows / group);
  for (int s = 0; s < seqs; s++) {
    const int count = std::min(cu[s + 1], rows - base) - cu[s];
    if (count <= 0 || kv_lens[s] <= 0) continue;
    for (int end = count; end > 0; end -= most) {
      const int begin = std::max(0, end - most);
      for (int head = 0; head < heads; head++)
        items.push_back(
            {s, head, 1, base + cu[s] + begin, end - begin, kv_lens[s] - count + begin});
    }
  }
}

// Work of one token of each sequence.  All heads of a page in one item, unless that leaves too few
// of them.
void add_decodes(const int32_t* lens, int seqs, int heads, int threads, std::vector<Item>& items) {
  const int live = int(std::count_if(lens, lens + seqs, [](int n) { return n > 0; }));
  const int together = live >= 4 * threads ? heads : 1;
  for (int s = 0; s < seqs; s++)
    for (int h = 0; h < heads && lens[s] > 0; h += together)
      items.push_back({s, h, together, s, 1, lens[s] - 1});
}

template <class Before>
void run_items(ffi::ThreadPool& pool, const Work& work, const std::vector<Item>& items,
               const Before& before) {
  Team::instance().each(pool, int(items.size()), [&](int i) {
    before(items[i]);
    work.run(items[i]);
  });
}

Softmax softmax_of(float scale, float soft_cap, int32_t window) {
  return {scale, soft_cap, window};
}

// Ragged rows that are rotated and written already; q bf16[rows, q_heads, head_dim].
ffi::Error Attention(ffi::ThreadPool pool, Buffer q, Buffer cells, Buffer tables, Buffer kv_lens,
                     Buffer cu_q_lens, ffi::RemainingArgs sinks, Result out, float scale, float soft_cap,
                     int32_t window) {
  const int rows = dim(q, 0), heads = dim(q, 1), head_dim = dim(q, 2), seqs = dim(kv_lens, 0);
  const Pages pages = pages_of(data<bf16>(cells), cells, head_dim);
  const int group = heads / pages.kv_heads, width = group * head_dim;
  bf16* by_head = scratch<bf16, 8>(size_t(rows) * heads * head_dim);
  for (int r = 0; r < rows; r++)
    for (int h = 0; h < pages.kv_heads; h++)
      memcpy(by_head + (long(h) * rows + r) * width,
             data<const bf16>(q) + (long(r) * pages.kv_heads + h) * width, width * sizeof(bf16));
  memset(data<bf16>(out), 0, size_t(rows) * heads * head_dim * sizeof(bf16));
  std::vector<Item> items;
  add_chunks(data<const int32_t>(kv_lens), data<const int32_t>(cu_q_lens), seqs, 0, rows, group,
            pages.kv_heads, items);
  const float* logits = sinks.size() ? data<const float>(*sinks.get<Buffer>(0)) : nullptr;
  run_items(pool,
            {pages, data<const int32_t>(tables), dim(tables, 1), by_head, data<bf16>(out), logits,
             rows, group, softmax_of(scale, soft_cap, window)},
            items, [](const Item&) {});
  return ffi::Error::Success();
}

ffi::Error Write(ffi::ThreadPool pool, Buffer k, Buffer v, Buffer slots, Buffer cells,
                 Result written) {
  const int rows = dim(k, 0), head_dim = dim(k, 2);
  const Pages pages = pages_of(written->untyped_data(), cells, head_dim);
  const int32_t* slot = data<const int32_t>(slots);
  for (int r = 0; r < rows; r++) {
    if (slot[r] < 0) continue;
    for (int h = 0; h < pages.kv_heads; h++) {
      const long at = (long(r) * pages.kv_heads + h) * head_dim;
      write_cell(pages, slot[r], h, data<const float>(k) + at, data<const float>(v) + at);
    }
  }
  return ffi::Error::Success();
}

// A whole layer's attention: rotate, write the cells, then attend.  The first rows are one decode
// token of each sequence, those after them chunk tokens by cumulative counts.
ffi::Error RotateWriteAttend(ffi::ThreadPool pool, Buffer qkv, Buffer used, Buffer cos, Buffer sin,
                             Buffer slots, Buffer tables, Buffer decode_lens, Buffer chunk_lens,
                             Buffer chunk_cu, Buffer cells, ffi::RemainingArgs sinks, Result out,
                             Result written, float scale, float soft_cap, int32_t window) {
  const int rows = dim(qkv, 0), parts = dim(qkv, 2), group = parts - 2, head_dim = dim(qkv, 3);
  const int seqs = dim(decode_lens, 0), half = head_dim / 2;
  const Pages pages = pages_of(written->untyped_data(), cells, head_dim);
  bf16* q = scratch<bf16, 8>(size_t(rows) * pages.kv_heads * group * head_dim);
  bf16* attended = data<bf16>(out);
  const int32_t* slot = data<const int32_t>(slots);

  auto clear_row = [&](int r) {
    const size_t size = size_t(pages.kv_heads) * group * head_dim;
    memset(attended + r * size, 0, size * sizeof(bf16));
  };
  auto prepare_row = [&](int r, int first_head, int heads) {
    const float* cosine = data<const float>(cos) + long(r) * half;
    const float* sine = data<const float>(sin) + long(r) * half;
    float* rotated = scratch<float, 9>(head_dim);
    for (int h = first_head; h < first_head + heads; h++) {
      const float* x = data<const float>(qkv) + (long(r) * pages.kv_heads + h) * parts * head_dim;
      for (int g = 0; g < group; g++) {
        rotate(x + g * head_dim, cosine, sine, head_dim, rotated);
        bf16* to = q + ((long(h) * rows + r) * group + g) * head_dim;
        for (int d = 0; d < head_dim; d += kLanes) store_bf16(to + d, load(rotated + d));
      }
      if (slot[r] < 0) continue;
      rotate(x + group * head_dim, cosine, sine, head_dim, rotated);
      write_cell(pages, slot[r], h, rotated, x + (group + 1) * head_dim);
    }
  };

  // Chunk rows see one another's keys, so all are written before any attends.  A decode row sees
  // no other's: whoever attends it writes it first, and its page is read once.
  const int32_t* lens = data<const int32_t>(decode_lens);
  const int count = used_rows(qkv, used), decode_rows = std::min(seqs, count);
  for (int r = 0; r < decode_rows; r++)
    if (lens[r] <= 0) clear_row(r);
  const int chunk_rows = count - decode_rows, row_parts = Team::workers(pool) * 4;
  Team::instance().each(pool, chunk_rows > 0 ? row_parts : 0, [&](int part) {
    const int end = int(long(chunk_rows) * (part + 1) / row_parts);
    for (int r = int(long(chunk_rows) * part / row_parts); r < end; r++) {
      clear_row(seqs + r);
      prepare_row(seqs + r, 0, pages.kv_heads);
    }
  });

  std::vector<Item> items;
  if (rows > seqs)
    add_chunks(data<const int32_t>(chunk_lens), data<const int32_t>(chunk_cu), seqs, seqs, rows,
              group, pages.kv_heads, items);
  add_decodes(lens, seqs, pages.kv_heads, int(pool.num_threads()), items);
  const float* logits = sinks.size() ? data<const float>(*sinks.get<Buffer>(0)) : nullptr;
  run_items(pool,
            {pages, data<const int32_t>(tables), dim(tables, 1), q, attended, logits, rows, group,
             softmax_of(scale, soft_cap, window)},
            items, [&](const Item& item) {
              if (item.first_row < seqs) prepare_row(item.first_row, item.first_head, item.heads);
            });
  return ffi::Error::Success();
}

// `after` only says when: once it is known.
ffi::Error Ask(Buffer whom, Buffer asks, Buffer token, Buffer after, Result words, Result stops) {
  ask(data<const int32_t>(whom), dim(asks, 0), int(words->dimensions()[1]),
      data<const int32_t>(asks), data<const int32_t>(token), data<int32_t>(words),
      data<int32_t>(stops));
  return ffi::Error::Success();
}

#define POOL Ctx<ffi::ThreadPool>()
#define IN Arg<Buffer>()
#define OUT Ret<Buffer>()
#define MORE RemainingArgs()
#define SOFTMAX Attr<float>("scale").Attr<float>("soft_cap").Attr<int32_t>("window")

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

// clang-format off
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_linear, Linear, ffi::Ffi::Bind().POOL.IN.IN.IN.OUT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_linear_add, LinearAdd, ffi::Ffi::Bind().POOL.IN.IN.IN.IN.OUT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_norm_linear, NormLinear,
    ffi::Ffi::Bind().POOL.IN.IN.IN.IN.OUT.Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_norm_swiglu, NormSwiglu,
    ffi::Ffi::Bind().POOL.IN.IN.IN.IN.OUT.Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_norm_argmax, NormArgmax,
    ffi::Ffi::Bind().POOL.IN.IN.IN.IN.IN.OUT.OUT.Attr<float>("eps").Attr<int32_t>("outputs"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_weight_rows, WeightRows,
    ffi::Ffi::Bind().POOL.IN.IN.OUT.Attr<int32_t>("outputs"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_attention, Attention,
    ffi::Ffi::Bind().POOL.IN.IN.IN.IN.IN.MORE.OUT.SOFTMAX);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_write, Write, ffi::Ffi::Bind().POOL.IN.IN.IN.IN.OUT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_rotate_write_attend, RotateWriteAttend,
    ffi::Ffi::Bind().POOL.IN.IN.IN.IN.IN.IN.IN.IN.IN.IN.MORE.OUT.OUT.SOFTMAX);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_ask, Ask, ffi::Ffi::Bind().IN.IN.IN.IN.OUT.OUT);
// clang-format on

// 0 if these kernels can be used in this process; asked once, after loading.
int jaxserve_problem() {
#if defined(JAXSERVE_AMX)
  if (!amx_allowed()) return 1;
#endif
  return products_are_right() ? 0 : 2;
}

#pragma GCC visibility pop
}  // extern "C"
}  // namespace jaxserve
