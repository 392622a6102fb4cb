/* What verification needs of rows of logits, read as few times as possible: maxima and normalisers in one reading
 * of those that decide something, and then one token for each session from a row of it.
 *
 * x is float32 with `stride` floats from row to row; `rows` says which rows are meant. A row's weights are
 * exp((x - top) / T) = 2^((x - top) * rate). Sums run over fixed pieces of a row, so that nothing depends on the
 * rest of the batch or on the number of threads.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Otherwise the case of a forbidden token keeps `power` from being computed for many at once. */
#pragma GCC optimize("no-trapping-math")

/* GROUP: maxima or sums that go side by side, so that none waits for the one before it. */
#ifdef __AVX512F__ /* compilers otherwise stop at half of its registers' width */
#pragma GCC target("prefer-vector-width=512")
enum { GROUP = 64 };
#else
enum { GROUP = 32 };
#endif

enum { PIECE = 1024, DRAWS = 64 };
enum { BLOCK = 32, COUPLED = 4, EXCESS = 1 << 8 }; /* shared/randomness.py */

/* 2^t for t <= 0, to two units in the last place; what is below 2^-126 comes out as 2^-126. The polynomial has the
 * least relative error on [-1/2, 1/2] of those of degree 5 that are 1 at 0. */
static inline float power_or_tiny(float t) {
    const float bounded = t > -126.0f ? t : -126.0f;
    const float shifted = bounded + 12582912.0f; /* 1.5 * 2^23: rounds to an integer, which its low bits then hold */
    const float f = bounded - (shifted - 12582912.0f);
    float p = 1.326472731307149e-3f;
    p = p * f + 9.671512991189957e-3f;
    p = p * f + 5.550733581185341e-2f;
    p = p * f + 2.4022242426872253e-1f;
    p = p * f + 6.931470036506653e-1f;
    p = p * f + 1.0f;
    uint32_t exponent, bits;
    memcpy(&exponent, &shifted, 4);
    memcpy(&bits, &p, 4);
    bits += exponent << 23;
    memcpy(&p, &bits, 4);
    return p;
}

/* 0 below 2^-126, so that a forbidden token (t = -inf) has no weight. */
static inline float power(float t) { return t < -126.0f ? 0.0f : power_or_tiny(t); }

/* The largest of a piece; `magnitude` becomes the largest of its bits without sign where it was less. */
static inline float largest_of_piece(const float *piece, uint32_t *magnitude) {
    float best[GROUP];
    uint32_t most[GROUP] = {0};
    for (size_t j = 0; j < GROUP; j++) best[j] = -INFINITY;
    for (size_t i = 0; i < PIECE; i += GROUP)
#pragma omp simd
        for (size_t j = 0; j < GROUP; j++) {
            uint32_t bits;
            memcpy(&bits, piece + i + j, 4);
            bits &= 0x7fffffff;
            most[j] = bits > most[j] ? bits : most[j];
            best[j] = piece[i + j] > best[j] ? piece[i + j] : best[j];
        }
    float largest = -INFINITY;
    uint32_t bits = *magnitude;
#pragma omp simd reduction(max : largest, bits)
    for (size_t j = 0; j < GROUP; j++) {
        largest = best[j] > largest ? best[j] : largest;
        bits = most[j] > bits ? most[j] : bits;
    }
    *magnitude = bits;
    return largest;
}

/* The sum of a piece's weights. What lies behind it comes into the nearest cache meanwhile. */
static inline float mass_of_piece(const float *piece, float top, float rate) {
    float sums[GROUP] = {0}, sum = 0.0f;
    for (size_t i = 0; i < PIECE; i += GROUP) {
        for (size_t j = 0; j < GROUP; j += 16) __builtin_prefetch(piece + PIECE + i + j);
#pragma omp simd
        for (size_t j = 0; j < GROUP; j++) sums[j] += power_or_tiny((piece[i + j] - top) * rate);
    }
#pragma omp simd reduction(+ : sum)
    for (size_t j = 0; j < GROUP; j++) sum += sums[j];
    return sum;
}

/* The largest of a row and its lowest place; NaN where the row has one. Where `rate` is not 0, also the sum of
 * its weights, a piece at a time while that is in the nearest cache: what is summed so far is scaled down when
 * a larger logit turns up. 1 in a row that is not finite. */
