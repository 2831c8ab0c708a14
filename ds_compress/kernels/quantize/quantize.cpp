// Group-wise quantization, bit-identical to reference.py.

#include "group.h"
#include "../native/calls.h"

namespace {

template <int SIZE, class In>
void quantize(const In* x, Draws* draws, int64_t n, int64_t size, Format format, uint8_t* packed,
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
            if (draws) {
                group.draw(*draws, start + i);
                group.template pack_codes<true>(format, grid, packed);
            } else {
                group.template pack_codes<false>(format, grid, packed);
            }
        }
        batch.store_scales(count, format, start, steps, offsets);
    }
}

template <int SIZE, bool STREAMS, bool DITHERED, class Out>
void dequantize(const uint8_t* packed, const void* steps, const void* offsets, Draws* draws, int64_t n, int64_t size,
                Format format, Out* y) {
    Group<SIZE> group;
    group.size = size;
    for (int64_t i = 0; i < n; ++i, packed += size * format.bits / 8, y += size) {
        if (DITHERED) group.draw(*draws, i);
        const Delivery<STREAMS, Out> deliver{y};
        group.template return_values<DITHERED>(format, load_grid(format, steps, offsets, i), packed, deliver);
    }
}

template <int SIZE, class Out>
void dequantize(const uint8_t* packed, const void* steps, const void* offsets, Draws* draws, int64_t n, int64_t size,
                Format format, Out* y) {
    const bool streams = size % LANES == 0 && to_be_streamed(y, n * size);
    const auto run = [&](auto is_streamed, auto is_dithered) {
        dequantize<SIZE, is_streamed(), is_dithered()>(packed, steps, offsets, draws, n, size, format, y);
    };
    const auto choose = [&](auto is_streamed) {
        if (draws) run(is_streamed, std::true_type());
        else run(is_streamed, std::false_type());
    };
    if (!streams) return choose(std::false_type());
    choose(std::true_type());
    store_fence();
}

}  // namespace

extern "C" {

// cpu.py declares what the arguments may be. `offsets` is not touched if the grid is symmetric.

void quantize_groups(const void* x, int64_t bf16, int64_t dithered, int64_t first, int64_t second, FORMAT_PARAMETERS,
                     uint8_t* packed, void* steps, void* offsets) {
    Draws draws(first, second);
    Draws* its = dithered ? &draws : nullptr;
    const Format format = FORMAT_OF_ARGUMENTS;
    with_type(x, bf16, [&](auto* values) {
        FOR_SIZE(quantize, values, its, n, size, format, packed, steps, offsets)
    });
}

void dequantize_groups(void* y, int64_t bf16, int64_t dithered, int64_t first, int64_t second, FORMAT_PARAMETERS,
                       const uint8_t* packed, const void* steps, const void* offsets) {
    Draws draws(first, second);
    Draws* its = dithered ? &draws : nullptr;
    const Format format = FORMAT_OF_ARGUMENTS;
    with_type(y, bf16, [&](auto* values) {
        FOR_SIZE(dequantize, packed, steps, offsets, its, n, size, format, values)
    });
}

EXPORT_PARALLEL(quantize_groups)
EXPORT_PARALLEL(dequantize_groups)

}  // extern "C"
