// Products with quantized weights: inputs are rounded to bytes, in blocks of 32 with a scale; sums of a block are integers.
//
// Integer sums are exact, and the blocks of a sum are added in ascending order, so that here too a result depends neither on
// the number of rows nor on who computes it. Knows formats and tiles; `product.h` has the walk over both.
#pragma once

#include <type_traits>
#include <vector>

#include "formats.h"
#include "product.h"

namespace gapless {

// 32 inputs of one row, with what a sum starts from when the codes of its weights are unsigned.
struct alignas(64) Quants {
    int8_t codes[BLOCK];
    float scale, scaled_sum;
    int32_t times_minus_128, times_minus_8, times_minus_32[2];  // the sum of the codes; the last two of 16 each

    int32_t quad(int q) const {
        int32_t four;
        memcpy(&four, codes + 4 * q, 4);
        return four;
    }

    template <int ZERO>
    ivec start(int part) const {
        if constexpr (ZERO == 128) return ivec{} + times_minus_128;
        if constexpr (ZERO == 8) return ivec{} + times_minus_8;
        if constexpr (ZERO == 32) return ivec{} + times_minus_32[part];
        return ivec{};
    }
};

inline int total(ivec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int x = 0;
    for (int i = 0; i < LANES; i++) x += v[i];
    return x;
#endif
}

inline float largest_of(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    return largest(v);
#endif
}

inline void put_bytes(int8_t* p, ivec v) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
    for (int i = 0; i < LANES; i++) p[i] = v[i];
#endif
}

// A block whose numbers are not all finite gets the scale NaN: then no result made of it passes for a number.
inline void quantize(vec low, vec high, Quants& to) {
    const vec shift = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const ivec odd = ~((abs(low) <= 3.4028235e38f) & (abs(high) <= 3.4028235e38f));
    const float most = largest_of(max(abs(low), abs(high)));
    const float inverse = most < 1e-30f ? 0.0f : 127.0f / most;
    const ivec a = __builtin_convertvector(low * inverse + shift - shift, ivec);
    const ivec b = __builtin_convertvector(high * inverse + shift - shift, ivec);
    put_bytes(to.codes, a);
    put_bytes(to.codes + LANES, b);
    const int first_sum = total(a), last_sum = total(b), sum = first_sum + last_sum;
    to.scale = total(odd) == 0 ? most / 127.0f : NAN;
    to.scaled_sum = to.scale * sum;
    to.times_minus_128 = -128 * sum, to.times_minus_8 = -8 * sum;
    to.times_minus_32[0] = -32 * first_sum, to.times_minus_32[1] = -32 * last_sum;
}

inline void quantize(const float* from, int size, Quants* to) {
    for (int k = 0; k < size; k += BLOCK) quantize(load(from + k), load(from + k + LANES), to[k / BLOCK]);
}

// sum += w x, of four inputs
inline ivec dot(ivec sum, bytes w, int32_t four) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(four));
#else
    for (int i = 0; i < 4; i++) sum += (ivec)((uvec)w >> 8 * i & 255) * (int32_t)(int8_t)(four >> 8 * i);
    return sum;
#endif
}

