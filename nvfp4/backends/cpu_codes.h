// Included once for each instruction set, see cpu_kernels.cpp.

// ---- formats.encode, equation (1) ----------------------------------------------------------

// nan: the code of NaN; last: that of infinity, or else of the largest number
struct E2M1 { enum { m = 1, emin = 0, largest = 0x40C00000, nan = 7, sign = 8, last = 7 }; };
struct E4M3 { enum { m = 3, emin = -6, largest = 0x43E00000, nan = 0x7F, sign = 0x80, last = 0x7E }; };
struct E5M2 { enum { m = 2, emin = -14, largest = 0x47600000, nan = 0x7F, sign = 0x80, last = 0x7C }; };
struct UE5M3 { enum { m = 3, emin = -14, largest = 0x47E00000, nan = 0xFF, sign = 0 }; };

template <class F, bool RANDOM> INLINE i32x8 encode(f32x8 x, i32x8 random) {
    i32x8 pattern = bits<i32x8>(x), magnitude = pattern & 0x7FFFFFFF;
    i32x8 nan = magnitude > 0x7F800000;
    magnitude = min8(magnitude, splat((int32_t)F::largest));
    i32x8 power = max8(magnitude, splat((127 + F::emin) << 23)) & 0x7F800000;
    const int scale = (254 + F::m + (RANDOM ? 8 : 0)) << 23;  // in steps, or 256ths of them
    f32x8 steps = bits<f32x8>(magnitude) * bits<f32x8>(scale - power);
    i32x8 code;
    if (RANDOM)  // rounding.stochastic
        code = (__builtin_convertvector(steps, i32x8) + random) >> 8;
    else  // rounding.nearest
        code = bits<i32x8>(steps + 8388608.0f) - 0x4B000000;
    code += (power >> (23 - F::m)) - ((127 + F::emin) << F::m);
    if (F::sign != 0) code |= (pattern >> (F::sign == 8 ? 28 : 24)) & (int32_t)F::sign;
    return nan ? splat((int32_t)F::nan) : code;
}
template <class F> INLINE f32x8 decode_scale(i32x8 code) {  // formats.decode for scales, >= 0
    // the code's bits as those of a float with the same mantissa width; rebias by a power of two
    f32x8 value = bits<f32x8>(code << 20) * bits<float>((int32_t)((127 + 127 + F::emin - 1) << 23));
    return code == (int32_t)F::nan ? bits<f32x8>(splat(0x7FC00000)) : value;
}

// 16 codes of x * enc, one multiplication for each.
template <class F, bool RANDOM>
INLINE void encode16(f32x8 x0, f32x8 x1, const uint8_t *random, uint8_t *codes) {
    Two r = {};
    if (RANDOM) r = load_bytes(random);
    store_bytes(codes, encode<F, RANDOM>(x0, r.a), encode<F, RANDOM>(x1, r.b));
}
template <class F, bool RANDOM, class T>  // the last n < 16 values; the scale is per column or one
INLINE void encode_rest(const T *x, int64_t n, const float *enc, bool per_column, const uint8_t *random, uint8_t *codes) {
    T xs[16] = {};
    float es[16];
    uint8_t rs[16] = {}, cs[16];
    for (int64_t i = 0; i < 16; i++) es[i] = per_column ? (i < n ? enc[i] : 0) : *enc;
    memcpy(xs, x, n * sizeof(T));
    if (RANDOM) memcpy(rs, random, n);
    encode16<F, RANDOM>(load(xs) * load(es), load(xs + 8) * load(es + 8), rs, cs);
    memcpy(codes, cs, n);
}
template <class F, bool RANDOM, class T>
INLINE void encode_row(const T *x, int64_t C, int64_t bc, const float *enc, const uint8_t *random, uint8_t *codes) {
    int64_t j = 0;
    if (bc == 1) {
        for (; j + 16 <= C; j += 16)
            encode16<F, RANDOM>(load(x + j) * load(enc + j), load(x + j + 8) * load(enc + j + 8), random + j, codes + j);
        if (j < C) encode_rest<F, RANDOM>(x + j, C - j, enc + j, true, random + j, codes + j);
    } else if (bc == 16) {
        for (; j + 16 <= C; j += 16, enc++)
            encode16<F, RANDOM>(load(x + j) * *enc, load(x + j + 8) * *enc, random + j, codes + j);
        if (j < C) encode_rest<F, RANDOM>(x + j, C - j, enc, false, random + j, codes + j);
    } else
        for (int64_t start = 0; start < C; start += bc, enc++) {
            int64_t end = std::min(start + bc, C);
            for (j = start; j + 16 <= end; j += 16)
                encode16<F, RANDOM>(load(x + j) * *enc, load(x + j + 8) * *enc, random + j, codes + j);
            if (j < end) encode_rest<F, RANDOM>(x + j, end - j, enc, false, random + j, codes + j);
        }
}
#define ENCODE_ROWS(NAME, F, T)                                                                     \
    static void NAME(const void *x, int64_t C, int64_t bc, const float *enc, const uint8_t *random, uint8_t *codes) { \
        if (random) encode_row<F, true>((const T *)x, C, bc, enc, random, codes);                   \
        else encode_row<F, false>((const T *)x, C, bc, enc, codes, codes);                          \
    }
