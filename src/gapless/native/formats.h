// Quantized weights: as GGUF files store them, and as panels of 16 outputs that stream through products.
//
// A panel holds the scales of its outputs, then their codes, both block by block of 32 inputs. Four inputs of all 16 outputs
// are one vector of codes, so that one instruction takes them in. Codes and scales keep the width that they have in the
// file, except that codes of five bits take a byte. Knows no product.
#pragma once

#include "vec.h"

namespace gapless {

constexpr int BLOCK = 32;   // inputs
constexpr int SUPER = 256;  // inputs that share the larger scales of the K kinds

typedef uint8_t bytes __attribute__((vector_size(64)));  // four inputs of 16 outputs

// As GGUF numbers them; `models/gguf_scheme.py` has the same list.
enum Kind { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, MXFP4 = 39 };

inline bytes load_bytes(const uint8_t* p) {
    bytes v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline float from_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    uint32_t bits = sign | ((rest << 13) + 0x38000000);
    if (rest >= 0x7c00) bits = sign | 0x7f800000 | (rest << 13);
    float x;
    memcpy(&x, &bits, 4);
    return rest < 0x0400 ? (sign ? -1.0f : 1.0f) * rest * 0x1p-24f : x;
}

inline vec load_halves(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    uint16_t h[LANES];
    memcpy(h, p, sizeof h);
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = from_half(h[i]);
    return v;
#endif
}

// Sixteen bytes. GCC makes four conversions and some shuffles out of what is one instruction.
inline vec load_unsigned(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

inline vec load_signed(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = (int8_t)p[i];
    return v;
#endif
}

// One output's block of 32 or 256 inputs, taken out of the file's form.
struct Piece {
    uint8_t codes[SUPER];
    uint16_t scale, minimum;
    uint8_t scales[16], minimums[8];  // of the parts of 256 inputs
};

// Codes of a byte, unsigned: `ZERO` is the code of 0.
struct Bytes {
    static constexpr int SIZE = 512;  // of a block of a panel
    static bytes quad(const uint8_t* p, int q) { return load_bytes(p + 64 * q); }
    static void put(uint8_t* p, int lane, int k, int code) { p[k / 4 * 64 + lane * 4 + k % 4] = code; }
};

struct Nibbles {  // the second half of a block in the upper bits
    static constexpr int SIZE = 256;
    static bytes quad(const uint8_t* p, int q) {
        const bytes both = load_bytes(p + 64 * (q % 4));
        return q < 4 ? both & 15 : both >> 4;
    }
    static void put(uint8_t* p, int lane, int k, int code) { p[k % 16 / 4 * 64 + lane * 4 + k % 4] |= code << k / 16 * 4; }
};

struct Floats : Nibbles {  // of four bits: twice their value, which is a whole number, and 128
    static bytes quad(const uint8_t* p, int q) {
        static constexpr uint8_t VALUES[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
        const bytes codes = Nibbles::quad(p, q);
#if defined(__AVX512BW__)
        const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)VALUES));
        return (bytes)_mm512_shuffle_epi8(table, (__m512i)codes);
#else
        bytes values;
        for (int i = 0; i < 64; i++) values[i] = VALUES[codes[i]];
        return values;
#endif
    }
};

struct Sixes {  // nibbles, and behind them two bits of each of four quads a vector
    static constexpr int SIZE = 384;
    static bytes quad(const uint8_t* p, int q) {
        const bytes high = load_bytes(p + Nibbles::SIZE + 64 * (q / 4)) >> q % 4 * 2;
        return Nibbles::quad(p, q) | ((high & 3) << 4);
    }
    static void put(uint8_t* p, int lane, int k, int code) {
        Nibbles::put(p, lane, k, code & 15);
        p[Nibbles::SIZE + k / 16 * 64 + lane * 4 + k % 4] |= code >> 4 << k % 16 / 4 * 2;
    }
};

// Scales of a block, then, for all blocks, those of 256 inputs. `p`: the block's; `s`: those of its 256 inputs.
struct Halves {
    static constexpr int SIZE = 32, SUPER_SIZE = 0, PARTS = 1;
    static constexpr bool HAS_MINIMUM = false;
    static vec scale(const uint8_t* p, const uint8_t*, int) { return load_halves(p); }
    static vec minimum(const uint8_t*, const uint8_t*) { return vec{}; }
    static void put(uint8_t* p, uint8_t*, int lane, const Piece& piece, int) { memcpy(p + 2 * lane, &piece.scale, 2); }
};

