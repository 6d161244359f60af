// One step of a decoder on a CPU, as one call: packed plan in, tokens out, no lock of the interpreter held.
//
// Owns an engine's scratch memory and its team. Rows, KV cache and weights belong to others. The residual stream is
// float32; what enters a product has the product's type. Every thread walks the same layers, phase by phase; a phase reads
// what earlier ones wrote, and each of its units writes a place of its own.
#include <memory>

#include "attention.h"
#include "model.h"
#include "threads.h"

namespace gapless {

// What the host keeps of each row; `native/library.py` has the same fields, here and below.
struct Rows {
    int64_t *last_token, *length;
    int64_t* blocks;  // [num_groups][num_rows][max_blocks]: of each group of layers a table for each row
    int64_t num_groups, num_rows, max_blocks;

    int64_t* table(int group, int64_t row) const { return blocks + (group * num_rows + row) * max_blocks; }
};

struct Rotary {
    const float* tables;  // [num_ropes][num_positions][2][head_dim]: cos and signed sin
    int64_t num_positions;
};

struct Sizes {
    int32_t max_tokens, max_samples, num_threads;
};

struct Sections {
    int32_t num_decodes, num_chunk_tokens, num_chunks, num_samples, num_score_samples, num_targets, num_new_blocks;
};

constexpr int32_t NO_SAMPLE = -1;  // core/plan.py has the same number
enum Status { OK = 0, BAD_TOKEN = 1, BAD_POSITION = 2, TOO_LARGE = 3, NO_MEMORY = 4 };
enum Weights { FLOAT32, BFLOAT16, QUANTIZED };  // `native/library.py` has the same list

// A packed plan, section by section; `runner/fill.py` has the order.
struct Plan {
    Plan(const int32_t* p, const Sections& s) : count(s) {
        auto next = [&p](int n) { return (p += n) - n; };
        decode_rows = next(s.num_decodes);
        chunk_tokens = next(s.num_chunk_tokens), chunk_positions = next(s.num_chunk_tokens);
        chunk_token_rows = next(s.num_chunk_tokens);
        chunk_rows = next(s.num_chunks), chunk_offsets = next(s.num_chunks);
        chunk_starts = next(s.num_chunks), chunk_ends = next(s.num_chunks);
        sample_tokens = next(s.num_samples), sample_rows = next(s.num_samples);
        next(s.num_score_samples);
        score_tokens = next(s.num_targets);
        next(s.num_targets);
        new_blocks = p;
    }

    int num_tokens() const { return count.num_decodes + count.num_chunk_tokens; }

    // Tokens whose last hidden state counts: those followed by a sample, then those followed by a target.
    int num_picked() const { return count.num_samples + count.num_targets; }
    int picked(int i) const { return i < count.num_samples ? sample_tokens[i] : score_tokens[i - count.num_samples]; }

