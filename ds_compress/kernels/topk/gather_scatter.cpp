// Entries that a bit string holds: read out of a tensor, and put back.

#include "../native/calls.h"
#include "masks.h"

namespace {

// The first `count` entries of x [n] that are held; x[0] where there are no more.
template <class Entry>
void gather(const Entry* x, int64_t n, const uint8_t* packed, int64_t count, Entry* out) {
    const Entry* end = out + count;
    for (int64_t i = 0; i < n; i += WORD) {
        const uint64_t word = word_at(packed, i, n);
        if (end - out < __builtin_popcountll(word)) {
            for_each(word, [&](int j) { if (out < end) *out++ = x[i + j]; });
            return;
        }
        out = take(x + i, n - i, word, out, end);
    }
    while (out < end) *out++ = x[0];
}

// `values` [count] at the entries of y [n] that are held, in their order, and zeros; those that find no place are left
// out.
template <class Entry>
void scatter(const Entry* values, int64_t count, const uint8_t* packed, int64_t n, Entry* y) {
    const Entry* end = values + count;
    for (int64_t i = 0; i < n; i += WORD) values = spread(values, end, n - i, word_at(packed, i, n), y + i);
}

}  // namespace

#define HELD(BITS)                                                                                                   \
    void gather##BITS(const uint##BITS##_t* x, int64_t n, const uint8_t* packed, int64_t count,                      \
                      uint##BITS##_t* out) {                                                                         \
        gather(x, n, packed, count, out);                                                                            \
    }                                                                                                                \
    void scatter##BITS(const uint##BITS##_t* values, int64_t count, const uint8_t* packed, int64_t n,                \
                       uint##BITS##_t* y) {                                                                          \
        scatter(values, count, packed, n, y);                                                                        \
    }                                                                                                                \
    EXPORT(gather##BITS)                                                                                           \
    EXPORT(scatter##BITS)

extern "C" {

HELD(16)
HELD(32)
HELD(64)

}  // extern "C"
