// Programs: regular languages of bytes as instructions, and how they are written.
//
// An automaton runs a program. schema_program.h and regex_program.h write the programs of shapes. Knows neither.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "vocabulary.h"

namespace gapless {

enum Op { BYTE, SPLIT, JUMP, RUN, SPACE, COUNT, GATE, MATCH };

constexpr int UNBOUNDED = -1;
constexpr size_t MAX_INSTRUCTIONS = 20'000;

struct Instruction {
    int32_t op, a, b, c;  // BYTE: from, to; SPLIT, JUMP: where to; RUN: fewest and most letters, and their kind
};

// The letters of a run. Without a table its masks are found by a walk through all tokens.
struct RunKind {
    std::shared_ptr<const Letters> letters;
    std::shared_ptr<const LetterTable> table;

    bool operator==(const RunKind&) const = default;
};

struct Program {
    std::vector<Instruction> code;
    std::vector<RunKind> kinds;  // of runs
    int64_t num_counted = 0;     // commas that an array must have which is too long to be written out
};

// The shape is not one of those that have a program.
struct NoProgram {};

// Appends instructions. Each method writes one part of the language; the next part is written behind it.
class Writer {
  public:
    typedef std::function<void()> Fragment;

    explicit Writer(size_t most = MAX_INSTRUCTIONS) : most_(most) {}

    // Returns its place. Where a jump leads may be said later, by `land`.
    int put(int op, int a = 0, int b = 0, int c = 0) {
        if (program.code.size() >= most_) throw NoProgram();
        program.code.push_back({op, a, b, c});
        return program.code.size() - 1;
    }

    int here() const { return program.code.size(); }

    // Jumps, and forks that pass something by, lead here.
    void land(const std::vector<int>& places) {
        for (int place : places) {
            Instruction& at = program.code[place];
            (at.op == SPLIT ? at.b : at.a) = here();
        }
    }

    // Two ways: what is written next, and one that passes it by and lands later.
    int fork() { return put(SPLIT, here() + 1); }

    void text(std::string_view text) {
        for (const unsigned char byte : text) put(BYTE, byte, byte);
    }

    // One byte of these spans, each written as its two ends.
    void any_byte(std::initializer_list<std::string_view> spans) {
        std::vector<Fragment> parts;
        for (const std::string_view span : spans) parts.push_back([this, span] { put(BYTE, span[0], span[1]); });
        one_of(parts);
    }

    void digits(int64_t fewest, int64_t most) {
        repeat([this] { put(BYTE, '0', '9'); }, fewest, most);
    }

    void run(const RunKind& kind, int fewest, int most) {
        int number = 0, size = program.kinds.size();
        while (number < size && program.kinds[number] != kind) number++;
        if (number == size) program.kinds.push_back(kind);
        put(RUN, fewest, most, number);
    }

    void one_of(const std::vector<Fragment>& parts) {
        if (parts.empty()) throw NoProgram();
        std::vector<int> ends;
        for (size_t i = 0; i + 1 < parts.size(); i++) {
            const int passing = fork();
            parts[i]();
            ends.push_back(put(JUMP));
            land({passing});
        }
        parts.back()();
        land(ends);
    }

    void maybe(const Fragment& part) { repeat(part, 0, 1); }

    void repeat(const Fragment& part, int64_t fewest, int64_t most) {
        for (int64_t i = 0; i < fewest; i++) part();
        if (most == UNBOUNDED) {
            const int again = fork();
            part();
            put(JUMP, again);
            land({again});
            return;
        }
        std::vector<int> forks;
        for (int64_t i = fewest; i < most; i++) {
            forks.push_back(fork());
            part();
        }
        land(forks);
    }

    Program program;

  private:
    const size_t most_;
};

}  // namespace gapless