// Sums [NR][MR][16] of MR rows of x and NR panels. The panels behind them are prefetched.
template <class F, int MR, int NR>
void quantized_tile(const Quants* x, long x_stride, const uint8_t* const* panels, int num_blocks, float* sums) {
    typedef typename F::Codes Codes;
    typedef typename F::Scales Scales;
    constexpr int AHEAD = 4096, QUADS = 8 / Scales::PARTS;
    constexpr long BYTES = Codes::SIZE + Scales::SIZE;
    const long size = F::panel_size(num_blocks);
    constexpr int GROUP = MR * NR <= 12 ? MR : 8;  // rows whose integer sums fit into registers beside all rows' sums
    vec sum[NR][MR];
#pragma GCC unroll 32
    for (int n = 0; n < NR; n++)
#pragma GCC unroll 32
        for (int m = 0; m < MR; m++) sum[n][m] = vec{};
    for (int b = 0; b < num_blocks; b++, x++) {
        const uint8_t *codes[NR], *scales[NR], *supers[NR];
        const long ahead = b * BYTES + AHEAD;
#pragma GCC unroll 8
        for (int n = 0; n < NR; n++) {
            const Place<F> place(panels[n], num_blocks, b);
            codes[n] = place.codes, scales[n] = place.scales, supers[n] = place.supers;
            const uint8_t* next = ahead < size ? panels[n] + ahead : panels[n + NR] + (ahead - size);
#pragma GCC unroll 16
            for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(next + line);
        }
#pragma GCC unroll 2
        for (int part = 0; part < Scales::PARTS; part++) {
            vec scale[NR], minimum[NR];
#pragma GCC unroll 8
            for (int n = 0; n < NR; n++) {
                scale[n] = Scales::scale(scales[n], supers[n], part);
                minimum[n] = Scales::minimum(scales[n], supers[n]);
            }
#pragma GCC unroll 2
            for (int first = 0; first < MR; first += GROUP) {
                ivec whole[NR][GROUP];
#pragma GCC unroll 16
                for (int m = 0; m < GROUP; m++)
#pragma GCC unroll 8
                    for (int n = 0; n < NR; n++) whole[n][m] = x[(first + m) * x_stride].template start<F::ZERO>(part);
#pragma GCC unroll 8
                for (int q = part * QUADS; q < (part + 1) * QUADS; q++) {
                    bytes weights[NR];
#pragma GCC unroll 8
                    for (int n = 0; n < NR; n++) weights[n] = Codes::quad(codes[n], q);
#pragma GCC unroll 16
                    for (int m = 0; m < GROUP; m++)
#pragma GCC unroll 8
                        for (int n = 0; n < NR; n++)
                            whole[n][m] = dot(whole[n][m], weights[n], x[(first + m) * x_stride].quad(q));
                }
#pragma GCC unroll 16
                for (int m = 0; m < GROUP; m++)
#pragma GCC unroll 8
                    for (int n = 0; n < NR; n++) {
                        const Quants& input = x[(first + m) * x_stride];
                        vec& to = sum[n][first + m];
                        to = fma(__builtin_convertvector(whole[n][m], vec), scale[n] * input.scale, to);
                        if (Scales::HAS_MINIMUM) to = fma(minimum[n], fill(input.scaled_sum), to);
                    }
            }
        }
    }
#pragma GCC unroll 32
    for (int n = 0; n < NR; n++)
#pragma GCC unroll 32
        for (int m = 0; m < MR; m++) store(sums + (n * MR + m) * LANES, sum[n][m]);
}

// One output's weights as numbers.
template <class F>
void read_output(const uint8_t* panel, int num_blocks, int lane, float* out) {
    typedef typename F::Scales Scales;
    for (int b = 0; b < num_blocks; b++) {
        const Place<F> place(panel, num_blocks, b);
        const float minimum = Scales::minimum(place.scales, place.supers)[lane];
        for (int k = 0; k < BLOCK; k++) {
            const float scale = Scales::scale(place.scales, place.supers, k * Scales::PARTS / BLOCK)[lane];
            const int code = F::Codes::quad(place.codes, k / 4)[lane * 4 + k % 4];
            out[b * BLOCK + k] = scale * (code - F::ZERO) + minimum;
        }
    }
}

typedef void (*QuantizedTile)(const Quants*, long, const uint8_t* const*, int, float*);

struct QuantizedKernel {
    int num_rows, num_panels;
    QuantizedTile many, one;
};

#define GAPLESS_QUANTIZED(MR, NR) {MR, NR, quantized_tile<F, MR, NR>, quantized_tile<F, MR, 1>}

// Ascending in rows.
template <class F>
constexpr QuantizedKernel QUANTIZED_KERNELS[] = {
    GAPLESS_QUANTIZED(1, 4), GAPLESS_QUANTIZED(2, 4),  GAPLESS_QUANTIZED(4, 2),
    GAPLESS_QUANTIZED(8, 1), GAPLESS_QUANTIZED(12, 1), GAPLESS_QUANTIZED(16, 1),
};

inline const QuantizedKernel* kernels_of(int kind) {
    const QuantizedKernel* found = nullptr;
    with_kind(kind, [&](auto stored) { found = QUANTIZED_KERNELS<typename decltype(stored)::Packed>; });
    return found;
}