struct Powers {  // of two: exponents alone, of half the value, since codes are twice theirs
    static constexpr int SIZE = 16, SUPER_SIZE = 0, PARTS = 1;
    static constexpr bool HAS_MINIMUM = false;
    static vec scale(const uint8_t* p, const uint8_t*, int) {
        const ivec exponent = __builtin_convertvector(load_unsigned(p), ivec);
        const ivec subnormal = (ivec{} + 0x200000) << (exponent & 1);  // of the first two
        return choose(exponent < 2, (vec)subnormal, (vec)((exponent - 1) << 23));
    }
    static vec minimum(const uint8_t*, const uint8_t*) { return vec{}; }
    static void put(uint8_t* p, uint8_t*, int lane, const Piece& piece, int) { p[lane] = piece.scales[0]; }
};

struct HalvesAndMinimums {
    static constexpr int SIZE = 64, SUPER_SIZE = 0, PARTS = 1;
    static constexpr bool HAS_MINIMUM = true;
    static vec scale(const uint8_t* p, const uint8_t*, int) { return load_halves(p); }
    static vec minimum(const uint8_t* p, const uint8_t*) { return load_halves(p + 32); }
    static void put(uint8_t* p, uint8_t*, int lane, const Piece& piece, int) {
        memcpy(p + 2 * lane, &piece.scale, 2);
        memcpy(p + 32 + 2 * lane, &piece.minimum, 2);
    }
};

struct TwoLevels {  // of Q4_K and Q5_K
    static constexpr int SIZE = 32, SUPER_SIZE = 64, PARTS = 1;
    static constexpr bool HAS_MINIMUM = true;
    static vec scale(const uint8_t* p, const uint8_t* s, int) { return load_halves(s) * load_unsigned(p); }
    static vec minimum(const uint8_t* p, const uint8_t* s) { return -load_halves(s + 32) * load_unsigned(p + 16); }
    static void put(uint8_t* p, uint8_t* s, int lane, const Piece& piece, int block) {
        p[lane] = piece.scales[block], p[16 + lane] = piece.minimums[block];
        memcpy(s + 2 * lane, &piece.scale, 2);
        memcpy(s + 32 + 2 * lane, &piece.minimum, 2);
    }
};

struct TwoParts {  // of Q6_K: a scale for 16 inputs
    static constexpr int SIZE = 32, SUPER_SIZE = 32, PARTS = 2;
    static constexpr bool HAS_MINIMUM = false;
    static vec scale(const uint8_t* p, const uint8_t* s, int part) {
        return load_halves(s) * load_signed(p + 16 * part);
    }
    static vec minimum(const uint8_t*, const uint8_t*) { return vec{}; }
    static void put(uint8_t* p, uint8_t* s, int lane, const Piece& piece, int block) {
        p[lane] = piece.scales[2 * block], p[16 + lane] = piece.scales[2 * block + 1];
        memcpy(s + 2 * lane, &piece.scale, 2);
    }
};

// How a kind lies in a panel: scales first, which are needed from the first block on.
template <class C, class S, int Z>
struct Form {
    typedef C Codes;
    typedef S Scales;
    static constexpr int ZERO = Z;
    static long panel_size(int num_blocks) { return codes_at(num_blocks) + (long)num_blocks * C::SIZE; }
    static long supers_at(int num_blocks) { return (long)num_blocks * S::SIZE; }
    static long codes_at(int num_blocks) {
        return (supers_at(num_blocks) + (long)num_blocks / (SUPER / BLOCK) * S::SUPER_SIZE + 63) / 64 * 64;
    }
};

// Where a block of a panel lies.
template <class F>
struct Place {
    Place(const uint8_t* panel, int num_blocks, int block)
        : codes(panel + F::codes_at(num_blocks) + (long)block * F::Codes::SIZE),
          scales(panel + (long)block * F::Scales::SIZE),
          supers(panel + F::supers_at(num_blocks) + (long)block / (SUPER / BLOCK) * F::Scales::SUPER_SIZE) {}

    const uint8_t *codes, *scales, *supers;
};

// What a kind is in the file: bytes and inputs of its blocks, and how they are read.
template <int K>
struct Stored;

inline void read_nibbles(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < 16; i++) codes[i] = p[i] & 15, codes[i + 16] = p[i] >> 4;
}

inline void add_fifth_bits(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < BLOCK; i++) codes[i] |= (p[i / 8] >> i % 8 & 1) << 4;
}

template <>
struct Stored<Q4_0> {
    typedef Form<Nibbles, Halves, 8> Packed;
    static constexpr int BYTES = 18, INPUTS = BLOCK;
    static void read(const uint8_t* p, Piece& piece) {
        memcpy(&piece.scale, p, 2);
        read_nibbles(p + 2, piece.codes);
    }
};

template <>
struct Stored<Q4_1> {
    typedef Form<Nibbles, HalvesAndMinimums, 0> Packed;
    static constexpr int BYTES = 20, INPUTS = BLOCK;
    static void read(const uint8_t* p, Piece& piece) {
        memcpy(&piece.scale, p, 2);
        memcpy(&piece.minimum, p + 2, 2);
        read_nibbles(p + 4, piece.codes);
    }
};

