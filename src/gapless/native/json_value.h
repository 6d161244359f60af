// A JSON text as a value. The text was written by Python's json, so that it is right; what is not understood has no value.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "program.h"

namespace gapless {

struct JsonValue {
    enum Kind { NONE, BOOLEAN, INTEGER, NUMBER, TEXT, LIST, OBJECT };

    const JsonValue* find(std::string_view name) const {
        for (size_t i = 0; i < names.size(); i++)
            if (names[i] == name) return &items[i];
        return nullptr;
    }

    Kind kind = NONE;
    bool is_true = false;
    std::string text;               // of a text, or a number as it was written
    std::vector<std::string> names; // of an object's items
    std::vector<JsonValue> items;
};

class JsonReader {
  public:
    explicit JsonReader(std::string_view text) : text_(text) {}

    // Throws NoProgram where the text is not JSON.
    JsonValue read() {
        JsonValue found = value();
        if (place_ != text_.size()) throw NoProgram();
        return found;
    }

  private:
    static constexpr int MAX_DEPTH = 256;  // far more than a schema may have

    char peek() const { return place_ < text_.size() ? text_[place_] : '\0'; }

    void skip_space() {
        while (peek() == ' ' || peek() == '\n' || peek() == '\t' || peek() == '\r') place_++;
    }

    static bool is_one_of(char byte, std::string_view bytes) { return bytes.find(byte) != bytes.npos; }

    bool takes(std::string_view word) {
        if (text_.substr(place_, word.size()) != word) return false;
        place_ += word.size();
        return true;
    }

    JsonValue value() {
        if (++depth_ > MAX_DEPTH) throw NoProgram();
        skip_space();
        JsonValue found;
        if (takes("{")) {
            found.kind = JsonValue::OBJECT;
            members(found, '}');
        } else if (takes("[")) {
            found.kind = JsonValue::LIST;
            members(found, ']');
        } else if (peek() == '"') {
            found.kind = JsonValue::TEXT;
            found.text = string();
        } else if (takes("true") || takes("false")) {
            found.kind = JsonValue::BOOLEAN;
            found.is_true = text_[place_ - 2] == 'u';
        } else if (!takes("null")) {
            number(found);
        }
        skip_space();
        depth_--;
        return found;
    }

    void members(JsonValue& found, char end) {
        skip_space();
        if (peek() == end) {
            place_++;
            return;
        }
        for (;; place_++) {
            skip_space();
            if (end == '}') {
                found.names.push_back(string());
                skip_space();
                if (!takes(":")) throw NoProgram();
            }
            found.items.push_back(value());
            if (peek() != ',') break;
        }
        if (peek() != end) throw NoProgram();
        place_++;
    }

    void number(JsonValue& found) {
        const size_t begin = place_;
        found.kind = JsonValue::INTEGER;
        for (; place_ < text_.size() && is_one_of(text_[place_], "+-.eE0123456789"); place_++)
            if (is_one_of(text_[place_], ".eE")) found.kind = JsonValue::NUMBER;
        if (begin == place_) throw NoProgram();
        found.text = text_.substr(begin, place_ - begin);
    }

    std::string string() {
        if (!takes("\"")) throw NoProgram();
        std::string found;
        while (place_ < text_.size()) {
            const char byte = text_[place_++];
            if (byte == '"') return found;
            if (byte == '\\')
                escape(found);
            else
                found.push_back(byte);
        }
        throw NoProgram();
    }

    void escape(std::string& out) {
        const char named = peek();
        place_++;
        constexpr std::string_view NAMES = "\"\\/bfnrt", MEANT = "\"\\/\b\f\n\r\t";
        if (const size_t at = NAMES.find(named); at != NAMES.npos)
            out.push_back(MEANT[at]);
        else if (named == 'u')
            numbered(out);
        else
            throw NoProgram();
    }

    // Python writes control characters by number, and everything else as it is.
    void numbered(std::string& out) {
        int code = 0;
        for (int i = 0; i < 4; i++, place_++) {
            if (!is_hex((unsigned char)peek())) throw NoProgram();
            code = 16 * code + (peek() <= '9' ? peek() - '0' : (peek() | 32) - 'a' + 10);
        }
        if (code >= 0x80) throw NoProgram();
        out.push_back(code);
    }

    const std::string_view text_;
    size_t place_ = 0;
    int depth_ = 0;
};

}  // namespace gapless
