// How Python calls a function, see function.py: with rows of words instead of arguments, of which each would have to be
// made something for C, at every call.

#pragma once

#include <cstdint>
#include <cstring>
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

// `known`: how many arguments are `given`, the place of each, and all arguments in their order, with anything in those
// places.
template <class Result, class... Values>
int64_t call(Result (*function)(Values...), const Word* known, const Word* given) {
    const Word count = known[0];
    Word words[sizeof...(Values)];
    std::memcpy(words, known + 1 + count, sizeof words);
    for (Word i = 0; i < count; ++i) words[known[1 + i]] = given[i];
    return call(function, words, std::index_sequence_for<Values...>());
}

#define BY_WORDS(NAME) \
    int64_t NAME##_by_words(const Word* known, const Word* given) { return call(NAME, known, given); }
