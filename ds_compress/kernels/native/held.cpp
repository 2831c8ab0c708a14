// Entries that a bit string holds: read out of a tensor, and put back.

#include "calls.h"
#include "masks.h"

namespace {

// The first `count` entries of x [n] that are held; x[0] where there are no more.
template <class Entry>
void gather(const Entry* x, int64_t n, const uint8_t* packed, int64_t count, Entry* out) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        const uint64_t word = word_at(packed, i, n);
        if (found + __builtin_popcountll(word) > count) {
            for_each(word, [&](int j) {
                if (found < count) out[found++] = x[i + j];
            });
            return;
        }
        for_each(word, [&](int j) { out[found++] = x[i + j]; });
    }
    for (; found < count; ++found) out[found] = x[0];
}

// By the stores of vectors: compilers make of a short memset, whose length they know, an instruction that takes long to
// start.
template <class Entry>
void zero(Entry* y, int64_t width) {
    float* floats = reinterpret_cast<float*>(y);
    if (width < WORD) std::memset(y, 0, width * sizeof(Entry));
    else for (int64_t i = 0; i < static_cast<int64_t>(WORD * sizeof(Entry) / 4); i += LANES) keep(Floats{}, floats + i);
}

// `values` [count] at the entries of y [n] that are held, in their order, and zeros; those that find no place are left
// out.
template <class Entry>
void scatter(const Entry* values, int64_t count, const uint8_t* packed, int64_t n, Entry* y) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        const uint64_t word = word_at(packed, i, n);
        const int64_t width = n - i < WORD ? n - i : WORD;
        zero(y + i, width);
        if (found + __builtin_popcountll(word) > count) {
            for_each(word, [&](int j) {
                if (found < count) y[i + j] = values[found++];
            });
        } else {
            for_each(word, [&](int j) { y[i + j] = values[found++]; });
        }
    }
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
    BY_WORDS(gather##BITS)                                                                                           \
    BY_WORDS(scatter##BITS)

extern "C" {

HELD(16)
HELD(32)
HELD(64)

}  // extern "C"
