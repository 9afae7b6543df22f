/* A decode step of a Llama-like text model: all layers and the final norm, for the new tokens of several sequences.
 *
 * decode_step.py calls this library with ctypes, and describes the structures. The library is compiled once for each
 * instruction set (setup.py). All of them come from this source, in GCC's vector extensions.
 *
 * Weights are rows of numbers in float32, bfloat16, or 8 or 4 bits with scales. Activations are float32, and
 * rounded to 8 bits where a layer needs it. Each output is summed in an order that depends only on the width of its row,
 * so the result of a sequence does not depend on the other sequences of the step.
 */

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "workers.h"

/* Number of floats in a vector. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else /* NEON, SSE2 and others */
#define LANES 4
#endif

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
/* Vectors in memory at any address. */
typedef float stored_floats __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint32_t stored_words __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint16_t stored_halves __attribute__((vector_size(2 * LANES), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))
/* Repeat a statement for 0 to a constant. The loop is unrolled, so that the compiler keeps arrays in registers. */
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

/* Formats of numbers. A number has 32 >> format bits. BYTE is int8 or a float of 8 bits. UINT4 has the first of two
 * numbers in the low bits. */
enum { FLOAT32, BFLOAT16, BYTE, UINT4 };
enum { SILU, GELU_TANH };
/* How a layer rounds its input: not at all, by the largest value of each row, or by constants from calibration. */
enum { NONE, BY_LARGEST, CONSTANTS };

/* Largest number of rows of a product that are multiplied at a time. */
#define GROUP 8
/* Number of tokens whose scores are computed at a time. */
#define TILE_TOKENS 64

/* A linear layer, [outputs, inputs]. An integer n is the weight n * scale + shift, or codes[n] * scale. `inputs` is a
 * multiple of 16, in BYTE of 64 and in UINT4 of 128. `group` divides this multiple, or this multiple divides `group`. */
struct matrix {
    const void *weights;
    const float *scales, *shifts; /* of BYTE and UINT4, [outputs, inputs / group]; no shifts in BYTE mean 0 */
    const float *codes;           /* of UINT4, [16], or NULL */
    const float *bias;            /* or NULL */
    int64_t outputs, inputs;
    int64_t stride; /* distance between two rows */
    int64_t format;
    int64_t is_float8; /* whether a number of BYTE is a float8_e4m3fn, whose scales are multiplied by 2^120 */
    int64_t group;     /* number of consecutive inputs with the same scale and shift */
    int64_t rounding;  /* of the input to 8 bits */
    float input_step, input_zero; /* of rounding by CONSTANTS: distance of two values, and the integer that is 0 */
};

struct layer {
    const float *norm, *mlp_norm; /* [hidden] */
    const float *head_norm;       /* of each head of queries and keys, [heads + kv_heads, head_dim], or NULL */
    struct matrix qkv, output, gate_up, down;
    int64_t window; /* largest number of tokens that a token attends to */
    float scaling;  /* factor of the attention scores */
    float eps, mlp_eps, head_eps;
};

struct model {
    const struct layer *layers;
    const float *norm; /* [hidden] */
    float *scratch;    /* [rows of the step, hidden + 2 * (heads + kv_heads) * head_dim + 3 * intermediate] */
    int64_t num_layers, hidden, heads, kv_heads, head_dim, intermediate;
    int64_t norms_late; /* whether `head_norm` follows the rotation */
    int64_t activation;
    float eps;
};

/* The sequences of a step, with a row for each new token, and the cache, whose blocks are [block_size, kv_heads,
 * head_dim]. */
struct batch {
    const float *cosines, *sines; /* [rows, head_dim]; the first half of the sines is negated */
    const int64_t *starts;        /* first row of each sequence, and the number of rows, [sequences + 1] */
    const int64_t *lengths;       /* number of tokens up to the token of each row */
    const int64_t *blocks;        /* KV blocks of the sequence of each row, [rows, blocks_per_row] */
    void *cache;                  /* keys and values of each layer in turn */
    int64_t sequences, rows, blocks_per_row, block_size;
    int64_t cache_stride; /* distance between the keys and the values of a layer */
    int64_t cache_format;
};

