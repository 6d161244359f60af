// The tokens of a model by their bytes: a tree of them, and which of them begin or are runs of letters.
//
// A table of letters is made once for a kind of letters and serves all automata that have such runs. Owns the tree, the
// tables and the team that fills masks; knows no automata.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "arena.h"
#include "letters.h"
#include "threads.h"

namespace gapless {

constexpr int SHORT_RUN = 16;     // letters: for runs with room for no more, masks are made beforehand
constexpr size_t MAX_TABLES = 32;  // of letters, that are kept beside those in use

typedef std::vector<uint32_t> Mask;

// Texts as a tree of bytes. Nodes with the same parent are neighbours, so that those which cannot come cost little, and a
// walk through all of it goes through memory in order.
class Trie {
  public:
    void build(const std::map<std::string, int32_t>& texts) {
        typedef std::map<std::string, int32_t>::const_iterator Place;
        struct Group {
            Place begin, end;  // texts with the same first bytes
            size_t depth;
            int node;
        };
        nodes_.push_back({-1, 0, 0, 0});
        std::vector<Group> open{{texts.begin(), texts.end(), 0, 0}};
        while (!open.empty()) {
            auto [at, end, depth, node] = open.back();
            open.pop_back();
            nodes_[node].first = nodes_.size();
            if (at != end && at->first.size() == depth) at++;  // the text that ends here
            while (at != end) {
                const Place begin = at;
                const char byte = begin->first[depth];
                while (at != end && at->first[depth] == byte) at++;
                open.push_back({begin, at, depth + 1, (int)nodes_.size()});
                nodes_.push_back({begin->first.size() == depth + 1 ? begin->second : -1, 0, 0, (uint8_t)byte});
                nodes_[node].count++;
            }
        }
    }

    // Go down from the root. step(where, byte, value) returns where that leads, or nothing; value: or -1.
    template <class Where, class Step>
    void walk(Where root, Step step) const {
        std::vector<std::pair<const Node*, Where>> open{{&nodes_[0], root}};
        while (!open.empty()) {
            const auto [node, where] = open.back();
            open.pop_back();
            const Node *const begin = &nodes_[0] + node->first, *const end = begin + node->count;
            for (const Node* at = begin; at < end; at++)
                if (const std::optional<Where> next = step(where, at->byte, at->value))
                    if (at->count > 0) open.push_back({at, *next});
        }
    }

    size_t size() const { return nodes_.size(); }

  private:
    struct Node {
        int32_t value;  // of the text that ends here, or -1
        int32_t first;  // of the nodes below
        uint16_t count;
        uint8_t byte;
    };

    std::vector<Node> nodes_;  // the root first
};

struct Vocabulary;

// How tokens continue a run of letters of one kind.
struct LetterTable {
    LetterTable(const Vocabulary& vocabulary, std::shared_ptr<const Letters> letters);

    struct Leaver {
        int32_t token, letters;  // letters: before the token leaves the run
    };

    // Tokens that stay in the run where it has room for so many letters more; `long_ones` may have further ones.
    const Mask& within(int64_t room) const {
        return masks[room <= SHORT_RUN ? room : room >= longest ? SHORT_RUN + 1 : SHORT_RUN];
    }

    const std::shared_ptr<const Letters> letters;
    std::vector<Mask> masks;                    // tokens that stay in the run, by room for letters; the last: all of them
    std::vector<Leaver> long_ones;              // those with more letters than any mask but the last has room for
    int longest = 0;                            // letters that a token begins
    Trie tails;                                 // what tokens have behind their letters, where they have both
    std::vector<std::vector<Leaver>> with_tail; // the tokens, by the values of `tails`
    int64_t num_bytes = 0;

  private:
    // left: bytes of the token before it leaves the run, or -1.
    void add(const Vocabulary& vocabulary, int token, int count, int left, std::map<std::string, int32_t>& numbers);
};

struct Vocabulary {
    // offsets: [num_tokens + 1] into bytes. A token without bytes never comes.
    Vocabulary(int num_tokens, const int64_t* offsets, const char* bytes, const int32_t* ends, int num_ends, int threads)
        : num_words((num_tokens + 31) / 32), ends(ends, ends + num_ends), team(threads) {
        std::map<std::string, int32_t> first;
        twins.assign(num_tokens, -1);
        texts.resize(num_tokens);
        for (int token = 0; token < num_tokens; token++) {
            const std::string text(bytes + offsets[token], bytes + offsets[token + 1]);
            texts[token] = text;
            if (text.empty()) continue;
            const auto [found, is_new] = first.try_emplace(text, token);
            if (!is_new) twins[token] = twins[found->second], twins[found->second] = token;
            most_commas = std::max(most_commas, (int)std::count(text.begin(), text.end(), ','));
        }
        whole.build(first);
        json_table = std::make_shared<LetterTable>(*this, json_letters());
    }

