// A question to the host in the middle of a program; see `ask.py`.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>

namespace jaxserve {

// `_Memory` of `ask.py`.
struct Host {
  std::atomic<void (*)(int32_t number)> answer;  // null once nobody answers any more
  int32_t* asks;
  int32_t* token;
  int32_t* words;
  int32_t* stops;
  int32_t stride;
  std::atomic<int32_t> active;  // questions that are being asked
};

// Asks for `rows` rows: words [rows, width] and stops [rows].  `whom` is the address of a host, low
// half first, and the number of the question.
inline void ask(const int32_t* whom, int rows, int width, const int32_t* asks, const int32_t* token,
                int32_t* words, int32_t* stops) {
  std::memset(words, 0xff, sizeof(int32_t) * size_t(rows) * width);
  std::memset(stops, 0, sizeof(int32_t) * rows);
  const uint64_t address = uint64_t(uint32_t(whom[1])) << 32 | uint32_t(whom[0]);
  Host* const host = reinterpret_cast<Host*>(address);
  if (host == nullptr) return;
  std::memcpy(host->asks, asks, sizeof(int32_t) * rows);
  std::memcpy(host->token, token, sizeof(int32_t) * rows);
  std::memset(host->stops, 0, sizeof(int32_t) * rows);
  host->active.fetch_add(1);
  const auto answer = host->answer.load();
  if (answer != nullptr) answer(whom[2]);
  host->active.fetch_sub(1);
  if (answer == nullptr) return;
  for (int m = 0; m < rows; m++) {
    if (!asks[m]) continue;
    stops[m] = host->stops[m];
    if (stops[m]) continue;
    std::memcpy(words + long(m) * width, host->words + long(m) * host->stride,
                sizeof(int32_t) * width);
  }
}

}  // namespace jaxserve
