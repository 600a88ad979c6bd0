// Included once for each instruction set, see cpu_kernels.cpp.

// Rotate where asked, then the maximum of every block, and of the tensor.
static void amax_all(const Job *job) {
    const int64_t C = job->C, blocks = ceil_div(C, job->bc);
    const int64_t band = std::max<int64_t>(job->br, job->hadamard_down ? job->hadamard : 1);
    const int64_t bands = ceil_div(job->R, band);
    const bool down = job->hadamard_down;
    const bool groups_are_blocks = job->hadamard == 16 && (down ? job->br == 16 && job->bc == 1 : job->br == 1 && job->bc == 16);
    auto *most = (int32_t *)job->block_amax;
    parallel(bands, job->threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            int64_t first = i * band, last = std::min(first + band, job->R);
            memset(most + first / job->br * blocks, 0, ceil_div(last - first, job->br) * blocks * 4);
            for (int64_t r = first; job->hadamard && r < last; r += down ? job->hadamard : 1) {
                bf16 *y = job->rotated + r * C;
                int32_t *row = groups_are_blocks ? most + r / job->br * blocks : nullptr;
                if (job->x_is_bf16)
                    rotate_bf16((const bf16 *)job->x + r * job->row_stride, C, job->row_stride, job->hadamard, down, job->signs, y, row);
                else
                    rotate_f32((const float *)job->x + r * job->row_stride, C, job->row_stride, job->hadamard, down, job->signs, y, row);
            }
            if (groups_are_blocks) continue;
            for (int64_t r = first; r < last; r++) {
                int32_t *row = most + r / job->br * blocks;
                if (job->hadamard) amax_row_bf16(job->rotated + r * C, C, job->bc, row);
                else if (job->x_is_bf16) amax_row_bf16((const bf16 *)job->x + r * job->row_stride, C, job->bc, row);
                else amax_row_f32((const float *)job->x + r * job->row_stride, C, job->bc, row);
            }
        }
    });
    if (job->amax && !job->given_amax)
        *job->amax = bits<float>(largest(most, ceil_div(job->R, job->br) * blocks));
}

// Block scales and encode scales under the amax of the tensor.
static void scales_all(const Job *job) {
    float S = tensor_encode_scale(*job->amax, job->limit);
    int64_t blocks = ceil_div(job->R, job->br) * ceil_div(job->C, job->bc);
    parallel(blocks, job->threads, [&](int64_t begin, int64_t end) {
        (job->scale_format ? scales_ue5m3 : scales_e4m3)(job, S, begin, end);
    });
}

static bool address_fits(const Job *job) {
    for (int64_t r = 0; job->sample && r < job->R; r++)
        if ((job->sample[r] | job->position[r]) >> 32) return false;
    return true;
}
// Codes under given encode scales, rounded to nearest or with random bytes.
static int64_t encode_all(const Job *job) {
    if (!address_fits(job)) return 0;
    const int64_t C = job->C, blocks = ceil_div(C, job->bc);
    const bool half = job->hadamard || job->x_is_bf16;
    const int64_t stride = (job->hadamard ? C : job->row_stride) * (half ? 2 : 4);
    const char *x = job->hadamard ? (const char *)job->rotated : (const char *)job->x;
    const EncodeRow encode_one = ENCODERS[job->format][half];
    parallel(job->R, job->threads, [&](int64_t begin, int64_t end) {
        std::vector<uint8_t> bytes(job->sample ? (C / 16 + 2) * 16 : 0);
        for (int64_t r = begin; r < end; r++) {
            const uint8_t *random = job->random_bytes ? job->random_bytes + r * C : nullptr;
            if (job->sample) {
                philox_row(*job, r, bytes.data());
                random = bytes.data() + job->feature_offset % 16;
            }
            encode_one(x + r * stride, C, job->bc, job->encode_scale + r / job->br * blocks, random, job->codes + r * C);
        }
    });
    return 1;
}
static int64_t quantize_all(const Job *job) {
    amax_all(job);
    scales_all(job);
    return encode_all(job);
}
// code * scale, float32.
static void decode_all(const Job *job) {
    const int64_t C = job->C, blocks = ceil_div(C, job->bc);
    const DecodeRow decode_one = DECODERS[job->format];
    parallel(job->R, job->threads, [&](int64_t begin, int64_t end) {
        std::vector<float> decoded(job->scale ? 0 : blocks + 8);
        int64_t row_of_blocks = -1;
        for (int64_t r = begin; r < end; r++) {
            const float *scale = job->scale + r / job->br * blocks;
            if (!job->scale) {
                if (row_of_blocks != r / job->br) {
                    row_of_blocks = r / job->br;
                    const uint8_t *code = job->block_scale + row_of_blocks * blocks;
                    for (int64_t b = 0; b < blocks; b++) decoded[b] = job->scale_table[code[b]];
                    for (int64_t b = 0; job->amax && b < blocks; b++)
                        decoded[b] = decoded[b] * *job->amax * job->inverse_target;
                }
                scale = decoded.data();
            }
            decode_one(job->codes + r * C, C, job->bc, scale, job->out + r * C);
        }
    });
}
// The random bytes themselves (R, C), into `codes`.
static int64_t philox_all(const Job *job) {
    if (!address_fits(job)) return 0;
    parallel(job->R, job->threads, [&](int64_t begin, int64_t end) {
        std::vector<uint8_t> bytes((job->C / 16 + 2) * 16);
        for (int64_t r = begin; r < end; r++) {
            philox_row(*job, r, bytes.data());
            memcpy(job->codes + r * job->C, bytes.data() + job->feature_offset % 16, job->C);
        }
    });
    return 1;
}

// out = y * factors[0] * factors[1] ... + add, each product and the sum rounded to FP32; then to
// BF16 if asked. out may be y.
static void finish_all(const float *y, int64_t n, const float *factors, int64_t count, const float *add, void *out, int64_t out_is_bf16, int64_t threads) {
    parallel(ceil_div(n, 4096), threads, [&](int64_t begin, int64_t end) {
        int64_t first = begin * 4096, size = std::min(end * 4096, n) - first;
        const float *more = add ? add + first : nullptr;
        if (out_is_bf16) finish_bf16(y + first, size, factors, count, more, (bf16 *)out + first);
        else finish_f32(y + first, size, factors, count, more, (float *)out + first);
    });
}

// One step of numerics.gemm.fp8_blocks: total (M, N) += p scaled by rows (M,) and columns (N,).
static void promote_all(const float *p, int64_t M, int64_t N, const float *scale_a, int64_t stride_a, const float *scale_b, int64_t exact, float *total, int64_t threads) {
    parallel(M, threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++)
            promote_row(p + r * N, N, scale_a[r * stride_a], scale_b, exact, total + r * N);
    });
}

// 1 if all n values are finite.
static int64_t finite_all(const void *x, int64_t n, int64_t x_is_bf16) {
    return x_is_bf16 ? finite_bf16((const bf16 *)x, n) : finite_f32((const float *)x, n);
}

static const Kernels KERNELS = {amax_all, scales_all, decode_all, encode_all, quantize_all,
                                philox_all, finish_all, promote_all, finite_all};