    const Sections count;
    const int32_t *decode_rows, *chunk_tokens, *chunk_positions, *chunk_token_rows, *chunk_rows, *chunk_offsets;
    const int32_t *chunk_starts, *chunk_ends, *sample_tokens, *sample_rows, *score_tokens, *new_blocks;
};

inline vec load_part(const float* p, int count) {
    if (count >= LANES) return load(p);
    vec v{};
    memcpy(&v, p, count * sizeof(float));
    return v;
}

inline float norm_factor(const float* x, int size, float eps) {
    vec squares{};
    for (int i = 0; i < size; i += LANES) {
        const vec v = load_part(x + i, size - i);
        squares = fma(v, v, squares);
    }
    return 1.0f / std::sqrt(sum(squares) / size + eps);
}

template <class Output>
void normalize(const float* x, const float* weight, int size, float eps, Output* out) {
    const float factor = norm_factor(x, size, eps);
    for (int i = 0; i < size; i += LANES) {
        const int left = size - i;
        put(out + i, load_part(x + i, left) * factor * load_part(weight + i, left), left);
    }
}

inline float mean_of(const float* x, int size) {
    vec total{};
    for (int i = 0; i < size; i += LANES) total += load_part(x + i, size - i);
    return sum(total) / size;
}

// A layer norm; bias may be null.
template <class Output>
void center(const float* x, const float* weight, const float* bias, int size, float eps, Output* out) {
    const float mean = mean_of(x, size);
    vec squares{};
    for (int i = 0; i < size; i += LANES) {
        const vec v = first_lanes(load_part(x + i, size - i) - mean, size - i, 0.0f);
        squares = fma(v, v, squares);
    }
    const float factor = 1.0f / std::sqrt(sum(squares) / size + eps);
    for (int i = 0; i < size; i += LANES) {
        const int left = size - i;
        vec y = (load_part(x + i, left) - mean) * factor * load_part(weight + i, left);
        if (bias != nullptr) y += load_part(bias + i, left);
        put(out + i, y, left);
    }
}

inline vec activate(vec x, int kind) { return kind == SILU ? silu(x) : kind == GELU ? gelu(x) : gelu_tanh(x); }

// activation(gate) * up. That of GPT-OSS keeps both within a limit; models/linear.py has the same numbers.
inline vec activate_gate(vec gate, vec up, int kind) {
    if (kind != CLAMPED) return activate(gate, kind) * up;
    constexpr float LIMIT = 7.0f, SLOPE = 1.702f;
    gate = choose(gate > LIMIT, fill(LIMIT), gate);
    up = choose(up > LIMIT, fill(LIMIT), choose(up < -LIMIT, fill(-LIMIT), up));
    return silu(gate * SLOPE) * (1.0f / SLOPE) * (up + 1.0f);
}

// Heads, one after the other, in place.
inline void normalize_heads(float* x, const float* weight, int count, int head_dim, float eps, int kind) {
    if (kind == ALL) normalize(x, weight, count * head_dim, eps, x);
    for (int h = 0; h < count * head_dim; h += head_dim) {
        if (kind == EACH) normalize(x + h, weight, head_dim, eps, x + h);
        if (kind == LAYER) center(x + h, weight + h, nullptr, head_dim, eps, x + h);
    }
}

// A head, rotated and scaled, in place.
inline void rotate(float* x, const float* cos_sin, int head_dim, float scale) {
    const int half = head_dim / 2;
    const float *cos = cos_sin, *sin = cos_sin + head_dim;
    for (int i = 0; i < half; i++) {
        const float low = x[i], high = x[i + half];
        x[i] = (low * cos[i] + high * sin[i]) * scale;
        x[i + half] = (high * cos[i + half] + low * sin[i + half]) * scale;
    }
}

struct Best {  // of 16 columns side by side
    vec value;
    ivec panel;
};

class AnyEngine {
  public:
    virtual ~AnyEngine() = default;
    virtual int step(const int32_t* packed, const Sections& sections, float* logits, int32_t* tokens) = 0;
    virtual void predict(int first, int count, float* logits) = 0;
};

// T and E: as the model has them.
template <class T, class E>
class Engine : public AnyEngine {
  public:
    typedef typename T::Input Input;
    typedef typename E::Input ExpertInput;
    static constexpr bool QUANTIZED = IS_QUANTIZED<T>, QUANTIZED_EXPERTS = IS_QUANTIZED<E>;
    static constexpr bool ALIKE = std::is_same_v<T, E>;

    Engine(const Model<T, E>& model, const Cache& cache, const Rows& rows, const Rotary& rotary, const Sizes& sizes)
        : model_(model), cache_(cache), rows_(rows), rotary_(rotary), sizes_(sizes), team_(sizes.num_threads) {
        const Shape& s = model.shape;
        const int heads_a_kv_head = s.num_heads / s.num_kv_heads;
        for (int i = 0; i < sizes.num_threads; i++) attentions_.emplace_back(cache, heads_a_kv_head);
        const int room = sizes.max_samples + sizes.max_tokens + MOST_TILE_ROWS;
        ids_.resize(room), positions_.resize(room), table_rows_.resize(room);
        normed_stride_ = T::num_inputs(s.hidden_size), mixed_stride_ = T::num_inputs(s.q_size());
        inner_stride_ = E::num_inputs(s.inner_size);
        normed_floats_.resize(sizes.num_threads, std::vector<float>(QUANTIZED_EXPERTS ? padded(s.hidden_size) : 0));
        hidden_ = memory_.take<float>((long)room * s.hidden_size);
        heads_ = memory_.take<float>((long)room * s.qkv_size());
        normed_ = memory_.take<Input>((long)room * normed_stride_);
        mixed_ = memory_.take<Input>((long)room * mixed_stride_);
        inner_ = memory_.take<ExpertInput>((long)room * std::max(1, s.num_chosen) * inner_stride_);
        if (s.num_experts) {
            shared_stride_ = E::num_inputs(s.shared_size), grouped_stride_ = E::num_inputs(s.hidden_size);
            shared_inner_ = memory_.take<ExpertInput>((long)room * shared_stride_);
            router_logits_ = memory_.take<float>((long)room * s.all_experts());
            if constexpr (ALIKE) routed_ = normed_;
            else routed_ = memory_.take<ExpertInput>((long)room * grouped_stride_);
            grouped_ = memory_.take<ExpertInput>((long)room * s.num_pairs() * grouped_stride_);
            results_ = memory_.take<float>((long)room * s.num_pairs() * s.hidden_size);
            choices_.resize(room, s.num_experts, s.num_chosen, s.num_shared(), s.shares_of_all);
        }
        if (s.norm_after) product_ = memory_.take<float>((long)room * s.hidden_size);
        picked_hidden_ = memory_.take<float>((long)room * s.hidden_size);
        picked_mixed_ = memory_.take<Input>((long)room * mixed_stride_);
        best_ = memory_.take<Best>((long)sizes.num_threads * sizes.max_samples);
        best_stride_ = sizes.max_samples;
    }

