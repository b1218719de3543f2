// The little that these tests need of a test framework.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>

namespace check {

inline int failures = 0;

// Call it on one thread at a time.
inline void fail(char const* file, int line, std::string const& what) {
  std::cerr << file << ":" << line << ": " << what << std::endl;
  if (++failures == 20) {
    std::cerr << "stopping after 20 failures" << std::endl;
    std::exit(1);
  }
}

// A number for reports: scripts read these lines, "count NAME VALUE".
inline void count(char const* name, uint64_t value) {
  std::printf("count %s %llu\n", name, static_cast<unsigned long long>(value));
}

inline int run(std::initializer_list<std::pair<char const*, void (*)()>> tests) {
  for (auto const& [name, test] : tests) {
    int before = failures;
    auto start = std::chrono::steady_clock::now();
    test();
    double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    std::printf("%s %s (%.0f ms)\n", failures == before ? "ok    " : "FAILED", name, ms);
    std::fflush(stdout);
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace check

#define CHECK_THAT(condition, ...)                 \
  do {                                             \
    if (!(condition)) {                            \
      std::ostringstream text;                     \
      text << #condition << ": " << __VA_ARGS__;   \
      check::fail(__FILE__, __LINE__, text.str()); \
    }                                              \
  } while (0)
#define CHECK(condition) CHECK_THAT(condition, "does not hold")
#define CHECK_EQ(a, b) CHECK_THAT((a) == (b), (a) << " and " << (b))
