// The programs of choices, and of JSON schemas without recursion.
//
// The language is the one that llguidance gives the same shape, so that either can be used. A shape that has no program
// here, or a large one, is llguidance's to judge, and so is every shape that is wrong.
#pragma once

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "integer_program.h"
#include "json_value.h"

namespace gapless {

class SchemaWriter : public IntegerWriter {
  public:
    SchemaWriter(const JsonValue& root, bool has_space, RunKind letters)
        : root_(root), has_space_(has_space), letters_(std::move(letters)) {}

    // Any text that the schema accepts.
    void document() { value(&root_, 0); }

    // Any of these texts, as they are.
    void choices() {
        std::vector<Fragment> parts;
        for (const JsonValue& item : list(&root_)) {
            if (item.kind != JsonValue::TEXT) throw NoProgram();
            parts.push_back([&] { text(item.text); });
        }
        one_of(parts);
    }

  private:
    typedef const JsonValue* Schema;

    static constexpr int MAX_LETTERS = 512;  // of all bounded strings together: each letter has some states
    static constexpr int MAX_SPACES = 200;   // places where white space may be: each has a state for every indentation
    static constexpr int MAX_DEPTH = 32;     // of values in values, $ref included

    struct Bounds {
        int64_t fewest, most;
    };

    // Keywords that say nothing about the text.
    static bool is_note(std::string_view name) {
        constexpr std::string_view NOTES[] = {"title", "description", "default", "examples", "$schema",
                                              "$comment", "deprecated", "readOnly", "writeOnly"};
        return std::ranges::find(NOTES, name) != std::end(NOTES);
    }

    static bool belongs_to(std::string_view name, std::string_view type) {
        constexpr std::pair<std::string_view, std::string_view> KNOWN[] = {
            {"object", "properties"}, {"object", "required"}, {"object", "additionalProperties"},
            {"array", "items"}, {"array", "minItems"}, {"array", "maxItems"},
            {"string", "minLength"}, {"string", "maxLength"},
            {"integer", "minimum"}, {"integer", "maximum"},
            {"integer", "exclusiveMinimum"}, {"integer", "exclusiveMaximum"}};
        return std::ranges::any_of(KNOWN, [&](const auto& known) { return known.second == name && known.first == type; });
    }

    void value(Schema schema, int depth) {
        if (schema == nullptr || schema->kind != JsonValue::OBJECT || depth > MAX_DEPTH) throw NoProgram();
        std::vector<std::string_view> keywords;
        for (const std::string& name : schema->names)
            if (!is_note(name) && !(schema == &root_ && (name == "$defs" || name == "definitions")))
                keywords.push_back(name);
        const auto has = [&](std::string_view name) { return std::ranges::find(keywords, name) != keywords.end(); };
        const size_t typed = has("type") ? 2 : 1;
        if (has("$ref") && keywords.size() == 1)
            value(referred(schema->find("$ref")), depth + 1);
        else if (has("anyOf") && keywords.size() == 1)
            any_of(list(schema->find("anyOf")), depth);
        else if (has("const") && keywords.size() == typed)
            literals({*schema->find("const")}, schema->find("type"));
        else if (has("enum") && keywords.size() == typed)
            literals(list(schema->find("enum")), schema->find("type"));
        else
            by_type(schema, keywords, depth);
    }

    void any_of(const std::vector<JsonValue>& schemas, int depth) {
        std::vector<Fragment> parts;
        for (const JsonValue& part : schemas) parts.push_back([&, depth] { value(&part, depth + 1); });
        one_of(parts);
    }

    void by_type(Schema schema, const std::vector<std::string_view>& keywords, int depth) {
        const Schema given = schema->find("type");
        if (given == nullptr) throw NoProgram();
        std::vector<std::string_view> types;
        if (given->kind == JsonValue::TEXT) types.push_back(given->text);
        else
            for (const JsonValue& item : list(given)) types.push_back(item.text);
        for (const std::string_view name : keywords)
            if (name != "type" && std::ranges::none_of(types, [&](auto type) { return belongs_to(name, type); }))
                throw NoProgram();
        std::vector<Fragment> parts;
        for (const std::string_view type : types) parts.push_back([=, this] { of_type(type, schema, depth); });
        one_of(parts);
    }