static float read_row(const float *x, size_t vocab, float rate, int64_t *place, double *mass) {
    float top = -INFINITY, filled[PIECE];
    double total = 0.0;
    uint32_t magnitude = 0; /* of the bits without sign: a NaN is larger than an infinity */
    size_t found = 0;
    for (size_t at = 0; at < vocab; at += PIECE) {
        const float *piece = x + at;
        if (at + PIECE > vocab) {
            for (size_t i = 0; i < PIECE; i++) filled[i] = at + i < vocab ? piece[i] : -INFINITY;
            piece = filled;
        }
        const float best = largest_of_piece(piece, &magnitude);
        if (best > top) {
            total *= power((top - best) * rate);
            top = best;
            found = at;
        }
        if (rate != 0.0f && isfinite(top)) total += mass_of_piece(piece, top, rate);
    }
    while (found + 1 < vocab && x[found] != top) found++;
    *place = (int64_t)found;
    if (magnitude > 0x7f800000) top = NAN;
    *mass = rate != 0.0f && isfinite(top) ? total : 1.0;
    return top;
}

/* p of one id of a row. */
static inline double share_of(const float *row, float top, float rate, double mass, int64_t id) {
    return power((row[id] - top) * rate) / mass;
}

/* For each of n rows: its maximum, where that is, and its mass where `rate` is not 0. */
void specwire_summary(const float *x, size_t stride, size_t vocab, const int64_t *rows, size_t n,
                      const float *rate, float *top, int64_t *place, double *mass, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (n * vocab > 1 << 15)
    for (size_t r = 0; r < n; r++)
        top[r] = read_row(x + (size_t)rows[r] * stride, vocab, rate[r], place + r, mass + r);
}

/* Token-wise rejection sampling of n blocks: block b has rows first[b] ... first[b + 1] - 1 of the batch, one more
 * than drafted tokens, of which `drawn` is q. Top and mass are given of the rows that are reached; those behind the
 * first rejected token are not looked at. A block stops at a row that is not finite. */
void specwire_token(const float *x, size_t stride, size_t vocab, const int64_t *rows, size_t n,
                    const int64_t *first, const int64_t *drafted, const double *drawn, const double *uniform,
                    const double *weight, const float *rate, float *top, double *mass, int64_t *num_accepted,
                    int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (n > 1)
    for (size_t b = 0; b < n; b++) {
        const size_t num_drafted = (size_t)(first[b + 1] - first[b]) - 1;
        for (size_t i = 0; i <= num_drafted; i++) {
            const size_t r = (size_t)first[b] + i, token = r - b; /* every earlier block has one more row */
            const float *row = x + (size_t)rows[r] * stride;
            int64_t place;
            top[r] = read_row(row, vocab, rate[r], &place, mass + r);
            num_accepted[b] = (int64_t)i;
            if (i == num_drafted || !isfinite(top[r])) break;
            const double p = share_of(row, top[r], rate[r], mass[r], drafted[token]);
            /* u < p / q without the division: p = 0 is never accepted, not even at u = 0. */
            if (!(uniform[r] * drawn[token] < (1.0 - weight[b]) * p + weight[b] * drawn[token])) break;
        }
    }
}

/* Whether a prefix that ends behind row r can be kept, after one with this `joint`: no p exceeds 1. */
static int can_go_on(size_t r, size_t end, double joint, const double *drawn, const double *uniform) {
    for (; r < end; r++, drawn++) {
        joint /= *drawn;
        if (joint > 1.0) joint = 1.0;
        if (uniform[r] < joint) return 1;
    }
    return 0;
}

/* Block verification of n blocks (as in `specwire_token`, with q as in `specwire_draw`): Sun et al. 2024,
 * Algorithm 2. `joint` is the chance that a prefix is kept whole, the product of min(1, .) of p / q; a prefix that
 * goes on is also given up for what the residual max(joint p - q, 0) after it is worth. The longest prefix that its
 * own draw keeps is kept; `scale` is then its joint. Top and mass are given of the rows that are read: those that
 * cannot change any more what is kept are not. */
