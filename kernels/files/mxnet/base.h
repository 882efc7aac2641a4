// Replaces MXNet's header of this name in kernel files of the course to 2019: the arrays, checks
// and messages of such files, without MXNet.
#pragma once

#include <algorithm>
#include <cassert>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define MSHADOW_XINLINE inline __attribute__((always_inline)) __device__ __host__
#else
#define MSHADOW_XINLINE inline __attribute__((always_inline))
#endif
#define MSHADOW_CINLINE inline

namespace mshadow {

typedef unsigned index_t;
typedef float default_real_t;

struct cpu {
    static const bool kDevCPU = true;
    static const int kDevMask = 1;
};
struct gpu {
    static const bool kDevCPU = false;
    static const int kDevMask = 2;
};

template <int dimension>
struct Shape {
    static const int kDimension = dimension;
    index_t shape_[dimension];

    index_t& operator[](int i) { return shape_[i]; }
    const index_t& operator[](int i) const { return shape_[i]; }
    index_t Size() const {
        index_t size = 1;
        for (int i = 0; i < dimension; ++i) size *= shape_[i];
        return size;
    }
    bool operator==(const Shape& other) const {
        return std::equal(shape_, shape_ + dimension, other.shape_);
    }
    bool operator!=(const Shape& other) const { return !(*this == other); }
};

template <int dimension>
std::ostream& operator<<(std::ostream& to, const Shape<dimension>& shape) {
    to << '(';
    for (int i = 0; i < dimension; ++i) to << (i ? "," : "") << shape[i];
    return to << ')';
}

inline Shape<1> Shape1(index_t a) { return {{a}}; }
inline Shape<2> Shape2(index_t a, index_t b) { return {{a, b}}; }
inline Shape<3> Shape3(index_t a, index_t b, index_t c) { return {{a, b, c}}; }
inline Shape<4> Shape4(index_t a, index_t b, index_t c, index_t d) { return {{a, b, c, d}}; }

template <typename Device>
struct Stream {};
#ifdef __CUDACC__
template <>
struct Stream<gpu> {
    cudaStream_t stream_ = nullptr;

    static cudaStream_t GetStream(Stream<gpu>* stream) { return stream ? stream->stream_ : nullptr; }
};
#endif

// Sets all elements of an array to a number.
template <typename DType>
void ece408_fill(DType* to, size_t size, DType value, Stream<cpu>*) {
    std::fill_n(to, size, value);
}
#ifdef __CUDACC__
template <typename DType>
__global__ void ece408_fill_kernel(DType* to, size_t size, DType value) {
    const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < size) to[i] = value;
}
template <typename DType>
void ece408_fill(DType* to, size_t size, DType value, Stream<gpu>* stream) {
    const unsigned blocks = static_cast<unsigned>((size + 255) / 256);
    if (blocks) ece408_fill_kernel<<<blocks, 256, 0, Stream<gpu>::GetStream(stream)>>>(to, size, value);
}
#endif

// A contiguous array; tensor[i] is the subarray at index i of its first dimension.
template <typename Device, int dimension, typename DType = default_real_t>
struct Tensor {
    DType* dptr_ = nullptr;
    Shape<dimension> shape_{};
    index_t stride_ = 0;
    Stream<Device>* stream_ = nullptr;

    Tensor() = default;
    Tensor(DType* dptr, const Shape<dimension>& shape, Stream<Device>* stream = nullptr)
        : dptr_(dptr), shape_(shape), stride_(shape[dimension - 1]), stream_(stream) {}

    index_t size(int i) const { return shape_[i]; }
    index_t MSize() const { return shape_.Size(); }
    bool CheckContiguous() const { return true; }
    Tensor& operator=(DType value) {
        ece408_fill(dptr_, MSize(), value, stream_);
        return *this;
    }

    Tensor<Device, dimension - 1, DType> operator[](index_t i) const {
        // An index in a kernel's innermost loop: std::copy would keep it out of registers.
        Shape<dimension - 1> rest;
        for (int k = 1; k < dimension; ++k) rest.shape_[k - 1] = shape_.shape_[k];
        return {dptr_ + size_t{i} * rest.Size(), rest, stream_};
    }
};

template <typename Device, typename DType>
struct Tensor<Device, 1, DType> {
    DType* dptr_ = nullptr;
    Shape<1> shape_{};
    index_t stride_ = 0;
    Stream<Device>* stream_ = nullptr;

    Tensor() = default;
    Tensor(DType* dptr, const Shape<1>& shape, Stream<Device>* stream = nullptr)
        : dptr_(dptr), shape_(shape), stride_(shape[0]), stream_(stream) {}

