// Shapes of text as automata: the library's functions, and texts on their way.
//
// A shape that is a regular language becomes a program, the program an automaton, and each text a walker through it.
#include <algorithm>
#include <memory>
#include <mutex>
#include <string_view>

#include "automaton.h"
#include "regex_program.h"
#include "schema_program.h"

namespace gapless {

constexpr int ENOUGH_MASKS = 8, ENOUGH_TOKENS = 64;  // for which it pays to wake threads
constexpr int MOST_FORCED = 128;                     // bytes; guides/automaton.py has the same number
enum Took { REFUSED, TOOK, IS_OVER, TOO_COMPLEX };   // guides/automaton.py has the same list
enum Kind { SCHEMA, COMPACT_SCHEMA, CHOICE, REGEX };  // likewise

// A text on its way.
struct Walker {
    explicit Walker(Automaton& automaton)
        : automaton(automaton), left(automaton.num_counted()),
          number(automaton.first(std::min<int64_t>(left, automaton.far))) {}

    int advance(int token) {
        const std::lock_guard<std::mutex> hold(automaton.lock);
        automaton.allow_moves();
        const Vocabulary& vocabulary = automaton.vocabulary;
        if (token < 0 || token >= (int)vocabulary.texts.size()) return REFUSED;
        if (std::ranges::find(vocabulary.ends, token) != vocabulary.ends.end())
            return automaton.accepts(number) ? IS_OVER : REFUSED;
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
        if (automaton.left(now) == automaton.far && still < automaton.far)  // no longer far from enough
            now = automaton.with_left(now, std::max<int64_t>(still, 0));
        if (now == DEAD) return TOO_COMPLEX;
        number = now, left = still;
        return automaton.is_over(now) ? IS_OVER : TOOK;
    }

    bool fill(uint32_t* out) {
        const std::lock_guard<std::mutex> hold(automaton.lock);
        automaton.allow_moves();
        automaton.fill(number, out);
        return !automaton.is_full;
    }

    // The bytes that must come, as far as they are sure: how many, below 0 where they end the text.
    int forced(char* out) {
        const std::lock_guard<std::mutex> hold(automaton.lock);
        automaton.allow_moves();
        int now = number, size = 0;
        for (int byte; size < MOST_FORCED && (byte = automaton.only_byte(now)) != DEAD; size++) {
            const int next = automaton.step(now, byte);
            if (automaton.is_full || next == DEAD || next & 1) break;  // what follows a counted item depends on `left`
            out[size] = byte;
            now = next >> 1;
        }
        return automaton.is_over(now) ? -size : size;
    }

    Automaton& automaton;
    int64_t left;  // items that the counted array must have still, below 0 where it has more
    int number;    // of the state
};

// Throws NoProgram.
static Program program_of(Vocabulary& vocabulary, int kind, std::string_view text, bool at_once) {
    if (kind == REGEX) {
        RegexWriter writer(vocabulary, !at_once);
        writer.regex(RegexReader(text).read());
        writer.put(MATCH);
        return std::move(writer.program);
    }
    const JsonValue root = JsonReader(text).read();
    SchemaWriter writer(root, kind == SCHEMA, {vocabulary.json_table->letters, vocabulary.json_table});
    if (kind == CHOICE) writer.choices();
    else writer.document();
    writer.put(MATCH);
    return std::move(writer.program);
}

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

}  // namespace gapless

using namespace gapless;

extern "C" {

Vocabulary* gapless_vocabulary(
    int num_tokens, const int64_t* offsets, const char* bytes, const int32_t* ends, int num_ends, int num_threads
) {
    return new Vocabulary(num_tokens, offsets, bytes, ends, num_ends, num_threads);
}

// Null where the shape has no program; at_once: or one that takes longer than some tens of microseconds to write.
Automaton* gapless_automaton(Vocabulary* vocabulary, int kind, const char* text, int64_t size, int at_once) {
    try {
        return new Automaton(*vocabulary, program_of(*vocabulary, kind, {text, (size_t)size}, at_once));
    } catch (const NoProgram&) {
        return nullptr;
    }
}

Walker* gapless_walker(Automaton* automaton) {
    const std::lock_guard<std::mutex> hold(automaton->lock);
    return new Walker(*automaton);
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

// The bytes that must come for each walker, MOST_FORCED apart, and how many; below 0 where they end the text.
void gapless_forced(Walker** walkers, int count, char* out, int32_t* sizes) {
    each(walkers, count, ENOUGH_TOKENS, [&](int i) { sizes[i] = walkers[i]->forced(out + (int64_t)i * MOST_FORCED); });
}

}
