// Products with fixed weights: y = x W^T for any number of rows of x, from one to thousands.
//
// Weights lie in panels of 16 outputs, each panel one stream of memory in the order in which it is used. A tile of a few
// rows and panels keeps its sums in registers over the whole of K. Each sum is one chain over K in ascending order: it
// depends neither on the number of rows nor on who computes it. Knows weights and tiles; what becomes of a tile is the
// caller's affair.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "vec.h"

namespace gapless {

inline long padded(int size) { return (size + 31L) / 32 * 32; }

// How one number format is multiplied. Step: how many elements of K one instruction takes in. num_inputs: how many Inputs
// hold a row of so many numbers.
struct Float32 {
    typedef float Input;
    typedef float Weight;
    static constexpr int STEP = 1;
    static long num_inputs(int size) { return padded(size); }
    static vec input(const float* p) { return fill(*p); }
    static vec weight(const float* p) { return load(p); }
    static vec add(vec sum, vec x, vec w) { return fma(x, w, sum); }
};

#if defined(__AVX512BF16__)
struct Bfloat16 {
    typedef uint16_t Input;
    typedef uint16_t Weight;
    static constexpr int STEP = 2;
    static long num_inputs(int size) { return padded(size); }
    static vec input(const uint16_t* p) {
        int32_t pair;
        memcpy(&pair, p, 4);
        return (vec)_mm512_set1_epi32(pair);
    }
    static vec weight(const uint16_t* p) {
        vec v;
        memcpy(&v, p, sizeof v);
        return v;
    }
    static vec add(vec sum, vec x, vec w) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w); }
};
#else
struct Bfloat16 {  // the weights stay small in memory and are widened as they are read
    typedef float Input;
    typedef uint16_t Weight;
    static constexpr int STEP = 1;
    static long num_inputs(int size) { return padded(size); }
    static vec input(const float* p) { return fill(*p); }
    static vec weight(const uint16_t* p) {
        halves h;
        memcpy(&h, p, sizeof h);
        return from_bf16(h);
    }
    static vec add(vec sum, vec x, vec w) { return fma(x, w, sum); }
};
#endif

