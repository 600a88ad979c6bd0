// Included once for each instruction set, see cpu_kernels.cpp.

// ---- rotation: hadamard.rotate for sizes whose 1/sqrt(size) is exact -----------------------

// The definition sums in FP64, rounds to FP32, then to BF16. Sixteen values are summed here in FP32
// where that gives the same: (a) their sums are exact, all of them being multiples of 2^-24 of the
// power of two above 16 max |x|, as most BF16 numbers are; or (b) the error of four additions one
// after the other, at most 2^-24 * sum |x| <= 2^-20 * max |x|, cannot reach the next rounding
// boundary of BF16. A group with a value in doubt, and any so large or small that FP32 over- or
// underflows, is done in FP64.
const float BOUND = 1.0625f / 1048576.0f, SMALLEST = 0x1p-100f, LARGEST = 0x1p120f;

INLINE i32x8 magnitude(f32x8 x) { return bits<i32x8>(x) & 0x7FFFFFFF; }  // NaN is the largest
INLINE bool any(i32x8 mask) {
#if ISA >= 1
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    typedef int64_t i64x4 __attribute__((vector_size(32)));
    i64x4 m = (i64x4)mask;
    return (m[0] | m[1] | m[2] | m[3]) != 0;
#endif
}
// Whether x is a multiple of the unit in the last place of `large`, a power of two times 1.5.
INLINE i32x8 multiple(f32x8 x, f32x8 large) { return (x + large) - large == x; }
INLINE f32x8 above(i32x8 most) { return bits<f32x8>(most & 0x7F800000) * 24.0f; }
// Error of the FP32 sums of a lane: 0, the bound, or infinite, so that nothing under it is certain.
INLINE f32x8 error_bound(i32x8 pattern, i32x8 exact) {
    f32x8 most = bits<f32x8>(pattern);
    i32x8 safe = (most == 0.0f) | ((most > SMALLEST) & (most < LARGEST));
    f32x8 e = exact ? splat(0.0f) : most * BOUND;
    return safe ? e : splat(__builtin_inff());
}
INLINE i32x8 doubtful(f32x8 y, f32x8 e) {  // whether y - e and y + e round to different values
    u32x8 up = (u32x8)bits<i32x8>(y + e) + 0x8000, down = (u32x8)bits<i32x8>(y - e) + 0x8000;
    return ((i32x8)((up ^ down) >> 16) != 0) | (e > LARGEST);
}
INLINE i32x8 nearest_bf16(f32x8 y) {  // the pattern, for what is not NaN
    u32x8 u = (u32x8)bits<i32x8>(y);
    return (i32x8)((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
}
INLINE void store16(bf16 *p, i32x8 a, i32x8 b) {
#if ISA >= 1
    __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)a, (__m256i)b), 0xD8);
    _mm256_storeu_si256((__m256i *)p, both);
#else
    u16x8 low = __builtin_convertvector(a, u16x8), high = __builtin_convertvector(b, u16x8);
    memcpy(p, &low, sizeof low);
    memcpy(p + 8, &high, sizeof high);
