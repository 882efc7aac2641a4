// The function that MXNet calls after its last array in lent memory is gone.
#include <mxnet/lib_api.h>

#include <atomic>

#include "callbacks.h"

namespace {

// DLPack's structure.
struct ManagedTensor {
    DLTensor tensor;
    std::atomic<int>* busy;
    void (*deleter)(ManagedTensor*);
};

}  // namespace

void ece408_memory_is_free(void* tensor) { *static_cast<ManagedTensor*>(tensor)->busy = 0; }
