// Regular shapes of text as automata over bytes, and which tokens may come next in each of their states.
//
// A program says what a text may look like (guides/programs.py writes it). Its states are made when they are first
// reached and kept, and so are their masks. Inside a JSON string, tokens of plain letters need no look: those that fit
// into the room that is left are known beforehand. Owns vocabularies, automata and walkers; knows no schemas.
#include <algorithm>
#include <array>
#include <atomic>
#include <compare>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "threads.h"

namespace gapless {

enum Op { BYTE, SPLIT, JUMP, STRING, SPACE, COUNT, GATE, MATCH };  // guides/programs.py has the same list

struct Instruction {
    int32_t op, a, b;  // BYTE: from, to; SPLIT, JUMP: where to; STRING: fewest and most letters
};

constexpr int UNBOUNDED = -1;
constexpr int MAX_INDENT = 32;  // white space: a space, or a line break with at most so many spaces or tabs
constexpr int MAX_STATES = 1 << 14;
constexpr int ENOUGH_MASKS = 8, ENOUGH_TOKENS = 64;  // for which it pays to wake threads
constexpr int DEAD = -1, UNKNOWN = -2;
enum Took { REFUSED = 0, TOOK = 1, IS_OVER = 2, TOO_COMPLEX = 3 };

// Where a letter of a JSON string stands: at its begin, within UTF-8, or within an escape.
enum Part { BEGIN, LAST1, LAST2, LAST3, AFTER_E0, AFTER_ED, AFTER_F0, AFTER_F4, SLASH, U, U0, U00, U000, U001, U007 };

inline bool is_between(int x, int from, int to) { return from <= x && x <= to; }

inline bool is_hex(int b) { return is_between(b, '0', '9') || is_between(b | 32, 'a', 'f'); }

// The part after this byte, or -1. BEGIN: the letter is complete.
inline int next_part(int part, int b) {
    switch (part) {
        case BEGIN:
            if (b == '\\') return SLASH;
            if (is_between(b, 0x20, 0x7e)) return b == '"' ? -1 : BEGIN;
            if (is_between(b, 0xc2, 0xdf)) return LAST1;
            if (is_between(b, 0xe0, 0xef)) return b == 0xe0 ? AFTER_E0 : b == 0xed ? AFTER_ED : LAST2;
            if (is_between(b, 0xf0, 0xf4)) return b == 0xf0 ? AFTER_F0 : b == 0xf4 ? AFTER_F4 : LAST3;
            return -1;
        case LAST1: return is_between(b, 0x80, 0xbf) ? BEGIN : -1;
        case LAST2: return is_between(b, 0x80, 0xbf) ? LAST1 : -1;
        case LAST3: return is_between(b, 0x80, 0xbf) ? LAST2 : -1;
        case AFTER_E0: return is_between(b, 0xa0, 0xbf) ? LAST1 : -1;
        case AFTER_ED: return is_between(b, 0x80, 0x9f) ? LAST1 : -1;
        case AFTER_F0: return is_between(b, 0x90, 0xbf) ? LAST2 : -1;
        case AFTER_F4: return is_between(b, 0x80, 0x8f) ? LAST2 : -1;
        case SLASH: return b == 'u' ? U : b != 0 && strchr("\"\\bfnrt", b) ? BEGIN : -1;
        case U: return b == '0' ? U0 : -1;
        case U0: return b == '0' ? U00 : -1;
        case U00: return b == '0' ? U000 : b == '1' ? U001 : b == '7' ? U007 : -1;
        // Control characters alone are written by number, and none that has a letter of its own.
        case U000: return is_hex(b) && !strchr("89acdACD", b) ? BEGIN : -1;
        case U001: return is_hex(b) ? BEGIN : -1;
        case U007: return (b | 32) == 'f' ? BEGIN : -1;
    }
    return -1;
}

// A vocabulary as a tree of bytes, in the order of a walk.
class Trie {
  public:
    struct Node {
        uint8_t byte;
        int32_t depth, token, end;  // token: or -1; end: the first node behind those below this one
    };

