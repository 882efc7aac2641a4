// A CUDA kernel file of the course from 2020 on, new-forward.cu: methods of GPUInterface, which
// copies and launches itself.

// First: files define macros such as min.
#include "entry.cuh"
#include ECE408_FILE

// With ECE408_STRIDED the file's methods have a stride as their last argument.
#ifdef ECE408_STRIDED
#define ECE408_STRIDE , stride
#else
#define ECE408_STRIDE
#endif

namespace ece408_file {
namespace {

GPUInterface gpu;

// A folder can hold a header of its own, which does not declare methods that its term does not have.
template <class Interface>
auto prolog_of(int) -> decltype(&Interface::conv_forward_gpu_prolog) {
    return &Interface::conv_forward_gpu_prolog;
}
template <class>
std::nullptr_t prolog_of(long) {
    return nullptr;
}
template <class Interface>
auto epilog_of(int) -> decltype(&Interface::conv_forward_gpu_epilog) {
    return &Interface::conv_forward_gpu_epilog;
}
template <class>
std::nullptr_t epilog_of(long) {
    return nullptr;
}

// Whether the file copies in methods of their own.
bool has_prolog() {
    return prolog_of<GPUInterface>(0) != nullptr || epilog_of<GPUInterface>(0) != nullptr;
}

// A call of the file's methods, one after the other; arrays on the host.
struct Call {
    ece408_problem problem;
    const float *x, *w;
    float *y;
    float *device_x = nullptr, *device_w = nullptr, *device_y = nullptr;

    // `method` is called with the sizes at the end of its arguments.
    template <class Method, class... Arrays>
    double timed(const char* what, Method method, Arrays... arrays) {
        if (method == nullptr)
            throw std::runtime_error(std::string(what) +
                                     " is not defined, or not with the course's parameters");
        return ece408_file::timed(what, [&] {
            if constexpr (!std::is_null_pointer_v<Method>) {
                const ece408_problem& p = problem;
                const auto size = [](int64_t n) { return static_cast<int>(n); };
                [[maybe_unused]] const int stride = size(p.stride_h);
                (gpu.*method)(arrays..., size(p.batch), size(p.filters), size(p.channels),
                              size(p.height), size(p.width), size(p.kernel_h) ECE408_STRIDE);
            }
        });
    }
    double prolog() {
        if (!has_prolog()) return 0;
        return timed("conv_forward_gpu_prolog", prolog_of<GPUInterface>(0), y, x, w, &device_y,
                     &device_x, &device_w);
    }
    double compute() {
        const auto method = &GPUInterface::conv_forward_gpu;
        if (!has_prolog()) return timed("conv_forward_gpu", method, y, x, w);
        return timed("conv_forward_gpu", method, device_y, device_x, device_w);
    }
    double epilog() {
        if (!has_prolog()) return 0;
        return timed("conv_forward_gpu_epilog", epilog_of<GPUInterface>(0), y, device_y, device_x,
                     device_w);
    }
};

// The call whose methods run one by one.
Call call;

}  // namespace
}  // namespace ece408_file

void ece408_file::compute(const ece408_problem& p, const float* x, const float* w, float* y,
                          ece408_file_seconds& seconds) {
    Call whole{p, x, w, y};
    seconds.around = whole.prolog();
    seconds.kernels = whole.compute();
    seconds.around += whole.epilog();
}

void ece408_file::compute_on_gpu(const ece408_problem& p, const float* x, const float* w,
                                 float* y) {
    Call on_gpu{p, x, w, y};
    on_gpu.device_x = const_cast<float*>(x);
    on_gpu.device_w = const_cast<float*>(w);
    on_gpu.device_y = y;
    on_gpu.compute();
}

extern "C" ECE408_EXPORT int ece408_file_has_prolog() {
    return ece408_file::has_prolog();
}

// One method alone: "prolog", which begins a call with these arrays on the host; "compute", on the
// file's own arrays on the GPU; and "epilog".
extern "C" ECE408_EXPORT int ece408_file_method(const char* name, const ece408_problem* problem,
                                                const float* x, const float* w, float* y) {
    return ece408_file::guarded([=] {
        cudaGetLastError();
        const std::string method = name;
        if (method == "prolog") {
            ece408_file::call = {*problem, x, w, y};
            ece408_file::call.prolog();
        } else if (method == "epilog") {
            ece408_file::call.epilog();
        } else {
            ece408_file::call.compute();
        }
    });
}
