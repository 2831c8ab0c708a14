// Entropy coding with one step per tensor and interleaved rANS, bit-identical to reference.py; format.py draws the format.
//
// The lanes of a block are the elements of vectors; only the words that some lanes write or read are handled one by one.

#include "../native/calls.h"
#include "decoder.h"
#include "dithered.h"
#include "encoder.h"

namespace {

template <class Pointer>
using Value = std::remove_const_t<std::remove_pointer_t<Pointer>>;

}  // namespace

// What both functions take; cpu.py declares it.
#define FRAME_PARAMETERS int64_t numel, int64_t size, int64_t lanes, int64_t length, int64_t blocks, int64_t classes
#define FRAME Frame{numel, size, lanes, length, blocks, classes}

extern "C" {

// keys [numel], space [2 * KEYS * COPIES + 4 * KEYS + 2], scratch [AT_ONCE, length].
void encode_entropy(const void* x, int64_t bf16, FRAME_PARAMETERS, int64_t is_sampled, int64_t spare, const int32_t* first,
                    const int64_t* units, const int32_t* cost, const int32_t* quarter, const float* inverse,
                    int64_t dithered, int64_t dither_first, int64_t dither_second, uint16_t* keys, uint32_t* space,
                    uint16_t* scratch, int64_t* sums, uint16_t* words) {
    const Frame frame = FRAME;
    const Tables tables = {first, units, cost};
    with_type(x, bf16, [&](auto* values) {
        typedef Value<decltype(values)> In;
        Sample<In> sample(values, numel, is_sampled ? reinterpret_cast<In*>(keys) : nullptr);  // until keys are made
        const uint32_t largest = measure(values, numel, sample);
        if (!dithered) return encode_tensor(values, largest, frame, tables, keys, space, scratch, words);
        encode_dithered(values, largest, sample, frame, tables, DitherTables{quarter, inverse},
                        Draws(dither_first, dither_second), spare, *reinterpret_cast<Sums*>(sums), keys, space, scratch,
                        words);
    });
}

// q [numel]. Returns whether the words are a possible code.
int64_t decode_entropy(void* y, int64_t bf16, FRAME_PARAMETERS, const float* steps, int64_t dithered, int64_t dither_first,
                       int64_t dither_second, int8_t* q, const uint16_t* words) {
    const Frame frame = FRAME;
    return with_type(y, bf16, [&](auto* values) -> bool {
        if (!dithered) return decode_tensor(words, frame, steps, q, values);
        return decode_dithered(words, frame, steps, Draws(dither_first, dither_second), q, values);
    });
}

EXPORT(encode_entropy)
EXPORT(decode_entropy)

}  // extern "C"
