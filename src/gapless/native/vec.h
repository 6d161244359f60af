// Sixteen floats at a time, on any machine: GCC's and Clang's vector types, with AVX-512 where there is a choice to make.
//
// Owns: the vector type, fused multiply-add, exp and the activations, bfloat16 conversion, reductions. Knows no model.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace gapless {

constexpr int LANES = 16;
constexpr float INF = __builtin_inff();

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

inline vec load(const float* p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, vec v) { memcpy(p, &v, sizeof v); }

inline vec fill(float x) { return vec{} + x; }

// One rounding where the machine has the instruction. Always the same choice, so that no result depends on the caller.
inline vec fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

inline vec choose(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

inline vec max(vec a, vec b) { return choose(a > b, a, b); }

constexpr ivec LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline vec first_lanes(vec v, int count, float other) { return choose(LANE < count, v, fill(other)); }

inline vec lanes_from(vec v, int first, float other) { return choose(LANE >= first, v, fill(other)); }

// Lanes are folded in halves: an order that depends on nothing.
inline float sum(vec v) {
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

inline float largest(vec v) {
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
}

// exp to about two units in the last place; below -87 it is 0, above 88 it stays at exp(88).
inline vec exp(vec x) {
    const ivec tiny = x < -87.0f;
    x = choose(x > 88.0f, fill(88.0f), x);
    x = choose(tiny, fill(0.0f), x);
    const vec shift = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const vec n = fma(x, fill(1.44269504088896341f), shift) - shift;
    vec r = fma(n, fill(-0.693359375f), x);
    r = fma(n, fill(2.12194440e-4f), r);
    vec p = fill(1.9875691500e-4f);
    p = fma(p, r, fill(1.3981999507e-3f));
    p = fma(p, r, fill(8.3334519073e-3f));
    p = fma(p, r, fill(4.1665795894e-2f));
    p = fma(p, r, fill(1.6666665459e-1f));
    p = fma(p, r, fill(5.0000001201e-1f));
    p = fma(p, r * r, r + 1.0f);
    const ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return choose(tiny, fill(0.0f), p * (vec)power);
}

inline vec silu(vec x) { return x / (1.0f + exp(-x)); }

inline vec abs(vec x) { return (vec)((ivec)x & 0x7fffffff); }

inline vec with_sign_of(vec x, vec sign) { return (vec)((ivec)x | ((ivec)sign & (int32_t)0x80000000)); }

// To about 1e-7.
inline vec tanh(vec x) {
    const vec e = exp(-2.0f * abs(x));
    return with_sign_of((1.0f - e) / (1.0f + e), x);
}

// To 1.5e-7: Abramowitz and Stegun 7.1.26.
inline vec erf(vec x) {
    const vec a = abs(x), t = 1.0f / fma(a, fill(0.3275911f), fill(1.0f));
    vec p = fill(1.061405429f);
    p = fma(p, t, fill(-1.453152027f));
    p = fma(p, t, fill(1.421413741f));
    p = fma(p, t, fill(-0.284496736f));
    p = fma(p, t, fill(0.254829592f));
    return with_sign_of(1.0f - p * t * exp(-a * a), x);
}

inline vec gelu(vec x) { return 0.5f * x * (1.0f + erf(x * 0.70710678f)); }

inline vec gelu_tanh(vec x) { return x / (1.0f + exp(-1.5957691216f * (x + 0.044715f * x * x * x))); }

// x as long as it is small, and never past the cap.
inline vec soft_cap(vec x, float cap) { return cap * tanh(x / cap); }

inline uint16_t to_bf16(float x) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_bf16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

inline halves to_bf16(vec v) {
#if defined(__AVX512BF16__)
    return (halves)_mm512_cvtneps_pbh((__m512)v);
#else
    const uvec bits = (uvec)v;
    const uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uvec is_nan = (uvec)((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), halves);
#endif
}

inline vec from_bf16(halves h) { return (vec)(__builtin_convertvector(h, uvec) << 16); }

// Writes the first `count` lanes as the type of the destination.
inline void put(float* p, vec v, int count) {
    if (count >= LANES) {
        store(p, v);
    } else {
        memcpy(p, &v, count * sizeof(float));
    }
}

inline void put(uint16_t* p, vec v, int count) {
    const halves h = to_bf16(v);
    memcpy(p, &h, (count >= LANES ? LANES : count) * sizeof(uint16_t));
}

}  // namespace gapless
