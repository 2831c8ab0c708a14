// Bit strings: their bits set and listed, and the entries that they hold read out of a tensor, and put back.

#include "../native/calls.h"
#include "masks.h"

namespace {

// The first `count` entries of x [n] that are selected; x[0] where there are no more.
template <class Entry>
void gather(const Entry* x, int64_t n, const uint8_t* packed, int64_t count, Entry* out) {
    const Entry* end = out + count;
    for (int64_t i = 0; i < n; i += WORD) {
        const uint64_t word = load_word(packed, i, n);
        if (end - out < __builtin_popcountll(word)) {
            for_each(word, [&](int j) { if (out < end) *out++ = x[i + j]; });
            return;
        }
        out = compress(x + i, n - i, word, out, end);
    }
    while (out < end) *out++ = x[0];
}

// `values` [count] at the entries of y [n] that are selected, in their order, and zeros; those that find no place are left
// out.
template <class Entry>
void scatter(const Entry* values, int64_t count, const uint8_t* packed, int64_t n, Entry* y) {
    const Entry* end = values + count;
    for (int64_t i = 0; i < n; i += WORD) values = expand(values, end, n - i, load_word(packed, i, n), y + i);
}

}  // namespace

#define GATHER_SCATTER(BITS)                                                                                                   \
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

GATHER_SCATTER(16)
GATHER_SCATTER(32)
GATHER_SCATTER(64)

// Sets the bits `indices` [count] of the zeros `packed`; bit j of byte i belongs to entry 8 * i + j, of n. Returns the
// place of the first index that is none of an entry, or `count`.
int64_t set_bits(const int64_t* indices, int64_t count, uint8_t* packed, int64_t n) {
    for (int64_t i = 0; i < count; ++i) {
        if (indices[i] < 0 || indices[i] >= n) return i;
        packed[indices[i] >> 3] |= 1 << (indices[i] & 7);
    }
    return count;
}

// Lists the first `most` of the bits of `packed` that are set, among its first n; 0 where there are no more.
void list_bits(const uint8_t* packed, int64_t n, int64_t most, int64_t* found) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        uint64_t word = load_word(packed, i, n);
        if (count + __builtin_popcountll(word) > most) {
            for (; word && count < most; word &= word - 1) found[count++] = i + __builtin_ctzll(word);
            return;
        }
        for (; word; word &= word - 1) found[count++] = i + __builtin_ctzll(word);
    }
    while (count < most) found[count++] = 0;
}

EXPORT(set_bits)
EXPORT(list_bits)

}  // extern "C"
