// Kinds of letters: sets of characters, each a small automaton over the bytes of one letter.
//
// A run of a text has letters of one kind. Those of a JSON string include escapes; those of a regex are a set of
// characters in UTF-8. Knows bytes alone: which tokens are letters is letter_table.h's.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace gapless {

constexpr int BEGIN = 0;  // the part of a letter at which none has begun, and after the last byte of one
constexpr int MAX_PARTS = 1 << 13;

inline bool is_between(int x, int from, int to) { return from <= x && x <= to; }

inline bool is_hex(int b) { return is_between(b, '0', '9') || is_between(b | 32, 'a', 'f'); }

typedef std::vector<std::pair<uint32_t, uint32_t>> Spans;  // of characters: from, to; sorted, apart from each other

struct Letters {
    std::vector<std::array<int16_t, 256>> next;  // by part and byte: the next part, or -1
    std::array<uint8_t, 256> kinds;              // bytes of one kind are alike in every part

    void sort_bytes() {
        std::map<std::vector<int16_t>, int> numbers;
        for (int byte = 0; byte < 256; byte++) {
            std::vector<int16_t> seen;
            for (const auto& row : next) seen.push_back(row[byte]);
            kinds[byte] = numbers.try_emplace(std::move(seen), (int)numbers.size()).first->second;
        }
    }
};

// Letters of a JSON string. Control characters alone are written by number.
inline std::shared_ptr<const Letters> json_letters() {
    enum { LAST1 = 1, LAST2, LAST3, AFTER_E0, AFTER_ED, AFTER_F0, AFTER_F4, SLASH, U, U0, U00, U000, U001, U007, PARTS };
    auto made = std::make_shared<Letters>();
    std::array<int16_t, 256> none;
    none.fill(-1);
    made->next.assign(PARTS, none);
    const auto set = [&](int part, int from, int to, int then) {
        std::fill(made->next[part].begin() + from, made->next[part].begin() + to + 1, then);
    };
    set(BEGIN, 0x20, 0x7e, BEGIN), set(BEGIN, '"', '"', -1), set(BEGIN, '\\', '\\', SLASH);
    set(BEGIN, 0xc2, 0xdf, LAST1), set(BEGIN, 0xe0, 0xef, LAST2), set(BEGIN, 0xf0, 0xf4, LAST3);
    set(BEGIN, 0xe0, 0xe0, AFTER_E0), set(BEGIN, 0xed, 0xed, AFTER_ED);
    set(BEGIN, 0xf0, 0xf0, AFTER_F0), set(BEGIN, 0xf4, 0xf4, AFTER_F4);
    set(LAST1, 0x80, 0xbf, BEGIN), set(LAST2, 0x80, 0xbf, LAST1), set(LAST3, 0x80, 0xbf, LAST2);
    set(AFTER_E0, 0xa0, 0xbf, LAST1), set(AFTER_ED, 0x80, 0x9f, LAST1);
    set(AFTER_F0, 0x90, 0xbf, LAST2), set(AFTER_F4, 0x80, 0x8f, LAST2);
    for (const unsigned char b : {'"', '\\', 'b', 'f', 'n', 'r', 't'}) set(SLASH, b, b, BEGIN);
    set(SLASH, 'u', 'u', U), set(U, '0', '0', U0), set(U0, '0', '0', U00);
    set(U00, '0', '0', U000), set(U00, '1', '1', U001), set(U00, '7', '7', U007);
    for (int b = 0; b < 256; b++) {
        if (!is_hex(b)) continue;
        set(U000, b, b, BEGIN);
        set(U001, b, b, BEGIN);
    }
    set(U007, 'f', 'f', BEGIN), set(U007, 'F', 'F', BEGIN);
    made->sort_bytes();
    return made;
}

// Writes the letters of a set of characters: the bytes of each in UTF-8.
class CharacterLetters {
  public:
    // Null where the set is too scattered.
    static std::shared_ptr<const Letters> of(const Spans& spans) {
        CharacterLetters writer;
        writer.made_->next.push_back(none());
        writer.write(spans);
        if (writer.made_->next.size() > MAX_PARTS) return nullptr;
        writer.made_->sort_bytes();
        return writer.made_;
    }

  private:
    static std::array<int16_t, 256> none() {
        std::array<int16_t, 256> row;
        row.fill(-1);
        return row;
    }

    void write(const Spans& spans) {
        constexpr struct { uint32_t first, last, lead, size; int rest; } LENGTHS[] = {
            {0, 0x7f, 0, 1, 0}, {0x80, 0x7ff, 0xc0, 1 << 6, 1}, {0x800, 0xffff, 0xe0, 1 << 12, 2},
            {0x10000, 0x10ffff, 0xf0, 1 << 18, 3}};
        for (const auto& [first, last, lead, size, rest] : LENGTHS)
            for (uint32_t begin = first / size * size; begin <= last; begin += size) {
                const Spans part = within(spans, std::max(begin, first), begin + size - 1, begin);
                if (!part.empty()) made_->next[BEGIN][lead + begin / size] = behind(rest, part);
            }
    }

    // The part in which `rest` bytes must follow that write a number of these spans.
    int behind(int rest, const Spans& spans) {
        if (rest == 0) return BEGIN;
        const auto [found, is_new] = known_.try_emplace({rest, spans}, (int)made_->next.size());
        const int part = found->second;
        if (!is_new || made_->next.size() > MAX_PARTS) return part;
        made_->next.push_back(none());
        const uint32_t size = 1u << 6 * (rest - 1);
        for (uint32_t byte = 0; byte < 64; byte++) {
            const Spans below = within(spans, byte * size, (byte + 1) * size - 1, byte * size);
            if (below.empty()) continue;
            const int then = behind(rest - 1, below);
            made_->next[part][0x80 + byte] = then;
        }
        return part;
    }

    // What is between two characters, counted from `origin`.
    static Spans within(const Spans& spans, uint32_t from, uint32_t to, uint32_t origin) {
        Spans found;
        auto at = std::lower_bound(spans.begin(), spans.end(), from, [](const auto& s, uint32_t x) { return s.second < x; });
        for (; at != spans.end() && at->first <= to; at++)
            found.push_back({std::max(at->first, from) - origin, std::min(at->second, to) - origin});
        return found;
    }

    std::shared_ptr<Letters> made_ = std::make_shared<Letters>();
    std::map<std::pair<int, Spans>, int> known_;
};

}  // namespace gapless
