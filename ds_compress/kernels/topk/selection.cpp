// Bit strings: their bits listed, and the entries that they hold read out of a tensor, and put back.

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

// As cpu.py declares them.
struct GatherArguments {
    void* x;
    int64_t dtype, n;
    const uint8_t* packed;
    int64_t count;
    void* values;
};

struct BitsArguments {
    const uint8_t* packed;
    int64_t n;
    int64_t* indices;
    int64_t count;
};

extern "C" {

int64_t gather(const GatherArguments& args, int) {
    with_type<uint32_t>(args.x, args.dtype, [&](auto* x) {
        gather(x, args.n, args.packed, args.count, static_cast<decltype(x)>(args.values));
    });
    return 0;
}

int64_t scatter(const GatherArguments& args, int) {
    with_type<uint32_t>(args.x, args.dtype, [&](auto* y) {
        scatter(static_cast<decltype(y)>(args.values), args.count, args.packed, args.n, y);
    });
    return 0;
}

// Lists the first `count` of the bits of `packed` that are set, among its first n; 0 where there are no more.
int64_t list_bits(const BitsArguments& args, int) {
    const int64_t n = args.n, most = args.count;
    int64_t *found = args.indices, count = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        uint64_t word = load_word(args.packed, i, n);
        if (count + __builtin_popcountll(word) > most) {
            for (; word && count < most; word &= word - 1) found[count++] = i + __builtin_ctzll(word);
            return 0;
        }
        for (; word; word &= word - 1) found[count++] = i + __builtin_ctzll(word);
    }
    while (count < most) found[count++] = 0;
    return 0;
}

}  // extern "C"
