// A program at work: states that are made when they are first reached, and their masks.
//
// A state is a set of places in the program. Its mask is found by a walk through the tree of tokens. In a run of letters
// a walk through what tokens have behind their letters will do. States and masks are kept. Knows no shapes.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <compare>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "arena.h"
#include "program.h"

namespace gapless {

constexpr int MAX_INDENT = 32;  // white space: a space, or a line break with at most so many spaces or tabs
constexpr int MAX_STATES = 1 << 14;
constexpr int64_t MAX_MOVES = 1'000'000;  // of items, for one token or mask: some milliseconds
constexpr int DEAD = -1, UNKNOWN = -2;

struct Item {
    int32_t pc, part, used;  // part: of a letter, or how far white space is; used: letters of a run

    auto operator<=>(const Item&) const = default;
};

typedef std::vector<Item> Items;

struct MaskWord {
    uint32_t place, bits;
};

class Automaton {
  public:
    Automaton(Vocabulary& vocabulary, Program program)
        : vocabulary(vocabulary), far(vocabulary.most_commas + 1), program_(std::move(program)),
          all_bytes_(vocabulary.num_state_bytes), arena_(vocabulary.chunks), seen_(program_.code.size(), 0), buckets_(64, DEAD) {
        sort_bytes();
    }

    ~Automaton() { *all_bytes_ -= num_bytes; }

    int64_t num_counted() const { return program_.num_counted; }

    // The state at the begin of a text.
    int first(int left) {
        Items items;
        int now = left;
        begin_set();
        close(0, now, items);
        return state(items, now);
    }

    // The same place, with so many items left.
    int with_left(int number, int left) { return state(copy(number), left); }

    // Twice the next state, and 1 where an item was counted; DEAD where this byte cannot come.
    int step(int from, int byte) {
        const int known = states_[from]->next[kinds_[byte]];
        return known != UNKNOWN ? known : make_step(from, byte);
    }

    // A new text or place: it has the whole allowance of moves to itself.
    void allow_moves() { num_moves_ = 0; }

    bool accepts(int number) const { return states_[number]->accepts; }
    int left(int number) const { return states_[number]->left; }
    bool is_over(int number) const { return states_[number]->accepts && states_[number]->count == 1; }

    // The byte that must come; DEAD where there is a choice, or the text may end.
    int only_byte(int number) const {
        const State& state = *states_[number];
        int found = DEAD;
        for (int i = 0; i < state.count; i++) {
            const Instruction& at = program_.code[state.items[i].pc];
            if (at.op != BYTE || at.a != at.b || (found != DEAD && found != at.a)) return DEAD;
            found = at.a;
        }
        return found;
    }

    void fill(int number, uint32_t* out) {
        if (!states_[number]->has_mask) look(number);
        const State& state = *states_[number];
        const size_t size = vocabulary.num_words * sizeof(uint32_t);
        if (state.base != nullptr)
            memcpy(out, state.base->data(), size);
        else
            memset(out, 0, size);
        for (int i = 0; i < state.num_extra; i++) out[state.extra[i].place] |= state.extra[i].bits;
    }

    Vocabulary& vocabulary;
    const int far;
    bool is_full = false;  // it has come to a limit: nothing that it says counts any more
    std::atomic<int64_t> num_bytes{0};  // about
    std::mutex lock;

  private:
    struct State {
        const Item* items;
        int32_t* next;  // by kind of byte: twice the state, and 1 where an item was counted
        size_t hash;
        int32_t count;  // of its items
        int32_t left;   // items that the counted array must have still; `far` of them or more are all the same
        bool accepts, has_mask;
        const Mask* base;            // tokens allowed without a look; null where there are none
        const MaskWord* extra;       // words to add
        int32_t num_extra;
    };

    // What comes behind a run.
    struct Behind {
        int state;
        bool is_apart;                            // nothing that begins like a letter
        std::vector<LetterTable::Leaver> leavers; // tokens with letters of the run, then a beginning of what is behind it
    };

    void grow(int64_t size) { num_bytes += size, *all_bytes_ += size; }

    // -- states ----------------------------------------------------------------------------------------------------

    Items copy(int number) const { return Items(states_[number]->items, states_[number]->items + states_[number]->count); }

