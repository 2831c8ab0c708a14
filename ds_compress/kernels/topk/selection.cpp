// Entries of a tensor that reach a bound, and bit strings: passes that neither torch nor numpy makes in one go.
//
// A key is the bits of a float without its sign, those of nan replaced by those of infinity: it orders as |x| does.

#include "../native/calls.h"
#include "masks.h"

namespace {

// Lists the entries of x [n] whose key reaches `bound`: their index plus `start`, and their key. Returns how many.
template <class Bits>
int64_t list(const Bits* x, int64_t n, int64_t bound, int64_t infinity, int64_t start, int64_t* found, Bits* keys) {
    constexpr Bits magnitude = static_cast<Bits>(~Bits(0)) >> 1;
    const Bits least = static_cast<Bits>(bound), most = static_cast<Bits>(infinity);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += WORD)
        for_each(reaching(x + i, n - i, least), [&](int place) {
            const int64_t j = i + place;
            const Bits key = x[j] & magnitude;
            found[count] = start + j;
            keys[count++] = key < most ? key : most;
        });
    return count;
}

// Of the entries `found` [n] of one row, writes those whose key reaches `high`, and as many of the keys from `low` on
// as make k, evenly spaced. Returns whether that many could be found.
template <class Bits>
bool pick(const int64_t* found, const Bits* keys, int64_t n, int64_t low, int64_t high, int64_t k, int64_t* out) {
    int64_t above = 0, reached = 0;
    for (int64_t i = 0; i < n; ++i) {
        above += static_cast<int64_t>(keys[i]) >= high;
        reached += static_cast<int64_t>(keys[i]) >= low;
    }
    if (above > k || reached < k) return false;
    const int64_t equal = reached - above, share = k - above;
    int64_t due = 0, count = 0;  // due: what (entry of the band) * share / equal has left over, times equal
    for (int64_t i = 0; i < n && count < k; ++i) {
        const int64_t key = keys[i];
        bool keep = key >= high;
        if (!keep && key >= low) {
            due += share;
            keep = due >= equal;
            due -= keep ? equal : 0;
        }
        out[count] = found[i];
        count += keep;
    }
    return true;
}

}  // namespace

// For each of `rows` rows of d or counts[row] entries, one behind the other.
#define SELECTION(BITS)                                                                                               \
    int64_t reaching##BITS(const uint##BITS##_t* x, int64_t rows, int64_t d, const int64_t* bounds, int64_t infinity, \
                           int64_t* found, uint##BITS##_t* keys, int64_t* counts) {                                   \
        int64_t total = 0;                                                                                            \
        for (int64_t row = 0; row < rows; total += counts[row++])                                                     \
            counts[row] = list(x + row * d, d, bounds[row], infinity, row * d, found + total, keys + total);      \
        return total;                                                                                                 \
    }                                                                                                                 \
    int64_t pick##BITS(const int64_t* found, const uint##BITS##_t* keys, int64_t total, int64_t rows,                 \
                       const int64_t* counts, const int64_t* lows, const int64_t* highs, int64_t k,                   \
                       int64_t* out) {                                                                                \
        for (int64_t row = 0; row < rows; total -= counts[row++], out += k) {                                         \
            if (counts[row] > total) return 0;                                                                        \
            if (!pick(found, keys, counts[row], lows[row], highs[row], k, out)) return 0;                             \
            found += counts[row], keys += counts[row];                                                                \
        }                                                                                                             \
        return 1;                                                                                                     \
    }                                                                                                                 \
    EXPORT(reaching##BITS)                                                                                          \
    EXPORT(pick##BITS)

extern "C" {

SELECTION(16)
SELECTION(32)
SELECTION(64)

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
        uint64_t word = word_at(packed, i, n);
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
