// Replaces the header of this name in CPU kernel files of the course from 2020 on. Some terms have
// a stride S as well.
#pragma once

void conv_forward_cpu(float* output, const float* input, const float* mask, const int Batch,
                      const int Map_out, const int Channel, const int Height, const int Width,
                      const int K);
void conv_forward_cpu(float* output, const float* input, const float* mask, const int Batch,
                      const int Map_out, const int Channel, const int Height, const int Width,
                      const int K, const int S);