// A square of 16 by 16: number i of row j becomes number j of row i. Rows of `from` lie anywhere.
inline void transpose(const uint32_t* const* from, long k, uint32_t* to) {
#if defined(__AVX512F__)
    __m512i a[LANES], b[LANES];
    for (int i = 0; i < LANES; i++) a[i] = _mm512_loadu_si512(from[i] + k);
    for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {  // a[4 j + i]: number i of every quarter, of rows 4 j to 4 j + 3
        b[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), b[4 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        b[8 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        b[12 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(to + i * LANES, _mm512_shuffle_i32x4(b[i], b[8 + i], 0x88));
        _mm512_storeu_si512(to + (4 + i) * LANES, _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0x88));
        _mm512_storeu_si512(to + (8 + i) * LANES, _mm512_shuffle_i32x4(b[i], b[8 + i], 0xdd));
        _mm512_storeu_si512(to + (12 + i) * LANES, _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0xdd));
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) memcpy(to + j * LANES + i, from[i] + k + j, sizeof(uint32_t));
#endif
}

// Weights of `num_outputs` by `num_inputs`, packed: [panels][depth / STEP][16][STEP]. Panels past the outputs are zero.
// Until they are packed, rows of the host's memory are lent, and a product packs the panels that it is about to use: the
// same numbers in the same places, so that it makes no difference to the result.
template <class T>
struct Linear {
    typedef typename T::Weight Weight;

    int num_outputs = 0, num_inputs = 0, num_panels = 0;
    int depth = 0;  // num_inputs in whole steps
    Weight* weights = nullptr;  // null: not packed yet. Written while others read: by `publish` alone
    Weight* memory = nullptr;   // where they are packed
    std::vector<const Weight*> rows;  // lent: [num_panels * 16], null where there is no output; or none
    long step = 1;                    // from a number of a row to the next
    const Weight* zeros = nullptr;    // for those: [num_inputs]
    float* bias = nullptr;  // [num_panels * 16], or none

    void shape(int outputs, int inputs, int panels) {
        num_outputs = outputs, num_inputs = inputs, num_panels = panels;
        depth = (inputs + T::STEP - 1) / T::STEP * T::STEP;
    }

    long num_weights() const { return (long)num_panels * LANES * depth; }
    long panel_size() const { return (long)LANES * depth; }

    const Weight* packed() const { return std::atomic_ref(const_cast<Weight*&>(weights)).load(std::memory_order_acquire); }
    void publish() { std::atomic_ref(weights).store(memory, std::memory_order_release); }

    // A number, packed or lent.
    Weight at(int panel, int lane, int k) const {
        const Weight* from = packed();
        if (from == nullptr) return rows[(long)panel * LANES + lane][k * step];
        return from[((long)panel * depth + k / T::STEP * T::STEP) * LANES + lane * T::STEP + k % T::STEP];
    }

    // `count` panels from `panel` on, packed where they are or to `scratch`.
    const Weight* panels_at(int panel, int count, std::vector<Weight>& scratch) const {
        if (const Weight* all = packed()) return all + panel * panel_size();
        scratch.resize(std::max<size_t>(scratch.size(), count * panel_size()));
        for (int n = 0; n < count; n++) pack(panel + n, scratch.data() + n * panel_size());
        return scratch.data();
    }

    // Panels of lent rows, all of them unless told to stop; others keep what they have.
    template <class Stop>
    void pack_rows(Stop stop) {
        for (int panel = 0; panel < num_panels; panel++) {
            if (stop()) return;
            const auto first = rows.begin() + (long)panel * LANES;
            if (std::any_of(first, first + LANES, [](const Weight* row) { return row != nullptr; }))
                pack(panel, memory + panel * panel_size());
        }
        publish();
    }

    // One panel of lent rows.
    void pack(int panel, Weight* to) const {
        if (step != 1) return pack_columns(rows.data() + (long)panel * LANES, to);
        const Weight* from[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            const Weight* row = rows[(long)panel * LANES + lane];
            from[lane] = row == nullptr ? zeros : row;
        }
        int k = 0;
        if constexpr (T::STEP * sizeof(Weight) == sizeof(uint32_t))
            for (; k + LANES * T::STEP <= num_inputs; k += LANES * T::STEP)
                transpose((const uint32_t* const*)&from[0], k / T::STEP, (uint32_t*)(to + (long)k * LANES));
        for (; k < depth; k++)
            for (int lane = 0; lane < LANES; lane++)
                to[((long)k / T::STEP * LANES + lane) * T::STEP + k % T::STEP] = k < num_inputs ? from[lane][k] : Weight{};
    }

  private:
    // The same of rows that are columns of what the host has. Mostly they lie side by side there.
    void pack_columns(const Weight* const* from, Weight* to) const {
        bool are_neighbours = true;
        for (int lane = 0; lane < LANES; lane++) are_neighbours &= from[lane] != nullptr && from[lane] == from[0] + lane;
        for (int k = 0; k < depth; k += T::STEP, to += LANES * T::STEP)
            for (int i = 0; i < T::STEP; i++) {
                const long place = (k + i) * step;
                if (k + i >= num_inputs)
                    for (int lane = 0; lane < LANES; lane++) to[lane * T::STEP + i] = Weight{};
                else if (are_neighbours)
                    for (int lane = 0; lane < LANES; lane++) to[lane * T::STEP + i] = from[0][place + lane];
                else
                    for (int lane = 0; lane < LANES; lane++)
                        to[lane * T::STEP + i] = from[lane] == nullptr ? Weight{} : from[lane][place];
            }
    }
};

// Sums [NR][MR][16] of MR rows of x and NR panels.
template <class T, int MR, int NR>
void tile(const typename T::Input* x, long x_stride, const typename T::Weight* w, int depth, float* sums) {
    constexpr int AHEAD = 4096;  // bytes; measured at 16 rows: 11.6 ms for 270 MB, against 20 without and 12.5 at 1024
    const long panel = (long)depth * LANES;
    vec sum[NR][MR];
#pragma GCC unroll 32
    for (int n = 0; n < NR; n++)
#pragma GCC unroll 32
        for (int m = 0; m < MR; m++) sum[n][m] = vec{};
    for (int k = 0; k < depth; k += T::STEP) {
        vec weights[NR];
#pragma GCC unroll 32
        for (int n = 0; n < NR; n++) {
            const typename T::Weight* p = w + n * panel + (long)k * LANES;
            __builtin_prefetch((const char*)p + AHEAD);
            weights[n] = T::weight(p);
        }
#pragma GCC unroll 32
        for (int m = 0; m < MR; m++) {
            const vec input = T::input(x + m * x_stride + k);
#pragma GCC unroll 32
            for (int n = 0; n < NR; n++) sum[n][m] = T::add(sum[n][m], input, weights[n]);
        }
    }
#pragma GCC unroll 32
    for (int n = 0; n < NR; n++)
#pragma GCC unroll 32
        for (int m = 0; m < MR; m++) store(sums + (n * MR + m) * LANES, sum[n][m]);
}

template <class T>
struct Kernel {
    typedef void (*Function)(const typename T::Input*, long, const typename T::Weight*, int, float*);
    int num_rows, num_panels;
    Function many, one;  // for num_panels at once, and for what is left over
};

#define GAPLESS_KERNEL(MR, NR) {MR, NR, tile<T, MR, NR>, tile<T, MR, 1>}

// Ascending in rows. Up to the last entry's rows a weight is read once; beyond, tiles of BLOCK_KERNEL rows repeat.
#if defined(__AVX512F__)
template <class T>
constexpr Kernel<T> KERNELS[] = {
    GAPLESS_KERNEL(1, 8),  GAPLESS_KERNEL(2, 8),  GAPLESS_KERNEL(4, 4),  GAPLESS_KERNEL(6, 3),  GAPLESS_KERNEL(8, 3),
    GAPLESS_KERNEL(12, 1), GAPLESS_KERNEL(16, 1), GAPLESS_KERNEL(20, 1), GAPLESS_KERNEL(24, 1), GAPLESS_KERNEL(28, 1),
};
constexpr int BLOCK_ROWS = 8, MOST_ROWS = 28;
#else
template <class T>
constexpr Kernel<T> KERNELS[] = {
    GAPLESS_KERNEL(1, 2), GAPLESS_KERNEL(2, 2), GAPLESS_KERNEL(4, 1), GAPLESS_KERNEL(6, 1),
};
constexpr int BLOCK_ROWS = 6, MOST_ROWS = 6;
#endif
constexpr int MOST_TILE_ROWS = 28, MOST_PANELS = 8;  // of any tile, and of a group of panels

template <class T>
const Kernel<T>& kernel_for(int num_rows) {
    const Kernel<T>* kernel = KERNELS<T>;
    while (kernel->num_rows < num_rows) kernel++;
    return *kernel;
}

// Tiles for a number of rows: how many rows and panels they have, how many rows they have when there are many, and up to
// how many rows a weight is read once.
struct TileShape {
    int num_rows, num_panels;
};

template <class T>
struct TileShapes {
    static constexpr int BLOCK = BLOCK_ROWS, MOST = MOST_ROWS;
    static TileShape of(int num_rows) {
        const Kernel<T>& kernel = kernel_for<T>(num_rows);
        return {kernel.num_rows, kernel.num_panels};
    }
};

// The tiles of `count` panels, whose weights begin here, for a few rows; returns for how many rows a tile has room.
template <class T>
int run_tiles(
    const Linear<T>& linear, const typename T::Weight* weights, int rows, const typename T::Input* x, long x_stride,
    int, int count, float* sums
) {
    const Kernel<T>& kernel = kernel_for<T>(rows);
    for (int n = 0; n < count;) {
        const bool fits = n + kernel.num_panels <= count;
        (fits ? kernel.many : kernel.one)(
            x, x_stride, weights + n * linear.panel_size(), linear.depth,
            sums + n * kernel.num_rows * LANES
        );
        n += fits ? kernel.num_panels : 1;
    }
    return kernel.num_rows;
}

// How a product of so many rows is cut into units that threads can take: blocks of rows times runs of panels.
template <class T>
struct Cut {
    Cut(const Linear<T>& linear, int num_rows, int together, int num_threads) : num_rows(num_rows) {
        constexpr int BLOCK = TileShapes<T>::BLOCK;
        const bool once = num_rows <= TileShapes<T>::MOST;
        const TileShape tile = TileShapes<T>::of(once ? num_rows : BLOCK);
        tile_rows = tile.num_rows;
        group = tile.num_panels % together ? tile.num_panels * together : tile.num_panels;
        const int num_groups = (linear.num_panels + group - 1) / group;
        block = num_rows;
        if (!once) {  // few enough rows for their inputs to stay in a core's cache, and for every thread to have work
            const int row_bytes = linear.depth * (int)sizeof(typename T::Input);
            block = std::max(BLOCK, 400'000 / row_bytes / BLOCK * BLOCK);
            while (block > BLOCK && (long)num_groups * ((num_rows + block - 1) / block) < 4L * num_threads)
                block = (block / 2 + BLOCK - 1) / BLOCK * BLOCK;
        }
        if (num_rows == 0) return;
        run = once ? std::max(1, num_groups / (UNITS_A_THREAD * num_threads)) * group : group;
        num_runs = (linear.num_panels + run - 1) / run;
        num_units = num_runs * ((num_rows + block - 1) / block);
    }

    static constexpr int UNITS_A_THREAD = 6;

    int num_rows, tile_rows, group, block;
    int run = 0, num_runs = 0, num_units = 0;
};

// One unit of a product. Tiles go to `done(row, num_rows, panel, num_panels, sums, tile_rows)`, sums
// [num_panels][tile_rows][16], panels in multiples of the cut's `together`. Inputs have room for MOST_TILE_ROWS rows
// past the last.
template <class T, class Done>
void multiply(const Linear<T>& linear, const Cut<T>& cut, int unit, const typename T::Input* x, long x_stride, Done done) {
    alignas(64) float sums[MOST_PANELS * MOST_TILE_ROWS * LANES];
    static thread_local std::vector<typename T::Weight> scratch;
    const int first_row = unit / cut.num_runs * cut.block, end_row = std::min(cut.num_rows, first_row + cut.block);
    const int first = unit % cut.num_runs * cut.run, end = std::min(linear.num_panels, first + cut.run);
    for (int panel = first; panel < end; panel += cut.group) {
        const int count = std::min(cut.group, end - panel);
        const typename T::Weight* weights = linear.panels_at(panel, count, scratch);
        for (int row = first_row; row < end_row; row += cut.tile_rows) {
            const int rows = std::min(cut.tile_rows, end_row - row);
            const int room = run_tiles(linear, weights, rows, x + row * x_stride, x_stride, panel, count, sums);
            done(row, rows, panel, count, sums, room);
        }
    }
}

}  // namespace gapless