ENCODE_ROWS(encode_e2m1_f32, E2M1, float)
ENCODE_ROWS(encode_e2m1_bf16, E2M1, bf16)
ENCODE_ROWS(encode_e4m3_f32, E4M3, float)
ENCODE_ROWS(encode_e4m3_bf16, E4M3, bf16)
ENCODE_ROWS(encode_e5m2_f32, E5M2, float)
ENCODE_ROWS(encode_e5m2_bf16, E5M2, bf16)
typedef void (*EncodeRow)(const void *, int64_t, int64_t, const float *, const uint8_t *, uint8_t *);
static const EncodeRow ENCODERS[3][2] = {{encode_e2m1_f32, encode_e2m1_bf16},
                                         {encode_e4m3_f32, encode_e4m3_bf16},
                                         {encode_e5m2_f32, encode_e5m2_bf16}};

// ---- two-level scales: scaling.block_scale_to, nvfp4_block_scale, nvfp4_encode_scale --------

const float FLT_LARGEST = 3.4028234663852886e38f;
INLINE f32x8 at_most(f32x8 x, float limit) { return x > limit ? splat(limit) : x; }  // keeps NaN

static float tensor_encode_scale(float amax, float limit) {
    float s = limit / amax;
    s = s > FLT_LARGEST ? FLT_LARGEST : s;
    return amax == 0 || s == 0 ? 1.0f : s;
}
template <class F> INLINE void scales(const Job &job, float S, int64_t begin, int64_t end) {
    float factor = S * job.inverse_target, inverse = 1.0f / S;
    for (int64_t j = begin; j < end; j += 8) {
        int64_t n = std::min<int64_t>(8, end - j);
        f32x8 b = n == 8 ? load(job.block_amax + j) : load_some(job.block_amax + j, n);
        f32x8 exact = job.scale_rule == 0 ? b * factor : b / splat(6.0f) * S;
        i32x8 code = encode<F, false>(at_most(exact, FLT_LARGEST), splat(0));
        f32x8 enc = at_most(1.0f / (decode_scale<F>(code) * inverse), FLT_LARGEST);
        uint8_t bytes[16];
        store_bytes(bytes, code, code);
        memcpy(job.block_scale + j, bytes, n);
        memcpy(job.encode_scale + j, &enc, n * sizeof(float));
    }
}
static void scales_e4m3(const Job *job, float S, int64_t begin, int64_t end) {
    scales<E4M3>(*job, S, begin, end);
}
static void scales_ue5m3(const Job *job, float S, int64_t begin, int64_t end) {
    scales<UE5M3>(*job, S, begin, end);
}

// ---- Philox4x32-10: 16 bytes for each of `groups` counters (group, position, sample, tag) ---