    int step(const int32_t* packed, const Sections& sections, float* logits, int32_t* tokens) override {
        const Plan plan(packed, sections);
        if (plan.num_tokens() > sizes_.max_tokens || sections.num_targets > sizes_.max_tokens) return TOO_LARGE;
        if (sections.num_samples > sizes_.max_samples) return TOO_LARGE;
        for (int i = 0; i < sections.num_new_blocks; i++) {
            const int32_t* entry = plan.new_blocks + (2 + rows_.num_groups) * i;
            for (int group = 0; group < rows_.num_groups; group++) rows_.table(group, entry[0])[entry[1]] = entry[2 + group];
        }
        if (const int status = gather(plan)) return status;
        make_tiles(plan);
        std::fill_n(best_, team_.size() * best_stride_, Best{fill(-INF), ivec{}});
        team_.run([&](int thread) { walk(plan, logits, thread); });
        finish(plan, logits == nullptr, tokens);
        return OK;
    }

    // The logits of the last step's picked tokens, from `first` on.
    void predict(int first, int count, float* logits) override {
        team_.run([&](int thread) { predict_rows(first, count, logits, thread); });
    }

  private:
    static constexpr int TOGETHER = QUANTIZED_EXPERTS ? BLOCK / LANES : 1;  // panels that make one ExpertInput

    // Token, position and row of each of the step's tokens: decodes from the rows, chunks from the plan.
    int gather(const Plan& plan) {
        for (int i = 0; i < plan.num_tokens(); i++) {
            const int decodes = plan.count.num_decodes, j = i - decodes;
            table_rows_[i] = i < decodes ? plan.decode_rows[i] : plan.chunk_token_rows[j];
            ids_[i] = i < decodes ? rows_.last_token[table_rows_[i]] : plan.chunk_tokens[j];
            positions_[i] = i < decodes ? rows_.length[table_rows_[i]] : plan.chunk_positions[j];
            if (ids_[i] < 0 || ids_[i] >= model_.shape.vocab_size) return BAD_TOKEN;
            if (positions_[i] < 0 || positions_[i] >= rotary_.num_positions) return BAD_POSITION;
            if (model_.places != nullptr && positions_[i] >= model_.shape.num_positions) return BAD_POSITION;
        }
        return OK;
    }

    // What attention works on, the longest dealt out first.
    void make_tiles(const Plan& plan) {
        tiles_.clear();
        for (int i = 0; i < plan.count.num_decodes; i++)
            tiles_.push_back({i, 1, (int)positions_[i], plan.decode_rows[i]});
        const int most = attentions_[0].tokens_a_tile();
        for (int c = 0; c < plan.count.num_chunks; c++) {
            const int start = plan.chunk_starts[c], count = plan.chunk_ends[c] - start;
            for (int i = 0; i < count; i += most)
                tiles_.push_back(
                    {plan.chunk_offsets[c] + i, std::min(most, count - i), start + i, plan.chunk_rows[c]}
                );
        }
        std::stable_sort(tiles_.begin(), tiles_.end(), [](const QueryTile& a, const QueryTile& b) {
            return (long)a.num_tokens * (a.start + a.num_tokens) > (long)b.num_tokens * (b.start + b.num_tokens);
        });
    }

    // The whole step, as one of the threads sees it.
    void walk(const Plan& plan, float* logits, int thread) {
        const Shape& s = model_.shape;
        int num_rows = plan.num_tokens();
        float* hidden = hidden_;
        const Input* mixed = mixed_;
        each_row(thread, num_rows, [&](int i) { embed(ids_[i], positions_[i], hidden + (long)i * s.hidden_size); });
        for (int index = 0; index < s.num_layers; index++) {
            const Layer<T, E>& layer = model_.layers[index];
            norm_rows(hidden, layer.first_norm, s.eps, num_rows, thread);
            project(layer.qkv, normed_, normed_stride_, heads_, s.qkv_size(), num_rows, thread);
            each_row(thread, num_rows, [&](int i) { rotate_and_store(layer, index, i); });
            attend(index, num_rows, thread);
            if (index == s.num_layers - 1) {
                num_rows = plan.num_picked();
                each_row(thread, num_rows, [&](int i) { pick(plan.picked(i), i); });
                hidden = picked_hidden_, mixed = picked_mixed_;
            }
            if (!s.parallel) add(layer.out, layer.first_after, mixed, mixed_stride_, hidden, num_rows, thread);
            if (s.num_experts) {
                add_experts(layer.experts, layer.second_norm, hidden, num_rows, thread);
                continue;
            }
            if constexpr (ALIKE) {
                norm_rows(hidden, layer.second_norm, s.eps, num_rows, thread);
                gate(layer.gate_up, num_rows, thread);
                if (s.parallel) add(layer.out, layer.first_after, mixed, mixed_stride_, hidden, num_rows, thread);
                add(layer.down, layer.second_after, inner_, inner_stride_, hidden, num_rows, thread);
            }
        }
        norm_rows(hidden, model_.last_norm, s.last_eps, num_rows, thread);
        predict_rows(0, plan.count.num_samples, logits, thread);
    }

