/* The write and the read between two sublayers of parallel streams, in one pass over the tokens; ops/streams.py has the
 * formulas. Part of cpu_kernels.c, which includes it.
 *
 * Shapes: T tokens, n streams, d width; G rows of coefficients a token, one or one a stream, each a product of K = n d / G
 * numbers with M columns. A thread takes W tokens at a time: their coefficients lie in the lanes of a vector.
 */

/* Streams (T, n, d): bytes from token to token and from stream to stream. */
typedef struct { char *data; int64_t stride, apart, bf16; } streams;

INLINE rows stream_of(const streams *m, int64_t t, int64_t i) {
    return (rows){m->data + t * m->stride + i * m->apart, 0, m->bf16};
}

/* How coefficients are made of their logits: ops/streams.py's kinds, in its order. */
enum { SUM, GATE, IDENTITY, SINKHORN, TANH };

#define MOST_STREAMS 8
#define MOST_COEFFICIENTS (2 * MOST_STREAMS + MOST_STREAMS * MOST_STREAMS)
#define ROWS 4 /* tokens of a register block of products; divides W */

/* What both directions are given. norm: 0 none, 1 RMSNorm, 2 LayerNorm. late: a read has the shares that the sublayer
 * before it chose. over_in: what Sinkhorn's last step normalises. before: the earlier coefficients of a token, 0
 * without them. output: of the pending write, no data without one. made: the streams after the write; no data if they are not kept, or if nothing is pending. eps: of the
 * coefficients' norm and of the read's. table (G + 1 + K, M): statics, scales, weights. made_of (T, G, M + 1): the
 * logits' products and 1 / rms. x: in backward its gradient. */
typedef struct {
    int64_t threads, T, n, d, kind, norm, late, steps, over_in, before;
    streams old, made, dmade, dold;
    double eps, read_eps, sinkhorn_eps, norm_eps;
    rows output, x, doutput, weight, bias;
    const float *earlier, *table;
    float *coefficients, *made_of; /* results of forward */
    const float *dcoefficients;
    float *dearlier, *dtable, *dweight, *dbias;
} connect_call;

/* Sizes that follow from a call's. */
typedef struct { int64_t n, d, G, K, M, P, C; } sizes;

INLINE sizes sizes_of(const connect_call *c) {
    int64_t n = c->n, tanh = c->kind == TANH;
    int64_t M = (int64_t[]){0, n, 2 * n, 2 * n + n * n, n + 2}[c->kind];
    int64_t C = (int64_t[]){0, n, 2 * n, 2 * n + n * n, 2 * n + n * n}[c->kind];
    return (sizes){n, c->d, tanh ? n : 1, tanh ? c->d : n * c->d, M, padded(M), C};
}

/* ---- what vectors lack in C ---- */

INLINE vec chosen(ivec where, vec yes, vec no) { return (vec)(((ivec)yes & where) | ((ivec)no & ~where)); }

INLINE vec magnitude(vec x) { return (vec)((uvec)x & 0x7fffffffu); }

INLINE vec sigmoid(vec x) {
    vec e = exponential(-magnitude(x));
    return chosen(x >= 0.0f, 1.0f / (1.0f + e), e / (1.0f + e));
}

INLINE vec hyperbolic(vec x) {
    vec e = exponential(-2.0f * magnitude(x)), y = (1.0f - e) / (1.0f + e);
    return chosen(x >= 0.0f, y, -y);
}

INLINE vec larger(vec a, vec b) { return chosen(a > b, a, b); }

INLINE vec each_log(vec x) {
    for (int l = 0; l < W; l++) x[l] = logf(x[l]);
    return x;
}

INLINE vec each_rsqrt(vec x) {
    for (int l = 0; l < W; l++) x[l] = 1.0f / sqrtf(x[l]);
    return x;
}

/* ---- Sinkhorn, a matrix [in, out] a lane ---- */

/* A step normalises n groups: entry k of group g is m[g along + k across]. */
typedef struct { int64_t along, across; } direction;

INLINE void half_step(vec *m, int64_t n, direction by, float eps, vec *sums) {
    for (int64_t g = 0; g < n; g++) {
        vec s = m[g * by.along];
        for (int64_t k = 1; k < n; k++) s += m[g * by.along + k * by.across];
        s += eps;
        vec r = 1.0f / s;
        for (int64_t k = 0; k < n; k++) m[g * by.along + k * by.across] *= r;
        if (sums) sums[g] = s;
    }
}

