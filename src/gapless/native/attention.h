// Paged attention over float32 keys and values, for one token or a tile of them, and all query heads of one KV head.
//
// A row's positions are taken in spans of 64, always the same ones, with a running softmax. So a token's result does not
// depend on the tile it is in, nor on being a decode or part of a chunk: a span in which it sees nothing leaves no trace.
// What lies past a row's end is never used.
//
// Keys of 16 places lie transposed, [head_dim][16], where blocks are made of whole sixteens: a query then meets 16 keys
// at once. Otherwise keys lie like values, [place][head_dim], and each span is transposed as it is read.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "vec.h"

namespace gapless {

constexpr int SPAN = 64;                // positions
constexpr int GROUPS = SPAN / LANES;    // of keys in a span
constexpr int TILE_ROWS = 6;            // queries that share what is loaded
constexpr int TOKENS_TIMES_HEADS = 48;  // queries of a tile, about

// A block holds some tokens of one group of layers; their keys and values lie together, so that memory is touched block
// by block as rows grow.
struct Cache {
    float* memory;          // [num_blocks][num_places][2 * num_kv_heads][block_size][head_dim]: k heads, then v heads
    const int32_t* groups;  // of each layer, and its place in the blocks of its group
    const int32_t* places;
    int32_t num_places, block_size, num_kv_heads, head_dim;

    bool transposed() const { return block_size % LANES == 0; }

    float* keys(int64_t block, int layer, int head) const {
        return memory + ((block * num_places + places[layer]) * 2 * num_kv_heads + head) * block_size * head_dim;
    }

    float* values(int64_t block, int layer, int head) const { return keys(block, layer, head + num_kv_heads); }

