// Chooses a kernel from the layer's sizes, without measuring. `depthwise` takes groups of one
// channel, `direct` 1x1 kernels. For stride 1 in float32 the faster of `direct` and `winograd` by
// estimate, where they suit. Everything else goes to kernels for any problem: those that slide over
// images (conv_fwd_ow.h, conv_fwd_oc.h, conv_bwd_w_dot.cpp, conv_bwd_w_ic.h) or im2col.h, whichever
// is faster by estimate. Strict tasks use only kernels that sum single products in double.
//
// Estimates are in vector multiply-adds at the rate of one core.
//
// The loss by choosing: docs/results/cpu_layers.md has every kernel's time on 26 layers of networks
// (scripts/bench.py layers). On two cores with AVX-512, at batch 16, the chosen kernel has 0.98 of
// the fastest one's speed forward, 0.98 for the gradient for x and 1.00 for w (geometric means).
#include "api/choice.h"

#include "api/shape.h"
#include "conv/flat_image.h"
#include "micro/winograd_f23.h"

namespace ece408 {
namespace {

// ---- which problems a kernel suits

bool is_float32(const Task& task) { return task.element_bytes == 4; }

// A 1x1 kernel without border and groups: `direct` treats an image as one row.
bool is_row(const Shape& s) { return is_flat(s) && s.groups == 1; }

// Whether the gradient for x is a convolution of dy with a border (of kernel - 1 - pad), not of a
// part of dy.
bool has_inner_border(const Shape& s) { return s.pad_h < s.kernel_h && s.pad_w < s.kernel_w; }

bool direct_suits(const Shape& s, Direction direction, int64_t lanes) {
    const bool forward = direction == Direction::forward;
    if (is_row(s)) return s.out_height * s.out_width >= lanes;
    if (!has_unit_steps(s) || !(forward || has_inner_border(s))) return false;
    return (forward ? s.out_width : s.width) >= lanes;
}

// Kernels of height and width 3, 5 or 7.
bool winograd_suits(const Shape& s, Direction direction) {
    const auto fits = [](int64_t side) { return side == 3 || side == 5 || side == 7; };
    const bool border = direction == Direction::forward || has_inner_border(s);
    return has_unit_steps(s) && fits(s.kernel_h) && fits(s.kernel_w) && border;
}

// Groups of one channel, a square kernel of 3 or 5, and the same stride both ways: 1 or, without
// dilation, 2.
bool depthwise_suits(const Shape& s, Direction direction, int64_t lanes) {
    const bool kernel = s.kernel_h == s.kernel_w && (s.kernel_h == 3 || s.kernel_h == 5);
    const bool dilated = s.dilate_h > 1 || s.dilate_w > 1;
    const bool stride = s.stride_h == s.stride_w && s.stride_h <= (dilated ? 1 : 2);
    if (s.groups != s.channels || !kernel || !stride) return false;
    if (direction == Direction::forward) return true;
    if (direction == Direction::backward_data) return s.filters == s.channels;
    // Lanes are masked, and sums stay in registers.
    const bool has_lanes = lanes == 16 || (lanes == 8 && s.kernel_h == 3);
    return has_lanes && (is_shifted_plane(s) || !dilated);
}

// Winograd F(2,3) in one dimension: along rows if some residue modulo the stride has two taps, or
// along columns for kernels of one row without strides.
bool f23_1d_suits(const Shape& s, Direction direction) {
    const bool strided = s.stride_h > 1 || s.stride_w > 1;
    const bool columns = s.kernel_h == 1 && s.kernel_w > 1 && !strided && s.dilate_w == 1;
    const bool fits = (s.kernel_h > s.stride_h || columns) && s.kernel_h * s.kernel_w <= kMaxF23Taps;
    const bool steps = !strided || (direction == Direction::forward && s.dilate_h == 1);
    return fits && steps && s.pad_h <= (s.kernel_h - 1) * s.dilate_h &&
           s.pad_w <= (s.kernel_w - 1) * s.dilate_w;
}

// Winograd F(2,3) in two dimensions.
bool f23_2d_suits(const Shape& s, Direction direction) {
    const bool plain = s.stride_h == 1 && s.stride_w == 1 && s.dilate_w <= kMaxF23Dilation;
    return plain && is_f23_kernel(s.kernel_h) && is_f23_kernel(s.kernel_w) && f23_1d_suits(s, direction);
}

// The most memory that the patches of a forward pass may take, in images. Chosen, not measured.
constexpr double kMaxIm2col = 4;

bool im2col_suits(const Shape& s, Direction direction) {
    const double pixels = static_cast<double>(s.out_height * s.out_width);
    const double im2col = pixels * static_cast<double>(s.kernel_h * s.kernel_w);
    return direction != Direction::forward ||
           im2col <= kMaxIm2col * static_cast<double>(s.height * s.width);
}

bool suits(KernelName name, const Task& task, const Shape& s) {
    const bool weight = task.direction == Direction::backward_weight;
    switch (name) {
        case KernelName::direct:
            return is_float32(task) && !weight && direct_suits(s, task.direction, task.lanes);
        case KernelName::winograd:
            return is_float32(task) && !weight && winograd_suits(s, task.direction);
        case KernelName::depthwise:
            return is_float32(task) && depthwise_suits(s, task.direction, task.lanes);
        case KernelName::conv_fwd_ow: return !weight;
        case KernelName::conv_fwd_oc: return !weight;
        case KernelName::conv_fwd_oc_f23_1d: return !task.strict && !weight && f23_1d_suits(s, task.direction);
        case KernelName::conv_fwd_oc_f23_2d: return !task.strict && !weight && f23_2d_suits(s, task.direction);
        case KernelName::im2col: return im2col_suits(s, task.direction);
        case KernelName::conv_bwd_w_dot: return weight;
        case KernelName::conv_bwd_w_ic: return weight;
    }
    return false;
}

// ---- kernels for any problem

// Products of a sum from which on vectorising over output channels pays for transposing the result,
// without and with a stride; with a stride the alternative must reorder pixels first. With 8 or 16
// lanes sums of 4 products are enough, with 4 lanes it takes 48.
constexpr int64_t kLongSum = 128, kLongStridedSum = 4, kLongStridedSumOf4 = 48;
// Winograd F(2,3) in one dimension pays for its larger weights from this many pixels of a batch on;
// with 16 lanes also from this many pixels of an image or of a batch on; with fewer lanes from this
// many output channels of a group on.
constexpr int64_t kF23Pixels = 100, kF23Plane = 64, kF23Batch = 512, kF23Filters = 32;
// Winograd F(2,3) in two dimensions pays, with 16 lanes, from this many pixels of a batch on: with
// 3x3 taps, with more taps, and per channel; and from this many pixels of an image on: in smaller
// ones too many tiles reach beyond the border.
constexpr int64_t k2dPixels = 512, k2dPixelsLargeKernel = 1024, k2dPixelsPerChannel = 4, k2dPlane = 64;
// With kept packed weights: pixels of an image and channels from which on Winograd F(2,3) pays. For
// one image of 7x7 with 512 channels, two dimensions take 0.82 of the time without.
constexpr int64_t kPackedPlane = 49, kPackedChannels = 128;
// With a stride: the least products of a sum, and the largest ratio of products that F(2,3) may
// leave.
constexpr int64_t kStridedF23Products = 100;
constexpr double kStridedF23Ratio = 0.8;
// With 16 lanes a larger ratio is allowed, such as five sixths for 3x3 with stride 2: for sums of
// this many products, batches of this many pixels, an even number of rows, and columns that fill
// this fraction of tiles of 14.
constexpr int64_t kStridedF23LongProducts = 64 * 9, kStridedF23ManyPixels = 2048, kTileColumns = 14;
constexpr double kStridedF23LongRatio = 0.84, kFilledColumns = 0.85;
// Pixels after which conv_bwd_w_dot.cpp adds lanes up, and conv_bwd_w_ic.h adds sums to totals.
constexpr double kChunkPixels = 800, kSummedPixels = 200;
// Pixels of dy per copy of the images in conv_bwd_w_dot.cpp.
constexpr double kFilterBlock = 1 << 17;
// Filters from which on tiles of conv_bwd_w_ic.h hide the latency of their sums, and taps up to
// which a tile's totals stay in the second-level cache.
constexpr int64_t kLaneFilters = 8, kLaneTaps = 128;

// Whether to vectorise over the output channels of `s` (which may be a gradient), not its columns.
// `strided`: the problem has a stride.
bool pays_oc_lanes(const Shape& s, bool strided, int64_t lanes) {
    const int64_t of_strides = lanes == 4 ? kLongStridedSumOf4 : kLongStridedSum;
    return s.group_filters >= lanes &&
           s.group_channels * s.kernel_h * s.kernel_w >= (strided ? of_strides : kLongSum);
}

// The ratio of products that Winograd F(2,3) along rows leaves.
double f23_product_ratio(const Shape& s) {
    int64_t taps = 0;
    for (int64_t r = 0; r < s.stride_h; ++r)
        taps += f23_of_residue(s.kernel_h, s.stride_h, r, s.out_height).taps();
    return static_cast<double>(taps) / static_cast<double>(2 * s.kernel_h);
}

// Cost model of the kernels for any problem, for one group. Constants are fitted to the times of
// about 60 shapes with AVX-512 and two multiply-adds per cycle.
struct Costs {
    Sweep s;        // of the forward pass
    bool oc_lanes;  // vectorised over output channels
    bool in_double;
    int64_t lanes, panel;  // lanes of a vector of sums; taps of patches that are copied at a time
    double batch, channels, filters, taps, pixels, all_pixels, source, weights;

