// Programs of numbers: JSON's, and the integers between two bounds.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "program.h"

namespace gapless {

class IntegerWriter : public Writer {
  public:
    // A number of JSON.
    void number() {
        maybe([this] { text("-"); });
        natural();
        maybe([this] {
            text(".");
            digits(1, UNBOUNDED);
        });
        maybe([this] {
            any_byte({"EE", "ee"});
            maybe([this] { any_byte({"++", "--"}); });
            digits(1, UNBOUNDED);
        });
    }

    // An integer of JSON. Of those with bounds, only the ones that are not negative have a program.
    void between(std::optional<int64_t> low, std::optional<int64_t> high) {
        if (!low && !high) {
            maybe([this] { text("-"); });
            natural();
            return;
        }
        if (!low || *low < 0) throw NoProgram();
        std::vector<Fragment> parts;
        const int width = std::to_string(*low).size(), widest = std::to_string(high.value_or(*low)).size();
        for (int count = width; count <= widest; count++) {
            const std::string least = "1" + std::string(count - 1, '0'), most(count, '9');
            const std::string from = count == width ? std::to_string(*low) : least;
            const std::string to = high && count == widest ? std::to_string(*high) : most;
            parts.push_back([=, this] { of_width(from, to); });
        }
        if (!high) parts.push_back([=, this] { wider(width); });
        one_of(parts);
    }

  private:
    void natural() {
        one_of({[this] { text("0"); }, [this] { wider(0); }});
    }

    // Numbers with more digits than this.
    void wider(int width) {
        any_byte({"19"});
        digits(width, UNBOUNDED);
    }

    // Numbers of one width, from one to the other; both may begin with zeros.
    void of_width(const std::string& low, const std::string& high) {
        if (low == high)
            text(low);
        else if (low == std::string(low.size(), '0') && high == std::string(low.size(), '9'))
            digits(low.size(), low.size());
        else
            by_first(low, high);
    }

    // In parts: a span of first digits, and the range of what follows.
    void by_first(const std::string& low, const std::string& high) {
        const std::string zeros(low.size() - 1, '0'), nines(low.size() - 1, '9');
        const std::string low_rest = low.substr(1), high_rest = high.substr(1);
        std::vector<Fragment> parts;
        const auto add = [&](char from, char to, const std::string& least, const std::string& most) {
            parts.push_back([=, this] {
                put(BYTE, from, to);
                of_width(least, most);
            });
        };
        char first = low[0], last = high[0];
        if (first == last) return add(first, first, low_rest, high_rest), one_of(parts);
        if (low_rest != zeros) add(first, first, low_rest, nines), first++;
        if (high_rest != nines) last--;
        if (first <= last) add(first, last, zeros, nines);
        if (high_rest != nines) add(high[0], high[0], zeros, high_rest);
        one_of(parts);
    }
};

}  // namespace gapless
