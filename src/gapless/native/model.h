// The weights of one model, packed for `product`. Filled once, part by part; read-only from then on, by any number of
// engines, but for weights that are lent: a thread of the model's own packs them one after the other. Owns its memory.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <new>
#include <thread>
#include <vector>

#include "experts.h"
#include "quantized.h"

namespace gapless {

// As the host passes it; `native/library.py` has the same fields.
struct Shape {
    int32_t vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, inner_size;
    int32_t tied;         // the embedding is the head
    int32_t head_norm;    // one of HeadNorm
    int32_t layer_norm;   // norms are layer norms, not root-mean-square ones
    int32_t norm_before;  // attention and MLP read a norm of the stream
    int32_t norm_after;   // what they add to the stream is normalized
    int32_t parallel;     // the MLP reads what attention reads
    int32_t gated;
    int32_t activation;     // one of Activation
    int32_t num_experts, num_chosen;  // of each layer, the shared one aside; 0: there are none
    int32_t shared_size;              // of an expert that every row has, after the others; 0: there is none
    int32_t shares_of_all;            // shares of the chosen do not add up to 1
    int32_t num_positions;  // that have a row of a table of their own; 0: there is no such table
    float eps, last_eps, embedding_scale;
    float logit_cap;  // 0: none

    int q_size() const { return num_heads * head_dim; }
    int num_shared() const { return shared_size ? 1 : 0; }
    int all_experts() const { return num_experts + num_shared(); }  // as many as logits of the router
    int num_pairs() const { return num_chosen + num_shared(); }     // of a row
    int expert_size(int expert) const { return expert < num_experts ? inner_size : shared_size; }
    int kv_size() const { return num_kv_heads * head_dim; }
    int qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

// What may differ from layer to layer.
struct LayerShape {
    int32_t rope;    // which table
    int32_t window;  // see Manner, as the next ones
    int32_t has_sinks;
    float soft_cap;
    float scale;  // of scores
};

enum HeadNorm { NO_HEAD_NORM, EACH, ALL, LAYER };  // as in models/spec.py
enum Activation { SILU, GELU, GELU_TANH, CLAMPED };

// Which weight. The host has the same list. A weight of an expert has layer * all_experts() + expert for its layer.
enum Part {
    EMBEDDING, POSITIONS, HEAD, LAST_NORM, LAST_NORM_BIAS, FIRST_NORM, FIRST_NORM_BIAS, SECOND_NORM, SECOND_NORM_BIAS,
    FIRST_AFTER, SECOND_AFTER, QKV, OUT, GATE, UP, DOWN, Q_NORM, K_NORM, SINKS,
    ROUTER, EXPERT_GATE, EXPERT_UP, EXPERT_DOWN
};

// A norm's weights; without a bias where there is none.
struct Norm {
    float *weight = nullptr, *bias = nullptr;
};

// Memory in large pieces, one weight after the other in the order of use. It is on large pages, whose first touch takes as
// long as that of hundreds of small ones: vectors have an arena of their own, so that matrices may be touched later.
class Arena {
  public:
    Arena(size_t piece_size, bool has_large_pages) : piece_size_(piece_size), has_large_pages_(has_large_pages) {}
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    ~Arena() {
        for (const Piece& piece : pieces_) munmap(piece.start, piece.size);
    }

    template <class X>
    X* take(long count) {  // zeroed
        const size_t size = (count * sizeof(X) + 63) / 64 * 64;
        if (pieces_.empty() || pieces_.back().used + size > pieces_.back().size) add(size);
        Piece& piece = pieces_.back();
        piece.used += size;
        return (X*)(piece.start + piece.used - size);
    }

  private:
    struct Piece {
        char* start;
        size_t size, used;
    };

