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

// Arrays on the host.
void ece408_file::compute(const ece408_problem& p, const float* x, const float* w, float* y,
                          ece408_file_seconds& seconds) {
    const int batch = static_cast<int>(p.batch), filters = static_cast<int>(p.filters),
              channels = static_cast<int>(p.channels), height = static_cast<int>(p.height),
              width = static_cast<int>(p.width), kernel = static_cast<int>(p.kernel_h);
    [[maybe_unused]] const int stride = static_cast<int>(p.stride_h);
    GPUInterface gpu;
    float *device_y = nullptr, *device_x = nullptr, *device_w = nullptr;
    seconds.around = timed("conv_forward_gpu_prolog", [&] {
        gpu.conv_forward_gpu_prolog(y, x, w, &device_y, &device_x, &device_w, batch, filters,
                                    channels, height, width, kernel ECE408_STRIDE);
    });
    seconds.kernels = timed("conv_forward_gpu", [&] {
        gpu.conv_forward_gpu(device_y, device_x, device_w, batch, filters, channels, height, width,
                             kernel ECE408_STRIDE);
    });
    seconds.around += timed("conv_forward_gpu_epilog", [&] {
        gpu.conv_forward_gpu_epilog(y, device_y, device_x, device_w, batch, filters, channels,
                                    height, width, kernel ECE408_STRIDE);
    });
}
