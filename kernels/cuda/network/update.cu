// Updates: one step of an optimizer for all arrays of weights.
//
// A table in memory has the arrays, so that one launch updates all of them. A block has a chunk of
// one array, and a thread four neighbouring elements where all addresses are multiples of 16.
//
// The formulas are those of MXNet's operators on a CPU. LAMB's steps depend on norms: `update`
// adds up squares of each chunk, `scale` computes each array's step, and `apply` the weights.
#define SGD 0
#define NAG 1
#define ADAM 2
#define ADAMW 3
#define RMSPROP 4
#define LAMB 5
#ifndef RULE
#define RULE SGD
#endif
// State arrays. SGD and NAG without one have no momentum; RMSPROP with three is centered.
#ifndef STATES
#define STATES 1
#endif
// Arrays of gradients, which are added up in their order, possibly in other GPUs' memory.
#ifndef GRADIENTS
#define GRADIENTS 1
#endif

constexpr unsigned kThreads = 256, kChunk = 4096;

// Bounds that are off are infinite.
struct Constants {
    float rescale_grad, clip_gradient, momentum, beta1, beta2, epsilon, gamma1, gamma2;
    float clip_weights, eta, lower_bound, upper_bound;
    unsigned arrays, unused[3];
};

// Gradients after the first may be missing; an odd number of them makes the size a multiple of 16.
// `first` is the array's first chunk. LAMB divides the averages by `corrections`.
struct Array {
    float *weight;
    const float *gradient[GRADIENTS | 1];
    float *state[3];
    unsigned count, first;
    float lr, wd, corrections[2];
};

// NaN stays NaN.
__device__ __forceinline__ float clipped(float x, float most) {
    return x > most ? most : x < -most ? -most : x;
}

__device__ __forceinline__ float direction(const Constants &c, const Array &a, float w,
                                           const float (&s)[3]) {
    return s[0] / a.corrections[0] / (sqrtf(s[1] / a.corrections[1]) + c.epsilon) + a.wd * w;
}

__device__ __forceinline__ void step(const Constants &c, const Array &a, float &w, float g,
                                     float (&s)[3]) {
    g *= c.rescale_grad;
    if (RULE == ADAM || RULE == RMSPROP) g += a.wd * w;
    g = clipped(g, c.clip_gradient);
    if (RULE == SGD || RULE == NAG) {
        const float kept = STATES == 0 ? 0 : c.momentum * s[0];
        if (RULE == SGD) {
            s[0] = kept - a.lr * a.wd * w - a.lr * g;
            w += s[0];
        } else {
            w = w - kept + (c.momentum + 1) * (kept - a.lr * (g + a.wd * w));
            // MXNet decays the new weight here.
            s[0] = kept - a.lr * (g + a.wd * w);
        }
    } else if (RULE == RMSPROP) {
        s[0] = (1 - c.gamma1) * (g * g) + c.gamma1 * s[0];
        if (STATES == 1) {
            w -= a.lr * (g / sqrtf(s[0] + c.epsilon));
        } else {
            s[1] = (1 - c.gamma1) * g + c.gamma1 * s[1];
            s[2] = c.gamma2 * s[2] - a.lr * g / sqrtf(s[0] - s[1] * s[1] + c.epsilon);
            w += s[2];
        }
        w = clipped(w, c.clip_weights);
    } else {
        s[0] = c.beta1 * s[0] + (1 - c.beta1) * g;
        s[1] = c.beta2 * s[1] + (1 - c.beta2) * (g * g);
        const float root = sqrtf(s[1]) + c.epsilon;
        if (RULE == ADAM) w -= a.lr * s[0] / root;
        if (RULE == ADAMW) w -= c.eta * (a.lr * s[0] / root + a.wd * w);
    }
}

template <int count>
struct alignas(4 * count) Floats {
    float of[count];
};