    // The state of these items, or -1 where there is no room for more.
    int state(Items items, int left) {
        std::sort(items.begin(), items.end());
        items.erase(std::unique(items.begin(), items.end()), items.end());
        size_t hash = left;
        for (const Item& item : items) hash = (hash * 31 + item.pc) * 0x9e3779b97f4a7c15 + item.part * 1021 + item.used;
        hash ^= hash >> 29;
        const size_t last = buckets_.size() - 1;
        size_t bucket = hash & last;
        for (; buckets_[bucket] != DEAD; bucket = (bucket + 1) & last) {
            const State& known = *states_[buckets_[bucket]];
            if (known.hash != hash || known.left != left || known.count != (int)items.size()) continue;
            if (std::equal(items.begin(), items.end(), known.items)) return buckets_[bucket];
        }
        if (states_.size() >= MAX_STATES) return is_full = true, DEAD;
        buckets_[bucket] = states_.size();
        return add(items, left, hash);
    }

    int add(const Items& items, int left, size_t hash) {
        const bool accepts = std::ranges::any_of(items, [&](const Item& x) { return program_.code[x.pc].op == MATCH; });
        Item* const kept = arena_.take<Item>(items.size());
        std::copy(items.begin(), items.end(), kept);
        int32_t* const next = arena_.take<int32_t>(num_kinds_);
        std::fill(next, next + num_kinds_, UNKNOWN);
        State* const made = arena_.take<State>(1);
        *made = {kept, next, hash, (int)items.size(), left, accepts, false, nullptr, nullptr, 0};
        states_.push_back(made);
        grow(sizeof(State) + num_kinds_ * sizeof(int32_t) + items.size() * sizeof(Item) + 4 * sizeof(int32_t));
        if (2 * states_.size() > buckets_.size()) spread();
        return states_.size() - 1;
    }

    void spread() {
        buckets_.assign(2 * buckets_.size(), DEAD);
        const size_t last = buckets_.size() - 1;
        for (size_t i = 0; i < states_.size(); i++) {
            size_t bucket = states_[i]->hash & last;
            while (buckets_[bucket] != DEAD) bucket = (bucket + 1) & last;
            buckets_[bucket] = i;
        }
    }

    // Bytes that no instruction tells apart are of one kind.
    void sort_bytes() {
        std::array<bool, 257> begins{}, is_meant{};
        for (const Instruction& at : program_.code)
            if (at.op == BYTE) {
                begins[at.a] = begins[at.b + 1] = true;
                std::fill(is_meant.begin() + at.a, is_meant.begin() + at.b + 1, true);
            }
        int span = 0;
        refine([&](int byte) { return span += begins[byte], is_meant[byte] ? span : 0; });
        refine([](int byte) { return byte == ' ' || byte == '\t' ? 1 + (byte == ' ') : byte == '\n' ? 3 : 0; });
        for (const RunKind& kind : program_.kinds) refine([&](int byte) { return kind.letters->kinds[byte]; });
    }

    template <class Mark>
    void refine(Mark mark) {
        constexpr int SIZE = 1024;  // of a table by kind and mark
        std::array<int, SIZE> keys, numbers;
        keys.fill(-1);
        num_kinds_ = 0;
        for (int byte = 0; byte < 256; byte++) {
            const int key = 512 * kinds_[byte] + mark(byte);
            int at = key * 0x9e3779b1u >> 22;
            while (keys[at] != key && keys[at] >= 0) at = (at + 1) % SIZE;
            if (keys[at] < 0) keys[at] = key, numbers[at] = num_kinds_++;
            kinds_[byte] = numbers[at];
        }
    }

    // -- steps -----------------------------------------------------------------------------------------------------

    void begin_set() { now_++; }

    int make_step(int from, int byte) {
        Items items;
        const State& state = *states_[from];
        const int before = state.left;
        int after = -1, counted = 0;
        begin_set();
        num_moves_ += state.count;
        for (int i = 0; i < state.count; i++) {
            const size_t size = items.size();
            int left = before;
            const int passed = move(state.items[i], byte, left, items);
            if (items.size() == size) continue;
            if (after >= 0 && (after != left || counted != passed)) is_full = true;  // no program has this
            after = left, counted = passed;
        }
        if (num_moves_ > MAX_MOVES) is_full = true;
        const int to = items.empty() ? DEAD : this->state(std::move(items), after);
        return state.next[kinds_[byte]] = to == DEAD ? DEAD : 2 * to + counted;
    }

