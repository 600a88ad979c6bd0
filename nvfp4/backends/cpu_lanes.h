// Included once for each instruction set, see cpu_kernels.cpp.

// ---- lanes ---------------------------------------------------------------------------------

typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef double f64x4 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

template <class To, class From> INLINE To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
INLINE float value(float x) { return x; }
INLINE float value(bf16 x) { return bits<float>((uint32_t)x << 16); }
INLINE f32x8 splat(float x) { return x - f32x8{}; }
INLINE i32x8 splat(int32_t x) { return x - i32x8{}; }
INLINE i32x8 max8(i32x8 a, i32x8 b) { return a > b ? a : b; }
INLINE i16x16 max16(i16x16 a, i16x16 b) { return a > b ? a : b; }
INLINE i32x8 min8(i32x8 a, i32x8 b) { return a < b ? a : b; }

INLINE f32x8 load(const float *p) {
    f32x8 x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE f32x8 load(const bf16 *p) {
#if ISA >= 1
    return (f32x8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    u16x8 x;
    memcpy(&x, p, sizeof x);
    return bits<f32x8>(__builtin_convertvector(x, u32x8) << 16);
#endif
}
template <class T> INLINE f32x8 load_some(const T *p, int64_t n) {  // n < 8, the others are 0
    T few[8] = {};
    for (int64_t i = 0; i < n; i++) few[i] = p[i];
    return load(few);
}
INLINE f64x4 load4(const double *p) {
    f64x4 x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE f32x4 load4(const float *p) {
    f32x4 x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE f32x4 load4(const bf16 *p) {
#ifdef __SSE2__
    return (f32x4)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)p));
#else
    return f32x4{value(p[0]), value(p[1]), value(p[2]), value(p[3])};
#endif
}
INLINE f64x4 wide(f32x4 x) {
#if ISA >= 1
    return (f64x4)_mm256_cvtps_pd((__m128)x);
#else
    return __builtin_convertvector(x, f64x4);
#endif
}
INLINE f32x4 narrow(f64x4 x) {
#if ISA >= 1
    return (f32x4)_mm256_cvtpd_ps((__m256d)x);
#else
    return __builtin_convertvector(x, f32x4);
#endif
}
INLINE void store4(float *p, f32x4 x) { memcpy(p, &x, sizeof x); }
INLINE void store(float *p, f32x8 x) { memcpy(p, &x, sizeof x); }

// 16 bytes to and from two vectors of int32. GCC converts vectors narrower than a register value by
// value, hence the steps in between.
struct Two { i32x8 a, b; };
INLINE Two load_bytes(const uint8_t *p) {
#if ISA >= 1
    __m128i v = _mm_loadu_si128((const __m128i *)p);
    return {(i32x8)_mm256_cvtepu8_epi32(v), (i32x8)_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
#else
    u8x16 x;
    memcpy(&x, p, sizeof x);
    u16x16 w = __builtin_convertvector(x, u16x16);
    u16x8 low = __builtin_shufflevector(w, w, 0, 1, 2, 3, 4, 5, 6, 7);
    u16x8 high = __builtin_shufflevector(w, w, 8, 9, 10, 11, 12, 13, 14, 15);
    return {__builtin_convertvector(low, i32x8), __builtin_convertvector(high, i32x8)};
#endif
}
#ifdef __SSE2__
INLINE __m128i half(i32x8 x, bool high) {
    i32x4 y = high ? __builtin_shufflevector(x, x, 4, 5, 6, 7) : __builtin_shufflevector(x, x, 0, 1, 2, 3);
    return (__m128i)y;
}
#endif
INLINE void store_bytes(uint8_t *p, i32x8 a, i32x8 b) {
#ifdef __SSE2__
    __m128i first = _mm_packs_epi32(half(a, false), half(a, true));
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi16(first, _mm_packs_epi32(half(b, false), half(b, true))));
#else
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)a[i], p[i + 8] = (uint8_t)b[i];
#endif
}
INLINE void store_words(bf16 *p, i32x8 x) {  // eight numbers under 65536
#if ISA >= 1
    __m256i v = (__m256i)x;
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
#else
    u16x8 words = __builtin_convertvector(x, u16x8);
    memcpy(p, &words, sizeof words);
#endif
}
// Numbers under 65536 as words: for each half of the vectors, four of a, then four of b.
INLINE i16x16 packed(i32x8 a, i32x8 b) {
#if ISA >= 1
    return (i16x16)_mm256_packus_epi32((__m256i)a, (__m256i)b);
#else
    i32x8 low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11), high = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    i16x16 words;
    for (int i = 0; i < 8; i++) words[i] = (int16_t)low[i], words[i + 8] = (int16_t)high[i];
    return words;
#endif
}
INLINE i16x16 in_order(i16x16 x) {  // of what `packed` gives: a, then b
    return (i16x16)__builtin_shufflevector((f64x4)x, (f64x4)x, 0, 2, 1, 3);
}
INLINE f32x8 both(f32x4 low, f32x4 high) {
#if ISA >= 1
    return (f32x8)_mm256_insertf128_ps(_mm256_castps128_ps256((__m128)low), (__m128)high, 1);
#else
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
#endif
}
// FP32 to BF16 patterns, ties to even; NaN is 0x7FC0 as in torch.
INLINE i32x8 to_bf16(f32x8 x) {
    i32x8 b = bits<i32x8>(x);
    u32x8 u = (u32x8)b;
    u32x8 r = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    i32x8 nan = (b & 0x7FFFFFFF) > 0x7F800000;
    return nan ? splat(0x7FC0) : (i32x8)r;
}