    Costs(const Shape& shape, bool oc_lanes, const Task& task)
        : s(forward_sweep(shape)),
          oc_lanes(oc_lanes),
          in_double(task.element_bytes == 8),
          lanes(in_double ? task.lanes / 2 : task.lanes),
          panel(2 * lanes) {
        batch = static_cast<double>(s.batch);
        channels = static_cast<double>(s.group_channels);
        filters = static_cast<double>(s.group_filters);
        taps = channels * static_cast<double>(s.kernel_h * s.kernel_w);
        pixels = static_cast<double>(s.out_height * s.out_width);
        all_pixels = batch * pixels;
        source = channels * static_cast<double>(s.height * s.width);
        weights = filters * taps;
    }
    double vectors(double numbers) const {
        return static_cast<double>(divide_up(static_cast<int64_t>(numbers), lanes));
    }
    // Copying a batch's images into the layout of the sliding kernels.
    double layout_cost() const {
        return batch * source * (s.stride_w > 2 ? 4 : s.stride_w > 1 ? 2 : 1);
    }
    // Copying a pixel's patch, in runs of taps.
    double copied(int64_t longest) const {
        return 35 * taps / static_cast<double>(s.kernel_w < longest ? s.kernel_w : longest) +
               1.5 * taps;
    }

    double forward_sliding() const {
        if (!oc_lanes)
            return batch * filters * taps * vectors(flat_image(s).length) + layout_cost() +
                   6 * weights;
        // Tiles of few pixels wait for the latency of their sums.
        const double columns = static_cast<double>(s.out_width > 4 ? s.out_width : 4);
        const double rows = static_cast<double>(s.out_height);
        return batch * (rows * columns * taps * vectors(filters) + source) + 5 * weights;
    }
    double forward_im2col() const {
        const double dots = filters * (2.5 * vectors(taps) + 16);
        return all_pixels * (dots + (is_one_window(s) ? 0.1 * taps : copied(s.kernel_w))) + weights;
    }

