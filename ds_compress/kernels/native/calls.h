// How Python calls a function, see function.py: it gets a struct of its arguments, members of 8 bytes in the order that
// Python declares, and how many threads may work.

#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>

// Whether work(begin, end) returns true for all parts of [0, rows). This thread and others, up to `threads` in all, take one
// part each, a multiple of UNIT rows but for the last: so no byte of bits, and no scale of codes, belongs to two parts.
template <class F>
bool in_parallel(int64_t rows, int threads, const F& work) {
    constexpr int64_t UNIT = 128, MOST = 64;
    const int64_t units = (rows + UNIT - 1) / UNIT, parts = std::clamp<int64_t>(threads, 1, MOST);
    const int64_t share = std::max<int64_t>(1, (units + parts - 1) / parts) * UNIT;
    bool results[MOST];
    std::thread others[MOST];
    const auto run = [&](int64_t part) { results[part] = work(part * share, std::min(rows, (part + 1) * share)); };
    int64_t count = 1;
    for (; count * share < rows; ++count) {
        try {
            others[count] = std::thread(run, count);
        } catch (...) {  // no thread can be had
            run(count);
        }
    }
    run(0);
    for (int64_t i = 1; i < count; ++i)
        if (others[i].joinable()) others[i].join();
    return std::all_of(results, results + count, [](bool result) { return result; });
}