    void add(size_t least) {
        const size_t size = std::max(least, piece_size_);
        void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (start == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        if (has_large_pages_) madvise(start, size, MADV_HUGEPAGE);
#endif
        pieces_.push_back({(char*)start, size, 0});
    }

    const size_t piece_size_;
    const bool has_large_pages_;
    std::vector<Piece> pieces_;
};

template <class T, class E>
struct Layer {
    Norm first_norm, second_norm, first_after, second_after;
    float *q_norm, *k_norm;  // of each head's numbers, or of all heads'
    float* sinks;
    LayerShape shape;
    Linear<T> qkv, out, gate_up, down;  // gate_up: a panel of the gate, its panel of up, and so on
    ExpertWeights<T, E> experts;  // in place of gate_up and down, where there are some
};

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) { return from_bf16(x); }

inline int panels(int num_outputs) { return (num_outputs + LANES - 1) / LANES; }

template <class X>
constexpr bool IS_QUANTIZED = std::is_same_v<X, Quantized>;

// T: of all matrices but those of experts, which are E: the same, or quantized.
template <class T, class E>
class Model {
  public:
    typedef typename T::Weight Weight;
    static constexpr int PATIENCE = 10;  // of the thread that packs: steps that run meanwhile go first
    static constexpr bool QUANTIZED = IS_QUANTIZED<T>;

    Model(const Shape& shape, const LayerShape* layer_shapes) : shape(shape), layers(shape.num_layers) {
        const int hidden = shape.hidden_size, inner = shape.inner_size;
        if (!shape.tied) make_table();
        zeros_ = vectors_.take<Weight>(std::max({hidden, inner, shape.shared_size, shape.q_size()}));
        if (shape.num_positions) places = arena_.take<Weight>((long)shape.num_positions * hidden);
        for (Layer<T, E>& layer : layers) {
            layer.shape = *layer_shapes++;
            if (shape.norm_before) make(layer.first_norm);
            make(layer.qkv, shape.qkv_size(), hidden);
            layer.q_norm = vectors_.take<float>(shape.q_size());
            layer.k_norm = vectors_.take<float>(shape.kv_size());
            layer.sinks = layer.shape.has_sinks ? vectors_.take<float>(shape.num_heads) : nullptr;
            make(layer.out, hidden, shape.q_size());
            if (shape.norm_after) make(layer.first_after);
            if (shape.norm_before) make(layer.second_norm);
            if (shape.num_experts) {
                make(layer.experts);
            } else {
                make(layer.gate_up, inner, hidden, (shape.gated ? 2 : 1) * panels(inner));
                make(layer.down, hidden, inner);
            }
            if (shape.norm_after) make(layer.second_after);
        }
        make(last_norm);
        make(head, shape.vocab_size, hidden);
    }

    // Rows `first` and following of a weight matrix [num_outputs, num_inputs]. `kind`: how the file stores them, where they
    // are quantized. `mapped`: there they lie in a mapped file, whose pages are given back.
    void set_matrix(int part, int layer, const void* data, int kind, int num_outputs, int first, bool mapped) {
        if (part == POSITIONS || (part == EMBEDDING && !QUANTIZED)) {
            Weight* to = part == EMBEDDING ? table : places;
            memcpy(to, data, (long)num_outputs * shape.hidden_size * sizeof(Weight));
            return;
        }
        if (part == ROUTER && IS_QUANTIZED<E>) {
            float* to = layers[layer].experts.router_table + (long)first * shape.hidden_size;
            memcpy(to, data, (long)num_outputs * shape.hidden_size * sizeof(float));
            return;
        }
        with_product(part, layer, [&]<class X>(Linear<X>& linear) {
            auto place = [&](int n) { return panel_of(part, first + n); };
            if constexpr (IS_QUANTIZED<X>) {
                auto take = [&](long size) { return arena_.take<uint8_t>(size); };
                const uint8_t* end = linear.pack(kind, (const uint8_t*)data, num_outputs, take, place);
                if (mapped) give_back((uintptr_t)data, (uintptr_t)end);
            } else {
                const Weight* from = (const Weight*)data;
                put_rows(linear, part, first, num_outputs, [&](int n) { return from + (long)n * linear.num_inputs; });
                linear.pack_rows([] { return false; });
                linear.rows.clear();
            }
        });
    }