    double data_sliding() const {
        const double places = static_cast<double>(s.height * s.width);
        if (oc_lanes) {
            const double steps = static_cast<double>(s.stride_h * s.stride_w);
            const double window = taps / channels;
            return 0.8 * batch * filters * window * places / steps * vectors(channels) +
                   4 * steps * window;
        }
        const double row = static_cast<double>(s.width + (s.kernel_w - 1) * s.dilate_w);
        const double rows = static_cast<double>(s.height + (s.kernel_h - 1) * s.dilate_h);
        const double layout_cost = rows * row * (s.stride_h > 1 || s.stride_w > 1 ? 6 : 1);
        const double products = taps * vectors(static_cast<double>(s.height) * row);
        return batch * filters * (products + layout_cost);
    }
    double data_im2col() const {
        const double added = s.dilate_w == 1 && s.kernel_w >= 64 ? 1 : 4;
        return all_pixels * (filters * vectors(taps) + added * taps) + 3 * batch * source + weights;
    }

    // Dot products over rows padded to whole vectors, whose lanes are added up. Winograd along rows
    // of height 3 leaves two thirds of the products, in three quarters of the time with 16 lanes,
    // with a third more sums.
    double weight_dot() const {
        const double places = static_cast<double>(s.out_height * flat_image(s).row);
        const double chunks = places < kChunkPixels ? batch * places / kChunkPixels + 1
                                                    : batch * (places / kChunkPixels + 1);
        const double taps = bwd_w_uses_winograd(s, in_double) ? 2 * f23_product_ratio(s) : 1;
        // Images are copied for each block of filters, from a cache after the first time.
        const double chunk = places < kChunkPixels ? places : kChunkPixels;
        const double blocks = filters * chunk / kFilterBlock + 1;
        const double products = taps > 1 ? lanes == 16 ? 0.58 * taps : taps / 2 : 1;
        return weights * (batch * vectors(places) * products + 5 * chunks * taps + 4) +
               layout_cost() * (1 + blocks) / 2;
    }
    double weight_im2col() const {
        return all_pixels * (filters * vectors(taps) + copied(panel)) + 4 * weights;
    }