struct Quantized {
    typedef Quants Input;
    typedef float Weight;  // of tables that are only looked up
    static long num_inputs(int size) { return size / BLOCK; }
};

template <>
struct TileShapes<Quantized> {
    static constexpr int BLOCK = 16, MOST = 16;
    static TileShape of(int num_rows) {
        const QuantizedKernel* kernel = kernels_of(Q8_0);  // of any kind
        while (kernel->num_rows < num_rows) kernel++;
        return {kernel->num_rows, kernel->num_panels};
    }
};

// Panels of weights, each of one kind.
template <>
struct Linear<Quantized> {
    int num_outputs = 0, num_inputs = 0, num_panels = 0;
    int depth = 0;  // num_inputs in blocks
    std::vector<const uint8_t*> panels;  // and past the last some that are only prefetched
    std::vector<uint8_t> kinds;
    float* bias = nullptr;  // [num_panels * 16], or none

    void shape(int outputs, int inputs, int count) {
        num_outputs = outputs, num_inputs = inputs, num_panels = count, depth = inputs / BLOCK;
        panels.assign(count + MOST_PANELS, nullptr), kinds.assign(count, 0);
    }

    // Panels may lie anywhere; `run_tiles` finds them.
    const float* panels_at(int, int, std::vector<float>&) const { return nullptr; }

    // The numbers of one output.
    void read(int panel, int lane, float* out) const {
        with_kind(kinds[panel], [&](auto stored) {
            read_output<typename decltype(stored)::Packed>(panels[panel], depth, lane, out);
        });
    }

    // Packs rows as the file has them and returns their end. place(output): the panel.
    template <class Take, class Place>
    const uint8_t* pack(int kind, const uint8_t* data, int count, Take take, Place place) {
        with_kind(kind, [&](auto stored) {
            typedef decltype(stored) Kind;
            const long row_size = (long)num_inputs / Kind::INPUTS * Kind::BYTES;
            const long panel_size = Kind::Packed::panel_size(depth);
            uint8_t* memory = take(panel_size * ((count + LANES - 1) / LANES));
            for (int i = 0; i < count; i++, data += row_size) {
                uint8_t* panel = memory + i / LANES * panel_size;
                panels[place(i)] = panel, kinds[place(i)] = kind;
                pack_row<Kind>(data, panel, i % LANES);
            }
            std::fill(panels.begin() + num_panels, panels.end(), memory);
        });
        return data;
    }

  private:
    template <class Kind>
    void pack_row(const uint8_t* data, uint8_t* panel, int lane) const {
        typedef typename Kind::Packed Packed;
        constexpr int BLOCKS = Kind::INPUTS / BLOCK;
        Piece piece;
        for (int b = 0; b < depth; b++) {
            if (b % BLOCKS == 0) Kind::read(data + (long)b / BLOCKS * Kind::BYTES, piece);
            const Place<Packed> place(panel, depth, b);
            auto writable = [&](const uint8_t* p) { return panel + (p - panel); };
            const uint8_t* from = piece.codes + b % BLOCKS * BLOCK;
            for (int k = 0; k < BLOCK; k++) Packed::Codes::put(writable(place.codes), lane, k, from[k]);
            Packed::Scales::put(writable(place.scales), writable(place.supers), lane, piece, b % BLOCKS);
        }
    }
};

// The tiles of `count` panels for a few rows; returns for how many rows a tile has room.
inline int run_tiles(
    const Linear<Quantized>& linear, const float*, int rows, const Quants* x, long x_stride, int panel, int count, float* sums
) {
    for (int n = 0; n < count;) {
        const uint8_t kind = linear.kinds[panel + n];
        const QuantizedKernel* kernel = kernels_of(kind);
        while (kernel->num_rows < rows) kernel++;
        bool fits = n + kernel->num_panels <= count;
        for (int i = 1; fits && i < kernel->num_panels; i++) fits = linear.kinds[panel + n + i] == kind;
        (fits ? kernel->many : kernel->one)(
            x, x_stride, linear.panels.data() + panel + n, linear.depth, sums + n * kernel->num_rows * LANES
        );
        n += fits ? kernel->num_panels : 1;
        rows = kernel->num_rows;
    }
    return rows;
}

}  // namespace gapless