    void write(int64_t block, int place, int layer, int head, const float* k, const float* v) const {
        float* to = keys(block, layer, head);
        if (transposed()) {
            to += place / LANES * LANES * head_dim + place % LANES;
            for (int d = 0; d < head_dim; d++) to[d * LANES] = k[d];
        } else {
            memcpy(to + place * head_dim, k, head_dim * sizeof(float));
        }
        memcpy(values(block, layer, head) + place * head_dim, v, head_dim * sizeof(float));
    }
};

// Some tokens of one row, one after the other.
struct QueryTile {
    int first_token, num_tokens, start;  // start: position of the first
    int64_t row;
};

// How a layer attends, beyond the plain softmax of all earlier positions.
struct Manner {
    int32_t window = 0;            // positions that a token sees, itself included; 0: all of them
    float soft_cap = 0.0f;         // scores become cap * tanh(score / cap); 0: they stay
    const float* sinks = nullptr;  // of each query head: a score that takes a share and has no value
};

// scores [MR][64] of MR queries with NR groups of keys
template <int MR, int NR>
void score(const float* q, int head_dim, const float* const* keys, float* scores) {
    vec sum[MR][NR] = {};
    for (int d = 0; d < head_dim; d++) {
        vec k[NR];
#pragma GCC unroll 8
        for (int n = 0; n < NR; n++) k[n] = load(keys[n] + d * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
            const vec x = fill(q[m * head_dim + d]);
#pragma GCC unroll 8
            for (int n = 0; n < NR; n++) sum[m][n] = fma(x, k[n], sum[m][n]);
        }
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) store(scores + m * SPAN + n * LANES, sum[m][n]);
}

// out [MR][stride] += shares [MR][64] times values `begin` to `end`, for 16 * NR columns
template <int MR, int NR>
void mix(const float* shares, int begin, int end, const float* const* values, int column, float* out, int stride) {
    vec sum[MR][NR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
        for (int n = 0; n < NR; n++) sum[m][n] = load(out + m * stride + column + n * LANES);
    for (int k = begin; k < end; k++) {
        vec v[NR];
#pragma GCC unroll 8
        for (int n = 0; n < NR; n++) v[n] = load(values[k] + column + n * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) {
            const vec x = fill(shares[m * SPAN + k]);
#pragma GCC unroll 8
            for (int n = 0; n < NR; n++) sum[m][n] = fma(x, v[n], sum[m][n]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
        for (int n = 0; n < NR; n++) store(out + m * stride + column + n * LANES, sum[m][n]);
}

typedef void (*Score)(const float*, int, const float* const*, float*);
typedef void (*Mix)(const float*, int, int, const float* const*, int, float*, int);

template <int... I>
Score score_for(int rows, int groups, std::integer_sequence<int, I...>) {
    static constexpr Score all[] = {score<I / GROUPS + 1, I % GROUPS + 1>...};
    return all[(rows - 1) * GROUPS + groups - 1];
}

template <int... I>
Mix mix_for(int rows, int groups, std::integer_sequence<int, I...>) {
    static constexpr Mix all[] = {mix<I / GROUPS + 1, I % GROUPS + 1>...};
    return all[(rows - 1) * GROUPS + groups - 1];
}

typedef std::make_integer_sequence<int, TILE_ROWS * GROUPS> Shapes;

// One thread's attention: its scratch memory, and the walk over a row's spans.
class Attention {
  public:
    Attention(const Cache& cache, int heads_a_kv_head)
        : cache_(cache),
          heads_(heads_a_kv_head),
          width_((cache.head_dim + LANES - 1) / LANES * LANES),
          queries_((size_t)most_rows() * cache.head_dim),
          out_((size_t)most_rows() * width_),
          highest_(most_rows()),
          total_(most_rows()),
          keys_((size_t)SPAN * cache.head_dim),
          values_((size_t)SPAN * width_) {}

    int tokens_a_tile() const { return std::max(1, TOKENS_TIMES_HEADS / heads_); }

    // `q` are the first token's queries of this KV head, rotated and scaled; `out` its place for the results. What the
    // row's table has before the window may belong to others by now: it is found, and no result depends on it.
    template <class Output>
    void attend(
        int layer, int kv_head, const QueryTile& tile, const int64_t* blocks, const Manner& manner, const float* q,
        long q_stride, Output* out, long out_stride
    ) {
        const int num_rows = tile.num_tokens * heads_, head_dim = cache_.head_dim;
        for (int t = 0; t < tile.num_tokens; t++)
            memcpy(&queries_[(size_t)t * heads_ * head_dim], q + t * q_stride, heads_ * head_dim * sizeof(float));
        std::fill_n(out_.begin(), (size_t)num_rows * width_, 0.0f);
        for (int row = 0; row < num_rows; row++) {
            highest_[row] = manner.sinks == nullptr ? -INF : manner.sinks[kv_head * heads_ + row % heads_];
            total_[row] = manner.sinks == nullptr ? 0.0f : 1.0f;
        }
        const int length = tile.start + tile.num_tokens;
        const int first = manner.window == 0 ? 0 : std::max(0, tile.start + 1 - manner.window);
        for (int start = first / SPAN * SPAN; start < length; start += SPAN) {
            const int count = std::min(SPAN, length - start);
            find(layer, kv_head, blocks, start, count);
            const int begin = std::max(0, first - start);
            for (int row = 0; row < num_rows; row += TILE_ROWS)
                advance(row, std::min(TILE_ROWS, num_rows - row), tile.start - start, begin, count, manner);
        }
        for (int row = 0; row < num_rows; row++) {
            Output* to = out + row / heads_ * out_stride + row % heads_ * head_dim;
            const float share = 1.0f / total_[row];
            for (int d = 0; d < head_dim; d += LANES)
                put(to + d, load(&out_[(size_t)row * width_ + d]) * share, head_dim - d);
        }
    }

  private:
    int most_rows() const { return tokens_a_tile() * heads_ + TILE_ROWS; }

    // Where the span's keys and values lie.
    void find(int layer, int kv_head, const int64_t* blocks, int start, int count) {
        const int size = cache_.block_size, head_dim = cache_.head_dim;
        for (int i = 0; i < count;) {
            const int position = start + i, place = position % size;
            const int64_t block = blocks[position / size];
            const float* keys = cache_.keys(block, layer, kv_head) + place * head_dim;
            const float* values = cache_.values(block, layer, kv_head) + place * head_dim;
            const int run = std::min(size - place, count - i);
            if (cache_.transposed())
                for (int j = 0; j < run; j += LANES) key_groups_[(i + j) / LANES] = keys + j * head_dim;
            else
                for (int j = 0; j < run; j++) transpose(i + j, keys + j * head_dim);
            for (int j = 0; j < run; j++) value_rows_[i + j] = values + j * head_dim;
            for (int j = 0; j < run * head_dim; j += LANES) __builtin_prefetch(values + j);  // while keys are met
            i += run;
        }
        if (width_ != head_dim) pad_values(count);
    }

    void transpose(int place, const float* key) {
        const int head_dim = cache_.head_dim;
        float* group = &keys_[(size_t)place / LANES * LANES * head_dim];
        key_groups_[place / LANES] = group;
        for (int d = 0; d < head_dim; d++) group[d * LANES + place % LANES] = key[d];
    }

    void pad_values(int count) {
        for (int i = 0; i < count; i++) {
            float* to = &values_[(size_t)i * width_];
            memcpy(to, value_rows_[i], cache_.head_dim * sizeof(float));
            value_rows_[i] = to;
        }
    }

    // Takes `rows` queries through the span. `ahead`: the tile's first position, counted from the span's, as is
    // `unseen`, before which none of its tokens sees anything.
    void advance(int first, int rows, int ahead, int unseen, int count, const Manner& manner) {
        const int groups = (count + LANES - 1) / LANES;
        alignas(64) float shares[TILE_ROWS * SPAN];
        score_for(rows, groups, Shapes())(&queries_[(size_t)first * cache_.head_dim], cache_.head_dim, key_groups_, shares);
        for (int m = 0; m < rows; m++) {
            const int row = first + m, end = ahead + row / heads_ + 1;
            const int begin = manner.window == 0 ? 0 : std::max(0, end - manner.window);
            soften(row, shares + m * SPAN, groups, begin, std::min(count, end), manner.soft_cap);
        }
        for (int column = 0; column < width_; column += SPAN) {
            const int wide = std::min(GROUPS, (width_ - column) / LANES);
            mix_for(rows, wide, Shapes())(shares, unseen, count, value_rows_, column, &out_[(size_t)first * width_], width_);
        }
    }

    // Scores to shares: those outside `begin` to `end` are 0, whatever was there.
    void soften(int row, float* shares, int groups, int begin, int end, float cap) {
        vec x[GROUPS];
        vec most = fill(-INF);
        if (begin >= end) {
            for (int n = 0; n < groups; n++) store(shares + n * LANES, vec{});
            return;
        }
        for (int n = 0; n < groups; n++) {
            const vec scores = load(shares + n * LANES), capped = cap == 0.0f ? scores : soft_cap(scores, cap);
            x[n] = first_lanes(capped, end - n * LANES, -INF);
            if (begin > 0) x[n] = lanes_from(x[n], begin - n * LANES, -INF);
            most = max(x[n], most);
        }
        const float highest = std::max(highest_[row], largest(most));
        const float kept = exp(fill(highest_[row] - highest))[0];
        vec total[GROUPS] = {};
        for (int n = 0; n < groups; n++) {
            total[n] = exp(x[n] - highest);
            store(shares + n * LANES, total[n]);
        }
        total_[row] = total_[row] * kept + sum((total[0] + total[1]) + (total[2] + total[3]));
        highest_[row] = highest;
        if (kept != 1.0f)
            for (int d = 0; d < width_; d += LANES) {
                float* p = &out_[(size_t)row * width_ + d];
                store(p, load(p) * kept);
            }
    }

    const Cache cache_;
    const int heads_;  // query heads that share a KV head
    const int width_;  // head_dim in whole vectors
    std::vector<float> queries_, out_, highest_, total_, keys_, values_;
    const float* key_groups_[GROUPS];
    const float* value_rows_[SPAN];
};

}  // namespace gapless