/* dm and m of before a half step, of those after it. */
INLINE void half_step_backward(vec *m, vec *dm, int64_t n, direction by, const vec *sums) {
    for (int64_t g = 0; g < n; g++) {
        vec along = {0}, r = 1.0f / sums[g];
        for (int64_t k = 0; k < n; k++) along += m[g * by.along + k * by.across] * dm[g * by.along + k * by.across];
        for (int64_t k = 0; k < n; k++) {
            vec *of_m = &m[g * by.along + k * by.across], *of_dm = &dm[g * by.along + k * by.across];
            *of_dm = (*of_dm - along) * r;
            *of_m *= sums[g];
        }
    }
}

/* The softmax over each group, or its logarithm in place of the logits m. */
INLINE void softmaxes(const vec *m, vec *p, vec *logs, int64_t n, direction by) {
    for (int64_t g = 0; g < n; g++) {
        vec top = m[g * by.along], total = {0};
        for (int64_t k = 1; k < n; k++) top = larger(m[g * by.along + k * by.across], top);
        for (int64_t k = 0; k < n; k++) total += p[g * by.along + k * by.across] = exponential(m[g * by.along + k * by.across] - top);
        vec r = 1.0f / total;
        for (int64_t k = 0; k < n; k++) p[g * by.along + k * by.across] *= r;
        if (!logs) continue;
        top += each_log(total);
        for (int64_t k = 0; k < n; k++) logs[g * by.along + k * by.across] = m[g * by.along + k * by.across] - top;
    }
}

INLINE void softmaxes_backward(const vec *p, vec *dp, int64_t n, direction by) {
    for (int64_t g = 0; g < n; g++) {
        vec along = {0};
        for (int64_t k = 0; k < n; k++) along += p[g * by.along + k * by.across] * dp[g * by.along + k * by.across];
        for (int64_t k = 0; k < n; k++) {
            vec *of = &dp[g * by.along + k * by.across];
            *of = p[g * by.along + k * by.across] * (*of - along);
        }
    }
}

INLINE void directions(const connect_call *c, direction *first, direction *second) {
    direction over_in = {1, c->n}, over_out = {c->n, 1};
    *first = c->over_in ? over_out : over_in;
    *second = c->over_in ? over_in : over_out;
}

/* m = the balanced matrices of logits z. Where a backward follows: sums (2 steps, n) of the half steps, and `first`, the
 * softmaxes that the first of them gave. */
INLINE void sinkhorn_of(const int64_t n, const connect_call *c, const vec *z, vec *m, vec *first, vec *sums) {
    direction one, two;
    directions(c, &one, &two);
    float eps = c->sinkhorn_eps;
    if (eps) {
        softmaxes(z, first, NULL, n, one);
        for (int64_t i = 0; i < n * n; i++) m[i] = first[i] + eps;
        half_step(m, n, two, eps, sums ? sums + n : NULL);
    } else { /* on logarithms: a group's largest logit may be a hundred below another's */
        vec logs[n * n];
        softmaxes(z, first, logs, n, one);
        softmaxes(logs, m, NULL, n, two);
    }
    for (int64_t s = 1; s < c->steps; s++) {
        half_step(m, n, one, eps, sums ? sums + 2 * s * n : NULL);
        half_step(m, n, two, eps, sums ? sums + (2 * s + 1) * n : NULL);
    }
}

/* dm becomes the gradient of the logits; m, first, sums are those of `sinkhorn_of`. */
INLINE void sinkhorn_backward(const int64_t n, const connect_call *c, vec *m, vec *dm, const vec *first, const vec *sums) {
    direction one, two;
    directions(c, &one, &two);
    for (int64_t s = c->steps - 1; s > 0; s--) {
        half_step_backward(m, dm, n, two, sums + (2 * s + 1) * n);
        half_step_backward(m, dm, n, one, sums + 2 * s * n);
    }
    if (c->sinkhorn_eps) {
        half_step_backward(m, dm, n, two, sums + n);
        softmaxes_backward(first, dm, n, one);
        return;
    }
    softmaxes_backward(m, dm, n, two);
    for (int64_t g = 0; g < n; g++) { /* of the logarithms of `first` */
        vec total = {0};
        for (int64_t k = 0; k < n; k++) total += dm[g * one.along + k * one.across];
        for (int64_t k = 0; k < n; k++) dm[g * one.along + k * one.across] -= first[g * one.along + k * one.across] * total;
    }
}

/* `f(n, ...)` with n known to the compiler where it is usual. */
#define OF_STREAMS(f, n, ...) \
    switch (n) { \
        case 2: f(2, __VA_ARGS__); break; \
        case 4: f(4, __VA_ARGS__); break; \
        default: f(n, __VA_ARGS__); \
    }

static void sinkhorn_lanes(const connect_call *c, const vec *z, vec *m, vec *first, vec *sums) {
    OF_STREAMS(sinkhorn_of, c->n, c, z, m, first, sums)
}

static void sinkhorn_lanes_backward(const connect_call *c, vec *m, vec *dm, const vec *first, const vec *sums) {
    OF_STREAMS(sinkhorn_backward, c->n, c, m, dm, first, sums)
}