    void build(const std::vector<std::pair<std::string, int32_t>>& sorted) {
        std::vector<int> open;
        std::string last;
        for (const auto& [bytes, token] : sorted) {
            size_t same = 0;
            while (same < last.size() && same < bytes.size() && last[same] == bytes[same]) same++;
            for (; open.size() > same; open.pop_back()) nodes[open.back()].end = nodes.size();
            for (size_t i = same; i < bytes.size(); i++) {
                open.push_back(nodes.size());
                nodes.push_back({(uint8_t)bytes[i], (int)i + 1, -1, 0});
            }
            nodes[open.back()].token = token;
            deepest = std::max(deepest, (int)bytes.size());
            last = bytes;
        }
        for (int i : open) nodes[i].end = nodes.size();
    }

    std::vector<Node> nodes;
    int deepest = 0;
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
        std::vector<std::pair<std::string, int32_t>> all(first.begin(), first.end()), others;
        int longest = 0;
        std::vector<int> letters(all.size());
        for (size_t i = 0; i < all.size(); i++) longest = std::max(longest, letters[i] = num_letters(all[i].first));
        within.assign(longest + 1, std::vector<uint32_t>(num_words, 0));
        for (size_t i = 0; i < all.size(); i++) {
            if (letters[i] == 0) others.push_back(all[i]);
            for (int room = letters[i]; letters[i] > 0 && room <= longest; room++) set(within[room], all[i].second);
        }
        whole.build(all);
        rest.build(others);
    }

    // Of a token that is plain letters of a JSON string and nothing else; 0 for others.
    static int num_letters(const std::string& text) {
        int part = BEGIN, count = 0;
        for (const unsigned char b : text) {
            if (b == '\\' || (part = next_part(part, b)) < 0) return 0;
            count += part == BEGIN;
        }
        return part == BEGIN ? count : 0;
    }

    void set(std::vector<uint32_t>& mask, int token) const {
        for (; token >= 0; token = twins[token]) mask[token / 32] |= 1u << token % 32;
    }

    const int num_words;
    const std::vector<int32_t> ends;                // tokens that end a text
    std::vector<std::string> texts;                 // by token
    std::vector<int32_t> twins;                     // the next token with the same bytes, or -1
    std::vector<std::vector<uint32_t>> within;      // masks of the tokens with at most so many letters
    Trie whole, rest;                               // rest: without tokens of plain letters
    int most_commas = 0;
    // About what states and masks of all its automata take. They have a share in it: any of them may be dropped last.
    const std::shared_ptr<std::atomic<int64_t>> num_state_bytes = std::make_shared<std::atomic<int64_t>>(0);
    Team team;
    std::mutex working;  // held by who has the team
};

struct Item {
    int32_t pc, part, used;  // part: of a letter, or how far white space is; used: letters of a string

    auto operator<=>(const Item&) const = default;
};

struct State {
    std::vector<Item> items;
    int left;  // items that the counted array must have still; `far` of them or more are all the same
    std::vector<int32_t> next;  // by kind of byte: twice the state, and 1 where an item was counted
    bool accepts = false;
    bool has_mask = false;
    const std::vector<uint32_t>* base = nullptr;          // tokens allowed without a look
    std::vector<std::pair<uint32_t, uint32_t>> extra;     // words to add, where that is less than a mask
    std::vector<uint32_t> mask;                           // all of it, elsewhere
};

class Automaton {
  public:
    Automaton(Vocabulary& vocabulary, const Instruction* program, int size)
        : vocabulary(vocabulary), far(vocabulary.most_commas + 1), program_(program, program + size),
          all_bytes_(vocabulary.num_state_bytes) {
        sort_bytes();
    }

    ~Automaton() { *all_bytes_ -= num_bytes; }

    // The state of these items, or -1 where there is no room for more.
    int state(std::vector<Item> items, int left) {
        std::sort(items.begin(), items.end());
        items.erase(std::unique(items.begin(), items.end()), items.end());
        const auto [found, is_new] = numbers_.try_emplace({left, items}, (int)states_.size());
        if (!is_new) return found->second;
        if (states_.size() >= MAX_STATES) {
            numbers_.erase(found);
            return is_full = true, DEAD;
        }
        auto made = std::make_unique<State>();
        made->left = left;
        made->next.assign(num_kinds_, UNKNOWN);
        for (const Item& item : items) made->accepts |= program_[item.pc].op == MATCH;
        grow(sizeof(State) + num_kinds_ * sizeof(int32_t) + 2 * items.size() * sizeof(Item));
        made->items = std::move(items);
        states_.push_back(std::move(made));
        return states_.size() - 1;
    }