    template <class Action>
    void each_row(int thread, int count, Action action) {
        const int run = std::max(1, count / (4 * team_.size()));
        team_.phase(thread, (count + run - 1) / run, [&](int unit) {
            for (int i = unit * run; i < std::min(count, (unit + 1) * run); i++) action(i);
        });
    }

    template <class Done>
    void run_product(
        int thread, const Linear<T>& linear, int num_rows, int together, const Input* x, long x_stride, Done done
    ) {
        const Cut<T> cut(linear, num_rows, together, team_.size());
        team_.phase(thread, cut.num_units, [&](int unit) { multiply(linear, cut, unit, x, x_stride, done); });
    }

    void embed(int64_t id, int64_t position, float* out) const {
        const int size = model_.shape.hidden_size;
        const float scale = model_.shape.embedding_scale;
        model_.embed(id, out);
        for (int k = 0; k < size; k++) out[k] *= scale;
        if (model_.places == nullptr) return;
        for (int k = 0; k < size; k++) out[k] += to_float(model_.places[position * size + k]);
    }

    // Into the inputs of products, as they are where there is no norm.
    void norm_rows(const float* hidden, const Norm& norm, float eps, int num_rows, int thread) {
        const int size = model_.shape.hidden_size;
        each_row(thread, num_rows, [&](int i) {
            const float* from = hidden + (long)i * size;
            Input* to = normed_ + i * normed_stride_;
            if constexpr (QUANTIZED) {
                float* between = normed_floats_[thread].data();
                if (norm.weight != nullptr) norm_row(from, norm, eps, between);
                quantize(norm.weight == nullptr ? from : between, size, to);
            } else if (norm.weight == nullptr)
                for (int k = 0; k < size; k += LANES) put(to + k, load_part(from + k, size - k), size - k);
            else
                norm_row(from, norm, eps, to);
        });
    }

    template <class Output>
    void norm_row(const float* from, const Norm& norm, float eps, Output* to) const {
        const Shape& s = model_.shape;
        if (s.layer_norm)
            center(from, norm.weight, norm.bias, s.hidden_size, eps, to);
        else
            normalize(from, norm.weight, s.hidden_size, eps, to);
    }

    void project(
        const Linear<T>& linear, const Input* x, long x_stride, float* out, long stride, int num_rows, int thread
    ) {
        run_product(thread, linear, num_rows, 1, x, x_stride, to_rows(linear, out, stride));
    }

    // What becomes of a product's tiles: rows of numbers, with the bias.
    template <class X>
    static auto to_rows(const Linear<X>& linear, float* out, long stride) {
        return [&linear, out, stride](int row, int rows, int panel, int count, const float* sums, int tile_rows) {
            for (int n = 0; n < count; n++)
                for (int m = 0; m < rows; m++) {
                    const int column = (panel + n) * LANES;
                    vec y = load(sums + (n * tile_rows + m) * LANES);
                    if (linear.bias != nullptr) y += load(linear.bias + column);
                    put(out + (row + m) * stride + column, y, linear.num_outputs - column);
                }
        };
    }

    void rotate_and_store(const Layer<T, E>& layer, int index, int token) {
        const Shape& s = model_.shape;
        const int size = s.head_dim, position = positions_[token];
        const float* cos_sin = rotary_.tables + (layer.shape.rope * rotary_.num_positions + position) * 2 * size;
        const int64_t block = rows_.table(cache_.groups[index], table_rows_[token])[position / cache_.block_size];
        float* q = heads_ + (long)token * s.qkv_size();
        float *k = q + s.q_size(), *v = k + s.num_kv_heads * size;
        normalize_heads(q, layer.q_norm, s.num_heads, size, s.eps, s.head_norm);
        normalize_heads(k, layer.k_norm, s.num_kv_heads, size, s.eps, s.head_norm);
        for (int h = 0; h < s.num_heads; h++) rotate(q + h * size, cos_sin, size, layer.shape.scale);
        for (int h = 0; h < s.num_kv_heads; h++) {
            rotate(k + h * size, cos_sin, size, 1.0f);
            cache_.write(block, position % cache_.block_size, index, h, k + h * size, v + h * size);
        }
    }

