// Packed weights of conv_fwd_oc.h, plain or transformed by Winograd F(2,3).
#pragma once

#include "conv/oc_plan.h"

namespace ece408 {
namespace {

// Calls store(component, vector) with the transformed weights of a group of taps, `step` apart.
template <class Sum, class Store>
__attribute__((always_inline)) inline void transform_group(const F23& f23, int64_t group, const Sum* g,
                                                           int64_t step, const Store& store) {
    using L = Lanes<Sum>;
    const typename L::Vec first = L::load(g);
    if (f23.is_single()) return store(0, first), store(3, first);
    const typename L::Vec second = L::load(g + step);
    const auto third = f23.has_third(group) ? L::load(g + 2 * step) : typename L::Vec{};
#pragma GCC unroll 4
    for (int t = 0; t < kComponents; ++t) store(t, transform_weight(t, first, second, third));
}

// The first weight of a block's first filter.
template <class T, class Sum>
inline const T* OcPlan<T, Sum>::first_weight(int64_t unit) const {
    return weights.first + unit / blocks * weights.group_step +
           first(unit % blocks) * weights.filter_step;
}

// Packs a block's weights as [phase][channel][tap][filter], zeros for missing filters.
template <class T, class Sum>
inline void OcPlan<T, Sum>::pack(int64_t unit, Sum* out) const {
    if (conv.winograd || conv.phases == 1)
        return pack_part(unit, 0, summed(conv.phase[0]), out);
    const int64_t block = unit % blocks, wide = vectors(block) * Lanes<Sum>::count;
    for (int64_t n = 0; n < conv.phases; ++n) {
        const Phase& phase = conv.phase[n];
        const OcTap* taps = conv.tap + phase.first_tap;
        for (int64_t c = 0; c < conv.group_channels; ++c, out += phase.taps * wide) {
            const T* from = first_weight(unit) + c * weights.channel_step;
            for (int64_t t = 0; t < phase.taps; ++t)
                interleave(from + taps[t].p * conv.kernel_w + taps[t].q,
                           weights.filter_step, filters(block), wide, 1, out + t * wide);
        }
    }
}

// Packs `count` terms of a sum from `done` on: products of the only phase as [product][filter], or
// channels of transformed weights.
template <class T, class Sum>
inline void OcPlan<T, Sum>::pack_part(int64_t unit, int64_t done, int64_t count, Sum* out) const {
    const int64_t block = unit % blocks, wide = vectors(block) * Lanes<Sum>::count;
    const T* const first = first_weight(unit);
    if (conv.winograd)
        return pack_winograd(block, first + done * weights.channel_step, count, out);
    const int64_t contiguous = weights.channel_step == conv.window ? offsets() : conv.window;
    for (int64_t t = done, some; t < done + count; t += some, out += some * wide) {
        const int64_t left = contiguous - t % contiguous;
        some = left < done + count - t ? left : done + count - t;
        interleave(first + t / contiguous * weights.channel_step + t % contiguous,
                   weights.filter_step, filters(block), wide, some, out);
    }
}

// Transforms and packs a block's weights of some channels as [component][channel][tap][filter], a
// few channels at a time.
template <class T, class Sum>
inline void OcPlan<T, Sum>::pack_winograd(int64_t block, const T* first, int64_t channels,
                                          Sum* out) const {
    constexpr int64_t kChannels = 4;
    Sum taps[kChannels * kMaxF23Taps * kOcVectors * Lanes<Sum>::count];
    const int64_t wide = vectors(block) * Lanes<Sum>::count;
    const int64_t window = conv.kernel_h * conv.kernel_w;
    const bool contiguous = weights.channel_step == window;
    for (int64_t c = 0; c < channels; c += kChannels) {
        const int64_t left = channels - c, count = left < kChannels ? left : kChannels;
        const T* from = first + c * weights.channel_step;
        for (int64_t i = 0; i < (contiguous ? 1 : count); ++i)
            interleave(from + i * weights.channel_step, weights.filter_step, filters(block),
                       wide, contiguous ? count * window : window, taps + i * window * wide);
        for (int64_t i = 0; i < count; ++i)
            transform_taps(c + i, channels, taps + i * window * wide, wide, out);
    }
}

// Transforms the taps [p][q][filter] of channel `c` of `channels` for all components.
template <class T, class Sum>
inline void OcPlan<T, Sum>::transform_taps(int64_t c, int64_t channels, const Sum* taps,
                                           int64_t wide, Sum* out) const {
    using L = Lanes<Sum>;
    Sum row[kComponents][kMaxF23Taps / 2 * kOcVectors * L::count];
    const int64_t wide_row = conv.kernel_w * wide;
    for (int64_t r = 0; r < conv.residues; ++r) {
        const Residue& residue = conv.residue[r];
        const F23& f23 = residue.f23;
        for (int64_t g = 0; g < f23.groups; ++g) {
            const int64_t tap = r + 2 * g * conv.stride_h;
            const Sum* first = taps + tap_place(tap, conv.kernel_h) * wide_row;
            for (int64_t m = 0; m < wide_row; m += L::count)
                transform_group(f23, g, first + m, conv.direction * conv.stride_h * wide_row,
                                [&](int t, typename L::Vec v) { L::store(row[t] + m, v); });
            for (int t = 0; t < kComponents; ++t)
                if (g >= f23.first_group(t))
                    transform_row(c, channels, residue.before[t] + g - f23.first_group(t), t,
                                  row[t], wide, out);
        }
    }
}

// Stores transformed kernel row `n` of row component `t`, from its columns [q][filter].
template <class T, class Sum>
inline void OcPlan<T, Sum>::transform_row(int64_t c, int64_t channels, int64_t n, int t,
                                          const Sum* columns, int64_t wide, Sum* out) const {
    using L = Lanes<Sum>;
    const int across = conv.winograd_2d ? kComponents : 1;
    Sum* to[kComponents];
    for (int u = 0; u < across; ++u) {
        const Phase& phase = conv.phase[t * across + u];
        const int64_t first = conv.winograd_2d ? conv.across.first_group(u) : 0;
        const int64_t taps = conv.winograd_2d ? conv.across.groups - first : conv.kernel_w;
        const int64_t before = c * phase.taps + n * taps - first;
        to[u] = out + (channels * phase.first_tap + before) * wide;
    }
    if (!conv.winograd_2d) {
        for (int64_t k = 0; k < conv.kernel_w; ++k)
            memcpy(to[0] + k * wide, columns + tap_place(k, conv.kernel_w) * wide,
                   static_cast<size_t>(wide) * sizeof(Sum));
        return;
    }
    for (int64_t k = 0; k < conv.across.groups; ++k) {
        const Sum* from = columns + tap_place(2 * k, conv.across.kernel) * wide;
        for (int64_t m = 0; m < wide; m += L::count)
            transform_group(conv.across, k, from + m, conv.direction * wide,
                            [&](int u, typename L::Vec v) {
                       if (k >= conv.across.first_group(u)) L::store(to[u] + k * wide + m, v);
                   });
    }
}

}  // namespace
}  // namespace ece408
