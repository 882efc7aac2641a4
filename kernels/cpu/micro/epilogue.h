// The epilogue of a convolution, applied to vectors of outputs before they are stored.
#pragma once

#include "api/ece408.h"
#include "micro/vector.h"

namespace ece408 {
namespace {

// The same for filters from `m` on and elements of y from `first` on.
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

    // Applies it to outputs of filter `m` from element `at` on.
    Vec operator()(int64_t m, int64_t at, Vec sum) const {
        sum = multiply_add(sum, broadcast(of.factors[m]), broadcast(of.addends[m]));
        if (of.added) sum = load(of.added + at) + sum;
        return bounded(sum, lowest, highest);
    }
};

}  // namespace
}  // namespace ece408