#endif
}
// One group of any size in FP64; values `stride` apart, results `y_stride`.
template <class T>
static __attribute__((noinline)) void rotate_group(const T *x, int64_t stride, int d, const double *signs, bf16 *y, int64_t y_stride) {
    double v[64];
    for (int i = 0; i < d; i++) {
        float value;
        if (sizeof(T) == 4) memcpy(&value, x + i * stride, 4);
        else value = bits<float>((uint32_t)x[i * stride] << 16);
        v[i] = (double)value * signs[i];
    }
    for (int step = d / 2; step; step /= 2)
        for (int i = 0; i < d; i += 2 * step)
            for (int k = i; k < i + step; k++) {
                double a = v[k], b = v[k + step];
                v[k] = a + b;
                v[k + step] = a - b;
            }
    for (int i = 0; i < d; i += 4) {
        f32x8 f = {(float)v[i], (float)v[i + 1], (float)v[i + 2], (float)v[i + 3]};
        u16x8 out = to_bf16(f + 0.0f);
        for (int k = 0; k < 4; k++) y[(i + k) * y_stride] = out[k];
    }
}
// Groups of 16 down eight columns, n of them real; and their maxima, where asked for.
template <class T, bool WHOLE>
INLINE void rotate_columns16(const T *x, int64_t n, int64_t stride, const float *s, const double *signs, bf16 *y, int64_t y_stride, int32_t *most_out) {
    f32x8 v[16];
    i32x8 most = splat(0);
    for (int i = 0; i < 16; i++) {
        v[i] = WHOLE ? load(x + i * stride) : load_some(x + i * stride, n);
        most = max8(most, magnitude(v[i]));
    }
    const f32x8 large = above(most);
    i32x8 exact = splat(-1), key = splat(0);
    for (int i = 0; i < 16; i++) {
        exact &= multiple(v[i], large);
        v[i] = v[i] * s[i] + 0.0f;  // + 0 turns -0 into 0
    }
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < 16; i++)
            if (!(i & step)) {
                f32x8 a = v[i], b = v[i + step];
                v[i] = a + b;
                v[i + step] = a - b;
            }
    for (int i = 0; i < 16; i++) {
        i32x8 pattern = nearest_bf16(v[i]);
        u16x8 out = __builtin_convertvector(pattern, u16x8);
        if (WHOLE) memcpy(y + i * y_stride, &out, sizeof out);
        else memcpy(y + i * y_stride, &out, n * sizeof(bf16));
        key = max8(key, pattern & 0x7FFF);
    }
    key <<= 16;
    const f32x8 e = error_bound(most, exact);
    i32x8 doubt = ~(e == 0.0f);
    if (any(doubt)) {
        doubt = splat(0);
        for (int i = 0; i < 16; i++) doubt |= doubtful(v[i], e);
        if (any(doubt)) {
            for (int64_t k = 0; k < n; k++)
                if (doubt[k]) rotate_group(x + k, stride, 16, signs, y + k, y_stride);
            key = splat(0);
            for (int i = 0; i < 16; i++)
                key = max8(key, pattern_of(magnitude_key(WHOLE ? load(y + i * y_stride) : load_some(y + i * y_stride, n))));
        }
    }
    if (!most_out) return;
    int32_t found[8];
    memcpy(found, &key, sizeof found);
    memcpy(most_out, found, n * 4);
}
template <class T>
INLINE void rotate_down16(const T *x, int64_t C, int64_t stride, const double *signs, bf16 *y, int32_t *most) {
    float s[16];
    for (int i = 0; i < 16; i++) s[i] = (float)signs[i];
    int64_t j = 0;
    for (; j + 8 <= C; j += 8) rotate_columns16<T, true>(x + j, 8, stride, s, signs, y + j, C, most ? most + j : most);
    if (j < C) rotate_columns16<T, false>(x + j, C - j, stride, s, signs, y + j, C, most ? most + j : most);
}
INLINE f32x8 butterfly(f32x8 x, f32x8 swapped, i32x8 negative) {
    return swapped + bits<f32x8>(bits<i32x8>(x) ^ negative);
}
INLINE f32x8 h8(f32x8 x) {
    const int32_t m = (int32_t)0x80000000;
    x = butterfly(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3), i32x8{0, 0, 0, 0, m, m, m, m});
    x = butterfly(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5), i32x8{0, 0, m, m, 0, 0, m, m});
    return butterfly(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6), i32x8{0, m, 0, m, 0, m, 0, m});
}
INLINE i32x8 max_of_lanes(i32x8 x) {
    x = max8(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
    x = max8(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
    return max8(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6));
}
// Up to eight groups of 16 along a row, judged together; and the maximum of each.
template <class T>
INLINE i32x8 rotate_tile16(const T *x, int groups, f32x8 s0, f32x8 s1, const double *signs, bf16 *y) {
    i32x8 most = splat(0);
    for (int i = 0; i < 2 * groups; i++) most = max8(most, magnitude(load(x + 8 * i)));
    most = max_of_lanes(most);
    const f32x8 large = above(most);
    i32x8 exact = splat(-1), key[8];
    for (int i = 0; i < 2 * groups; i++) exact &= multiple(load(x + 8 * i), large);
    const f32x8 e = error_bound(most, any(~exact) ? splat(0) : splat(-1));
    const bool certain = e[0] == 0.0f;
    for (int i = groups; i < 8; i++) key[i] = splat(0);
    for (int i = 0; i < groups; i++) {
        f32x8 a = load(x + 16 * i) * s0 + 0.0f, b = load(x + 16 * i + 8) * s1 + 0.0f;  // -0 to 0
        f32x8 v0 = h8(a + b), v1 = h8(a - b);
        i32x8 out0 = nearest_bf16(v0), out1 = nearest_bf16(v1);
        store16(y + 16 * i, out0, out1);
        key[i] = max8(out0 & 0x7FFF, out1 & 0x7FFF) << 16;
        if (certain) continue;
        if (any(doubtful(v0, e) | doubtful(v1, e))) {
            rotate_group(x + 16 * i, 1, 16, signs, y + 16 * i, 1);
            key[i] = pattern_of(max8(magnitude_key(load(y + 16 * i)), magnitude_key(load(y + 16 * i + 8))));
        }
    }
    return max_of_each(key);
}
template <class T>
INLINE void rotate_along16(const T *x, int64_t C, const double *signs, bf16 *y, int32_t *most) {
    float s[16];
    for (int i = 0; i < 16; i++) s[i] = (float)signs[i];
    const f32x8 s0 = load(s), s1 = load(s + 8);
    int64_t j = 0;
    for (; j + 128 <= C; j += 128) {
        i32x8 key = rotate_tile16(x + j, 8, s0, s1, signs, y + j);
        if (most) memcpy(most + j / 16, &key, sizeof key);
    }
    if (j < C) {
        i32x8 key = rotate_tile16(x + j, (int)(C - j) / 16, s0, s1, signs, y + j);
        if (most) memcpy(most + j / 16, &key, (C - j) / 16 * 4);
    }
}
// `most`: (blocks) maxima of 1 x 16 or 16 x 1 blocks that are the groups; null if they are others.
template <class T>
INLINE void rotate(const T *x, int64_t C, int64_t stride, int64_t d, bool down, const double *signs, bf16 *y, int32_t *most) {
    if (d == 16 && down) return rotate_down16(x, C, stride, signs, y, most);
    if (d == 16) return rotate_along16(x, C, signs, y, most);
    for (int64_t j = 0; j < C; j += down ? 1 : d)
        rotate_group(x + j, down ? stride : 1, (int)d, signs, y + j, down ? C : 1);
}
static void rotate_f32(const float *x, int64_t C, int64_t stride, int64_t d, bool down, const double *signs, bf16 *y, int32_t *most) {
    rotate(x, C, stride, d, down, signs, y, most);
}
static void rotate_bf16(const bf16 *x, int64_t C, int64_t stride, int64_t d, bool down, const double *signs, bf16 *y, int32_t *most) {
    rotate(x, C, stride, d, down, signs, y, most);
}

