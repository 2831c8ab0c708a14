// Products with directions, as reference.py has them up to rounding: rows that are taken together share each load of a direction.

#include <algorithm>
#include <cmath>
#include <vector>

#include "../native/calls.h"
#include "../simd/reduce.h"

namespace {

constexpr int64_t MOST = 64;  // directions
constexpr int ROWS_AT_ONCE = 4, TOGETHER = LANES == 16 ? 4 : 2;  // directions, or vectors, whose sums registers hold: 32 of AVX-512, 16 of others
constexpr float LARGEST_FACTOR = 0x1p104f;
constexpr int CODE_BITS = 7;

// As cpu.py declares them.
struct Factors {
    void* values;
    int64_t bf16, rows, width, rank;
    const float* basis;
    int8_t *codes, *exponents;
};

struct SubtractArguments {
    Factors factors;
    const float* dual;
    void* rest;
};

typedef float Coefficients[ROWS_AT_ONCE][MOST];

// Vectors of directions in the order in which they are read: [rank / TOGETHER, vectors of a row, TOGETHER], filled up with zeros.
// As rows of a matrix they would lie a power of two apart, and take each other's place in the cache.
class Directions {
public:
    Directions(const float* from, const Factors& factors)
        : rank(factors.rank), vectors((factors.width + LANES - 1) / LANES),
          values((rank + TOGETHER - 1) / TOGETHER * TOGETHER * vectors * LANES) {
        for (int64_t d = 0; d < rank; ++d)
            in_vectors(factors.width, [&](int64_t i, int64_t lanes) {
                store(load_partial(from + d * factors.width + i, lanes), &values[place(i, d)]);
            });
    }

    // Of direction d, from value i on, a multiple of LANES.
    Floats vector(int64_t i, int64_t d) const { return load(&values[place(i, d)]); }

    const int64_t rank;

private:
    int64_t place(int64_t i, int64_t d) const {
        return ((d / TOGETHER * vectors + i / LANES) * TOGETHER + d % TOGETHER) * LANES;
    }