/* ---- coefficients [p, b, A] of the normed products u (G, M), a token a lane ---- */

/* Logits of one matrix: those of a sigmoid and of Sinkhorn; of TANH alpha and beta themselves. */
INLINE vec logit(const connect_call *c, const sizes *s, const vec *u, int64_t g, int64_t m) {
    float scale = c->table[s->G * s->M + m];
    return c->table[g * s->M + m] + scale * (c->kind == TANH ? hyperbolic(u[g * s->M + m]) : u[g * s->M + m]);
}

/* The place among [p, b, A] of column m of TANH's row i, which is [p_i, A_i0 .., b_i]. */
INLINE int64_t place(int64_t n, int64_t i, int64_t m) { return !m ? i : m > n ? n + i : 2 * n + i * n + m - 1; }

static void coefficients(const connect_call *c, const sizes *s, const vec *u, vec *out, vec *first, vec *sums) {
    int64_t n = s->n;
    if (c->kind == TANH) {
        for (int64_t i = 0; i < n; i++)
            for (int64_t m = 0; m < s->M; m++) out[place(n, i, m)] = logit(c, s, u, i, m);
        return;
    }
    for (int64_t m = 0; m < n; m++) out[m] = sigmoid(logit(c, s, u, 0, m)) + (float)c->read_eps;
    if (c->kind == GATE) return;
    for (int64_t m = n; m < 2 * n; m++) out[m] = 2.0f * sigmoid(logit(c, s, u, 0, m));
    if (c->kind == IDENTITY) return;
    vec z[n * n];
    for (int64_t m = 0; m < n * n; m++) z[m] = logit(c, s, u, 0, 2 * n + m);
    sinkhorn_lanes(c, z, out + 2 * n, first, sums);
}

/* du (G, M) of the gradients dout; statics' and scales' gradients are added to `of_static` and `of_scale`, a vector an
 * entry. */
static void coefficients_backward(const connect_call *c, const sizes *s, const vec *u, vec *dout, vec *du, vec *of_static,
                                  vec *of_scale) {
    int64_t n = s->n;
    if (c->kind == SINKHORN) {
        vec m[MOST_COEFFICIENTS], z[n * n], first[n * n], sums[2 * c->steps * n];
        for (int64_t k = 0; k < n * n; k++) z[k] = logit(c, s, u, 0, 2 * n + k);
        sinkhorn_lanes(c, z, m, first, sums);
        sinkhorn_lanes_backward(c, m, dout + 2 * n, first, sums);
    }
    for (int64_t g = 0; g < s->G; g++)
        for (int64_t m = 0; m < s->M; m++) {
            int64_t at = g * s->M + m;
            float scale = c->table[s->G * s->M + m];
            vec dz = dout[c->kind == TANH ? place(n, g, m) : m], y = u[at], slope = y - y + 1.0f;
            if (c->kind == TANH) {
                y = hyperbolic(y);
                slope = 1.0f - y * y;
            } else if (m < 2 * n) {
                vec p = sigmoid(logit(c, s, u, g, m));
                dz *= p * (1.0f - p) * (m < n ? 1.0f : 2.0f);
            }
            of_static[at] += dz;
            of_scale[m] += dz * y;
            du[at] = dz * scale * slope;
        }
}

/* ---- products with the weights, and mixtures of streams ---- */

/* out[r] (V vectors) += h[r] w, of ROWS rows h (d) and w (d, P). */
INLINE void product_at(const int V, const float *const *h, const float *w, int64_t P, int64_t d, float *const *out) {
    vec a[ROWS][3];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) a[r][v] = VEC(out[r] + v * W);
    for (int64_t k = 0; k < d; k++) {
        vec x[3];
        for (int v = 0; v < V; v++) x[v] = CVEC(w + k * P + v * W);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < V; v++) a[r][v] += x[v] * h[r][k];
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) VEC(out[r] + v * W) = a[r][v];
}

/* dw (d, P) += sum over r of h[r] (outer) du[r]. */
INLINE void outer_at(const int V, const float *const *h, float *dw, int64_t P, int64_t d, float *const *du) {
    vec a[ROWS][3];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) a[r][v] = VEC(du[r] + v * W);
    for (int64_t k = 0; k < d; k++)
        for (int v = 0; v < V; v++) {
            vec x = VEC(dw + k * P + v * W);
            for (int r = 0; r < ROWS; r++) x += a[r][v] * h[r][k];
            VEC(dw + k * P + v * W) = x;
        }
}

