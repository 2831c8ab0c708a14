// Group-wise quantization, bit-identical to reference.py.

#include "group.h"

namespace {

// As cpu.py declares them.
struct QuantizeArguments {
    GroupArguments groups;
    int64_t dithered, first, second;  // first, second: halves of the key of draws
};

template <int SIZE, class In>
void quantize(const In* x, GroupArguments args, Draws* draws, int64_t begin, int64_t end) {
    Batch<SIZE, 16> batch(args);
    uint8_t* packed = args.codes(begin);
    for (int64_t start = begin; start < end; start += batch.GROUPS) {
        const int count = end - start < batch.GROUPS ? end - start : batch.GROUPS;
        for (int i = 0; i < count; ++i) batch.groups[i].load(x + (start + i) * args.size, args.diagonal);
        batch.make_grids(count, args, [&](int i) {
            batch.groups[i].load_saturated(x + (start + i) * args.size, args.diagonal);
        });
        for (int i = 0; i < count; ++i, packed += args.size * args.bits / 8) {
            Group<SIZE>& group = batch.groups[i];
            const Grid grid = batch.grids[i];
            fetch(x + (start + batch.GROUPS + i) * args.size, args.size);  // the next batch, while this one is computed
            if (draws) {
                group.dither_with(*draws, start + i);
                group.template pack_codes<true>(args, grid, packed);
            } else {
                group.template pack_codes<false>(args, grid, packed);
            }
        }
        batch.store_scales(count, args, start);
    }
}

template <int SIZE, bool STREAMS, bool DITHERED, class Out>
void dequantize(Out* y, GroupArguments args, Draws* draws, int64_t begin, int64_t end) {
    Group<SIZE> group;
    group.size = args.size;
    const uint8_t* packed = args.codes(begin);
    for (int64_t i = begin; i < end; ++i, packed += args.size * args.bits / 8) {
        if (DITHERED) group.dither_with(*draws, i);
        const Delivery<STREAMS, Out> deliver{y + i * args.size};
        group.template return_values<DITHERED>(args, load_grid(args, i), packed, deliver);
    }
    if (STREAMS) store_fence();
}

}  // namespace

extern "C" {

int64_t quantize_groups(const QuantizeArguments& args, int threads) {
    return for_groups(args.groups, threads, [&](const auto* x, auto SIZE, int64_t begin, int64_t end) {
        Draws draws(args.first, args.second);
        quantize<SIZE()>(x, args.groups, args.dithered ? &draws : nullptr, begin, end);
    });
}

int64_t dequantize_groups(const QuantizeArguments& args, int threads) {
    return for_groups(args.groups, threads, [&](auto* y, auto SIZE, int64_t begin, int64_t end) {
        Draws draws(args.first, args.second);
        const auto run = [&](auto STREAMS, auto DITHERED) {
            dequantize<SIZE(), STREAMS(), DITHERED()>(y, args.groups, &draws, begin, end);
        };
        const auto choose = [&](auto STREAMS) {
            if (args.dithered) run(STREAMS, std::true_type());
            else run(STREAMS, std::false_type());
        };
        const int64_t size = args.groups.size;
        if (size % LANES == 0 && to_be_streamed(y + begin * size, (end - begin) * size)) choose(std::true_type());
        else choose(std::false_type());
    });
}

}  // extern "C"