    const int64_t vectors;
    std::vector<float> values;
};

// The products of ROWS rows with TOGETHER directions, from `first` on.
template <int ROWS, class In>
void multiply(const In* x, const Directions& dual, int64_t width, int64_t first, Coefficients& to) {
    Floats sums[ROWS][TOGETHER] = {};
    in_vectors(width, [&](int64_t i, int64_t lanes) {
        Floats values[ROWS];
        each<ROWS>([&](auto row) { values[row] = load_partial(x + row * width + i, lanes); });
        each<TOGETHER>([&](auto d) {
            const Floats own = dual.vector(i, first + d);
            each<ROWS>([&](auto row) { sums[row][d] = multiply_add(values[row], own, sums[row][d]); });
        });
    });
    const auto add = [](Floats a, Floats b) { return a + b; };
    for (int row = 0; row < ROWS; ++row)
        for (int d = 0; d < TOGETHER; ++d) to[row][first + d] = reduce(sums[row][d], add)[0];
}

// Rounds coefficients to codes in units of 2^the exponent that it returns; `factors.py` says how.
inline int8_t round_to_codes(const float* coefficients, int64_t rank, int8_t* codes) {
    float most = 0;
    bool fits = true;
    for (int64_t d = 0; d < rank; ++d) {
        const float magnitude = std::fabs(coefficients[d]);
        fits &= magnitude < LARGEST_FACTOR;  // not nan
        most = std::max(most, magnitude);
    }
    int exponent = 0;
    std::frexp(fits ? most : 0, &exponent);
    exponent = std::clamp(exponent - CODE_BITS, -126, 126);
    const float unit = std::ldexp(1.0f, -exponent);
    for (int64_t d = 0; d < rank; ++d)
        codes[d] = fits ? static_cast<int8_t>(std::clamp(std::nearbyint(coefficients[d] * unit), -127.0f, 127.0f)) : 0;
    return static_cast<int8_t>(exponent);
}

// y = x + coefficients * basis, of ROWS rows, in COUNT vectors from value `begin` on, of each of which so many lanes exist.
template <int ROWS, int COUNT, class In, class Out>
void add_vectors(const In* x, const Coefficients& coefficients, const Directions& basis, int64_t width, int64_t begin,
                 int64_t lanes, Out* y) {
    Floats sums[ROWS][COUNT];
    const auto in_each = [&](const auto& work) {
        each<ROWS>([&](auto row) {
            each<COUNT>([&](auto vector) { work(sums[row][vector], row * width + begin + vector * LANES); });
        });
    };
    in_each([&](Floats& sum, int64_t i) { sum = load_partial(x + i, lanes); });
    for (int64_t d = 0; d < basis.rank; ++d) {
        Floats own[COUNT];
        each<COUNT>([&](auto vector) { own[vector] = basis.vector(begin + vector * LANES, d); });
        each<ROWS>([&](auto row) {
            const Floats factor = coefficients[row][d] - Floats{};  // one instruction; x + 0 is a sum, too
            each<COUNT>([&](auto vector) { sums[row][vector] = multiply_add(own[vector], factor, sums[row][vector]); });
        });
    }
    in_each([&](Floats sum, int64_t i) { store_partial(sum, y + i, lanes); });
}

template <int ROWS, class In, class Out>
void add_rows(const In* x, const Coefficients& coefficients, const Directions& basis, int64_t width, Out* y) {
    constexpr int64_t BLOCK = TOGETHER * LANES;
    int64_t begin = 0;
    for (; begin + BLOCK <= width; begin += BLOCK) add_vectors<ROWS, TOGETHER>(x, coefficients, basis, width, begin, LANES, y);
    for (; begin < width; begin += LANES) {
        const int64_t lanes = std::min<int64_t>(LANES, width - begin);
        add_vectors<ROWS, 1>(x, coefficients, basis, width, begin, lanes, y);
    }
}

// What the codes of ROWS rows stand for, times `sign`.
template <int ROWS>
void read_codes(const Factors& factors, int64_t row, float sign, Coefficients& to) {
    for (int64_t r = 0; r < ROWS; ++r) {
        const float unit = sign * std::ldexp(1.0f, factors.exponents[row + r]);
        for (int64_t d = 0; d < factors.rank; ++d) to[r][d] = unit * factors.codes[(row + r) * factors.rank + d];
    }
}

template <int ROWS, class In>
void subtract_rows(const In* x, const Directions& dual, const Directions& basis, const Factors& factors, int64_t row, In* rest) {
    Coefficients coefficients;
    for (int64_t d = 0; d < dual.rank; d += TOGETHER) multiply<ROWS>(x, dual, factors.width, d, coefficients);
    for (int64_t r = 0; r < ROWS; ++r)
        factors.exponents[row + r] =
            round_to_codes(coefficients[r], dual.rank, factors.codes + (row + r) * dual.rank);
    read_codes<ROWS>(factors, row, -1, coefficients);
    add_rows<ROWS>(x, coefficients, basis, factors.width, rest);
}

struct ProjectArguments {
    void* values;
    int64_t bf16, rows, width;
    const void* onto;
    float* lengths;
    int64_t sets;  // changes the values by the lengths, else the lengths are what they have
};

template <class Value>
void project(Value* x, const Value* onto, int64_t width, float& length, bool sets) {
    const auto larger = [](Ints a, Ints b) { return a > b ? a : b; };
    const auto add = [](Floats a, Floats b) { return a + b; };
    Ints most = {};
    in_vectors(width, [&](int64_t i, int64_t lanes) {
        most = larger(most, (Ints)load_partial(onto + i, lanes) & MAGNITUDE);
    });
    const int32_t largest = reduce(most, larger)[0];
    const bool fits = largest > 0 && largest < INFINITE;
    const Floats scale = Floats{} + as_float((254 - std::min(largest >> 23, 253)) << 23), zeros = {};  // to [1, 4)
    const auto scaled = [&](int64_t i, int64_t lanes) { return fits ? load_partial(onto + i, lanes) * scale : zeros; };
    Floats products = {}, squares = {};
    in_vectors(width, [&](int64_t i, int64_t lanes) {
        const Floats own = scaled(i, lanes);
        products = multiply_add(load_partial(x + i, lanes), own, products);
        squares = multiply_add(own, own, squares);
    });
    const float norm = fits ? std::sqrt(reduce(squares, add)[0]) : 1, found = reduce(products, add)[0] / norm;
    if (!sets) {
        length = found;
        return;
    }
    const float lacking = (length - found) / norm;
    if (!(std::fabs(lacking) < as_float(INFINITE))) return;
    in_vectors(width, [&](int64_t i, int64_t lanes) {
        store_partial(multiply_add(scaled(i, lanes), Floats{} + lacking, load_partial(x + i, lanes)), x + i, lanes);
    });
}

// work(row, ROWS) of all rows, ROWS of them at once.
template <class F>
void for_rows(int64_t rows, int threads, const F& work) {
    in_parallel(rows, threads, [&](int64_t row, int64_t end) {
        for (; row + ROWS_AT_ONCE <= end; row += ROWS_AT_ONCE) work(row, std::integral_constant<int, ROWS_AT_ONCE>());
        for (; row < end; ++row) work(row, std::integral_constant<int, 1>());
        return true;
    });
}

}  // namespace

extern "C" {

int64_t subtract_product(const SubtractArguments& args, int threads) {
    const Factors& factors = args.factors;
    const Directions dual(args.dual, factors), basis(factors.basis, factors);
    with_type(factors.values, factors.bf16, [&](auto* x) {
        auto* rest = static_cast<decltype(x)>(args.rest);
        for_rows(factors.rows, threads, [&](int64_t row, auto ROWS) {
            const int64_t begin = row * factors.width;
            subtract_rows<ROWS()>(x + begin, dual, basis, factors, row, rest + begin);
        });
    });
    return 0;
}

int64_t add_product(const Factors& args, int threads) {
    const Directions basis(args.basis, args);
    with_type(args.values, args.bf16, [&](auto* y) {
        for_rows(args.rows, threads, [&](int64_t row, auto ROWS) {
            Coefficients coefficients;
            read_codes<ROWS()>(args, row, 1, coefficients);
            add_rows<ROWS()>(y + row * args.width, coefficients, basis, args.width, y + row * args.width);
        });
    });
    return 0;
}

int64_t project_rows(const ProjectArguments& args, int threads) {
    with_type(args.values, args.bf16, [&](auto* x) {
        const auto* onto = static_cast<decltype(x)>(const_cast<void*>(args.onto));
        in_parallel(args.rows, threads, [&](int64_t row, int64_t end) {
            for (; row < end; ++row)
                project(x + row * args.width, onto + row * args.width, args.width, args.lengths[row], args.sets);
            return true;
        });
    });
    return 0;
}

}  // extern "C"
