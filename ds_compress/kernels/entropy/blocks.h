// Blocks that are coded beside each other.

#pragma once

#include "entropy.h"
#include "lanes.h"

constexpr int AT_ONCE = 2;  // the states of one wait less for each other than for themselves

// Whether AT_ONCE blocks begin here that are whole, have all lanes and are in one context.
inline bool together(const Frame& frame, int64_t block) {
    const int64_t first = block * frame.length, behind = first + AT_ONCE * frame.length;
    return frame.lanes == MOST_LANES && behind <= frame.numel &&
           frame.context_of(first) == frame.context_of(behind - 1);
}
