// Vectors of floats, as wide as a register of the target: the compiler cuts wider ones up, value by value.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12 warns of its own headers
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

// What loops over vectors call: out of line, what such a call changes would be in memory.
#define INLINED inline __attribute__((always_inline))

// X86(NAME): the instruction on whole registers that has this name for registers of any size.
#if defined(__AVX512BW__)
constexpr int LANES = 16;
typedef __m512i Register;
typedef __m256i HalfRegister;
#define X86(NAME) _mm512_##NAME
#elif defined(__AVX2__)
constexpr int LANES = 8;
typedef __m256i Register;
typedef __m128i HalfRegister;
#define X86(NAME) _mm256_##NAME
#elif defined(__SSE4_1__)
constexpr int LANES = 4;
typedef __m128i Register, HalfRegister;
#define X86(NAME) _mm_##NAME
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(4 * LANES)));
typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));

// f of each number below COUNT, as a constant: arrays that only such numbers index stay in registers.
template <class F, int... NUMBERS>
inline void each(F f, std::integer_sequence<int, NUMBERS...>) {
    (f(std::integral_constant<int, NUMBERS>{}), ...);
}

template <int COUNT, class F>
inline void each(F f) {
    each(f, std::make_integer_sequence<int, COUNT>{});
}

// Floats and their bits. bf16, the upper half of a float, is passed as uint16_t.

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

// Calls f with `values` as floats of 16 bits, bf16 or any, or as Wide.
template <class Wide = float, class F>
inline auto with_type(void* values, int64_t is_16_bits, const F& f) {
    if (is_16_bits) return f(static_cast<uint16_t*>(values));
    return f(static_cast<Wide*>(values));
}

inline Floats load(const float* values) {
    Floats x;
    std::memcpy(&x, values, sizeof x);
    return x;
}

#if defined(X86)
// LANES numbers in the lower bytes of a register.
template <class Narrow, class Value>
inline Narrow load_narrow(const Value* values) {
    Narrow numbers = {};
    std::memcpy(&numbers, values, LANES * sizeof(Value));
    return numbers;
}
#endif

// bf16, the upper halves of floats.
inline Floats load(const uint16_t* values) {
#if defined(X86)
    return (Floats)X86(slli_epi32)(X86(cvtepu16_epi32)(load_narrow<HalfRegister>(values)), 16);
#else
    Ints x;
    for (int j = 0; j < LANES; ++j) x[j] = static_cast<int32_t>(static_cast<uint32_t>(values[j]) << 16);
    return (Floats)x;
#endif
}

inline Ints load(const uint8_t* values) {
#if defined(X86)
    return (Ints)X86(cvtepu8_epi32)(load_narrow<__m128i>(values));
#else
    Ints x;
    for (int j = 0; j < LANES; ++j) x[j] = values[j];
    return x;
#endif
}

inline Ints load(const int8_t* values) {
#if defined(X86)
    return (Ints)X86(cvtepi8_epi32)(load_narrow<__m128i>(values));
#else
    return (load(reinterpret_cast<const uint8_t*>(values)) ^ 128) - 128;
#endif
}

inline Ints load(const int32_t* values) {
    Ints x;
    std::memcpy(&x, values, sizeof x);
    return x;
}

inline void store(Floats x, float* values) { std::memcpy(values, &x, sizeof x); }

inline void store(Ints x, int32_t* values) { std::memcpy(values, &x, sizeof x); }

// The lower halves of numbers from 0 to 65535.
inline void store(Ints x, uint16_t* values) {
#if defined(__AVX512BW__)
    const __m256i halves = _mm512_cvtepi32_epi16((__m512i)x);
    std::memcpy(values, &halves, sizeof halves);
#elif defined(__AVX2__)
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x, (__m256i)x), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values), _mm256_castsi256_si128(halves));
#else
    for (int j = 0; j < LANES; ++j) values[j] = static_cast<uint16_t>(x[j]);
#endif
}

// As bf16: rounds to nearest, ties to even.
inline void store(Floats x, uint16_t* values) {
    const Words bits = (Words)x, upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    store((Ints)(x != x ? Words{} + 0x7FC0 : upper), values);
}

// The lowest byte of each lane.
inline void store(Ints x, uint8_t* values) {
#if defined(__AVX512BW__)
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)x);
    std::memcpy(values, &bytes, sizeof bytes);
