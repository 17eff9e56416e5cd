/* Depth reads on a CPU: each kernel makes one pass over the tokens, with a token's sources in the cache.
 *
 * Shapes: T tokens, n sealed sources, k open sources, S reads, d width (a multiple of 16). Arithmetic is fp32; vectors
 * come and go as fp32 or bf16. The algebra is that of two_phase.py, the meaning of every argument that of eager.py.
 * Every sum over tokens goes through one row per thread, static ranges and a sum in the order of the threads, so
 * results repeat bit for bit at a thread count. A kernel takes one struct, which its caller fills in one go (cpu.py has
 * the same fields in the same order; every field is eight bytes), and returns 0, or 1 if there is no memory for its
 * workspace.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

/* Elements of a vector: those of a register. Of a wider vector GCC keeps every value in memory. */
#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX__)
#define W 8
#else
#define W 4
#endif
typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * W), aligned(2), may_alias));

/* Sources and reads of one register block, and vectors of a row: what fits 32 registers, or 16. */
#ifdef __AVX512F__
#define BLOCK 4
#else
#define BLOCK 2
#endif
#define SPAN 2

#define INLINE static inline __attribute__((always_inline))
#define VEC(p) (*(vec *)(p))
#define CVEC(p) (*(const vec *)(p))

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* A matrix (T, d) with unit stride in d and `stride` bytes from row to row; no matrix if data is NULL. */
typedef struct { char *data; int64_t stride, bf16; } rows;

INLINE rows here(const rows *m, int64_t t) { return (rows){m->data + t * m->stride, 0, m->bf16}; }

#define NONE ((rows){NULL, 0, 0})

INLINE vec widened(hvec h) { return (vec)(__builtin_convertvector(h, uvec) << 16); }

INLINE hvec narrowed(vec x) {
#ifdef __AVX512BF16__
    return (hvec)_mm512_cvtneps_pbh((__m512)x);
#else
    uvec u = (uvec)x, nan = (uvec)(x != x);
    u = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16; /* round to nearest even */
    return __builtin_convertvector((u & ~nan) | (nan & 0x7fc0u), hvec);
#endif
}

/* Vectors from the i-th element of a row. */
INLINE vec get(const rows *r, int64_t i) {
    return r->bf16 ? widened(*(const hvec *)(r->data + 2 * i)) : CVEC(r->data + 4 * i);
}

INLINE void put(const rows *r, int64_t i, vec x) {
    if (r->bf16) *(hvec *)(r->data + 2 * i) = narrowed(x);
    else VEC(r->data + 4 * i) = x;
}

INLINE vec rounded(const rows *r, vec x) { return r->bf16 ? widened(narrowed(x)) : x; }

/* The row in fp32: itself, or a copy in `scratch`. */
INLINE const float *single(const rows *r, int64_t d, float *scratch) {
    if (!r->bf16) return (const float *)r->data;
    for (int64_t i = 0; i < d; i += W) VEC(scratch + i) = widened(*(const hvec *)(r->data + 2 * i));
    return scratch;
}

