// What follows a convolution, done to vectors of its outputs as they are stored.
#pragma once

#include "api/ece408.h"
#include "micro/vector.h"

namespace ece408 {
namespace {

// The same from filter `m` and element `first` of y on.
inline ece408_epilogue epilogue_from(ece408_epilogue epilogue, int64_t m, int64_t first) {
    if (epilogue.factors) epilogue.factors += m, epilogue.addends += m;
    if (epilogue.added) epilogue.added += first;
    return epilogue;
}

struct VectorEpilogue {
    const ece408_epilogue& of;
    const Vec lowest, highest;

    explicit VectorEpilogue(const ece408_epilogue& of)
        : of(of), lowest(broadcast(of.lowest)), highest(broadcast(of.highest)) {}

    // Outputs of filter `m`, the first of which is element `at`.
    Vec operator()(int64_t m, int64_t at, Vec sum) const {
        sum = multiply_add(sum, broadcast(of.factors[m]), broadcast(of.addends[m]));
        if (of.added) sum = load(of.added + at) + sum;
        return bounded(sum, lowest, highest);
    }
};

}  // namespace
}  // namespace ece408