#elif defined(__AVX2__)
    const __m256i lowest = _mm256_set1_epi32(0x0C080400);
    const __m256i halves = _mm256_shuffle_epi8((__m256i)x, lowest);  // in each half four times the four bytes
    const __m128i joined = _mm_unpacklo_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(values), joined);
#else
    for (int j = 0; j < LANES; ++j) values[j] = static_cast<uint8_t>(x[j]);
#endif
}

// Towards zero. What no integer holds, and nan, becomes one that has the low 24 bits of 0.
inline Ints truncated(Floats x) {
#if defined(X86)
    return (Ints)X86(cvttps_epi32)(x);
#else
    return __builtin_convertvector(x == x ? x : Floats{}, Ints);
#endif
}

// The nearest integers, ties to even, of what an integer holds.
inline Ints nearest(Floats x) {
#if defined(X86)
    return (Ints)X86(cvtps_epi32)(x);
#else
    const Floats whole = (Floats)(((Ints)x & ~MAGNITUDE) | 0x4B000000);  // 2^23, with the sign of x: there floats are integers
    return __builtin_convertvector(((Ints)x & MAGNITUDE) < 0x4B000000 ? (x + whole) - whole : x, Ints);
#endif
}

// Four vectors of numbers as bytes, which `in_order` puts into their order: x86 joins what is in the same sixteen bytes
// of its registers. Below 0 a number becomes 0.
inline Bytes narrowed(const Ints (&x)[4]) {
#if defined(X86)
    const Register first = X86(packs_epi32)((Register)x[0], (Register)x[1]);
    return (Bytes)X86(packus_epi16)(first, X86(packs_epi32)((Register)x[2], (Register)x[3]));
#else
    Bytes bytes;
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < LANES; ++j) bytes[i * LANES + j] = static_cast<uint8_t>(x[i][j] > 0 ? x[i][j] : 0);
    return bytes;
#endif
}

inline Bytes in_order(Bytes x) {
#if defined(__AVX512BW__)
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return (Bytes)_mm512_permutexvar_epi32(order, (__m512i)x);
#elif defined(__AVX2__)
    return (Bytes)_mm256_permutevar8x32_epi32((__m256i)x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#else
    return x;
#endif
}

// The inverse of `in_order`: bytes in their order as `narrowed` leaves them.
inline Bytes joined_order(Bytes x) {
#if defined(__AVX512BW__)
    return in_order(x);
#elif defined(__AVX2__)
    return (Bytes)_mm256_permutevar8x32_epi32((__m256i)x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
#else
    return x;
#endif
}

// The upper bytes of the sums of numbers from 0 to 65535 and bytes, cut off at 65535. Bytes are as `narrowed` leaves them.
inline Bytes upper_bytes(const Ints (&x)[4], Bytes y) {
#if defined(X86)
    const auto of_two = [](Ints low, Ints high, Register bytes) __attribute__((always_inline)) {
        return X86(srli_epi16)(X86(adds_epu16)(X86(packus_epi32)((Register)low, (Register)high), bytes), 8);
    };
    return (Bytes)X86(packus_epi16)(of_two(x[0], x[1], X86(unpacklo_epi8)((Register)y, Register{})),
                                    of_two(x[2], x[3], X86(unpackhi_epi8)((Register)y, Register{})));
#else
    Bytes bytes;
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < LANES; ++j) {
            const int32_t sum = x[i][j] + y[i * LANES + j];
            bytes[i * LANES + j] = static_cast<uint8_t>(sum < 65536 ? sum >> 8 : 255);
        }
    return bytes;
#endif
}

// low + 256 * high of bytes as `narrowed` leaves them: four vectors in their order.
inline void join_bytes(Bytes low, Bytes high, Ints (&to)[4]) {
#if defined(X86)
    const Register zero = {}, first = X86(unpacklo_epi8)((Register)low, (Register)high);
    const Register second = X86(unpackhi_epi8)((Register)low, (Register)high);
    to[0] = (Ints)X86(unpacklo_epi16)(first, zero), to[1] = (Ints)X86(unpackhi_epi16)(first, zero);
    to[2] = (Ints)X86(unpacklo_epi16)(second, zero), to[3] = (Ints)X86(unpackhi_epi16)(second, zero);
#else
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < LANES; ++j) to[i][j] = low[i * LANES + j] | high[i * LANES + j] << 8;
#endif
}