#if W == 16
INLINE float sum(vec x) {
    vec y = x + SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    y += SHUFFLE(y, y, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    return (y[0] + y[2]) + (y[1] + y[3]);
}

/* Sums of 16 vectors at once: that of s[4 q + k] in lane 4 k + q. */
INLINE vec sums(const vec *s) {
    vec r[8];
    for (int i = 0; i < 8; i++)
        r[i] = SHUFFLE(s[2 * i], s[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(s[2 * i], s[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        r[i] = SHUFFLE(r[2 * i], r[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               SHUFFLE(r[2 * i], r[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        r[i] = SHUFFLE(r[2 * i], r[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLE(r[2 * i], r[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return SHUFFLE(r[0], r[1], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           SHUFFLE(r[0], r[1], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}
#else
INLINE float sum(vec x) {
#if W == 8
    x += SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
    return (x[0] + x[2]) + (x[1] + x[3]);
}
#endif

/* out[j S + l] = the sum of s[4 l + j], for J times L of them. */
INLINE void sums_of(const int J, const int L, const vec *s, int64_t S, float *out) {
#if W == 16
    vec all = sums(s);
    for (int j = 0; j < J; j++)
        for (int l = 0; l < L; l++) out[j * S + l] = all[4 * j + l];
#else
    for (int j = 0; j < J; j++)
        for (int l = 0; l < L; l++) out[j * S + l] = sum(s[4 * l + j]);
#endif
}

/* exp(x) for x <= 0 or nan, to 2 units of roundoff; 0 where it would be denormal. */
INLINE vec exponential(vec x) {
    vec shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f; /* round(x / log 2), in the low bits too */
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    y *= (vec)(((uvec)shifted << 23) + 0x3f800000u);
    return (vec)((ivec)y & ~(ivec)(x < -87.0f));
}

/* p = softmax of s over its first axis, both (n, S), p with room for whole vectors; tops, totals: (S), of its logits.
 * Short loops over a few reads: vectorised by the compiler they would be slower. */
__attribute__((optimize("no-tree-vectorize")))
static void softmax(const float *s, float *p, int64_t n, int64_t S, float *tops, float *totals) {
    for (int64_t l = 0; l < S; l++) tops[l] = s[l], totals[l] = 0;
    for (int64_t j = 1; j < n; j++)
        for (int64_t l = 0; l < S; l++) tops[l] = s[j * S + l] > tops[l] ? s[j * S + l] : tops[l];
    for (int64_t j = 0; j < n; j++)
        for (int64_t l = 0; l < S; l++) p[j * S + l] = s[j * S + l] - tops[l];
    for (int64_t i = 0; i < n * S; i += W) VEC(p + i) = exponential(CVEC(p + i));
    for (int64_t j = 0; j < n; j++)
        for (int64_t l = 0; l < S; l++) totals[l] += p[j * S + l];
    float inverse[BLOCK];
    for (int64_t l = 0; l < S; l += BLOCK) {
        int64_t L = S - l < BLOCK ? S - l : BLOCK;
        for (int64_t m = 0; m < L; m++) inverse[m] = 1.0f / totals[l + m];
        for (int64_t j = 0; j < n; j++)
            for (int64_t m = 0; m < L; m++) p[j * S + l + m] *= inverse[m];
    }
}

static inline int64_t padded(int64_t floats) { return (floats + W - 1) / W * W; }

/* Of `left` sources or reads, those of the next register block: five make three and two. */
static inline int64_t block(int64_t left) {
    return left <= BLOCK ? left : left < 2 * BLOCK ? (left + 1) / 2 : BLOCK;
}

/* `f(J, L, ...)` with J and L known to the compiler. */
#define ROW(f, J, ...) \
    switch (L) { \
        case 1: f(J, 1, __VA_ARGS__); break; \
        case 2: f(J, 2, __VA_ARGS__); break; \
        case 3: if (BLOCK > 2) f(J, 3, __VA_ARGS__); break; \
        case 4: if (BLOCK > 2) f(J, 4, __VA_ARGS__); break; \
    }
#define IN_REGISTERS(f, ...) \
    switch (J) { \
        case 1: ROW(f, 1, __VA_ARGS__) break; \
        case 2: ROW(f, 2, __VA_ARGS__) break; \
        case 3: if (BLOCK > 2) ROW(f, 3, __VA_ARGS__) break; \
        case 4: if (BLOCK > 2) ROW(f, 4, __VA_ARGS__) break; \
    }

INLINE void dots_of(const int J, const int L, const float *const *v, const float *const *m, int64_t d, int64_t S,
                    float *out, float *squares) {
    vec s[16] = {{0}}, own[16] = {{0}};
    for (int64_t i = 0; i < d; i += W) {
        vec x[4];
        for (int j = 0; j < J; j++) x[j] = CVEC(v[j] + i);
        if (squares)
            for (int j = 0; j < J; j++) own[j] += x[j] * x[j];
        for (int l = 0; l < L; l++) {
            vec y = CVEC(m[l] + i);
            for (int j = 0; j < J; j++) s[4 * l + j] += x[j] * y;
        }
    }
    sums_of(J, L, s, S, out);
    if (squares) sums_of(J, 1, own, 1, squares);
}

static void dots(int64_t J, int64_t L, const float *const *v, const float *const *m, int64_t d, int64_t S, float *out) {
    IN_REGISTERS(dots_of, v, m, d, S, out, NULL)
}

static void dots_and_squares(int64_t J, int64_t L, const float *const *v, const float *const *m, int64_t d, int64_t S,
                             float *out, float *squares) {
    IN_REGISTERS(dots_of, v, m, d, S, out, squares)
}

/* Elements i .. i + N W of the mixtures sum_j p[j S + l] v_j, for L reads. */
INLINE void mixtures_at(const int L, const int N, const float *const *v, const float *p, int64_t n, int64_t S,
                        int64_t i, const rows *out) {
    vec a[4][2] = {{{0}}};
    for (int64_t j = 0; j < n; j++) {
        vec x[2];
        for (int m = 0; m < N; m++) x[m] = CVEC(v[j] + i + m * W);
        for (int l = 0; l < L; l++)
            for (int m = 0; m < N; m++) a[l][m] += x[m] * p[j * S + l];
    }
    for (int l = 0; l < L; l++)
        for (int m = 0; m < N; m++) put(&out[l], i + m * W, a[l][m]);
}

INLINE void mixtures_of(const int N, const int L, const float *const *v, const float *p, int64_t n, int64_t S,
                        int64_t d, const rows *out) {
    int64_t i = 0;
    for (; i + N * W <= d; i += N * W) mixtures_at(L, N, v, p, n, S, i, out);
    for (; i < d; i += W) mixtures_at(L, 1, v, p, n, S, i, out);
}

static void mixtures(int64_t L, const float *const *v, const float *p, int64_t n, int64_t S, int64_t d,
                     const rows *out) {
    ROW(mixtures_of, SPAN, v, p, n, S, d, out)
}

INLINE void range(int64_t T, int64_t *from, int64_t *to) {
    int64_t id = omp_get_thread_num(), count = omp_get_num_threads();
    *from = T * id / count;
    *to = T * (id + 1) / count;
}

/* Workspace of `floats` for each thread, a whole number of cache lines; NULL without memory. */
static float *workspace(int64_t threads, int64_t floats) { return aligned_alloc(64, threads * floats * sizeof(float)); }

/* The next `floats` of a thread's workspace. */
INLINE float *take(float **space, int64_t floats) {
    float *taken = *space;
    *space += padded(floats);
    return taken;
}

/* out = the sum of the threads' rows of `length`, which lie `apart`; shared among the threads, after a barrier. */
INLINE void sum_of_threads(const float *partial, int64_t apart, int64_t length, float *out) {
    int64_t from, to, count = omp_get_num_threads();
    range(length / W, &from, &to);
    for (int64_t i = from * W; i < to * W; i += W) {
        vec a = CVEC(partial + i);
        for (int64_t c = 1; c < count; c++) a += CVEC(partial + c * apart + i);
        VEC(out + i) = a;
    }
}

/* Phase 1. queries: (S, d); logits: (T, n, S); tops, totals: (S, T); inv_rms: (T, n). */
typedef struct {
    int64_t threads, T, n, S, d;
    double eps;
    const float *queries;
    float *logits, *tops, *totals, *inv_rms;
    rows lists[]; /* n sources, S outputs */
} sealed_call;

int attnres_read_sealed(const sealed_call *call) {
    int64_t T = call->T, n = call->n, S = call->S, d = call->d;
    const rows *sources = call->lists, *outputs = call->lists + n;
    float eps = call->eps, *logits = call->logits, *tops = call->tops, *totals = call->totals;
    float *inv_rms = call->inv_rms;
    const float *queries = call->queries;
    int threads = call->threads;
    int64_t each = padded(2 * n) + padded(2 * S) + padded(6 * S) + n * d + padded(n * S) + padded(n) + 2 * padded(S);
    float *space = workspace(threads, each);
    if (!space) return 1;
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        range(T, &from, &to);
        float *mine = space + omp_get_thread_num() * each;
        const float **v = (const float **)take(&mine, 2 * n), **q = (const float **)take(&mine, 2 * S);
        rows *out = (rows *)take(&mine, 6 * S);
        float *copies = take(&mine, n * d), *p = take(&mine, n * S), *squares = take(&mine, n);
        float *top = take(&mine, S), *total = take(&mine, S);
        memset(p, 0, padded(n * S) * sizeof(float));
        for (int64_t l = 0; l < S; l++) q[l] = queries + l * d;
        for (int64_t t = from; t < to; t++) {
            float *s = logits + t * n * S;
            for (int64_t j = 0; j < n; j++) {
                rows r = here(&sources[j], t);
                v[j] = single(&r, d, copies + j * d);
            }
            for (int64_t j = 0, J; j < n; j += J) {
                J = block(n - j);
                int64_t L = block(S);
                dots_and_squares(J, L, v + j, q, d, S, s + j * S, squares + j);
                for (int64_t l = L; l < S; l += L) dots(J, L = block(S - l), v + j, q + l, d, S, s + j * S + l);
            }
            for (int64_t j = 0; j < n; j++) {
                float r = inv_rms[t * n + j] = 1.0f / sqrtf(squares[j] / d + eps);
                for (int64_t l = 0; l < S; l++) s[j * S + l] *= r;
            }
            softmax(s, p, n, S, top, total);
            for (int64_t l = 0; l < S; l++) {
                tops[l * T + t] = top[l], totals[l * T + t] = total[l];
                out[l] = here(&outputs[l], t);
            }
            for (int64_t l = 0, L; l < S; l += L) mixtures(L = block(S - l), v, p + l, n, S, d, out + l);
        }
    }
    free(space);
    return 0;
}

/* Elements i .. i + N W of what J sources get from all reads, and of what the queries get from them:
 *     dv_j = carried_j + sum_l (p_jl dh_l + c_jl q_l) - along_j v_j,    dq_l += sum_j c_jl v_j. */
INLINE void spread_at(const int J, const int N, const int plain, const float *const *v, const float *const *dh,
                      const float *queries, const float *p, const float *c, const float *along, int64_t S, int64_t d,
                      int64_t i, const rows *carried, const rows *dsources, float *dq) {
    vec x[4][2], g[4][2];
    for (int j = 0; j < J; j++)
        for (int m = 0; m < N; m++) {
            int64_t e = i + m * W;
            x[j][m] = CVEC(v[j] + e);
            g[j][m] = (plain ? CVEC(carried[j].data + 4 * e) : get(&carried[j], e)) - x[j][m] * along[j];
        }
    for (int64_t l = 0; l < S; l++) {
        vec a[2], b[2], e[2];
        for (int m = 0; m < N; m++) {
            a[m] = CVEC(dh[l] + i + m * W);
            b[m] = CVEC(queries + l * d + i + m * W);
            e[m] = CVEC(dq + l * d + i + m * W);
        }
        for (int j = 0; j < J; j++)
            for (int m = 0; m < N; m++) {
                g[j][m] += a[m] * p[j * S + l] + b[m] * c[j * S + l];
                e[m] += x[j][m] * c[j * S + l];
            }
        for (int m = 0; m < N; m++) VEC(dq + l * d + i + m * W) = e[m];
    }
    for (int j = 0; j < J; j++)
        for (int m = 0; m < N; m++) {
            if (plain) VEC(dsources[j].data + 4 * (i + m * W)) = g[j][m];
            else put(&dsources[j], i + m * W, g[j][m]);
        }
}

INLINE void spread_of(const int J, const int plain, const float *const *v, const float *const *dh, const float *queries,
                      const float *p, const float *c, const float *along, int64_t S, int64_t d, const rows *carried,
                      const rows *dsources, float *dq) {
    int64_t i = 0;
    for (; i + SPAN * W <= d; i += SPAN * W)
        spread_at(J, SPAN, plain, v, dh, queries, p, c, along, S, d, i, carried, dsources, dq);
    for (; i < d; i += W) spread_at(J, 1, plain, v, dh, queries, p, c, along, S, d, i, carried, dsources, dq);
}

static void spread(int64_t J, int64_t plain, const float *const *v, const float *const *dh, const float *queries,
                   const float *p, const float *c, const float *along, int64_t S, int64_t d, const rows *carried,
                   const rows *dsources, float *dq) {
#define CASE(J, PLAIN) \
    case 2 * J + PLAIN: \
        if (J <= BLOCK) spread_of(J, PLAIN, v, dh, queries, p, c, along, S, d, carried, dsources, dq); \
        break;
    switch (2 * J + plain) {
        CASE(1, 0) CASE(1, 1) CASE(2, 0) CASE(2, 1) CASE(3, 0) CASE(3, 1) CASE(4, 0) CASE(4, 1)
    }
#undef CASE
}

/* Backward of phase 1: every source's gradient in one pass. inv_rms: (T, n); grads: S rows; dtop: S vectors (T), see
 * two_phase.py for their meaning; carried: n rows; dqueries: (S, d). */
typedef struct {
    int64_t threads, T, n, S, d;
    const float *queries, *inv_rms, *logits;
    float *dqueries;
    rows lists[]; /* n sources, S grads, n carried, n dsources; then the S pointers of dtop */
} sealed_backward_call;

int attnres_read_sealed_backward(const sealed_backward_call *call) {
    int64_t T = call->T, n = call->n, S = call->S, d = call->d;
    const rows *sources = call->lists, *grads = sources + n, *carried = grads + S, *dsources = carried + n;
    const float *const *dtop = (const float *const *)(dsources + n);
    const float *queries = call->queries, *inv_rms = call->inv_rms, *logits = call->logits;
    float *dqueries = call->dqueries;
    int threads = call->threads;
    int64_t each = 2 * padded(2 * (n + S)) + 2 * padded(6 * n) + (n + S + 1) * d + 2 * padded(n * S) + padded(n) +
                   2 * padded(S) + S * d;
    float *space = workspace(threads, each);
    if (!space) return 1;
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        range(T, &from, &to);
        float *mine = space + omp_get_thread_num() * each;
        float *dq = take(&mine, S * d), *zeros = take(&mine, d);
        const float **v = (const float **)take(&mine, 2 * n), **dh = (const float **)take(&mine, 2 * S);
        rows *earlier = (rows *)take(&mine, 6 * n), *out = (rows *)take(&mine, 6 * n);
        float *copies = take(&mine, (n + S) * d), *p = take(&mine, n * S), *c = take(&mine, n * S);
        float *along = take(&mine, n), *top = take(&mine, S), *total = take(&mine, S);
        memset(dq, 0, (S + 1) * d * sizeof(float));
        memset(p, 0, padded(n * S) * sizeof(float));
        for (int64_t t = from; t < to; t++) {
            const float *s = logits + t * n * S;
            for (int64_t l = 0; l < S; l++) {
                rows r = here(&grads[l], t);
                dh[l] = single(&r, d, copies + (n + l) * d);
            }
            for (int64_t j = 0; j < n; j++) {
                rows r = here(&sources[j], t);
                v[j] = single(&r, d, copies + j * d);
                earlier[j] = carried[j].data ? here(&carried[j], t) : (rows){(char *)zeros, 0, 0};
                out[j] = here(&dsources[j], t);
            }
            softmax(s, p, n, S, top, total);
            for (int64_t j = 0, J; j < n; j += J) {
                J = block(n - j);
                for (int64_t l = 0, L; l < S; l += L) dots(J, L = block(S - l), v + j, dh + l, d, S, c + j * S + l);
            }
            for (int64_t j = 0; j < n; j++) {
                float r = inv_rms[t * n + j], total = 0;
                for (int64_t l = 0; l < S; l++) {
                    float ds = p[j * S + l] * (c[j * S + l] + dtop[l][t]);
                    c[j * S + l] = ds * r;
                    total += ds * s[j * S + l];
                }
                along[j] = total * r * r / d;
            }
            for (int64_t j = 0, J; j < n; j += J) {
                J = block(n - j);
                int64_t plain = 1;
                for (int64_t m = j; m < j + J; m++) plain &= !earlier[m].bf16 & !out[m].bf16;
                spread(J, plain, v + j, dh, queries, p + j * S, c + j * S, along + j, S, d, earlier + j, out + j, dq);
            }
        }
#pragma omp barrier
        sum_of_threads(space, each, S * d, dqueries);
    }
    free(space);
    return 0;
}

/* Phase 2 and the norm. opens: k rows, the last with `added` in it: where `added` has data, that row is first made of
 * `before` and `added`. output: no data without sealed sources. kind: 0 no norm, 1 RMSNorm, 2 LayerNorm. h and x have
 * no data where they need no writing: h if it is `output` or not wanted, x if it is h. top, total: (T), of the sealed
 * sources' logits; rstd, sealed: (T); weights, scores, inv_rms: (T, k): each NULL where no backward needs it. */
typedef struct {
    int64_t threads, T, k, d, kind;
    double key_eps, eps;
    rows before, added, output, h, x, weight, bias;
    const float *query, *top, *total;
    float *rstd, *weights, *sealed, *scores, *inv_rms;
    rows opens[];
} merge_call;

/* Floats of workspace that one thread of a merge needs. */
INLINE int64_t merge_space(const merge_call *call) { return padded(6 * call->k) + padded(call->k + 1) + call->d; }

/* Tokens `from` to `to` - 1. */
static void merge_tokens(const merge_call *call, const rows *opens, int64_t from, int64_t to, float *mine) {
    int64_t k = call->k, d = call->d;
    const rows *before = &call->before, *added = &call->added, *output = &call->output, *h = &call->h, *x = &call->x;
    const rows *weight = &call->weight, *bias = &call->bias;
    const float *query = call->query, *top = call->top, *total = call->total;
    float *rstd = call->rstd, *weights = call->weights, *sealed = call->sealed, *scores = call->scores;
    float *inv_rms = call->inv_rms, key_eps = call->key_eps, eps = call->eps;
    int kind = call->kind;
    rows *v = (rows *)take(&mine, 6 * k);
    float *p = take(&mine, k + 1), *row = take(&mine, d);
    memset(p, 0, padded(k + 1) * sizeof(float));
    for (int64_t t = from; t < to; t++) {
        rows o = here(output, t), hidden = here(h, t), out = here(x, t);
        for (int64_t j = 0; j < k; j++) {
            v[j] = here(&opens[j], t);
            vec dot = {0}, square = {0};
            if (j == k - 1 && added->data) {
                rows a = here(before, t), b = here(added, t), made = v[j];
                for (int64_t i = 0; i < d; i += W) {
                    vec y = rounded(&made, get(&a, i) + get(&b, i));
                    put(&made, i, y);
                    dot += y * CVEC(query + i);
                    square += y * y;
                }
            } else {
                rows r = v[j];
                for (int64_t i = 0; i < d; i += W) {
                    vec y = get(&r, i);
                    dot += y * CVEC(query + i);
                    square += y * y;
                }
            }
            float r = 1.0f / sqrtf(sum(square) / d + key_eps);
            p[j] = sum(dot) * r;
            if (inv_rms) inv_rms[t * k + j] = r;
            if (scores) scores[t * k + j] = p[j];
        }
        float rest = 1;
        if (k) {
            float joint = o.data ? top[t] : p[0], whole = 0;
            for (int64_t j = 0; j < k; j++) joint = p[j] > joint ? p[j] : joint;
            for (int64_t j = 0; j < k; j++) p[j] -= joint;
            p[k] = o.data ? top[t] - joint : 0;
            for (int64_t i = 0; i <= k; i += W) VEC(p + i) = exponential(CVEC(p + i));
            p[k] = o.data ? p[k] * total[t] : 0;
            for (int64_t j = 0; j <= k; j++) whole += p[j];
            for (int64_t j = 0; j <= k; j++) p[j] /= whole;
            if (weights) memcpy(weights + t * k, p, k * sizeof(float));
            rest = p[k];
            if (sealed) sealed[t] = rest;
        }
        vec squares = {0}, mean = {0};
        for (int64_t i = 0; i < d; i += W) {
            vec y = {0};
            if (o.data) y = get(&o, i) * rest;
            for (int64_t j = 0; j < k; j++) y += get(&v[j], i) * p[j];
            if (hidden.data) put(&hidden, i, y);
            if (!kind) {
                if (out.data) put(&out, i, y);
                continue;
            }
            y = rounded(&hidden, y); /* to its dtype, written or not */
            VEC(row + i) = y;
            squares += y * y;
            mean += y;
        }
        if (!kind) continue;
        float centre = 0, power = sum(squares) / d;
        if (kind == 2) {
            centre = sum(mean) / d;
            vec spread = {0};
            for (int64_t i = 0; i < d; i += W) { vec y = CVEC(row + i) - centre; spread += y * y; }
            power = sum(spread) / d;
        }
        float scale = 1.0f / sqrtf(power + eps);
        if (rstd) rstd[t] = scale;
        for (int64_t i = 0; i < d; i += W) {
            vec y = (CVEC(row + i) - centre) * scale;
            if (weight->data) y *= get(weight, i);
            if (bias->data) y += get(bias, i);
            put(&out, i, y);
        }
    }
}

#define ON_STACK 4096 /* floats of workspace that need no allocation */

static int merge(const merge_call *call, const rows *opens) {
    int64_t each = merge_space(call), threads = call->threads;
    if (threads == 1 && each <= ON_STACK) { /* one token: no team of threads, no allocation */
        float space[ON_STACK] __attribute__((aligned(64)));
        merge_tokens(call, opens, 0, call->T, space);
        return 0;
    }
    float *space = workspace(threads, each);
    if (!space) return 1;
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        range(call->T, &from, &to);
        merge_tokens(call, opens, from, to, space + omp_get_thread_num() * each);
    }
    free(space);
    return 0;
}

int attnres_merge(const merge_call *call) { return merge(call, call->opens); }

/* Sources of one forward pass without gradients, (T, d) each; bank.py fills it in. queries: (reads, d); zeros: (d).
 * outputs, tops, totals: phase 1 of a group's S reads, S rows, (S, T) and (S, T). */
typedef struct {
    int64_t T, d, threads;
    double key_eps;
    const float *queries, *zeros;
    const rows *outputs;
    const float *tops, *totals;
    rows table[]; /* where each source lies now; rows of the bank's own memory stay where they are */
} bank;

/* What one read does. target, before: the row that the latest output goes into, and the row that it is added to, -1 if
 * it is the source itself. alone: the sum is made first, for the read has it not only as its last source. phase1: which
 * of the group's reads it is, or -1 for a read in one pass. keeps: the row that takes the read before its norm, or -1.
 * query: -1 for a read of one source, which has weight one. kind, eps, weight, bias: of the norm. */
typedef struct {
    int64_t kind;
    double eps;
    rows weight, bias;
    int64_t target, before, alone, phase1, keeps, query, k, slots[];
} step;

/* table[target] = table[before] + output. */
static void accumulate(bank *b, const step *s, rows output) {
    if (s->before < 0) {
        b->table[s->target] = output;
        return;
    }
    const rows *target = &b->table[s->target], *before = &b->table[s->before];
#pragma omp parallel num_threads(b->threads)
    {
        int64_t from, to;
        range(b->T, &from, &to);
        for (int64_t t = from; t < to; t++) {
            rows sum = here(target, t), one = here(before, t), other = here(&output, t);
            for (int64_t i = 0; i < b->d; i += W) put(&sum, i, get(&one, i) + get(&other, i));
        }
    }
}

INLINE rows whole(const bank *b, char *data, int64_t bf16) { return (rows){data, b->d * (bf16 ? 2 : 4), bf16}; }

/* Bring the latest output (T, d) into the bank; without one nothing is to do. */
void attnres_bank_write(bank *b, const step *s, char *output, int64_t bf16) {
    if (output) accumulate(b, s, whole(b, output, bf16));
}

/* One read and its norm into x (T, d), after the latest output came into the bank, if there is one that has not. */
int attnres_bank_read(bank *b, const step *s, char *output, int64_t output_bf16, char *x, int64_t x_bf16) {
    rows opens[s->k + 1], added = NONE;
    if (output) {
        added = whole(b, output, output_bf16);
        if (s->alone || s->before < 0) {
            accumulate(b, s, added);
            added = NONE;
        }
    }
    for (int64_t j = 0; j < s->k; j++) opens[j] = b->table[s->slots[j]];
    int64_t place = s->phase1;
    merge_call call = {
        .T = b->T, .k = s->k, .d = b->d, .threads = b->threads, .kind = s->kind, .key_eps = b->key_eps, .eps = s->eps,
        .before = added.data ? b->table[s->before] : NONE, .added = added,
        .output = place < 0 ? NONE : b->outputs[place],
        .h = s->keeps < 0 ? (rows){NULL, 0, b->table->bf16} : b->table[s->keeps], .x = whole(b, x, x_bf16),
        .weight = s->weight, .bias = s->bias, .query = s->query < 0 ? b->zeros : b->queries + s->query * b->d,
        .top = place < 0 ? NULL : b->tops + place * b->T, .total = place < 0 ? NULL : b->totals + place * b->T,
    };
    return merge(&call, opens);
}

/* Backward of the norm and of phase 2. sealed: (T), NULL without sealed sources; doutput: no data then. dquery,
 * dweight, dbias: (d), NULL where there is none. */
typedef struct {
    int64_t threads, T, k, d, kind;
    double eps;
    rows h, grad, doutput, weight;
    const float *query, *rstd, *weights, *sealed, *scores, *inv_rms;
    float *dtop, *dquery, *dweight, *dbias;
    rows lists[]; /* k opens, k carried, k dopens */
} merge_backward_call;

int attnres_merge_backward(const merge_backward_call *call) {
    int64_t T = call->T, k = call->k, d = call->d;
    const rows *opens = call->lists, *carried = opens + k, *dopens = carried + k;
    const rows *h = &call->h, *grad = &call->grad, *doutput = &call->doutput, *weight = &call->weight;
    const float *query = call->query, *rstd = call->rstd, *weights = call->weights, *sealed = call->sealed;
    const float *scores = call->scores, *inv_rms = call->inv_rms;
    float *dtop = call->dtop, *dquery = call->dquery, *dweight = call->dweight, *dbias = call->dbias;
    float eps = call->eps;
    int kind = call->kind, threads = call->threads;
    int64_t each = 4 * d + 3 * padded(6 * k) + 2 * padded(k);
    float *space = workspace(threads, each);
    if (!space) return 1;
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        range(T, &from, &to);
        float *mine = space + omp_get_thread_num() * each;
        float *of_query = take(&mine, d), *of_weight = take(&mine, d), *of_bias = take(&mine, d), *dh = take(&mine, d);
        rows *v = (rows *)take(&mine, 6 * k), *out = (rows *)take(&mine, 6 * k), *earlier = (rows *)take(&mine, 6 * k);
        float *along = take(&mine, k), *value = take(&mine, k);
        memset(of_query, 0, 3 * d * sizeof(float));
        for (int64_t t = from; t < to; t++) {
            rows g = here(grad, t), hidden = here(h, t), below = here(doutput, t);
            float delta;
            if (kind) {
                float scale = rstd[t], centre = 0;
                vec total = {0}, mean = {0};
                if (kind == 2) {
                    vec a = {0};
                    for (int64_t i = 0; i < d; i += W) a += get(&hidden, i);
                    centre = sum(a) / d;
                }
                for (int64_t i = 0; i < d; i += W) {
                    vec y = get(&g, i), hat = (get(&hidden, i) - centre) * scale, u = y * hat;
                    if (dbias) VEC(of_bias + i) += y;
                    if (weight->data) {
                        vec w = get(weight, i);
                        VEC(of_weight + i) += u;
                        u *= w;
                        y *= w;
                    }
                    total += u;
                    mean += y;
                    VEC(dh + i) = y;
                }
                float dot = sum(total), shift = kind == 2 ? sum(mean) / d : 0, along_hat = dot / d;
                for (int64_t i = 0; i < d; i += W) {
                    vec hat = (get(&hidden, i) - centre) * scale;
                    VEC(dh + i) = (CVEC(dh + i) - hat * along_hat - shift) * scale;
                }
                delta = dot * scale * scale * eps;
            } else {
                vec a = {0};
                for (int64_t i = 0; i < d; i += W) {
                    vec y = get(&g, i);
                    VEC(dh + i) = y;
                    a += y * get(&hidden, i);
                }
                delta = sum(a);
            }
            for (int64_t j = 0; j < k; j++) {
                rows y = v[j] = here(&opens[j], t);
                earlier[j] = here(&carried[j], t);
                out[j] = here(&dopens[j], t);
                vec a = {0};
                for (int64_t i = 0; i < d; i += W) a += CVEC(dh + i) * get(&y, i);
                float r = inv_rms[t * k + j];
                along[j] = weights[t * k + j] * (sum(a) - delta) * r;
                value[j] = along[j] * r * scores[t * k + j] / d;
            }
            float rest = !k ? 1 : sealed ? sealed[t] : 0;
            const float *p = weights + t * k;
            for (int64_t i = 0; i < d; i += W) {
                vec y = CVEC(dh + i);
                if (below.data) put(&below, i, y * rest);
                if (!k) continue;
                vec q = CVEC(query + i), dq = CVEC(of_query + i);
                for (int64_t j = 0; j < k; j++) {
                    vec x = get(&v[j], i), dv = y * p[j] + q * along[j] - x * value[j];
                    if (earlier[j].data) dv += get(&earlier[j], i);
                    dq += x * along[j];
                    put(&out[j], i, dv);
                }
                VEC(of_query + i) = dq;
            }
            if (dtop) dtop[t] = -rest * delta;
        }
#pragma omp barrier
        if (dquery) sum_of_threads(space, each, d, dquery);
        if (dweight) sum_of_threads(space + d, each, d, dweight);
        if (dbias) sum_of_threads(space + 2 * d, each, d, dbias);
    }
    free(space);
    return 0;
}

/* out = sum_j weights[:, j] v_j. weights: (T, n). */
typedef struct {
    int64_t threads, T, n, d;
    const float *weights;
    rows out, sources[];
} mix_call;

int attnres_mix(const mix_call *call) {
    int64_t T = call->T, n = call->n, d = call->d;
    const rows *sources = call->sources, *out = &call->out;
    const float *weights = call->weights;
    int threads = call->threads;
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        range(T, &from, &to);
        for (int64_t t = from; t < to; t++) {
            rows h = here(out, t);
            for (int64_t i = 0; i < d; i += W) {
                vec y = {0};
                for (int64_t j = 0; j < n; j++) {
                    rows r = here(&sources[j], t);
                    y += get(&r, i) * weights[t * n + j];
                }
                put(&h, i, y);
            }
        }
    }
    return 0;
}

#include "cpu_streams.c"