    index_t size(int) const { return shape_[0]; }
    index_t MSize() const { return shape_[0]; }
    bool CheckContiguous() const { return true; }
    Tensor& operator=(DType value) {
        ece408_fill(dptr_, MSize(), value, stream_);
        return *this;
    }
    DType& operator[](index_t i) const { return dptr_[i]; }
};

}  // namespace mshadow

namespace dmlc {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Collects a message; a fatal one becomes an exception at the end of the statement.
class Message {
public:
    Message(const char* file, int line, bool fatal) : fatal_(fatal) {
        const char* const slash = strrchr(file, '/');
        text_ << (slash ? slash + 1 : file) << ':' << line << ": ";
    }
    ~Message() noexcept(false) {
        if (fatal_) throw Error(text_.str());
        std::cerr << text_.str() << std::endl;
    }
    std::ostream& stream() { return text_; }

private:
    std::ostringstream text_;
    bool fatal_;
};

}  // namespace dmlc

#define ECE408_FATAL dmlc::Message(__FILE__, __LINE__, true).stream()
#define ECE408_MESSAGE_INFO dmlc::Message(__FILE__, __LINE__, false).stream()
#define ECE408_MESSAGE_WARNING ECE408_MESSAGE_INFO
#define ECE408_MESSAGE_ERROR ECE408_MESSAGE_INFO
#define ECE408_MESSAGE_FATAL ECE408_FATAL
#define LOG(severity) ECE408_MESSAGE_##severity

#define CHECK(x) \
    if (!(x)) ECE408_FATAL << "Check failed: " #x " "
#define ECE408_CHECK(x, op, y) \
    if (!((x)op(y))) \
    ECE408_FATAL << "Check failed: " #x " " #op " " #y " (" << (x) << " vs. " << (y) << ") "
#define CHECK_EQ(x, y) ECE408_CHECK(x, ==, y)
#define CHECK_NE(x, y) ECE408_CHECK(x, !=, y)
#define CHECK_LT(x, y) ECE408_CHECK(x, <, y)
#define CHECK_LE(x, y) ECE408_CHECK(x, <=, y)
#define CHECK_GT(x, y) ECE408_CHECK(x, >, y)
#define CHECK_GE(x, y) ECE408_CHECK(x, >=, y)
#define CHECK_NOTNULL(x) (x)

#ifdef __CUDACC__
#define CUDA_CALL(call)                                                         \
    do {                                                                        \
        const cudaError_t status = (call);                                      \
        CHECK_EQ(status, cudaSuccess) << "CUDA: " << cudaGetErrorString(status); \
    } while (0)
#define MSHADOW_CUDA_CALL(call) CUDA_CALL(call)
#endif

// A file's own arrays. MXNet may pad rows, by `stride_`; this class does not.
namespace mshadow {

inline void ece408_allocate(void** to, size_t bytes, cpu) { *to = ::operator new(bytes); }
inline void ece408_free(void* array, cpu) { ::operator delete(array); }
#ifdef __CUDACC__
inline void ece408_allocate(void** to, size_t bytes, gpu) { CUDA_CALL(cudaMalloc(to, bytes)); }
inline void ece408_free(void* array, gpu) { CUDA_CALL(cudaFree(array)); }
#endif

template <typename Device, int dimension, typename DType>
void AllocSpace(Tensor<Device, dimension, DType>* array, bool = true) {
    void* place = nullptr;
    ece408_allocate(&place, sizeof(DType) * array->MSize(), Device());
    array->dptr_ = static_cast<DType*>(place);
    array->stride_ = array->size(dimension - 1);
}

template <typename Device, int dimension, typename DType>
void FreeSpace(Tensor<Device, dimension, DType>* array) {
    ece408_free(array->dptr_, Device());
    array->dptr_ = nullptr;
}

template <typename Device, typename DType, int dimension>
Tensor<Device, dimension, DType> NewTensor(const Shape<dimension>& shape, DType value, bool = true,
                                           Stream<Device>* stream = nullptr) {
    Tensor<Device, dimension, DType> array(nullptr, shape, stream);
    AllocSpace(&array);
    array = value;
    return array;
}

// An array with the lifetime of this object.
template <typename Device, int dimension, typename DType = default_real_t>
struct TensorContainer : Tensor<Device, dimension, DType> {
    explicit TensorContainer(const Shape<dimension>& shape)
        : Tensor<Device, dimension, DType>(nullptr, shape) {
        AllocSpace(this);
    }
    TensorContainer(const Shape<dimension>& shape, DType value) : TensorContainer(shape) {
        *this = value;
    }
    TensorContainer(const TensorContainer&) = delete;
    ~TensorContainer() { ece408_free(this->dptr_, Device()); }
    using Tensor<Device, dimension, DType>::operator=;
};

}  // namespace mshadow

namespace mxnet {
using mshadow::cpu;
using mshadow::gpu;
using mshadow::index_t;
}  // namespace mxnet
