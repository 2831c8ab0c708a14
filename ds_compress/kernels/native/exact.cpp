// The k largest magnitudes of each row, as bits and values.
//
// A key is the bits of a float without its sign, those of nan replaced by those of infinity: it orders as |x| does.

#include "calls.h"
#include "masks.h"

namespace {

constexpr int WAYS = 4;

template <class Bits>
Bits key_of(Bits bits, Bits infinity) {
    constexpr Bits magnitude = static_cast<Bits>(~Bits(0)) >> 1;
    const Bits key = bits & magnitude;
    return key < infinity ? key : infinity;
}

// The key of `rank`, 1 for the largest, among `keys` [n], which are lost: found byte by byte, highest first. `rank`
// becomes that among those that equal it.
template <class Bits>
Bits ranked(Bits* keys, int64_t n, int64_t& rank) {
    Bits prefix = 0;
    for (int shift = 8 * sizeof(Bits) - 8; shift >= 0; shift -= 8) {
        uint32_t counts[WAYS][256] = {};  // neighbours are much alike, and would wait for each other's sum
        int64_t i = 0;
        for (; i + WAYS <= n; i += WAYS)
            for (int way = 0; way < WAYS; ++way) ++counts[way][keys[i + way] >> shift & 255];
        for (; i < n; ++i) ++counts[0][keys[i] >> shift & 255];
        int64_t byte = 256, here = 0;
        do {
            rank -= here;
            --byte;
            here = 0;
            for (int way = 0; way < WAYS; ++way) here += counts[way][byte];
        } while (byte > 0 && here < rank);
        prefix = static_cast<Bits>(prefix << 8 | byte);
        if (here == n) continue;
        int64_t left = 0;  // those that begin so
        for (i = 0; i < n; ++i) {
            const Bits key = keys[i];
            keys[left] = key;
            left += static_cast<int64_t>(key >> shift & 255) == byte;
        }
        n = here;
    }
    return prefix;
}

// Copies the keys of x [n] from `low` to `high` to `inside`, and counts those above. Returns how many are inside.
template <class Bits>
int64_t between(const Bits* x, int64_t n, Bits low, Bits high, Bits infinity, Bits* inside, int64_t& above) {
    int64_t count = 0;
    above = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        const uint64_t higher = high < infinity ? reaching(x + i, n - i, static_cast<Bits>(high + 1)) : 0;
        above += __builtin_popcountll(higher);
        for_each(reaching(x + i, n - i, low) & ~higher, [&](int j) { inside[count++] = key_of(x[i + j], infinity); });
    }
    return count;
}

// The k-th largest key of x [d], and how many of those that equal it are among the k. A sample, every stride-th entry,
// tells where to look: its keys of ranks `first` and `last`. `keys` [d] is for what is looked at.
template <class Bits>
Bits cut_of(const Bits* x, int64_t d, int64_t k, int64_t stride, int64_t first, int64_t last, Bits infinity, Bits* keys,
            int64_t& room) {
    Bits low = 0, high = infinity;
    if (stride > 2 && d > 1) {  // of fewer `keys` has no room for two copies, and there is little to gain
        int64_t length = 0;
        for (int64_t i = 0; i < d; i += stride) keys[length++] = key_of(x[i], infinity);
        std::memcpy(keys + length, keys, length * sizeof(Bits));
        high = ranked(keys + length, length, first);
        low = ranked(keys, length, last);
    }
    int64_t above, count = between(x, d, low, high, infinity, keys, above);
    if (above >= k || above + count < k) count = between<Bits>(x, d, 0, infinity, infinity, keys, above);  // misled
    room = k - above;
    return ranked(keys, count, room);
}

// Sets the bits of `word` from bit `place` of `packed` [bytes] on, where they are zeros.
void put(uint64_t word, uint8_t* packed, int64_t bytes, int64_t place) {
    const int64_t first = place >> 3, room = bytes - first, over = place & 7;
    uint64_t before = 0;
    std::memcpy(&before, packed + first, room < 8 ? room : 8);
    before |= word << over;
    std::memcpy(packed + first, &before, room < 8 ? room : 8);
    if (over && room > 8) packed[first + 8] |= static_cast<uint8_t>(word >> (64 - over));
}

template <class Bits>
void exact(const Bits* x, int64_t rows, int64_t d, int64_t k, int64_t stride, int64_t first, int64_t last, Bits infinity,
           Bits* keys, uint8_t* packed, Bits* values) {
    const int64_t bytes = (rows * d + 7) / 8;
    for (int64_t row = 0; row < rows; ++row, x += d) {
        int64_t room;
        const Bits cut = cut_of(x, d, k, stride, first, last, infinity, keys, room);
        for (int64_t i = 0; i < d; i += WORD) {
            uint64_t word = cut < infinity ? reaching(x + i, d - i, static_cast<Bits>(cut + 1)) : 0;
            if (room > 0)
                for_each(reaching(x + i, d - i, cut) & ~word, [&](int j) { word |= room-- > 0 ? 1ULL << j : 0; });
            for_each(word, [&](int j) { *values++ = x[i + j]; });
            put(word, packed, bytes, row * d + i);
        }
    }
}

}  // namespace

extern "C" {

// `keys` [d] is memory with anything in it, `packed` are zeros; what else the arguments may be is declared in exact.py.
#define EXACT(BITS)                                                                                                \
    void exact##BITS(const uint##BITS##_t* x, int64_t rows, int64_t d, int64_t k, int64_t stride, int64_t first,   \
                     int64_t last, int64_t infinity, uint##BITS##_t* keys, uint8_t* packed,                        \
                     uint##BITS##_t* values) {                                                                     \
        exact<uint##BITS##_t>(x, rows, d, k, stride, first, last, static_cast<uint##BITS##_t>(infinity), keys,     \
                              packed, values);                                                                     \
    }                                                                                                              \
    BY_WORDS(exact##BITS)

EXACT(16)
EXACT(32)
EXACT(64)

}  // extern "C"
