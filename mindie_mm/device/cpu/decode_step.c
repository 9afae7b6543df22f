/* A decode step of a Llama-like text model: all layers and the final norm, for one new token of each sequence.
 *
 * decode_step.py calls this library with ctypes, and describes the structures. The library is compiled once for each
 * instruction set (setup.py). All of them come from this source, in GCC's vector extensions.
 *
 * Weights are rows of numbers in float32, bfloat16 or int8, as torch stores them. Activations are float32. Each output
 * is summed in an order that depends only on the width of its row, so the result of a sequence does not depend on the
 * other sequences of the step.
 */

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "workers.h"

#if defined(__AVX512F__)
#define LANES 16
#define INDICES {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif defined(__AVX2__)
#define LANES 8
#define INDICES {0, 1, 2, 3, 4, 5, 6, 7}
#else /* NEON, SSE2 and others */
#define LANES 4
#define INDICES {0, 1, 2, 3}
#endif

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
/* Vectors in memory at any address. */
typedef float stored_floats __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint16_t stored_halves __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
typedef int8_t stored_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t halves __attribute__((vector_size(2 * LANES)));

#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32, BFLOAT16, INT8 };
enum { SILU, GELU_TANH };

/* Largest number of sequences in a step, and of rows in a product. */
#define MOST_ROWS 8
/* Number of tokens whose scores are computed at a time. */
#define TILE_TOKENS 64

/* A linear layer, [outputs, inputs]. `inputs` is a multiple of 16. */
struct matrix {
    const void *weights;
    const float *scales; /* factor of each output, or NULL */
    const float *bias;   /* or NULL */
    int64_t outputs, inputs;
    int64_t stride; /* distance between two rows */
    int64_t format;
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
    float *scratch;    /* as many numbers as `scratch_size` returns */
    int64_t num_layers, hidden, heads, kv_heads, head_dim, intermediate;
    int64_t norms_late; /* whether `head_norm` follows the rotation */
    int64_t activation;
    float eps;
};

/* The sequences of a step, and the cache, whose blocks are [block_size, kv_heads, head_dim]. */
struct batch {
    const float *cosines, *sines; /* [rows, head_dim]; the first half of the sines is negated */
    const int64_t *lengths;       /* number of tokens of each sequence, including the new token */
    const int64_t *blocks;        /* KV blocks of each sequence, [rows, blocks_per_row] */
    void *cache;                  /* keys and values of each layer in turn */
    int64_t rows, blocks_per_row;
    int64_t block_size;
    int64_t cache_stride; /* distance between the keys and the values of a layer */
    int64_t cache_format;
};

/* ---- Vectors ---- */

INLINE vector broadcast(float value)
{
    return value - (vector){0}; /* and not +, so that -0 stays -0 */
}

/* Return the number at `place` in an array in any format. */
INLINE const void *address(const void *numbers, int64_t place, int64_t format)
{
    return (const char *)numbers + place * (format == FLOAT32 ? 4 : format == BFLOAT16 ? 2 : 1);
}

INLINE vector load(const void *numbers, int64_t place, int64_t format)
{
    const void *source = address(numbers, place, format);
    if (format == FLOAT32)
        return *(const stored_floats *)source;
    if (format == BFLOAT16)
        return (vector)(__builtin_convertvector(*(const stored_halves *)source, words) << 16);
    /* GCC converts eightfold widths element by element, but each doubling with one or two instructions. */
    halves doubled = __builtin_convertvector(*(const stored_bytes *)source, halves);
    return __builtin_convertvector(__builtin_convertvector(doubled, integers), vector);
}

INLINE vector load_floats(const float *source)
{
    return load(source, 0, FLOAT32);
}

INLINE void store_floats(float *target, vector values)
{
    *(stored_floats *)target = values;
}

INLINE vector select_lanes(integers mask, vector yes, vector no)
{
    return (vector)(((integers)yes & mask) | ((integers)no & ~mask));
}

/* Store a vector in the format of the cache. bfloat16 is rounded to the nearest, to even. */
INLINE void store(void *numbers, int64_t place, vector values, int64_t format)
{
    void *target = (void *)address(numbers, place, format);
    if (format == FLOAT32) {
        store_floats(target, values);
        return;
    }
    words bits = (words)values;
    words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    words not_a_number = bits >> 16 | 0x40; /* rounding could turn it into infinity */
    rounded = (words)select_lanes(values != values, (vector)not_a_number, (vector)rounded);
    *(stored_halves *)target = __builtin_convertvector(rounded, stored_halves);
}