    // The same rows where they lie, each in memory that is mapped from a file and stays so while the model lives. They are
    // packed later, by `pack_lent`. `step`: from a number of a row to the next, the same for all rows of a product.
    void lend_matrix(int part, int layer, const int64_t* rows, int num_outputs, int64_t step) {
        if (part == EMBEDDING) {
            table = (Weight*)rows[0];
            return;
        }
        with_product(part, layer, [&]<class X>(Linear<X>& linear) {
            if constexpr (!IS_QUANTIZED<X>) {
                put_rows(linear, part, 0, num_outputs, [&](int n) { return (const Weight*)rows[n]; });
                linear.step = step;
                if (lent_.empty() || lent_.back() != &linear) lent_.push_back(&linear);
                num_unpacked = lent_.size();
            }
        });
    }

    // Packs what is lent, in the order in which it came, and gives its pages back. Products go on meanwhile.
    void pack_lent() {
        if constexpr (!QUANTIZED)
            packer_ = std::thread([this] {
                setpriority(PRIO_PROCESS, gettid(), PATIENCE);
                for (Linear<T>* linear : lent_) {
                    linear->pack_rows([this] { return stopping_.load(std::memory_order_relaxed); });
                    if (stopping_) return;
                    give_back(*linear);
                    num_unpacked--;
                }
            });
    }

    ~Model() {
        stopping_ = true;
        if (packer_.joinable()) packer_.join();
    }

    // A token's row of the embedding.
    void embed(int64_t id, float* out) const {
        if constexpr (QUANTIZED) {
            (shape.tied ? head : lookup).read(id / LANES, id % LANES, out);
        } else if (table == nullptr) {
            for (int k = 0; k < shape.hidden_size; k++) out[k] = to_float(head.at(id / LANES, id % LANES, k));
        } else {
            for (int k = 0; k < shape.hidden_size; k++) out[k] = to_float(table[id * shape.hidden_size + k]);
        }
    }

    // A norm's weights, or a product's bias from output `first` on.
    void set_vector(int part, int layer, const float* data, int count, int first) {
        if (float* vector = vector_of(part, layer)) {
            memcpy(vector, data, count * sizeof(float));
            return;
        }
        with_product(part, layer, [&](auto& linear) {
            if (linear.bias == nullptr) linear.bias = vectors_.take<float>(linear.num_panels * LANES);
            for (int n = 0; n < count; n++)
                linear.bias[panel_of(part, first + n) * LANES + (first + n) % LANES] = data[n];
        });
    }

    const Shape shape;
    std::vector<Layer<T, E>> layers;
    Linear<T> head;
    Linear<T> lookup;         // the embedding where it is quantized and not the head
    Weight* table = nullptr;  // the embedding [vocab_size, hidden_size] where it is neither
    Weight* places = nullptr;  // [num_positions, hidden_size], or none
    Norm last_norm;
    std::atomic<int> num_unpacked{0};  // products whose weights are lent still

  private:
    template <class Row>
    void put_rows(Linear<T>& linear, int part, int first, int count, Row row) {
        linear.rows.resize((long)linear.num_panels * LANES);
        linear.zeros = zeros_;
        for (int n = 0; n < count; n++)
            linear.rows[(long)panel_of(part, first + n) * LANES + (first + n) % LANES] = row(n);
    }

    // Whole pages of mapped rows are dropped; who still reads them gets them from the file again.
    static void give_back(const Linear<T>& linear) {
        const std::vector<const Weight*>& rows = linear.rows;
        const long row_size = linear.num_inputs * sizeof(Weight);
        if (linear.step != 1) {  // columns: all of their matrix
            uintptr_t start = UINTPTR_MAX, end = 0;
            for (const Weight* row : rows) {
                if (row == nullptr) continue;
                start = std::min(start, (uintptr_t)row);
                end = std::max(end, (uintptr_t)(row + (linear.num_inputs - 1) * linear.step + 1));
            }
            return give_back(start, end);
        }
        for (size_t i = 0; i < rows.size();) {
            const uintptr_t start = (uintptr_t)rows[i];
            uintptr_t end = start;
            for (; i < rows.size() && (uintptr_t)rows[i] == end; i++) end += row_size;
            if (end == start) i++;
            if (start != 0) give_back(start, end);
        }
    }

