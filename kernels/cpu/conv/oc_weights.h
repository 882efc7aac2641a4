// Packed weights of conv_fwd_oc.h.
#pragma once

#include "conv/oc_plan.h"

namespace ece408 {
namespace {

// Hands on a vector of weights in each domain, from those of a group's taps, that lie `step` apart.
template <class Sum, class Store>
__attribute__((always_inline)) inline void expand(const Pairs& pairs, int64_t group, const Sum* g,
                                                  int64_t step, const Store& store) {
    using L = Lanes<Sum>;
    const typename L::Vec first = L::load(g);
    if (pairs.is_single()) return store(0, first), store(3, first);
    const typename L::Vec second = L::load(g + step);
    const auto third = pairs.has_third(group) ? L::load(g + 2 * step) : typename L::Vec{};
#pragma GCC unroll 4
    for (int t = 0; t < kDomains; ++t) store(t, domain_weight(t, first, second, third));
}

// Of a block: its first filter's first weight.
template <class T, class Sum>
inline const T* DeepPlan<T, Sum>::first_weight(int64_t unit) const {
    return weights.first + unit / blocks * weights.group_step +
           first(unit % blocks) * weights.filter_step;
}

// A block's weights as [phase][channel][tap][filter], zeros for filters that do not exist.
template <class T, class Sum>
inline void DeepPlan<T, Sum>::pack(int64_t unit, Sum* out) const {
    if (deep.by_pairs || deep.phases == 1)
        return pack_part(unit, 0, summed(deep.phase[0]), out);
    const int64_t block = unit % blocks, wide = vectors(block) * Lanes<Sum>::count;
    for (int64_t n = 0; n < deep.phases; ++n) {
        const Phase& phase = deep.phase[n];
        const DeepTap* taps = deep.tap + phase.first_tap;
        for (int64_t c = 0; c < deep.group_channels; ++c, out += phase.taps * wide) {
            const T* from = first_weight(unit) + c * weights.channel_step;
            for (int64_t t = 0; t < phase.taps; ++t)
                interleave(from + taps[t].p * deep.kernel_w + taps[t].q,
                           weights.filter_step, filters(block), wide, 1, out + t * wide);
        }
    }
}

// Weights of `count` terms of a sum from `done` on: products of the only phase, as [product][filter], or
// channels of pairs.
template <class T, class Sum>
inline void DeepPlan<T, Sum>::pack_part(int64_t unit, int64_t done, int64_t count, Sum* out) const {
    const int64_t block = unit % blocks, wide = vectors(block) * Lanes<Sum>::count;
    const T* const first = first_weight(unit);
    if (deep.by_pairs)
        return pack_pairs(block, first + done * weights.channel_step, count, out);
    const int64_t together = weights.channel_step == deep.window ? offsets() : deep.window;
    for (int64_t t = done, some; t < done + count; t += some, out += some * wide) {
        const int64_t left = together - t % together;
        some = left < done + count - t ? left : done + count - t;
        interleave(first + t / together * weights.channel_step + t % together,
                   weights.filter_step, filters(block), wide, some, out);
    }
}

// A block's weights of some channels as [domain][channel][tap][filter], each the sum of up to three taps.
// A few channels at a time.
template <class T, class Sum>
inline void DeepPlan<T, Sum>::pack_pairs(int64_t block, const T* first, int64_t channels, Sum* out) const {
    constexpr int64_t kChannels = 4;
    Sum taps[kChannels * kMostPairTaps * kDeepVectors * Lanes<Sum>::count];
    const int64_t wide = vectors(block) * Lanes<Sum>::count;
    const int64_t window = deep.kernel_h * deep.kernel_w;
    const bool together = weights.channel_step == window;
    for (int64_t c = 0; c < channels; c += kChannels) {
        const int64_t left = channels - c, count = left < kChannels ? left : kChannels;
        const T* from = first + c * weights.channel_step;
        for (int64_t i = 0; i < (together ? 1 : count); ++i)
            interleave(from + i * weights.channel_step, weights.filter_step, filters(block),
                       wide, together ? count * window : window, taps + i * window * wide);
        for (int64_t i = 0; i < count; ++i)
            combine_taps(c + i, channels, taps + i * window * wide, wide, out);
    }
}

// The weights of one of `channels` channels for all domains, from its taps as [p][q][filter].
template <class T, class Sum>
inline void DeepPlan<T, Sum>::combine_taps(int64_t c, int64_t channels, const Sum* taps, int64_t wide,
                                        Sum* out) const {
    using L = Lanes<Sum>;
    Sum row[kDomains][kMostPairTaps / 2 * kDeepVectors * L::count];
    const int64_t wide_row = deep.kernel_w * wide;
    for (int64_t r = 0; r < deep.residues; ++r) {
        const Residue& residue = deep.residue[r];
        const Pairs& pairs = residue.pairs;
        for (int64_t g = 0; g < pairs.groups; ++g) {
            const int64_t tap = r + 2 * g * deep.stride_h;
            const Sum* first = taps + tap_place(tap, deep.kernel_h) * wide_row;
            for (int64_t m = 0; m < wide_row; m += L::count)
                expand(pairs, g, first + m, deep.direction * deep.stride_h * wide_row,
                       [&](int t, typename L::Vec v) { L::store(row[t] + m, v); });
            for (int t = 0; t < kDomains; ++t)
                if (g >= pairs.first_group(t))
                    combine_row(c, channels, residue.before[t] + g - pairs.first_group(t), t,
                                row[t], wide, out);
        }
    }
}

// The weights of row `n` of taps in domain `t` of rows, from its columns as [q][filter].
template <class T, class Sum>
inline void DeepPlan<T, Sum>::combine_row(int64_t c, int64_t channels, int64_t n, int t, const Sum* columns,
                                        int64_t wide, Sum* out) const {
    using L = Lanes<Sum>;
    const int across = deep.by_squares ? kDomains : 1;
    Sum* to[kDomains];
    for (int u = 0; u < across; ++u) {
        const Phase& phase = deep.phase[t * across + u];
        const int64_t first = deep.by_squares ? deep.across.first_group(u) : 0;
        const int64_t taps = deep.by_squares ? deep.across.groups - first : deep.kernel_w;
        const int64_t before = c * phase.taps + n * taps - first;
        to[u] = out + (channels * phase.first_tap + before) * wide;
    }
    if (!deep.by_squares) {
        for (int64_t k = 0; k < deep.kernel_w; ++k)
            memcpy(to[0] + k * wide, columns + tap_place(k, deep.kernel_w) * wide,
                   static_cast<size_t>(wide) * sizeof(Sum));
        return;
    }
    for (int64_t k = 0; k < deep.across.groups; ++k) {
        const Sum* from = columns + tap_place(2 * k, deep.across.kernel) * wide;
        for (int64_t m = 0; m < wide; m += L::count)
            expand(deep.across, k, from + m, deep.direction * wide,
                   [&](int u, typename L::Vec v) {
                       if (k >= deep.across.first_group(u)) L::store(to[u] + k * wide + m, v);
                   });
    }
}

}  // namespace
}  // namespace ece408