void specwire_block(const float *x, size_t stride, size_t vocab, const int64_t *rows, size_t n, const int64_t *first,
                    const int64_t *drafted, const double *drawn, const int64_t *offsets, const int64_t *ids,
                    const double *q, const double *uniform, const float *rate, float *top, double *mass,
                    int64_t *num_accepted, double *scale, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (n > 1)
    for (size_t b = 0; b < n; b++) {
        const size_t bonus = (size_t)first[b + 1] - 1;
        size_t unread = (size_t)first[b];
        int64_t place;
        double joint = 1.0;
        num_accepted[b] = 0;
        scale[b] = 1.0;
        for (size_t r = (size_t)first[b]; r < bonus && can_go_on(r, bonus, joint, drawn + r - b, uniform); r++) {
            const size_t token = r - b;
            const float *row = x + (size_t)rows[r] * stride, *next = x + (size_t)rows[r + 1] * stride;
            for (; unread <= r; unread++)
                top[unread] = read_row(row, vocab, rate[unread], &place, mass + unread);
            joint *= share_of(row, top[r], rate[r], mass[r], drafted[token]) / drawn[token];
            if (joint > 1.0) joint = 1.0;
            if (!(uniform[r] < joint)) continue; /* what the residual is worth only lowers the chance */
            double kept = joint;
            if (r + 1 < bonus) {
                for (; unread <= r + 1; unread++)
                    top[unread] = read_row(next, vocab, rate[unread], &place, mass + unread);
                double rest = joint;
                for (int64_t i = offsets[token + 1]; i < offsets[token + 2]; i++) {
                    const double p = joint * share_of(next, top[r + 1], rate[r + 1], mass[r + 1], ids[i]);
                    rest -= p < q[i] ? p : q[i];
                }
                kept = rest > 0.0 ? rest / (rest + 1.0 - joint) : joint >= 1.0;
            }
            if (uniform[r] < kept) {
                num_accepted[b] = (int64_t)r + 1 - first[b];
                scale[b] = joint;
            }
        }
        const size_t decisive = (size_t)(first[b] + num_accepted[b]);
        if (decisive >= unread)
            top[decisive] = read_row(x + (size_t)rows[decisive] * stride, vocab, rate[decisive], &place,
                                     mass + decisive);
    }
}

/* One row's p times a factor, less q, where that is positive. */
typedef struct {
    const float *x;
    size_t vocab;
    float top, rate, factor;
    const int64_t *ids; /* ascending */
    const double *q;
    size_t num_ids;
} residual;

/* Weights of the piece at `at` into w; `next` is an entry of q after which none is left out. Returns their sum. */
static double weigh(const residual *r, size_t at, size_t *next, float *w) {
    const size_t len = at + PIECE < r->vocab ? PIECE : r->vocab - at;
    for (size_t i = 0; i < len; i++) w[i] = r->factor * power((r->x[at + i] - r->top) * r->rate);
    for (; *next < r->num_ids && (size_t)r->ids[*next] < at + len; ++*next) {
        if ((size_t)r->ids[*next] < at) continue;
        float *weight = w + r->ids[*next] - at;
        *weight -= (float)r->q[*next];
        if (!(*weight > 0.0f)) *weight = 0.0f;
    }
    for (size_t i = len; i < PIECE; i++) w[i] = 0.0f;
    double sums[GROUP] = {0}, sum = 0.0;
    for (size_t i = 0; i < PIECE; i += GROUP)
#pragma omp simd
        for (size_t j = 0; j < GROUP; j++) sums[j] += w[i + j];
#pragma omp simd reduction(+ : sum)
    for (size_t j = 0; j < GROUP; j++) sum += sums[j];
    return sum;
}

/* The first id whose running sum exceeds its share of the total. An id without weight never comes out. */
static int64_t draw(residual r, double uniform) {
    const size_t num_pieces = (r.vocab + PIECE - 1) / PIECE;
    double sums[num_pieces], total = 0.0;
    float w[PIECE];
    size_t next = 0;
    for (size_t piece = 0; piece < num_pieces; piece++)
        total += sums[piece] = weigh(&r, piece * PIECE, &next, w);
    if (!(total > 0.0)) {
        if (!r.num_ids) return 0; /* not finite: the caller faults it */
        r.num_ids = 0;            /* p == q */
        return draw(r, uniform);
    }
    const double share = uniform * total, below = nextafter(total, 0.0);
    const double target = share < below ? share : below;
    double running = 0.0;
    size_t piece = 0;
    while (!(running + sums[piece] > target)) running += sums[piece++];
    next = 0;
    weigh(&r, piece * PIECE, &next, w);
    int64_t found = 0;
    for (size_t i = 0; i < PIECE && piece * PIECE + i < r.vocab; i++) {
        if (!(w[i] > 0.0f)) continue;
        found = (int64_t)(piece * PIECE + i);
        running += w[i];
        if (running > target) break;
    }
    /* Added one by one a piece can fall short of its sum by rounding; its last id with weight is then the one. */
    return found;
}

