// Byte shuffle, bit-identical to reference.py.

#include "../native/calls.h"

namespace {

constexpr int64_t BLOCK = 1024;  // numbers that the nearest cache holds while each of their bytes is looked at

// shuffled [sizeof(Number), n]
template <class Number>
void shuffle(const Number* x, int64_t n, uint8_t* shuffled) {
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t count = n - start < BLOCK ? n - start : BLOCK;
        for (size_t place = 0; place < sizeof(Number); ++place) {
            uint8_t* to = shuffled + place * n + start;
            for (int64_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(x[start + i] >> (8 * place));
        }
    }
}

template <class Number>
void unshuffle(const uint8_t* shuffled, int64_t n, Number* y) {
    for (int64_t i = 0; i < n; ++i) {
        Number number = 0;
        for (size_t place = 0; place < sizeof(Number); ++place)
            number |= static_cast<Number>(static_cast<Number>(shuffled[place * n + i]) << (8 * place));
        y[i] = number;
    }
}

}  // namespace

#define BYTE_SHUFFLE(BITS)                                                                                                   \
    void byte_shuffle##BITS(const uint##BITS##_t* x, int64_t n, uint8_t* shuffled) { shuffle(x, n, shuffled); }                 \
    void byte_unshuffle##BITS(const uint8_t* shuffled, int64_t n, uint##BITS##_t* y) { unshuffle(shuffled, n, y); }                 \
    EXPORT(byte_shuffle##BITS)                                                                                         \
    EXPORT(byte_unshuffle##BITS)

extern "C" {

BYTE_SHUFFLE(16)
BYTE_SHUFFLE(32)
BYTE_SHUFFLE(64)

}  // extern "C"