// ---- block maxima: scaling.block_amax ------------------------------------------------------

// Magnitudes are ordered like their bit patterns; the offset turns NaN negative, so it never wins.
const int32_t NAN_OFFSET = 0x007FFFFF;
INLINE i32x8 magnitude_key(f32x8 x) {
    return (i32x8)((u32x8)(bits<i32x8>(x) & 0x7FFFFFFF) + (uint32_t)NAN_OFFSET);
}
INLINE i32x8 pattern_of(i32x8 key) { return max8(key, splat(NAN_OFFSET)) - NAN_OFFSET; }
// The same for BF16 patterns in words: NaN, beyond 0x7F80, turns negative.
INLINE i16x16 word_key(i16x16 pattern) { return (i16x16)((u16x16)(pattern & 0x7FFF) + (uint16_t)0x7F); }
INLINE i32x8 pattern_of_word(i32x8 key) {  // of a key in the high word, as that of an FP32 number
    return (max8(key >> 16, splat(0x7F)) - 0x7F) << 16;
}
template <class T> INLINE int32_t segment_key(const T *x, int64_t n) {
    i32x8 most = splat(NAN_OFFSET);
    int64_t j = 0;
    for (; j + 8 <= n; j += 8) most = max8(most, magnitude_key(load(x + j)));
    if (j < n) most = max8(most, magnitude_key(load_some(x + j, n - j)));
    most = max8(most, __builtin_shufflevector(most, most, 4, 5, 6, 7, 0, 1, 2, 3));
    most = max8(most, __builtin_shufflevector(most, most, 2, 3, 0, 1, 6, 7, 4, 5));
    most = max8(most, __builtin_shufflevector(most, most, 1, 0, 3, 2, 5, 4, 7, 6));
    return most[0];
}
// The largest lane of each of eight vectors.
INLINE i32x8 max_of_each(const i32x8 v[8]) {
    i32x8 a[4], b[2];
    for (int i = 0; i < 4; i++) {
        i32x8 x = v[2 * i], y = v[2 * i + 1];
        a[i] = max8(__builtin_shufflevector(x, y, 0, 8, 1, 9, 4, 12, 5, 13), __builtin_shufflevector(x, y, 2, 10, 3, 11, 6, 14, 7, 15));
    }
    for (int i = 0; i < 2; i++) {
        i32x8 x = a[2 * i], y = a[2 * i + 1];
        b[i] = max8(__builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13), __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15));
    }
    return max8(__builtin_shufflevector(b[0], b[1], 0, 1, 2, 3, 8, 9, 10, 11), __builtin_shufflevector(b[0], b[1], 4, 5, 6, 7, 12, 13, 14, 15));
}
// The largest lane of each half of four vectors: v[0] low, v[0] high, v[1] low, ...
INLINE i32x8 max_of_halves(const i32x8 v[4]) {
    i32x8 a[2];
    for (int i = 0; i < 2; i++) {
        i32x8 x = v[2 * i], y = v[2 * i + 1];
        a[i] = max8(__builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13), __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15));
    }
    i32x8 m = max8(__builtin_shufflevector(a[0], a[1], 0, 2, 8, 10, 4, 6, 12, 14), __builtin_shufflevector(a[0], a[1], 1, 3, 9, 11, 5, 7, 13, 15));
    return __builtin_shufflevector(m, m, 0, 4, 1, 5, 2, 6, 3, 7);
}
INLINE void take_max(int32_t *most, i32x8 key) {  // keys into the maxima of eight blocks
    i32x8 m;
    memcpy(&m, most, sizeof m);
    m = max8(m, pattern_of(key));
    memcpy(most, &m, sizeof m);
}
// Maxima of one row of values, taken into the maxima of its row of blocks (as integer patterns).
template <class T> INLINE void amax_row(const T *x, int64_t C, int64_t bc, int32_t *most) {
    int64_t j = 0;
    if (bc == 1) {
        for (; j + 8 <= C; j += 8) take_max(most + j, magnitude_key(load(x + j)));
        for (; j < C; j++) most[j] = std::max(most[j], segment_key(x + j, 1) - NAN_OFFSET);
        return;
    }
    if (bc == 16)
        for (; j + 128 <= C; j += 128) {
            i32x8 key[8];
            for (int i = 0; i < 8; i++)
                key[i] = max8(magnitude_key(load(x + j + 16 * i)), magnitude_key(load(x + j + 16 * i + 8)));
            take_max(most + j / 16, max_of_each(key));
        }
    for (int64_t b = j / bc; j < C; j += bc, b++)
        most[b] = std::max(most[b], segment_key(x + j, std::min(bc, C - j)) - NAN_OFFSET);
}
static void amax_row_f32(const float *x, int64_t C, int64_t bc, int32_t *most) {
    amax_row(x, C, bc, most);
}
static void amax_row_bf16(const bf16 *x, int64_t C, int64_t bc, int32_t *most) {
    amax_row(x, C, bc, most);
}
static int32_t largest(const int32_t *most, int64_t n) {  // patterns of magnitudes
    i32x8 m = splat(0);
    int64_t j = 0;
    for (; j + 8 <= n; j += 8) {
        i32x8 x;
        memcpy(&x, most + j, sizeof x);
        m = max8(m, x);
    }
    int32_t most_of_all = 0;
    for (int i = 0; i < 8; i++) most_of_all = std::max(most_of_all, m[i]);
    for (; j < n; j++) most_of_all = std::max(most_of_all, most[j]);
    return most_of_all;
}