    void attend(int index, int num_tokens, int thread) {
        const Shape& s = model_.shape;
        const Layer<T, E>& layer = model_.layers[index];
        const Manner manner{layer.shape.window, layer.shape.soft_cap, layer.sinks};
        const int group = s.num_heads / s.num_kv_heads * s.head_dim, num_items = tiles_.size() * s.num_kv_heads;
        team_.phase(thread, num_items, [&](int i) {
            const QueryTile& tile = tiles_[i / s.num_kv_heads];
            const int head = i % s.num_kv_heads;
            const int64_t* blocks = rows_.table(cache_.groups[index], tile.row);
            float* q = heads_ + (long)tile.first_token * s.qkv_size() + head * group;
            auto attend = [&](auto* out, long stride) {
                attentions_[thread].attend(index, head, tile, blocks, manner, q, s.qkv_size(), out, stride);
            };
            Input* to = mixed_ + tile.first_token * mixed_stride_;
            if constexpr (!QUANTIZED) return attend(to + head * group, mixed_stride_);
            else {  // in the place of the queries
                attend(q, s.qkv_size());
                for (int t = 0; t < tile.num_tokens && group % BLOCK == 0; t++)
                    quantize(q + t * s.qkv_size(), group, to + t * mixed_stride_ + head * group / BLOCK);
            }
        });
        if constexpr (QUANTIZED)
            if (group % BLOCK != 0)
                each_row(thread, num_tokens, [&](int i) {
                    quantize(heads_ + (long)i * s.qkv_size(), s.q_size(), mixed_ + i * mixed_stride_);
                });
    }

    void pick(int token, int place) {
        const Shape& s = model_.shape;
        memcpy(
            picked_hidden_ + (long)place * s.hidden_size, hidden_ + (long)token * s.hidden_size,
            s.hidden_size * sizeof(float)
        );
        memcpy(picked_mixed_ + place * mixed_stride_, mixed_ + token * mixed_stride_, mixed_stride_ * sizeof(Input));
    }

    // A product, normalized where there is a norm, added to the stream.
    void add(
        const Linear<T>& linear, const Norm& norm, const Input* x, long x_stride, float* hidden, int num_rows, int thread
    ) {
        if (norm.weight == nullptr) return add_product(linear, x, x_stride, hidden, num_rows, thread);
        const int size = model_.shape.hidden_size;
        project(linear, x, x_stride, product_, size, num_rows, thread);
        each_row(thread, num_rows, [&](int i) {
            float *from = product_ + (long)i * size, *to = hidden + (long)i * size;
            norm_row(from, norm, model_.shape.eps, from);
            for (int k = 0; k < size; k++) to[k] += from[k];
        });
    }

    void add_product(const Linear<T>& linear, const Input* x, long x_stride, float* hidden, int num_rows, int thread) {
        const long stride = model_.shape.hidden_size;
        auto done = [&](int row, int rows, int panel, int count, const float* sums, int tile_rows) {
            for (int n = 0; n < count; n++)
                for (int m = 0; m < rows; m++) {
                    const int column = (panel + n) * LANES, left = linear.num_outputs - column;
                    float* to = hidden + (row + m) * stride + column;
                    vec y = load(sums + (n * tile_rows + m) * LANES);
                    if (linear.bias != nullptr) y += load(linear.bias + column);
                    put(to, y + load_part(to, left), left);
                }
        };
        run_product(thread, linear, num_rows, 1, x, x_stride, done);
    }

    void gate(const Linear<T>& linear, int num_rows, int thread) {
        const int together = TOGETHER * (model_.shape.gated ? 2 : 1);
        run_product(thread, linear, num_rows, together, normed_, normed_stride_, to_inner(linear, inner_, inner_stride_));
    }

    // What becomes of the tiles of gate and up, or of up alone: activated inputs of the next product.
    auto to_inner(const Linear<E>& linear, ExpertInput* out, long stride) const {
        const int kind = model_.shape.activation, sides = model_.shape.gated ? 2 : 1;
        return [=, &linear](int row, int rows, int panel, int count, const float* sums, int tile_rows) {
            auto sum = [&](int n, int m) {
                const vec y = load(sums + (n * tile_rows + m) * LANES);
                return linear.bias == nullptr ? y : y + load(linear.bias + (panel + n) * LANES);
            };
            auto result = [&](int n, int m) {
                return sides == 1 ? activate(sum(n, m), kind) : activate_gate(sum(n, m), sum(n + 1, m), kind);
            };
            for (int n = 0; n < count; n += TOGETHER * sides)
                for (int m = 0; m < rows; m++) {
                    const int column = (panel + n) / sides * LANES;
                    ExpertInput* to = out + (row + m) * stride;
                    if constexpr (QUANTIZED_EXPERTS)
                        quantize(result(n, m), result(n + sides, m), to[column / BLOCK]);
                    else
                        put(to + column, result(n, m), linear.num_outputs - column);
                }
        };
    }

