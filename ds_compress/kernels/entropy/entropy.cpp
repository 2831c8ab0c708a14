// Entropy coding with one step per tensor and interleaved rANS, bit-identical to reference.py; format.py draws the format.
//
// The lanes of a block are the elements of vectors; only the words that some lanes write or read are handled one by one.

#include "../native/calls.h"
#include "decoder.h"
#include "dithered.h"
#include "encoder.h"
#include "sorted_blocks.h"

namespace {

template <class In>
void encode_sorted_blocks(const In* x, const Frame& frame, SortedBlocks units, const Tables& tables, int32_t* order, uint16_t* keys,
                     uint32_t* space, uint16_t* scratch, uint16_t* words, uint16_t* classes) {
    uint32_t* sizes = reinterpret_cast<uint32_t*>(order);  // until the order is there
    const uint32_t largest = measure_units(x, units, sizes);
    classify(sizes, units.count, space, classes);
    const InBlockOrder<In> values{x, frame.numel, units, largest, Order(classes, units.count, order)};
    encode_tensor(values, frame, tables, keys, space, scratch, words);
}

template <class Out>
bool decode_sorted_blocks(const uint16_t* words, const uint16_t* classes, const Frame& frame, SortedBlocks units,
                     const float* steps, int32_t* order, int8_t* q, Out* y) {
    const BlockOrder<Out> to{y, units, Order(classes, units.count, order)};
    return decode_tensor(words, frame, steps, q, to);
}

}  // namespace

// The arguments of exported functions, which cpu.py declares. ends [contexts], keys [numel], q [numel],
// space [2 * KEYS * COPIES + contexts * (4 * KEYS + 2)], scratch [AT_ONCE, length], classes [count / PER_WORD],
// order [2, count], drawn [places], a multiple of 64; `rest` values follow those of the `count` units.
#define FRAME_PARAMETERS                                                                                             \
    int64_t numel, int64_t size, int64_t lanes, int64_t length, int64_t blocks, int64_t contexts, int64_t per_context,  \
        const int64_t* ends
#define ENCODE_PARAMETERS                                                                                            \
    const void* x, int64_t bf16, FRAME_PARAMETERS, const int32_t* first, const int64_t* units, const int32_t* cost,  \
        uint16_t* keys, uint32_t* space, uint16_t* scratch, uint16_t* words
#define DECODE_PARAMETERS const uint16_t* words, FRAME_PARAMETERS, const float* steps, int8_t* q, void* y, int64_t bf16
#define DITHER_PARAMETERS int64_t dither_first, int64_t dither_second, int64_t places, uint16_t* drawn
#define DITHER Dither{true, static_cast<uint32_t>(dither_first), static_cast<uint32_t>(dither_second)}
#define SORTED_PARAMETERS int64_t count, int64_t rest, int64_t columns, int32_t* order

extern "C" {

void encode_entropy(ENCODE_PARAMETERS) {
    const Frame frame{numel, size, lanes, length, blocks, contexts, per_context, ends};
    const Tables tables{first, units, cost};
    auto encode = [&](auto* values) {
        encode_tensor(InTensorOrder<std::decay_t<decltype(*values)>>{values, numel}, frame, tables, keys, space, scratch,
                      words);
    };
    if (bf16) encode(static_cast<const uint16_t*>(x));
    else encode(static_cast<const float*>(x));
}

int64_t decode_entropy(DECODE_PARAMETERS) {
    const Frame frame{numel, size, lanes, length, blocks, contexts, per_context, ends};
    return bf16 ? decode_tensor(words, frame, steps, q, TensorOrder<uint16_t>{static_cast<uint16_t*>(y)})
                : decode_tensor(words, frame, steps, q, TensorOrder<float>{static_cast<float*>(y)});
}

void encode_dithered_entropy(ENCODE_PARAMETERS, DITHER_PARAMETERS, int64_t spare, const int32_t* quarter, const float* inverse,
                             int64_t* sums) {
    const Frame frame{numel, size, lanes, length, blocks, contexts, per_context, ends};
    make_draws(DITHER, places, drawn);
    auto encode = [&](auto* values) {
        encode_dithered(values, frame, Tables{first, units, cost}, DitherTables{quarter, inverse}, drawn, spare,
                        reinterpret_cast<Sums*>(sums), keys, space, scratch, words);
    };
    if (bf16) encode(static_cast<const uint16_t*>(x));
    else encode(static_cast<const float*>(x));
}

int64_t decode_dithered_entropy(DECODE_PARAMETERS, DITHER_PARAMETERS) {
    const Frame frame{numel, size, lanes, length, blocks, contexts, per_context, ends};
    make_draws(DITHER, places, drawn);
    return bf16 ? decode_dithered(words, frame, steps, drawn, q, static_cast<uint16_t*>(y))
                : decode_dithered(words, frame, steps, drawn, q, static_cast<float*>(y));
}

void encode_sorted(ENCODE_PARAMETERS, SORTED_PARAMETERS, uint16_t* classes) {
    const Frame frame{numel, size, lanes, length, blocks, contexts, per_context, ends};
    const SortedBlocks its{count, (numel - rest) / count, columns != 0};
    auto encode = [&](auto* values) {
        encode_sorted_blocks(values, frame, its, Tables{first, units, cost}, order, keys, space, scratch, words, classes);
    };
    if (bf16) encode(static_cast<const uint16_t*>(x));
    else encode(static_cast<const float*>(x));
}

int64_t decode_sorted(DECODE_PARAMETERS, SORTED_PARAMETERS, const uint16_t* classes) {
    const Frame frame{numel, size, lanes, length, blocks, contexts, per_context, ends};
    const SortedBlocks its{count, (numel - rest) / count, columns != 0};
    return bf16 ? decode_sorted_blocks(words, classes, frame, its, steps, order, q, static_cast<uint16_t*>(y))
                : decode_sorted_blocks(words, classes, frame, its, steps, order, q, static_cast<float*>(y));
}

EXPORT(encode_entropy)
EXPORT(decode_entropy)
EXPORT(encode_dithered_entropy)
EXPORT(decode_dithered_entropy)
EXPORT(encode_sorted)
EXPORT(decode_sorted)

}  // extern "C"