static void philox_plain(uint32_t group, int64_t groups, uint32_t position, uint32_t sample, uint32_t tag, uint32_t key0, uint32_t key1, uint8_t *out) {
    for (int64_t g = 0; g < groups; g++, group++, out += 16) {
        uint32_t c[4] = {group, position, sample, tag}, k0 = key0, k1 = key1;
        for (int round = 0; round < 10; round++) {
            uint64_t even = (uint64_t)c[0] * 0xD2511F53u, odd = (uint64_t)c[2] * 0xCD9E8D57u;
            uint32_t n0 = (uint32_t)(odd >> 32) ^ c[1] ^ k0, n2 = (uint32_t)(even >> 32) ^ c[3] ^ k1;
            c[0] = n0, c[1] = (uint32_t)odd, c[2] = n2, c[3] = (uint32_t)even;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        memcpy(out, c, 16);  // little-endian words, as the layout in philox.py says
    }
}
#if ISA >= 1
// Eight counters as two vectors of four 64-bit lanes, of which the low halves count: the product of
// two low halves is one instruction, and the high halves may hold anything.
static void philox_avx2(uint32_t group, int64_t groups, uint32_t position, uint32_t sample, uint32_t tag, uint32_t key0, uint32_t key1, uint8_t *out) {
    __m256i k0[10], k1[10];
    for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u)
        k0[round] = _mm256_set1_epi64x(key0), k1[round] = _mm256_set1_epi64x(key1);
    key0 -= 10 * 0x9E3779B9u, key1 -= 10 * 0xBB67AE85u;
    const __m256i m0 = _mm256_set1_epi64x(0xD2511F53u), m1 = _mm256_set1_epi64x(0xCD9E8D57u);
    int64_t g = 0;
    for (; g + 8 <= groups; g += 8, group += 8) {
        __m256i c0[2], c1[2], c2[2], c3[2];
        for (int i = 0; i < 2; i++) {
            c0[i] = _mm256_add_epi32(_mm256_set1_epi64x(group + 4 * i), _mm256_set_epi64x(3, 2, 1, 0));
            c1[i] = _mm256_set1_epi64x(position), c2[i] = _mm256_set1_epi64x(sample);
            c3[i] = _mm256_set1_epi64x(tag);
        }
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++)
            for (int i = 0; i < 2; i++) {
                __m256i even = _mm256_mul_epu32(c0[i], m0), odd = _mm256_mul_epu32(c2[i], m1);
                c0[i] = _mm256_xor_si256(_mm256_srli_epi64(odd, 32), _mm256_xor_si256(c1[i], k0[round]));
                c2[i] = _mm256_xor_si256(_mm256_srli_epi64(even, 32), _mm256_xor_si256(c3[i], k1[round]));
                c1[i] = odd, c3[i] = even;
            }
        for (int i = 0; i < 2; i++, out += 64) {
            __m256i low = _mm256_blend_epi32(c0[i], _mm256_slli_epi64(c1[i], 32), 0xAA);
            __m256i high = _mm256_blend_epi32(c2[i], _mm256_slli_epi64(c3[i], 32), 0xAA);
            __m256i even = _mm256_unpacklo_epi64(low, high), odd = _mm256_unpackhi_epi64(low, high);
            _mm256_storeu_si256((__m256i *)out, _mm256_permute2x128_si256(even, odd, 0x20));
            _mm256_storeu_si256((__m256i *)(out + 32), _mm256_permute2x128_si256(even, odd, 0x31));
        }
    }
    philox_plain(group, groups - g, position, sample, tag, key0, key1, out);
}
#endif
static void philox_row(const Job &job, int64_t row, uint8_t *out) {  // ceil(..) * 16 bytes
    int64_t first = job.feature_offset / 16, last = (job.feature_offset + job.C + 15) / 16;
#if ISA >= 1
    auto fill = philox_avx2;
#else
    auto fill = philox_plain;
#endif
    fill((uint32_t)first, last - first, (uint32_t)job.position[row], (uint32_t)job.sample[row],
         (uint32_t)job.tag, (uint32_t)job.key0, (uint32_t)job.key1, out);
}

// ---- decode, products, counts --------------------------------------------------------------