/* ---- Vectors ---- */

INLINE vector broadcast(float value) { return value - (vector){0}; } /* and not +, so that -0 stays -0 */

/* Return the address of the number at `place` in an array. */
INLINE const void *address(const void *numbers, int64_t place, int64_t format) {
    return (const char *)numbers + (place * 4 >> format);
}

/* Return numbers in float32 or bfloat16. */
INLINE vector load(const void *numbers, int64_t place, int64_t format) {
    const void *source = address(numbers, place, format);
    if (format == FLOAT32)
        return *(const stored_floats *)source;
    return (vector)(__builtin_convertvector(*(const stored_halves *)source, words) << 16);
}

INLINE vector load_floats(const float *source) { return load(source, 0, FLOAT32); }

INLINE void store_floats(float *target, vector values) { *(stored_floats *)target = values; }

INLINE vector select_lanes(integers mask, vector yes, vector no) {
    return (vector)(((integers)yes & mask) | ((integers)no & ~mask));
}

/* Return the number of each lane. */
INLINE integers lanes(void) {
    integers numbers;
    EACH(lane, LANES) numbers[lane] = lane;
    return numbers;
}

/* Return the sum of all lanes. Each round adds the second half of the remaining lanes to the first. */
INLINE float sum_lanes(vector values) {
#pragma GCC unroll 4
    for (int width = LANES / 2; width > 0; width /= 2)
        values += __builtin_shuffle(values, (lanes() + width) & (LANES - 1));
    return values[0];
}

/* Return the entries of a table of 16 floats at `places`. */
INLINE vector look_up(const float *table, integers places) {
#if LANES == 16
    return __builtin_shuffle(load_floats(table), places);
#elif LANES == 8
    return __builtin_shuffle(load_floats(table), load_floats(table + 8), places);
#else
    vector found;
    EACH(lane, LANES) found[lane] = table[places[lane]];
    return found;
#endif
}

/* Return e^x, correct to about two units in the last place. Results below 10^-38 and above 10^38 are limited. */
INLINE vector exponential(vector x) {
    x = select_lanes(x < -87.0f, broadcast(-87.0f), x);
    x = select_lanes(x > 88.0f, broadcast(88.0f), x);
    /* x = n ln(2) + rest. Adding 1.5 * 2^23 rounds to the integer n, which is then in the lowest bits. */
    const float rounding = 12582912.0f;
    vector shifted = x * 1.44269504f + rounding;
    vector n = shifted - rounding;
    vector rest = x - n * 0.693359375f + n * 2.12194440e-4f;
    vector power = 1.9875691500e-4f * rest + 1.3981999507e-3f; /* the polynomial of Cephes */
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    return power * (vector)(((integers)shifted << 23) + (127 << 23));
}

/* ---- Products ---- */

/* Number of weight rows in a tile, so that the sums, one vector for each and for the input fit into the registers. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE(batch) ((batch) <= 2 ? 8 : (batch) <= 6 ? 4 : 3)
#else
#define TILE(batch) ((batch) <= 2 ? 4 : (batch) <= 5 ? 2 : 1)
#endif

struct product {
    const struct matrix *matrix;
    float *input;  /* [rows, input_stride], which `arrange` has arranged */
    float *output; /* [rows, output_stride] */
    int64_t rows, input_stride, output_stride;
    bool adds; /* whether the product is added to the output */
    int64_t per_chunk; /* number of outputs of a chunk, if all threads compute the product */
};

/* Return how many numbers a product reads in one 32-bit word. Reading words takes fewer instructions than converting
 * vectors of narrower numbers, but the width of the rows must be a multiple of whole vectors of words. */
static int64_t numbers_per_word(const struct matrix *m) {
    return m->inputs % (LANES << m->format) == 0 ? 1 << m->format : 1;
}

/* Move the numbers of the input to where `unpack` needs them: each vector of words has one number of each word. */
static void arrange(float *input, const struct matrix *m) {
    const int64_t parts = numbers_per_word(m);
    float old[8 * LANES];
    for (float *group = input; parts > 1 && group < input + m->inputs; group += parts * LANES) {
        memcpy(old, group, sizeof(float) * parts * LANES);
        for (int64_t i = 0; i < parts * LANES; i++)
            group[i % parts * LANES + i / parts] = old[i];
    }
}

