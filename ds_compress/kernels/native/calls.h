// How Python calls a function, see function.py: arguments come in arrays of 64-bit words, because converting each argument
// for C at every call would take longer.

#pragma once

#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>

// An integer, an address, or the bits of a double.
using Word = uint64_t;

template <class Value>
Value from_word(Word word) {
    if constexpr (std::is_floating_point_v<Value>) {
        double number;
        std::memcpy(&number, &word, sizeof number);
        return static_cast<Value>(number);
    } else if constexpr (std::is_pointer_v<Value>) {
        return reinterpret_cast<Value>(static_cast<uintptr_t>(word));
    } else {
        return static_cast<Value>(word);
    }
}

template <class Result, class... Values, size_t... PLACES>
int64_t call(Result (*function)(Values...), const Word* words, std::index_sequence<PLACES...>) {
    if constexpr (std::is_void_v<Result>) {
        function(from_word<Values>(words[PLACES])...);
        return 0;
    } else {
        return function(from_word<Values>(words[PLACES])...);
    }
}

// The arguments of a function. `known`: how many of them are `given`, the place of each, and all in their order, with
// anything in those places.
template <int64_t COUNT>
struct Arguments {
    Word words[COUNT];

    Arguments(const Word* known, const Word* given) {
        const Word count = known[0];
        std::memcpy(words, known + 1 + count, sizeof words);
        for (Word i = 0; i < count; ++i) words[known[1 + i]] = given[i];
    }
};

template <class Result, class... Values>
int64_t call(Result (*function)(Values...), const Word* known, const Word* given) {
    const Arguments<sizeof...(Values)> arguments(known, given);
    return call(function, arguments.words, std::index_sequence_for<Values...>());
}

// The same by so many threads, this one among them. `moves`: the place of the number of rows, the rows that each part but
// the last is a multiple of, and by how many bytes such a multiple moves each argument that is there.
template <class Result, class... Values>
int64_t call(Result (*function)(Values...), const Word* known, const Word* given, const Word* moves, int64_t threads) {
    constexpr int64_t MOST = 64;
    constexpr auto PLACES = std::index_sequence_for<Values...>();
    const Arguments<sizeof...(Values)> whole(known, given);
    const int64_t rows = whole.words[moves[0]], unit = moves[1], units = (rows + unit - 1) / unit;
    threads = threads < 1 ? 1 : threads < MOST ? threads : MOST;
    const int64_t share = (units + threads - 1) / threads;  // of units, for each
    int64_t results[MOST];
    const auto work = [&, function](int64_t number) {
        Arguments<sizeof...(Values)> part = whole;
        const int64_t first = number * share, some = rows - first * unit;
        part.words[moves[0]] = some < share * unit ? some : share * unit;
        for (size_t i = 0; i < sizeof...(Values); ++i)
            if (whole.words[i]) part.words[i] += first * moves[2 + i];
        results[number] = call(function, part.words, PLACES);
    };
    std::thread others[MOST];
    int64_t parts = 1;
    for (; parts * share < units; ++parts) {
        try {
            others[parts] = std::thread(work, parts);
        } catch (...) {  // no thread can be had
            work(parts);
        }
    }
    work(0);
    int64_t result = results[0];
    for (int64_t i = 1; i < parts; ++i) {
        if (others[i].joinable()) others[i].join();
        result &= results[i];
    }
    return result;
}

// How function.py writes the type of an argument: q for an integer, d for a float, the size of what an address leads to, or
// Q where it leads to anything.
template <class Value>
constexpr char type_code() {
    using Target = std::remove_pointer_t<Value>;
    if constexpr (!std::is_pointer_v<Value>) return std::is_floating_point_v<Value> ? 'd' : 'q';
    else if constexpr (std::is_void_v<Target>) return 'Q';
    else return '0' + sizeof(Target);
}

template <class Result, class... Values>
const char* type_codes(Result (*)(Values...)) {
    static const char codes[] = {type_code<Values>()..., 0};
    return codes;
}

#define EXPORT(NAME)                                            \
    const char* NAME##_types() { return type_codes(NAME); }     \
    int64_t NAME##_by_words(const Word* known, const Word* given) { return call(NAME, known, given); }

// For functions with rows that have nothing to do with each other.
#define EXPORT_PARALLEL(NAME)                                                                                          \
    EXPORT(NAME)                                                                                              \
    int64_t NAME##_in_parts(const Word* known, const Word* given, const Word* moves, int64_t threads) {         \
        return call(NAME, known, given, moves, threads);                                                        \
    }