    // A row's logits of the router, and the row as the experts' input, where they are quantized: the router reads it before
    // it is rounded.
    void route(const ExpertWeights<T, E>& experts, const Norm& norm, const float* row, int place, int thread) {
        const Shape& s = model_.shape;
        const int size = s.hidden_size;
        float* logits = router_logits_ + (long)place * s.all_experts();
        if (norm.weight != nullptr) {
            norm_row(row, norm, s.eps, normed_floats_[thread].data());
            row = normed_floats_[thread].data();
        }
        quantize(row, size, routed_ + place * grouped_stride_);
        for (int e = 0; e < s.all_experts(); e++) {
            const float* weight = experts.router_table + (long)e * size;
            vec products{};
            for (int k = 0; k < size; k += LANES)
                products = fma(load_part(row + k, size - k), load_part(weight + k, size - k), products);
            logits[e] = sum(products) + (experts.router.bias == nullptr ? 0.0f : experts.router.bias[e]);
        }
    }

    struct Inner {
        ExpertInput* rows;
        long stride;
    };

    // What an expert's gate and up make of its pairs, which begin at `start`. The shared one has all rows, and its own size.
    Inner inner_of(int expert, long start) const {
        if (expert == model_.shape.num_experts) return {shared_inner_, shared_stride_};
        return {inner_ + start * inner_stride_, inner_stride_};
    }

    // What the chosen experts make of the normalized rows, added to the stream. Rows of one expert lie side by side.
    void add_experts(const ExpertWeights<T, E>& experts, const Norm& norm, float* hidden, int num_rows, int thread) {
        if (num_rows == 0) return;
        const Shape& s = model_.shape;
        const int size = s.hidden_size, num_pairs = s.num_pairs(), num_threads = team_.size();
        const int num_logits = s.all_experts();
        if constexpr (QUANTIZED_EXPERTS) {
            each_row(thread, num_rows, [&](int i) { route(experts, norm, hidden + (long)i * size, i, thread); });
        } else {
            norm_rows(hidden, norm, s.eps, num_rows, thread);
            project(experts.router, normed_, normed_stride_, router_logits_, num_logits, num_rows, thread);
        }
        each_row(thread, num_rows, [&](int i) { choices_.choose(i, router_logits_ + (long)i * num_logits); });
        team_.phase(thread, 1, [&](int) { choices_.group(num_rows, experts, 2 * TOGETHER, num_threads); });
        each_row(thread, num_rows * num_pairs, [&](int pair) {
            const ExpertInput* row = routed_ + pair / num_pairs * grouped_stride_;
            memcpy((void*)(grouped_ + choices_.place(pair) * grouped_stride_), row, grouped_stride_ * sizeof(ExpertInput));
        });
        team_.phase(thread, choices_.num_gate_units.load(std::memory_order_relaxed), [&](int unit) {
            const auto [e, mine] = choices_.gate_unit(unit);
            const Linear<E>& linear = experts.gate_up[e];
            const long start = choices_.start(e);
            const Cut<E> cut(linear, choices_.count(e), 2 * TOGETHER, num_threads);
            const Inner inner = inner_of(e, start);
            auto done = to_inner(linear, inner.rows, inner.stride);
            multiply(linear, cut, mine, grouped_ + start * grouped_stride_, grouped_stride_, done);
        });
        team_.phase(thread, choices_.num_down_units.load(std::memory_order_relaxed), [&](int unit) {
            const auto [e, mine] = choices_.down_unit(unit);
            const Linear<E>& linear = experts.down[e];
            const long start = choices_.start(e);
            const Cut<E> cut(linear, choices_.count(e), 1, num_threads);
            auto done = to_rows(linear, results_ + start * size, size);
            const Inner inner = inner_of(e, start);
            multiply(linear, cut, mine, inner.rows, inner.stride, done);
        });
        each_row(thread, num_rows, [&](int i) {
            float* to = hidden + (long)i * size;
            for (int j = 0; j < num_pairs; j++) {
                const long pair = (long)i * num_pairs + j;
                const float* from = results_ + choices_.place(pair) * (long)size;
                const float share = choices_.share(pair);
                for (int k = 0; k < size; k++) to[k] += share * from[k];
            }
        });
    }

