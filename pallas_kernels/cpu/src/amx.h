// Tiles of Intel AMX, or the same arithmetic in plain C++ for tests on machines without them.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if !defined(JAXSERVE_EMULATE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxserve {

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int num_rows) {
    rows[tile] = uint8_t(num_rows);
    bytes[tile] = num_rows ? 64 : 0;
  }
};

#if defined(JAXSERVE_EMULATE_AMX)

struct Tiles {
  TileShapes shapes;
  alignas(64) uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

inline bool amx_allowed() { return true; }
inline void tile_shapes(const TileShapes& shapes) {
  tiles.shapes = shapes;
  memset(tiles.data, 0, sizeof tiles.data);
}
inline void tile_release() { tiles.shapes = TileShapes(); }
template <int T>
void tile_zero() {
  memset(tiles.data[T], 0, sizeof tiles.data[T]);
}
template <int T>
void tile_load(const void* p, long stride) {
  for (int r = 0; r < tiles.shapes.rows[T]; r++)
    memcpy(tiles.data[T][r], static_cast<const char*>(p) + r * stride, 64);
}
template <int T>
void tile_store(void* p, long stride) {
  for (int r = 0; r < tiles.shapes.rows[T]; r++)
    memcpy(static_cast<char*>(p) + r * stride, tiles.data[T][r], 64);
}
template <int C, int A, int B>
void tile_dot_bf16() {
  for (int m = 0; m < tiles.shapes.rows[C]; m++)
    for (int k = 0; k < tiles.shapes.rows[B]; k++)
      for (int n = 0; n < 16; n++) {
        float c, product[2];
        memcpy(&c, tiles.data[C][m] + 4 * n, 4);
        for (int i = 0; i < 2; i++) {
          uint32_t a = 0, b = 0;
          memcpy(reinterpret_cast<char*>(&a) + 2, tiles.data[A][m] + 4 * k + 2 * i, 2);
          memcpy(reinterpret_cast<char*>(&b) + 2, tiles.data[B][k] + 4 * n + 2 * i, 2);
          float fa, fb;
          memcpy(&fa, &a, 4);
          memcpy(&fb, &b, 4);
          product[i] = fa * fb;
        }
        c += product[0] + product[1];
        memcpy(tiles.data[C][m] + 4 * n, &c, 4);
      }
}
#else

// Linux gives a process its tiles on demand only.
inline bool amx_allowed() {
  constexpr long kRequest = 0x1023, kTileData = 18;
  static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return allowed;
}
// In assembly: the compiler's own intrinsics are macros that paste the tile's number as text.
inline void tile_shapes(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
}
inline void tile_release() { asm volatile("tilerelease"); }
template <int T>
void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
void tile_load(const void* p, long stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
void tile_store(void* p, long stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#endif

}  // namespace jaxserve
