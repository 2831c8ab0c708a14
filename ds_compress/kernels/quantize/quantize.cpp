// Group-wise quantization, bit-identical to reference.py.

#include "group.h"
#include "../native/calls.h"

namespace {

template <int SIZE, class In>
void quantize(const In* x, Dither dither, int64_t n, int64_t size, Format format, uint8_t* packed,
              void* steps, void* offsets) {
    Batch<SIZE, 16> batch(size, format);
    for (int64_t start = 0; start < n; start += batch.GROUPS) {
        const int count = n - start < batch.GROUPS ? n - start : batch.GROUPS;
        for (int i = 0; i < count; ++i) batch.groups[i].load(x + (start + i) * size, format.diagonal);
        batch.make_grids(count, format, [&](int i) {
            batch.groups[i].load_saturated(x + (start + i) * size, format.diagonal);
        });
        for (int i = 0; i < count; ++i, packed += size * format.bits / 8) {
            Group<SIZE>& group = batch.groups[i];
            const Grid grid = batch.grids[i];
            fetch(x + (start + batch.GROUPS + i) * size, size);  // the next batch, while this one is computed
            if (dither.on) group.dither_codes(grid, dither, (start + i) * Dither::words_of(size));
            if (dither.on || format.levels) pack<SIZE>(group.codes, size, format.bits, packed);
            else group.pack_codes(format, grid, packed);
        }
        batch.store_scales(count, format, start, steps, offsets);
    }
}

template <int SIZE, bool STREAMS, class Out>
void dequantize(const uint8_t* packed, const void* steps, const void* offsets, int64_t n, int64_t size, Format format,
                Out* y) {
    Group<SIZE> group;
    group.size = size;
    for (int64_t i = 0; i < n; ++i, packed += size * format.bits / 8, y += size) {
        const auto deliver = [=](int64_t j, int64_t lanes, Floats x) { store_partial<STREAMS>(x, y + j, lanes); };
        group.return_values(format, load_grid(format, steps, offsets, i), packed, deliver);
    }
}

template <int SIZE, class Out>
void dequantize(const uint8_t* packed, const void* steps, const void* offsets, int64_t n, int64_t size, Format format,
                Out* y) {
    if (size % LANES != 0 || !to_be_streamed(y, n * size))
        return dequantize<SIZE, false>(packed, steps, offsets, n, size, format, y);
    dequantize<SIZE, true>(packed, steps, offsets, n, size, format, y);
    store_fence();
}

}  // namespace

extern "C" {

// cpu.py declares what the arguments may be. `offsets` is not touched if the grid is symmetric.

void quantize_groups(const void* x, int64_t bf16, int64_t dithered, int64_t first, int64_t second, FORMAT_PARAMETERS,
                     uint8_t* packed, void* steps, void* offsets) {
    const Dither dither = {dithered != 0, static_cast<uint32_t>(first), static_cast<uint32_t>(second)};
    const Format format = FORMAT_OF_ARGUMENTS;
    with_type(x, bf16, [&](auto* values) {
        FOR_SIZE(quantize, values, dither, n, size, format, packed, steps, offsets)
    });
}

void dequantize_groups(void* y, int64_t bf16, FORMAT_PARAMETERS, const uint8_t* packed, const void* steps,
                       const void* offsets) {
    const Format format = FORMAT_OF_ARGUMENTS;
    with_type(y, bf16, [&](auto* values) {
        FOR_SIZE(dequantize, packed, steps, offsets, n, size, format, values)
    });
}

EXPORT_PARALLEL(quantize_groups)
EXPORT_PARALLEL(dequantize_groups)

}  // extern "C"
