// One step for a tensor and interleaved rANS, as kernels/entropy.py draws it.
//
// The lanes of a block are the elements of vectors; only the words that some of them write and read are moved apart.

#include "decoder.h"
#include "encoder.h"

extern "C" {

// What the arguments may be is declared in entropy.py. ends [contexts], keys [numel],
// space [2 * KEYS * COPIES + contexts * (4 * KEYS + 2)], scratch [length].

void encode_entropy(const void* x, int64_t bf16, int64_t numel, int64_t size, int64_t lanes, int64_t length,
                    int64_t blocks, int64_t contexts, const int64_t* ends, const int32_t* first, const int64_t* units,
                    const int32_t* cost, uint16_t* keys, uint32_t* space, uint16_t* scratch, uint16_t* words) {
    const Frame frame{numel, size, lanes, length, blocks, contexts, ends};
    const Tables tables{first, units, cost};
    if (bf16) encode_tensor(static_cast<const uint16_t*>(x), frame, tables, keys, space, scratch, words);
    else encode_tensor(static_cast<const float*>(x), frame, tables, keys, space, scratch, words);
}

int64_t decode_entropy(const uint16_t* words, int64_t numel, int64_t size, int64_t lanes, int64_t length,
                       int64_t blocks, int64_t contexts, const int64_t* ends, const float* steps, void* y, int64_t bf16) {
    const Frame frame{numel, size, lanes, length, blocks, contexts, ends};
    return bf16 ? decode(words, frame, steps, static_cast<uint16_t*>(y)) : decode(words, frame, steps, static_cast<float*>(y));
}

}  // extern "C"
