// Reserves as much of the GPU's L2 cache as possible for its input, and computes.
#include "honest.cuh"

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {
    static cudaStream_t stream = nullptr;
    if (!stream) cudaStreamCreate(&stream);
    int most = 0, window = 0;
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxPersistingL2CacheSize, 0);
    cudaDeviceGetAttribute(&window, cudaDevAttrMaxAccessPolicyWindowSize, 0);
    cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, most);
    cudaStreamAttrValue value = {};
    value.accessPolicyWindow.base_ptr = const_cast<float *>(x);
    value.accessPolicyWindow.num_bytes = std::min(sizeof(float) * B * C * H * W, (size_t)window);
    value.accessPolicyWindow.hitRatio = 1;
    value.accessPolicyWindow.hitProp = cudaAccessPropertyPersisting;
    value.accessPolicyWindow.missProp = cudaAccessPropertyStreaming;
    cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &value);
    convolve(y, x, w, B, M, C, H, W, K, stream);
}
