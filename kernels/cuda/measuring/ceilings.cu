// Not a convolution: measures the GPU's peak rates, for benchmarks. Variables hold the operations
// of a block in one round, or 0 where the GPU lacks the unit. `never` is not written.
#include <stdint.h>

constexpr int kThreads = 256;

// Float32 multiply-adds on independent numbers.
constexpr int kNumbers = 16;
constexpr int kUnrolled = 8;
extern "C" __device__ int multiply_adds_operations = 2 * kThreads * kNumbers * kUnrolled;

extern "C" __global__ void multiply_adds(float *__restrict__ never, int rounds) {
    float v[kNumbers];
#pragma unroll
    for (int i = 0; i < kNumbers; i++) v[i] = threadIdx.x + i;
    const float scale = 0.5f + 1e-6f * threadIdx.x, offset = 1e-3f * blockIdx.x;
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int step = 0; step < kUnrolled; step++) {
#pragma unroll
            for (int i = 0; i < kNumbers; i++) v[i] = fmaf(v[i], scale, offset);
        }
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kNumbers; i++) sum += v[i];
    if (sum == -1) *never = sum;
}

// Numbers without a pattern: tensor cores that multiply zeros take less power and run faster.
__device__ uint32_t noise(uint32_t i) {
    i = (i ^ i >> 16) * 0x45d9f3bu;
    i = (i ^ i >> 16) * 0x45d9f3bu;
    return i ^ i >> 16;
}

// Products on the tensor cores, of TF32 numbers in +-1 or of fp16 pairs.
struct Tf32 {
    static __device__ uint32_t number(uint32_t i) {
        return __float_as_uint(int(noise(i)) * 0x1p-31f);
    }
};

struct Half {
    static __device__ uint32_t number(uint32_t i) { return 0x38003800u | (noise(i) & 0x83ff83ffu); }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kProducts = 16;
constexpr int kRows = 64, kColumns = 64, kWords = 8;  // words of k: 8 TF32 or 16 fp16 numbers
constexpr int kOperations = 2 * kThreads / 128 * kProducts * kRows * kColumns * kWords;

// d += a * b by four warps, b in shared memory as blocks of 8 columns x 16 bytes.
#define MULTIPLY(shape, end)                                                                      \
    asm volatile("wgmma.mma_async.sync.aligned." shape                                            \
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "       \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "    \
                 "%31}, {%32, %33, %34, %35}, %36, 1, 1, 1" end ";"                               \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]),                    \
                   "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),                    \
                   "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),               \
                   "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),               \
                   "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),               \
                   "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),               \
                   "+f"(d[30]), "+f"(d[31])                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

__device__ __forceinline__ void multiply(Tf32, float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    MULTIPLY("m64n64k8.f32.tf32.tf32", "");
}

__device__ __forceinline__ void multiply(Half, float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    MULTIPLY("m64n64k16.f32.f16.f16", ", 0");
}

template <typename Type>
__device__ void products(float *never, int rounds) {
    __shared__ __align__(128) uint32_t columns[kColumns * kWords];
    for (int i = threadIdx.x; i < kColumns * kWords; i += kThreads) columns[i] = Type::number(i);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const uint64_t address = __cvta_generic_to_shared(columns);
    const uint64_t b = address >> 4 | uint64_t(kColumns) << 16 | uint64_t(8) << 32;
    uint32_t a[4];
    for (int i = 0; i < 4; i++) a[i] = Type::number(threadIdx.x * 4 + i + 9999);
    float d[32] = {};
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < kProducts; i++) multiply(Type(), d, a, b);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    float sum = 0;
    for (int i = 0; i < 32; i++) sum += d[i];
    if (sum == -1) *never = sum;
}

#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

constexpr int kTiles = 8;
constexpr int kProducts = 2 * kTiles;
constexpr int kOperations = 2 * kThreads / 32 * kProducts * 16 * 8 * 8;  // of TF32 numbers

#define MULTIPLY(shape)                                                                           \
    asm volatile("mma.sync.aligned." shape                                                        \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"               \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

__device__ __forceinline__ void multiply(Tf32, float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
    MULTIPLY("m16n8k8.row.col.f32.tf32.tf32.f32");
}

__device__ __forceinline__ void multiply(Half, float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
    MULTIPLY("m16n8k16.row.col.f32.f16.f16.f32");
}

template <typename Type>
__device__ void products(float *never, int rounds) {
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; i++) a[i] = Type::number(threadIdx.x * 4 + i);
    for (int i = 0; i < 2; i++) b[i] = Type::number(threadIdx.x * 2 + i + 9999);
    float d[kTiles][4] = {};
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int i = 0; i < kProducts; i++) multiply(Type(), d[i % kTiles], a, b);
    }
    float sum = 0;
    for (int i = 0; i < kTiles * 4; i++) sum += d[i / 4][i % 4];
    if (sum == -1) *never = sum;
}

#else

constexpr int kOperations = 0;
template <typename Type>
__device__ void products(float *, int) {}

#endif

extern "C" __device__ int tf32_products_operations = kOperations;
extern "C" __global__ void __launch_bounds__(kThreads) tf32_products(float *__restrict__ never,
                                                                     int rounds) {
    products<Tf32>(never, rounds);
}

extern "C" __device__ int half_products_operations = 2 * kOperations;
extern "C" __global__ void __launch_bounds__(kThreads) half_products(float *__restrict__ never,
                                                                     int rounds) {
    products<Half>(never, rounds);
}