INLINE float sum_lanes(vector values)
{
    const integers indices = INDICES;
#pragma GCC unroll 4
    for (int width = LANES / 2; width > 0; width /= 2)
        values += __builtin_shuffle(values, (indices + width) & (LANES - 1));
    return values[0];
}

INLINE float largest_lane(vector values)
{
    float largest = values[0];
    for (int lane = 1; lane < LANES; lane++)
        largest = values[lane] > largest ? values[lane] : largest;
    return largest;
}

/* Return e^x, correct to about two units in the last place. Results below 10^-38 and above 10^38 are limited. */
INLINE vector exponential(vector x)
{
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
/* Distance in bytes between the weights that are multiplied and those that are fetched from memory. */
#define PREFETCH 1024

struct product {
    const struct matrix *matrix;
    const float *input; /* [rows, input_stride] */
    float *output;      /* [rows, output_stride] */
    int64_t rows, input_stride, output_stride;
    bool adds; /* whether the product is added to the output */
};

/* Multiply `tile` rows of weights, from `first` on, by `batch` rows of input. The last three are constants. */
INLINE void multiply_tile(const struct product *p, int64_t first, const int tile, const int format, const int batch)
{
    const struct matrix *m = p->matrix;
    vector sums[8][MOST_ROWS], weights[8];
#pragma GCC unroll 8
    for (int row = 0; row < tile; row++)
#pragma GCC unroll 8
        for (int b = 0; b < batch; b++)
            sums[row][b] = (vector){0};
    for (int64_t k = 0; k < m->inputs; k += LANES) {
#pragma GCC unroll 8
        for (int row = 0; row < tile; row++) {
            int64_t place = (first + row) * m->stride + k;
            weights[row] = load(m->weights, place, format);
            __builtin_prefetch((const char *)address(m->weights, place, format) + PREFETCH);
        }
#pragma GCC unroll 8
        for (int b = 0; b < batch; b++) {
            vector input = load_floats(p->input + b * p->input_stride + k);
#pragma GCC unroll 8
            for (int row = 0; row < tile; row++)
                sums[row][b] += weights[row] * input;
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < tile; row++)
#pragma GCC unroll 8
        for (int b = 0; b < batch; b++) {
            float *output = p->output + b * p->output_stride + first + row;
            float sum = sum_lanes(sums[row][b]);
            if (m->scales != NULL)
                sum *= m->scales[first + row];
            if (m->bias != NULL)
                sum += m->bias[first + row];
            *output = p->adds ? *output + sum : sum;
        }
}

INLINE void multiply_tiles(const struct product *p, int64_t first, int64_t last, const int format, const int batch)
{
    for (; first + TILE(batch) <= last; first += TILE(batch))
        multiply_tile(p, first, TILE(batch), format, batch);
    for (; first < last; first++)
        multiply_tile(p, first, 1, format, batch);
}

/* Call a function whose last argument is the number of rows, as a constant. */
#define WITH_CONSTANT_ROWS(rows, function, ...)                                                                        \
    switch (rows) {                                                                                                    \
    case 1: function(__VA_ARGS__, 1); break;                                                                           \
    case 2: function(__VA_ARGS__, 2); break;                                                                           \
    case 3: function(__VA_ARGS__, 3); break;                                                                           \
    case 4: function(__VA_ARGS__, 4); break;                                                                           \
    case 5: function(__VA_ARGS__, 5); break;                                                                           \
    case 6: function(__VA_ARGS__, 6); break;                                                                           \
    case 7: function(__VA_ARGS__, 7); break;                                                                           \
    default: function(__VA_ARGS__, 8);                                                                                 \
    }

static void multiply_float32(const struct product *p, int64_t first, int64_t last)
{
    WITH_CONSTANT_ROWS(p->rows, multiply_tiles, p, first, last, FLOAT32)
}

static void multiply_bfloat16(const struct product *p, int64_t first, int64_t last)
{
    WITH_CONSTANT_ROWS(p->rows, multiply_tiles, p, first, last, BFLOAT16)
}

static void multiply_int8(const struct product *p, int64_t first, int64_t last)
{
    WITH_CONSTANT_ROWS(p->rows, multiply_tiles, p, first, last, INT8)
}

/* Compute the outputs [first, last) of all rows of a product. */
static void multiply_rows(const struct product *p, int64_t first, int64_t last)
{
    if (p->matrix->format == FLOAT32)
        multiply_float32(p, first, last);
    else if (p->matrix->format == BFLOAT16)
        multiply_bfloat16(p, first, last);
    else
        multiply_int8(p, first, last);
}

/* ---- Products on all threads ---- */

/* Smallest number of weights in a chunk, which takes about as long as two threads need to exchange a message. */
#define LEAST_WEIGHTS 16384
/* Largest number of chunks of a product. The more chunks, the less a slow thread delays the others. */
#define MOST_CHUNKS 48

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Return the number of outputs in a chunk of a matrix, a multiple of all sizes of tiles except 3. */
static int64_t chunk_outputs(int64_t outputs, int64_t inputs)
{
    int64_t enough = LEAST_WEIGHTS / inputs, few = outputs / MOST_CHUNKS;
    return ((enough > few ? enough : few) / 8 + 1) * 8;
}

struct chunked_product {
    struct product product;
    int64_t per_chunk;
    float *activated; /* [rows, outputs / 2], or NULL if the product is no gated one */
    int64_t activation;
};

static void run_product(const void *context, int chunk)
{
    const struct chunked_product *c = context;
    int64_t first = chunk * c->per_chunk;
    multiply_rows(&c->product, first, least(first + c->per_chunk, c->product.matrix->outputs));
}

static void multiply(const struct matrix *matrix, const float *input, float *output, int64_t rows, bool adds)
{
    struct chunked_product c = {
        .product = {matrix, input, output, rows, matrix->inputs, matrix->outputs, adds},
        .per_chunk = chunk_outputs(matrix->outputs, matrix->inputs),
    };
    run_phase(run_product, &c, (int)((matrix->outputs + c.per_chunk - 1) / c.per_chunk));
}

/* Return x * sigmoid(s). SiLU has s = x, and GELU, in its approximation with tanh, has a polynomial. */
INLINE vector activate(vector x, int64_t activation)
{
    vector s = activation == SILU ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-s));
}

