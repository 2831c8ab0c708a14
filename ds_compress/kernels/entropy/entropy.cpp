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
#define FRAME_PARAMETERS \
    int64_t numel, int64_t size, int64_t lanes, int64_t length, int64_t blocks, int64_t classes, int64_t rows
#define FRAME Frame{numel, size, lanes, length, blocks, classes}

extern "C" {

// rows: that are shifted, or 0. keys [numel], space [2 * KEYS * COPIES + 4 * KEYS + 2], scratch [AT_ONCE, length], levels [rows],
// shifts [rows].
void encode_entropy(const void* x, int64_t bf16, FRAME_PARAMETERS, int64_t is_sampled, int64_t spare, const int32_t* first,
                    const int64_t* units, const int32_t* cost, const int32_t* quarter, const float* inverse,
                    int64_t dithered, int64_t dither_first, int64_t dither_second, int64_t tolerance, uint16_t* keys,
                    uint32_t* space, uint16_t* scratch, int64_t* sums, int64_t* levels, uint16_t* words, int8_t* shifts) {
    const Frame frame = FRAME;
    const Tables tables = {first, units, cost};
    with_type(x, bf16, [&](auto* values) {
        const ShiftedRows<Value<decltype(values)>> from(values, numel, rows, tolerance, reinterpret_cast<Level*>(levels), shifts);
        if (!dithered) return encode_tensor(from, frame, tables, keys, space, scratch, words);
        encode_dithered(from, is_sampled, frame, tables, DitherTables{quarter, inverse}, Draws(dither_first, dither_second),
                        spare, *reinterpret_cast<Sums*>(sums), keys, space, scratch, words);
    });
}

// q [AT_ONCE, length]. Returns whether the words are a possible code.
int64_t decode_entropy(void* y, int64_t bf16, FRAME_PARAMETERS, const float* steps, int64_t dithered, int64_t dither_first,
                       int64_t dither_second, int8_t* q, const uint16_t* words, const int8_t* shifts) {
    const Frame frame = FRAME;
    Head head;
    if (!head.read(words, frame)) return false;
    return with_type(y, bf16, [&](auto* values) -> bool {
        typedef Value<decltype(values)> Out;
        if (!head.finite()) {
            for (int64_t i = 0; i < numel; ++i) store(as_float(0x7FC00000), values[i]);
            return true;
        }
        const UnshiftedRows<Out> to = {values, rows ? numel / rows : numel, rows ? shifts : nullptr};
        if (!dithered) return Decoder(words, frame, head, Values<Out>(words, frame, head, steps, to)).read(q);
        if (!is_dithered(frame, head)) return false;
        const Draws draws(dither_first, dither_second);
        return Decoder(words, frame, head, DitherRemoval<Out>(words, frame, head, steps, draws, to)).read(q);
    });
}

EXPORT(encode_entropy)
EXPORT(decode_entropy)

}  // extern "C"
