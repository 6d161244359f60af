// The programs of regexes.
#pragma once

#include "regex.h"

namespace gapless {

class RegexWriter : public Writer {
  public:
    // may_make: tables of letters that nobody has used before, which takes milliseconds each.
    RegexWriter(Vocabulary& vocabulary, bool may_make)
        : Writer(MAX_REGEX_INSTRUCTIONS), vocabulary_(vocabulary), may_make_(may_make) {}

    void regex(const Regex& regex) {
        switch (regex.kind) {
            case Regex::CHARACTER: characters(regex.characters, 1, 1); break;
            case Regex::SEQUENCE:
                for (const Regex& part : regex.parts) this->regex(part);
                break;
            case Regex::CHOICE: {
                std::vector<Fragment> parts;
                for (const Regex& part : regex.parts) parts.push_back([&] { this->regex(part); });
                one_of(parts);
                break;
            }
            case Regex::REPEAT:
                if (regex.parts[0].kind == Regex::CHARACTER)
                    characters(regex.parts[0].characters, regex.fewest, regex.most);
                else
                    repeat([&] { this->regex(regex.parts[0]); }, regex.fewest, regex.most);
        }
    }

  private:
    static constexpr size_t MAX_REGEX_INSTRUCTIONS = 4000;
    static constexpr int LONG_RUN = 4, MANY_CHARACTERS = 8;  // for which a table pays
    static constexpr size_t MAX_OWN_TABLES = 8;              // of one regex

    void characters(const Spans& spans, int fewest, int most) {
        if (spans.empty()) throw NoProgram();
        const bool is_one = size_of(spans) == 1, is_ascii = spans.back().second < 0x80;
        if (is_one && most != UNBOUNDED)
            return repeat([&] { text(utf8(spans[0].first)); }, fewest, most);
        if (is_ascii && most == 1)
            return repeat([&] { byte_of(spans); }, fewest, most);
        const bool is_long = most == UNBOUNDED || most >= LONG_RUN;
        run(kind(spans, is_long && size_of(spans) >= MANY_CHARACTERS), fewest, most);
    }

    // The letters of these characters, found once for all their runs.
    const RunKind& kind(const Spans& spans, bool pays) {
        const auto [found, is_new] = kinds_.try_emplace({spans, pays});
        if (!is_new) return found->second;
        if (pays && num_tables_++ < MAX_OWN_TABLES) {
            auto table = vocabulary_.table(spans, may_make_);
            if (table == nullptr) throw NoProgram();
            return found->second = {table->letters, table};
        }
        auto letters = CharacterLetters::of(spans);
        if (letters == nullptr) throw NoProgram();
        return found->second = {std::move(letters), nullptr};
    }

    void byte_of(const Spans& spans) {
        std::vector<Fragment> parts;
        for (const auto& span : spans) parts.push_back([&] { put(BYTE, span.first, span.second); });
        one_of(parts);
    }

    Vocabulary& vocabulary_;
    const bool may_make_;
    size_t num_tables_ = 0;
    std::map<std::pair<Spans, bool>, RunKind> kinds_;  // by characters, and whether a table pays
};

}  // namespace gapless
