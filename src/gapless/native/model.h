// The weights of one model, packed for `product`. Filled once, part by part; read-only from then on, by any number of
// engines. Owns its memory.
#pragma once

#include <sys/mman.h>

#include <new>
#include <vector>

#include "product.h"

namespace gapless {

// As the host passes it; `native/library.py` has the same fields.
struct Shape {
    int32_t vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, inner_size;
    int32_t tied;     // the embedding is the head
    int32_t qk_norm;  // heads are normalized before they are rotated
    float eps;

    int q_size() const { return num_heads * head_dim; }
    int qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

// Which weight. The host has the same list.
enum Part { EMBEDDING, HEAD, LAST_NORM, FIRST_NORM, SECOND_NORM, QKV, OUT, GATE, UP, DOWN, Q_NORM, K_NORM };

// Memory in large pieces on large pages, one weight after the other in the order of use.
class Arena {
  public:
    Arena() = default;
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
        const size_t size = std::max(least, (size_t)64 << 20);
        void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (start == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        madvise(start, size, MADV_HUGEPAGE);
#endif
        pieces_.push_back({(char*)start, size, 0});
    }

    std::vector<Piece> pieces_;
};

template <class T>
struct Layer {
    float *first_norm, *second_norm, *q_norm, *k_norm;
    Linear<T> qkv, out, gate_up, down;  // gate_up: a panel of the gate, its panel of up, and so on
};

inline int panels(int num_outputs) { return (num_outputs + LANES - 1) / LANES; }

template <class T>
class Model {
  public:
    typedef typename T::Weight Weight;

    explicit Model(const Shape& shape) : shape(shape), layers(shape.num_layers) {
        const int hidden = shape.hidden_size, inner = shape.inner_size;
        if (!shape.tied) table = arena_.take<Weight>((long)shape.vocab_size * hidden);
        for (Layer<T>& layer : layers) {
            layer.first_norm = arena_.take<float>(hidden);
            make(layer.qkv, shape.qkv_size(), hidden);
            layer.q_norm = arena_.take<float>(shape.head_dim);
            layer.k_norm = arena_.take<float>(shape.head_dim);
            make(layer.out, hidden, shape.q_size());
            layer.second_norm = arena_.take<float>(hidden);
            make(layer.gate_up, inner, hidden, 2 * panels(inner));
            make(layer.down, hidden, inner);
        }
        last_norm = arena_.take<float>(hidden);
        make(head, shape.vocab_size, hidden);
    }

    // Rows `first` and following of a weight matrix [num_outputs, num_inputs].
    void set_matrix(int part, int layer, const Weight* data, int num_outputs, int first) {
        if (part == EMBEDDING) {
            memcpy(table, data, (long)num_outputs * shape.hidden_size * sizeof(Weight));
            return;
        }
        const Linear<T>& linear = product(part, layer);
        for (int n = 0; n < num_outputs; n++) {
            const int panel = panel_of(part, first + n), lane = (first + n) % LANES;
            const Weight* row = data + (long)n * linear.num_inputs;
            for (int k = 0; k < linear.num_inputs; k++) *linear.at(panel, lane, k) = row[k];
        }
    }

    // A norm's weights, or a product's bias from output `first` on.
    void set_vector(int part, int layer, const float* data, int count, int first) {
        if (float* norm = norm_of(part, layer)) {
            memcpy(norm, data, count * sizeof(float));
            return;
        }
        Linear<T>& linear = product(part, layer);
        if (linear.bias == nullptr) linear.bias = arena_.take<float>(linear.num_panels * LANES);
        for (int n = 0; n < count; n++)
            linear.bias[panel_of(part, first + n) * LANES + (first + n) % LANES] = data[n];
    }

    const Shape shape;
    std::vector<Layer<T>> layers;
    Linear<T> head;
    Weight* table = nullptr;  // [vocab_size, hidden_size], or none where the head is read instead
    float* last_norm = nullptr;

  private:
    void make(Linear<T>& linear, int num_outputs, int num_inputs, int num_panels = 0) {
        linear.shape(num_outputs, num_inputs, num_panels ? num_panels : panels(num_outputs));
        linear.weights = arena_.take<Weight>(linear.num_weights());
    }

    Linear<T>& product(int part, int layer) {
        switch (part) {
            case QKV: return layers[layer].qkv;
            case OUT: return layers[layer].out;
            case DOWN: return layers[layer].down;
            case HEAD: return head;
            default: return layers[layer].gate_up;
        }
    }

    float* norm_of(int part, int layer) {
        switch (part) {
            case LAST_NORM: return last_norm;
            case FIRST_NORM: return layers[layer].first_norm;
            case SECOND_NORM: return layers[layer].second_norm;
            case Q_NORM: return layers[layer].q_norm;
            case K_NORM: return layers[layer].k_norm;
            default: return nullptr;
        }
    }

    static int panel_of(int part, int output) {
        const int panel = output / LANES;
        return part == GATE ? 2 * panel : part == UP ? 2 * panel + 1 : panel;
    }

    Arena arena_;
};

}  // namespace gapless