/* Compute a chunk of the gates, the same chunk of the factors that they gate, and their product. */
static void run_gated_product(const void *context, int chunk)
{
    const struct chunked_product *c = context;
    int64_t half = c->product.matrix->outputs / 2, first = chunk * c->per_chunk;
    int64_t last = least(first + c->per_chunk, half);
    multiply_rows(&c->product, first, last);
    multiply_rows(&c->product, half + first, half + last);
    for (int64_t row = 0; row < c->product.rows; row++) {
        const float *gates = c->product.output + row * 2 * half, *factors = gates + half;
        float *activated = c->activated + row * half;
        for (int64_t i = first; i < last; i += LANES) /* `half` and `first` are multiples of LANES */
            store_floats(activated + i, activate(load_floats(gates + i), c->activation) * load_floats(factors + i));
    }
}

static void multiply_gated(
    const struct matrix *matrix, const float *input, float *output, float *activated, int64_t rows, int64_t activation)
{
    int64_t half = matrix->outputs / 2;
    struct chunked_product c = {
        .product = {matrix, input, output, rows, matrix->inputs, matrix->outputs, false},
        .per_chunk = (chunk_outputs(half, 2 * matrix->inputs) + LANES - 1) / LANES * LANES,
        .activated = activated,
        .activation = activation,
    };
    run_phase(run_gated_product, &c, (int)((half + c.per_chunk - 1) / c.per_chunk));
}

/* ---- Norms and rotary embeddings ---- */