/* How a product reads weights: a constant wherever it is used. */
struct reading {
    int format, parts;
    bool has_groups; /* whether each number is scaled, because a row has several scales, or shifts */
    bool has_codes, is_float8;
};

/* Return one number of each word of a vector at `place`. */
INLINE vector unpack(const struct matrix *m, int64_t place, const struct reading as, const int part) {
    if (as.parts == 1)
        return load(m->weights, place, as.format);
    words packed = *(const stored_words *)address(m->weights, place, as.format);
    if (as.format == BFLOAT16)
        return (vector)(part == 0 ? packed << 16 : packed & 0xffff0000);
    if (as.is_float8) /* The bits of e4m3 in the places of a float32 are the number times 2^-120. */
        return (vector)((integers)(packed << (24 - 8 * part)) >> 4 & (int32_t)0x87f00000);
    if (as.format == BYTE)
        return __builtin_convertvector((integers)(packed << (24 - 8 * part)) >> 24, vector);
    integers numbers = (integers)(packed >> (4 * part) & 15);
    return as.has_codes ? look_up(m->codes, numbers) : __builtin_convertvector(numbers, vector);
}

/* Multiply `tile` rows of weights, from `first` on, by `batch` rows of input. The last three are constants. */
INLINE void multiply_tile(
    const struct product *p, int64_t first, const int tile, const struct reading as, const int batch) {
    const struct matrix *m = p->matrix;
    const int chunk = as.parts * LANES; /* numbers that are read at a time */
    const int64_t group = as.has_groups ? m->group : m->inputs, span = group < chunk ? chunk : group;
    const integers group_of = group < chunk ? lanes() / (int32_t)(group / as.parts) : (integers){0};
    vector sums[8][GROUP] = {0}, weights[8], scales[8], shifts[8];
    for (int64_t start = 0; start < m->inputs; start += span) {
        for (int row = 0; as.has_groups && row < tile; row++) {
            int64_t place = ((first + row) * m->inputs + start) / group;
            scales[row] = __builtin_shuffle(load_floats(m->scales + place), group_of);
            if (!as.has_codes && !as.is_float8)
                shifts[row] = __builtin_shuffle(load_floats(m->shifts + place), group_of);
        }
        for (int64_t k = start; k < start + span; k += chunk)
            EACH(part, as.parts) {
                EACH(row, tile) {
                    int64_t place = (first + row) * m->stride + k;
                    weights[row] = unpack(m, place, as, part);
                    if (as.has_groups)
                        weights[row] = weights[row] * scales[row];
                    if (as.has_groups && !as.has_codes && !as.is_float8)
                        weights[row] += shifts[row];
                    if (part == 0) /* of the next tile */
                        __builtin_prefetch(address(m->weights, place + tile * m->stride, as.format));
                }
                EACH(b, batch) {
                    vector input = load_floats(p->input + b * p->input_stride + k + part * LANES);
                    EACH(row, tile) sums[row][b] += weights[row] * input;
                }
            }
    }
    EACH(row, tile) EACH(b, batch) {
        float *output = p->output + b * p->output_stride + first + row;
        float sum = sum_lanes(sums[row][b]);
        if (as.format == BYTE && !as.has_groups)
            sum *= m->scales[first + row];
        if (m->bias != NULL)
            sum += m->bias[first + row];
        *output = p->adds ? *output + sum : sum;
    }
}

INLINE void multiply_tiles(
    const struct product *p, int64_t first, int64_t last, const struct reading as, const int batch) {
    for (; first + TILE(batch) <= last; first += TILE(batch))
        multiply_tile(p, first, TILE(batch), as, batch);
    for (; first < last; first++)
        multiply_tile(p, first, 1, as, batch);
}