    void of_type(std::string_view type, Schema schema, int depth) {
        if (type == "object") object(schema, depth);
        else if (type == "array") array(schema, depth);
        else if (type == "string") string(bounds(schema, "minLength", "maxLength"));
        else if (type == "integer") integer(schema);
        else if (type == "number") number();
        else if (type == "boolean") one_of({[this] { text("true"); }, [this] { text("false"); }});
        else if (type == "null") text("null");
        else throw NoProgram();
    }

    void space() {
        if (!has_space_) return;
        if (++num_spaces_ > MAX_SPACES) throw NoProgram();
        put(SPACE);
    }

    void literals(const std::vector<JsonValue>& values, Schema type) {
        std::set<std::string> texts;
        for (const JsonValue& item : values) texts.insert(literal(item, type));
        std::vector<Fragment> parts;
        for (const std::string& each : texts) parts.push_back([&] { text(each); });
        one_of(parts);
    }

    void string(Bounds letters) {
        num_letters_ += letters.most == UNBOUNDED ? letters.fewest : letters.most;
        if (letters.fewest > MAX_LETTERS || num_letters_ > MAX_LETTERS) throw NoProgram();
        text("\"");
        run(letters_, letters.fewest, letters.most);
        text("\"");
    }

    void integer(Schema schema) {
        std::optional<int64_t> low, high;
        for (const auto& [name, more] : {std::pair{"minimum", 0}, {"exclusiveMinimum", 1}})
            if (const Schema given = schema->find(name)) low = std::max(low.value_or(INT64_MIN), whole(given) + more);
        for (const auto& [name, less] : {std::pair{"maximum", 0}, {"exclusiveMaximum", 1}})
            if (const Schema given = schema->find(name)) high = std::min(high.value_or(INT64_MAX), whole(given) - less);
        if (low && high && *low > *high) throw NoProgram();
        between(low, high);
    }

    void array(Schema schema, int depth) {
        const auto [fewest, most] = bounds(schema, "minItems", "maxItems");
        const bool is_counted = most == UNBOUNDED && fewest > 1 && depth == 0;  // there is one such array at most
        const auto item = [&] { value(schema->find("items"), depth + 1); };
        const auto another = [&] {
            space();
            text(",");
            if (is_counted) put(COUNT);
            space();
            item();
        };
        const auto items = [&, fewest, most] {
            item();
            if (is_counted) {
                program.num_counted = fewest - 1;
                repeat(another, 0, UNBOUNDED);
                put(GATE);
            } else {
                repeat(another, std::max<int64_t>(fewest - 1, 0), most == UNBOUNDED ? UNBOUNDED : most - 1);
            }
            space();
        };
        text("[");
        space();
        if (fewest > 0) items();
        else if (most != 0) maybe(items);
        text("]");
    }

    // Properties in the order of the schema; those that are not required may be passed by.
    void object(Schema schema, int depth) {
        static const JsonValue NOTHING;
        const Schema given = schema->find("properties"), more = schema->find("additionalProperties");
        const JsonValue& properties = given == nullptr ? NOTHING : *given;
        if (given != nullptr && given->kind != JsonValue::OBJECT) throw NoProgram();
        if (more == nullptr || more->kind != JsonValue::BOOLEAN || more->is_true) throw NoProgram();
        const std::set<std::string_view> required = names_of(schema->find("required"), properties);
        text("{");
        space();
        std::vector<int> first{put(JUMP)}, later;  // ways to here: before any property, and after some
        for (size_t i = 0; i < properties.items.size(); i++) {
            const bool may_pass = !required.contains(properties.names[i]);
            std::vector<int> ways, passing, passing_later;
            if (!later.empty()) {
                land(later);
                if (may_pass) passing_later.push_back(fork());
                space();
                text(",");
                space();
                ways.push_back(put(JUMP));
            }
            if (!first.empty()) {
                land(first);
                if (may_pass) passing.push_back(fork());
                ways.push_back(put(JUMP));
            }
            land(ways);
            property(properties.names[i], properties.items[i], depth);
            first = passing, later = passing_later;
            later.push_back(put(JUMP));
        }
        if (!later.empty()) {
            land(later);
            space();
            first.push_back(put(JUMP));
        }
        land(first);
        text("}");
    }

