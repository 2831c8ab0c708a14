// The bytes of numbers, sorted by their place, as kernels/reference/planes.py specifies it.

#include "../native/calls.h"

namespace {

constexpr int64_t BLOCK = 1024;  // numbers that the nearest cache holds while each of their bytes is looked at

// planes [sizeof(Number), n]
template <class Number>
void sort(const Number* x, int64_t n, uint8_t* planes) {
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t count = n - start < BLOCK ? n - start : BLOCK;
        for (size_t place = 0; place < sizeof(Number); ++place) {
            uint8_t* to = planes + place * n + start;
            for (int64_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(x[start + i] >> (8 * place));
        }
    }
}

template <class Number>
void join(const uint8_t* planes, int64_t n, Number* y) {
    for (int64_t i = 0; i < n; ++i) {
        Number number = 0;
        for (size_t place = 0; place < sizeof(Number); ++place)
            number |= static_cast<Number>(static_cast<Number>(planes[place * n + i]) << (8 * place));
        y[i] = number;
    }
}

}  // namespace

#define PLANES(BITS)                                                                                                   \
    void sort_bytes##BITS(const uint##BITS##_t* x, int64_t n, uint8_t* planes) { sort(x, n, planes); }                 \
    void join_bytes##BITS(const uint8_t* planes, int64_t n, uint##BITS##_t* y) { join(planes, n, y); }                 \
    BY_WORDS(sort_bytes##BITS)                                                                                         \
    BY_WORDS(join_bytes##BITS)

extern "C" {

PLANES(16)
PLANES(32)
PLANES(64)

}  // extern "C"