/* Call a function whose last argument is the number of rows, as a constant. */
#define CASE(count, function, ...) case count: function(__VA_ARGS__, count); break;
#define WITH_CONSTANT_ROWS(rows, ...)                                                                                  \
    switch (rows) {                                                                                                    \
        CASE(1, __VA_ARGS__) CASE(2, __VA_ARGS__) CASE(3, __VA_ARGS__) CASE(4, __VA_ARGS__)                            \
        CASE(5, __VA_ARGS__) CASE(6, __VA_ARGS__) CASE(7, __VA_ARGS__) CASE(8, __VA_ARGS__)                            \
    }

/* Compute the outputs [first, last) of all rows of a product. */
static void multiply_rows(const struct product *p, int64_t first, int64_t last) {
    const struct matrix *m = p->matrix;
#define READ_AS(...) WITH_CONSTANT_ROWS(p->rows, multiply_tiles, p, first, last, ((struct reading){__VA_ARGS__}))
    if (m->format == FLOAT32)
        READ_AS(FLOAT32, 1)
    else if (m->format == BFLOAT16 && numbers_per_word(m) == 2)
        READ_AS(BFLOAT16, 2)
    else if (m->format == BFLOAT16)
        READ_AS(BFLOAT16, 1)
    else if (m->is_float8)
        READ_AS(BYTE, 4, .has_groups = true, .is_float8 = true)
    else if (m->format == BYTE && m->shifts == NULL)
        READ_AS(BYTE, 4)
    else if (m->format == BYTE)
        READ_AS(BYTE, 4, .has_groups = true)
    else if (m->codes == NULL)
        READ_AS(UINT4, 8, .has_groups = true)
    else
        READ_AS(UINT4, 8, .has_groups = true, .has_codes = true)
}

/* ---- Products on all threads ---- */

/* Smallest number of weights in a chunk, which take about as long as a message between two threads. */
#define LEAST_WEIGHTS 16384
/* Largest number of chunks of a product. The more chunks, the less a slow thread delays the others. */
#define MOST_CHUNKS 48

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void run_product(const void *context, int chunk) {
    const struct product *whole = context;
    int64_t first = chunk * whole->per_chunk, last = least(first + whole->per_chunk, whole->matrix->outputs);
    for (int64_t row = 0; row < whole->rows; row += GROUP) {
        struct product p = *whole;
        p.input += row * p.input_stride;
        p.output += row * p.output_stride;
        p.rows = least(whole->rows - row, GROUP);
        multiply_rows(&p, first, last);
    }
}

/* Round a row of the input to 8 bits, and multiply it by the distance of two rounded values. */
static void round_input(float *input, const struct matrix *m) {
    const float rounding = 12582912.0f; /* 1.5 * 2^23; the sum has no fraction */
    float step = m->input_step;
    if (m->rounding == BY_LARGEST) {
        step = FLT_MIN;
        for (int64_t i = 0; i < m->inputs; i++)
            step = fmaxf(step, fabsf(input[i]));
        step /= 127;
    }
    for (int64_t i = 0; i < m->inputs; i += LANES) {
        vector rounded = load_floats(input + i) / step + m->input_zero;
        rounded = select_lanes(rounded < -128.0f, broadcast(-128.0f), rounded);
        rounded = select_lanes(rounded > 127.0f, broadcast(127.0f), rounded) + rounding - rounding;
        store_floats(input + i, (rounded - m->input_zero) * step);
    }
}

/* Run a product in chunks of multiples of 16 outputs. */
static void multiply(struct product p) {
    int64_t enough = LEAST_WEIGHTS / p.matrix->inputs, few = p.matrix->outputs / MOST_CHUNKS;
    p.per_chunk = ((enough > few ? enough : few) / 16 + 1) * 16;
    p.input_stride = p.matrix->inputs;
    p.output_stride = p.matrix->outputs;
    for (int64_t row = 0; row < p.rows; row++) {
        if (p.matrix->rounding != NONE)
            round_input(p.input + row * p.input_stride, p.matrix);
        arrange(p.input + row * p.input_stride, p.matrix);
    }
    run_phase(run_product, &p, (int)((p.matrix->outputs - 1) / p.per_chunk + 1));
}

/* ---- Gates, norms and rotary embeddings ---- */

/* Multiply the second half of each row by x * sigmoid(s), where x is the first half, the gates. SiLU has s = x, and
 * GELU in its approximation with tanh has a polynomial. */