/* One token for each of n blocks (as in `specwire_token`), at the row behind what is accepted: from
 * max(scale p - q, 0), from p where that has no mass or where all is accepted. The entries of q of token i are
 * offsets[i] ... offsets[i + 1] - 1 of ids and q. */
void specwire_draw(const float *x, size_t stride, size_t vocab, const int64_t *rows, size_t n,
                   const int64_t *first, const int64_t *num_accepted, const double *scale, const int64_t *offsets,
                   const int64_t *ids, const double *q, const float *rate, const float *top, const double *mass,
                   const double *uniform, int64_t *out, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (n * vocab > 1 << 15)
    for (size_t b = 0; b < n; b++) {
        const size_t r = (size_t)(first[b] + num_accepted[b]), token = r - b;
        residual rest = {x + (size_t)rows[r] * stride, vocab, top[r], rate[r], (float)(scale[b] / mass[r]), 0, 0, 0};
        if ((int64_t)r + 1 < first[b + 1]) {
            rest.ids = ids + offsets[token];
            rest.q = q + offsets[token];
            rest.num_ids = (size_t)(offsets[token + 1] - offsets[token]);
        }
        out[b] = draw(rest, uniform[r]);
    }
}

static float largest_of(const float *x, size_t from, size_t end) {
    float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (size_t i = from; i < end; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

typedef struct {
    float x;
    int32_t id;
} candidate;

static int likelier(const void *left, const void *right) {
    const candidate *a = left, *b = right;
    return a->x != b->x ? (a->x < b->x) - (a->x > b->x) : a->id - b->id;
}

static int earlier(const void *left, const void *right) {
    return ((const candidate *)left)->id - ((const candidate *)right)->id;
}

/* What top-k, top-p and min-p leave of one row, into `kept`, likeliest first; returns how many. Only tokens above
 * some level are ranked, which is lowered until it certainly is low enough; whole blocks of ids are below it. */
static size_t truncate(const float *x, size_t vocab, float top, float rate, double mass, int64_t top_k, double top_p,
                       float min_p, candidate *kept) {
    const int counted = top_k > 0 && (size_t)top_k < vocab, nuclear = !counted && top_p < 1.0;
    const size_t num_blocks = (vocab + BLOCK - 1) / BLOCK;
    float largest[num_blocks];
    for (size_t block = 0; block < num_blocks; block++) {
        const size_t at = block * BLOCK, end = at + BLOCK < vocab ? at + BLOCK : vocab;
        largest[block] = largest_of(x, at, end);
    }
    float bound = top;
    for (float octaves = 2.0f;; octaves *= 1.25f) {
        bound = octaves > 128.0f ? -INFINITY : top - octaves / rate;
        int64_t num = 0;
        double held = 0.0;
        for (size_t block = 0; block < num_blocks && (counted || nuclear); block++) {
            if (!(largest[block] >= bound)) continue;
            const size_t at = block * BLOCK, end = at + BLOCK < vocab ? at + BLOCK : vocab;
            float sum = 0.0f;
            if (counted)
                for (size_t i = at; i < end; i++) num += x[i] >= bound;
            else
#pragma omp simd reduction(+ : sum)
                for (size_t i = at; i < end; i++) sum += x[i] >= bound ? power((x[i] - top) * rate) : 0.0f;
            held += sum;
        }
        if (bound == -INFINITY ||
            (counted ? num >= top_k : nuclear ? held >= top_p * mass : exp2f(-octaves) < 0.99f * min_p))
            break;
    }
    size_t num = 0;
    for (size_t block = 0; block < num_blocks; block++) {
        if (!(largest[block] >= bound)) continue;
        for (size_t i = block * BLOCK; i < (block + 1) * BLOCK && i < vocab; i++)
            if (x[i] >= bound) kept[num++] = (candidate){x[i], (int32_t)i};
    }
    qsort(kept, num, sizeof *kept, likelier);
    if (counted && num > (size_t)top_k) num = (size_t)top_k;
    double total = mass, before = 0.0;
    if (counted) {
        total = 0.0;
        for (size_t i = 0; i < num; i++) total += power((kept[i].x - top) * rate);
    }
    for (size_t i = 0; i < num; i++) {
        const float weight = power((kept[i].x - top) * rate);
        if (i > 0 && ((top_p < 1.0 && !(before < top_p * total)) || weight < min_p || weight == 0.0f)) return i;
        before += weight;
    }
    return num;
}

/* For each of n rows: how many tokens are left, and all of them in ascending order with their p where they are
 * no more than `most`; ids and probs are [n, most]. A count of -1 says that memory was short. */
void specwire_truncate(const float *x, size_t stride, size_t vocab, const int64_t *rows, size_t n, const float *rate,
                       const float *top, const double *mass, const int64_t *top_k, const double *top_p,
                       const float *min_p, const int64_t *most, int64_t *counts, int64_t *ids, float *probs,
                       int threads) {
#pragma omp parallel num_threads(threads) if (n * vocab > 1 << 15)
    {
        candidate *kept = malloc(vocab * sizeof *kept);
#pragma omp for schedule(dynamic)
        for (size_t r = 0; r < n; r++) {
            counts[r] = kept ? 0 : -1;
            if (!kept || !isfinite(top[r])) continue;
            const size_t num = truncate(x + (size_t)rows[r] * stride, vocab, top[r], rate[r], mass[r], top_k[r],
                                        top_p[r], min_p[r], kept);
            counts[r] = (int64_t)num;
            if (num > (size_t)*most) continue;
            double total = 0.0;
            for (size_t i = 0; i < num; i++) total += power((kept[i].x - top[r]) * rate[r]);
            qsort(kept, num, sizeof *kept, earlier);
            for (size_t i = 0; i < num; i++) {
                ids[r * (size_t)*most + i] = kept[i].id;
                probs[r * (size_t)*most + i] = (float)(power((kept[i].x - top[r]) * rate[r]) / total);
            }
        }
        free(kept);
    }
}

/* `shared.randomness.philox`: the first three words. */
static inline void philox(uint64_t seed, uint64_t position, uint32_t purpose, uint32_t last, uint32_t out[3]) {
    uint32_t c0 = (uint32_t)position, c1 = last, c2 = purpose, c3 = (uint32_t)(position >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)c0 * 0xD2511F53u, b = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
}

/* `shared.randomness.uniforms` of n draws. */
void specwire_uniforms(size_t n, const int64_t *seed, const int64_t *position, const int64_t *base, uint32_t purpose,
                       double *out) {
    for (size_t i = 0; i < n; i++) {
        uint32_t words[3];
        philox((uint64_t)seed[i], (uint64_t)position[i], purpose, (uint32_t)base[i], words);
        out[i] = (double)(((uint64_t)words[1] << 32 | words[0]) >> 11) * 0x1p-53;
    }
}

/* The uniform number in (0, 1) whose -log is the Exp(1) draw. */
static inline double open_uniform(const uint32_t words[3]) {
    const uint64_t word = (uint64_t)words[1] << 32 | words[0];
    return ((double)(word >> 11) + 0.5) * 0x1p-53;
}

typedef struct {
    double ratio;
    int64_t id;
} choice;

static void look_into(const float *x, size_t vocab, float top, float rate, uint64_t seed, uint64_t position,
                      size_t block, double smallest, uint32_t place, choice *best) {
    const size_t at = block * BLOCK;
    for (size_t i = 0; i < BLOCK && at + i < vocab; i++) {
        const double weight = power((x[at + i] - top) * rate);
        if (!(weight > 0.0) || smallest / weight >= best->ratio) continue;
        double noise = smallest;
        if (i != place) {
            uint32_t words[3];
            philox(seed, position, COUPLED | EXCESS, (uint32_t)(at + i), words);
            noise -= log(open_uniform(words));
        }
        if (noise / weight < best->ratio) *best = (choice){noise / weight, (int64_t)(at + i)};
    }
}

/* `open_uniform` of DRAWS blocks from `from` on, side by side. */
static void draw_blocks(uint64_t seed, uint64_t position, uint32_t from, double uniform[DRAWS]) {
    uint32_t c0[DRAWS], c1[DRAWS], c2[DRAWS], c3[DRAWS];
    for (uint32_t i = 0; i < DRAWS; i++) {
        c0[i] = (uint32_t)position;
        c1[i] = from + i;
        c2[i] = COUPLED;
        c3[i] = (uint32_t)(position >> 32);
    }
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
#pragma omp simd
        for (uint32_t i = 0; i < DRAWS; i++) {
            const uint64_t a = (uint64_t)c0[i] * 0xD2511F53u, b = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(b >> 32) ^ c1[i] ^ k0;
            c1[i] = (uint32_t)b;
            c2[i] = (uint32_t)(a >> 32) ^ c3[i] ^ k1;
            c3[i] = (uint32_t)a;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
#pragma omp simd
    for (uint32_t i = 0; i < DRAWS; i++)
        uniform[i] = ((double)(((uint64_t)c1[i] << 32 | c0[i]) >> 11) + 0.5) * 0x1p-53;
}

/* The id with the smallest noise / weight of one row. */
static int64_t coupled_choice(const float *x, size_t vocab, float top, int64_t likeliest, float rate, uint64_t seed,
                              uint64_t position) {
    choice best = {INFINITY, likeliest};
    const size_t num_blocks = (vocab + BLOCK - 1) / BLOCK, first = (size_t)likeliest / BLOCK;
    uint32_t words[3];
    philox(seed, position, COUPLED, (uint32_t)first, words);
    look_into(x, vocab, top, rate, seed, position, first, -log(open_uniform(words)) / BLOCK,
              words[2] % BLOCK, &best);
    for (size_t from = 0; from < num_blocks; from += DRAWS) {
        const size_t num = from + DRAWS < num_blocks ? DRAWS : num_blocks - from;
        float weight[DRAWS];
        double uniform[DRAWS];
        for (size_t i = 0; i < num; i++) {
            const size_t at = (from + i) * BLOCK, end = at + BLOCK < vocab ? at + BLOCK : vocab;
            weight[i] = largest_of(x, at, end);
        }
#pragma omp simd
        for (size_t i = 0; i < num; i++) weight[i] = power((weight[i] - top) * rate);
        draw_blocks(seed, position, (uint32_t)from, uniform);
        for (size_t i = 0; i < num; i++) {
            /* Its smallest ratio is -log(uniform) / (32 weight), and -log(u) >= 1 - u. */
            if (1.0 - uniform[i] > best.ratio * weight[i] * BLOCK) continue;
            if (from + i == first || !(weight[i] > 0.0f)) continue;
            philox(seed, position, COUPLED, (uint32_t)(from + i), words);
            look_into(x, vocab, top, rate, seed, position, from + i, -log(uniform[i]) / BLOCK,
                      words[2] % BLOCK, &best);
        }
    }
    return best.id;
}

/* Coupled verification of n blocks (as in `specwire_token`). */
void specwire_coupled(const float *x, size_t stride, size_t vocab, const int64_t *rows, size_t n,
                      const int64_t *first, const int64_t *drafted, const float *rate, const int64_t *seed,
                      const int64_t *position, float *top, int64_t *num_accepted, int64_t *out, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (n > 1)
    for (size_t b = 0; b < n; b++) {
        const size_t num_drafted = (size_t)(first[b + 1] - first[b]) - 1;
        for (size_t i = 0; i <= num_drafted; i++) {
            const size_t r = (size_t)first[b] + i;
            const float *row = x + (size_t)rows[r] * stride;
            int64_t likeliest;
            double mass;
            top[r] = read_row(row, vocab, 0.0f, &likeliest, &mass);
            num_accepted[b] = (int64_t)i;
            out[b] = isfinite(top[r]) ? coupled_choice(row, vocab, top[r], likeliest, rate[r], (uint64_t)seed[r],
                                                       (uint64_t)position[r])
                                      : 0;
            if (i == num_drafted || !isfinite(top[r]) || out[b] != drafted[r - b]) break;
        }
    }
}
