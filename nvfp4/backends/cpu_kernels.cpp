// Quantise, decode and finish, bit for bit as nvfp4/numerics; called from cpu.py through pointers.
//
// Everything works on a matrix as it lies in memory, R rows of C values. A block is br x bc values
// there: 1 x 16 along the rows, 16 x 1 down the columns (the transposed operand, without a copy),
// 16 x 16, and so on. Random bits belong to places in memory order too.
//
// Eight values at a time in GCC/Clang vectors, which every CPU has or the compiler takes apart. GCC
// on x86-64 compiles all of it three times, for SSE2, AVX2 and AVX-512, and the machine chooses when
// the library is first called. Compile with -ffp-contract=off and without fast-math: every rounding
// counts. Threads are those of torch (its OpenMP, found in the process), else plain ones.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <thread>
#include <vector>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

// What cpu.py hands over. Pointers that a function does not use may be null.
struct Job {
    const void *x;              // (R, C) float32 or bfloat16
    int64_t R, C, row_stride;   // stride in elements
    int64_t br, bc;             // block shape in memory
    int64_t x_is_bf16, threads;
    int64_t format;             // 0 e2m1, 1 e4m3, 2 e5m2
    int64_t scale_format;       // 0 e4m3, 1 ue5m3
    int64_t scale_rule;         // 0 b * fl(S * inverse_target), 1 fl(b / 6) * S
    int64_t hadamard, hadamard_down;  // group size (0, 4, 16 or 64); 1: groups down the columns
    float limit, inverse_target;
    const double *signs;        // (hadamard,) signs / sqrt(hadamard)
    bf16 *rotated;              // (R, C) out, then read in place of x
    float *block_amax;          // (blocks)
    float *amax;                // () of the tensor; in if given_amax, else out
    int64_t given_amax;
    uint8_t *block_scale;       // (blocks) codes
    float *encode_scale;        // (blocks)
    uint8_t *codes;             // (R, C)
    const uint8_t *random_bytes;  // (R, C), or null
    const int64_t *sample, *position;  // (R,) of a random address, or null
    int64_t key0, key1, tag, feature_offset;
    const float *scale;         // (blocks) decode scales, or null: those of block_scale by
    const float *scale_table;   // (256,) their values, times fl(. * amax) * inverse_target if amax
    float *out;                 // (R, C)
};

// ---- threads -------------------------------------------------------------------------------

template <class Body> struct Shares {
    const Body *body;
    int64_t n, threads;
    void run(int64_t i) const { (*body)(n * i / threads, n * (i + 1) / threads); }
};
template <class Body> static void omp_entry(void *data) {
    static auto number = (int (*)())dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    static auto count = (int (*)())dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    auto *shares = (Shares<Body> *)data;
    for (int64_t i = number(); i < shares->threads; i += count()) shares->run(i);
}
// body(begin, end) over [0, n) in `threads` equal shares.
template <class Body> static void parallel(int64_t n, int64_t threads, const Body &body) {
    threads = std::max<int64_t>(1, std::min(threads, n));
    if (threads == 1) return body(0, n);
    Shares<Body> shares{&body, n, threads};
    typedef void (*Fork)(void (*)(void *), void *, unsigned, unsigned);
    static auto fork = (Fork)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    if (fork) return fork(omp_entry<Body>, &shares, (unsigned)threads, 0);
    std::vector<std::thread> pool;
    for (int64_t i = 1; i < threads; i++) pool.emplace_back([&shares, i] { shares.run(i); });
    shares.run(0);
    for (auto &one : pool) one.join();
}

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- one set of kernels for each instruction set ---------------------------------------------

struct Kernels {
    void (*amax)(const Job *), (*scales)(const Job *), (*decode)(const Job *);
    int64_t (*encode)(const Job *), (*quantize)(const Job *), (*philox)(const Job *);
    void (*finish)(const float *, int64_t, const float *, int64_t, const float *, void *, int64_t, int64_t);
    void (*promote)(const float *, int64_t, int64_t, const float *, int64_t, const float *, int64_t, float *, int64_t);
    int64_t (*finite)(const void *, int64_t, int64_t);
};

// g++ does not tell the preprocessor what `#pragma GCC target` allows, hence ISA.
#ifdef __AVX2__
#define ISA 1
#else
#define ISA 0
#endif
namespace plain {
#include "cpu_lanes.h"
#include "cpu_rotation.h"
#include "cpu_codes.h"
#include "cpu_loops.h"
}
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__AVX2__)
#define SEVERAL 1
#pragma GCC push_options
#pragma GCC target("avx2")
#undef ISA
#define ISA 1
namespace avx2 {
#include "cpu_lanes.h"
#include "cpu_rotation.h"
#include "cpu_codes.h"
#include "cpu_loops.h"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq")
#undef ISA
#define ISA 2
namespace avx512 {
#include "cpu_lanes.h"
#include "cpu_rotation.h"
#include "cpu_codes.h"
#include "cpu_loops.h"
}
#pragma GCC pop_options
#endif

static int chosen = -1;  // 0 plain, 1 avx2, 2 avx512
static const Kernels &kernels() {
#ifdef SEVERAL
    if (chosen < 0) {
        bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
        chosen = wide ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0;
    }
    return chosen == 2 ? avx512::KERNELS : chosen == 1 ? avx2::KERNELS : plain::KERNELS;
#else
    chosen = 0;
    return plain::KERNELS;
#endif
}

#define QUOTED(x) #x
#define NAME(x) QUOTED(x)
extern "C" {
const char *nvfp4_sources() { return NAME(SOURCES); }  // cpu_library.py refuses another library
int64_t nvfp4_omp() { return dlsym(RTLD_DEFAULT, "GOMP_parallel") != nullptr; }
const char *nvfp4_instructions() {
    kernels();
    return chosen == 2 ? "AVX-512" : chosen == 1 ? "AVX2" : "baseline";
}
// Take a set by number (tests compare them all); 0 if this machine or compiler has none such.
int64_t nvfp4_choose(int64_t set) {
    chosen = -1;
    kernels();
    if (set > chosen) return 0;
    if (set >= 0) chosen = (int)set;
    return 1;
}
void nvfp4_amax(const Job *job) { kernels().amax(job); }
void nvfp4_scales(const Job *job) { kernels().scales(job); }
// Those that take an address give 0 if a part of it does not fit its 32 bits.
int64_t nvfp4_encode(const Job *job) { return kernels().encode(job); }
int64_t nvfp4_quantize(const Job *job) { return kernels().quantize(job); }
int64_t nvfp4_philox(const Job *job) { return kernels().philox(job); }
void nvfp4_decode(const Job *job) { kernels().decode(job); }
void nvfp4_finish(const float *y, int64_t n, const float *factors, int64_t count, const float *add, void *out, int64_t out_is_bf16, int64_t threads) {
    kernels().finish(y, n, factors, count, add, out, out_is_bf16, threads);
}
void nvfp4_promote(const float *p, int64_t M, int64_t N, const float *scale_a, int64_t stride_a, const float *scale_b, int64_t exact, float *total, int64_t threads) {
    kernels().promote(p, M, N, scale_a, stride_a, scale_b, exact, total, threads);
}
int64_t nvfp4_finite(const void *x, int64_t n, int64_t x_is_bf16) { return kernels().finite(x, n, x_is_bf16); }
}