static void gate(const float *gates, int64_t activation, float *output, int64_t rows, int64_t width) {
    for (; rows > 0; rows--, gates += 2 * width, output += width)
        for (int64_t i = 0; i < width; i += LANES) {
            vector x = load_floats(gates + i);
            vector s = activation == SILU ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
            store_floats(output + i, x / (1.0f + exponential(-s)) * load_floats(gates + width + i));
        }
}

static void rms_norm(const float *input, const float *weight, float eps, float *output, int64_t rows, int64_t width) {
    for (; rows > 0; rows--, input += width, output += width) {
        vector squares = {0};
        for (int64_t i = 0; i < width; i += LANES)
            squares += load_floats(input + i) * load_floats(input + i);
        float factor = 1.0f / sqrtf(sum_lanes(squares) / (float)width + eps);
        for (int64_t i = 0; i < width; i += LANES)
            store_floats(output + i, load_floats(input + i) * factor * load_floats(weight + i));
    }
}

/* Rotate a head in place. Each element of its first half pairs with an element of its second half. */
static void rotate(float *head, const float *cosines, const float *sines, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float first = head[i], second = head[half + i];
        head[i] = first * cosines[i] + second * sines[i];
        head[half + i] = second * cosines[half + i] + first * sines[half + i];
    }
}

/* ---- Attention ---- */

struct step {
    const struct model *model;
    const struct batch *batch;
    const struct layer *layer;
    int64_t number;  /* of the layer */
    float *qkv;      /* [rows, heads + 2 * kv_heads, head_dim] */
    float *attended; /* [rows, heads, head_dim] */
};

/* Add rows of a matrix to each output, weighted by the input. The last two arguments are constants. */
INLINE void add_weighted_rows(const struct product *p, const int format, const int batch) {
    const struct matrix *m = p->matrix;
    for (int64_t i = 0; i < m->inputs; i += LANES) {
        vector sums[GROUP];
        EACH(b, batch) sums[b] = load_floats(p->output + b * p->output_stride + i);
        for (int64_t row = 0; row < m->outputs; row++) {
            vector values = load(m->weights, row * m->stride + i, format);
            EACH(b, batch) sums[b] += values * p->input[b * p->input_stride + row];
        }
        EACH(b, batch) store_floats(p->output + b * p->output_stride + i, sums[b]);
    }
}

/* The attention of one query to the tokens so far. */
struct attention {
    float largest; /* score */
    float sum;     /* of the exponentials of all scores relative to the largest */
    float *output; /* [head_dim], the values weighted by these exponentials */
};

/* Replace the scores of further tokens by their exponentials. A larger score than before corrects `a`. */
static void exponentiate(struct attention *a, int64_t head_dim, float *scores, int64_t tokens) {
    for (int64_t token = tokens; token % LANES != 0; token++)
        scores[token] = -INFINITY;
    vector most = broadcast(a->largest), sums = {0};
    for (int64_t token = 0; token < tokens; token += LANES) {
        vector some = load_floats(scores + token);
        most = select_lanes(some > most, some, most);
    }
    float largest = most[0];
    EACH(lane, LANES) largest = most[lane] > largest ? most[lane] : largest;
    float correction = exponential(broadcast(a->largest - largest))[0];
    for (int64_t i = 0; correction != 1.0f && i < head_dim; i += LANES)
        store_floats(a->output + i, load_floats(a->output + i) * correction);
    for (int64_t token = 0; token < tokens; token += LANES) {
        vector some = exponential(load_floats(scores + token) - largest);
        store_floats(scores + token, some);
        sums += some;
    }
    a->largest = largest;
    a->sum = a->sum * correction + sum_lanes(sums);
}

/* Start to fetch rows of memory that are as wide, many and far from each other as the rows of `like`. */
static void fetch(const void *rows, const struct matrix *like) {
    for (int64_t row = 0; row < like->outputs; row++)
        for (int64_t i = 0; i < like->inputs; i += 16) /* 64 bytes of float32, a line of the processor's caches */
            __builtin_prefetch(address(rows, row * like->stride + i, like->format));
}

