// The operator `ece408_sequence` for callers without MXNet.
#pragma once

#include <mxnet/lib_api.h>

#include <cstddef>

namespace ece408 {

constexpr const char* kSequence = "ece408_sequence";

class SequenceOperator : public mxnet::ext::CustomStatefulOp {
public:
    // Bytes that it requests from its OpResource in each call.
    virtual size_t workspace_bytes() const = 0;
};

}  // namespace ece408
