// Compiled with MXNet's own headers and with MXNet's macros, so that structures have the same
// layout.
#define MSHADOW_USE_CBLAS 0
#define MSHADOW_USE_CUDA 0
#define MSHADOW_USE_MKL 0
#define MSHADOW_USE_F16C 0
#define MXNET_USE_CUDA 0
// MXNet's wheel includes oneDNN's headers if it was built with oneDNN.
#if __has_include(<mkldnn.hpp>)
#define MXNET_USE_MKLDNN 1
#endif
#include <mxnet/ndarray.h>

#include <atomic>

#include "array_handles.h"
#include "callbacks.h"

namespace {

// `NDArray::ptr_` is private, but an explicit template instantiation may name it.
template <auto ptr>
struct Memory {
    friend bool is_lent(const mxnet::NDArray& array) { return (array.*ptr)->static_data; }
};

bool is_lent(const mxnet::NDArray& array);

template struct Memory<&mxnet::NDArray::ptr_>;

// DLPack's structure.
struct ManagedTensor {
    DLTensor tensor;
    std::atomic<int>* busy;
    void (*deleter)(ManagedTensor*);
};

}  // namespace

size_t ece408::writes_to(const void* handle) {
    return static_cast<const mxnet::NDArray*>(handle)->version();
}

bool ece408::add(const void* handle, Sizes* sizes, int* device) {
    const auto& array = *static_cast<const mxnet::NDArray*>(handle);
    const mxnet::TShape& shape = array.shape();
    const bool is_dense = array.storage_type() == mxnet::kDefaultStorage;
    if (!is_dense || array.ctx().dev_type != mxnet::Context::kCPU || shape.ndim() < 0) return false;
    add(array.dtype(), shape, sizes);
    *device = array.ctx().dev_id;
    return true;
}

const void* ece408::first_cpu() {
    static const mxnet::Context context = mxnet::Context::CPU(0);
    return &context;
}

const void* ece408::run_at_once() {
    static const mxnet::FnProperty property = mxnet::FnProperty::kAsync;
    return &property;
}

int ece408_is_foreign(const void* handle) {
    const auto& array = *static_cast<const mxnet::NDArray*>(handle);
    return is_lent(array) || array.ctx().dev_type == mxnet::Context::kCPUShared ? 1 : 0;
}

void ece408_memory_is_free(void* tensor) { *static_cast<ManagedTensor*>(tensor)->busy = 0; }
