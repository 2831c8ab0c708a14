// The k largest magnitudes of each row, as bits and values.
//
// A key is the bits of a float without its sign: it orders as |x| does. Nan has no key of its own: it is what reaches
// that of infinity, as infinity does, and no bound is above.

#include "masks.h"

namespace {

constexpr int64_t MANY = 1 << 15;  // of more entries those that no longer matter are dropped; a sample has fewer

// Those of 64 entries, of which `width` exist, whose keys are above `key`.
template <class Bits>
uint64_t mask_above(const Bits* x, int64_t width, Bits key, Bits infinity) {
    return key < infinity ? mask_at_least(x, width, static_cast<Bits>(key + 1)) : 0;
}

// Copies the entries of x [n] whose keys are from `low` to `high` to `inside` [n], which may be x, and counts those with
// higher ones. Returns how many are inside.
template <class Bits>
int64_t collect_band(const Bits* x, int64_t n, Bits low, Bits high, Bits infinity, Bits* inside, int64_t& higher) {
    Bits* place = inside;
    higher = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        const uint64_t beyond = mask_above(x + i, n - i, high, infinity);
        higher += __builtin_popcountll(beyond);
        place = compress(x + i, n - i, mask_at_least(x + i, n - i, low) & ~beyond, place, inside + n);
    }
    return place - inside;
}

// A key, how many entries have it, and how many of these are among those that were asked for.
template <class Bits>
struct Ranked {
    Bits key;
    int64_t equal, ties;
};

// Fills up the last word of x [n].
template <class Bits>
void zero_tail(Bits* x, int64_t n) {
    while (n % WORD) x[n++] = 0;
}

// The key of `rank`, 1 for the largest, among those of x [n], from `low` to `high`: its bits one after the other.
// Overwrites x where n is large, and the padding of its last word always.
template <class Bits>
Ranked<Bits> find_rank(Bits* x, int64_t n, Bits low, Bits high, int64_t rank) {
    const Bits most = high;
    int64_t higher = 0, reached = n;  // with keys above `high`; from `low` on
    zero_tail(x, n);
    while (low < high) {
        const Bits middle = high - (high - low) / 2;
        int64_t upper = 0;
        for (int64_t i = 0; i < n; i += WORD) upper += __builtin_popcountll(mask_at_least(x + i, WORD, middle));
        if (upper >= rank) low = middle, reached = upper;
        else high = middle - 1, higher = upper;
        if (n > MANY && reached - higher < n / 2) {
            reached = collect_band(x, n, low, high, most, x, higher);
            rank -= higher, n = reached, higher = 0;
            zero_tail(x, n);
        }
    }
    return {low, reached - higher, rank - higher};
}

// The keys that those of the ranks `first` and `last` of every stride-th entry of x [d] lie between: of their highest 16
// bits.
template <class Bits>
void bracket(const Bits* x, int64_t d, int64_t stride, int64_t first, int64_t last, Bits infinity, Bits& low, Bits& high) {
    constexpr int SHIFT = 8 * sizeof(Bits) - 16;
    alignas(64) uint16_t sample[MANY];
    const uint16_t most = infinity >> SHIFT;
    int64_t length = 0;
    for (int64_t i = 0; i < d && length < MANY; i += stride) sample[length++] = x[i] >> SHIFT;
    const uint16_t upper = find_rank<uint16_t>(sample, length, 0, most, first).key;
    low = static_cast<Bits>(find_rank<uint16_t>(sample, length, 0, upper, last).key) << SHIFT;
    high = upper < most ? (static_cast<Bits>(upper + 1) << SHIFT) - 1 : infinity;
}

// The k-th largest key of x [d]. `space` is for what is looked at, up to a whole word.
template <class Bits>
Ranked<Bits> find_kth(const Bits* x, int64_t d, int64_t k, int64_t stride, int64_t first, int64_t last, Bits infinity,
                    Bits* space) {
    Bits low = 0, high = infinity;
    if (stride > 1) bracket(x, d, stride, first, last, infinity, low, high);
    int64_t higher, count = collect_band(x, d, low, high, infinity, space, higher);
    if (higher >= k || higher + count < k)  // the sample's bracket missed rank k: search all
        low = 0, high = infinity, count = collect_band(x, d, low, high, infinity, space, higher);
    return find_rank(space, count, low, high, k - higher);
}

// Sets the bits of `word` from bit `place` of `packed` [bytes] on, where they are zeros.
void write_bits(uint64_t word, uint8_t* packed, int64_t bytes, int64_t place) {
    const int64_t first = place >> 3, available = bytes - first, over = place & 7;
    if (available >= 8 && !over) {
        std::memcpy(packed + first, &word, 8);
        return;
    }
    uint64_t before = 0;
    std::memcpy(&before, packed + first, available < 8 ? available : 8);
    before |= word << over;
    std::memcpy(packed + first, &before, available < 8 ? available : 8);
    if (over && available > 8) packed[first + 8] |= static_cast<uint8_t>(word >> (64 - over));
}

// As cpu.py declares them. space: uninitialized memory of whole words.
struct SelectArguments {
    void* x;
    int64_t dtype, rows, d, words, k, stride, first, last, infinity;
    void* space;
    uint8_t* packed;
    void* values;
};

template <class Bits>
void select_largest(const Bits* x, const SelectArguments& args) {
    const int64_t d = args.d, bytes = (args.rows * d + 7) / 8;
    const Bits infinity = static_cast<Bits>(args.infinity);
    uint8_t* packed = args.packed;
    Bits* values = static_cast<Bits*>(args.values);
    const Bits* end = values + args.rows * args.k;
    std::memset(packed, 0, bytes);
    for (int64_t row = 0; row < args.rows; ++row, x += d) {
        const Ranked<Bits> cut = find_kth(x, d, args.k, args.stride, args.first, args.last, infinity, static_cast<Bits*>(args.space));
        const bool all = cut.equal == cut.ties;  // as where no other entry has this key
        int64_t ties = all ? 0 : cut.ties;
        for (int64_t i = 0; i < d; i += WORD) {
            uint64_t word = all ? mask_at_least(x + i, d - i, cut.key) : mask_above(x + i, d - i, cut.key, infinity);
            if (ties > 0)
                for_each(mask_at_least(x + i, d - i, cut.key) & ~word, [&](int j) { word |= ties-- > 0 ? 1ULL << j : 0; });
            values = compress(x + i, d - i, word, values, end);
            write_bits(word, packed, bytes, row * d + i);
        }
    }
}

}  // namespace

extern "C" {

int64_t select_largest(const SelectArguments& args, int) {
    with_type<uint32_t>(args.x, args.dtype, [&](const auto* x) { select_largest(x, args); });
    return 0;
}

}  // extern "C"
