// A convolution on the CPU, in the course's form from 2020 on: right, and slow. Make it faster;
// `ece408 lab check` says whether it is still right.
//
// Arrays are float32 and contiguous: input[Batch][Channel][Height][Width], mask[Map_out][Channel][K][K],
// output[Batch][Map_out][Height-K+1][Width-K+1].
#include "cpu-new-forward.h"

void conv_forward_cpu(float *output, const float *input, const float *mask, const int Batch,
                      const int Map_out, const int Channel, const int Height, const int Width,
                      const int K) {
    const int Height_out = Height - K + 1, Width_out = Width - K + 1;
    // Threads take images.
#pragma omp parallel for
    for (int b = 0; b < Batch; b++)
        for (int m = 0; m < Map_out; m++)
            for (int h = 0; h < Height_out; h++)
                for (int w = 0; w < Width_out; w++) {
                    float sum = 0;
                    for (int c = 0; c < Channel; c++)
                        for (int p = 0; p < K; p++)
                            for (int q = 0; q < K; q++)
                                sum += input[((b * Channel + c) * Height + h + p) * Width + w + q] *
                                       mask[((m * Channel + c) * K + p) * K + q];
                    output[((b * Map_out + m) * Height_out + h) * Width_out + w] = sum;
                }
}