    int first(int left) {
        std::vector<Item> items;
        int now = left;
        close(0, now, items);
        return state(items, now);
    }

    // Twice the next state, and 1 where an item was counted; DEAD where this byte cannot come.
    int step(int from, int byte) {
        const int kind = kinds_[byte], known = states_[from]->next[kind];
        if (known != UNKNOWN) return known;
        std::vector<Item> items;
        const int before = states_[from]->left;
        int after = -1, counted = 0;
        for (const Item& item : states_[from]->items) {
            const size_t size = items.size();
            int left = before;
            const int passed = move(item, byte, left, items);
            if (items.size() == size) continue;
            if (after >= 0 && (after != left || counted != passed)) is_full = true;  // no program has this
            after = left, counted = passed;
        }
        const int to = items.empty() ? DEAD : state(std::move(items), after);
        return states_[from]->next[kind] = to == DEAD ? DEAD : 2 * to + counted;
    }

    const State& at(int number) const { return *states_[number]; }

    bool is_over(int number) const {
        const State& state = *states_[number];
        return state.accepts && state.items.size() == 1;
    }

    void fill(int number, uint32_t* out) {
        State& state = *states_[number];
        if (!state.has_mask) look(number);
        const int num_words = vocabulary.num_words;
        if (state.base != nullptr)
            memcpy(out, state.base->data(), num_words * sizeof(uint32_t));
        else if (state.mask.empty())
            memset(out, 0, num_words * sizeof(uint32_t));
        else
            memcpy(out, state.mask.data(), num_words * sizeof(uint32_t));
        for (const auto& [word, bits] : state.extra) out[word] |= bits;
    }

    Vocabulary& vocabulary;
    const int far;
    bool is_full = false;
    std::atomic<int64_t> num_bytes{0};  // about
    std::mutex lock;

  private:
    void grow(int64_t size) { num_bytes += size, *all_bytes_ += size; }

    // Bytes that no instruction tells apart are of one kind.
    void sort_bytes() {
        std::map<std::vector<int>, int> numbers;
        std::map<std::pair<int, int>, bool> spans;
        for (const Instruction& at : program_)
            if (at.op == BYTE) spans[{at.a, at.b}] = true;
        for (int byte = 0; byte < 256; byte++) {
            std::vector<int> seen{byte == '"', byte == ' ', byte == '\t', byte == '\n'};
            for (int part = BEGIN; part <= U007; part++) seen.push_back(next_part(part, byte));
            for (const auto& [span, _] : spans) seen.push_back(is_between(byte, span.first, span.second));
            kinds_[byte] = numbers.try_emplace(seen, (int)numbers.size()).first->second;
        }
        num_kinds_ = numbers.size();
    }

    // What may come from here on without a byte.
    void close(int pc, int& left, std::vector<Item>& items) {
        for (;;) {
            const Instruction& at = program_[pc];
            switch (at.op) {
                case SPLIT:
                    close(at.a, left, items);
                    pc = at.b;
                    break;
                case JUMP: pc = at.a; break;
                case COUNT:
                    if (left > 0 && left < far) left--;
                    pc++;
                    break;
                case GATE:
                    if (left > 0) return;
                    pc++;
                    break;
                case SPACE: items.push_back({pc++, 0, 0}); break;
                default: items.push_back({pc, BEGIN, 0}); return;
            }
        }
    }

    // The items after a byte; whether an item of the array was counted: its comma has come.
    int move(const Item& item, int byte, int& left, std::vector<Item>& items) {
        const Instruction& at = program_[item.pc];
        if (at.op == BYTE && is_between(byte, at.a, at.b)) {
            const bool counts = program_[item.pc + 1].op == COUNT;
            close(item.pc + 1, left, items);
            return counts;
        }
        if (at.op == STRING) {
            if (item.part == BEGIN && byte == '"') {
                if (item.used >= at.a) close(item.pc + 1, left, items);
                return 0;
            }
            const bool is_full = at.b != UNBOUNDED && item.used >= at.b;
            const int part = is_full && item.part == BEGIN ? -1 : next_part(item.part, byte);
            const int most = at.b == UNBOUNDED ? at.a : at.b;  // more letters than count are all the same
            if (part >= 0) items.push_back({item.pc, part, std::min(item.used + (part == BEGIN), most)});
        }
        if (at.op == SPACE) {
            const bool breaks = item.part == 0 && byte == '\n', is_blank = byte == ' ' || byte == '\t';
            const bool indents = item.part > 0 && item.part <= MAX_INDENT && is_blank;
            if (breaks || indents) items.push_back({item.pc, item.part + 1, 0});
            if (breaks || indents || (item.part == 0 && byte == ' ')) close(item.pc + 1, left, items);
        }
        return 0;
    }

