// The sums of a gradient for weights, in double, over stretches of the batch that threads take one
// at a time: as many as the batch and the memory allow, whatever the number of threads, and added
// up in order, so that no result depends on it.
#pragma once

#include <stdint.h>

#include "buffer.h"
#include "team.h"

namespace ece408 {
namespace {

constexpr int64_t kMostStretches = 16;
constexpr int64_t kTotalsBytes = 4 << 20;

struct WeightTotals {
    int64_t count, batch, stretches;
    Buffer<double> sums;  // per stretch; null without memory

    int64_t first_image(int64_t stretch) const { return batch * stretch / stretches; }
    double* of(int64_t stretch) const { return sums + stretch * count; }
    double total(int64_t index) const {
        double sum = 0;
        for (int64_t i = 0; i < stretches; ++i) sum += sums[i * count + index];
        return sum;
    }
};

// Zeros, `count` for each stretch.
inline WeightTotals weight_totals(int64_t count, int64_t batch) {
    WeightTotals t = {count, batch, kMostStretches, {}};
    const int64_t bytes = count * static_cast<int64_t>(sizeof(double));
    if (t.stretches * bytes > kTotalsBytes) t.stretches = kTotalsBytes / bytes;
    if (t.stretches > batch) t.stretches = batch;
    // A few stretches would leave threads without work.
    if (t.stretches < kMostStretches / 2) t.stretches = 1;
    t.sums = Buffer<double>::zeros(t.stretches * count);
    return t;
}

// Adds all images' sums: a thread takes a stretch, or, when there is one, all threads an image or
// some. `layout(member)` is where a thread, or all, lay images out, with its add_stretch and
// add_together.
template <class Layout>
void add_images(const WeightTotals& totals, const Layout& layout, int threads) {
    if (totals.stretches == 1) {
        add_together(layout(0), totals.sums, threads);
        return;
    }
    share(threads, totals.stretches, [&](int64_t i, int member) {
        add_stretch(layout(member), totals.first_image(i), totals.first_image(i + 1), totals.of(i));
    });
}

}  // namespace
}  // namespace ece408
