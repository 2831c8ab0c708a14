// Entropy coding with one step per tensor and interleaved rANS, bit-identical to reference.py; format.py draws the format.
//
// The lanes of a block are the elements of vectors; only the words that some lanes write or read are handled one by one.

#include "decoder.h"
#include "dithered.h"
#include "encoder.h"

namespace {

// As cpu.py declares them.
struct DecodeArguments {
    void* values;
    int64_t bf16;
    Frame frame;
    int64_t rows;
    const float* steps;
    int64_t dithered, first, second;
    int8_t* q;  // [AT_ONCE, length]
    const uint16_t* words;
    const int8_t* shifts;
};

template <class Out>
bool decode(Out* y, const Head& head, const DecodeArguments& args) {
    const Frame& frame = args.frame;
    if (!head.finite()) {
        for (int64_t i = 0; i < frame.numel; ++i) store(as_float(0x7FC00000), y[i]);
        return true;
    }
    const UnshiftedRows<Out> to = {y, args.rows ? frame.numel / args.rows : frame.numel, args.rows ? args.shifts : nullptr};
    if (!args.dithered)
        return Decoder(args.words, frame, head, Values<Out>(args.words, frame, head, args.steps, to)).read(args.q);
    if (!is_dithered(frame, head)) return false;
    const Draws draws(args.first, args.second);
    return Decoder(args.words, frame, head, DitherRemoval<Out>(args.words, frame, head, args.steps, draws, to)).read(args.q);
}

}  // namespace

extern "C" {

int64_t encode_entropy(const EncodeArguments& args, int) {
    with_type(args.values, args.bf16, [&](auto* values) {
        const ShiftedRows x(values, args.frame.numel, args.rows, args.tolerance, reinterpret_cast<Level*>(args.levels), args.shifts);
        const uint32_t exponent = exponent_of(x.largest);
        std::memset(args.words, 0, args.frame.words * sizeof *args.words);
        if (exponent == NOT_FINITE) args.words[args.frame.head()] = NOT_FINITE;
        else if (args.dithered) encode_dithered(x, exponent, args);
        else encode_tensor(x, exponent, args);
    });
    return 0;
}

// Returns whether the words are a possible code.
int64_t decode_entropy(const DecodeArguments& args, int) {
    Head head;
    if (!head.read(args.words, args.frame)) return false;
    return with_type(args.values, args.bf16, [&](auto* values) { return decode(values, head, args); });
}

}  // extern "C"