    // The fraction of a tap's outputs, along one side, whose pixel is not in the border.
    static double inside(int64_t out, int64_t kernel, int64_t stride, int64_t pad, int64_t dilate) {
        const int64_t taps = pad / dilate < kernel ? pad / dilate : kernel;
        const double all = static_cast<double>(kernel * out * stride);
        const double lost = static_cast<double>(dilate * taps * (taps + 1));
        return lost < all / 2 ? 1 - lost / all : 0.5;
    }
    // Products of transposed x and dy without borders, and totals that are stored and added. The
    // other kernels divide one image worse among threads.
    double weight_ic() const {
        const double met = inside(s.out_height, s.kernel_h, s.stride_h, s.pad_h, s.dilate_h) *
                           inside(s.out_width, s.kernel_w, s.stride_w, s.pad_w, s.dilate_w);
        const double products = all_pixels * met * filters * taps / channels * vectors(channels);
        const double chunks = all_pixels / kSummedPixels + 1;
        const double x = is_flat(s) ? all_pixels * channels * (s.stride_w > 1 ? 2 : 1) : batch * source;
        return (batch > 1 ? 0.9 : 0.8) * products + 3 * (x + all_pixels * filters) +
               weights * (6 + 0.3 * chunks);
    }

    bool im2col_is_faster(Direction direction) const {
        return direction == Direction::forward ? forward_im2col() < forward_sliding()
                                               : data_im2col() < data_sliding();
    }
    KernelName fastest_for_weight() const {
        const double sums = weight_dot(), im2col = weight_im2col();
        const bool fits = s.group_channels >= lanes && s.group_filters >= kLaneFilters &&
                          s.kernel_h * s.kernel_w <= kLaneTaps;
        if (fits && weight_ic() < (sums < im2col ? sums : im2col))
            return KernelName::conv_bwd_w_ic;
        return im2col < sums ? KernelName::im2col : KernelName::conv_bwd_w_dot;
    }
};

// Whether Winograd costs only its products, because transformed weights are kept.
bool has_packed_weights(const Task& task, const Shape& layer) {
    const bool is_large = layer.out_height * layer.out_width >= kPackedPlane;
    return task.kept && is_float32(task) && is_large && layer.group_channels >= kPackedChannels;
}

// For layers with a stride.
bool strided_f23_pays(const Task& task, const Shape& s, const Shape& layer) {
    const int64_t plane = s.out_height * s.out_width, sum = layer.group_channels * s.kernel_h * s.kernel_w;
    if (task.lanes < 8 || plane < kF23Plane || sum < kStridedF23Products) return false;
    const double ratio = f23_product_ratio(s);
    const int64_t columns = divide_up(s.out_width, kTileColumns) * kTileColumns;
    const bool fills = s.out_height % 2 == 0 && static_cast<double>(s.out_width) >=
                                                    kFilledColumns * static_cast<double>(columns);
    return ratio <= kStridedF23Ratio ||
           (task.lanes >= 16 && ratio <= kStridedF23LongRatio && fills &&
            sum >= kStridedF23LongProducts && s.batch * plane >= kStridedF23ManyPixels);
}

// For layers that are vectorised over output channels. `layer`: the problem, or its gradient as a
// layer.
bool f23_1d_pays(const Task& task, const Shape& s, const Shape& layer, bool strided) {
    const int64_t plane = s.out_height * s.out_width;
    if (!suits(KernelName::conv_fwd_oc_f23_1d, task, s)) return false;
    // With shorter vectors tiles fit rows of half the columns worse.
    if (s.kernel_h == 1 && task.lanes < 16) return false;
    if (!strided && has_packed_weights(task, layer)) return true;
    if (s.batch * plane < kF23Pixels) return false;
    if (strided) return strided_f23_pays(task, s, layer);
    if (task.lanes < 16) return layer.group_filters >= kF23Filters;
    return plane >= kF23Plane || s.batch * plane >= kF23Batch;
}

// Whether two dimensions pay for a third more weights than one. With 16 lanes products are fast, so
// reading the weights of few pixels or of large kernels takes longer.
bool f23_2d_pays(const Task& task, const Shape& s, const Shape& layer) {
    if (!suits(KernelName::conv_fwd_oc_f23_2d, task, s)) return false;
    if (has_packed_weights(task, layer)) return true;
    const int64_t plane = layer.out_height * layer.out_width, pixels = s.batch * plane;
    const int64_t least = s.kernel_h * s.kernel_w > 9 ? k2dPixelsLargeKernel : k2dPixels;
    return task.lanes < 16 || (plane >= k2dPlane && pixels >= least &&
                               pixels >= k2dPixelsPerChannel * layer.group_channels);
}

KernelName choose_for_any(const Task& task, const Shape& s) {
    const bool forward = task.direction == Direction::forward;
    const bool strided = s.stride_h > 1 || s.stride_w > 1;
    if (task.direction == Direction::backward_weight)
        return Costs(s, false, task).fastest_for_weight();
    const Shape layer = forward ? s : gradient_shape(s);
    const bool oc_lanes = pays_oc_lanes(layer, strided, task.lanes);
    if (suits(KernelName::im2col, task, s) &&
        Costs(s, oc_lanes, task).im2col_is_faster(task.direction))
        return KernelName::im2col;
    if (!oc_lanes) return KernelName::conv_fwd_ow;
    if (!f23_1d_pays(task, s, layer, strided)) return KernelName::conv_fwd_oc;
    return f23_2d_pays(task, s, layer) ? KernelName::conv_fwd_oc_f23_2d
                                       : KernelName::conv_fwd_oc_f23_1d;
}

// ---- kernels of stride 1 in float32

// Images, channels and filters from which on packing the weights of a 1x1 kernel pays, if planes
// would fill less than this fraction of the lanes: 32 images of 4x5 with 512 channels and filters
// take 3.8 ms, not 4.8.
constexpr int64_t kPacksImages = 8, kPacksChannels = 128;
constexpr double kFullLanes = 0.8;
// Pixels of a batch up to which the gradient for x of a 1x1 kernel is vectorised over its channels,
// with 16 lanes.
constexpr int64_t kShortRows = 64;
// Products of a sum up to which `direct` is faster than `conv_fwd_oc` for padded images.
constexpr int64_t kDirectPadded = 128;
// Products of a sum from which on kernels with partial sums are used for their smaller rounding
// error: for `direct`, and for each component's sum in `winograd`. They keep the relative error
// against float64 below 1e-6 (tests/backends).
constexpr int64_t kLongDirect = 1536, kLongWinograd = 256;
// Pixels of x per pixel of y from which on a window covers much of an image: the gradient for x
// would mostly sum borders, which im2col leaves out. Chosen, not measured.
constexpr int64_t kDense = 4;
// Channels of x from which on its gradient fills register tiles.
constexpr int64_t kGradientChannels = 3;
// The fraction of used lanes from which on `winograd` is faster than `conv_fwd_oc`, and the vectors
// of a filter's sums, over all images, that pay for packing its weights.
constexpr double kFilledLanes = 0.7;
constexpr int64_t kWorthPacking = 24;
// Channels from which on F(2,3) in two dimensions of `conv_fwd_oc` is faster than `winograd`, with
// 16 lanes also products of a sum; and channels from which on one dimension is, with 16 lanes.
constexpr int64_t k2dChannels = 16, k2dProducts = 576, k1dChannels = 256;

// Filters from which on there are enough to divide the gradient for w among threads.
constexpr int64_t kPlaneFilters = 32;

int64_t products(const Shape& s) { return s.channels * s.kernel_h * s.kernel_w; }

// Cost model of `direct` and `winograd` for one image: operation counts, with factors fitted to
// times with AVX-512 on one core; docs/design.md has their accuracy.
struct UnitCosts {
    const Shape& s;  // of the layer, or of the gradient as a layer
    int64_t lanes;
    F23 rows, columns;