    // Find the mask of a state.
    void look(int number) {
        std::vector<uint32_t> mask(vocabulary.num_words, 0);
        const Item item = states_[number]->items.front();
        const bool is_string = states_[number]->items.size() == 1 && program_[item.pc].op == STRING;
        if (is_string && item.part == BEGIN)
            look_in_string(*states_[number], mask);
        else
            walk(number, mask);
        State& state = *states_[number];
        if (state.accepts)
            for (int token : vocabulary.ends) mask[token / 32] |= 1u << token % 32;
        keep(state, std::move(mask));
    }

    // Walk the tree of tokens.
    void walk(int number, std::vector<uint32_t>& mask) {
        const Trie& trie = vocabulary.whole;
        std::vector<int> path(trie.deepest + 1, number);
        for (int i = 0, size = trie.nodes.size(); i < size;) {
            const Trie::Node& node = trie.nodes[i];
            const int next = step(path[node.depth - 1], node.byte);
            path[node.depth] = next >> 1;
            if (next != DEAD && node.token >= 0) vocabulary.set(mask, node.token);
            i = next == DEAD ? node.end : i + 1;
        }
    }

    // Inside a string all that counts is how many letters a token brings: one walk serves all its states.
    void look_in_string(State& state, std::vector<uint32_t>& mask) {
        const Item item = state.items.front();
        const Instruction& at = program_[item.pc];
        const int room = at.b == UNBOUNDED ? INT32_MAX : at.b - item.used, missing = at.a - item.used;
        const auto& within = vocabulary.within;
        state.base = &within[std::min<int64_t>(room, within.size() - 1)];
        for (const Brought& token : brought(item.pc, state.left))
            if (token.letters <= room && (!token.closes || token.letters >= missing)) vocabulary.set(mask, token.token);
    }

    struct Brought {
        int32_t token, letters;  // begun or complete, up to the end of the string or of the token
        bool closes;             // the string ends within the token
    };

    // Tokens that may come in the string of this instruction, were it long enough; without those of plain letters.
    const std::vector<Brought>& brought(int pc, int left) {
        const auto [found, is_new] = brought_.try_emplace({pc, left});
        if (!is_new) return found->second;
        std::vector<Item> items;
        int now = left;
        close(pc + 1, now, items);
        const int behind = state(items, now);
        struct Place {
            int part, letters, state;  // state: DEAD within the string
        };
        const Trie& trie = vocabulary.rest;
        std::vector<Place> path(trie.deepest + 1, {BEGIN, 0, DEAD});
        for (int i = 0, size = trie.nodes.size(); i < size && !is_full;) {
            const Trie::Node& node = trie.nodes[i];
            Place place = path[node.depth - 1];
            bool is_dead = false;
            if (place.state != DEAD) {
                const int next = step(place.state, node.byte);
                is_dead = next == DEAD;
                place.state = next >> 1;
            } else if (place.part == BEGIN && node.byte == '"') {
                place.state = behind;
            } else {
                place.letters += place.part == BEGIN;
                is_dead = (place.part = next_part(place.part, node.byte)) < 0;
            }
            path[node.depth] = place;
            if (!is_dead && node.token >= 0) found->second.push_back({node.token, place.letters, place.state != DEAD});
            i = is_dead ? node.end : i + 1;
        }
        grow(found->second.capacity() * sizeof(Brought));
        return found->second;
    }

    void keep(State& state, std::vector<uint32_t> mask) {
        size_t count = 0;
        for (uint32_t word : mask) count += word != 0;
        state.has_mask = true;
        if (state.base == nullptr && 2 * count >= mask.size()) {
            state.mask = std::move(mask);
            grow(state.mask.size() * sizeof(uint32_t));
            return;
        }
        state.extra.reserve(count);
        grow(count * sizeof(state.extra[0]));
        for (size_t i = 0; i < mask.size(); i++)
            if (mask[i] != 0) state.extra.push_back({(uint32_t)i, mask[i]});
    }

