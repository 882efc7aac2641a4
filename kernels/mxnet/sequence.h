// The operator `ece408_sequence` for whoever calls it without MXNet.
#pragma once

#include <mxnet/lib_api.h>

#include <cstddef>

namespace ece408 {

constexpr const char* kSequence = "ece408_sequence";

class SequenceOperator : public mxnet::ext::CustomStatefulOp {
public:
    // Of memory that it asks its OpResource for in each call.
    virtual size_t workspace_bytes() const = 0;
};

}  // namespace ece408