    UnitCosts(const Shape& s, int64_t lanes)
        : s(s), lanes(lanes), rows(f23_of(s.kernel_h, s.out_height)),
          columns(f23_of(s.kernel_w, s.out_width)) {}

    // Vectors of a filter's component.
    int64_t component_vectors() const {
        return divide_up((rows.out_pairs - 1) * columns.starts() + columns.out_pairs, lanes);
    }
    // Products, and a store for each vector.
    double direct() const {
        const int64_t vectors = divide_up(s.out_height * s.out_width, lanes);
        return static_cast<double>(s.filters * vectors) *
               (1.08 * static_cast<double>(products(s)) + 3);
    }
    // Products with the sums stored between components, input transform, output transform.
    double winograd() const {
        const double taps = static_cast<double>(rows.taps() * columns.taps());
        const double sums = static_cast<double>(s.filters * component_vectors()) *
                            (1.05 * static_cast<double>(s.channels) * taps + 40);
        const int64_t components =
            s.channels * rows.starts() * divide_up(columns.starts(), lanes) * 70;
        const int64_t y = s.filters * s.out_height * divide_up(s.out_width, lanes) * 8;
        return sums + static_cast<double>(components) + static_cast<double>(y);
    }
    bool winograd_is_faster_than_oc() const {
        const int64_t vectors = component_vectors();
        return static_cast<double>(s.out_height * s.out_width) >=
                   kFilledLanes * 4 * static_cast<double>(lanes) * static_cast<double>(vectors) &&
               s.batch * vectors >= kWorthPacking;
    }
};

// `name`: the choice among kernels for any problem.
bool beats_winograd(KernelName name, const Task& task, const Shape& layer) {
    if (task.lanes < 8) return false;
    if (name == KernelName::conv_fwd_oc_f23_2d)
        return layer.channels >= k2dChannels && (task.lanes < 16 || products(layer) >= k2dProducts);
    return name == KernelName::conv_fwd_oc_f23_1d && layer.channels >= k1dChannels;
}

// `layer`: the problem, or its gradient as a layer. `direct`: whether it may be chosen.
KernelName choose_unit_steps(const Task& task, const Shape& s, const Shape& layer, bool direct) {
    direct = direct && layer.out_width >= task.lanes && products(layer) <= kLongDirect;
    if (suits(KernelName::winograd, task, s)) {
        const UnitCosts costs(layer, task.lanes);
        const bool exact =
            layer.channels * costs.rows.groups * costs.columns.groups <= kLongWinograd;
        if (exact && (direct ? costs.winograd() < costs.direct()
                             : costs.winograd_is_faster_than_oc())) {
            const KernelName name = choose_for_any(task, s);
            return beats_winograd(name, task, layer) ? name : KernelName::winograd;
        }
    }
    return direct ? KernelName::direct : choose_for_any(task, s);
}

// Whether lanes would be idle that packed weights can use. Odd tiles leave none idle; for x, where
// `direct` rotates weights, they are still slower with 16 threads.
bool is_packed(const Task& task, const Shape& s) {
    const int64_t pixels = s.out_height * s.out_width, lanes = task.lanes;
    const double all = static_cast<double>(lanes) * static_cast<double>(divide_up(pixels, lanes));
    const bool fills = task.direction == Direction::forward && odd_tiles(s, lanes) > 0;
    return !fills && static_cast<double>(pixels) < kFullLanes * all && s.batch >= kPacksImages &&
           s.channels >= kPacksChannels && s.filters >= kPacksChannels;
}

// Whether a row is so short that vectorising over filters is better. For x, weights are packed in
// memory order.
bool is_short_row(const Task& task, const Shape& s) {
    return task.lanes == 16 && task.direction == Direction::backward_data &&
           s.batch * s.out_height * s.out_width <= kShortRows && pays_oc_lanes(gradient_shape(s), false, 16);
}

KernelName choose(const Task& task, const Shape& s) {
    const bool weight = task.direction == Direction::backward_weight;
    if (s.groups > 1 && suits(KernelName::depthwise, task, s) &&
        (!weight || s.filters >= kPlaneFilters))
        return KernelName::depthwise;
    if (is_row(s) && suits(KernelName::direct, task, s) && !is_packed(task, s) &&
        !is_short_row(task, s))
        return KernelName::direct;
    if (weight || !is_float32(task) || !has_unit_steps(s)) return choose_for_any(task, s);
    const bool forward = task.direction == Direction::forward;
    const Shape layer = forward ? s : gradient_shape(s);
    const bool few = layer.filters < task.lanes || products(layer) < kDirectPadded;
    if (forward)
        return choose_unit_steps(task, s, layer, few || (s.pad_h == 0 && s.pad_w == 0));
    const bool dense = s.height * s.width >= kDense * s.out_height * s.out_width;
    if (!has_inner_border(s) || s.channels < kGradientChannels || dense)
        return choose_for_any(task, s);
    return choose_unit_steps(task, s, layer, few);
}

}  // namespace

bool suits(KernelName name, const Task& task) { return suits(name, task, derive(task.problem)); }

KernelName choose(const Task& task) { return choose(task, derive(task.problem)); }

KernelName choose_for_any(const Task& task) { return choose_for_any(task, derive(task.problem)); }

}  // namespace ece408