    const std::vector<Instruction> program_;
    const std::shared_ptr<std::atomic<int64_t>> all_bytes_;
    std::array<uint8_t, 256> kinds_;
    int num_kinds_ = 0;
    std::vector<std::unique_ptr<State>> states_;
    std::map<std::pair<int, std::vector<Item>>, int> numbers_;
    std::map<std::pair<int, int>, std::vector<Brought>> brought_;
};

// A text on its way.
struct Walker {
    Walker(Automaton& automaton, int64_t fewest)
        : automaton(automaton), left(fewest), number(automaton.first(std::min<int64_t>(fewest, automaton.far))) {}

    int advance(int token) {
        const std::lock_guard<std::mutex> hold(automaton.lock);
        const Vocabulary& vocabulary = automaton.vocabulary;
        if (token < 0 || token >= (int)vocabulary.texts.size()) return REFUSED;
        const auto& ends = vocabulary.ends;
        if (std::find(ends.begin(), ends.end(), token) != ends.end())
            return automaton.at(number).accepts ? IS_OVER : REFUSED;
        const std::string& text = vocabulary.texts[token];
        if (text.empty()) return REFUSED;
        int now = number;
        int64_t still = left;
        for (const unsigned char byte : text) {
            const int next = automaton.step(now, byte);
            if (automaton.is_full) return TOO_COMPLEX;
            if (next == DEAD) return REFUSED;
            now = next >> 1;
            still -= next & 1;
        }
        if (automaton.at(now).left == automaton.far && still < automaton.far)  // no longer far from enough
            now = automaton.state(automaton.at(now).items, std::max<int64_t>(still, 0));
        if (now == DEAD) return TOO_COMPLEX;
        number = now, left = still;
        return automaton.is_over(now) ? IS_OVER : TOOK;
    }

    bool fill(uint32_t* out) {
        const std::lock_guard<std::mutex> hold(automaton.lock);
        automaton.fill(number, out);
        return !automaton.is_full;
    }

    Automaton& automaton;
    int64_t left;  // items that the counted array must have still, below 0 where it has more
    int number;    // of the state
};

}  // namespace gapless

using namespace gapless;

// Work on each walker, side by side where there are many.
template <class Action>
static void each(Walker** walkers, int count, int enough, Action one) {
    if (count < enough) {
        for (int i = 0; i < count; i++) one(i);
        return;
    }
    Vocabulary& vocabulary = walkers[0]->automaton.vocabulary;
    const std::lock_guard<std::mutex> hold(vocabulary.working);
    vocabulary.team.run([&](int thread) { vocabulary.team.phase(thread, count, one); });
}

extern "C" {

Vocabulary* gapless_vocabulary(
    int num_tokens, const int64_t* offsets, const char* bytes, const int32_t* ends, int num_ends, int num_threads
) {
    return new Vocabulary(num_tokens, offsets, bytes, ends, num_ends, num_threads);
}

Automaton* gapless_automaton(Vocabulary* vocabulary, const Instruction* program, int size) {
    return new Automaton(*vocabulary, program, size);
}

Walker* gapless_walker(Automaton* automaton, int64_t fewest) {
    const std::lock_guard<std::mutex> hold(automaton->lock);
    return new Walker(*automaton, fewest);
}

int64_t gapless_automaton_bytes(const Automaton* automaton) { return automaton->num_bytes; }
int64_t gapless_state_bytes(const Vocabulary* vocabulary) { return *vocabulary->num_state_bytes; }

void gapless_drop_vocabulary(Vocabulary* vocabulary) { delete vocabulary; }
void gapless_drop_automaton(Automaton* automaton) { delete automaton; }
void gapless_drop_walker(Walker* walker) { delete walker; }

// One token for each walker; what came of it goes to `took`.
void gapless_advance(Walker** walkers, const int32_t* tokens, int count, int32_t* took) {
    each(walkers, count, ENOUGH_TOKENS, [&](int i) { took[i] = walkers[i]->advance(tokens[i]); });
}

// The mask of each walker to its row, `stride` words apart; 0 in `filled` where the automaton has become too large.
void gapless_fill(Walker** walkers, int count, const int32_t* rows, uint32_t* out, int64_t stride, int32_t* filled) {
    each(walkers, count, ENOUGH_MASKS, [&](int i) { filled[i] = walkers[i]->fill(out + rows[i] * stride); });
}

}
