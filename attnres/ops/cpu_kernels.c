/* Depth reads on a CPU: each kernel makes one pass over the tokens, with a token's sources in the cache.
 *
 * Shapes: T tokens, n sealed sources, k open sources, S reads, d width (a multiple of 16). Arithmetic is fp32; vectors
 * come and go as fp32 or bf16. The algebra is that of two_phase.py, which these kernels must agree with. Every sum over
 * tokens goes through one buffer per thread and static ranges, so results repeat bit for bit at a thread count.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <omp.h>

#define W 16
typedef float vec __attribute__((vector_size(4 * W), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(4 * W), aligned(4)));
typedef uint16_t hvec __attribute__((vector_size(2 * W), aligned(2)));

/* A matrix (rows, d) with unit stride in d. */
typedef struct { void *data; int64_t stride; int32_t bf16; } rows;

static inline vec load(const rows *m, int64_t t, int64_t i) {
    if (!m->bf16) return *(const vec *)((const float *)m->data + t * m->stride + i);
    hvec h = *(const hvec *)((const uint16_t *)m->data + t * m->stride + i);
    return (vec)(__builtin_convertvector(h, uvec) << 16);
}

static inline void store(const rows *m, int64_t t, int64_t i, vec x) {
    if (!m->bf16) { *(vec *)((float *)m->data + t * m->stride + i) = x; return; }
    uvec u = (uvec)x, nan = (uvec)(x != x);
    u = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16; /* round to nearest even */
    u = (u & ~nan) | (nan & 0x7fc0u);
    *(hvec *)((uint16_t *)m->data + t * m->stride + i) = __builtin_convertvector(u, hvec);
}

static inline float sum(vec x) {
    float a[W];
    memcpy(a, &x, sizeof a);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
}

static inline void range(int64_t T, int64_t *from, int64_t *to) {
    int64_t id = omp_get_thread_num(), count = omp_get_num_threads();
    *from = T * id / count;
    *to = T * (id + 1) / count;
}

/* out[l] = <v, m_l> for S rows m_l of length d, four at a time. */
static inline void dots(const float *v, const float *m, int64_t S, int64_t d, float *out) {
    int64_t l = 0;
    for (; l + 4 <= S; l += 4) {
        const float *a = m + l * d, *b = a + d, *c = b + d, *e = c + d;
        vec s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
        for (int64_t i = 0; i < d; i += W) {
            vec x = *(const vec *)(v + i);
            s0 += x * *(const vec *)(a + i);
            s1 += x * *(const vec *)(b + i);
            s2 += x * *(const vec *)(c + i);
            s3 += x * *(const vec *)(e + i);
        }
        out[l] = sum(s0); out[l + 1] = sum(s1); out[l + 2] = sum(s2); out[l + 3] = sum(s3);
    }
    for (; l < S; l++) {
        vec s = {0};
        for (int64_t i = 0; i < d; i += W) s += *(const vec *)(v + i) * *(const vec *)(m + l * d + i);
        out[l] = sum(s);
    }
}

/* p = softmax of s over its first axis, both (n, S); its largest logit and sum too, if wanted. */
static inline void softmax(const float *s, float *p, int64_t n, int64_t S, float *tops, float *totals, int64_t stride) {
    for (int64_t l = 0; l < S; l++) {
        float top = s[l], total = 0;
        for (int64_t j = 1; j < n; j++) top = fmaxf(top, s[j * S + l]);
        for (int64_t j = 0; j < n; j++) total += (p[j * S + l] = expf(s[j * S + l] - top));
        for (int64_t j = 0; j < n; j++) p[j * S + l] /= total;
        if (tops) {
            tops[l * stride] = top;
            totals[l * stride] = total;
        }
    }
}

/* Phase 1. values: workspace (threads, n, d); weights: workspace (threads, n, S). */
void attnres_read_sealed(int64_t T, int64_t n, int64_t S, int64_t d, const rows *sources, float *const *inv_rms,
                         const float *queries, float *logits, float *tops, float *totals, float *const *outputs,
                         float *values, float *weights, int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        range(T, &from, &to);
        float *v = values + omp_get_thread_num() * n * d, *p = weights + omp_get_thread_num() * n * S;
        for (int64_t t = from; t < to; t++) {
            float *s = logits + t * n * S;
            for (int64_t j = 0; j < n; j++) {
                for (int64_t i = 0; i < d; i += W) *(vec *)(v + j * d + i) = load(&sources[j], t, i);
                dots(v + j * d, queries, S, d, s + j * S);
                for (int64_t l = 0; l < S; l++) s[j * S + l] *= inv_rms[j][t];
            }
            softmax(s, p, n, S, tops + t, totals + t, T);
            for (int64_t i = 0; i < d; i += W) {
                int64_t l = 0;
                for (; l + 4 <= S; l += 4) {
                    vec a = {0}, b = {0}, c = {0}, e = {0};
                    for (int64_t j = 0; j < n; j++) {
                        vec x = *(vec *)(v + j * d + i);
                        const float *w = p + j * S + l;
                        a += x * w[0]; b += x * w[1]; c += x * w[2]; e += x * w[3];
                    }
                    int64_t at = t * d + i;
                    *(vec *)(outputs[l] + at) = a; *(vec *)(outputs[l + 1] + at) = b;
                    *(vec *)(outputs[l + 2] + at) = c; *(vec *)(outputs[l + 3] + at) = e;
                }
                for (; l < S; l++) {
                    vec a = {0};
                    for (int64_t j = 0; j < n; j++) a += *(vec *)(v + j * d + i) * p[j * S + l];
                    *(vec *)(outputs[l] + t * d + i) = a;
                }
            }
        }
    }
}