#define IN_COLUMNS(f, h, w, P, d, out) \
    for (int64_t column = 0; column < (P); column += 3 * W) { \
        float *here_[ROWS]; \
        for (int r = 0; r < ROWS; r++) here_[r] = (out)[r] + column; \
        int64_t left = ((P) - column) / W; \
        if (left >= 3) f(3, h, (w) + column, P, d, here_); \
        else if (left == 2) f(2, h, (w) + column, P, d, here_); \
        else f(1, h, (w) + column, P, d, here_); \
    }

static void product(const float *const *h, const float *w, int64_t P, int64_t d, float *const *out) {
    IN_COLUMNS(product_at, h, w, P, d, out)
}

static void outer(const float *const *h, float *dw, int64_t P, int64_t d, float *const *du) {
    IN_COLUMNS(outer_at, h, dw, P, d, du)
}

/* Where rows of a multiple of 16 elements are taken PAIR vectors at a time, which share what is broadcast. */
#if W < 16
#define PAIR 2
#else
#define PAIR 1
#endif

/* out_j = sum_i A_ij v_i + b_j y, and the sums of their squares. carried: whether A is not I. */
INLINE void write_of(const int64_t n, int carried, const float *const *v, const float *y, const float *b, const float *A,
                     int64_t d, float *const *out, float *squares) {
    vec s[n];
    for (int64_t j = 0; j < n; j++) s[j] = (vec){0};
    for (int64_t k = 0; k < d; k += PAIR * W) {
        vec x[n][PAIR], f[PAIR];
        for (int64_t i = 0; i < n; i++)
            for (int q = 0; q < PAIR; q++) x[i][q] = CVEC(v[i] + k + q * W);
        for (int q = 0; q < PAIR; q++) f[q] = CVEC(y + k + q * W);
        for (int64_t j = 0; j < n; j++) {
            vec z[PAIR];
            for (int q = 0; q < PAIR; q++) z[q] = carried ? f[q] * b[j] : f[q] * b[j] + x[j][q];
            for (int64_t i = 0; carried && i < n; i++)
                for (int q = 0; q < PAIR; q++) z[q] += x[i][q] * A[i * n + j];
            for (int q = 0; q < PAIR; q++) {
                VEC(out[j] + k + q * W) = z[q];
                s[j] += z[q] * z[q];
            }
        }
    }
    for (int64_t j = 0; j < n; j++) squares[j] = sum(s[j]);
}

/* Of the gradients g_j of what `write_of` made: da (n, n), db (n), dv_i = sum_j A_ij g_j, dy = sum_j b_j g_j. */
INLINE void write_backward(const int64_t n, int carried, const float *const *v, const float *y, const float *b,
                           const float *A, int64_t d, const float *const *g, float *da, float *db, const rows *dv,
                           const rows *dy) {
    for (int64_t i = carried ? 0 : n; i <= n; i++) { /* one stream at a time, then the output: n sums stay in registers */
        const float *row = i < n ? v[i] : y, *share = i < n ? A + i * n : b;
        rows to = i < n ? dv[i] : *dy;
        vec s[n];
        for (int64_t j = 0; j < n; j++) s[j] = (vec){0};
        for (int64_t k = 0; k < d; k += PAIR * W) {
            vec x[PAIR], z[PAIR];
            for (int q = 0; q < PAIR; q++) x[q] = CVEC(row + k + q * W), z[q] = (vec){0};
            for (int64_t j = 0; j < n; j++)
                for (int q = 0; q < PAIR; q++) {
                    vec of = CVEC(g[j] + k + q * W);
                    s[j] += x[q] * of;
                    z[q] += of * share[j];
                }
            for (int q = 0; q < PAIR; q++) put(&to, k + q * W, z[q]);
        }
        for (int64_t j = 0; j < n; j++) (i < n ? da + i * n : db)[j] = sum(s[j]);
    }
    for (int64_t i = 0; !carried && i < n; i++)
        for (int64_t k = 0; k < d; k += W) put(&dv[i], k, CVEC(g[i] + k));
}

static void write_token(int64_t n, int carried, const float *const *v, const float *y, const float *b, const float *A,
                        int64_t d, float *const *out, float *squares) {
    OF_STREAMS(write_of, n, carried, v, y, b, A, d, out, squares)
}

static void write_token_backward(int64_t n, int carried, const float *const *v, const float *y, const float *b,
                                 const float *A, int64_t d, const float *const *g, float *da, float *db, const rows *dv,
                                 const rows *dy) {
    OF_STREAMS(write_backward, n, carried, v, y, b, A, d, g, da, db, dv, dy)
}

/* ---- both directions ---- */

/* A thread's memory for the W tokens that it is at: streams after the write (held) and pointers to them, copies of bf16
 * rows, sums of squares (W, n), products (W, G, P), shares of a read (W, n). */
typedef struct {
    float *held, *copies, *squares, *products, *shares;
    const float **h;
} bench_of;