static void rms_norm(const float *input, const float *weight, float eps, float *output, int64_t width)
{
    vector squares = {0};
    for (int64_t i = 0; i < width; i += LANES)
        squares += load_floats(input + i) * load_floats(input + i);
    float factor = 1.0f / sqrtf(sum_lanes(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += LANES)
        store_floats(output + i, load_floats(input + i) * factor * load_floats(weight + i));
}

static void norm_rows(
    const float *input, const float *weight, float eps, float *output, int64_t rows, int64_t width)
{
    for (int64_t row = 0; row < rows; row++)
        rms_norm(input + row * width, weight, eps, output + row * width, width);
}

/* Rotate a head in place. Each element of its first half pairs with an element of its second half. */
static void rotate(float *head, const float *cosines, const float *sines, int64_t width)
{
    int64_t half = width / 2;
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
    int64_t number; /* of the layer */
    float *qkv;     /* [rows, heads + 2 * kv_heads, head_dim] */
    float *attended; /* [rows, heads, head_dim] */
};

/* Consecutive tokens of a KV block, and queries that attend to them. */
struct tile {
    const void *values;
    int64_t stride, tokens, head_dim;
    float scores[MOST_ROWS][TILE_TOKENS];
    float corrections[MOST_ROWS]; /* factors of the output so far */
    float *output;                /* [queries, head_dim] */
};

/* Add the values of a tile to the output, weighted by the scores. The last two arguments are constants. */
INLINE void add_values(const struct tile *t, const int format, const int queries)
{
    for (int64_t i = 0; i < t->head_dim; i += LANES) {
        vector sums[MOST_ROWS];
#pragma GCC unroll 8
        for (int q = 0; q < queries; q++)
            sums[q] = load_floats(t->output + q * t->head_dim + i) * t->corrections[q];
        for (int64_t token = 0; token < t->tokens; token++) {
            vector value = load(t->values, token * t->stride + i, format);
#pragma GCC unroll 8
            for (int q = 0; q < queries; q++)
                sums[q] += value * t->scores[q][token];
        }
#pragma GCC unroll 8
        for (int q = 0; q < queries; q++)
            store_floats(t->output + q * t->head_dim + i, sums[q]);
    }
}

static void add_values_of_queries(const struct tile *t, int64_t format, int64_t queries)
{
    if (format == FLOAT32) {
        WITH_CONSTANT_ROWS(queries, add_values, t, FLOAT32)
    } else {
        WITH_CONSTANT_ROWS(queries, add_values, t, BFLOAT16)
    }
}

/* Replace the scores of a query by their exponentials relative to the largest score so far, and return their sum. */
static float exponentiate(float *scores, int64_t tokens, float *largest, float *correction)
{
    for (int64_t token = tokens; token % LANES != 0; token++)
        scores[token] = -INFINITY;
    vector most = broadcast(*largest);
    for (int64_t token = 0; token < tokens; token += LANES) {
        vector some = load_floats(scores + token);
        most = select_lanes(some > most, some, most);
    }
    float before = *largest;
    *largest = largest_lane(most);
    *correction = exponential(broadcast(before - *largest))[0];
    vector sums = {0};
    for (int64_t token = 0; token < tokens; token += LANES) {
        vector some = exponential(load_floats(scores + token) - *largest);
        store_floats(scores + token, some);
        sums += some;
    }
    return sum_lanes(sums);
}

/* Compute the attention of at most MOST_ROWS queries that share a head of keys and values, in one pass over the cache.
 * The output and the sum of the exponentials are corrected whenever a tile contains a larger score. */
static void attend_queries(const struct step *s, int64_t row, int64_t kv_head, const float *query, float *output, int64_t queries)
{
    const struct batch *b = s->batch;
    const int64_t head_dim = s->model->head_dim, stride = s->model->kv_heads * head_dim, length = b->lengths[row];
    const int64_t *blocks = b->blocks + row * b->blocks_per_row;
    float largest[MOST_ROWS], sums[MOST_ROWS] = {0};
    for (int64_t q = 0; q < queries; q++)
        largest[q] = -INFINITY;
    memset(output, 0, sizeof(float) * queries * head_dim);
    struct tile t = {.stride = stride, .head_dim = head_dim, .output = output};
    int64_t token = length > s->layer->window ? length - s->layer->window : 0;
    for (; token < length; token += t.tokens) {
        int64_t within = token % b->block_size;
        t.tokens = least(least(b->block_size - within, length - token), TILE_TOKENS);
        int64_t place = 2 * s->number * b->cache_stride + (blocks[token / b->block_size] * b->block_size + within) * stride + kv_head * head_dim;
        t.values = address(b->cache, place + b->cache_stride, b->cache_format);
        struct matrix keys = {
            .weights = address(b->cache, place, b->cache_format),
            .outputs = t.tokens,
            .inputs = head_dim,
            .stride = stride,
            .format = b->cache_format,
        };
        struct product scores = {&keys, query, t.scores[0], queries, head_dim, TILE_TOKENS, false};
        multiply_rows(&scores, 0, t.tokens);
        for (int64_t q = 0; q < queries; q++) {
            float sum = exponentiate(t.scores[q], t.tokens, &largest[q], &t.corrections[q]);
            sums[q] = sums[q] * t.corrections[q] + sum;
        }
        add_values_of_queries(&t, b->cache_format, queries);
    }
    for (int64_t q = 0; q < queries; q++)
        for (int64_t i = 0; i < head_dim; i++)
            output[q * head_dim + i] /= sums[q];
}

/* Prepare a head of the queries or keys of a row in place. */
static void prepare_head(const struct step *s, int64_t row, int64_t head, float *values)
{
    const struct model *m = s->model;
    const float *weight = s->layer->head_norm == NULL ? NULL : s->layer->head_norm + head * m->head_dim;
    if (weight != NULL && !m->norms_late)
        rms_norm(values, weight, s->layer->head_eps, values, m->head_dim);
    rotate(values, s->batch->cosines + row * m->head_dim, s->batch->sines + row * m->head_dim, m->head_dim);
    if (weight != NULL && m->norms_late)
        rms_norm(values, weight, s->layer->head_eps, values, m->head_dim);
}

/* Store the new key and value of a row in the cache. */
static void store_token(const struct step *s, int64_t row, int64_t kv_head, const float *key, const float *value)
{
    const struct batch *b = s->batch;
    const int64_t head_dim = s->model->head_dim, token = b->lengths[row] - 1;
    int64_t block = b->blocks[row * b->blocks_per_row + token / b->block_size];
    int64_t slot = block * b->block_size + token % b->block_size;
    int64_t place = 2 * s->number * b->cache_stride + (slot * s->model->kv_heads + kv_head) * head_dim;
    for (int64_t i = 0; i < head_dim; i += LANES) {
        store(b->cache, place + i, load_floats(key + i), b->cache_format);
        store(b->cache, place + b->cache_stride + i, load_floats(value + i), b->cache_format);
    }
}

/* Compute the attention of one row to one head of keys and values, and store its new key and value. */
static void attend(const void *context, int chunk)
{
    const struct step *s = context;
    const struct model *m = s->model;
    const int64_t row = chunk / m->kv_heads, kv_head = chunk % m->kv_heads, group = m->heads / m->kv_heads;
    const int64_t first = kv_head * group;
    float *heads = s->qkv + row * (m->heads + 2 * m->kv_heads) * m->head_dim;
    float *key = heads + (m->heads + kv_head) * m->head_dim, *value = key + m->kv_heads * m->head_dim;
    prepare_head(s, row, m->heads + kv_head, key);
    store_token(s, row, kv_head, key, value);
    for (int64_t head = first; head < first + group; head++) {
        float *query = heads + head * m->head_dim;
        prepare_head(s, row, head, query);
        for (int64_t i = 0; i < m->head_dim; i++)
            query[i] *= s->layer->scaling;
    }
    for (int64_t head = first; head < first + group; head += MOST_ROWS) {
        float *output = s->attended + (row * m->heads + head) * m->head_dim;
        attend_queries(s, row, kv_head, heads + head * m->head_dim, output, least(first + group - head, MOST_ROWS));
    }
}

/* ---- The library's functions ---- */

/* Return how many numbers `model.scratch` must have. */
int64_t scratch_size(const struct model *m)
{
    int64_t widths = m->hidden + (2 * m->heads + 2 * m->kv_heads) * m->head_dim + 3 * m->intermediate;
    return MOST_ROWS * widths;
}

/* Run all layers and the final norm on `hidden`, [rows, hidden], in place. The first half of the work of a layer is
 * attention, the second half the gated MLP. */
void run_step(const struct model *m, const struct batch *batch, float *hidden, int threads)
{
    const int64_t rows = batch->rows;
    float *normed = m->scratch;
    float *qkv = normed + rows * m->hidden;
    float *attended = qkv + rows * (m->heads + 2 * m->kv_heads) * m->head_dim;
    float *gate_up = attended + rows * m->heads * m->head_dim;
    float *activated = gate_up + rows * 2 * m->intermediate;
    struct step s = {.model = m, .batch = batch, .qkv = qkv, .attended = attended};
    enter_pool(threads);
    for (; s.number < m->num_layers; s.number++) {
        const struct layer *layer = s.layer = m->layers + s.number;
        norm_rows(hidden, layer->norm, layer->eps, normed, rows, m->hidden);
        multiply(&layer->qkv, normed, qkv, rows, false);
        run_phase(attend, &s, (int)(rows * m->kv_heads));
        multiply(&layer->output, attended, hidden, rows, true);
        norm_rows(hidden, layer->mlp_norm, layer->mlp_eps, normed, rows, m->hidden);
        multiply_gated(&layer->gate_up, normed, gate_up, activated, rows, m->activation);
        multiply(&layer->down, activated, hidden, rows, true);
    }
    norm_rows(hidden, m->norm, m->eps, hidden, rows, m->hidden);
    leave_pool();
}

/* Compute a linear layer, from [rows, inputs] to [rows, outputs]. */
void run_linear(const struct matrix *matrix, const float *input, float *output, int64_t rows, int threads)
{
    enter_pool(threads);
    multiply(matrix, input, output, rows, false);
    leave_pool();
}