    // What may come from here on without a byte. A place that was seen since `begin_set` brings nothing more.
    void close(int pc, int& left, Items& items) {
        std::vector<int>& ways = ways_;
        ways.assign(1, pc);
        while (!ways.empty()) {
            pc = ways.back();
            ways.pop_back();
            if (seen_[pc] == now_) continue;
            seen_[pc] = now_;
            const Instruction& at = program_.code[pc];
            switch (at.op) {
                case SPLIT:
                    ways.push_back(at.b);
                    ways.push_back(at.a);
                    break;
                case JUMP: ways.push_back(at.a); break;
                case COUNT:
                    if (left > 0 && left < far) left--;
                    ways.push_back(pc + 1);
                    break;
                case GATE:
                    if (left <= 0) ways.push_back(pc + 1);
                    break;
                case SPACE:
                    items.push_back({pc, 0, 0});
                    ways.push_back(pc + 1);
                    break;
                case RUN:
                    if (at.b != 0) items.push_back({pc, BEGIN, 0});
                    if (at.a == 0) ways.push_back(pc + 1);
                    break;
                default: items.push_back({pc, 0, 0});
            }
        }
    }

    // The items after a byte; whether an item of the array was counted: its comma has come.
    int move(const Item& item, int byte, int& left, Items& items) {
        const Instruction& at = program_.code[item.pc];
        if (at.op == BYTE && is_between(byte, at.a, at.b)) {
            const bool counts = program_.code[item.pc + 1].op == COUNT;
            close(item.pc + 1, left, items);
            return counts;
        }
        if (at.op == RUN) {
            const int part = program_.kinds[at.c].letters->next[item.part][byte];
            if (part > BEGIN) items.push_back({item.pc, part, item.used});
            if (part == BEGIN) {
                const int used = std::min(item.used + 1, at.b == UNBOUNDED ? at.a : at.b);  // more count for nothing
                if (used != at.b) items.push_back({item.pc, BEGIN, used});
                if (used >= at.a) close(item.pc + 1, left, items);
            }
        }
        if (at.op == SPACE) {
            const bool breaks = item.part == 0 && byte == '\n', is_blank = byte == ' ' || byte == '\t';
            const bool indents = item.part > 0 && item.part <= MAX_INDENT && is_blank;
            if (breaks || indents) items.push_back({item.pc, item.part + 1, 0});
            if (breaks || indents || (item.part == 0 && byte == ' ')) close(item.pc + 1, left, items);
        }
        return 0;
    }

    // -- masks -----------------------------------------------------------------------------------------------------

    void look(int number) {
        const Mask* base = nullptr;
        const State* more = nullptr;  // what is behind a run
        std::vector<int> tokens;
        if (!look_in_run(number, base, more, tokens))
            walk(vocabulary.whole, number, [&](int token) { tokens.push_back(token); });
        State& state = *states_[number];
        if (state.accepts) tokens.insert(tokens.end(), vocabulary.ends.begin(), vocabulary.ends.end());
        keep(state, base, more, tokens);
    }

    // Walk a tree of texts: the values of those that may come.
    template <class Action>
    void walk(const Trie& trie, int number, Action action) {
        trie.walk(number, [&](int from, uint8_t byte, int value) -> std::optional<int> {
            const int next = is_full ? DEAD : step(from, byte);
            if (next == DEAD) return std::nullopt;
            if (value >= 0) action(value);
            return next >> 1;
        });
    }