    void property(const std::string& name, const JsonValue& schema, int depth) {
        text(quoted(name));
        space();
        text(":");
        space();
        value(&schema, depth + 1);
    }

    static const std::vector<JsonValue>& list(Schema given) {
        if (given == nullptr || given->kind != JsonValue::LIST) throw NoProgram();
        return given->items;
    }

    static std::set<std::string_view> names_of(Schema required, const JsonValue& properties) {
        std::set<std::string_view> found;
        if (required == nullptr) return found;
        const std::set<std::string_view> known(properties.names.begin(), properties.names.end());
        for (const JsonValue& item : list(required)) {
            if (item.kind != JsonValue::TEXT || !known.contains(item.text)) throw NoProgram();
            found.insert(item.text);
        }
        return found;
    }

    // What a `$ref` within the schema means.
    Schema referred(Schema path) const {
        const bool is_text = path != nullptr && path->kind == JsonValue::TEXT;
        if (!is_text || !path->text.starts_with("#/") || path->text.find_first_of("~%") != std::string::npos)
            throw NoProgram();
        Schema found = &root_;
        for (size_t begin = 2, end; begin <= path->text.size(); begin = end + 1) {
            end = std::min(path->text.find('/', begin), path->text.size());
            found = found->find(path->text.substr(begin, end - begin));
            if (found == nullptr) throw NoProgram();
        }
        return found;
    }

    // A constant as JSON. Those that have several spellings are not written here.
    static std::string literal(const JsonValue& value, Schema type) {
        if (type != nullptr && type->kind != JsonValue::TEXT) throw NoProgram();
        const auto is = [&](std::string_view name) { return type == nullptr || type->text == name; };
        switch (value.kind) {
            case JsonValue::TEXT: if (is("string")) return quoted(value.text); break;
            case JsonValue::INTEGER: if (is("integer") || is("number")) return value.text; break;
            case JsonValue::BOOLEAN: if (is("boolean")) return value.is_true ? "true" : "false"; break;
            case JsonValue::NONE: if (is("null")) return "null"; break;
            default: break;
        }
        throw NoProgram();
    }

    static std::string quoted(const std::string& text) {
        std::string found = "\"";
        for (const char byte : text) {
            if ((unsigned char)byte < 0x20 || byte == 0x7f) throw NoProgram();  // it has several spellings
            if (byte == '"' || byte == '\\') found.push_back('\\');
            found.push_back(byte);
        }
        return found + '"';
    }

    static int64_t whole(Schema given) {
        if (given->kind != JsonValue::INTEGER || given->text.size() > 18) throw NoProgram();
        return std::stoll(given->text);
    }

    static Bounds bounds(Schema schema, std::string_view least, std::string_view most) {
        const Schema low = schema->find(least), high = schema->find(most);
        const Bounds found{low == nullptr ? 0 : whole(low), high == nullptr ? UNBOUNDED : whole(high)};
        if (found.fewest < 0 || (high != nullptr && found.most < found.fewest)) throw NoProgram();
        return found;
    }

    const JsonValue& root_;
    const bool has_space_;
    const RunKind letters_;  // of JSON's strings
    int64_t num_letters_ = 0;
    int num_spaces_ = 0;
};

}  // namespace gapless
