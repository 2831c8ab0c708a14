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

// The values of `x` in the order of units, whose classes this finds.
template <class In>
InBlockOrder<In> in_block_order(const In* x, int64_t numel, SortedBlocks units, int32_t* order, uint32_t* space,
                                uint16_t* classes, Sample<In>& sample) {
    uint32_t* sizes = reinterpret_cast<uint32_t*>(order);  // until the order is there
    const uint32_t largest = measure_units(x, units, sizes, sample);
    classify(sizes, units.count, space, classes);
    return {x, numel, units, largest, Order(classes, units.count, order)};
}

}  // namespace

// What both functions take; cpu.py declares it. ends [contexts]; `rest` values follow those of the `count` units, 0 if values
// are not sorted.
#define FRAME_PARAMETERS                                                                                             \
    int64_t numel, int64_t size, int64_t lanes, int64_t length, int64_t blocks, int64_t contexts, int64_t per_context,  \
        const int64_t *ends, int64_t count, int64_t rest, int64_t columns
#define FRAME Frame{numel, size, lanes, length, blocks, contexts, per_context, ends}
#define UNITS SortedBlocks{count, (numel - rest) / count, columns != 0}

extern "C" {

// keys [numel], space [2 * KEYS * COPIES + contexts * (4 * KEYS + 2)], scratch [AT_ONCE, length], order [2, count],
// classes [count / PER_WORD].
void encode_entropy(const void* x, int64_t bf16, FRAME_PARAMETERS, int64_t is_sampled, int64_t spare, const int32_t* first,
                    const int64_t* units, const int32_t* cost, const int32_t* quarter, const float* inverse,
                    int64_t dithered, int64_t dither_first, int64_t dither_second, uint16_t* keys, uint32_t* space,
                    uint16_t* scratch, int64_t* sums, int32_t* order, uint16_t* words, uint16_t* classes) {
    const Frame frame = FRAME;
    const Tables tables = {first, units, cost};
    const auto encode = [&](const auto& in_order, auto& sample) {
        const uint32_t largest = in_order.largest(sample);
        if (!dithered) return encode_tensor(in_order, largest, frame, tables, keys, space, scratch, words);
        encode_dithered(in_order, largest, sample, frame, tables, DitherTables{quarter, inverse},
                        Draws(dither_first, dither_second), spare, reinterpret_cast<Sums*>(sums), keys, space, scratch,
                        words);
    };
    with_type(x, bf16, [&](auto* values) {
        typedef Value<decltype(values)> In;
        Sample<In> sample(values, numel, is_sampled ? reinterpret_cast<In*>(keys) : nullptr);  // until keys are made
        if (count) encode(in_block_order(values, numel, UNITS, order, space, classes, sample), sample);
        else encode(InTensorOrder<In>{values, numel}, sample);
    });
}

// q [numel], kept [numel]. Returns whether the words are a possible code.
int64_t decode_entropy(void* y, int64_t bf16, FRAME_PARAMETERS, const float* steps, int64_t dithered, int64_t dither_first,
                       int64_t dither_second, int8_t* q, uint16_t* kept, int32_t* order, const uint16_t* words,
                       const uint16_t* classes) {
    const Frame frame = FRAME;
    const Draws draws(dither_first, dither_second);
    const auto decode = [&](const auto& to) -> bool {
        return dithered ? decode_dithered(words, frame, steps, draws, q, to) : decode_tensor(words, frame, steps, q, to);
    };
    return with_type(y, bf16, [&](auto* values) -> bool {
        typedef Value<decltype(values)> Out;
        if (!count) return decode(TensorOrder<Out>{values});
        const Order its_order(classes, count, order);
        if (!dithered || !columns) return decode(BlockOrder<Out>{values, UNITS, its_order});
        return decode_dithered(words, frame, steps, draws, q, KeptColumns<Out>{values, UNITS, its_order, numel, kept});
    });
}

EXPORT(encode_entropy)
EXPORT(decode_entropy)

}  // extern "C"
