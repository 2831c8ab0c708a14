// Group-wise quantization, as kernels/reference/groups.py specifies it: equal to the bit.

#include "group.h"

namespace {

template <int SIZE, class In>
void quantize(const In* x, Dither dither, int64_t n, int64_t size, Format format, uint8_t* packed,
              void* steps, void* offsets) {
    constexpr int BATCH = SIZE ? 8 : 1;  // so that the ranges of some groups are found while others wait for theirs
    Group<SIZE> groups[BATCH];
    Grid grids[BATCH];
    for (int64_t start = 0; start < n; start += BATCH) {
        const int count = n - start < BATCH ? n - start : BATCH;
        for (int i = 0; i < count; ++i) {
            Group<SIZE>& group = groups[i];
            const int64_t place = (start + i) * size;
            group.size = size;
            group.load(x + place);
            if (format.diagonal) rotate<SIZE>(group.values, size, format.diagonal);
            grids[i] = group.grid(format);
        }
        for (int i = 0; i < count; ++i, packed += size * format.bits / 8) {
            if (dither.on) groups[i].dither_codes(grids[i], format.top(), dither, (start + i) * Dither::words_of(size));
            else if (!format.levels) groups[i].to_codes(grids[i], format.top());
            pack<SIZE>(groups[i].codes, size, format.bits, packed);
            store_scale(grids[i].step, steps, start + i, format.wide_scale);
            if (!format.symmetric) store_scale(grids[i].offset, offsets, start + i, format.wide_scale);
        }
    }
}

template <int SIZE, class Out>
void dequantize(const uint8_t* packed, const void* steps, const void* offsets, int64_t n, int64_t size, Format format,
                Out* y) {
    Group<SIZE> group;
    group.size = size;
    const bool whole = reinterpret_cast<uintptr_t>(y) % 64 == 0 && size * sizeof(Out) % (4 * LANES) == 0;
    const bool streams = whole && n * size * static_cast<int64_t>(sizeof(Out)) > STREAMED;
    for (int64_t i = 0; i < n; ++i, packed += size * format.bits / 8) {
        const float step = load_scale(steps, i, format.wide_scale);
        const float offset = format.symmetric ? step * (-format.top() / 2.0f) : load_scale(offsets, i, format.wide_scale);
        unpack<SIZE>(packed, size, format.bits, group.bytes);
        if (!format.levels && !format.diagonal && !streams) {
            group.uniform_to({step, offset, 0}, y + i * size);
            continue;
        }
        group.from_bytes(format, {step, offset, 0});
        if (format.diagonal) rotate_back<SIZE>(group.values, size, format.diagonal);
        if (streams) group.stream_to(y + i * size);
        else group.store_to(y + i * size);
    }
    if (streams) streamed();
}

}  // namespace

extern "C" {

// What the arguments may be is declared in quantize.py. `offsets` is not touched where the grid is symmetric, `diagonal`
// where groups are not rotated, `levels` where the grid is uniform.

void quantize_groups(const void* x, int64_t bf16, int64_t dithered, int64_t first, int64_t second, int64_t n, int64_t size,
                     int64_t bits, int64_t symmetric, int64_t wide_scale, int64_t unrotated, const float* diagonal,
                     int64_t uniform, const float* levels, uint8_t* packed, void* steps, void* offsets) {
    const Format form = format(bits, symmetric, wide_scale, unrotated, diagonal, uniform, levels);
    const Dither dither = {dithered != 0, static_cast<uint32_t>(first), static_cast<uint32_t>(second)};
    const uint16_t* halves = static_cast<const uint16_t*>(x);
    const float* floats = static_cast<const float*>(x);
    if (bf16) FOR_SIZE(quantize, halves, dither, n, size, form, packed, steps, offsets)
    else FOR_SIZE(quantize, floats, dither, n, size, form, packed, steps, offsets)
}

void dequantize_groups(void* y, int64_t bf16, int64_t n, int64_t size, int64_t bits, int64_t symmetric,
                       int64_t wide_scale, int64_t unrotated, const float* diagonal, int64_t uniform,
                       const float* levels, const uint8_t* packed, const void* steps, const void* offsets) {
    const Format form = format(bits, symmetric, wide_scale, unrotated, diagonal, uniform, levels);
    if (bf16) FOR_SIZE(dequantize, packed, steps, offsets, n, size, form, static_cast<uint16_t*>(y))
    else FOR_SIZE(dequantize, packed, steps, offsets, n, size, form, static_cast<float*>(y))
}

}  // extern "C"
