// Matrices of bytes, turned: columns become rows.

#pragma once

#include <cstdint>
#include <cstring>

template <int DISTANCE>
inline void exchange(uint64_t (&rows)[8], uint64_t mask) {
    for (int i = 0; i < 8; ++i)
        if (!(i & DISTANCE)) {
            const uint64_t differing = (rows[i] >> (8 * DISTANCE) ^ rows[i + DISTANCE]) & mask;
            rows[i + DISTANCE] ^= differing;
            rows[i] ^= differing << (8 * DISTANCE);
        }
}

// Eight rows of eight bytes; rows begin so many bytes apart.
inline void turn_eight(const uint8_t* from, int64_t apart, uint8_t* to, int64_t to_apart) {
    uint64_t rows[8];
    for (int i = 0; i < 8; ++i) std::memcpy(&rows[i], from + i * apart, 8);
    exchange<4>(rows, 0x00000000FFFFFFFF);
    exchange<2>(rows, 0x0000FFFF0000FFFF);
    exchange<1>(rows, 0x00FF00FF00FF00FF);
    for (int i = 0; i < 8; ++i) std::memcpy(to + i * to_apart, &rows[i], 8);
}

inline void turn(const uint8_t* from, int64_t rows, int64_t columns, int64_t apart, uint8_t* to, int64_t to_apart) {
    for (int64_t column = 0; column < columns; column += 8)
        for (int64_t row = 0; row < rows; row += 8) {
            const uint8_t* first = from + row * apart + column;
            uint8_t* its = to + column * to_apart + row;
            if (row + 8 <= rows && column + 8 <= columns) {
                turn_eight(first, apart, its, to_apart);
                continue;
            }
            for (int64_t i = 0; i < 8 && row + i < rows; ++i)
                for (int64_t j = 0; j < 8 && column + j < columns; ++j) its[j * to_apart + i] = first[i * apart + j];
        }
}
