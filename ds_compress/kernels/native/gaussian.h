// Codes on the grid for normal values of kernels/gaussian.py. SIZE is that of the group, or 0 where it is known at run
// time only; HALF is the number of levels above 0. Behind all that is [size] there is room for a whole vector.

#pragma once

#include "floats.h"
#include "hadamard.h"

typedef uint8_t Bytes __attribute__((vector_size(LANES)));

// As many of each as codes of 4 bits have; what fewer bits lack is not read.
struct Levels {
    float level[8];
    float squared_boundary[8];
};

// Halves are added until one value is left; destroys `values` [size], size a power of two.
template <int SIZE>
inline float tree_sum(float* values, int64_t size) {
    int64_t half = (SIZE ? SIZE : size) / 2;
    for (; half >= LANES; half /= 2)
        for (int64_t i = 0; i < half; i += LANES) {
            Floats first, second;
            std::memcpy(&first, values + i, sizeof first);
            std::memcpy(&second, values + half + i, sizeof second);
            first += second;
            std::memcpy(values + i, &first, sizeof first);
        }
    float lanes[LANES];
    std::memcpy(lanes, values, sizeof lanes);
    for (half = half < LANES / 2 ? half : LANES / 2; half; half /= 2)
        for (int i = 0; i < LANES / 2; ++i) lanes[i] = i < half ? lanes[i] + lanes[i + half] : lanes[i];
    return lanes[0];
}

// The codes of `values` [size], and the scale before it is rounded; `squares` and `products` [size] are work space.
template <int SIZE, int HALF>
inline float gaussian_codes(const float* values, int64_t size, const Levels& levels, uint8_t* codes, float* squares,
                            float* products) {
    const int64_t count = SIZE ? SIZE : size;
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = as_bits(values[i]) & MAGNITUDE;
        largest = bits > largest ? bits : largest;
    }
    int32_t exponent = static_cast<int32_t>(largest >> 23) - 127;
    exponent = exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
    const float down = as_float((127 - exponent) << 23), up = as_float((127 + exponent) << 23);
    for (int64_t i = 0; i < count; ++i) squares[i] = (values[i] * down) * (values[i] * down);
    const float mean = tree_sum<SIZE>(squares, size) * (1.0f / count);
    Ints level_of[HALF];
    Floats boundary[HALF];
    for (int j = 0; j < HALF; ++j) {
        level_of[j] = (Ints)(Floats{} + levels.level[j]);
        boundary[j] = Floats{} + mean * levels.squared_boundary[j];
    }
    for (int64_t i = 0; i < count; i += LANES) {
        Floats x;
        std::memcpy(&x, values + i, sizeof x);
        x *= down;
        const Floats square = x * x;
        Ints place = {}, level = level_of[0];
        for (int j = 0; j + 1 < HALF; ++j) {
            const Ints beyond = square > boundary[j];
            level = (beyond & level_of[j + 1]) | (~beyond & level);
            place -= beyond;
        }
        const Bytes code = __builtin_convertvector((place ^ (Ints)(x < 0)) + HALF, Bytes);
        const Floats product = (Floats)((Ints)x & INT32_MAX) * (Floats)level, energy = (Floats)level * (Floats)level;
        std::memcpy(codes + i, &code, sizeof code);
        std::memcpy(products + i, &product, sizeof product);
        std::memcpy(squares + i, &energy, sizeof energy);
    }
    const float scale = tree_sum<SIZE>(products, size) / tree_sum<SIZE>(squares, size) * up;
    return scale + (scale - scale);
}

template <int SIZE, int HALF>
inline void gaussian_values(const uint8_t* codes, int64_t size, const Levels& levels, float scale, float* values) {
    Ints value_of[HALF];
    for (int j = 0; j < HALF; ++j) value_of[j] = (Ints)(Floats{} + scale * levels.level[j]);
    for (int64_t i = 0; i < (SIZE ? SIZE : size); i += LANES) {
        Bytes bytes;
        std::memcpy(&bytes, codes + i, sizeof bytes);
        const Ints code = __builtin_convertvector(bytes, Ints), below = code < HALF;
        const Ints place = (code ^ below) & (HALF - 1);
        Ints value = value_of[0];
        for (int j = 1; j < HALF; ++j) {
            const Ints reached = place >= j;
            value = (reached & value_of[j]) | (~reached & value);
        }
        value ^= below & INT32_MIN;
        std::memcpy(values + i, &value, sizeof value);
    }
}
