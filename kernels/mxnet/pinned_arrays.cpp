// What MXNet calls when it has no array any more in memory that was lent to it.
#include <mxnet/lib_api.h>

#include <atomic>

#include "callbacks.h"

namespace {

// As DLPack has it.
struct ManagedTensor {
    DLTensor tensor;
    std::atomic<int>* busy;
    void (*deleter)(ManagedTensor*);
};

}  // namespace

void ece408_memory_is_free(void* tensor) { *static_cast<ManagedTensor*>(tensor)->busy = 0; }