    template <class Action>
    void each_twin(int token, Action action) const {
        for (; token >= 0; token = twins[token]) action(token);
    }

    // The table of these letters, made where there is none and it may be; null where the set is too scattered for one.
    std::shared_ptr<const LetterTable> table(const Spans& spans, bool may_make) {
        const std::lock_guard<std::mutex> hold(tables_lock_);
        for (auto at = tables_.begin(); at != tables_.end(); at++)
            if (at->first == spans) {
                std::rotate(tables_.begin(), at, at + 1);
                return tables_.front().second;
            }
        auto letters = may_make ? CharacterLetters::of(spans) : nullptr;
        if (letters == nullptr) return nullptr;
        auto made = std::make_shared<LetterTable>(*this, std::move(letters));
        tables_.insert(tables_.begin(), {spans, made});
        if (tables_.size() > MAX_TABLES) tables_.pop_back();
        return made;
    }

    const int num_words;
    const std::vector<int32_t> ends;  // tokens that end a text
    std::vector<std::string> texts;   // by token
    std::vector<int32_t> twins;       // the next token with the same bytes, or -1
    Trie whole;
    std::shared_ptr<const LetterTable> json_table;
    int most_commas = 0;
    // About what states and masks of all automata take. They have a share in it: any of them may be dropped last.
    const std::shared_ptr<std::atomic<int64_t>> num_state_bytes = std::make_shared<std::atomic<int64_t>>(0);
    const std::shared_ptr<ChunkPool> chunks = std::make_shared<ChunkPool>();  // likewise
    Team team;
    std::mutex working;  // held by who has the team

  private:
    std::mutex tables_lock_;
    std::vector<std::pair<Spans, std::shared_ptr<const LetterTable>>> tables_;  // the last used first
};

inline LetterTable::LetterTable(const Vocabulary& vocabulary, std::shared_ptr<const Letters> given)
    : letters(std::move(given)), masks(SHORT_RUN + 2, Mask(vocabulary.num_words, 0)) {
    struct Place {
        int part, count, depth, left;  // left: bytes before the run is left, or -1
    };
    std::map<std::string, int32_t> numbers;
    vocabulary.whole.walk(Place{BEGIN, 0, 0, -1}, [&](Place place, uint8_t byte, int token) -> std::optional<Place> {
        const int next = letters->next[place.part][byte];
        if (place.left < 0 && next >= 0) {
            place.count += place.part == BEGIN;
            place.part = next;
        } else if (place.left < 0) {
            if (place.part != BEGIN || place.count == 0) return std::nullopt;
            place.left = place.depth;
        }
        place.depth++;
        if (token >= 0) add(vocabulary, token, place.count, place.left, numbers);
        return place;
    });
    for (int room = 1; room <= SHORT_RUN + 1; room++)  // what has fewer letters fits too
        for (int i = 0; i < vocabulary.num_words; i++) masks[room][i] |= masks[room - 1][i];
    tails.build(numbers);
    num_bytes = masks.size() * vocabulary.num_words * sizeof(uint32_t) + 48 * tails.size();
}

inline void LetterTable::add(
    const Vocabulary& vocabulary, int token, int count, int left, std::map<std::string, int32_t>& numbers
) {
    if (left > 0) {
        const auto [found, is_new] = numbers.try_emplace(vocabulary.texts[token].substr(left), (int)with_tail.size());
        if (is_new) with_tail.emplace_back();
        with_tail[found->second].push_back({token, count});
        return;
    }
    longest = std::max(longest, count);
    if (count > SHORT_RUN) long_ones.push_back({token, count});
    Mask& mask = masks[std::min(count, SHORT_RUN + 1)];
    vocabulary.each_twin(token, [&](int id) { mask[id / 32] |= 1u << id % 32; });
}

}  // namespace gapless