    // Where a state is a run, and what is behind it cannot be taken for its letters, a token's letters are counted, and
    // one walk serves all states of the run. False elsewhere.
    bool look_in_run(int number, const Mask*& base, const State*& more, std::vector<int>& tokens) {
        const Items items = copy(number);
        const auto is_run = [&](const Item& item) { return program_.code[item.pc].op == RUN; };
        const auto found = std::find_if(items.begin(), items.end(), is_run);
        if (found == items.end() || found->part != BEGIN) return false;
        const Item run = *found;
        const Instruction& at = program_.code[run.pc];
        if (program_.kinds[at.c].table == nullptr) return false;
        const int left = states_[number]->left;
        const Behind& behind = this->behind(run.pc, left);
        Items others;
        std::copy_if(items.begin(), items.end(), std::back_inserter(others), [&](const Item& x) { return x != run; });
        const bool may_leave = run.used >= at.a;
        if (is_full || !behind.is_apart || others != (may_leave ? copy(behind.state) : Items())) return false;
        const int64_t room = at.b == UNBOUNDED ? INT32_MAX : at.b - run.used, missing = at.a - run.used;
        if (may_leave && !states_[behind.state]->has_mask) look(behind.state);
        if (may_leave && states_[behind.state]->base != nullptr) return false;  // seldom: it allows most tokens
        if (may_leave) more = states_[behind.state];
        const LetterTable& table = *program_.kinds[at.c].table;
        base = &table.within(room);
        for (const auto& [token, letters] : behind.leavers)
            if (is_between(letters, missing, room)) tokens.push_back(token);
        if (room < table.longest)
            for (const auto& [token, letters] : table.long_ones)
                if (letters <= room) tokens.push_back(token);
        return true;
    }

    const Behind& behind(int pc, int left) {
        const auto [found, is_new] = behind_.try_emplace({pc, left});
        Behind& behind = found->second;
        if (!is_new) return behind;
        Items items;
        int now = left;
        begin_set();
        close(pc + 1, now, items);
        behind.state = state(items, now);
        behind.is_apart = behind.state != DEAD;
        const LetterTable& table = *program_.kinds[program_.code[pc].c].table;
        for (int byte = 0; byte < 256 && behind.is_apart; byte++)
            if (table.letters->next[BEGIN][byte] >= 0) behind.is_apart = step(behind.state, byte) == DEAD;
        if (!behind.is_apart) return behind;
        walk(table.tails, behind.state, [&](int value) {
            const auto& tokens = table.with_tail[value];
            behind.leavers.insert(behind.leavers.end(), tokens.begin(), tokens.end());
        });
        grow(behind.leavers.capacity() * sizeof(behind.leavers[0]));
        return behind;
    }

    // Keep the mask of a state: its base, and the words to add to it.
    void keep(State& state, const Mask* base, const State* more, const std::vector<int>& tokens) {
        static thread_local Mask bits;  // zeros, but for the words in `touched`
        static thread_local std::vector<uint32_t> touched;
        const size_t num_words = vocabulary.num_words;
        bits.resize(std::max(bits.size(), num_words));
        const auto set = [&](uint32_t place, uint32_t value) {
            if (bits[place] == 0) touched.push_back(place);
            bits[place] |= value;
        };
        for (int i = 0; more != nullptr && i < more->num_extra; i++) set(more->extra[i].place, more->extra[i].bits);
        for (int token : tokens) vocabulary.each_twin(token, [&](int id) { set(id / 32, 1u << id % 32); });
        state.has_mask = true;
        state.base = base;
        if (base == nullptr && 4 * touched.size() >= num_words) {
            owned_.push_back(std::make_unique<Mask>(bits.begin(), bits.begin() + num_words));
            state.base = owned_.back().get();
            grow(num_words * sizeof(uint32_t));
        } else {
            MaskWord* const extra = arena_.take<MaskWord>(touched.size());
            for (size_t i = 0; i < touched.size(); i++) extra[i] = {touched[i], bits[touched[i]]};
            state.extra = extra, state.num_extra = touched.size();
            grow(touched.size() * sizeof(MaskWord));
        }
        for (uint32_t place : touched) bits[place] = 0;
        touched.clear();
    }

    const Program program_;
    const std::shared_ptr<std::atomic<int64_t>> all_bytes_;
    std::array<uint8_t, 256> kinds_{};
    int num_kinds_ = 1;
    Arena arena_;
    std::vector<State*> states_;
    std::vector<std::unique_ptr<Mask>> owned_;  // bases of states that allow many tokens
    std::vector<uint32_t> seen_;                // by instruction: the set of items that it was last added to
    std::vector<int> buckets_;                  // states by hash
    std::vector<int> ways_;                     // of `close`, kept for its memory
    uint32_t now_ = 0;               // the set of items that is being made
    int64_t num_moves_ = 0;          // since they were last allowed
    std::map<std::pair<int, int>, Behind> behind_;  // by run, and items left
};

}  // namespace gapless