    static void give_back(uintptr_t start, uintptr_t end) {
        const uintptr_t page = sysconf(_SC_PAGESIZE);
        const uintptr_t from = (start + page - 1) / page * page, to = end / page * page;
        if (from < to) madvise((void*)from, to - from, MADV_DONTNEED);
    }

    void make(Norm& norm) {
        norm.weight = vectors_.take<float>(shape.hidden_size);
        if (shape.layer_norm) norm.bias = vectors_.take<float>(shape.hidden_size);  // zero where there is none
    }

    template <class X>
    void make(Linear<X>& linear, int num_outputs, int num_inputs, int num_panels = 0) {
        linear.shape(num_outputs, num_inputs, num_panels ? num_panels : panels(num_outputs));
        if constexpr (!IS_QUANTIZED<X>) linear.memory = arena_.take<Weight>(linear.num_weights());
    }

    void make_table() {
        if constexpr (QUANTIZED)
            make(lookup, shape.vocab_size, shape.hidden_size);
        else
            table = arena_.take<Weight>((long)shape.vocab_size * shape.hidden_size);
    }

    void make(ExpertWeights<T, E>& experts) {
        const int hidden = shape.hidden_size;
        make(experts.router, shape.all_experts(), hidden);
        if (IS_QUANTIZED<E>) experts.router_table = arena_.take<float>((long)shape.all_experts() * hidden);
        experts.gate_up.resize(shape.all_experts()), experts.down.resize(shape.all_experts());
        for (int e = 0; e < shape.all_experts(); e++) {
            const int inner = shape.expert_size(e);
            make(experts.gate_up[e], inner, hidden, 2 * panels(inner));
            make(experts.down[e], hidden, inner);
        }
    }

    // Calls act with the product that a part belongs to.
    template <class Act>
    void with_product(int part, int layer, Act act) {
        const int count = shape.all_experts();
        switch (part) {
            case EXPERT_GATE:
            case EXPERT_UP: return act(layers[layer / count].experts.gate_up[layer % count]);
            case EXPERT_DOWN: return act(layers[layer / count].experts.down[layer % count]);
            default: act(product(part, layer));
        }
    }

    Linear<T>& product(int part, int layer) {
        switch (part) {
            case ROUTER: return layers[layer].experts.router;
            case QKV: return layers[layer].qkv;
            case OUT: return layers[layer].out;
            case DOWN: return layers[layer].down;
            case HEAD: return head;
            case EMBEDDING: return lookup;
            default: return layers[layer].gate_up;
        }
    }

    float* vector_of(int part, int layer) {
        switch (part) {
            case LAST_NORM: return last_norm.weight;
            case LAST_NORM_BIAS: return last_norm.bias;
            case FIRST_NORM: return layers[layer].first_norm.weight;
            case FIRST_NORM_BIAS: return layers[layer].first_norm.bias;
            case SECOND_NORM: return layers[layer].second_norm.weight;
            case SECOND_NORM_BIAS: return layers[layer].second_norm.bias;
            case FIRST_AFTER: return layers[layer].first_after.weight;
            case SECOND_AFTER: return layers[layer].second_after.weight;
            case Q_NORM: return layers[layer].q_norm;
            case K_NORM: return layers[layer].k_norm;
            case SINKS: return layers[layer].sinks;
            default: return nullptr;
        }
    }

    int panel_of(int part, int output) const {
        const int panel = output / LANES;
        if (!shape.gated) return panel;
        if (part == GATE || part == EXPERT_GATE) return 2 * panel;
        return part == UP || part == EXPERT_UP ? 2 * panel + 1 : panel;
    }

    Arena arena_{64 << 20, true};
    Arena vectors_{1 << 20, false};
    const Weight* zeros_ = nullptr;
    std::vector<Linear<T>*> lent_;
    std::thread packer_;
    std::atomic<bool> stopping_{false};
};

}  // namespace gapless
