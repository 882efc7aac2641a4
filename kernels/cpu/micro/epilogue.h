// What follows a convolution, done to vectors of its outputs as they are stored.
#pragma once

#include "api/ece408.h"
#include "micro/vector.h"

namespace ece408 {
namespace {

// The same from filter `m` and element `first` of y on.
inline ece408_finish finish_from(ece408_finish finish, int64_t m, int64_t first) {
    if (finish.factors) finish.factors += m, finish.addends += m;
    if (finish.added) finish.added += first;
    return finish;
}

struct Finish {
    const ece408_finish& of;
    const Vec lowest, highest;

    explicit Finish(const ece408_finish& of)
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