/* Backward of phase 1: every source's gradient in one pass. grads: S rows; dtop: (S, T), see two_phase.py for its
 * meaning; dqueries: (threads, S, d), zeroed; workspace: (threads, (n + S) d + 2 n S + n). */
void attnres_read_sealed_backward(int64_t T, int64_t n, int64_t S, int64_t d, const rows *sources, float *const *inv_rms,
                                  const float *queries, const float *logits, const rows *grads,
                                  float *const *dtop, const rows *dsources, float *dqueries, float *workspace,
                                  int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to, id = omp_get_thread_num();
        range(T, &from, &to);
        float *v = workspace + id * ((n + S) * d + 2 * n * S + n), *dh = v + n * d;
        float *p = dh + S * d, *c = p + n * S, *along = c + n * S;
        float *dq = dqueries + id * S * d;
        for (int64_t t = from; t < to; t++) {
            for (int64_t l = 0; l < S; l++)
                for (int64_t i = 0; i < d; i += W) *(vec *)(dh + l * d + i) = load(&grads[l], t, i);
            const float *s = logits + t * n * S;
            softmax(s, p, n, S, NULL, NULL, 0);
            for (int64_t j = 0; j < n; j++) {
                for (int64_t i = 0; i < d; i += W) *(vec *)(v + j * d + i) = load(&sources[j], t, i);
                dots(v + j * d, dh, S, d, c + j * S);
                float r = inv_rms[j][t], total = 0;
                for (int64_t l = 0; l < S; l++) {
                    float ds = p[j * S + l] * (c[j * S + l] + dtop[l][t]);
                    c[j * S + l] = ds * r;
                    total += ds * s[j * S + l];
                }
                along[j] = total * r * r / d;
            }
            for (int64_t i = 0; i < d; i += W) {
                for (int64_t j = 0; j < n; j++) {
                    vec g = *(vec *)(v + j * d + i) * -along[j];
                    for (int64_t l = 0; l < S; l++)
                        g += *(vec *)(dh + l * d + i) * p[j * S + l] + *(const vec *)(queries + l * d + i) * c[j * S + l];
                    store(&dsources[j], t, i, g);
                }
                for (int64_t l = 0; l < S; l++) {
                    vec a = *(vec *)(dq + l * d + i);
                    for (int64_t j = 0; j < n; j++) a += *(vec *)(v + j * d + i) * c[j * S + l];
                    *(vec *)(dq + l * d + i) = a;
                }
            }
        }
    }
}

/* Phase 2 and the norm. kind: 0 no norm (x is not written), 1 RMSNorm, 2 LayerNorm. With k = 0, h is `output` and is
 * not written. top, total: (T), of the sealed sources' logits. rstd, sealed: (T); weights, scores: (T, k);
 * workspace: (threads, (k + 1) d). */
