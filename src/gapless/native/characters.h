// Sets of characters, as regexes name them.
#pragma once

#include <algorithm>

#include "word_characters.h"

namespace gapless {

constexpr uint32_t LAST_CHARACTER = 0x10ffff;

inline const Spans DIGITS = {{'0', '9'}};
inline const Spans SPACES = {{9, 13}, {' ', ' '}, {0x85, 0x85}, {0xa0, 0xa0}, {0x1680, 0x1680}, {0x2000, 0x200a},
                             {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}};

// Sorted, and joined where they touch.
inline Spans in_order(Spans spans) {
    std::sort(spans.begin(), spans.end());
    Spans found;
    for (const auto& [from, to] : spans) {
        if (!found.empty() && from <= found.back().second + 1)
            found.back().second = std::max(found.back().second, to);
        else
            found.push_back({from, to});
    }
    return found;
}

// All other characters. Surrogates are none.
inline Spans others(Spans spans) {
    spans.push_back({0xd800, 0xdfff});
    Spans found;
    uint32_t next = 0;
    for (const auto& [from, to] : in_order(std::move(spans))) {
        if (from > next) found.push_back({next, from - 1});
        next = to + 1;
    }
    if (next <= LAST_CHARACTER) found.push_back({next, LAST_CHARACTER});
    return found;
}

inline uint64_t size_of(const Spans& spans) {
    uint64_t count = 0;
    for (const auto& [from, to] : spans) count += to - from + 1;
    return count;
}

inline std::string utf8(uint32_t character) {
    const auto low = [&](int shift) { return (char)(0x80 | (character >> shift & 0x3f)); };
    if (character < 0x80) return {(char)character};
    if (character < 0x800) return {(char)(0xc0 | character >> 6), low(0)};
    if (character < 0x10000) return {(char)(0xe0 | character >> 12), low(6), low(0)};
    return {(char)(0xf0 | character >> 18), low(12), low(6), low(0)};
}

}  // namespace gapless