/* Return the place in the cache of a token's key. The value is `cache_stride` numbers behind it. */
static int64_t place_of(const struct step *s, int64_t row, int64_t token, int64_t kv_head) {
    const struct batch *b = s->batch;
    int64_t block = b->blocks[row * b->blocks_per_row + token / b->block_size];
    int64_t slot = block * b->block_size + token % b->block_size;
    return 2 * s->number * b->cache_stride + (slot * s->model->kv_heads + kv_head) * s->model->head_dim;
}

/* Compute the attention of at most GROUP queries that share keys and values, in one pass over the cache. The output
 * and the sums of the exponentials are corrected whenever a tile has a larger score than all tiles before. */
static void attend_queries(
    const struct step *s, int64_t row, int64_t kv_head, float *query, float *output, int64_t queries) {
    const struct batch *b = s->batch;
    const int64_t head_dim = s->model->head_dim, length = b->lengths[row];
    struct attention attentions[GROUP];
    float scores[GROUP * TILE_TOKENS];
    struct matrix keys = {.inputs = head_dim, .stride = s->model->kv_heads * head_dim, .format = b->cache_format};
    struct matrix values = keys;
    struct product with_keys = {&keys, query, scores, queries, head_dim, TILE_TOKENS};
    struct product with_values = {&values, scores, output, queries, TILE_TOKENS, head_dim};
    for (int64_t q = 0; q < queries; q++)
        attentions[q] = (struct attention){-INFINITY, 0, output + q * head_dim};
    memset(output, 0, sizeof(float) * queries * head_dim);
    int64_t first = length > s->layer->window ? length - s->layer->window : 0;
    for (int64_t token = first; token < length; token += keys.outputs) {
        int64_t place = place_of(s, row, token, kv_head);
        keys.outputs = least(least(b->block_size - token % b->block_size, length - token), TILE_TOKENS);
        values.outputs = keys.outputs;
        keys.weights = address(b->cache, place, b->cache_format);
        values.weights = address(b->cache, place + b->cache_stride, b->cache_format);
        fetch(values.weights, &keys);
        multiply_rows(&with_keys, 0, keys.outputs);
        if (token + keys.outputs < length) /* the distance of the next tile is unknown to the processor */
            fetch(address(b->cache, place_of(s, row, token + keys.outputs, kv_head), b->cache_format), &keys);
        for (int64_t q = 0; q < queries; q++)
            exponentiate(&attentions[q], head_dim, scores + q * TILE_TOKENS, keys.outputs);
        if (b->cache_format == FLOAT32)
            WITH_CONSTANT_ROWS(queries, add_weighted_rows, &with_values, FLOAT32)
        else
            WITH_CONSTANT_ROWS(queries, add_weighted_rows, &with_values, BFLOAT16)
    }
    for (int64_t q = 0; q < queries; q++)
        for (int64_t i = 0; i < head_dim; i++)
            output[q * head_dim + i] /= attentions[q].sum;
}

/* Normalize and rotate a head of the queries or keys of a row in place. */
static void prepare_head(const struct step *s, int64_t row, int64_t head, float *values) {
    const struct model *m = s->model;
    const float *weight = s->layer->head_norm == NULL ? NULL : s->layer->head_norm + head * m->head_dim;
    if (weight != NULL && !m->norms_late)
        rms_norm(values, weight, s->layer->head_eps, values, 1, m->head_dim);
    rotate(values, s->batch->cosines + row * m->head_dim, s->batch->sines + row * m->head_dim, m->head_dim / 2);
    if (weight != NULL && m->norms_late)
        rms_norm(values, weight, s->layer->head_eps, values, 1, m->head_dim);
}

/* Store a number in the cache. bfloat16 is rounded to the nearest, to even. */
static void store(void *cache, int64_t place, float number, int64_t format) {
    uint32_t bits, rounding;
    memcpy(&bits, &number, sizeof(bits));
    rounding = isnan(number) ? 0 : 0x7fff + (bits >> 16 & 1); /* could turn NaN into infinity */
    if (format == FLOAT32)
        ((float *)cache)[place] = number;
    else
        ((uint16_t *)cache)[place] = (uint16_t)((bits + rounding) >> 16 | (isnan(number) ? 0x40 : 0));
}