template <>
struct Stored<Q5_0> {
    typedef Form<Bytes, Halves, 128> Packed;
    static constexpr int BYTES = 22, INPUTS = BLOCK;
    static void read(const uint8_t* p, Piece& piece) {
        memcpy(&piece.scale, p, 2);
        read_nibbles(p + 6, piece.codes);
        add_fifth_bits(p + 2, piece.codes);
        for (int i = 0; i < BLOCK; i++) piece.codes[i] += 128 - 16;
    }
};

template <>
struct Stored<Q5_1> {
    typedef Form<Bytes, HalvesAndMinimums, 0> Packed;
    static constexpr int BYTES = 24, INPUTS = BLOCK;
    static void read(const uint8_t* p, Piece& piece) {
        memcpy(&piece.scale, p, 2);
        memcpy(&piece.minimum, p + 2, 2);
        read_nibbles(p + 8, piece.codes);
        add_fifth_bits(p + 4, piece.codes);
    }
};

template <>
struct Stored<Q8_0> {
    typedef Form<Bytes, Halves, 128> Packed;
    static constexpr int BYTES = 34, INPUTS = BLOCK;
    static void read(const uint8_t* p, Piece& piece) {
        memcpy(&piece.scale, p, 2);
        for (int i = 0; i < BLOCK; i++) piece.codes[i] = p[2 + i] + 128;
    }
};

template <>
struct Stored<MXFP4> {
    typedef Form<Floats, Powers, 128> Packed;
    static constexpr int BYTES = 17, INPUTS = BLOCK;
    static void read(const uint8_t* p, Piece& piece) {
        piece.scales[0] = p[0];
        read_nibbles(p + 1, piece.codes);
    }
};

// Scales and minimums of 6 bits, 8 of each in 12 bytes.
inline void read_two_levels(const uint8_t* p, Piece& piece) {
    memcpy(&piece.scale, p, 2);
    memcpy(&piece.minimum, p + 2, 2);
    p += 4;
    for (int i = 0; i < 4; i++) {
        piece.scales[i] = p[i] & 63, piece.minimums[i] = p[i + 4] & 63;
        piece.scales[i + 4] = (p[i + 8] & 15) | p[i] >> 6 << 4;
        piece.minimums[i + 4] = p[i + 8] >> 4 | p[i + 4] >> 6 << 4;
    }
}

inline void read_super_nibbles(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < SUPER; i++) codes[i] = p[i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
}

template <>
struct Stored<Q4_K> {
    typedef Form<Nibbles, TwoLevels, 0> Packed;
    static constexpr int BYTES = 144, INPUTS = SUPER;
    static void read(const uint8_t* p, Piece& piece) {
        read_two_levels(p, piece);
        read_super_nibbles(p + 16, piece.codes);
    }
};

template <>
struct Stored<Q5_K> {
    typedef Form<Bytes, TwoLevels, 0> Packed;
    static constexpr int BYTES = 176, INPUTS = SUPER;
    static void read(const uint8_t* p, Piece& piece) {
        read_two_levels(p, piece);
        read_super_nibbles(p + 48, piece.codes);
        for (int i = 0; i < SUPER; i++) piece.codes[i] |= (p[16 + i % 32] >> i / 32 & 1) << 4;
    }
};

template <>
struct Stored<Q6_K> {
    typedef Form<Sixes, TwoParts, 32> Packed;
    static constexpr int BYTES = 210, INPUTS = SUPER;
    static void read(const uint8_t* p, Piece& piece) {
        const uint8_t *low = p, *high = p + 128;
        for (int i = 0; i < SUPER; i++) {
            const int half = i / 128, quarter = i % 128 / 32, l = i % 32;
            const int nibble = low[half * 64 + quarter % 2 * 32 + l] >> quarter / 2 * 4 & 15;
            piece.codes[i] = nibble | (high[half * 32 + l] >> quarter * 2 & 3) << 4;
        }
        memcpy(piece.scales, p + 192, 16);
        memcpy(&piece.scale, p + 208, 2);
    }
};

// Calls act with the kind as a type; false where there is no such kind.
template <class Act>
bool with_kind(int kind, Act act) {
    switch (kind) {
        case Q4_0: return act(Stored<Q4_0>()), true;
        case Q4_1: return act(Stored<Q4_1>()), true;
        case Q5_0: return act(Stored<Q5_0>()), true;
        case Q5_1: return act(Stored<Q5_1>()), true;
        case Q8_0: return act(Stored<Q8_0>()), true;
        case Q4_K: return act(Stored<Q4_K>()), true;
        case Q5_K: return act(Stored<Q5_K>()), true;
        case Q6_K: return act(Stored<Q6_K>()), true;
        case MXFP4: return act(Stored<MXFP4>()), true;
        default: return false;
    }
}

}  // namespace gapless