// Four vectors of numbers as two, cut off at the ends of 16 bits; and bytes as `narrowed` leaves them, in the same order.
inline void join_shorts(const Ints (&x)[4], Shorts (&to)[2]) {
#if defined(X86)
    for (int i = 0; i < 2; ++i) to[i] = (Shorts)X86(packs_epi32)((Register)x[2 * i], (Register)x[2 * i + 1]);
#else
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < LANES; ++j) {
            const int32_t number = x[i][j] < -32768 ? -32768 : x[i][j] > 32767 ? 32767 : x[i][j];
            to[i / 2][i % 2 * LANES + j] = static_cast<int16_t>(number);
        }
#endif
}

inline void widen(Bytes x, Shorts (&to)[2]) {
#if defined(X86)
    to[0] = (Shorts)X86(unpacklo_epi8)((Register)x, Register{}), to[1] = (Shorts)X86(unpackhi_epi8)((Register)x, Register{});
#else
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2 * LANES; ++j) to[i][j] = x[2 * LANES * i + j];
#endif
}

// Those of `join_shorts` in their order.
inline void store(Shorts x, uint16_t* values) {
#if defined(__AVX512BW__)
    x = (Shorts)_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), (__m512i)x);
#elif defined(__AVX2__)
    x = (Shorts)_mm256_permute4x64_epi64((__m256i)x, 0xD8);
#endif
    std::memcpy(values, &x, sizeof x);
}

// Stores four vectors (no nan). Unrolled by hand: compilers spill the array.
inline void store_numbers(const Floats (&x)[4], float* values) {
    store(x[0], values), store(x[1], values + LANES), store(x[2], values + 2 * LANES), store(x[3], values + 3 * LANES);
}

inline void store_numbers(const Floats (&x)[4], uint16_t* values) {
    Ints upper[4];
    Shorts joined[2];
    for (int k = 0; k < 4; ++k) upper[k] = (Ints)((Words)x[k] + 0x7FFF + ((Words)x[k] >> 16 & 1)) >> 16;
    join_shorts(upper, joined);
    for (int k = 0; k < 2; ++k) store(joined[k], values + 2 * k * LANES);
}

inline void store(Bytes x, uint8_t* values) { std::memcpy(values, &x, sizeof x); }

// Four vectors of numbers from 0 to 255.
inline void store(const Ints (&x)[4], uint8_t* values) { store(in_order(narrowed(x)), values); }

// Every lane's neighbour, so many lanes away.
template <int DISTANCE, class Vector>
inline Vector swapped(Vector x) {
    Vector other;
#ifdef __clang__
    for (int j = 0; j < LANES; ++j) other[j] = x[j ^ DISTANCE];
#else
    Ints lanes;
    for (int j = 0; j < LANES; ++j) lanes[j] = j ^ DISTANCE;
    other = __builtin_shuffle(x, lanes);
#endif
    return other;
}

// x * y + other. All targets give the same bits where products are exact, as with signs 1, -1 or 0; else some round twice.
inline Floats multiply_add(Floats x, Floats y, Floats other) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)other);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)other);
#else
    return x * y + other;
#endif
}

template <class Vector>
inline Vector smaller(Vector x, Vector y) {
    return x < y ? x : y;
}

template <class Vector>
inline Vector larger(Vector x, Vector y) {
    return x > y ? x : y;
}

// Finite numbers cut off at `most`; inf and nan stay.
inline Floats saturated(Floats x, float most) {
    const Floats limit = Floats{} + most;
    return ((Ints)x & MAGNITUDE) < INFINITE ? larger(smaller(x, limit), -limit) : x;
}

// Vectors of [n] values, the last one filled up with zeros: work(place, how many of its lanes exist). SIZE is n, or 0
// where it is known at run time only.
template <int SIZE = 0, class F>
INLINED void in_vectors(int64_t n, const F& work) {
    if constexpr (SIZE != 0 && SIZE % LANES == 0) {
        for (int64_t i = 0; i < SIZE; i += LANES) work(i, LANES);
    } else {
        for (int64_t i = 0; i < n; i += LANES) work(i, n - i < LANES ? n - i : LANES);
    }
}

template <class In>
inline Floats load_partial(const In* x, int64_t count) {
    if (count == LANES) return load(x);
    In last[LANES] = {};
    std::memcpy(last, x, count * sizeof(In));
    return load(last);
}

template <class Vector, class Out>
inline void store_partial(Vector x, Out* y, int64_t count) {
    if (count == LANES) return store(x, y);
    Out last[LANES];
    store(x, last);
    std::memcpy(y, last, count * sizeof(Out));
}