INLINE int64_t bench_floats(const sizes *s) {
    int64_t n = s->n, pointers = padded(W * n * sizeof(float *) / sizeof(float));
    return padded(W * n * s->d) + padded((n + 1) * s->d) + 2 * padded(W * n) + padded(W * s->G * s->P + 1) + pointers;
}

INLINE bench_of bench_in(const sizes *s, float **space) {
    int64_t n = s->n;
    return (bench_of){take(space, W * n * s->d), take(space, (n + 1) * s->d), take(space, W * n),
                  take(space, W * s->G * s->P + 1), take(space, W * n),
                  (const float **)take(space, W * n * sizeof(float *) / sizeof(float))};
}

/* The fp32 rows of a token's old streams and of the sublayer's output. */
INLINE const float *old_rows(const connect_call *c, int64_t t, float *copies, const float **v) {
    for (int64_t i = 0; i < c->n; i++) {
        rows r = stream_of(&c->old, t, i);
        v[i] = single(&r, c->d, copies + i * c->d);
    }
    rows y = c->output.data ? here(&c->output, t) : NONE;
    return y.data ? single(&y, c->d, copies + c->n * c->d) : NULL;
}

/* Make the streams after the pending write of tokens t .. t + count - 1, or find them where they are kept (`again`), and
 * the sums of their squares. Lanes beyond `count` stand for the first token. */
INLINE void make_streams(const connect_call *c, const sizes *s, int64_t t, int64_t count, int again, bench_of *o) {
    int64_t n = s->n, d = s->d;
    for (int64_t l = 0; l < W; l++) {
        if (l >= count) {
            for (int64_t i = 0; i < n; i++) o->h[l * n + i] = o->h[i], o->squares[l * n + i] = o->squares[i];
            continue;
        }
        const float *v[MOST_STREAMS];
        const streams *kept = c->output.data ? &c->made : &c->old;
        if (!c->output.data || (again && kept->data)) { /* as they are */
            for (int64_t i = 0; i < n; i++) {
                rows r = stream_of(kept, t + l, i);
                o->h[l * n + i] = single(&r, d, o->held + (l * n + i) * d);
                vec a = {0};
                if (!again)
                    for (int64_t k = 0; k < d; k += W) a += CVEC(o->h[l * n + i] + k) * CVEC(o->h[l * n + i] + k);
                o->squares[l * n + i] = sum(a);
            }
            continue;
        }
        const float *y = old_rows(c, t + l, o->copies, v), *e = c->earlier + (t + l) * c->before;
        float *out[MOST_STREAMS];
        for (int64_t i = 0; i < n; i++) {
            int direct = kept->data && !kept->bf16;
            out[i] = direct ? (float *)stream_of(kept, t + l, i).data : o->held + (l * n + i) * d;
            o->h[l * n + i] = out[i];
        }
        write_token(n, c->before > 2 * n, v, y, e + n, e + 2 * n, d, out, o->squares + l * n);
        if (!kept->bf16) continue;
        for (int64_t i = 0; i < n; i++) { /* rounded, as the next one to read them finds them */
            rows r = stream_of(kept, t + l, i);
            vec a = {0};
            for (int64_t k = 0; k < d; k += W) {
                vec x = rounded(&r, CVEC(out[i] + k));
                if (kept->data) put(&r, k, x);
                VEC(out[i] + k) = x;
                a += x * x;
            }
            o->squares[l * n + i] = sum(a);
        }
    }
}

/* The shares of each stream in a read: ones, those of the sublayer before, or this one's. */
INLINE void shares_of_read(const connect_call *c, const sizes *s, int64_t t, int64_t count, bench_of *o) {
    int64_t n = s->n;
    for (int64_t l = 0; l < count; l++)
        for (int64_t i = 0; i < n; i++)
            o->shares[l * n + i] = c->late ? (c->before ? c->earlier[(t + l) * c->before + i] : i == 0)
                                   : c->kind == SUM ? 1.0f : c->coefficients[(t + l) * s->C + i];
}

/* row = sum_i p_i h_i; returns its sum and that of its squares. */
INLINE void mixture_of(const int64_t n, const float *const *h, const float *p, int64_t d, float *row, float *total,
                       float *power) {
    vec squares = {0}, mean = {0};
    for (int64_t k = 0; k < d; k += W) {
        vec y = CVEC(h[0] + k) * p[0];
        for (int64_t i = 1; i < n; i++) y += CVEC(h[i] + k) * p[i];
        VEC(row + k) = y;
        squares += y * y;
        mean += y;
    }
    *total = sum(mean);
    *power = sum(squares);
}

