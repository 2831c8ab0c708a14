// Entries of a tensor that reach a bound, and bit strings: passes that neither torch nor numpy makes in one go.
//
// A key is the bits of a float without its sign, those of nan replaced by those of infinity: it orders as |x| does.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t WORD = 64;

// Bit j is set where hit[j] is 1; every hit is 0 or 1.
uint64_t pack(const uint8_t* hit) {
    uint64_t word = 0;
    for (int64_t byte = 0; byte < 8; ++byte) {
        uint64_t eight;
        std::memcpy(&eight, hit + 8 * byte, 8);
        // the product moves bit 0 of byte j to bit 56 + j, and nothing else up there
        word |= (eight * 0x0102040810204080ULL >> 56) << (8 * byte);
    }
    return word;
}

// Lists the entries of x [n] whose key reaches `bound`: their index plus `start`, and their key. Returns how many.
template <class Bits>
int64_t reaching(const Bits* x, int64_t n, int64_t bound, int64_t infinity, int64_t start, int64_t* found, Bits* keys) {
    constexpr Bits magnitude = static_cast<Bits>(~Bits(0)) >> 1;
    const Bits least = static_cast<Bits>(bound), most = static_cast<Bits>(infinity);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        uint8_t hit[WORD] = {};
        const int64_t width = n - i < WORD ? n - i : WORD;
        if (width == WORD) {
            for (int64_t j = 0; j < WORD; ++j) hit[j] = static_cast<Bits>(x[i + j] & magnitude) >= least;
        } else {
            for (int64_t j = 0; j < width; ++j) hit[j] = static_cast<Bits>(x[i + j] & magnitude) >= least;
        }
        for (uint64_t word = pack(hit); word; word &= word - 1) {
            const int64_t j = i + __builtin_ctzll(word);
            const Bits key = x[j] & magnitude;
            found[count] = start + j;
            keys[count++] = key < most ? key : most;
        }
    }
    return count;
}

// Of the entries `found` [n] of one row, writes those whose key reaches `high`, and as many of the keys from `low` on
// as make k: the first ones, or evenly spaced ones. Returns whether that many could be found.
template <class Bits>
bool pick(
    const int64_t* found, const Bits* keys, int64_t n, int64_t low, int64_t high, int64_t k, bool spread, int64_t* out
) {
    int64_t above = 0, reached = 0;
    for (int64_t i = 0; i < n; ++i) {
        above += static_cast<int64_t>(keys[i]) >= high;
        reached += static_cast<int64_t>(keys[i]) >= low;
    }
    if (above > k || reached < k) return false;
    int64_t room = k - above;
    const int64_t equal = reached - above, share = room;
    int64_t due = 0, count = 0;  // due: what (entry of the band) * share / equal has left over, times equal
    for (int64_t i = 0; i < n && count < k; ++i) {
        const int64_t key = keys[i];
        bool keep = key >= high;
        if (!keep && key >= low) {
            if (spread) {
                due += share;
                keep = due >= equal;
                due -= keep ? equal : 0;
            } else {
                keep = room > 0;
                room -= keep;
            }
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
            counts[row] = reaching(x + row * d, d, bounds[row], infinity, row * d, found + total, keys + total);      \
        return total;                                                                                                 \
    }                                                                                                                 \
    int64_t pick##BITS(const int64_t* found, const uint##BITS##_t* keys, int64_t total, int64_t rows,                 \
                       const int64_t* counts, const int64_t* lows, const int64_t* highs, int64_t k, int64_t spread,   \
                       int64_t* out) {                                                                                \
        for (int64_t row = 0; row < rows; total -= counts[row++], out += k) {                                         \
            if (counts[row] > total) return 0;                                                                        \
            if (!pick(found, keys, counts[row], lows[row], highs[row], k, spread != 0, out)) return 0;                \
            found += counts[row], keys += counts[row];                                                                \
        }                                                                                                             \
        return 1;                                                                                                     \
    }

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

// Lists the first `most` of the bits of `packed` that are set, among its first n.
void list_bits(const uint8_t* packed, int64_t n, int64_t most, int64_t* found) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        uint64_t word = 0;
        const int64_t width = n - i < WORD ? n - i : WORD;
        std::memcpy(&word, packed + i / 8, (width + 7) / 8);
        if (width < WORD) word &= (1ULL << width) - 1;
        if (count + __builtin_popcountll(word) > most) {
            for (; word && count < most; word &= word - 1) found[count++] = i + __builtin_ctzll(word);
            return;
        }
        for (; word; word &= word - 1) found[count++] = i + __builtin_ctzll(word);
    }
}

}  // extern "C"
