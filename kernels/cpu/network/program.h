/* A network's steps as a flat array, computed in order by one call. Operands are places in arrays whose
 * addresses the caller passes, so nothing in a program changes when arrays move. Float32 inside;
 * float16 and bytes are converted where POINTWISE reads and writes them. */
#ifndef ECE408_PROGRAM_H
#define ECE408_PROGRAM_H

#include "api/ece408.h"

#ifdef __cplusplus
extern "C" {
#endif

enum ece408_type { ECE408_FLOAT32, ECE408_FLOAT16, ECE408_UINT8 };

/* A place in `bases[base]`, `offset` bytes from its beginning; images are `image` elements apart, or
 * contiguous if that is 0. No array if `base` is -1. */
typedef struct ece408_operand {
    int64_t offset, image;
    int32_t base, type;
} ece408_operand;

enum ece408_step_kind {
    ECE408_CONVOLVE,      /* in: x, w, bias, added, packed (the last three may be none) */
    ECE408_PACK,          /* in: w, bias; out: packed */
    ECE408_DATA_GRADIENT, /* in: w, dy, the same place as out to add to it (or none); out: dx */
    ECE408_POINTWISE,     /* in: up to ECE408_MOST_INPUTS */
    ECE408_COPY,          /* in: x; and so below */
    ECE408_POOL,
    ECE408_REDUCE,
    ECE408_SOFTMAX,
    ECE408_LRN,
    ECE408_RESIZE,
    ECE408_WEIGHT_GRADIENT, /* in: x, dy, the same place as out to add to it (or none); out: dw */
    ECE408_POOL_GRADIENT,   /* in: dy, x, y (the last two may be none for averages); out: dx */
    ECE408_NORM,            /* in: x, beta, gamma, added (may be none); out: y; also: mean, inverse */
    ECE408_NORM_GRADIENT,   /* in: x, dy, mean, inverse, gamma, y (may be none); out: dx; also: dgamma,
                               dbeta, dadded (may be none) */
    ECE408_ONE_HOT          /* in: labels (rows, inner); out: 1 at (i, label (i, j), j), else 0 */
};

enum { ECE408_MOST_INPUTS = 6, ECE408_MOST_OPS = 24, ECE408_MOST_AXES = 6, ECE408_PACKED_HEADER = 64 };

/* Convolution by kernel number `kernel`; y = clamp(sums [+ bias] [+ added], lowest, highest). Packed
 * weights begin with a header of ECE408_PACKED_HEADER bytes, whose first int32 is 1 if PACK could pack
 * them; else (weights that are not finite) they are read in place. `strict`: sums in double. */
typedef struct ece408_convolve {
    ece408_problem problem;
    int32_t kernel, strict;
    float lowest, highest;
} ece408_convolve;

/* How an input is read for element i of y. ALIKE: element i. IMAGES: images of `outer` elements start
 * `inner` elements apart. SHARED: element i / outer * count + i / inner % count. */
enum ece408_reading_kind { ECE408_ALIKE, ECE408_IMAGES, ECE408_SHARED };
typedef struct ece408_reading {
    int64_t outer, count, inner;
    int64_t kind;
} ece408_reading;

/* Operators of one to four arguments x or a, b, c, d, with constants p and q. NaN stays NaN. */
enum ece408_term {
    ECE408_TERM_RELU, /* x <= 0 ? 0 : x, so -0 becomes 0 */
    ECE408_TERM_SIGMOID,
    ECE408_TERM_TANH,
    ECE408_TERM_SOFTSIGN, /* x / (1 + |x|) */
    ECE408_TERM_SOFTRELU, /* log(1 + exp(x)) */
    ECE408_TERM_EXP,
    ECE408_TERM_LOG,
    ECE408_TERM_SQRT,
    ECE408_TERM_SQUARE,
    ECE408_TERM_ABS,
    ECE408_TERM_NEGATIVE,
    ECE408_TERM_ERF,
    ECE408_TERM_ELU,               /* x > 0 ? x : p * (exp(x) - 1) */
    ECE408_TERM_SELU,              /* p * (x > 0 ? x : q * (exp(x) - 1)) */
    ECE408_TERM_GELU,              /* x / 2 * (1 + erf(x * p)) */
    ECE408_TERM_LEAKY,             /* x > 0 ? x : x * p */
    ECE408_TERM_PRELU,             /* a > 0 ? a : a * b */
    ECE408_TERM_CLIP,              /* x > q ? q : x < p ? p : x */
    ECE408_TERM_AFFINE,            /* p * x + q */
    ECE408_TERM_CONSTANT,          /* p */
    ECE408_TERM_ROUND_HALF,        /* to float16 and back */
    ECE408_TERM_ADD,               /* a + b, and so below */
    ECE408_TERM_SUBTRACT,
    ECE408_TERM_MULTIPLY,
    ECE408_TERM_DIVIDE,
    ECE408_TERM_PLUS,              /* x + p, and so below */
    ECE408_TERM_MINUS,
    ECE408_TERM_MINUS_FROM,        /* p - x */
    ECE408_TERM_TIMES,
    ECE408_TERM_OVER,
    ECE408_TERM_OVER_FROM,         /* p / x */
    ECE408_TERM_MAXIMUM,           /* x <= p ? p : x */
    ECE408_TERM_MINIMUM,           /* x >= p ? p : x */
    ECE408_TERM_POWER,             /* x to the power of p */
    ECE408_TERM_INVERSE_DEVIATION, /* 1 / sqrt(x + p) in double */
    ECE408_TERM_SCALED_DEVIATION,  /* b / sqrt(a + p) in double */
    ECE408_TERM_MULTIPLY_ADD,      /* a * b + c */
    ECE408_TERM_SUBTRACT_PRODUCT,  /* a - b * c */
    ECE408_TERM_SHIFTED,           /* a + (d - b) * c */
    ECE408_TERM_WHERE              /* a > 0 ? b : c */
};

/* One operator of a chain; its arguments are numbers of values: the inputs come first, then the results
 * of the operators before. The last result is stored. `p` and `q` are its constants. */
typedef struct ece408_op {
    int32_t op, arguments[4], unused;
    double p, q;
} ece408_op;

typedef struct ece408_pointwise {
    int64_t elements, per_image; /* of y; per_image counts only if y's images are apart */
    int64_t inputs, ops;
    ece408_reading readings[ECE408_MOST_INPUTS];
    ece408_op op[ECE408_MOST_OPS];
} ece408_pointwise;

/* y of up to six axes from x, the last axis first: axis k has `size` elements of y, which begin `first`
 * elements before x's `held` ones, `stride` elements apart in x. Beyond x: `fill`, the nearest, or
 * mirrored elements. */
enum ece408_border { ECE408_FILL, ECE408_NEAREST, ECE408_MIRRORED };
typedef struct ece408_strided {
    int64_t elements, border;
    int64_t size[ECE408_MOST_AXES], first[ECE408_MOST_AXES], held[ECE408_MOST_AXES], stride[ECE408_MOST_AXES];
    double fill;
} ece408_strided;

/* Windows of each of images * channels planes; `border`: an average counts the padding's zeros. The
 * operands' `image` counts. */
enum ece408_pool_kind { ECE408_LARGEST, ECE408_AVERAGE, ECE408_SUM };
typedef struct ece408_pooled {
    int64_t kind, border, images, channels;
    ece408_windows rows, columns;
} ece408_pooled;

/* Element (i, j) of y, of `outputs` elements, reduces x[(i * length + k) * inner + j], k < length; the
 * sum times `factor`, the largest element (NaN stays), or the largest number (NaN is ignored). */
enum ece408_reduce_kind { ECE408_REDUCE_SUM, ECE408_REDUCE_LARGEST, ECE408_REDUCE_LARGEST_NUMBER };
typedef struct ece408_reduced {
    int64_t kind, outputs, length, inner;
    double factor;
} ece408_reduced;

/* Softmax of `rows` rows of `length` elements, `inner` apart, of x * scale; or its logarithm. In place
 * if x and y are one place. */
typedef struct ece408_softmaxed {
    int64_t rows, length, inner, logarithm;
    double scale;
} ece408_softmaxed;

/* MXNet's LRN over `size` adjacent channels. */
typedef struct ece408_lrn {
    int64_t elements, channels, plane, size;
    double alpha, beta, knorm;
} ece408_lrn;

/* MXNet's contrib.BilinearResize2D of `planes` planes; `aligned`: corners' centres coincide. */
typedef struct ece408_resized {
    int64_t planes, height, width, out_height, out_width, aligned;
} ece408_resized;

typedef struct ece408_step {
    int64_t kind;
    ece408_operand in[ECE408_MOST_INPUTS], out, also[3]; /* `also`: further results of some kinds */
    union {
        ece408_convolve convolve; /* also PACK (problem, kernel) and gradients */
        ece408_pointwise pointwise;
        ece408_strided strided;
        ece408_pooled pooled; /* also the gradient */
        ece408_reduced reduced;
        ece408_softmaxed softmaxed; /* also ONE_HOT, the first three */
        ece408_lrn lrn;
        ece408_resized resized;
        ece408_batch batch;
    } of;
} ece408_step;

/* Computes `count` steps. `seconds`, unless null, gets each step's time. Returns ECE408_OK, or the status
 * of the step whose number is in `failed`. */
ECE408_EXPORT int ece408_run(const ece408_step* steps, int64_t count, void* const* bases, int threads,
                             int isa, double* seconds, int64_t* failed);

#ifdef __cplusplus
}
#endif

#endif
