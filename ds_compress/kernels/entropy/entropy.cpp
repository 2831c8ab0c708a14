// Entropy coding with one step per tensor and interleaved rANS, bit-identical to reference.py; format.py draws the format.
//
// The lanes of a block are the elements of vectors; only the words that some lanes write or read are handled one by one.

#include "../native/calls.h"
#include "decoder.h"
#include "dithered.h"
#include "encoder.h"
#include "sorted_blocks.h"

namespace {

template <class Pointer>
using Value = std::remove_const_t<std::remove_pointer_t<Pointer>>;

// What a message without dither is coded by, and what else one with it needs.
struct Encoding {
    Frame frame;
    Tables tables;
    uint16_t* keys;
    uint32_t* space;
    uint16_t *scratch, *words;
};

struct Dithering {
    Draws draws;
    bool is_sampled;
    int64_t spare;
    DitherTables tables;
    Sums* sums;
};

template <class Values>
void encode(const Values& values, const Encoding& by) {
    encode_tensor(values, by.frame, by.tables, by.keys, by.space, by.scratch, by.words);
}

template <class Values>
void encode(const Values& values, uint32_t largest, const Encoding& by, const Dithering& with) {
    encode_dithered(values, largest, by.frame, by.tables, with.tables, with.draws, with.is_sampled, with.spare, with.sums,
                    by.keys, by.space, by.scratch, by.words);
}

// The values of `x` in the order of units, whose classes this finds.
template <class In>
InBlockOrder<In> in_block_order(const In* x, int64_t numel, SortedBlocks units, int32_t* order, uint32_t* space,
                                uint16_t* classes) {
    uint32_t* sizes = reinterpret_cast<uint32_t*>(order);  // until the order is there
    const uint32_t largest = measure_units(x, units, sizes);
    classify(sizes, units.count, space, classes);
    return {x, numel, units, largest, Order(classes, units.count, order)};
}

}  // namespace

// The arguments of exported functions, which cpu.py declares. ends [contexts], keys [numel], q [numel],
// space [2 * KEYS * COPIES + contexts * (4 * KEYS + 2)], scratch [AT_ONCE, length], classes [count / PER_WORD],
// order [2, count], kept [numel]; `rest` values follow those of the `count` units.
#define FRAME_PARAMETERS                                                                                             \
    int64_t numel, int64_t size, int64_t lanes, int64_t length, int64_t blocks, int64_t contexts, int64_t per_context,  \
        const int64_t* ends
#define FRAME Frame{numel, size, lanes, length, blocks, contexts, per_context, ends}
#define ENCODE_PARAMETERS                                                                                            \
    const void* x, int64_t bf16, FRAME_PARAMETERS, const int32_t* first, const int64_t* units, const int32_t* cost,  \
        uint16_t* keys, uint32_t* space, uint16_t* scratch, uint16_t* words
#define ENCODING Encoding{FRAME, Tables{first, units, cost}, keys, space, scratch, words}
#define DECODE_PARAMETERS const uint16_t* words, FRAME_PARAMETERS, const float* steps, int8_t* q, void* y, int64_t bf16
#define DITHER_PARAMETERS int64_t dither_first, int64_t dither_second
#define DRAWS Draws(dither_first, dither_second)
#define DITHERING_PARAMETERS                                                                                         \
    DITHER_PARAMETERS, int64_t is_sampled, int64_t spare, const int32_t* quarter, const float* inverse, int64_t* sums
#define DITHERING Dithering{DRAWS, is_sampled != 0, spare, DitherTables{quarter, inverse}, reinterpret_cast<Sums*>(sums)}
#define SORTED_PARAMETERS int64_t count, int64_t rest, int64_t columns, int32_t* order
#define UNITS SortedBlocks{count, (numel - rest) / count, columns != 0}

extern "C" {

void encode_entropy(ENCODE_PARAMETERS) {
    with_type(x, bf16, [&](auto* values) { encode(InTensorOrder<Value<decltype(values)>>{values, numel}, ENCODING); });
}

int64_t decode_entropy(DECODE_PARAMETERS) {
    return with_type(y, bf16, [&](auto* values) {
        return decode_tensor(words, FRAME, steps, q, TensorOrder<Value<decltype(values)>>{values});
    });
}

void encode_dithered_entropy(ENCODE_PARAMETERS, DITHERING_PARAMETERS) {
    with_type(x, bf16, [&](auto* values) {
        const InTensorOrder<Value<decltype(values)>> in_order{values, numel};
        encode(in_order, in_order.largest(), ENCODING, DITHERING);
    });
}

int64_t decode_dithered_entropy(DECODE_PARAMETERS, DITHER_PARAMETERS) {
    return with_type(y, bf16, [&](auto* values) {
        return decode_dithered(words, FRAME, steps, DRAWS, q, TensorOrder<Value<decltype(values)>>{values});
    });
}

void encode_sorted(ENCODE_PARAMETERS, SORTED_PARAMETERS, uint16_t* classes) {
    with_type(x, bf16, [&](auto* values) {
        encode(in_block_order(values, numel, UNITS, order, space, classes), ENCODING);
    });
}

int64_t decode_sorted(DECODE_PARAMETERS, SORTED_PARAMETERS, const uint16_t* classes) {
    return with_type(y, bf16, [&](auto* values) {
        const BlockOrder<Value<decltype(values)>> to{values, UNITS, Order(classes, count, order)};
        return decode_tensor(words, FRAME, steps, q, to);
    });
}

void encode_dithered_sorted(ENCODE_PARAMETERS, DITHERING_PARAMETERS, SORTED_PARAMETERS, uint16_t* classes) {
    with_type(x, bf16, [&](auto* values) {
        const auto in_order = in_block_order(values, numel, UNITS, order, space, classes);
        encode(in_order, in_order.largest(), ENCODING, DITHERING);
    });
}

int64_t decode_dithered_sorted(DECODE_PARAMETERS, DITHER_PARAMETERS, SORTED_PARAMETERS, uint16_t* kept,
                               const uint16_t* classes) {
    return with_type(y, bf16, [&](auto* values) -> bool {
        typedef Value<decltype(values)> Out;
        const Order its_order(classes, count, order);
        if (columns)
            return decode_dithered(words, FRAME, steps, DRAWS, q, KeptColumns<Out>{values, UNITS, its_order, numel, kept});
        return decode_dithered(words, FRAME, steps, DRAWS, q, BlockOrder<Out>{values, UNITS, its_order});
    });
}

EXPORT(encode_entropy)
EXPORT(decode_entropy)
EXPORT(encode_dithered_entropy)
EXPORT(decode_dithered_entropy)
EXPORT(encode_sorted)
EXPORT(decode_sorted)
EXPORT(encode_dithered_sorted)
EXPORT(decode_dithered_sorted)

}  // extern "C"
