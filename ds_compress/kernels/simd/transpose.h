// Blocks of a matrix whose rows become columns.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int64_t TILE = 8;  // rows and columns of a block

#if defined(__x86_64__)

// to(j)[i] = from(i)[j] of a block: both give the address of a row.
template <class From, class To>
inline void transpose_tile(const uint16_t*, From from, To to) {
    __m128i x[8], y[8];
    for (int i = 0; i < 8; ++i) x[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from(i)));
    for (int i = 0; i < 4; ++i) {
        y[i] = _mm_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
        y[i + 4] = _mm_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
    }
    for (int half = 0; half < 8; half += 4) {
        x[half] = _mm_unpacklo_epi32(y[half], y[half + 1]);
        x[half + 1] = _mm_unpackhi_epi32(y[half], y[half + 1]);
        x[half + 2] = _mm_unpacklo_epi32(y[half + 2], y[half + 3]);
        x[half + 3] = _mm_unpackhi_epi32(y[half + 2], y[half + 3]);
    }
    for (int j = 0; j < 8; j += 2) {
        const int first = j / 4 * 4 + j % 4 / 2;
        const __m128i even = _mm_unpacklo_epi64(x[first], x[first + 2]), odd = _mm_unpackhi_epi64(x[first], x[first + 2]);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to(j)), even);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to(j + 1)), odd);
    }
}

template <class From, class To>
inline void transpose_tile(const int8_t*, From from, To to) {
    __m128i x[8], y[4];
    for (int i = 0; i < 8; ++i) x[i] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from(i)));
    for (int i = 0; i < 4; ++i) y[i] = _mm_unpacklo_epi8(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 2; ++i) {
        x[2 * i] = _mm_unpacklo_epi16(y[2 * i], y[2 * i + 1]);
        x[2 * i + 1] = _mm_unpackhi_epi16(y[2 * i], y[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        y[2 * i] = _mm_unpacklo_epi32(x[i], x[i + 2]);
        y[2 * i + 1] = _mm_unpackhi_epi32(x[i], x[i + 2]);
    }
    for (int j = 0; j < 8; j += 2) {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to(j)), y[j / 2]);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to(j + 1)), _mm_unpackhi_epi64(y[j / 2], y[j / 2]));
    }
}

template <class From, class To>
inline void transpose_tile(const float*, From from, To to) {
    for (int row = 0; row < 8; row += 4)
        for (int column = 0; column < 8; column += 4) {
            __m128 x[4];
            for (int i = 0; i < 4; ++i) x[i] = _mm_loadu_ps(from(row + i) + column);
            _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
            for (int i = 0; i < 4; ++i) _mm_storeu_ps(to(column + i) + row, x[i]);
        }
}

#else

template <class T, class From, class To>
inline void transpose_tile(const T*, From from, To to) {
    for (int64_t i = 0; i < TILE; ++i)
        for (int64_t j = 0; j < TILE; ++j) to(j)[i] = from(i)[j];
}

#endif

// to(j)[i] = from(i)[j] for all i below `rows` and j below `columns`; T is what they hold. Whole lines of a cache are written,
// of so few rows that it keeps them.
template <class T, class From, class To>
inline void transpose(int64_t rows, int64_t columns, From from, To to) {
    for (int64_t j = 0; j < columns; j += TILE)
        for (int64_t i = 0; i < rows; i += TILE) {
            if (rows - i >= TILE && columns - j >= TILE) {
                transpose_tile(static_cast<const T*>(nullptr), [&](int64_t row) { return from(i + row) + j; },
                           [&](int64_t column) { return to(j + column) + i; });
                continue;
            }
            const int64_t last = rows - i < TILE ? rows : i + TILE, behind = columns - j < TILE ? columns : j + TILE;
            for (int64_t column = j; column < behind; ++column)
                for (int64_t row = i; row < last; ++row) to(column)[row] = from(row)[column];
        }
}

// The same, but whole lines of a cache are read.
template <class T, class From, class To>
inline void transpose_by_rows(int64_t rows, int64_t columns, From from, To to) {
    for (int64_t i = 0; i < rows; i += TILE)
        transpose<T>(rows - i < TILE ? rows - i : TILE, columns, [&](int64_t row) { return from(i + row); },
                     [&](int64_t column) { return to(column) + i; });
}
