// Included once for each instruction set, see cpu_kernels.cpp.

// ---- rotation: hadamard.rotate for sizes whose 1/sqrt(size) is exact -----------------------

// As in the definition: sums in FP64, rounded to FP32, then to BF16. H16 = H4 x H4, so sixteen
// values are a 4 x 4 matrix that is multiplied by H4 from both sides.

// Rows of a 4 x 4 matrix, or of four values in every lane, times H4: sums of steps 2, then 1.
INLINE void h4(f64x4 v[4]) {
    f64x4 a = v[0] + v[2], c = v[0] - v[2], b = v[1] + v[3], d = v[1] - v[3];
    v[0] = a + b, v[1] = a - b, v[2] = c + d, v[3] = c - d;
}
INLINE void transpose4(f64x4 v[4]) {
    f64x4 a = __builtin_shufflevector(v[0], v[1], 0, 4, 2, 6), b = __builtin_shufflevector(v[0], v[1], 1, 5, 3, 7);
    f64x4 c = __builtin_shufflevector(v[2], v[3], 0, 4, 2, 6), d = __builtin_shufflevector(v[2], v[3], 1, 5, 3, 7);
    v[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5), v[1] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
    v[2] = __builtin_shufflevector(a, c, 2, 3, 6, 7), v[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}
INLINE f32x8 joined(f64x4 low, f64x4 high) {  // to FP32; + 0 turns -0 into 0
    return both(narrow(low), narrow(high)) + 0.0f;
}

// One group of any size; values `stride` apart, results `y_stride`.
template <class T>
static __attribute__((noinline)) void rotate_group(const T *x, int64_t stride, int d, const double *signs, bf16 *y, int64_t y_stride) {
    double v[64];
    for (int i = 0; i < d; i++) v[i] = (double)value(x[i * stride]) * signs[i];
    for (int step = d / 2; step; step /= 2)
        for (int i = 0; i < d; i += 2 * step)
            for (int k = i; k < i + step; k++) {
                double a = v[k], b = v[k + step];
                v[k] = a + b;
                v[k + step] = a - b;
            }
    for (int i = 0; i < d; i++) y[i * y_stride] = (bf16)to_bf16(splat((float)v[i] + 0.0f))[0];
}

// Groups of 16 down TILE columns, copied here first: rows of a large matrix compete for the same
// lines of a cache.
const int TILE = 64;
INLINE void rotate_columns(float x[16][TILE], const double *signs) {
    for (int j = 0; j < TILE; j += 4) {
        f64x4 v[4][4];
        for (int i = 0; i < 16; i++) v[i % 4][i / 4] = wide(load4(&x[i][j])) * signs[i];
        for (int i = 0; i < 4; i++) h4(v[i]);
        for (int i = 0; i < 4; i++) {
            f64x4 w[4] = {v[0][i], v[1][i], v[2][i], v[3][i]};
            h4(w);
            for (int k = 0; k < 4; k++) store4(&x[4 * i + k][j], narrow(w[k]));
        }
    }
}
template <class T>
INLINE void rotate_down16(const T *x, int64_t C, int64_t stride, const double *signs, bf16 *y, int32_t *most) {
    float tile[16][TILE];
    for (int64_t j = 0; j < C; j += TILE) {
        const int64_t n = std::min<int64_t>(TILE, C - j);
        for (int i = 0; i < 16; i++) {
            const T *row = x + i * stride + j;
            for (int64_t k = 0; k < TILE; k += 8)
                store(&tile[i][k], k + 8 <= n ? load(row + k) : load_some(row + k, std::max<int64_t>(n - k, 0)));
        }
        rotate_columns(tile, signs);
        i16x16 key[TILE / 16];
        for (auto &one : key) one = i16x16{};
        for (int i = 0; i < 16; i++) {
            i16x16 row[TILE / 16];
            for (int k = 0; k < TILE / 16; k++) {
                const float *at = &tile[i][16 * k];
                i16x16 words = packed(to_bf16(load(at) + 0.0f), to_bf16(load(at + 8) + 0.0f));
                row[k] = in_order(words);
                key[k] = max16(key[k], word_key(row[k]));
            }
            if (n == TILE) memcpy(y + i * C + j, row, sizeof row);
            else memcpy(y + i * C + j, row, n * sizeof(bf16));
        }
        for (int k = 0; most && 16 * k < n; k++) {
            i32x8 found[2] = {pattern_of_word((i32x8)__builtin_shufflevector(i16x16{}, key[k], 0, 16, 0, 17, 0, 18, 0, 19, 0, 20, 0, 21, 0, 22, 0, 23)),
                              pattern_of_word((i32x8)__builtin_shufflevector(i16x16{}, key[k], 0, 24, 0, 25, 0, 26, 0, 27, 0, 28, 0, 29, 0, 30, 0, 31))};
            memcpy(most + j + 16 * k, found, std::min<int64_t>(16, n - 16 * k) * 4);
        }
    }
}

// Two groups of 16 along a row, at x and x + 16; the keys of their results, the first group's in
// the low half.
template <class T> INLINE i16x16 rotate_two(const T *x, const f64x4 signs[4], bf16 *y) {
    f64x4 v[2][4];
    for (int g = 0; g < 2; g++) {
        for (int i = 0; i < 4; i++) v[g][i] = wide(load4(x + 16 * g + 4 * i)) * signs[i];
        h4(v[g]);
        transpose4(v[g]);
        h4(v[g]);
    }
    // v[g][i] is column i of the results; as words they are put in order.
    i16x16 a = packed(to_bf16(joined(v[0][0], v[1][0])), to_bf16(joined(v[0][1], v[1][1])));
    i16x16 b = packed(to_bf16(joined(v[0][2], v[1][2])), to_bf16(joined(v[0][3], v[1][3])));
    a = __builtin_shuffle(a, i16x16{0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15});
    b = __builtin_shuffle(b, i16x16{0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15});
    i32x8 first = __builtin_shufflevector((i32x8)a, (i32x8)b, 0, 8, 1, 9, 4, 12, 5, 13);
    i32x8 second = __builtin_shufflevector((i32x8)a, (i32x8)b, 2, 10, 3, 11, 6, 14, 7, 15);
    i32x8 low = __builtin_shufflevector(first, second, 0, 1, 2, 3, 8, 9, 10, 11);
    i32x8 high = __builtin_shufflevector(first, second, 4, 5, 6, 7, 12, 13, 14, 15);
    memcpy(y, &low, sizeof low);
    memcpy(y + 16, &high, sizeof high);
    return max16(word_key(a), word_key(b));
}
template <class T>
INLINE void rotate_along16(const T *x, int64_t C, const double *signs, bf16 *y, int32_t *most) {
    const f64x4 s[4] = {load4(signs), load4(signs + 4), load4(signs + 8), load4(signs + 12)};
    int64_t j = 0;
    for (; j + 128 <= C; j += 128) {
        i32x8 key[4];  // words in pairs; their order is that of the keys
        for (int i = 0; i < 4; i++) {
            i16x16 one = rotate_two(x + j + 32 * i, s, y + j + 32 * i);
            key[i] = (i32x8)max16(one, (i16x16)((u32x8)one << 16));
        }
        i32x8 all = pattern_of_word(max_of_halves(key));
        if (most) memcpy(most + j / 16, &all, sizeof all);
    }
    for (; j < C; j += 16) {
        rotate_group(x + j, 1, 16, signs, y + j, 1);
        if (most) most[j / 16] = segment_key(y + j, 16) - NAN_OFFSET;
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
