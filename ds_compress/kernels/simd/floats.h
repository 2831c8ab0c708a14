// Floats and their bits. bf16, the upper half of a float, is passed as uint16_t.

#pragma once

#include <cstdint>
#include <cstring>

constexpr int32_t MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000;

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) { return as_float(static_cast<uint32_t>(x) << 16); }

// The largest finite number of the type.
inline float largest(const float*) { return as_float(INFINITE - 1); }
inline uint16_t largest(const uint16_t*) { return 0x7F7F; }

inline void store(float value, float& y) { y = value; }

// Rounds to nearest, ties to even.
inline void store(float value, uint16_t& y) {
    const uint32_t bits = as_bits(value), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    y = static_cast<uint16_t>(value != value ? 0x7FC0 : rounded);
}