const float E2M1_VALUES[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
template <class F> INLINE f32x8 values(i32x8 code) {  // formats.decode
    if (F::sign == 8) {
        f32x8 value = __builtin_shuffle(load(E2M1_VALUES), code & 7);
        return bits<f32x8>(bits<i32x8>(value) | (code & 8) << 28);
    }
    // the code's bits as those of a float with the same mantissa width; rebias by a power of two
    f32x8 value = bits<f32x8>((code & 0x7F) << (23 - F::m)) * bits<float>((int32_t)((127 + 127 + F::emin - 1) << 23));
    value = (code & 0x7F) > (int32_t)F::last ? bits<f32x8>(splat(0x7FC00000)) : value;
    return bits<f32x8>(bits<i32x8>(value) | (code & 0x80) << 24);
}
template <class F, bool PER_COLUMN> INLINE void decode16(const uint8_t *codes, const float *scale, float *out) {
    Two code = load_bytes(codes);
    store(out, values<F>(code.a) * (PER_COLUMN ? load(scale) : splat(*scale)));
    store(out + 8, values<F>(code.b) * (PER_COLUMN ? load(scale + 8) : splat(*scale)));
}
template <class F, bool PER_COLUMN>  // the last n < 16 values
INLINE void decode_rest(const uint8_t *codes, int64_t n, const float *scale, float *out) {
    uint8_t few[16] = {};
    float scales[16] = {}, values[16];
    memcpy(few, codes, n);
    memcpy(scales, scale, (PER_COLUMN ? n : 1) * sizeof(float));
    decode16<F, PER_COLUMN>(few, scales, values);
    memcpy(out, values, n * sizeof(float));
}
template <class F>
static void decode_row(const uint8_t *codes, int64_t C, int64_t bc, const float *scale, float *out) {
    int64_t j = 0;
    if (bc == 1) {
        for (; j + 16 <= C; j += 16) decode16<F, true>(codes + j, scale + j, out + j);
        if (j < C) decode_rest<F, true>(codes + j, C - j, scale + j, out + j);
    } else if (bc == 16) {
        for (; j + 16 <= C; j += 16) decode16<F, false>(codes + j, scale++, out + j);
        if (j < C) decode_rest<F, false>(codes + j, C - j, scale, out + j);
    } else
        for (int64_t start = 0; start < C; start += bc, scale++) {
            int64_t end = std::min(start + bc, C);
            for (j = start; j + 16 <= end; j += 16) decode16<F, false>(codes + j, scale, out + j);
            if (j < end) decode_rest<F, false>(codes + j, end - j, scale, out + j);
        }
}
typedef void (*DecodeRow)(const uint8_t *, int64_t, int64_t, const float *, float *);
static const DecodeRow DECODERS[3] = {decode_row<E2M1>, decode_row<E4M3>, decode_row<E5M2>};
static void finish_f32(const float *y, int64_t n, const float *factors, int64_t count, const float *add, float *out) {
    for (int64_t j = 0; j < n; j++) {
        float v = y[j];
        for (int64_t f = 0; f < count; f++) v *= factors[f];
        out[j] = add ? v + add[j] : v;
    }
}
static void finish_bf16(const float *y, int64_t n, const float *factors, int64_t count, const float *add, bf16 *out) {
    int64_t j = 0;
    for (; j + 8 <= n; j += 8) {
        f32x8 v = load(y + j);
        for (int64_t f = 0; f < count; f++) v *= factors[f];
        if (add) v += load(add + j);
        store_words(out + j, to_bf16(v));
    }
    if (j == n) return;
    f32x8 v = load_some(y + j, n - j);
    for (int64_t f = 0; f < count; f++) v *= factors[f];
    if (add) v += load_some(add + j, n - j);
    i32x8 rounded = to_bf16(v);
    for (int64_t k = 0; j + k < n; k++) out[j + k] = (bf16)rounded[k];
}
// total = fl(p * scale_a * scale_b + total), as numerics.gemm computes it: the last product and sum
// in FP64, or in FP32 where the scales are powers of two and the product is exact.
static void promote_row(const float *p, int64_t n, float scale_a, const float *scale_b, bool exact, float *total) {
    if (exact)
        for (int64_t j = 0; j < n; j++) total[j] = total[j] + p[j] * scale_a * scale_b[j];
    else
        for (int64_t j = 0; j < n; j++)
            total[j] = (float)((double)(p[j] * scale_a) * (double)scale_b[j] + (double)total[j]);
}
template <class T> INLINE bool finite_row(const T *x, int64_t n) {
    i32x8 most = splat(0);
    int64_t j = 0;
    for (; j + 8 <= n; j += 8) most = max8(most, bits<i32x8>(load(x + j)) & 0x7FFFFFFF);
    if (j < n) most = max8(most, bits<i32x8>(load_some(x + j, n - j)) & 0x7FFFFFFF);
    int32_t all = 0;
    for (int i = 0; i < 8; i++) all = std::max(all, most[i]);
    return all < 0x7F800000;
}
static bool finite_f32(const float *x, int64_t n) { return finite_row(x, n); }
static bool finite_bf16(const bf16 *x, int64_t n) { return finite_row(x, n); }