/* Store the new key and value of one row and one head, and compute the attention of the queries that share them. */
static void attend_row(const struct step *s, int64_t row, int64_t kv_head) {
    const struct model *m = s->model;
    const int64_t group = m->heads / m->kv_heads;
    const int64_t first = kv_head * group, last = first + group, format = s->batch->cache_format;
    float *heads = s->qkv + row * (m->heads + 2 * m->kv_heads) * m->head_dim;
    float *key = heads + (m->heads + kv_head) * m->head_dim, *value = key + m->kv_heads * m->head_dim;
    prepare_head(s, row, m->heads + kv_head, key);
    int64_t place = place_of(s, row, s->batch->lengths[row] - 1, kv_head);
    for (int64_t i = 0; i < m->head_dim; i++) {
        store(s->batch->cache, place + i, key[i], format);
        store(s->batch->cache, place + s->batch->cache_stride + i, value[i], format);
    }
    for (int64_t head = first; head < last; head++) {
        float *query = heads + head * m->head_dim;
        prepare_head(s, row, head, query);
        for (int64_t i = 0; i < m->head_dim; i++)
            query[i] *= s->layer->scaling;
        arrange(query, &(struct matrix){.inputs = m->head_dim, .format = format});
    }
    for (int64_t head = first; head < last; head += GROUP) {
        float *output = s->attended + (row * m->heads + head) * m->head_dim;
        attend_queries(s, row, kv_head, heads + head * m->head_dim, output, least(last - head, GROUP));
    }
}

/* Compute the attention of one sequence and one head of keys and values. Each new token attends to those before it. */
static void attend(const void *context, int chunk) {
    const struct step *s = context;
    const int64_t sequence = chunk / s->model->kv_heads, kv_head = chunk % s->model->kv_heads;
    for (int64_t row = s->batch->starts[sequence]; row < s->batch->starts[sequence + 1]; row++)
        attend_row(s, row, kv_head);
}

/* ---- The library's functions ---- */

/* Sizes of the structures, by which the caller recognizes a library that another version was compiled from. */
const int64_t structure_sizes[] = {
    sizeof(struct matrix), sizeof(struct layer), sizeof(struct model), sizeof(struct batch)};

/* Run all layers and the final norm on `hidden`, [rows, hidden], in place. */
void run_step(const struct model *m, const struct batch *batch, float *hidden, int threads) {
    const int64_t rows = batch->rows;
    float *normed = m->scratch;
    float *qkv = normed + rows * m->hidden;
    float *attended = qkv + rows * (m->heads + 2 * m->kv_heads) * m->head_dim;
    float *gated = attended + rows * m->heads * m->head_dim;
    float *gate_up = gated + rows * m->intermediate;
    struct step s = {.model = m, .batch = batch, .qkv = qkv, .attended = attended};
    enter_pool(threads);
    for (; s.number < m->num_layers; s.number++) {
        const struct layer *layer = s.layer = m->layers + s.number;
        rms_norm(hidden, layer->norm, layer->eps, normed, rows, m->hidden);
        multiply((struct product){&layer->qkv, normed, qkv, rows});
        run_phase(attend, &s, (int)(batch->sequences * m->kv_heads));
        multiply((struct product){&layer->output, attended, hidden, rows, .adds = true});
        rms_norm(hidden, layer->mlp_norm, layer->mlp_eps, normed, rows, m->hidden);
        multiply((struct product){&layer->gate_up, normed, gate_up, rows});
        gate(gate_up, m->activation, gated, rows, m->intermediate);
        multiply((struct product){&layer->down, gated, hidden, rows, .adds = true});
    }
    rms_norm(hidden, m->norm, m->eps, hidden, rows, m->hidden);
    leave_pool();
}

/* Compute a linear layer, from [rows, inputs] to [rows, outputs]. The order of the input changes. */
void run_linear(const struct matrix *matrix, float *input, float *output, int64_t rows, int threads) {
    enter_pool(threads);
    multiply((struct product){matrix, input, output, rows});
    leave_pool();
}