    // The logits themselves where they are wanted, else each thread's best of every sample.
    void predict_rows(int first, int num_rows, float* logits, int thread) {
        const int vocab = model_.shape.vocab_size;
        const float cap = model_.shape.logit_cap;
        Best* best = best_ + (long)thread * best_stride_;
        auto done = [&](int row, int rows, int panel, int count, const float* sums, int tile_rows) {
            for (int n = 0; n < count; n++)
                for (int m = 0; m < rows; m++) {
                    const int column = (panel + n) * LANES;
                    vec y = load(sums + (n * tile_rows + m) * LANES);
                    if (cap != 0.0f) y = soft_cap(y, cap);
                    if (logits != nullptr) {
                        put(logits + (long)(row + m) * vocab + column, y, vocab - column);
                        continue;
                    }
                    Best& b = best[row + m];
                    const ivec better = first_lanes(y, vocab - column, -INF) > b.value;
                    b.value = choose(better, y, b.value);
                    b.panel = ((ivec{} + (panel + n)) & better) | (b.panel & ~better);
                }
        };
        run_product(thread, model_.head, num_rows, 1, normed_ + first * normed_stride_, normed_stride_, done);
    }

    // The first of the largest logits; NO_SAMPLE where they are not finite numbers.
    int64_t best_token(int sample) const {
        float value = -INF;
        int64_t token = 0;
        for (int thread = 0; thread < team_.size(); thread++) {
            const Best& b = best_[thread * (long)best_stride_ + sample];
            for (int lane = 0; lane < LANES; lane++) {
                const int64_t id = (int64_t)b.panel[lane] * LANES + lane;
                if (b.value[lane] > value || (b.value[lane] == value && id < token)) value = b.value[lane], token = id;
            }
        }
        return -INF < value && value < INF ? token : NO_SAMPLE;
    }

    // Moves the rows on; tokens only where they were chosen here.
    void finish(const Plan& plan, bool greedy, int32_t* tokens) {
        for (int i = 0; i < plan.count.num_decodes; i++) rows_.length[plan.decode_rows[i]]++;
        for (int i = 0; i < plan.count.num_chunks; i++) rows_.length[plan.chunk_rows[i]] = plan.chunk_ends[i];
        for (int i = 0; greedy && i < plan.count.num_samples; i++) {
            tokens[i] = best_token(i);
            rows_.last_token[plan.sample_rows[i]] = std::max(tokens[i], 0);  // NO_SAMPLE is no token
        }
    }

    const Model<T, E>& model_;
    const Cache cache_;
    const Rows rows_;
    const Rotary rotary_;
    const Sizes sizes_;
    Team team_;
    Arena memory_{64 << 20, true};
    std::vector<Attention> attentions_;  // one a thread
    std::vector<std::vector<float>> normed_floats_;  // of each thread: a row before it is quantized
    std::vector<int64_t> ids_, positions_, table_rows_;
    std::vector<QueryTile> tiles_;
    long normed_stride_, mixed_stride_, inner_stride_, shared_stride_ = 0, grouped_stride_ = 0, best_stride_;
    float *hidden_, *heads_;           // [tokens][hidden_size], [tokens][qkv_size]
    float* product_ = nullptr;         // [tokens][hidden_size], where products are normalized before they are added
    Input *normed_, *mixed_;           // [tokens][stride]; what pads a row stays zero, here and in the next
    ExpertInput* inner_;               // what the first half of an MLP makes of them, of experts or not
    float* picked_hidden_;             // [picked][hidden_size]
    Input* picked_mixed_;
    ExpertInput* shared_inner_ = nullptr;  // the same of the shared expert
    Choices choices_;                 // of experts, as the following ones
    float* router_logits_ = nullptr;  // [tokens][logits]
    ExpertInput* routed_ = nullptr;   // [tokens][stride]: normed rows as experts read them
    ExpertInput* grouped_ = nullptr;  // [pairs][stride]: the same, one expert after the other
    float* results_ = nullptr;        // [pairs][hidden_size]
    Best* best_;  // [threads][samples]
};

class AnyModel {
  public:
    virtual ~AnyModel() = default;
    virtual void set_matrix(int part, int layer, const void* data, int kind, int num_outputs, int first, bool mapped) = 0;
    virtual void lend_matrix(int part, int layer, const int64_t* rows, int num_outputs, int64_t step) = 0;
    virtual void pack_lent() = 0;
    virtual int num_unpacked() const = 0;
    virtual void set_vector(int part, int layer, const float* data, int count, int first) = 0;
    virtual AnyEngine* engine(const Cache&, const Rows&, const Rotary&, const Sizes&) const = 0;
};

template <class T, class E>
class ModelOf : public AnyModel {
  public:
    ModelOf(const Shape& shape, const LayerShape* layers) : model_(shape, layers) {}