void attnres_merge(int64_t T, int64_t k, int64_t d, const rows *opens, float *const *inv_rms, const float *query,
                   const rows *output, const float *top, const float *total, int kind, float eps, const float *weight,
                   const float *bias, const rows *h, const rows *x, float *rstd, float *weights, float *sealed,
                   float *scores, float *workspace, int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        range(T, &from, &to);
        float *v = workspace + omp_get_thread_num() * (k + 1) * d, *row = v + k * d;
        for (int64_t t = from; t < to; t++) {
            float *p = k ? weights + t * k : NULL, rest = 1;
            if (k) {
                float joint = top[t], whole;
                for (int64_t j = 0; j < k; j++) {
                    vec a = {0};
                    for (int64_t i = 0; i < d; i += W) {
                        vec y = load(&opens[j], t, i);
                        *(vec *)(v + j * d + i) = y;
                        a += y * *(const vec *)(query + i);
                    }
                    float s = sum(a) * inv_rms[j][t];
                    scores[t * k + j] = s;
                    joint = fmaxf(joint, s);
                }
                rest = whole = total[t] * expf(top[t] - joint);
                for (int64_t j = 0; j < k; j++) whole += (p[j] = expf(scores[t * k + j] - joint));
                for (int64_t j = 0; j < k; j++) p[j] /= whole;
                sealed[t] = rest /= whole;
            }
            vec squares = {0}, mean = {0};
            for (int64_t i = 0; i < d; i += W) {
                vec y = load(output, t, i);
                if (k) {
                    y *= rest;
                    for (int64_t j = 0; j < k; j++) y += *(vec *)(v + j * d + i) * p[j];
                    store(h, t, i, y);
                    if (h->bf16) y = load(h, t, i);
                }
                *(vec *)(row + i) = y;
                squares += y * y;
                mean += y;
            }
            if (!kind) continue;
            float centre = 0, power = sum(squares) / d;
            if (kind == 2) {
                centre = sum(mean) / d;
                vec spread = {0};
                for (int64_t i = 0; i < d; i += W) { vec y = *(vec *)(row + i) - centre; spread += y * y; }
                power = sum(spread) / d;
            }
            float scale = 1.0f / sqrtf(power + eps);
            rstd[t] = scale;
            for (int64_t i = 0; i < d; i += W) {
                vec y = (*(vec *)(row + i) - centre) * scale;
                if (weight) y *= *(const vec *)(weight + i);
                if (bias) y += *(const vec *)(bias + i);
                store(x, t, i, y);
            }
        }
    }
}

/* Backward of the norm and of phase 2. doutput, dtop: for phase 1 (dtop NULL: a norm alone). dvectors: (threads, 3, d),
 * zeroed: dquery, dweight, dbias. workspace: (threads, d). */
void attnres_merge_backward(int64_t T, int64_t k, int64_t d, const rows *opens, float *const *inv_rms,
                            const float *query, const float *weights, const float *sealed, const float *scores,
                            int kind, float eps, const float *weight, const rows *h, const float *rstd,
                            const rows *grad, const rows *doutput, float *dtop, const rows *dopens, float *dvectors, float *workspace,
                            int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to, id = omp_get_thread_num();
        range(T, &from, &to);
        float *dh = workspace + id * d, *dquery = dvectors + id * 3 * d, *dweight = dquery + d, *dbias = dweight + d;
        for (int64_t t = from; t < to; t++) {
            float delta;
            if (kind) {
                float scale = rstd[t], centre = 0;
                vec total = {0}, mean = {0};
                if (kind == 2) {
                    vec a = {0};
                    for (int64_t i = 0; i < d; i += W) a += load(h, t, i);
                    centre = sum(a) / d;
                }
                for (int64_t i = 0; i < d; i += W) {
                    vec g = load(grad, t, i), hat = (load(h, t, i) - centre) * scale, u = g * hat;
                    *(vec *)(dweight + i) += u;
                    *(vec *)(dbias + i) += g;
                    if (weight) { vec w = *(const vec *)(weight + i); u *= w; g *= w; }
                    total += u;
                    mean += g;
                    *(vec *)(dh + i) = g;
                }
                float dot = sum(total), shift = kind == 2 ? sum(mean) / d : 0;
                for (int64_t i = 0; i < d; i += W) {
                    vec hat = (load(h, t, i) - centre) * scale;
                    *(vec *)(dh + i) = (*(vec *)(dh + i) - hat * (dot / d) - shift) * scale;
                }
                delta = dot * scale * scale * eps;
            } else {
                vec a = {0};
                for (int64_t i = 0; i < d; i += W) {
                    vec g = load(grad, t, i);
                    *(vec *)(dh + i) = g;
                    a += g * load(h, t, i);
                }
                delta = sum(a);
            }
            float rest = k ? sealed[t] : 1;
            for (int64_t j = 0; j < k; j++) {
                float p = weights[t * k + j], r = inv_rms[j][t];
                vec a = {0};
                for (int64_t i = 0; i < d; i += W) a += *(vec *)(dh + i) * load(&opens[j], t, i);
                float along = p * (sum(a) - delta) * r, value = along * r * scores[t * k + j] / d;
                for (int64_t i = 0; i < d; i += W) {
                    vec y = load(&opens[j], t, i);
                    *(vec *)(dquery + i) += y * along;
                    store(&dopens[j], t, i, *(vec *)(dh + i) * p + *(const vec *)(query + i) * along - y * value);
                }
            }
            for (int64_t i = 0; i < d; i += W) store(doutput, t, i, *(vec *)(dh + i) * rest);
            if (dtop) dtop[t] = -rest * delta;
        }
    }
}