/* out_i = <g, h_i>. */
INLINE void products_of(const int64_t n, const float *const *h, const float *g, int64_t d, float *out) {
    vec p[n];
    for (int64_t i = 0; i < n; i++) p[i] = (vec){0};
    for (int64_t k = 0; k < d; k += W)
        for (int64_t i = 0; i < n; i++) p[i] += CVEC(g + k) * CVEC(h[i] + k);
    for (int64_t i = 0; i < n; i++) out[i] = sum(p[i]);
}

/* row = the read of W-token `l`, and the norm's centre and scale. */
INLINE float read_row(const connect_call *c, const sizes *s, int64_t l, const bench_of *o, float *row, float *centre) {
    int64_t n = s->n, d = s->d;
    float total, power;
    OF_STREAMS(mixture_of, n, o->h + l * n, o->shares + l * n, d, row, &total, &power)
    *centre = 0;
    if (c->norm == 2) {
        *centre = total / d;
        vec spread = {0};
        for (int64_t k = 0; k < d; k += W) { vec y = CVEC(row + k) - *centre; spread += y * y; }
        power = sum(spread);
    }
    return c->norm ? 1.0f / sqrtf(power / d + (float)c->norm_eps) : 1.0f;
}

/* out[r] = the gradient of stream i of ROWS tokens from PAIR vectors on: of what it is read for later, of this read, of
 * its norm and of the products. */
INLINE void gradients_at(const float *const *h, const float *const *read, const float *shares, const float *along,
                         int64_t apart, const rows *later, const float *columns, int64_t K, int64_t M,
                         float *const *du, int64_t k, float *const *out) {
    vec a[ROWS][PAIR];
    for (int r = 0; r < ROWS; r++)
        for (int q = 0; q < PAIR; q++) {
            int64_t at = k + q * W;
            a[r][q] = CVEC(read[r] + at) * shares[r * apart] + CVEC(h[r] + at) * along[r * MOST_STREAMS];
            if (later[r].data) a[r][q] += get(&later[r], at);
        }
    for (int64_t m = 0; m < M; m++) {
        vec x[PAIR];
        for (int q = 0; q < PAIR; q++) x[q] = CVEC(columns + m * K + k + q * W);
        for (int r = 0; r < ROWS; r++)
            for (int q = 0; q < PAIR; q++) a[r][q] += x[q] * du[r][m];
    }
    for (int r = 0; r < ROWS; r++)
        for (int q = 0; q < PAIR; q++) VEC(out[r] + k + q * W) = a[r][q];
}

int attnres_connect(const connect_call *c) {
    sizes s = sizes_of(c);
    int64_t n = s.n, d = s.d, G = s.G, M = s.M, P = s.P, shared = padded(s.K * P + 1), each = bench_floats(&s) + padded(d);
    float *space = aligned_alloc(64, (shared + c->threads * padded(each) + 16) / 16 * 16 * sizeof(float)), *w = space;
    if (!space) return 1;
#pragma omp parallel num_threads(c->threads)
    {
        float *mine = space + shared + omp_get_thread_num() * padded(each);
        bench_of o = bench_in(&s, &mine);
        float *row = take(&mine, d);
        int64_t from, to;
        range(s.K, &from, &to);
        for (int64_t k = from; M && k < to; k++) { /* whole vectors */
            memset(w + k * P, 0, P * sizeof(float));
            memcpy(w + k * P, c->table + (G + 1 + k) * M, M * sizeof(float));
        }
#pragma omp barrier
        range(c->T, &from, &to);
        for (int64_t t = from; t < to; t += W) {
            int64_t count = to - t < W ? to - t : W;
            make_streams(c, &s, t, count, 0, &o);
            if (M) {
                memset(o.products, 0, W * G * P * sizeof(float));
                for (int64_t l = 0; l < count; l += ROWS)
                    for (int64_t i = 0; i < n; i++) {
                        const float *h[ROWS];
                        float *out[ROWS];
                        int64_t g = G > 1 ? i : 0;
                        for (int r = 0; r < ROWS; r++) {
                            h[r] = o.h[(l + r) * n + i];
                            out[r] = o.products + ((l + r) * G + g) * P;
                        }
                        product(h, w + (G > 1 ? 0 : i * d * P), P, d, out);
                    }
                vec u[MOST_COEFFICIENTS + MOST_STREAMS], made[MOST_COEFFICIENTS], first[n * n];
                for (int64_t g = 0; g < G; g++) {
                    vec power = {0};
                    for (int l = 0; l < W; l++)
                        for (int64_t i = G > 1 ? g : 0; i < (G > 1 ? g + 1 : n); i++) power[l] += o.squares[l * n + i];
                    vec inverse = each_rsqrt(power / (float)s.K + (float)c->eps);
                    for (int64_t m = 0; m < M; m++) {
                        vec x;
                        for (int l = 0; l < W; l++) x[l] = o.products[(l * G + g) * P + m];
                        u[g * M + m] = x * inverse;
                    }
                    for (int64_t l = 0; c->made_of && l < count; l++) {
                        float *to_memory = c->made_of + ((t + l) * G + g) * (M + 1);
                        for (int64_t m = 0; m < M; m++) to_memory[m] = u[g * M + m][l];
                        to_memory[M] = inverse[l];
                    }
                }
                coefficients(c, &s, u, made, first, NULL);
                for (int64_t l = 0; l < count; l++)
                    for (int64_t m = 0; m < s.C; m++) c->coefficients[(t + l) * s.C + m] = made[m][l];
            }
            shares_of_read(c, &s, t, count, &o);
            for (int64_t l = 0; l < count; l++) {
                rows x = here(&c->x, t + l);
                float centre, scale = read_row(c, &s, l, &o, row, &centre);
                for (int64_t k = 0; k < d; k += W) {
                    vec y = (CVEC(row + k) - centre) * scale;
                    if (c->weight.data) y *= get(&c->weight, k);
                    if (c->bias.data) y += get(&c->bias, k);
                    put(&x, k, y);
                }
            }
        }
    }
    free(space);
    return 0;
}

