// Regexes, read as a tree.
//
// The syntax is that of Rust's `regex`, as llguidance takes it: a text matches from begin to end, so that an anchor at
// either end says nothing, and so does a lazy repetition. What is not understood here, or wrong, is llguidance's to judge.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "characters.h"
#include "program.h"

namespace gapless {

struct Regex {
    enum Kind { CHARACTER, SEQUENCE, CHOICE, REPEAT };

    Kind kind;
    Spans characters = {};          // one of them
    std::vector<Regex> parts = {};  // a sequence without parts is the empty text
    int fewest = 0, most = 0;       // of a repetition of its only part
};

class RegexReader {
  public:
    explicit RegexReader(std::string_view text) : text_(text) {}

    // Throws NoProgram.
    Regex read() {
        Regex found = choice(0);
        if (place_ != text_.size()) throw NoProgram();
        return found;
    }

  private:
    static constexpr int MAX_DEPTH = 200, MOST_REPEATED = 1000;

    bool is_at_end() const { return place_ == text_.size(); }
    char peek() const { return is_at_end() ? '\0' : text_[place_]; }

    bool takes(std::string_view word) {
        if (text_.substr(place_, word.size()) != word) return false;
        place_ += word.size();
        return true;
    }

    Regex choice(int depth) {
        if (depth > MAX_DEPTH) throw NoProgram();
        Regex found{Regex::CHOICE};
        do found.parts.push_back(sequence(depth));
        while (takes("|"));
        return found.parts.size() == 1 ? std::move(found.parts[0]) : found;
    }

    Regex sequence(int depth) {
        Regex found{Regex::SEQUENCE};
        if (place_ == 0) takes("^");
        while (!is_at_end() && peek() != '|' && peek() != ')') {
            if (place_ + 1 == text_.size() && takes("$")) break;
            found.parts.push_back(repeated(atom(depth)));
        }
        return found;
    }

    Regex atom(int depth) {
        if (takes("(")) return group(depth);
        if (takes("[")) return {Regex::CHARACTER, bracket()};
        if (takes(".")) return {Regex::CHARACTER, others({{'\n', '\n'}})};
        if (takes("\\")) return {Regex::CHARACTER, escape()};
        if (std::string_view("*+?{^$").find(peek()) != std::string_view::npos) throw NoProgram();
        const uint32_t one = character();
        return {Regex::CHARACTER, {{one, one}}};
    }

    Regex group(int depth) {
        if (takes("?") && !takes(":")) {
            takes("P");
            if (!takes("<")) throw NoProgram();  // flags, and what looks around
            for (; peek() != '>'; place_++)
                if (!isalnum((unsigned char)peek()) && peek() != '_') throw NoProgram();
            place_++;
        }
        Regex found = choice(depth + 1);
        if (!takes(")")) throw NoProgram();
        return found;
    }

    Regex repeated(Regex part) {
        for (;;) {
            int fewest = 0, most = UNBOUNDED;
            if (takes("+")) fewest = 1;
            else if (takes("?")) most = 1;
            else if (takes("{")) counts(fewest, most);
            else if (!takes("*")) return part;
            takes("?");  // lazy
            Regex whole{Regex::REPEAT};
            whole.parts.push_back(std::move(part));
            whole.fewest = fewest, whole.most = most;
            part = std::move(whole);
        }
    }

    void counts(int& fewest, int& most) {
        fewest = most = count();
        if (takes(",")) most = peek() == '}' ? UNBOUNDED : count();
        if (!takes("}") || (most != UNBOUNDED && most < fewest)) throw NoProgram();
    }

    int count() {
        if (!isdigit((unsigned char)peek())) throw NoProgram();
        int found = 0;
        for (; isdigit((unsigned char)peek()); place_++)
            if ((found = 10 * found + peek() - '0') > MOST_REPEATED) throw NoProgram();
        return found;
    }

    // The characters in brackets. Brackets in brackets, and operations on them, are not read here.
    Spans bracket() {
        const bool is_other = takes("^");
        Spans found;
        for (bool is_first = true; is_first || peek() != ']'; is_first = false) {
            for (const std::string_view operation : {"&&", "--", "~~", "["})
                if (is_at_end() || text_.substr(place_).starts_with(operation)) throw NoProgram();
            const bool is_dash = peek() == '-';
            if (is_dash && !is_first && text_.substr(place_, 2) != "-]") throw NoProgram();
            const Spans from = bracketed();
            if (!is_dash && peek() == '-' && text_.substr(place_, 2) != "-]") {
                place_++;
                if (peek() == '[' || peek() == '-') throw NoProgram();
                const Spans to = bracketed();
                if (size_of(from) != 1 || size_of(to) != 1 || to[0].first < from[0].first) throw NoProgram();
                found.push_back({from[0].first, to[0].first});
            } else {
                found.insert(found.end(), from.begin(), from.end());
            }
        }
        place_++;
        return is_other ? others(std::move(found)) : in_order(std::move(found));
    }

    Spans bracketed() {
        if (takes("\\")) return escape();
        const uint32_t one = character();
        return {{one, one}};
    }

    Spans escape() {
        const char name = peek();
        if (is_at_end()) throw NoProgram();
        place_++;
        switch (name) {
            case 'd': return DIGITS;
            case 'D': return others(DIGITS);
            case 's': return SPACES;
            case 'S': return others(SPACES);
            case 'w': return WORD_CHARACTERS;
            case 'W': return others(WORD_CHARACTERS);
            case 'x': return numbered(2);
            case 'u': return numbered(4);
            case 'U': return numbered(8);
        }
        constexpr std::string_view NAMES = "ntrfva", MEANT = "\n\t\r\f\v\a";
        if (const size_t at = NAMES.find(name); at != NAMES.npos) return {{MEANT[at], MEANT[at]}};
        const bool is_itself = name == ' ' || (ispunct((unsigned char)name) && name != '<' && name != '>');
        if (!is_itself) throw NoProgram();
        return {{name, name}};
    }

    Spans numbered(int num_digits) {
        const bool in_brackets = takes("{");
        uint32_t found = 0;
        int count = 0;
        for (; is_hex((unsigned char)peek()) && count < (in_brackets ? 6 : num_digits); place_++, count++)
            found = 16 * found + (peek() <= '9' ? peek() - '0' : (peek() | 32) - 'a' + 10);
        if (count == 0 || (in_brackets ? !takes("}") : count != num_digits)) throw NoProgram();
        if (found > LAST_CHARACTER || (found >= 0xd800 && found <= 0xdfff)) throw NoProgram();
        return {{found, found}};
    }

    // A character as it is written, in UTF-8 that is known to be right.
    uint32_t character() {
        const unsigned char lead = peek();
        place_++;
        const int rest = lead < 0x80 ? 0 : lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : 3;
        uint32_t found = rest == 0 ? lead : lead & 0x3f >> rest;
        if (place_ + rest > text_.size()) throw NoProgram();
        for (int i = 0; i < rest; i++, place_++) found = found << 6 | (text_[place_] & 0x3f);
        return found;
    }

    const std::string_view text_;
    size_t place_ = 0;
};

}  // namespace gapless