// Changes the neighbouring elements from `at` on: of LAMB the states, not the weights.
template <int count>
__device__ __forceinline__ void change(const Constants &c, const Array &a, size_t at,
                                       double (&squares)[2]) {
    using Vector = Floats<count>;
    Vector weight = *reinterpret_cast<Vector *>(a.weight + at), state[3];
    Vector gradient = *reinterpret_cast<const Vector *>(a.gradient[0] + at);
#pragma unroll
    for (int k = 1; k < GRADIENTS; k++) {
        if (!a.gradient[k]) continue;
        const Vector other = *reinterpret_cast<const Vector *>(a.gradient[k] + at);
#pragma unroll
        for (int i = 0; i < count; i++) gradient.of[i] += other.of[i];
    }
#pragma unroll
    for (int k = 0; k < STATES; k++) state[k] = *reinterpret_cast<Vector *>(a.state[k] + at);
#pragma unroll
    for (int i = 0; i < count; i++) {
        float s[3] = {state[0].of[i], state[1].of[i], state[2].of[i]};
        step(c, a, weight.of[i], gradient.of[i], s);
#pragma unroll
        for (int k = 0; k < STATES; k++) state[k].of[i] = s[k];
        if (RULE == LAMB) {
            const double w = weight.of[i], d = direction(c, a, weight.of[i], s);
            squares[0] += w * w;
            squares[1] += d * d;
        }
    }
    if (RULE != LAMB) *reinterpret_cast<Vector *>(a.weight + at) = weight;
#pragma unroll
    for (int k = 0; k < STATES; k++) *reinterpret_cast<Vector *>(a.state[k] + at) = state[k];
}

// Returns the array of a block's chunk.
__device__ __forceinline__ Array array_of(const Array *arrays, unsigned count) {
    unsigned found = 0, end = count;
    while (end - found > 1) {
        const unsigned middle = (found + end) / 2;
        (arrays[middle].first <= blockIdx.x ? found : end) = middle;
    }
    return arrays[found];
}

// Returns the sum over the block's threads, to all of them, always in the same order.
__device__ double sum_of_block(double mine) {
    __shared__ double of_warps[kThreads / 32];
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, apart);
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
    __syncthreads();
    double sum = 0;
    for (double each : of_warps) sum += each;
    return sum;
}

extern "C" __global__ void __launch_bounds__(256)
    update(const Constants *__restrict__ constants, const Array *__restrict__ arrays,
           double2 *__restrict__ sums) {
    const Constants c = *constants;
    const Array a = array_of(arrays, c.arrays);
    const unsigned begin = (blockIdx.x - a.first) * kChunk, end = min(begin + kChunk, a.count);
    size_t addresses = size_t(a.weight);
#pragma unroll
    for (int k = 0; k < GRADIENTS; k++) addresses |= size_t(a.gradient[k]);
#pragma unroll
    for (int k = 0; k < STATES; k++) addresses |= size_t(a.state[k]);
    const unsigned scalar = addresses % 16 ? begin : end / 4 * 4;
    double squares[2] = {0, 0};
    for (unsigned i = begin + 4 * threadIdx.x; i < scalar; i += 4 * kThreads) {
        change<4>(c, a, i, squares);
    }
    for (unsigned i = scalar + threadIdx.x; i < end; i += kThreads) change<1>(c, a, i, squares);
    if (RULE != LAMB) return;
    const double weights = sum_of_block(squares[0]), directions = sum_of_block(squares[1]);
    if (threadIdx.x == 0) sums[blockIdx.x] = make_double2(weights, directions);
}

#if RULE == LAMB
// A block has an array, whose `lr` it multiplies by the norms' ratio.
extern "C" __global__ void __launch_bounds__(256)
    scale(const Constants *__restrict__ constants, Array *__restrict__ arrays,
          const double2 *__restrict__ sums) {
    Array &a = arrays[blockIdx.x];
    const unsigned end = a.first + (a.count + kChunk - 1) / kChunk;
    double weights = 0, directions = 0;
    for (unsigned i = a.first + threadIdx.x; i < end; i += kThreads) {
        weights += sums[i].x;
        directions += sums[i].y;
    }
    float norm = sqrt(sum_of_block(weights));
    const float other = sqrt(sum_of_block(directions));
    norm = norm < constants->lower_bound ? constants->lower_bound : norm;
    norm = norm > constants->upper_bound ? constants->upper_bound : norm;
    if (threadIdx.x == 0 && norm != 0 && other != 0) a.lr *= norm / other;
}

extern "C" __global__ void __launch_bounds__(256)
    apply(const Constants *__restrict__ constants, const Array *__restrict__ arrays) {
    const Constants c = *constants;
    const Array a = array_of(arrays, c.arrays);
    const unsigned begin = (blockIdx.x - a.first) * kChunk, end = min(begin + kChunk, a.count);
#pragma unroll 4
    for (unsigned i = begin + threadIdx.x; i < end; i += kThreads) {
        const float s[3] = {a.state[0][i], a.state[1][i]};
        a.weight[i] -= a.lr * direction(c, a, a.weight[i], s);
    }
}
#endif