int attnres_connect_backward(const connect_call *c) {
    sizes s = sizes_of(c);
    int64_t n = s.n, d = s.d, G = s.G, M = s.M, P = s.P, C = s.C, before = c->before;
    int64_t shared = padded(s.K * M + 1), sums = padded(s.K * P + 1), vectors = (MOST_COEFFICIENTS + MOST_STREAMS) * W;
    int64_t kept = sums + 2 * padded(d) + 2 * vectors;
    int64_t each = padded(kept + bench_floats(&s) + padded(W * n * d) + padded(W * d) + padded(d));
    float *space = aligned_alloc(64, (shared + c->threads * each + 16) / 16 * 16 * sizeof(float)), *w = space;
    if (!space) return 1;
#pragma omp parallel num_threads(c->threads)
    {
        float *all = space + shared, *mine = all + omp_get_thread_num() * each;
        memset(mine, 0, kept * sizeof(float));
        float *dw = take(&mine, s.K * P + 1), *of_weight = take(&mine, d), *of_bias = take(&mine, d);
        vec *of_static = (vec *)take(&mine, vectors), *of_scale = (vec *)take(&mine, vectors);
        bench_of o = bench_in(&s, &mine);
        float *dh = take(&mine, W * n * d), *dread = take(&mine, W * d), *row = take(&mine, d);
        int64_t from, to;
        range(s.K, &from, &to);
        for (int64_t k = from; k < to; k++) /* columns of the weights as rows */
            for (int64_t m = 0; m < M; m++) w[m * s.K + k] = c->table[(G + 1 + k) * M + m];
#pragma omp barrier
        range(c->T, &from, &to);
        for (int64_t t = from; t < to; t += W) {
            int64_t count = to - t < W ? to - t : W;
            vec dout[MOST_COEFFICIENTS] = {{0}};
            float along[W][MOST_STREAMS]; /* of each stream: how much of it its own gradient has, from its norm */
            memset(along, 0, sizeof along);
            make_streams(c, &s, t, count, 1, &o);
            shares_of_read(c, &s, t, count, &o);
            for (int64_t l = 0; l < count; l++) {
                rows x = here(&c->x, t + l);
                float centre, scale = read_row(c, &s, l, &o, row, &centre), product = 0, mean = 0;
                float *g = dread + l * d;
                vec a = {0}, e = {0};
                for (int64_t k = 0; k < d; k += W) {
                    vec y = get(&x, k), hat = (CVEC(row + k) - centre) * scale;
                    if (c->norm) {
                        VEC(of_weight + k) += y * hat;
                        VEC(of_bias + k) += y;
                        if (c->weight.data) y *= get(&c->weight, k);
                        a += y * hat;
                        e += y;
                    }
                    VEC(g + k) = y;
                }
                if (c->norm) {
                    product = sum(a) / d;
                    mean = c->norm == 2 ? sum(e) / d : 0;
                    for (int64_t k = 0; k < d; k += W) {
                        vec hat = (CVEC(row + k) - centre) * scale;
                        VEC(g + k) = (CVEC(g + k) - hat * product - mean) * scale;
                    }
                }
                float *to_memory = before ? c->dearlier + (t + l) * before : NULL;
                for (int64_t m = 0; m < C; m++) dout[m][l] = c->dcoefficients ? c->dcoefficients[(t + l) * C + m] : 0;
                if (before) memset(to_memory, 0, n * sizeof(float));
                if (c->kind == SUM && !c->late) continue;
                float p[MOST_STREAMS];
                OF_STREAMS(products_of, n, o.h + l * n, g, d, p)
                for (int64_t i = 0; i < n; i++) {
                    if (!c->late) dout[i][l] += p[i];
                    else if (before) to_memory[i] = p[i];
                }
            }
            if (M) {
                vec u[MOST_COEFFICIENTS + MOST_STREAMS] = {{0}}, du[MOST_COEFFICIENTS + MOST_STREAMS];
                for (int64_t l = 0; l < count; l++)
                    for (int64_t g = 0; g < G; g++)
                        for (int64_t m = 0; m < M; m++) u[g * M + m][l] = c->made_of[((t + l) * G + g) * (M + 1) + m];
                coefficients_backward(c, &s, u, dout, du, of_static, of_scale);
                memset(o.products, 0, W * G * P * sizeof(float));
                for (int64_t g = 0; g < G; g++) {
                    vec pull = {0};
                    for (int64_t m = 0; m < M; m++) pull += du[g * M + m] * u[g * M + m];
                    for (int64_t l = 0; l < count; l++) {
                        float inverse = c->made_of[((t + l) * G + g) * (M + 1) + M];
                        for (int64_t m = 0; m < M; m++) o.products[(l * G + g) * P + m] = du[g * M + m][l] * inverse;
                        for (int64_t i = G > 1 ? g : 0; i < (G > 1 ? g + 1 : n); i++)
                            along[l][i] = -pull[l] * inverse * inverse / s.K;
                    }
                }
            }
            for (int64_t l = 0; l < count; l += ROWS)
                for (int64_t i = 0; i < n; i++) {
                    const float *h[ROWS];
                    float *du[ROWS], *out[ROWS];
                    rows later[ROWS];
                    int64_t g = G > 1 ? i : 0;
                    for (int r = 0; r < ROWS; r++) {
                        int64_t one = l + r < count ? l + r : 0; /* lanes beyond the last token have zeros in du */
                        h[r] = o.h[(l + r) * n + i];
                        du[r] = o.products + ((l + r) * G + g) * P;
                        out[r] = dh + ((l + r) * n + i) * d;
                        later[r] = c->dmade.data ? stream_of(&c->dmade, t + one, i) : NONE;
                    }
                    if (M) outer(h, dw + (G > 1 ? 0 : i * d * P), P, d, du);
                    const float *columns = w + (G > 1 ? 0 : i * d), *reads[ROWS];
                    for (int r = 0; r < ROWS; r++) reads[r] = dread + (l + r) * d;
                    for (int64_t k = 0; k < d; k += PAIR * W)
                        gradients_at(h, reads, o.shares + l * n + i, &along[l][i], n, later, columns, s.K, M, du, k, out);
                }
            for (int64_t l = 0; l < count; l++) {
                rows dv[MOST_STREAMS], dy = NONE;
                const float *g[MOST_STREAMS], *v[MOST_STREAMS];
                for (int64_t i = 0; i < n; i++) dv[i] = stream_of(&c->dold, t + l, i), g[i] = dh + (l * n + i) * d;
                if (!c->output.data) {
                    for (int64_t i = 0; i < n; i++)
                        for (int64_t k = 0; k < d; k += W) put(&dv[i], k, CVEC(g[i] + k));
                    continue;
                }
                const float *y = old_rows(c, t + l, o.copies, v), *e = c->earlier + (t + l) * before;
                float *to_memory = c->dearlier + (t + l) * before;
                dy = here(&c->doutput, t + l);
                write_token_backward(n, before > 2 * n, v, y, e + n, e + 2 * n, d, g, to_memory + 2 * n, to_memory + n, dv, &dy);
            }
        }
        for (int64_t m = 0; m < MOST_COEFFICIENTS + MOST_STREAMS; m++) {
            of_static[m][0] = sum(of_static[m]);
            of_scale[m][0] = sum(of_scale[m]);
        }
#pragma omp barrier
        int64_t threads = omp_get_num_threads();
        range(s.K, &from, &to);
        for (int64_t k = from; k < to; k++)
            for (int64_t m = 0; m < M; m++) {
                float a = 0;
                for (int64_t q = 0; q < threads; q++) a += all[q * each + k * P + m];
                c->dtable[(G + 1 + k) * M + m] = a;
            }
#pragma omp single
        for (int64_t m = 0; m < (G + 1) * M; m++) {
            float a = 0;
            for (int64_t q = 0; q < threads; q++) {
                float *theirs = all + q * each + sums + 2 * padded(d);
                a += m < G * M ? theirs[m * W] : theirs[vectors + (m - G * M) * W];
            }
            c->dtable[m] = a;
        }
        if (c->dweight) sum_of_threads(all + sums, each, d, c->dweight);
        if (c->dbias) sum_of_threads(all + sums + padded(d), each, d, c->dbias);
    }
    free(space);
    return 0;
}