    void set_matrix(int part, int layer, const void* data, int kind, int num_outputs, int first, bool mapped) override {
        model_.set_matrix(part, layer, data, kind, num_outputs, first, mapped);
    }

    void lend_matrix(int part, int layer, const int64_t* rows, int num_outputs, int64_t step) override {
        model_.lend_matrix(part, layer, rows, num_outputs, step);
    }

    void pack_lent() override { model_.pack_lent(); }

    int num_unpacked() const override { return model_.num_unpacked; }

    void set_vector(int part, int layer, const float* data, int count, int first) override {
        model_.set_vector(part, layer, data, count, first);
    }

    AnyEngine* engine(const Cache& c, const Rows& r, const Rotary& t, const Sizes& s) const override {
        return new Engine<T, E>(model_, c, r, t, s);
    }

  private:
    Model<T, E> model_;
};

}  // namespace gapless

using namespace gapless;

// No exception may reach the host. Null where memory is short.
template <class Make>
static auto or_null(Make make) -> decltype(make()) {
    try {
        return make();
    } catch (const std::exception&) {
        return nullptr;
    }
}

// The same, for what returns a status.
template <class Act>
static int status_of(Act act) {
    try {
        return act();
    } catch (const std::exception&) {
        return NO_MEMORY;
    }
}

extern "C" {

// quantized_experts: those are, whatever the others are.
AnyModel* gapless_model(const Shape* shape, const LayerShape* layers, int weights, int quantized_experts) {
    auto make = [&]<class T>(T) -> AnyModel* {
        if (quantized_experts) return new ModelOf<T, Quantized>(*shape, layers);
        return new ModelOf<T, T>(*shape, layers);
    };
    return or_null([&] {
        return weights == QUANTIZED ? make(Quantized()) : weights == BFLOAT16 ? make(Bfloat16()) : make(Float32());
    });
}

int gapless_set_matrix(
    AnyModel* model, int part, int layer, const void* data, int kind, int num_outputs, int first, int mapped
) {
    return status_of([&] { return model->set_matrix(part, layer, data, kind, num_outputs, first, mapped), OK; });
}

int gapless_lend_matrix(AnyModel* model, int part, int layer, const int64_t* rows, int num_outputs, int64_t step) {
    return status_of([&] { return model->lend_matrix(part, layer, rows, num_outputs, step), OK; });
}

int gapless_pack_lent(AnyModel* model) {
    return status_of([&] { return model->pack_lent(), OK; });
}

int gapless_num_unpacked(const AnyModel* model) { return model->num_unpacked(); }

int gapless_set_vector(AnyModel* model, int part, int layer, const float* data, int count, int first) {
    return status_of([&] { return model->set_vector(part, layer, data, count, first), OK; });
}

void gapless_drop_model(AnyModel* model) { delete model; }

AnyEngine* gapless_engine(
    const AnyModel* model, const Cache* cache, const Rows* rows, const Rotary* rotary, const Sizes* sizes
) {
    return or_null([&] { return model->engine(*cache, *rows, *rotary, *sizes); });
}

int gapless_step(AnyEngine* engine, const int32_t* packed, const Sections* sections, float* logits, int32_t* tokens) {
    return status_of([&] { return engine->step(packed, *sections, logits, tokens); });
}

int gapless_predict(AnyEngine* engine, int first, int count, float* logits) {
    return status_of([&] { return engine->predict(first, count, logits), OK; });
}

// Put the tokens out of reach that the masks of these rows do not allow, where a row has one.
// logits: [count][vocab]; masks: [rows][words], a bit for each token; has_mask: of the rows, `stride` numbers apart.
void gapless_mask(
    float* logits, int64_t vocab, const int64_t* rows, int count, const uint32_t* masks, int64_t words,
    const int32_t* has_mask, int64_t stride
) {
    for (int i = 0; i < count; i++) {
        if (!has_mask[rows[i] * stride]) continue;
        const uint32_t* mask = masks + rows[i] * words;
        for (int64_t w = 0; w < words; w++) {
            float* at = logits + i * vocab + 32 * w;
            const int size = std::min<int64_t>(32, vocab - 32 * w);
            if (mask[w] == 0) {
                std::fill_n(at, size, -INF);
            } else if (mask[w] != ~0u) {
                for (int bit = 0; bit < size; bit++)
                    if (!(mask[w] >> bit & 1)) at[bit] = -INF;
            }
        }
    }
}

void gapless_drop_engine(AnyEngine* engine) { delete engine; }

}
